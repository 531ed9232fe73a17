//! The daemon's log: `env_logger`, with a limit on what the floors below can be made to say.

use crate::log_limit::LogLimit;
use log::{LevelFilter, Log, Metadata, Record, SetLoggerError};

/// Libraries whose lines a guest or a VMM can cause. They do not know who it is, and share one
/// limit; what the daemons themselves say, and the floors that know, has one for each VM.
const LIMITED: [&str; 6] = [
    "farlane_sys",
    "farlane_zero_copy",
    "vhost",
    "vhost_user_backend",
    "virtio_queue",
    "vm_memory",
];

struct Limited {
    inner: env_logger::Logger,
    limit: LogLimit,
}

fn is_limited(target: &str) -> bool {
    let library = target.split("::").next().unwrap_or(target);
    LIMITED.contains(&library)
}

impl Log for Limited {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.inner.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        // Who asks for more than warnings wants all of them.
        if record.level() > LevelFilter::Info
            || !is_limited(record.target())
            || !self.inner.matches(record)
        {
            self.inner.log(record);
            return;
        }
        if let Some(suppressed) = self.limit.admit() {
            if suppressed > 0 {
                log::warn!("{suppressed} messages of the libraries were not logged");
            }
            self.inner.log(record);
        }
    }

    fn flush(&self) {
        self.inner.flush();
    }
}

/// Makes this the program's log.
///
/// # Errors
/// There is one already.
pub fn init(inner: env_logger::Logger) -> Result<(), SetLoggerError> {
    let most = inner.filter();
    log::set_boxed_logger(Box::new(Limited {
        inner,
        limit: LogLimit::new(),
    }))?;
    log::set_max_level(most);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_floors_below_are_limited_and_no_others() {
        assert!(is_limited("farlane_zero_copy::broker"));
        assert!(is_limited("vhost"));
        assert!(!is_limited("farlane_rdma_remoting::context"));
        assert!(!is_limited("farlane_daemon::control"));
    }
}
