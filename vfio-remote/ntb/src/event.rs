//! Eventfds, one end of which may be in hostile hands.

use crate::NtbError;
pub(crate) use farlane_sys::eventfd::{check, drain, signal};
use std::os::fd::OwnedFd;

pub(crate) fn create() -> Result<OwnedFd, NtbError> {
    farlane_sys::eventfd::new().map_err(NtbError::io("make an eventfd"))
}

#[cfg(test)]
pub(crate) fn is_readable(fd: std::os::fd::BorrowedFd<'_>, wait: bool) -> bool {
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
        let _ = drain(fd.as_fd());
        signal(fd.as_fd());
        assert!(is_readable(fd.as_fd(), false));
        let _ = drain(fd.as_fd());
        assert!(!is_readable(fd.as_fd(), false));
    }
}
