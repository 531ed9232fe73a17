//! What peers share, so that none takes all of it.

use crate::fields::Gid;
use std::collections::BTreeMap;

/// Places of which a peer has at most half of what others have left, rounded up. A peer is a GID.
#[derive(Clone, Debug)]
pub struct Shares {
    limit: usize,
    taken: usize,
    by_peer: BTreeMap<Gid, usize>,
}

impl Shares {
    /// So many places.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            taken: 0,
            by_peer: BTreeMap::new(),
        }
    }

    /// Whether a peer gets one more.
    #[must_use]
    pub fn has_one_for(&self, peer: Gid) -> bool {
        self.has_one_beside(0, peer)
    }

    /// Whether a peer gets one more, where so many are taken that are no peer's.
    pub(crate) fn has_one_beside(&self, others: usize, peer: Gid) -> bool {
        let had = self.by_peer.get(&peer).copied().unwrap_or_default();
        had < self.limit.saturating_sub(self.taken + others)
    }

    /// Takes one that there is.
    pub fn take(&mut self, peer: Gid) {
        self.taken += 1;
        *self.by_peer.entry(peer).or_default() += 1;
    }

    /// Gives one back that it has taken.
    pub fn give_back(&mut self, peer: Gid) {
        let Some(had) = self.by_peer.get_mut(&peer) else {
            return;
        };
        *had -= 1;
        self.taken -= 1;
        if *had == 0 {
            self.by_peer.remove(&peer);
        }
    }

    /// How many are taken.
    pub(crate) fn taken(&self) -> usize {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_leaves_as_many_as_it_has_and_gives_all_back() {
        let [one, other] = [Gid([1; 16]), Gid([2; 16])];
        let mut shares = Shares::new(8);
        let take_all = |shares: &mut Shares, peer| {
            let mut taken = 0;
            while shares.has_one_for(peer) {
                shares.take(peer);
                taken += 1;
            }
            taken
        };
        assert_eq!(take_all(&mut shares, one), 4);
        assert_eq!(take_all(&mut shares, other), 2);
        for _ in 0..4 {
            shares.give_back(one);
        }
        assert_eq!((shares.taken(), shares.by_peer.len()), (2, 1));
        assert_eq!(take_all(&mut shares, one), 3);
        assert!(shares.has_one_for(other) && !shares.has_one_beside(1, other));
        assert!(Shares::new(1).has_one_for(one));
        assert!(!Shares::new(0).has_one_for(one));
    }
}
