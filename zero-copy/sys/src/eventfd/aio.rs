//! Eventfds that the kernel signals.
//!
//! Who has given us an eventfd may at any time clear its `O_NONBLOCK` and fill its counter: `write`
//! blocks then, for as long as its owner pleases, and there is no flag for a single call that
//! forbids it. The kernel itself never waits (`eventfd_signal`), and signals an eventfd of our
//! choice when an asynchronous request ends (`IOCB_FLAG_RESFD`, `io_submit(2)`): a read of no
//! bytes, which ends before `io_submit` returns.

use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// Events that are taken out of the context at a time. They say nothing.
const REAPED: u32 = 64;
/// Events that the context is asked to have room for; it has at least twice as many.
/// `fs.aio-max-nr` is a bound on those of all processes.
const ROOM: libc::c_long = 64;
/// How often a signal is tried again.
const TRIES: usize = 8;
/// `struct io_event` (`linux/aio_abi.h`).
type Event = [u64; 4];

/// `struct iocb` (`linux/aio_abi.h`), as it is where integers are little-endian.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

/// `IOCB_CMD_PREAD`.
const READ: u16 = 0;
/// `IOCB_FLAG_RESFD`.
const RESULT_FD: u32 = 1;

/// A context of asynchronous requests, for all threads of the process.
#[derive(Debug)]
pub struct Signaller {
    context: libc::c_ulong,
    /// `/dev/zero`.
    source: File,
    signals: AtomicU32,
}

fn check(result: libc::c_long) -> Result<libc::c_long, Errno> {
    if result < 0 {
        let error = io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(result)
}

impl Signaller {
    /// Sets a context up. None: this kernel has none (`CONFIG_AIO`), or keeps them from us, or as
    /// many are in use as may be (`fs.aio-max-nr`).
    pub fn new() -> Option<Self> {
        if cfg!(target_endian = "big") {
            return None;
        }
        let source = File::open("/dev/zero").ok()?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the context is written during the call.
        check(unsafe { libc::syscall(libc::SYS_io_setup, ROOM, &raw mut context) }).ok()?;
        let signaller = Self {
            context,
            source,
            signals: AtomicU32::new(0),
        };
        signaller.works().then_some(signaller)
    }

    /// Tries it: there are systems that know the calls and not the eventfd.
    fn works(&self) -> bool {
        use rustix::event::{EventfdFlags, eventfd};
        use std::os::fd::AsFd as _;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        eventfd(0, flags)
            .is_ok_and(|fd| self.signal(fd.as_fd()).is_ok() && super::drain(fd.as_fd()) == 1)
    }

    /// Adds one to an eventfd.
    ///
    /// # Errors
    /// It is none, or there is no memory.
    pub fn signal(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        if self.signals.fetch_add(1, Ordering::Relaxed) % REAPED == REAPED - 1 {
            self.reap();
        }
        let mut result = self.submit(fd);
        for _ in 0..TRIES {
            match result {
                // There is no room: what has ended takes it, and is all there, or another thread
                // has taken it out.
                Err(Errno::AGAIN) => {
                    self.reap();
                }
                Err(Errno::INTR) => {}
                other => return other,
            }
            result = self.submit(fd);
        }
        result
    }

    fn submit(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        // Descriptors are not negative.
        let number = |fd: i32| fd.cast_unsigned();
        let mut request = Request {
            opcode: READ,
            fd: number(self.source.as_raw_fd()),
            flags: RESULT_FD,
            result_fd: number(fd.as_raw_fd()),
            ..Request::default()
        };
        let mut list = [&raw mut request];
        // SAFETY: the list and the request live throughout the call, and the kernel has copied them
        // when it returns; no bytes are read.
        check(unsafe {
            libc::syscall(
                libc::SYS_io_submit,
                self.context,
                1 as libc::c_long,
                list.as_mut_ptr(),
            )
        })
        .map(drop)
    }

    /// Takes events out, so that there is room for others. Says whether there were some.
    fn reap(&self) -> bool {
        let mut events = [Event::default(); REAPED as usize];
        // SAFETY: the events are written during the call; it does not wait, as none is the least
        // that it is to return.
        let taken = check(unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0 as libc::c_long,
                libc::c_long::from(REAPED),
                events.as_mut_ptr(),
                ptr::null_mut::<libc::timespec>(),
            )
        });
        taken.is_ok_and(|taken| taken > 0)
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        // SAFETY: nobody uses it any more, and nothing is under way.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::drain;
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd as _;

    /// Many more than there is room for.
    #[test]
    fn signals_of_several_threads_are_all_counted() {
        let Some(signaller) = Signaller::new() else {
            eprintln!("skipped: there are no asynchronous requests here");
            return;
        };
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..25_000 {
                        signaller.signal(fd.as_fd()).unwrap();
                    }
                });
            }
        });
        assert_eq!(drain(fd.as_fd()), 100_000);
        // Without taking anything out in time.
        signaller.signals.store(0, Ordering::Relaxed);
        for n in 0..100_000 {
            signaller
                .submit(fd.as_fd())
                .or_else(|e| {
                    assert_eq!(e, Errno::AGAIN);
                    assert!(signaller.reap(), "after {n}");
                    signaller.submit(fd.as_fd())
                })
                .unwrap();
        }
        assert_eq!(drain(fd.as_fd()), 100_000);
        let none = File::open("/dev/null").unwrap();
        assert_eq!(signaller.signal(none.as_fd()), Err(Errno::INVAL));
    }
}
