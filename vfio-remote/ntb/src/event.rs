//! Eventfds, one end of which may be in hostile hands.

use crate::NtbError;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::ReadWriteFlags;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

pub(crate) fn create() -> Result<OwnedFd, NtbError> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(NtbError::io("make an eventfd"))
}

/// Takes `fd` if it is an eventfd: writing to anything else could block, or do anything.
pub(crate) fn check(fd: OwnedFd) -> Result<OwnedFd, NtbError> {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = rustix::fs::readlink(link.as_str(), Vec::new())
        .map_err(NtbError::io("examine a descriptor"))?;
    if target.as_bytes() != b"anon_inode:[eventfd]" {
        return Err(NtbError::Protocol("a descriptor is not an eventfd"));
    }
    Ok(fd)
}

/// Adds one. Where the counter is full, its reader is due to wake anyway.
pub(crate) fn signal(fd: BorrowedFd<'_>) {
    // Whether the eventfd blocks is a flag that the other end can change.
    let mut room = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    if poll(&mut room, Some(&Timespec::default())).is_ok_and(|ready| ready == 1) {
        let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
    }
}

/// Takes what it has counted.
pub(crate) fn drain(fd: BorrowedFd<'_>) {
    let mut count = [0; 8];
    // Never waits, whatever the other end has made of the descriptor's flags. An offset of -1 is
    // that of `read`.
    let _ = rustix::io::preadv2(
        fd,
        &mut [IoSliceMut::new(&mut count)],
        u64::MAX,
        ReadWriteFlags::NOWAIT,
    );
}

#[cfg(test)]
pub(crate) fn is_readable(fd: BorrowedFd<'_>, wait: bool) -> bool {
    let limit = Timespec {
        tv_sec: if wait { 10 } else { 0 },
        tv_nsec: 0,
    };
    let mut ready = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut ready, Some(&limit)).is_ok_and(|n| n == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::OFlags;
    use std::os::fd::AsFd as _;

    #[test]
    fn an_eventfd_that_blocks_is_drained_without_waiting() {
        let fd = create().unwrap();
        rustix::fs::fcntl_setfl(&fd, OFlags::empty()).unwrap();
        drain(fd.as_fd());
        signal(fd.as_fd());
        assert!(is_readable(fd.as_fd(), false));
        drain(fd.as_fd());
        assert!(!is_readable(fd.as_fd(), false));
    }

    #[test]
    fn a_full_eventfd_does_not_block_who_signals_it() {
        let fd = create().unwrap();
        rustix::fs::fcntl_setfl(&fd, OFlags::empty()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        signal(fd.as_fd());
        assert!(is_readable(fd.as_fd(), false));
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(check(file.into()), Err(NtbError::Protocol(_))));
    }
}
