//! Begin and end of a daemon.

use crate::eventfd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why a daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Somebody asked for it: exit code 0.
    Asked,
    /// A part that it cannot do without has failed, see [`Stopper::fail`].
    Failed,
}

/// Turns SIGTERM and SIGINT into a return from [`wait`](Self::wait). SIGHUP is nothing to a daemon:
/// the terminal that it was started from may close, and there is no configuration to be read again.
#[derive(Debug)]
pub struct Lifecycle {
    signals: libc::sigset_t,
    stopper: Stopper,
}

/// Lets a thread end the daemon.
#[derive(Clone, Debug)]
pub struct Stopper {
    failed: Arc<AtomicBool>,
}

impl Stopper {
    /// Ends the daemon with a failure, because `why`.
    pub fn fail(&self, why: &dyn std::fmt::Display) {
        log::error!("{why}");
        self.failed.store(true, Ordering::Release);
        self.end();
    }

    /// Ends the daemon, as a signal does.
    pub fn end(&self) {
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM);
    }
}

impl Lifecycle {
    /// The first thing that a daemon does, before it has a second thread: all threads inherit that
    /// the signals are blocked.
    ///
    /// Files and sockets that the daemon makes from now on are its user's alone. A mapped file that
    /// its owner shrinks ends the daemon no more, see [`farlane_zero_copy::fault`]. An eventfd of a
    /// VMM holds up nobody who signals it, see [`eventfd::install`]. A panic of any thread does,
    /// see [`crate::panics`].
    ///
    /// # Errors
    /// When the signals cannot be blocked or handled.
    pub fn begin() -> io::Result<Self> {
        crate::panics::abort_on_panic();
        farlane_zero_copy::fault::install()?;
        eventfd::install();
        rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
        let mut signals = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set that the other calls take; SIG_IGN is a valid
        // disposition, and no handler of anybody else is replaced at this point.
        let (rc, signals) = unsafe {
            libc::sigemptyset(signals.as_mut_ptr());
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGTERM);
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGINT);
            // A peer that hangs up is an error of that connection.
            libc::signal(libc::SIGPIPE, libc::SIG_IGN);
            libc::signal(libc::SIGHUP, libc::SIG_IGN);
            let rc = libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut());
            (rc, signals.assume_init())
        };
        if rc != 0 {
            return Err(io::Error::from_raw_os_error(rc));
        }
        Ok(Self {
            signals,
            stopper: Stopper {
                failed: Arc::default(),
            },
        })
    }

    /// A handle with which a thread can end the daemon.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Sleeps until the daemon is to end.
    #[must_use]
    pub fn wait(&self) -> Ending {
        let mut signal = 0;
        // SAFETY: the set was initialised by `begin`; `signal` is writable.
        while unsafe { libc::sigwait(&raw const self.signals, &raw mut signal) } != 0 {}
        if self.stopper.failed.load(Ordering::Acquire) {
            return Ending::Failed;
        }
        log::info!("Ending on signal {signal}");
        Ending::Asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Signal, getpid, kill_process};
    use std::process::Command;

    /// Says that `child` is to be a daemon: what it does to signals is the whole process's, so it
    /// has one of its own.
    const DAEMON: &str = "FARLANE_TEST_LIFECYCLE";

    #[test]
    fn a_hang_up_ends_nobody_and_a_request_to_end_does() {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "lifecycle::tests::child"])
            .env(DAEMON, "1")
            .output()
            .unwrap()
            .status;
        assert!(status.success(), "{status}");
    }

    #[test]
    fn child() {
        if std::env::var(DAEMON).is_err() {
            return;
        }
        let lifecycle = Lifecycle::begin().unwrap();
        kill_process(getpid(), Signal::HUP).unwrap();
        // To this thread: those of the test harness do not know that the signal is blocked.
        // SAFETY: it is blocked, so that nothing happens before somebody waits for it.
        assert_eq!(unsafe { libc::raise(libc::SIGTERM) }, 0);
        assert_eq!(lifecycle.wait(), Ending::Asked);
    }
}
