//! Pauses that SIGINT and SIGTERM end.

use farlane_abi::width::at_most;
use std::io;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

/// Has the signals that are to end the program.
#[derive(Debug)]
pub struct Interrupt(libc::sigset_t);

impl Interrupt {
    /// From now on the signals are only noticed by [`pause`](Self::pause). To be made before there
    /// is a second thread.
    ///
    /// # Errors
    /// What `pthread_sigmask` says.
    pub fn begin() -> io::Result<Self> {
        let mut signals = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set that the other calls take.
        let (rc, signals) = unsafe {
            libc::sigemptyset(signals.as_mut_ptr());
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGTERM);
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGINT);
            let rc = libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut());
            (rc, signals.assume_init())
        };
        match rc {
            0 => Ok(Self(signals)),
            rc => Err(io::Error::from_raw_os_error(rc)),
        }
    }

    /// Sleeps until then; true when one of the signals came before.
    #[must_use]
    pub fn pause(&self, until: Instant) -> bool {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.wait(left) {
                return true;
            }
            if left == Duration::ZERO {
                return false;
            }
        }
    }

    fn wait(&self, left: Duration) -> bool {
        let timeout = libc::timespec {
            tv_sec: at_most(left.as_secs(), libc::time_t::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        // SAFETY: the set was initialised by `begin`, the timeout is a valid one, and nobody asks
        // which signal it was.
        unsafe {
            libc::sigtimedwait(&raw const self.0, std::ptr::null_mut(), &raw const timeout) > 0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_ends_a_pause() {
        // In a thread of its own: the mask is the thread's.
        let thread = std::thread::spawn(|| {
            let interrupt = Interrupt::begin().unwrap();
            assert!(!interrupt.pause(Instant::now()));
            // SAFETY: the signal is blocked in this thread, to which it goes.
            assert_eq!(unsafe { libc::raise(libc::SIGINT) }, 0);
            interrupt.pause(Instant::now() + Duration::from_secs(3600))
        });
        assert!(thread.join().unwrap());
    }
}
