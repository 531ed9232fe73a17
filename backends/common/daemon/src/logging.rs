//! The daemon's log: `env_logger`, with a limit on what the floors below can be made to say.

use crate::log_limit::LogLimit;
use crate::terminal;
use env_logger::fmt::Formatter;
use log::{Level, LevelFilter, Log, Metadata, Record, SetLoggerError};
use std::io::Write as _;
use std::sync::{OnceLock, PoisonError, RwLock};

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
    inner: RwLock<env_logger::Logger>,
    limit: LogLimit,
}

/// The program's log, where there is one.
static LOG: OnceLock<Limited> = OnceLock::new();

fn is_limited(target: &str) -> bool {
    let library = target.split("::").next().unwrap_or(target);
    LIMITED.contains(&library)
}

impl Log for Limited {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        // Who asks for more than warnings wants all of them.
        if record.level() > LevelFilter::Info
            || !is_limited(record.target())
            || !inner.matches(record)
        {
            inner.log(record);
            return;
        }
        if let Some(suppressed) = self.limit.admit() {
            if suppressed > 0 {
                let what = format_args!("{suppressed} messages of the libraries were not logged");
                let mut own = Record::builder();
                own.level(Level::Warn).target(module_path!()).args(what);
                inner.log(&own.build());
            }
            inner.log(record);
        }
    }

    fn flush(&self) {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.flush();
    }
}

/// A log to standard error of what is at least of this level, or of what `RUST_LOG` says.
pub(crate) fn of_level(level: LevelFilter) -> env_logger::Logger {
    let environment = env_logger::Env::default().default_filter_or(level.as_str());
    let mut builder = env_logger::Builder::from_env(environment);
    if is_journal() {
        builder.format(write_to_journal);
    }
    builder
        // Has a line for whatever a guest does wrong with its queues, as often as it does.
        .filter_module("virtio_queue", LevelFilter::Off)
        .build()
}

/// Makes this the program's log.
///
/// # Errors
/// There is one already.
pub fn init(inner: env_logger::Logger) -> Result<(), SetLoggerError> {
    let most = inner.filter();
    let limited = LOG.get_or_init(|| Limited {
        inner: RwLock::new(inner),
        limit: LogLimit::new(),
    });
    log::set_logger(limited)?;
    log::set_max_level(most);
    Ok(())
}

/// The program's log is of this level from now on, where `RUST_LOG` is not set.
pub(crate) fn set_level(level: LevelFilter) {
    if let Some(limited) = LOG.get() {
        let other = of_level(level);
        let most = other.filter();
        let mut inner = limited
            .inner
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *inner = other;
        drop(inner);
        log::set_max_level(most);
    }
}

/// Whether standard error is a stream of the journal, which has times of its own, and priorities
/// (`JOURNAL_STREAM` of systemd.exec(5)).
pub(crate) fn is_journal() -> bool {
    let stat = rustix::fs::fstat(std::io::stderr());
    let named = std::env::var("JOURNAL_STREAM");
    matches!((stat, named), (Ok(stat), Ok(named)) if named == stream_of(&stat))
}

fn stream_of(stat: &rustix::fs::Stat) -> String {
    format!("{}:{}", stat.st_dev, stat.st_ino)
}

/// A record as the journal reads it: each line begins with its priority (sd-daemon(3)).
pub(crate) fn write_to_journal(out: &mut Formatter, record: &Record<'_>) -> std::io::Result<()> {
    let priority = match record.level() {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    };
    let text = format!("{}: {}", record.target(), record.args());
    text.lines()
        .try_for_each(|line| writeln!(out, "<{priority}>{line}"))
}

/// Prints why a program ends, after its name: an error, where the journal reads it. What others
/// have said may be in it.
pub(crate) fn print_failure(program: &str, error: &anyhow::Error) {
    let priority = if is_journal() { "<3>" } else { "" };
    let text = terminal::message(&format!("{program}: {error:#}"));
    for line in text.lines() {
        eprintln!("{priority}{line}");
    }
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

    #[test]
    fn the_journal_has_priorities_and_is_known_by_its_number() {
        use std::process::Command;
        const CHILD: &str = "FARLANE_TEST_JOURNAL";
        if std::env::var_os(CHILD).is_some() {
            let is_journal = is_journal();
            let mut builder = env_logger::Builder::new();
            if is_journal {
                builder.format(write_to_journal);
            }
            init(builder.filter_level(LevelFilter::Info).build()).unwrap();
            log::warn!("two\nlines");
            log::info!("one");
            print_failure("daemon", &anyhow::anyhow!("it\nends\u{1b}"));
            return;
        }
        let log = tempfile::NamedTempFile::new().unwrap();
        let stat = rustix::fs::fstat(log.as_file()).unwrap();
        let run = |stream: String| {
            let name = "logging::tests::the_journal_has_priorities_and_is_known_by_its_number";
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--nocapture"])
                .env(CHILD, "1")
                .env("JOURNAL_STREAM", stream)
                .stderr(log.reopen().unwrap())
                .status();
            assert!(status.unwrap().success());
            std::fs::read_to_string(log.path()).unwrap()
        };
        let target = module_path!();
        let said = format!(
            "<4>{target}: two\n<4>lines\n<6>{target}: one\n\
             <3>daemon: it\n<3>ends\\u{{1b}}\n"
        );
        assert_eq!(run(stream_of(&stat)), said);
        let said = run("1:1".to_owned());
        assert!(said.contains(" WARN ") && !said.starts_with('<'), "{said}");
        assert!(said.ends_with("\ndaemon: it\nends\\u{1b}\n"), "{said}");
    }
}
