//! GIDs of ports: whose each is, and the table that each port has of them.
//!
//! A port has the GID that its operator has given it, for ever: it is what tells it from others
//! inside ([`PortAddress`](crate::address::PortAddress)). A guest may set others, each of which no
//! other port has; peers name the port by any of them.

use crate::address::{GroupGid, RawGid};
use crate::engine::PortNames;
use farlane_abi::Errno;
use farlane_abi::width::to_usize;
use farlane_sys::sync::{lock, read, write};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, RwLock};

/// Which GIDs the guest of a port may set, that no other port has. That of its operator it always
/// may, and never one that the operator has named whole for other ports alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GidPolicy {
    /// Any.
    #[default]
    All,
    /// Those that begin with one of these.
    Only(Vec<GidPrefix>),
}

/// What some GIDs begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidPrefix {
    gid: RawGid,
    bits: u8,
}

impl GidPolicy {
    /// The GIDs that it names whole.
    fn whole(&self) -> impl Iterator<Item = RawGid> + '_ {
        let prefixes = match self {
            Self::All => &[][..],
            Self::Only(prefixes) => prefixes,
        };
        let whole = prefixes.iter().filter(|prefix| prefix.bits == 128);
        whole.map(|prefix| prefix.gid)
    }
}

impl GidPrefix {
    /// The first `bits` of a GID; `None` for more than it has.
    #[must_use]
    pub fn new(gid: RawGid, bits: u8) -> Option<Self> {
        (bits <= 128).then_some(Self { gid, bits })
    }

    /// All of a GID.
    #[must_use]
    pub fn whole(gid: RawGid) -> Self {
        Self { gid, bits: 128 }
    }

    /// Whether a GID begins with it.
    #[must_use]
    pub fn includes(&self, gid: &RawGid) -> bool {
        let differ = u128::from_be_bytes(self.gid) ^ u128::from_be_bytes(*gid);
        differ.leading_zeros() >= self.bits.into()
    }
}

/// A GID that a port has.
#[derive(Clone, Copy, Debug)]
struct Owned {
    /// The GID that the port has of its operator.
    home: RawGid,
    /// Entries of its table that have it, and one where it is that.
    entries: u32,
    /// The operator has named it, or its prefix.
    is_named: bool,
}

/// The GIDs of all ports.
#[derive(Debug, Default)]
pub(crate) struct Gids {
    owned: RwLock<HashMap<RawGid, Owned>>,
    /// GIDs that the operator has named whole, and for how many ports: no port for which he has not
    /// named it may have one, also while nobody has it. This lock comes before the other.
    reserved: Mutex<HashMap<RawGid, u32>>,
}

impl Gids {
    /// A port of its own has this GID, until it is [released](Self::release). False where one has
    /// it already.
    pub fn add_port(&self, home: RawGid) -> bool {
        let mut owned = write(&self.owned);
        if owned.contains_key(&home) {
            return false;
        }
        let own = Owned {
            home,
            entries: 1,
            is_named: true,
        };
        owned.insert(home, own);
        true
    }

    /// An entry of a port's table has it.
    fn claim(&self, home: RawGid, gid: RawGid, is_named: bool) -> Result<(), Errno> {
        if !is_named && lock(&self.reserved).contains_key(&gid) {
            return Err(Errno::EACCES);
        }
        let mut owned = write(&self.owned);
        let new = Owned {
            home,
            entries: 0,
            is_named,
        };
        let its = owned.entry(gid).or_insert(new);
        if its.home != home {
            return Err(Errno::EADDRINUSE);
        }
        its.entries += 1;
        Ok(())
    }

    /// The operator has named these whole, for one port.
    fn reserve(&self, gids: impl Iterator<Item = RawGid>) {
        let mut reserved = lock(&self.reserved);
        for gid in gids {
            *reserved.entry(gid).or_default() += 1;
        }
    }

    /// That port is gone.
    fn unreserve(&self, gids: impl Iterator<Item = RawGid>) {
        let mut reserved = lock(&self.reserved);
        for gid in gids {
            if let Some(ports) = reserved.get_mut(&gid) {
                *ports -= 1;
                if *ports == 0 {
                    reserved.remove(&gid);
                }
            }
        }
    }

    /// An entry of a port's table has it no more, or the port is gone.
    pub fn release(&self, gid: &RawGid) {
        let mut owned = write(&self.owned);
        if let Some(its) = owned.get_mut(gid) {
            its.entries = its.entries.saturating_sub(1);
            if its.entries == 0 {
                owned.remove(gid);
            }
        }
    }

    /// Whether its operator has named this GID of the port whose own is `home`.
    pub fn is_named(&self, home: &RawGid, gid: &RawGid) -> bool {
        let owned = read(&self.owned);
        let its = owned.get(gid);
        its.is_some_and(|its| its.home == *home && its.is_named)
    }
}

impl PortNames for Gids {
    fn home(&self, gid: &RawGid) -> Option<RawGid> {
        read(&self.owned).get(gid).map(|its| its.home)
    }
}

/// The GIDs of a port.
#[derive(Debug)]
pub(crate) struct PortGids {
    all: Arc<Gids>,
    home: RawGid,
    policy: GidPolicy,
    /// What the guest has set. Its lock comes before that of all ports' GIDs.
    table: Mutex<Vec<Option<RawGid>>>,
}

impl PortGids {
    /// Those of a port, in a table of so many entries.
    pub fn new(all: Arc<Gids>, home: RawGid, policy: GidPolicy, entries: u32) -> Self {
        all.reserve(policy.whole());
        Self {
            all,
            home,
            policy,
            table: Mutex::new(vec![None; to_usize(entries.into())]),
        }
    }

    /// Sets an entry.
    ///
    /// # Errors
    /// `EINVAL` for an entry that there is not and for no GID of a port, `EACCES` for one that the
    /// operator does not let it have, `EEXIST` where the entry has one, `EADDRINUSE` where another
    /// port has it.
    pub fn set(&self, index: u32, gid: RawGid) -> Result<(), Errno> {
        if gid == [0; 16] || GroupGid::new(gid).is_some() {
            return Err(Errno::EINVAL);
        }
        let mut table = lock(&self.table);
        let entry = table.get_mut(to_usize(index.into())).ok_or(Errno::EINVAL)?;
        let is_named = gid == self.home
            || match &self.policy {
                GidPolicy::All => false,
                GidPolicy::Only(prefixes) => {
                    let is_listed = prefixes.iter().any(|prefix| prefix.includes(&gid));
                    is_listed.then_some(true).ok_or(Errno::EACCES)?
                }
            };
        if entry.is_some() {
            return Err(Errno::EEXIST);
        }
        self.all.claim(self.home, gid, is_named)?;
        *entry = Some(gid);
        Ok(())
    }

    /// Clears an entry.
    ///
    /// # Errors
    /// `ENOENT` where it has no GID.
    pub fn clear(&self, index: u32) -> Result<RawGid, Errno> {
        let mut table = lock(&self.table);
        let entry = table.get_mut(to_usize(index.into()));
        let gid = entry.and_then(Option::take).ok_or(Errno::ENOENT)?;
        self.all.release(&gid);
        Ok(gid)
    }

    /// Clears the table.
    pub fn clear_all(&self) {
        for gid in lock(&self.table).iter_mut().filter_map(Option::take) {
            self.all.release(&gid);
        }
    }

    /// Whether this is one of its port's GIDs, that of its operator too.
    pub fn has(&self, gid: &RawGid) -> bool {
        self.all.home(gid) == Some(self.home)
    }

    /// The first entry with this GID, of those that [`get`](Self::get) has.
    pub fn index(&self, gid: &RawGid) -> Option<usize> {
        let table = lock(&self.table);
        let is_it = |entry: &Option<RawGid>| entry.as_ref() == Some(gid);
        let is_home = *gid == self.home && table.iter().all(Option::is_none);
        table.iter().position(is_it).or(is_home.then_some(0))
    }

    /// The entry, none where it is not in use. The first one of an empty table is the GID that the
    /// operator has given.
    pub fn get(&self, index: u32) -> Option<RawGid> {
        let table = lock(&self.table);
        let entry = table.get(to_usize(index.into())).copied().flatten();
        let is_empty = || table.iter().all(Option::is_none);
        entry.or_else(|| (index == 0 && is_empty()).then_some(self.home))
    }

    /// The entries that are in use.
    pub fn list(&self) -> Vec<(usize, RawGid)> {
        let table = lock(&self.table);
        let entries = table.iter().enumerate();
        entries
            .filter_map(|(at, gid)| Some((at, (*gid)?)))
            .collect()
    }
}

impl Drop for PortGids {
    fn drop(&mut self) {
        self.all.unreserve(self.policy.whole());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ports(policy: GidPolicy) -> (Arc<Gids>, [PortGids; 2]) {
        let all = Arc::<Gids>::default();
        let ports = [[1; 16], [2; 16]].map(|home| {
            assert!(all.add_port(home));
            PortGids::new(Arc::clone(&all), home, policy.clone(), 4)
        });
        (all, ports)
    }

    #[test]
    fn a_port_has_the_gid_of_its_operator_until_its_guest_sets_others() {
        let (all, [port, other]) = ports(GidPolicy::All);
        assert_eq!((port.get(0), port.get(1)), (Some([1; 16]), None));
        port.set(2, [7; 16]).unwrap();
        assert_eq!((port.get(0), port.get(2)), (None, Some([7; 16])));
        assert_eq!(port.list(), [(2, [7; 16])]);
        assert_eq!(all.home(&[7; 16]), Some([1; 16]));
        // The operator's names it still, and is nobody else's.
        assert_eq!(all.home(&[1; 16]), Some([1; 16]));
        assert_eq!(other.set(0, [1; 16]), Err(Errno::EADDRINUSE));
        assert_eq!(port.clear(2), Ok([7; 16]));
        assert_eq!((port.get(0), all.home(&[7; 16])), (Some([1; 16]), None));
    }

    #[test]
    fn a_gid_is_one_ports_and_may_be_in_its_table_twice() {
        let (all, [port, other]) = ports(GidPolicy::All);
        for index in [0, 3] {
            port.set(index, [7; 16]).unwrap();
        }
        assert_eq!(other.set(0, [7; 16]), Err(Errno::EADDRINUSE));
        port.clear(0).unwrap();
        assert_eq!(other.set(0, [7; 16]), Err(Errno::EADDRINUSE));
        port.clear_all();
        other.set(0, [7; 16]).unwrap();
        assert_eq!(all.home(&[7; 16]), Some([2; 16]));
        assert_eq!(other.set(0, [8; 16]), Err(Errno::EEXIST));
        assert_eq!(all.home(&[8; 16]), None);
    }

    #[test]
    fn what_is_no_gid_of_a_port_or_no_entry_is_refused() {
        let (_, [port, _]) = ports(GidPolicy::All);
        let mut multicast_ipv4 = [0; 16];
        multicast_ipv4[10..].copy_from_slice(&[0xff, 0xff, 239, 1, 2, 3]);
        for gid in [[0; 16], [0xff; 16], multicast_ipv4] {
            assert_eq!(port.set(0, gid), Err(Errno::EINVAL));
        }
        for index in [4, u32::MAX] {
            assert_eq!(port.set(index, [7; 16]), Err(Errno::EINVAL));
            assert_eq!(port.clear(index), Err(Errno::ENOENT));
            assert_eq!(port.get(index), None);
        }
        assert_eq!(port.clear(0), Err(Errno::ENOENT));
    }

    #[test]
    fn an_operator_says_which_gids_a_guest_may_set() {
        let mut net = [0xfd; 16];
        let prefix = GidPrefix::new(net, 64).unwrap();
        let (all, [port, _]) = ports(GidPolicy::Only(vec![prefix]));
        net[15] = 9;
        port.set(0, net).unwrap();
        assert!(all.is_named(&[1; 16], &net) && !all.is_named(&[2; 16], &net));
        net[7] = 0;
        assert_eq!(port.set(1, net), Err(Errno::EACCES));
        // Its own it always may.
        port.set(1, [1; 16]).unwrap();
        assert!(all.is_named(&[1; 16], &[1; 16]));
        let (all, [port, _]) = ports(GidPolicy::All);
        port.set(0, net).unwrap();
        assert!(!all.is_named(&[1; 16], &net), "nobody has named it");
    }

    #[test]
    fn what_is_named_whole_for_one_port_another_one_does_not_get() {
        let named = |gid| GidPolicy::Only(vec![GidPrefix::whole(gid)]);
        let (all, [port, _]) = ports(GidPolicy::All);
        assert!(all.add_port([3; 16]));
        let its = PortGids::new(Arc::clone(&all), [3; 16], named([7; 16]), 4);
        assert_eq!(port.set(0, [7; 16]), Err(Errno::EACCES));
        its.set(0, [7; 16]).unwrap();
        its.clear_all();
        // Nobody has it, and it is still not to be had.
        assert_eq!(port.set(0, [7; 16]), Err(Errno::EACCES));
        drop(its);
        port.set(0, [7; 16]).unwrap();
    }

    #[test]
    fn a_prefix_has_as_many_bits_as_a_gid_at_most() {
        assert_eq!(GidPrefix::new([1; 16], 129), None);
        assert!(GidPrefix::new([1; 16], 0).unwrap().includes(&[0xff; 16]));
        let whole = GidPrefix::new([1; 16], 128).unwrap();
        assert!(whole.includes(&[1; 16]) && !whole.includes(&[3; 16]));
    }

    proptest! {
        /// Whatever is set and cleared: each GID has one port, and none is kept that is not used.
        #[test]
        fn the_books_always_balance(
            steps in prop::collection::vec((0usize..2, 0u32..5, 0u8..6, any::<bool>()), 0..80),
        ) {
            let (all, ports) = ports(GidPolicy::All);
            for (at, index, gid, clears) in steps {
                if clears {
                    let _ = ports[at].clear(index);
                } else {
                    let _ = ports[at].set(index, [gid; 16]);
                }
                for gid in 1..6 {
                    let has = |port: &PortGids| {
                        let set = port.list();
                        port.home == [gid; 16] || set.iter().any(|(_, its)| *its == [gid; 16])
                    };
                    let owner = ports.iter().find(|port| has(port)).map(|port| port.home);
                    prop_assert_eq!(all.home(&[gid; 16]), owner);
                    prop_assert!(ports.iter().filter(|port| has(port)).count() <= 1);
                }
            }
        }
    }
}
