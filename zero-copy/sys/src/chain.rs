//! Errors for people.

/// An error with all its causes, in one line: `Cannot open disk.img: No such file or directory`.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::chain;

    #[derive(Debug, thiserror::Error)]
    #[error("Cannot map 0x{length:x} bytes")]
    struct MapError {
        length: u64,
        source: std::io::Error,
    }

    #[test]
    fn every_cause_is_told_once() {
        let error = MapError {
            length: 1,
            source: std::io::ErrorKind::OutOfMemory.into(),
        };
        assert_eq!(chain(&error), "Cannot map 0x1 bytes: out of memory");
    }
}
