//! Guest memory, segment by segment.

/// Guest memory that holds a part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes, not zero.
    pub bytes: u64,
}

/// Takes the first `bytes` out of segments, and hands them over part by part. Where there are
/// fewer, nothing has changed, and it returns `false`.
pub fn take_front(segments: &mut Vec<Segment>, bytes: u64, mut each: impl FnMut(Segment)) -> bool {
    if total(segments) < bytes {
        return false;
    }
    let mut left = bytes;
    let mut whole = 0;
    for segment in segments.iter_mut() {
        if left == 0 {
            break;
        }
        let part = left.min(segment.bytes);
        each(Segment {
            address: segment.address,
            bytes: part,
        });
        left -= part;
        if part < segment.bytes {
            segment.address = segment.address.wrapping_add(part);
            segment.bytes -= part;
            break;
        }
        whole += 1;
    }
    segments.drain(..whole);
    true
}

/// Takes the last byte out of segments: where a request's status goes.
pub fn take_last_byte(segments: &mut Vec<Segment>) -> Option<u64> {
    let last = segments.last_mut()?;
    last.bytes -= 1;
    let address = last.address.wrapping_add(last.bytes);
    if last.bytes == 0 {
        segments.pop();
    }
    Some(address)
}

/// Bytes of all segments.
#[must_use]
pub fn total(segments: &[Segment]) -> u64 {
    segments
        .iter()
        .fold(0, |sum, segment| sum.saturating_add(segment.bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn segments() -> impl Strategy<Value = Vec<Segment>> {
        let segment =
            (0..1_u64 << 40, 1..5000_u64).prop_map(|(address, bytes)| Segment { address, bytes });
        prop::collection::vec(segment, 0..8)
    }

    proptest! {
        #[test]
        fn splitting_loses_nothing(segments in segments(), cut in 0..9000_u64) {
            let mut rest = segments.clone();
            let flat = |segments: &[Segment]| -> Vec<u64> {
                segments.iter().flat_map(|s| s.address..s.address + s.bytes).collect()
            };
            let mut front = Vec::new();
            if take_front(&mut rest, cut, |part| front.push(part)) {
                prop_assert_eq!(total(&front), cut);
                let both = [flat(&front), flat(&rest)].concat();
                prop_assert_eq!(both, flat(&segments));
            } else {
                prop_assert!(total(&segments) < cut && rest == segments && front.is_empty());
            }
        }

        #[test]
        fn the_status_is_the_last_byte(segments in segments()) {
            let mut rest = segments.clone();
            let last = segments.last().map(|s| s.address + s.bytes - 1);
            prop_assert_eq!(take_last_byte(&mut rest), last);
            prop_assert_eq!(total(&rest), total(&segments).saturating_sub(1));
            prop_assert!(rest.iter().all(|s| s.bytes > 0));
        }
    }
}
