//! Ids of the regions of one socket transport.

use farlane_abi::control::MAX_REGIONS;

/// Gives out ids below [`MAX_REGIONS`], each to one user at a time, counting from zero.
#[derive(Debug, Default)]
pub(crate) struct RegionIds {
    next: u32,
    free: Vec<u32>,
}

impl RegionIds {
    /// An id that nobody has, `None` when all are taken.
    pub(crate) fn take(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
            (self.next < MAX_REGIONS).then(|| {
                self.next += 1;
                self.next - 1
            })
        })
    }

    /// Takes an id back.
    pub(crate) fn give(&mut self, id: u32) {
        debug_assert!(id < self.next && !self.free.contains(&id));
        self.free.push(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_count_from_zero_are_reused_and_end_at_the_limit() {
        let mut ids = RegionIds::default();
        assert_eq!((ids.take(), ids.take()), (Some(0), Some(1)));
        ids.give(0);
        assert_eq!(ids.take(), Some(0));
        for id in 2..MAX_REGIONS {
            assert_eq!(ids.take(), Some(id));
        }
        assert_eq!(ids.take(), None);
        ids.give(77);
        assert_eq!(ids.take(), Some(77));
    }
}
