//! Which memory a client has shown.

use rustix::io::Errno;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Ranges of addresses that do not overlap.
#[derive(Debug, Default)]
pub struct Mappings {
    /// Bytes, by first address.
    ranges: BTreeMap<u64, u64>,
}

impl Mappings {
    /// Whether a range can be added while there are at most `limit`.
    ///
    /// # Errors
    /// `EEXIST` where it overlaps another, as the protocol wants it; `ENOSPC` where there are too
    /// many, as VFIO has it.
    pub fn check(&self, address: u64, size: u64, limit: usize) -> Result<(), Errno> {
        let end = address.checked_add(size).ok_or(Errno::INVAL)?;
        let below = (Bound::Unbounded, Bound::Excluded(end));
        let last = self.ranges.range(below).next_back();
        if last.is_some_and(|(&start, &bytes)| start.saturating_add(bytes) > address) {
            return Err(Errno::EXIST);
        }
        if self.ranges.len() >= limit {
            return Err(Errno::NOSPC);
        }
        Ok(())
    }

    /// Adds a range that has been checked.
    pub fn insert(&mut self, address: u64, size: u64) {
        self.ranges.insert(address, size);
    }

    /// The ranges that lie in one: usually itself.
    ///
    /// The protocol wants exactly a range that was mapped, and VFIO takes any that cuts none. QEMU,
    /// with an IOMMU of the guest, gives back all that its driver does at once.
    ///
    /// # Errors
    /// `ENOENT` where there are none; `EINVAL` where one lies in it in part.
    pub fn within(&self, address: u64, size: u64) -> Result<Vec<(u64, u64)>, Errno> {
        let end = address.checked_add(size).ok_or(Errno::INVAL)?;
        let before = self.ranges.range(..address).next_back();
        let cut_begin = before.is_some_and(|(&a, &s)| a.saturating_add(s) > address);
        let inside: Vec<_> = self
            .ranges
            .range(address..end)
            .map(|(&a, &s)| (a, s))
            .collect();
        let cut_end = inside
            .last()
            .is_some_and(|&(a, s)| a.saturating_add(s) > end);
        if cut_begin || cut_end {
            return Err(Errno::INVAL);
        }
        if inside.is_empty() {
            return Err(Errno::NOENT);
        }
        Ok(inside)
    }

    /// Takes a range away.
    pub fn remove(&mut self, address: u64) {
        self.ranges.remove(&address);
    }

    /// All ranges: (address, bytes).
    #[must_use]
    pub fn all(&self) -> Vec<(u64, u64)> {
        self.ranges.iter().map(|(&a, &s)| (a, s)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_never_overlap(
            ops in prop::collection::vec((0_u64..64, 1_u64..16, any::<bool>()), 1..200),
        ) {
            let covered = |model: &[u8]| model.iter().map(|&b| u64::from(b)).sum::<u64>();
            let bytes = |ranges: &[(u64, u64)]| ranges.iter().map(|r| r.1).sum::<u64>();
            let mut mappings = Mappings::default();
            let mut model = [0_u8; 128];
            let mut count = 0;
            for (address, size, insert) in ops {
                let end = address + size;
                let [from, to] = [address, end].map(|at| usize::try_from(at).unwrap());
                if insert {
                    let free = model[from..to].iter().all(|&b| b == 0);
                    let expected = match (free, count) {
                        (false, _) => Err(Errno::EXIST),
                        (true, 8) => Err(Errno::NOSPC),
                        (true, _) => Ok(()),
                    };
                    let got = mappings.check(address, size, 8);
                    prop_assert_eq!(got, expected);
                    if got.is_ok() {
                        mappings.insert(address, size);
                        model[from..to].fill(1);
                        count += 1;
                    }
                } else if let Ok(inside) = mappings.within(address, size) {
                    prop_assert_eq!(bytes(&inside), covered(&model[from..to]));
                    prop_assert!(inside.iter().all(|r| r.0 >= address && r.0 + r.1 <= end));
                    for (first, _) in inside {
                        mappings.remove(first);
                        count -= 1;
                    }
                    model[from..to].fill(0);
                }
            }
            prop_assert_eq!(mappings.all().len(), count);
            prop_assert_eq!(bytes(&mappings.all()), covered(&model));
        }
    }

    #[test]
    fn a_range_may_end_at_the_last_address() {
        let mut mappings = Mappings::default();
        let last = 0_u64.wrapping_sub(0x2000);
        assert_eq!(mappings.check(last, 0x1000, 1), Ok(()));
        mappings.insert(last, 0x1000);
        assert_eq!(mappings.check(last, 0x1000, 9), Err(Errno::EXIST));
        assert_eq!(mappings.check(last + 0x1000, 0x1000, 9), Err(Errno::INVAL));
        assert_eq!(mappings.check(0, 0x1000, 9), Ok(()));
    }
}
