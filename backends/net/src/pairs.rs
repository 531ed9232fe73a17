//! Queue pairs of an interface, their number, and its virtqueues (virtio 1.2, 5.1.2).

use crate::bits::low16;
use std::fmt;

/// A queue pair, by its number, which begins at 0. Its receive queue, its transmit queue, its queue
/// of the port and its worker all go by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PairId(pub u16);

impl PairId {
    /// The one that each interface has.
    pub const FIRST: Self = Self(0);

    /// Its place among the pairs of an interface.
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }
}

impl fmt::Display for PairId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How many queue pairs: those of an interface, or the first so many of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct PairCount(pub u16);

impl PairCount {
    /// None.
    pub const NONE: Self = Self(0);
    /// The first alone.
    pub const ONE: Self = Self(1);

    /// Those that come before `first_left_out`.
    #[must_use]
    pub const fn before(first_left_out: PairId) -> Self {
        Self(first_left_out.0)
    }

    /// Whether a pair is one of them.
    #[must_use]
    pub fn contains(self, pair: PairId) -> bool {
        pair.0 < self.0
    }

    /// They, in order.
    pub fn ids(self) -> impl Iterator<Item = PairId> {
        (0..self.0).map(PairId)
    }

    /// One of them by a hash: all are as likely. The first where there are none.
    #[must_use]
    pub fn by_hash(self, hash: u32) -> PairId {
        let place = hash.checked_rem(self.0.into()).unwrap_or_default();
        PairId(low16(place.into()))
    }

    /// A pair that is one of them, by one that may not be: the remainder of its number. The first
    /// where there are none.
    #[must_use]
    pub fn wrap(self, pair: PairId) -> PairId {
        PairId(pair.0.checked_rem(self.0).unwrap_or_default())
    }
}

impl fmt::Display for PairCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One of the two queues of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The guest receives from it.
    Receive,
    /// The guest sends into it.
    Transmit,
}

/// A virtqueue of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetQueue {
    /// One of a pair's: `receiveqN` or `transmitqN`.
    Frames(PairId, Side),
    /// `controlq`.
    Control,
}

impl NetQueue {
    /// The virtqueues of an interface of so many pairs: the control queue is the last.
    #[must_use]
    pub const fn count(pairs: PairCount) -> u16 {
        2 * pairs.0 + 1
    }

    /// The virtqueue of this index, if the interface has it.
    #[must_use]
    pub fn at(index: u16, pairs: PairCount) -> Option<Self> {
        let pair = PairId(index / 2);
        let side = if index.is_multiple_of(2) {
            Side::Receive
        } else {
            Side::Transmit
        };
        if pairs.contains(pair) {
            return Some(Self::Frames(pair, side));
        }
        (index == Self::count(pairs) - 1).then_some(Self::Control)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_names_one_virtqueue_of_those_that_there_are() {
        let pairs = PairCount(2);
        let queues = [
            NetQueue::Frames(PairId(0), Side::Receive),
            NetQueue::Frames(PairId(0), Side::Transmit),
            NetQueue::Frames(PairId(1), Side::Receive),
            NetQueue::Frames(PairId(1), Side::Transmit),
            NetQueue::Control,
        ];
        let found = (0..NetQueue::count(pairs)).map(|index| NetQueue::at(index, pairs));
        assert!(found.eq(queues.map(Some)));
        for index in [5, 6, u16::MAX - 1, u16::MAX] {
            assert_eq!(NetQueue::at(index, pairs), None, "{index}");
        }
    }

    #[test]
    fn a_pair_that_is_left_out_is_taken_for_one_that_is_not() {
        let pairs = PairCount(3);
        let wrapped = PairCount(7).ids().map(|pair| pairs.wrap(pair).0);
        assert!(wrapped.eq([0, 1, 2, 0, 1, 2, 0]));
        assert_eq!(PairCount::NONE.wrap(PairId(5)), PairId::FIRST);
        assert!(pairs.ids().all(|pair| pairs.contains(pair)));
        assert_eq!(PairCount::before(PairId(3)), pairs);
    }
}
