//! What the regions of a VM cost the backend, and regions whose extents have not all come yet.
//!
//! A region of a VM is a list of extents that the backend keeps, and a guest can announce the same
//! memory as often as it likes. So each region is charged to the VM, against a budget that grows
//! with its memory.

use crate::request::{Extents, NewRegion, most_extents};
use farlane_abi::ids::{ContextId, RegionId};
use farlane_abi::{Errno, PAGE_BYTES};
use std::collections::HashMap;

/// Cost of a region, whatever its extents, in extents.
const REGION_COST: u64 = 8;
/// Regions of one context that can be incomplete at a time.
const MAX_INCOMPLETE: usize = 16;

/// Extents that regions of a VM with so much memory may have: all of it four times, page by page,
/// and something for a start.
#[must_use]
pub fn budget(ram_bytes: u64) -> u64 {
    ram_bytes / PAGE_BYTES * 4 + (1 << 16)
}

/// A region with all its extents.
#[derive(Debug, PartialEq, Eq)]
pub struct Complete {
    /// What was announced.
    pub new: NewRegion,
    /// Its extents, exactly as long.
    pub extents: Extents,
}

#[derive(Debug)]
struct Incomplete {
    new: NewRegion,
    extents: Extents,
    bytes: u64,
}

#[derive(Debug)]
struct Entry {
    cost: u64,
    /// Taken when the last extent has come.
    incomplete: Option<Incomplete>,
}

/// The regions of one VM.
#[derive(Debug, Default)]
pub struct Regions {
    /// By context and region.
    contexts: HashMap<ContextId, HashMap<RegionId, Entry>>,
    /// Sum of all costs.
    used: u64,
}

impl Regions {
    /// A region is announced. `Some` when these are all its extents. A region that then cannot be
    /// made must be [forgotten](Self::forget).
    ///
    /// # Errors
    /// `EEXIST` for an id in use, `ENOMEM` where the budget does not allow it, `EBUSY` where too
    /// many of the context's regions are incomplete.
    pub fn begin(
        &mut self,
        context: ContextId,
        new: NewRegion,
        extents: Extents,
        budget: u64,
    ) -> Result<Option<Complete>, Errno> {
        let regions = self.contexts.entry(context).or_default();
        if regions.contains_key(&new.region) {
            return Err(Errno::EEXIST);
        }
        let incomplete = regions.values().filter(|e| e.incomplete.is_some()).count();
        if incomplete >= MAX_INCOMPLETE {
            return Err(Errno::EBUSY);
        }
        if self.used + REGION_COST > budget {
            return Err(Errno::ENOMEM);
        }
        self.used += REGION_COST;
        let entry = Entry {
            cost: REGION_COST,
            incomplete: Some(Incomplete {
                new,
                extents: Vec::new(),
                bytes: 0,
            }),
        };
        regions.insert(new.region, entry);
        self.add(context, new.region, extents, budget)
    }

    /// More extents of an incomplete region. `Some` when they are the last ones. An error ends
    /// the region.
    ///
    /// # Errors
    /// `ENOENT` where there is no such region, `EINVAL` for more extents or bytes than it has,
    /// `ENOMEM` where the budget does not allow it.
    pub fn add(
        &mut self,
        context: ContextId,
        region: RegionId,
        extents: Extents,
        budget: u64,
    ) -> Result<Option<Complete>, Errno> {
        let entry = self
            .contexts
            .get_mut(&context)
            .and_then(|regions| regions.get_mut(&region))
            .ok_or(Errno::ENOENT)?;
        let incomplete = entry.incomplete.as_mut().ok_or(Errno::ENOENT)?;
        let count = extents.len() as u64;
        // Each extent lies within 2^64 and a request has few: no overflow that matters, and the
        // sum is bounded by the region's length below.
        let bytes = extents
            .iter()
            .try_fold(incomplete.bytes, |sum, &(_, bytes)| sum.checked_add(bytes))
            .filter(|&sum| sum <= incomplete.new.length);
        let gathered = incomplete.extents.len() as u64 + count;
        let result = match bytes {
            Some(bytes) if gathered <= most_extents(incomplete.new.length) => {
                if self.used + count > budget {
                    Err(Errno::ENOMEM)
                } else {
                    incomplete.bytes = bytes;
                    incomplete.extents.extend(extents);
                    self.used += count;
                    entry.cost += count;
                    Ok(())
                }
            }
            _ => Err(Errno::EINVAL),
        };
        if let Err(errno) = result {
            self.forget(context, region);
            return Err(errno);
        }
        Ok(entry
            .incomplete
            .take_if(|i| i.bytes == i.new.length)
            .map(|i| Complete {
                new: i.new,
                extents: i.extents,
            }))
    }

    /// Whether the region waits for more extents, and so is known here only.
    #[must_use]
    pub fn is_incomplete(&self, context: ContextId, region: RegionId) -> bool {
        self.contexts
            .get(&context)
            .and_then(|regions| regions.get(&region))
            .is_some_and(|e| e.incomplete.is_some())
    }

    /// A region has gone.
    pub fn forget(&mut self, context: ContextId, region: RegionId) {
        let entry = self
            .contexts
            .get_mut(&context)
            .and_then(|regions| regions.remove(&region));
        self.used -= entry.map_or(0, |e| e.cost);
    }

    /// A context has gone.
    pub fn forget_context(&mut self, context: ContextId) {
        let regions = self.contexts.remove(&context).unwrap_or_default();
        self.used -= regions.values().map(|e| e.cost).sum::<u64>();
    }

    /// All have gone.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Kind;
    use proptest::prelude::*;

    fn context(number: u32) -> ContextId {
        ContextId::new(number).unwrap()
    }

    fn region(number: u32) -> RegionId {
        RegionId::new(number).unwrap()
    }

    fn new(number: u32, length: u64) -> NewRegion {
        NewRegion {
            region: region(number),
            kind: Kind::Pin { writable: true },
            address: 0,
            length,
        }
    }

    #[test]
    fn extents_of_several_requests_become_one_region() {
        let mut regions = Regions::default();
        let all: Extents = (0..5).map(|i| (i << 20, PAGE_BYTES)).collect();
        let whole = new(7, 5 * PAGE_BYTES);
        assert_eq!(
            regions.begin(context(1), whole, all[..2].to_vec(), 1000),
            Ok(None)
        );
        assert_eq!(
            regions.add(context(1), region(7), all[2..3].to_vec(), 1000),
            Ok(None)
        );
        // Another context's region of the same number is another one.
        assert_eq!(
            regions.add(context(2), region(7), all[3..].to_vec(), 1000),
            Err(Errno::ENOENT)
        );
        let complete = regions
            .add(context(1), region(7), all[3..].to_vec(), 1000)
            .unwrap()
            .unwrap();
        assert_eq!(
            complete,
            Complete {
                new: whole,
                extents: all.clone()
            }
        );
        assert_eq!(
            regions.add(context(1), region(7), all.clone(), 1000),
            Err(Errno::ENOENT)
        );
        assert_eq!(
            regions.begin(context(1), whole, all, 1000),
            Err(Errno::EEXIST)
        );
        assert_eq!(regions.used, REGION_COST + 5);
        assert!(!regions.is_incomplete(context(1), region(7)));
        regions.forget(context(1), region(7));
        assert_eq!(regions.used, 0);
    }

    #[test]
    fn too_much_ends_the_region() {
        let mut regions = Regions::default();
        let page = |n: u64| vec![(n, PAGE_BYTES)];
        regions
            .begin(context(0), new(1, 2 * PAGE_BYTES), page(0), 1000)
            .unwrap();
        assert_eq!(
            regions.add(context(0), region(1), vec![(0, PAGE_BYTES + 1)], 1000),
            Err(Errno::EINVAL)
        );
        assert_eq!(
            regions.add(context(0), region(1), page(1), 1000),
            Err(Errno::ENOENT)
        );
        // One byte at a time is not how memory is cut.
        regions
            .begin(context(0), new(1, 1000), vec![(0, 1); 2], 1000)
            .unwrap();
        assert_eq!(
            regions.add(context(0), region(1), vec![(0, 1)], 1000),
            Err(Errno::EINVAL)
        );
        assert_eq!(regions.used, 0);
        assert_eq!(
            regions.begin(context(0), new(1, 2 * PAGE_BYTES), page(0), REGION_COST),
            Err(Errno::ENOMEM)
        );
        assert_eq!(regions.used, 0);
        for region in 0..16 {
            regions
                .begin(context(0), new(region, 2 * PAGE_BYTES), page(0), 1000)
                .unwrap();
        }
        assert_eq!(
            regions.begin(context(0), new(99, 2 * PAGE_BYTES), page(0), 1000),
            Err(Errno::EBUSY)
        );
        assert!(regions.is_incomplete(context(0), region(3)));
        regions.forget(context(0), region(3));
        regions
            .begin(context(0), new(99, 2 * PAGE_BYTES), page(0), 1000)
            .unwrap();
        regions.forget_context(context(0));
        assert_eq!(regions.used, 0);
    }

    proptest! {
        #[test]
        fn the_books_always_balance(
            steps in prop::collection::vec((0u32..3, 0u32..4, 0u8..5, 1u64..6), 1..200),
        ) {
            const BUDGET: u64 = 80;
            let mut regions = Regions::default();
            for (of, number, step, pages) in steps {
                let (of, region) = (context(of), region(number));
                let extents: Extents = (0..pages).map(|i| (i << 20, PAGE_BYTES)).collect();
                match step {
                    0 => {
                        let new = new(number, 5 * PAGE_BYTES);
                        let _ = regions.begin(of, new, extents, BUDGET);
                    }
                    1 | 2 => { let _ = regions.add(of, region, extents, BUDGET); }
                    3 => { regions.forget(of, region); }
                    _ => regions.forget_context(of),
                }
                let entries = regions.contexts.values().flat_map(|r| r.values());
                let sum: u64 = entries.map(|e| e.cost).sum();
                prop_assert_eq!(regions.used, sum);
                prop_assert!(sum <= BUDGET);
            }
        }
    }
}
