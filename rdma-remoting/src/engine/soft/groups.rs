//! Multicast groups: which queue pairs receive what is sent to which.

use super::target::Target;
use crate::address::{GroupGid, RawGid};
use crate::ledger::{Resource, Share};
use farlane_abi::Errno;
use farlane_sys::sync::{lock, read, write};
use std::collections::HashMap;
use std::sync::{Arc, RwLock};

/// Queue pairs of a port in one group: a program cannot fill a group of others, and what its
/// members cost who sends to it is bounded.
pub const MEMBERS_OF_A_PORT: u32 = 64;
/// Memberships of all ports, and so groups, as the ledger has them.
const MAX_GROUPS: u32 = 1 << 16;
/// Memberships of a port, and so groups that it is in.
pub const MEMBERSHIPS_OF_A_PORT: u32 = MAX_GROUPS / 16;

/// A queue pair in a group.
#[derive(Debug)]
struct Member {
    /// Which one it is of all that have ever joined a group.
    joined: u64,
    target: Arc<Target>,
    _share: Option<Share>,
}

/// Members of a group that have had a datagram, and that are to have it: who has joined before it
/// was sent, in that order. Each is met once, whoever comes and goes meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    next: u64,
    end: u64,
}

#[derive(Debug, Default)]
struct Memberships {
    /// In the order in which they have joined.
    members: HashMap<GroupGid, Vec<Member>>,
    /// How many have ever joined.
    joined: u64,
    /// How many there are of each port, and of all.
    of_port: HashMap<RawGid, u32>,
    all: u32,
}

impl Memberships {
    /// Takes a member out of a group.
    fn remove(&mut self, group: GroupGid, member: &Target) {
        let Some(members) = self.members.get_mut(&group) else {
            return;
        };
        let Some(at) = members
            .iter()
            .position(|m| std::ptr::eq(&*m.target, member))
        else {
            return;
        };
        members.remove(at);
        if members.is_empty() {
            self.members.remove(&group);
        }
        let port = &member.common.address.gid;
        if let Some(count) = self.of_port.get_mut(port) {
            *count -= 1;
            if *count == 0 {
                self.of_port.remove(port);
            }
        }
        self.all -= 1;
    }
}

/// The groups that have members. Its lock comes before those of the members' own lists, and both
/// before the ledger's.
#[derive(Debug, Default)]
pub struct Groups(RwLock<Memberships>);

impl Groups {
    /// Adds a member; one that is there already stays.
    ///
    /// # Errors
    /// `ENOMEM` where its port, its account, or all together, have as many as they may have.
    pub fn attach(&self, group: GroupGid, member: &Arc<Target>) -> Result<(), Errno> {
        let mut all = write(&self.0);
        let mut own = lock(&member.groups);
        if own.contains(&group) {
            return Ok(());
        }
        let port = member.common.address.gid;
        let of_port = all.of_port.get(&port).copied().unwrap_or_default();
        let members = all.members.get(&group).map_or(&[][..], Vec::as_slice);
        let beside = members
            .iter()
            .filter(|m| m.target.common.address.gid == port);
        if beside.count() >= MEMBERS_OF_A_PORT as usize
            || of_port >= MEMBERSHIPS_OF_A_PORT
            || all.all >= MAX_GROUPS
        {
            return Err(Errno::ENOMEM);
        }
        let account = member.common.account.as_ref();
        let share = account.map(|account| account.take(Resource::GroupMemberships, 1));
        let share = share.map(|share| share.ok_or(Errno::ENOMEM)).transpose()?;
        own.push(group);
        let member = Member {
            joined: all.joined,
            target: Arc::clone(member),
            _share: share,
        };
        all.joined += 1;
        all.members.entry(group).or_default().push(member);
        all.of_port.insert(port, of_port + 1);
        all.all += 1;
        Ok(())
    }

    /// Takes a member out. Returns whether it was there.
    pub fn detach(&self, group: GroupGid, member: &Target) -> bool {
        let mut all = write(&self.0);
        let mut own = lock(&member.groups);
        let Some(at) = own.iter().position(|g| *g == group) else {
            return false;
        };
        own.swap_remove(at);
        all.remove(group, member);
        true
    }

    /// Takes a queue pair out of all groups.
    pub fn forget(&self, member: &Target) {
        if !Self::has(member) {
            return;
        }
        let mut all = write(&self.0);
        for group in lock(&member.groups).drain(..) {
            all.remove(group, member);
        }
    }

    /// Whether a queue pair is in a group.
    pub fn has(member: &Target) -> bool {
        !lock(&member.groups).is_empty()
    }

    /// Those who are in a group now.
    pub fn walk(&self) -> Walk {
        Walk {
            next: 0,
            end: read(&self.0).joined,
        }
    }

    /// The next member on a walk, and the walk behind it.
    pub fn next(&self, group: GroupGid, walk: Walk) -> Option<(Arc<Target>, Walk)> {
        let all = read(&self.0);
        let members = all.members.get(&group)?;
        let at = members.partition_point(|member| member.joined < walk.next);
        let member = members.get(at).filter(|next| next.joined < walk.end)?;
        let behind = Walk {
            next: member.joined + 1,
            ..walk
        };
        Some((Arc::clone(&member.target), behind))
    }
}
