//! Multicast groups: which queue pairs receive what is sent to which.

use super::target::Target;
use crate::address::{GroupGid, RawGid};
use farlane_abi::Errno;
use farlane_sys::sync::{lock, read, write};
use std::collections::HashMap;
use std::sync::{Arc, RwLock};

/// Queue pairs of a port in one group: a program cannot fill a group of others, and what its
/// members cost who sends to it is bounded.
pub const MEMBERS_OF_A_PORT: u32 = 64;
/// Memberships of all ports, and so groups.
pub const MAX_GROUPS: u32 = 1 << 16;
/// Memberships of a port: the others have theirs.
const MEMBERSHIPS_OF_A_PORT: u32 = MAX_GROUPS / 16;

#[derive(Debug, Default)]
struct Memberships {
    members: HashMap<GroupGid, Vec<Arc<Target>>>,
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
        let Some(at) = members.iter().position(|m| std::ptr::eq(&**m, member)) else {
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

/// The groups that have members. Its lock comes before those of the members' own lists.
#[derive(Debug, Default)]
pub struct Groups(RwLock<Memberships>);

impl Groups {
    /// Adds a member; one that is there already stays.
    ///
    /// # Errors
    /// `ENOMEM` where its port, or all together, have as many as they may have.
    pub fn attach(&self, group: GroupGid, member: &Arc<Target>) -> Result<(), Errno> {
        let mut all = write(&self.0);
        let mut own = lock(&member.groups);
        if own.contains(&group) {
            return Ok(());
        }
        let port = member.common.address.gid;
        let of_port = all.of_port.get(&port).copied().unwrap_or_default();
        let members = all.members.get(&group).map_or(&[][..], Vec::as_slice);
        let beside = members.iter().filter(|m| m.common.address.gid == port);
        if beside.count() >= MEMBERS_OF_A_PORT as usize
            || of_port >= MEMBERSHIPS_OF_A_PORT
            || all.all >= MAX_GROUPS
        {
            return Err(Errno::ENOMEM);
        }
        own.push(group);
        all.members
            .entry(group)
            .or_default()
            .push(Arc::clone(member));
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

    /// The member of a group with this index.
    pub fn member(&self, group: GroupGid, index: usize) -> Option<Arc<Target>> {
        read(&self.0).members.get(&group)?.get(index).cloned()
    }
}
