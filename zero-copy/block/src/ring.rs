//! The `io_uring` of a worker: transfers, and the one place where it waits.

use crate::engine::Slot;
use io_uring::types::{Fd, Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// Submissions between two system calls.
const ENTRIES: u32 = 256;
/// Completions that the kernel can have ready: twice what can be in flight.
const COMPLETIONS: u32 = 4096;
/// How long memory of closed rings is waited for, and how often it is asked for.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(2);
/// How often in a row an operation may be said not to have been begun. What the kernel means by
/// that is over in some of them: more are those of a file that never says anything else.
const MAX_REPEATS: u16 = 100;
/// Marks completions of kicks: this and those above.
const KICKS: u64 = u64::MAX - 7;
/// `BLOCK_URING_CMD_DISCARD` of linux/blkdev.h, `_IO(0x12, 0)`.
const BLOCK_DISCARD: u32 = 0x1200;
/// Most eventfds that wake a ring.
const MAX_KICKS: usize = 8;

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An eventfd was written.
    Kick,
    /// An operation has ended.
    Done {
        /// Its place.
        slot: Slot,
        /// Its result: negative for an error number.
        result: i32,
    },
}

/// How blocks are given back or zeroed (`fallocate(2)`), by preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallocate {
    /// Zeroed where they are.
    ZeroRange,
    /// Given back; they read as zeroes.
    PunchHole,
}

impl Fallocate {
    fn mode(self) -> i32 {
        libc::FALLOC_FL_KEEP_SIZE
            | match self {
                Self::ZeroRange => libc::FALLOC_FL_ZERO_RANGE,
                Self::PunchHole => libc::FALLOC_FL_PUNCH_HOLE,
            }
    }
}

/// An `io_uring`, used by one thread.
pub struct Ring {
    ring: IoUring,
    kicks: Vec<Kick>,
    /// Submissions that the kernel has not been told of.
    queued: usize,
}

struct Kick {
    fd: OwnedFd,
    is_armed: bool,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("queued", &self.queued)
            .finish_non_exhaustive()
    }
}

/// Opens one. Of a process without `CAP_IPC_LOCK` the kernel counts the ring as locked memory
/// (`RLIMIT_MEMLOCK`), until some time after it was closed: so what is lacking now may be there
/// soon.
fn open() -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_cqsize(COMPLETIONS).setup_clamp();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let opened = builder
            .clone()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .build(ENTRIES)
            // Before Linux 6.0.
            .or_else(|_| builder.build(ENTRIES));
        match opened {
            Err(e) if e.raw_os_error() == Some(libc::ENOMEM) && Instant::now() < deadline => {
                std::thread::sleep(PAUSE);
            }
            opened => return opened,
        }
    }
}

impl Ring {
    /// A ring for the calling thread over these files (-1 for none), woken by `kicks`, up to eight
    /// eventfds that do not block.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(files: &[RawFd], kicks: &[BorrowedFd<'_>]) -> io::Result<Self> {
        if kicks.len() > MAX_KICKS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let ring = open()?;
        ring.submitter().register_files(files)?;
        let kicks = kicks.iter().map(|kick| {
            kick.try_clone_to_owned().map(|fd| Kick {
                fd,
                is_armed: false,
            })
        });
        let mut ring = Self {
            ring,
            kicks: kicks.collect::<io::Result<_>>()?,
            queued: 0,
        };
        ring.arm_kicks()?;
        Ok(ring)
    }

    /// Has operations of file number `index` that are queued from now on mean another file. Those
    /// under way keep theirs.
    ///
    /// # Errors
    /// What the system says.
    pub fn replace_file(&mut self, index: u32, file: RawFd) -> io::Result<()> {
        // The kernel looks numbers up when it is told of an operation.
        self.submit()?;
        if self.queued > 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let updated = self
            .ring
            .submitter()
            .register_files_update(index, &[file])?;
        if updated == 1 {
            Ok(())
        } else {
            Err(io::ErrorKind::InvalidInput.into())
        }
    }

    fn arm_kicks(&mut self) -> io::Result<()> {
        let events = u32::try_from(libc::POLLIN).map_err(io::Error::other)?;
        for index in 0..self.kicks.len() {
            let Some(kick) = self.kicks.get_mut(index).filter(|k| !k.is_armed) else {
                continue;
            };
            kick.is_armed = true;
            // Once, and armed anew before each wait: it then looks at the eventfd itself, so that a
            // kick from before is not missed.
            let entry = opcode::PollAdd::new(Fd(kick.fd.as_raw_fd()), events).build();
            let kick = u64::try_from(index).map_err(io::Error::other)?;
            // SAFETY: it refers to no memory.
            unsafe { self.push(entry, KICKS + kick) }?;
        }
        Ok(())
    }

    /// # Safety
    /// What the entry refers to lives until its completion has been taken.
    unsafe fn push(&mut self, entry: squeue::Entry, user_data: u64) -> io::Result<()> {
        let entry = entry.user_data(user_data);
        if self.ring.submission().is_full() {
            self.submit()?;
        }
        // SAFETY: as the caller promises.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        self.queued += 1;
        Ok(())
    }

    /// Reads or writes a file at `offset`.
    ///
    /// # Errors
    /// What the system says.
    ///
    /// # Safety
    /// The vectors and the memory that they name live until the completion has been taken.
    pub unsafe fn transfer(
        &mut self,
        file: u32,
        write: Option<Durable>,
        iovecs: &[libc::iovec],
        offset: u64,
        slot: Slot,
    ) -> io::Result<()> {
        let flags = match write {
            Some(Durable(true)) => libc::RWF_DSYNC,
            _ => 0,
        };
        let count = u32::try_from(iovecs.len()).map_err(io::Error::other)?;
        let single = match iovecs {
            [one] => u32::try_from(one.iov_len).ok().map(|n| (one.iov_base, n)),
            _ => None,
        };
        let entry = match (single, write.is_some()) {
            (Some((base, length)), false) => opcode::Read::new(Fixed(file), base.cast(), length)
                .offset(offset)
                .build(),
            (Some((base, length)), true) => opcode::Write::new(Fixed(file), base.cast(), length)
                .offset(offset)
                .rw_flags(flags)
                .build(),
            (None, false) => opcode::Readv::new(Fixed(file), iovecs.as_ptr(), count)
                .offset(offset)
                .build(),
            (None, true) => opcode::Writev::new(Fixed(file), iovecs.as_ptr(), count)
                .offset(offset)
                .rw_flags(flags)
                .build(),
        };
        // SAFETY: as the caller promises.
        unsafe { self.push(entry, slot.0.into()) }
    }

    /// Writes bytes that are never anything else, as zeroes.
    ///
    /// # Errors
    /// What the system says.
    pub fn write_static(
        &mut self,
        file: u32,
        bytes: &'static [u8],
        offset: u64,
        slot: Slot,
    ) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        let entry = opcode::Write::new(Fixed(file), bytes.as_ptr(), length)
            .offset(offset)
            .build();
        // SAFETY: the bytes live for ever, and are only read.
        unsafe { self.push(entry, slot.0.into()) }
    }

    /// Makes what was written to a file durable.
    ///
    /// # Errors
    /// What the system says.
    pub fn sync(&mut self, file: u32, slot: Slot) -> io::Result<()> {
        let entry = opcode::Fsync::new(Fixed(file))
            .flags(FsyncFlags::DATASYNC)
            .build();
        // SAFETY: it refers to no memory.
        unsafe { self.push(entry, slot.0.into()) }
    }

    /// Zeroes or gives back bytes of a file.
    ///
    /// # Errors
    /// What the system says.
    pub fn fallocate(
        &mut self,
        file: u32,
        how: Fallocate,
        offset: u64,
        length: u64,
        slot: Slot,
    ) -> io::Result<()> {
        let entry = opcode::Fallocate::new(Fixed(file), length)
            .offset(offset)
            .mode(how.mode())
            .build();
        // SAFETY: it refers to no memory.
        unsafe { self.push(entry, slot.0.into()) }
    }

    /// Gives back blocks of a block device, as `BLKDISCARD` does: they may read as anything then. A
    /// kernel before Linux 6.12 says that it cannot (`EOPNOTSUPP`, or `EINVAL` where it is still
    /// older).
    ///
    /// # Errors
    /// What the system says.
    pub fn discard(&mut self, file: u32, offset: u64, length: u64, slot: Slot) -> io::Result<()> {
        // The length stands where the command's own bytes begin.
        let mut command = [0; 16];
        command[..8].copy_from_slice(&length.to_ne_bytes());
        let entry = opcode::UringCmd16::new(Fixed(file), BLOCK_DISCARD)
            .addr(Some(offset))
            .cmd(command)
            .build();
        // SAFETY: it refers to no memory.
        unsafe { self.push(entry, slot.0.into()) }
    }

    /// Tells the kernel of what was queued, if anything was, and lets it tell of what has ended.
    ///
    /// # Errors
    /// What the system says.
    pub fn submit(&mut self) -> io::Result<()> {
        if self.queued == 0 && !self.ring.submission().taskrun() {
            return Ok(());
        }
        match self.ring.submit() {
            Ok(_) => {
                self.queued = 0;
                Ok(())
            }
            // Completions have to be taken, or memory is short: again in the next turn.
            Err(e) if is_temporary(&e) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Waits for an event, for at most `limit`.
    ///
    /// # Errors
    /// What the system says.
    pub fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.arm_kicks()?;
        let result = match limit {
            None => self.ring.submit_and_wait(1),
            Some(limit) => {
                let time = Timespec::new()
                    .sec(limit.as_secs())
                    .nsec(limit.subsec_nanos());
                let args = SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &args)
            }
        };
        match result {
            Ok(_) => (),
            // Submissions come before the wait.
            Err(e) if e.raw_os_error() == Some(libc::ETIME) => (),
            Err(e) if is_temporary(&e) => return Ok(()),
            Err(e) => return Err(e),
        }
        self.queued = 0;
        Ok(())
    }

    /// Takes an event.
    pub fn take_event(&mut self) -> Option<Event> {
        let entry = self.ring.completion().next()?;
        if let Ok(slot) = u32::try_from(entry.user_data()) {
            return Some(Event::Done {
                slot: Slot(slot),
                result: entry.result(),
            });
        }
        if let Some(kick) = entry.user_data().checked_sub(KICKS) {
            let kick = usize::try_from(kick).ok();
            if let Some(kick) = kick.and_then(|index| self.kicks.get_mut(index)) {
                kick.is_armed = false;
                // The worker is awake and looks at everything before it waits again.
                let _ = farlane_sys::eventfd::drain(kick.fd.as_fd());
            }
        }
        Some(Event::Kick)
    }
}

/// Operations of a request that have ended as if they had not been begun (`EAGAIN`, `EINTR`), in a
/// row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeats(u16);

impl Repeats {
    /// Whether an operation that has ended with `result` is to be done again. A sync is not:
    /// through the page cache the kernel has forgotten by then what it could not write back.
    #[must_use]
    pub fn again(&mut self, result: i32, is_sync: bool) -> bool {
        if is_sync || !matches!(-result, libc::EAGAIN | libc::EINTR) {
            self.0 = 0;
            return false;
        }
        self.0 = self.0.saturating_add(1);
        self.0 <= MAX_REPEATS
    }
}

/// Whether a write is to be durable when it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Durable(pub bool);

/// Whether an error of a durable write was one of the write itself. Memory is looked at, and around
/// the page cache room is made, before anything is written; with the page cache room may be made
/// when it is written back. Whether a disk reaches the memory of another device (`from_device`) is
/// found out before, too. All others may be those of a device's flush.
#[must_use]
pub fn is_of_the_write(errno: i32, around_cache: bool, from_device: bool) -> bool {
    match errno {
        libc::EREMOTEIO => from_device,
        libc::EFAULT | libc::EFBIG => true,
        libc::ENOSPC | libc::EDQUOT => around_cache,
        _ => false,
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_a_flush_can_have_are_not_the_writes() {
        for errno in [libc::EIO, libc::ENOMEM, libc::EINVAL, libc::EOPNOTSUPP] {
            assert!(!is_of_the_write(errno, true, true), "{errno}");
        }
        assert!(is_of_the_write(libc::EFAULT, false, false));
        assert!(is_of_the_write(libc::ENOSPC, true, false));
        assert!(!is_of_the_write(libc::ENOSPC, false, false));
        assert!(is_of_the_write(libc::EREMOTEIO, true, true));
        assert!(!is_of_the_write(libc::EREMOTEIO, true, false));
    }

    #[test]
    fn what_has_not_been_begun_is_done_again_but_not_without_end() {
        let mut repeats = Repeats::default();
        for errno in [libc::EAGAIN, libc::EINTR] {
            assert!((0..MAX_REPEATS).all(|_| repeats.again(-errno, false)));
            assert!(!repeats.again(-errno, false) && !repeats.again(-errno, false));
            // Something has been moved in between.
            assert!(!repeats.again(512, false) && repeats.again(-errno, false));
            assert!(!repeats.again(-libc::EIO, false));
        }
    }

    #[test]
    fn a_sync_is_done_once() {
        for errno in [libc::EAGAIN, libc::EINTR, libc::EIO] {
            assert!(!Repeats::default().again(-errno, true));
        }
    }
}
