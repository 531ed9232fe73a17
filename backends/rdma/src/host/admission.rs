//! Who besides the daemon's own user may use the host socket.

use farlane_zero_copy::peer_groups;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::BorrowedFd;

/// Users and groups whose processes are let in; none by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admission {
    /// Users.
    pub users: BTreeSet<u32>,
    /// Groups, one of which a process has as its own or as a supplementary one.
    pub groups: BTreeSet<u32>,
}

impl Admission {
    /// Whether there is nobody whom it lets in.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.users.is_empty() && self.groups.is_empty()
    }

    /// Whether it lets in the process of `user` at the other end of a socket: by the user and the
    /// groups that it had when it connected.
    pub(super) fn admits(&self, user: u32, socket: BorrowedFd<'_>) -> io::Result<bool> {
        if self.users.contains(&user) {
            return Ok(true);
        }
        if self.groups.is_empty() {
            return Ok(false);
        }
        let groups = peer_groups(socket)?;
        Ok(groups.iter().any(|group| self.groups.contains(group)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    #[test]
    fn a_process_is_let_in_by_its_user_or_by_any_of_its_groups() {
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        let only = |users: &[u32], groups: &[u32]| {
            let admission = Admission {
                users: users.iter().copied().collect(),
                groups: groups.iter().copied().collect(),
            };
            admission.admits(7, near.as_fd()).unwrap()
        };
        let own = rustix::process::getegid().as_raw();
        assert!(only(&[7], &[]) && only(&[8], &[u32::MAX, own]));
        assert!(!only(&[], &[]) && !only(&[8], &[u32::MAX]));
        for group in rustix::process::getgroups().unwrap() {
            assert!(only(&[], &[group.as_raw()]));
        }
    }
}
