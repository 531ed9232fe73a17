//! In which order the kernel closes what a process that is killed had open.
//!
//! It goes through the descriptors from the lowest number on, and releases the files whose last
//! descriptors these were when it has seen all of them, the last one first (`exit_files`, and
//! `task_work_run`, which takes works in the order opposite to that in which they came). So what
//! has the greatest number is released before anything else: a device has stopped before a borrower
//! hears that its link has ended.

use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

/// The numbers that are tried, down from the greatest one: one for each function that is lent, and
/// what else has them.
const TRIED: u64 = 256;
/// Greatest limit of descriptors that is used up: the kernel's table of them has a place for each
/// number below the greatest.
const LONGEST_TABLE: u64 = 1 << 17;

/// Another descriptor of a file, with a number above those of all descriptors that are opened
/// later.
///
/// # Errors
/// The greatest numbers are all in use.
pub(crate) fn duplicate_above_all(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // A daemon that has opened all that it needs has as many as it may; later would be too late
    // here.
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    let limit = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => maximum,
        Err(_) => current,
    };
    let limit = limit.unwrap_or(LONGEST_TABLE).min(LONGEST_TABLE);
    for number in (limit.saturating_sub(TRIED)..limit).rev() {
        let least = RawFd::try_from(number).map_err(io::Error::other)?;
        match fcntl_dupfd_cloexec(file, least) {
            // All numbers from there on are in use.
            Err(Errno::MFILE) => {}
            duplicate => return Ok(duplicate?),
        }
    }
    Err(Errno::MFILE.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::{AsFd as _, AsRawFd as _};

    #[test]
    fn what_is_to_be_released_first_has_the_greatest_number() {
        let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let device = event();
        let one = duplicate_above_all(device.as_fd()).unwrap();
        let other = duplicate_above_all(device.as_fd()).unwrap();
        let links: Vec<OwnedFd> = (0..64).map(|_| event()).collect();
        let least = one.as_raw_fd().min(other.as_raw_fd());
        assert!(links.iter().all(|link| link.as_raw_fd() < least));
    }
}
