//! Another process on this host whose memory is reached by system calls.

use crate::SharedMemory;
use farlane_abi::arena::OWNER_DIED;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

/// Supplementary groups for which there is room at first.
const FEW_GROUPS: usize = 32;

/// The peer of a UNIX socket.
///
/// Its memory is reached with `process_vm_readv` and `process_vm_writev`. The kernel checks each
/// call as it checks `ptrace`; the pidfd tells when the process has gone, so that its number is
/// not used for a successor. A word of shared memory tells when it has become another program,
/// which has other memory at the same addresses.
#[derive(Debug)]
pub struct Process {
    pid: rustix::process::Pid,
    uid: u32,
    pidfd: OwnedFd,
    /// Where its kernel says that its program has ended.
    owner: OnceLock<SharedMemory>,
}

/// The peer as the kernel knew it when it connected (`SO_PEERPIDFD`, Linux 6.5): its number
/// cannot have passed to a successor meanwhile. `None` on older kernels.
fn peer_pidfd(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut length = libc::socklen_t::try_from(size_of_val(&fd)).ok()?;
    // SAFETY: the kernel writes at most `length` bytes, the size of `fd`.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    // SAFETY: on success it is a new descriptor that nobody else owns.
    (rc == 0 && fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What the kernel says of the process at the other end of a UNIX socket, as it was when it
/// connected, or began to listen (`SO_PEERCRED`).
fn credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut length = libc::socklen_t::try_from(size_of_val(&cred)).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most `length` bytes, the size of `cred`, any of which make one.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut length,
        )
    };
    // Nobody is who is not known (`overflowuid` is another one).
    if rc != 0 || cred.uid == u32::MAX {
        return Err(io::Error::last_os_error());
    }
    Ok(cred)
}

/// The user as which the process at the other end of a UNIX socket ran when it connected, or began
/// to listen (`SO_PEERCRED`). It may be one of another process namespace, where it has no number
/// here.
///
/// # Errors
/// No credentials.
pub fn peer_user(socket: BorrowedFd<'_>) -> io::Result<u32> {
    credentials(socket).map(|cred| cred.uid)
}

/// The groups of that process then: its own, and the supplementary ones (`SO_PEERGROUPS`).
///
/// # Errors
/// No credentials.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let own = credentials(socket)?.gid;
    let mut groups: Vec<libc::gid_t> = vec![0; FEW_GROUPS];
    loop {
        let room = size_of_val(&groups[..]);
        let mut length = libc::socklen_t::try_from(room).map_err(io::Error::other)?;
        // SAFETY: the kernel writes at most `length` bytes, the size of the vector's elements, any
        // of which make some.
        let rc = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let failure = io::Error::last_os_error();
        let bytes = usize::try_from(length).map_err(io::Error::other)?;
        let count = bytes / size_of::<libc::gid_t>();
        match rc {
            0 => {
                groups.truncate(count);
                groups.push(own);
                return Ok(groups);
            }
            // They do not change any more: so many there are.
            _ if failure.raw_os_error() == Some(libc::ERANGE) && count > groups.len() => {
                groups.resize(count, 0);
            }
            _ => return Err(failure),
        }
    }
}

impl Process {
    /// The process at the other end of a connected UNIX socket (`SO_PEERCRED`).
    ///
    /// # Errors
    /// No credentials, the process is gone, or it is one of another process namespace, where it
    /// has no number here.
    pub fn of_peer(socket: BorrowedFd<'_>) -> io::Result<Arc<Self>> {
        let cred = credentials(socket)?;
        let pid = rustix::process::Pid::from_raw(cred.pid);
        let pid = pid.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
        let pidfd = match peer_pidfd(socket) {
            Some(pidfd) => pidfd,
            None => rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?,
        };
        Ok(Arc::new(Self {
            pid,
            uid: cred.uid,
            pidfd,
            owner: OnceLock::new(),
        }))
    }

    /// This process itself: what a test or a loopback measurement uses.
    ///
    /// # Errors
    /// What `pidfd_open` says.
    pub fn current() -> io::Result<Arc<Self>> {
        let pid = rustix::process::getpid();
        Ok(Arc::new(Self {
            pid,
            uid: rustix::process::getuid().as_raw(),
            pidfd: rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?,
            owner: OnceLock::new(),
        }))
    }

    /// A descriptor that polls readable when the process has ended.
    #[must_use]
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether it has ended: then its number may be another process's.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let mut end = [PollFd::new(&self.pidfd, PollFlags::IN)];
        loop {
            match poll(&mut end, Some(&Timespec::default())) {
                Ok(0) => return false,
                Err(rustix::io::Errno::INTR) => {}
                _ => return true,
            }
        }
    }

    /// Has its memory be that of the program which runs now: no transfer begins any more when the
    /// first word of `owner` says [`OWNER_DIED`], as [`farlane_abi::arena`] describes. The first
    /// such word counts.
    pub fn set_owner(&self, owner: SharedMemory) {
        let _ = self.owner.set(owner);
    }

    /// Whether the program has ended that the memory belongs to.
    fn has_lost_owner(&self) -> bool {
        let word = self.owner.get().and_then(|owner| owner.word(0).ok());
        word.is_some_and(|word| word.load(Ordering::Acquire) & OWNER_DIED != 0)
    }

    /// Its id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// The user it ran as when it connected.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Copies between `local` and the process's memory. Returns the bytes copied, which are fewer
    /// than asked for where its memory ends.
    ///
    /// # Errors
    /// `ESRCH` where the process, or the program that the memory belongs to, has ended; else what
    /// the system says.
    pub(crate) fn transfer(
        &self,
        local: &[libc::iovec],
        remote: &[libc::iovec],
        write: bool,
    ) -> io::Result<usize> {
        // The word last: what the process becomes after this look it becomes while this thread
        // goes on to the kernel's, which then keeps the memory that it finds.
        if self.has_ended() || self.has_lost_owner() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let local_count = local.len() as libc::c_ulong;
        let remote_count = remote.len() as libc::c_ulong;
        // SAFETY: the local vectors lie in mappings that the caller holds; the remote ones are
        // checked by the kernel against the other process. Either side may change concurrently,
        // which the kernel's copy tolerates.
        let n = unsafe {
            let call = if write {
                libc::process_vm_writev
            } else {
                libc::process_vm_readv
            };
            call(
                self.pid(),
                local.as_ptr(),
                local_count,
                remote.as_ptr(),
                remote_count,
                0,
            )
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;

    #[test]
    fn a_successor_with_the_same_number_is_not_touched() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let id = i32::try_from(child.id()).unwrap();
        let pid = rustix::process::Pid::from_raw(id).unwrap();
        let flags = rustix::process::PidfdFlags::empty();
        let mut process = Process {
            pid: rustix::process::getpid(),
            uid: 0,
            pidfd: rustix::process::pidfd_open(pid, flags).unwrap(),
            owner: OnceLock::new(),
        };
        let (mut to, from) = ([0_u8; 8], [7_u8; 8]);
        let vector = |base: *const u8| libc::iovec {
            iov_base: base.cast_mut().cast(),
            iov_len: 8,
        };
        let mut read = |process: &Process| {
            process.transfer(&[vector(to.as_mut_ptr())], &[vector(from.as_ptr())], false)
        };
        assert_eq!(read(&process).unwrap(), 8);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(process.has_ended());
        assert_eq!(
            read(&process).unwrap_err().raw_os_error(),
            Some(libc::ESRCH)
        );
        process.pid = pid;
        assert!(read(&process).is_err());
    }

    #[test]
    fn the_groups_of_a_peer_are_its_own_and_all_supplementary_ones() {
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut groups = peer_groups(near.as_fd()).unwrap();
        let mut right: Vec<_> = rustix::process::getgroups().unwrap();
        right.push(rustix::process::getegid());
        let mut right: Vec<_> = right.iter().map(|gid| gid.as_raw()).collect();
        groups.sort_unstable();
        right.sort_unstable();
        assert_eq!(groups, right);
    }

    #[test]
    fn more_groups_than_are_usual_are_all_said() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // Of this thread alone, which ends with the test.
        let said = std::thread::spawn(|| {
            let all: Vec<_> = (1000..1500).map(rustix::process::Gid::from_raw).collect();
            rustix::thread::set_thread_groups(&all).unwrap();
            let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
            peer_groups(near.as_fd()).unwrap()
        });
        let said = said.join().unwrap();
        assert!((1000..1500).all(|group| said.contains(&group)), "{said:?}");
    }

    #[test]
    fn memory_is_reached_for_as_long_as_its_program_is_there() {
        let process = Process::current().unwrap();
        let memory = farlane_sys::memory_file("owner").unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        let owner = SharedMemory::new(Mapping::new(memory.as_fd(), 0, 4096, true).unwrap());
        process.set_owner(owner.clone());
        let (mut to, from) = ([0_u8; 8], [7_u8; 8]);
        let vector = |base: *const u8| libc::iovec {
            iov_base: base.cast_mut().cast(),
            iov_len: 8,
        };
        // Nobody has said anything; a thread holds it; one that others wait for; and it has ended.
        let steps = [
            (0, true),
            (77, true),
            (1 << 31 | 77, true),
            (OWNER_DIED, false),
        ];
        for (word, is_reached) in steps {
            owner.word(0).unwrap().store(word, Ordering::Release);
            for write in [false, true] {
                let (to, from) = (vector(to.as_mut_ptr()), vector(from.as_ptr()));
                let (local, remote) = if write { (from, to) } else { (to, from) };
                let done = process.transfer(&[local], &[remote], write);
                let done = done.map_err(|error| error.raw_os_error());
                let right = is_reached.then_some(8).ok_or(Some(libc::ESRCH));
                assert_eq!(done, right, "{word:#x}");
            }
        }
    }
}
