//! `FARLANE_IO_TRACE`: a line a decision, in the format of [`crate::plan::trace`].

use crate::config::TRACE_VARIABLE;
use crate::files::OpenFile;
use crate::log;
use crate::plan::trace::{Decision, Piece, Why};
use farlane_abi::width::to_u64;
use farlane_transport::guard::{Guarded, Kind};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

static FILE: OnceLock<Option<Trace>> = OnceLock::new();

/// The file that decisions are written to.
#[derive(Debug)]
struct Trace(Guarded);

impl Trace {
    fn open(path: &std::ffi::OsStr) -> rustix::io::Result<Self> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))?;
        Ok(Self(Guarded::new(fd, Kind::Inherited)))
    }

    fn write(&self, line: &str) {
        if let Some(fd) = self.0.enter().filter(|_| self.0.is_intact()) {
            let _ = rustix::io::write(&fd, line.as_bytes());
        }
    }
}

fn file() -> Option<&'static Trace> {
    FILE.get_or_init(|| {
        let path = std::env::var_os(TRACE_VARIABLE).filter(|path| !path.is_empty())?;
        match Trace::open(&path) {
            Ok(trace) => Some(trace),
            Err(error) => {
                let path = path.to_string_lossy();
                log::once(&format!("The trace {path} cannot be written: {error}"));
                None
            }
        }
    })
    .as_ref()
}

/// Whether decisions are traced. The first call opens the file.
pub fn is_on() -> bool {
    file().is_some()
}

/// What the router has to say of a call.
#[derive(Debug)]
pub(crate) struct CallReport {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) cached: Option<u64>,
    pub(crate) why: Why,
}

/// The beginning of a call.
#[derive(Debug)]
pub(crate) struct CallStart {
    wall: SystemTime,
    clock: Instant,
}

impl CallStart {
    /// Now, if decisions are traced.
    pub(crate) fn now() -> Option<Self> {
        is_on().then(|| Self {
            wall: SystemTime::now(),
            clock: Instant::now(),
        })
    }

    /// Writes the line of a call.
    pub(crate) fn ended(
        self,
        call: &str,
        opened: &OpenFile,
        (offset, length): (Option<u64>, u64),
        result: Result<usize, Errno>,
        account: CallReport,
    ) {
        let Some(file) = file() else { return };
        let micros = |duration: Duration| {
            duration.as_secs() * 1_000_000 + u64::from(duration.subsec_micros())
        };
        let (major, minor) = opened.file.id.device_number();
        let path = rustix::fs::readlink(format!("/proc/self/fd/{}", opened.fd), Vec::new());
        let decision = Decision {
            time_us: micros(self.wall.duration_since(UNIX_EPOCH).unwrap_or_default()),
            took_us: micros(self.clock.elapsed()),
            thread: rustix::thread::gettid().as_raw_pid().cast_unsigned(),
            call: call.into(),
            file: path.map_or_else(
                |_| String::new(),
                |path| path.to_string_lossy().into_owned(),
            ),
            device: format!("{major}:{minor}"),
            inode: opened.file.id.inode,
            offset,
            length,
            result: match result {
                Ok(bytes) => to_u64(bytes).cast_signed(),
                Err(error) => -i64::from(error.raw_os_error()),
            },
            cached: account.cached,
            pieces: account.pieces,
            why: account.why,
        };
        if let Ok(line) = decision.line() {
            file.write(&line);
        }
    }
}
