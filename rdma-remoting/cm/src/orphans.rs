//! What ends beyond its user.

use crate::fields::{CommId, Gid};
use std::collections::{BTreeMap, BTreeSet};

/// Why there is a connection without a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Orphan {
    /// Its peer has not answered that it ends.
    Ending,
    /// Something of it may be under way: its number in [`Orphans`].
    Kept(u64),
}

/// Connections of which something may be under way, by their peers: where there are too many, one
/// of the peer goes that has most.
#[derive(Debug)]
pub(crate) struct Orphans {
    limit: usize,
    /// How many there were.
    numbered: u64,
    /// Of each peer, the oldest first.
    by_peer: BTreeMap<Gid, BTreeMap<u64, CommId>>,
    /// How many each peer has.
    sizes: BTreeSet<(usize, Gid)>,
    count: usize,
}

impl Orphans {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            numbered: 0,
            by_peer: BTreeMap::new(),
            sizes: BTreeSet::new(),
            count: 0,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Takes one more, and says its number.
    pub(crate) fn insert(&mut self, peer: Gid, id: CommId) -> u64 {
        self.numbered += 1;
        let number = self.numbered;
        self.change(peer, |its| {
            its.insert(number, id);
        });
        self.count += 1;
        number
    }

    /// One is over.
    pub(crate) fn remove(&mut self, peer: Gid, number: u64) {
        let has_it = |its: &BTreeMap<u64, CommId>| its.contains_key(&number);
        if self.by_peer.get(&peer).is_some_and(has_it) {
            self.change(peer, |its| {
                its.remove(&number);
            });
            self.count -= 1;
        }
    }

    /// The one that is to be forgotten, where there are too many.
    pub(crate) fn surplus(&self) -> Option<CommId> {
        if self.count <= self.limit {
            return None;
        }
        let (_, peer) = self.sizes.last()?;
        let (_, oldest) = self.by_peer.get(peer)?.first_key_value()?;
        Some(*oldest)
    }

    /// Changes what a peer has.
    fn change(&mut self, peer: Gid, change: impl FnOnce(&mut BTreeMap<u64, CommId>)) {
        let its = self.by_peer.entry(peer).or_default();
        self.sizes.remove(&(its.len(), peer));
        change(its);
        match its.len() {
            0 => {
                self.by_peer.remove(&peer);
            }
            count => {
                self.sizes.insert((count, peer));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FEW: Gid = Gid([1; 16]);
    const MANY: Gid = Gid([2; 16]);

    #[test]
    fn the_oldest_of_the_peer_that_has_most_goes() {
        let mut orphans = Orphans::new(4);
        let numbers: Vec<u64> = [(FEW, 1), (FEW, 2), (MANY, 3), (MANY, 4)]
            .map(|(peer, id)| orphans.insert(peer, CommId(id)))
            .into();
        assert_eq!((orphans.count(), orphans.surplus()), (4, None));
        let number = orphans.insert(MANY, CommId(5));
        assert_eq!(orphans.surplus(), Some(CommId(3)));
        orphans.remove(MANY, numbers[2]);
        assert_eq!((orphans.count(), orphans.surplus()), (4, None));
        // Of what is not there any more nothing goes.
        orphans.remove(MANY, numbers[2]);
        orphans.remove(FEW, number);
        assert_eq!(orphans.count(), 4);
        for (peer, number) in [
            (FEW, numbers[0]),
            (FEW, numbers[1]),
            (MANY, numbers[3]),
            (MANY, number),
        ] {
            orphans.remove(peer, number);
        }
        assert_eq!(orphans.count(), 0);
        assert!(orphans.by_peer.is_empty() && orphans.sizes.is_empty());
    }

    #[test]
    fn where_there_may_be_none_none_stays() {
        let mut orphans = Orphans::new(0);
        let number = orphans.insert(FEW, CommId(1));
        assert_eq!(orphans.surplus(), Some(CommId(1)));
        orphans.remove(FEW, number);
        assert_eq!(orphans.surplus(), None);
    }
}
