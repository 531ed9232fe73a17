//! What the keys of a program lead to.

use crate::PD;
use crate::rig::IOVA;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::request::{Binding, Element, MemoryKey};
use std::ops::Range;

/// A region: all memory of its side.
pub struct Region {
    pub key: MemoryKey,
    pub pd: u32,
    pub access: u32,
}

/// A window in the protection domain of the queue pairs; the first of a side is of type 1, the
/// second of type 2.
pub struct Window {
    key: MemoryKey,
    bound: Option<Bound>,
}

struct Bound {
    place: Range<usize>,
    access: u32,
    /// The queue pair that has bound it.
    by: usize,
}

impl Window {
    pub fn free(key: MemoryKey) -> Self {
        Self { key, bound: None }
    }
}

/// What a program has.
pub struct Memory {
    pub bytes: Vec<u8>,
    pub regions: Vec<Region>,
    pub windows: Vec<Window>,
}

/// Where in a memory of `size` bytes `[address, address + length)` lies.
fn range(size: usize, address: u64, length: u64) -> Option<Range<usize>> {
    let first = usize::try_from(address.checked_sub(IOVA)?).ok()?;
    let end = first.checked_add(usize::try_from(length).ok()?)?;
    (end <= size).then_some(first..end)
}

impl Memory {
    fn region(&self, pd: u32, key: MemoryKey) -> Option<&Region> {
        self.regions.iter().find(|r| r.key == key && r.pd == pd)
    }

    /// Places of the bytes that elements name, until there are `most`.
    pub fn local(
        &self,
        pd: u32,
        elements: &[Element],
        writes: bool,
        mut most: u64,
    ) -> Option<Vec<usize>> {
        let mut places = Vec::new();
        for element in elements {
            if element.length == 0 || most == 0 {
                continue;
            }
            let region = self.region(pd, element.lkey)?;
            if writes && region.access & ACCESS_LOCAL_WRITE == 0 {
                return None;
            }
            let length = most.min(element.length.into());
            places.extend(range(self.bytes.len(), element.address, length)?);
            most -= length;
        }
        Some(places)
    }

    /// Places of what the peer of queue pair `to` names.
    pub fn remote(
        &self,
        (pd, to): (u32, usize),
        key: MemoryKey,
        address: u64,
        length: u64,
        right: u32,
    ) -> Option<Range<usize>> {
        let place = range(self.bytes.len(), address, length)?;
        if let Some(region) = self.region(pd, key) {
            return (region.access & right != 0).then_some(place);
        }
        let which = self.windows.iter().position(|window| window.key == key)?;
        let bound = self.windows[which].bound.as_ref()?;
        let is_for = pd == PD && (which == 0 || bound.by == to);
        let is_inside = bound.place.start <= place.start && place.end <= bound.place.end;
        (is_for && bound.access & right != 0 && is_inside).then_some(place)
    }

    /// Whether a key names something for the peer of queue pair `to`.
    pub fn opens(&self, of: (u32, usize), key: MemoryKey, right: u32) -> bool {
        let bound = |window: &Window| window.bound.as_ref().map(|bound| bound.place.clone());
        let window = self.windows.iter().find(|window| window.key == key);
        let place = window.map_or(Some(0..self.bytes.len()), bound);
        let length = |place: &Range<usize>| (place.end - place.start) as u64;
        place.is_some_and(|place| {
            let address = IOVA + place.start as u64;
            self.remote(of, key, address, length(&place), right)
                .is_some()
        })
    }

    pub fn bind(&mut self, by: usize, binding: &Binding) -> bool {
        let leads = |window: &Window| window.key.0 >> 8 == binding.window.0 >> 8;
        let Some(which) = self.windows.iter().position(leads) else {
            return false;
        };
        let is_second = which == 1;
        if is_second && (self.windows[1].bound.is_some() || binding.length == 0) {
            return false;
        }
        let remote =
            ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC | ACCESS_FLUSH_GLOBAL;
        if binding.access & !(remote | ACCESS_LOCAL_WRITE) != 0 {
            return false;
        }
        let mut bound = None;
        if binding.length > 0 {
            let writes = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC;
            let mut needs = ACCESS_MW_BIND;
            if binding.access & writes != 0 {
                needs |= ACCESS_LOCAL_WRITE;
            }
            needs |= binding.access & ACCESS_FLUSH_GLOBAL;
            let region = self.region(PD, binding.region);
            if region.is_none_or(|region| region.access & needs != needs) {
                return false;
            }
            let Some(place) = range(self.bytes.len(), binding.address, binding.length) else {
                return false;
            };
            bound = Some(Bound {
                place,
                access: binding.access,
                by,
            });
        }
        self.windows[which] = Window {
            key: binding.key,
            bound,
        };
        true
    }

    /// Invalidates a key for a program, or for the peer of one of its queue pairs.
    pub fn invalidate(&mut self, pd: u32, peer_of: Option<usize>, key: MemoryKey) -> bool {
        let window = &mut self.windows[1];
        let bound = window.bound.as_ref();
        let is_for = bound.is_some_and(|bound| peer_of.is_none_or(|to| bound.by == to));
        let is_meant = pd == PD && window.key == key && is_for;
        if is_meant {
            window.bound = None;
        }
        is_meant
    }
}
