//! Event descriptors that somebody else has made.

mod aio;

use aio::Signaller;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::io::ReadWriteFlags;
use std::io::IoSliceMut;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use thiserror::Error;

/// `preadv2`: where the file stands.
const NO_POSITION: u64 = u64::MAX;

/// Why a descriptor is refused.
#[derive(Debug, Error)]
pub enum EventfdError {
    /// It is something else. Polling it could never end, writing it could block.
    #[error("The descriptor is {0:?}, not an eventfd")]
    NotAnEventfd(String),
    /// The system failed.
    #[error("Cannot examine a descriptor")]
    Io(#[from] rustix::io::Errno),
}

/// Whether closing a descriptor that somebody else has sent waits for nobody: it is an eventfd, or
/// memory. Of others, `close` may ask whoever serves the file (`FUSE_FLUSH`), or wait for the peer
/// of a socket (`SO_LINGER`).
#[must_use]
pub fn closes_at_once(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok() || matches!(kind(fd), Ok(None))
}

/// What it is, if not an eventfd.
fn kind(fd: BorrowedFd<'_>) -> rustix::io::Result<Option<String>> {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = rustix::fs::readlink(link.as_str(), Vec::new())?;
    let is_eventfd = target.as_bytes() == b"anon_inode:[eventfd]";
    Ok((!is_eventfd).then(|| target.to_string_lossy().into_owned()))
}

/// Whether `fd` is an eventfd.
///
/// # Errors
/// Why not: see [`EventfdError`].
pub fn examine(fd: BorrowedFd<'_>) -> Result<(), EventfdError> {
    match kind(fd)? {
        None => Ok(()),
        Some(other) => Err(EventfdError::NotAnEventfd(other)),
    }
}

/// Takes `fd` if it is an eventfd.
///
/// # Errors
/// See [`EventfdError`].
pub fn check(fd: OwnedFd) -> Result<OwnedFd, EventfdError> {
    examine(fd.as_fd()).map(|()| fd)
}

/// Takes `fd` if it is an eventfd, and sees to it that neither reading nor writing it blocks. That
/// holds for everybody who shares it.
///
/// # Errors
/// See [`EventfdError`].
pub fn adopt(fd: OwnedFd) -> Result<OwnedFd, EventfdError> {
    let fd = check(fd)?;
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    if !flags.contains(OFlags::NONBLOCK) {
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
    }
    Ok(fd)
}

/// What signals eventfds, once that is settled.
static SIGNALLER: OnceLock<Option<Signaller>> = OnceLock::new();

/// From now on [`signal`] blocks under no circumstances. Returns whether that is so: not where the
/// kernel has no asynchronous requests, or none left. Once is enough.
pub fn install() -> bool {
    SIGNALLER.get_or_init(Signaller::new).is_some()
}

/// Whether [`signal`] blocks under no circumstances.
#[must_use]
pub fn never_blocks() -> bool {
    matches!(SIGNALLER.get(), Some(Some(_)))
}

/// An eventfd of this process, which never blocks.
///
/// # Errors
/// Out of descriptors.
pub fn new() -> Result<OwnedFd, Errno> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Adds one to an eventfd. Does not block even where the eventfd would, which is its owner's
/// choice: it does where its counter is at its limit, and then the reader is due to wake anyway.
/// Where that is not [installed](install) it does if the eventfd becomes such a one at the same
/// time.
pub fn signal(fd: BorrowedFd<'_>) {
    if let Some(Some(signaller)) = SIGNALLER.get()
        && signaller.signal(fd).is_ok()
    {
        return;
    }
    let mut room = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    if poll(&mut room, Some(&Timespec::default())).is_ok_and(|ready| ready == 1) {
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
    }
}

/// Takes what an eventfd has counted. Does not block, whatever others who share it have set
/// meanwhile.
#[must_use]
pub fn drain(fd: BorrowedFd<'_>) -> u64 {
    let mut count = [0; 8];
    let mut into = [IoSliceMut::new(&mut count)];
    match rustix::io::preadv2(fd, &mut into, NO_POSITION, ReadWriteFlags::NOWAIT) {
        Ok(8) => u64::from_ne_bytes(count),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn an_adopted_eventfd_never_blocks() {
        let fd = adopt(eventfd(0, EventfdFlags::CLOEXEC).unwrap()).unwrap();
        assert_eq!(drain(fd.as_fd()), 0);
        signal(fd.as_fd());
        signal(fd.as_fd());
        assert_eq!(drain(fd.as_fd()), 2);
    }

    #[test]
    fn a_full_eventfd_does_not_block_who_signals_it() {
        let fd = check(eventfd(0, EventfdFlags::CLOEXEC).unwrap()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        signal(fd.as_fd());
        assert_eq!(drain(fd.as_fd()), u64::MAX - 1);
    }

    #[test]
    fn closing_memory_and_eventfds_waits_for_nobody() {
        let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(closes_at_once(memory.as_fd()) && closes_at_once(event.as_fd()));
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(!closes_at_once(socket.as_fd()));
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(
            adopt(file.into()),
            Err(EventfdError::NotAnEventfd(what)) if what == "/dev/null"
        ));
    }
}
