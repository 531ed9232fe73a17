//! Eventfds, one end of which may be in hostile hands.

use crate::NtbError;
pub(crate) use farlane_sys::eventfd::{check, signal};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::ReadWriteFlags;
use std::io::IoSliceMut;
use std::os::fd::{BorrowedFd, OwnedFd};

pub(crate) fn create() -> Result<OwnedFd, NtbError> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(NtbError::io("make an eventfd"))
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
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
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
}
