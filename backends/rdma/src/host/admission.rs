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

/// By what a process of another user is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Admitted {
    /// Its user is named.
    User(u32),
    /// A group of its is, and not its user.
    Group(u32),
}

impl Admission {
    /// Whether there is nobody whom it lets in.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.users.is_empty() && self.groups.is_empty()
    }

    /// By what it lets in the process of `user` at the other end of a socket, if it does: by the
    /// user and the groups that it had when it connected.
    pub(super) fn admits(&self, user: u32, socket: BorrowedFd<'_>) -> io::Result<Option<Admitted>> {
        if self.users.contains(&user) {
            return Ok(Some(Admitted::User(user)));
        }
        if self.groups.is_empty() {
            return Ok(None);
        }
        let its = peer_groups(socket)?;
        let found = self.groups.iter().find(|group| its.contains(group));
        Ok(found.copied().map(Admitted::Group))
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
        assert_eq!(only(&[7], &[own]), Some(Admitted::User(7)));
        assert_eq!(only(&[8], &[u32::MAX, own]), Some(Admitted::Group(own)));
        assert_eq!((only(&[], &[]), only(&[8], &[u32::MAX])), (None, None));
        for group in rustix::process::getgroups().unwrap() {
            let group = group.as_raw();
            assert_eq!(only(&[], &[group]), Some(Admitted::Group(group)));
        }
    }
}
