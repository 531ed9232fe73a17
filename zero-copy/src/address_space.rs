//! The memory of one VM as its backend sees it.

use crate::memory_file;
use crate::registration::Registration;
use crate::snapshot::{AddressSpaceError, Range, RangeKind, Snapshot};
use crate::topology::{Node, Topology, majority};
use crate::view::View;
use farlane_abi::width::to_usize;
use farlane_sys::sync::{lock, read, write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, Weak};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Pages by which the node of a granule is told.
const SAMPLES: u8 = 4;
/// Granules that are looked at between two moments at which memory can go away.
const GRANULES_AT_ONCE: usize = 1024;

/// On which node a part of the memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// First address of the range that it belongs to.
    pub range: u64,
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// The node; none where no sampled page has memory yet.
    pub node: Option<Node>,
    /// The node from which memory will come, as far as the range's policy says.
    pub preferred: Option<Node>,
}

/// The memory of one VM: ranges of guest-physical addresses that come and go.
///
/// A lookup sees one consistent state. A range that goes away is drained before
/// [`replace_ram`](Self::replace_ram) or [`clear`](Self::clear) returns: every
/// [`Region`](crate::Region) over it is revoked, but those of all memory, which have the rest of it
/// then, and no transfer touches it any more.
#[derive(Debug, Default)]
pub struct AddressSpace {
    current: RwLock<Arc<Snapshot>>,
    /// Held while the space is changed, but not while views are waited for: earlier states of which
    /// there may be some.
    change: Mutex<Vec<Weak<Snapshot>>>,
    /// Regions that have all memory there is.
    led: Mutex<Vec<Weak<Registration>>>,
    kind: RangeKind,
}

impl AddressSpace {
    /// An address space without memory.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// One for memory of devices.
    #[must_use]
    pub fn of_devices() -> Arc<Self> {
        Arc::new(Self {
            kind: RangeKind::DeviceBar,
            ..Self::default()
        })
    }

    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&read(&self.current))
    }

    /// Has a region that follows have all memory that there is, from now on.
    pub(crate) fn lead(&self, region: &Arc<Registration>) {
        let mut led = lock(&self.led);
        led.retain(|region| region.strong_count() > 0);
        led.push(Arc::downgrade(region));
        drop(led);
        self.show(region);
    }

    /// The state is asked for during the exchange: of two that change it, the last one has its way.
    fn show(&self, region: &Registration) {
        region.exchange(|| self.snapshot().all_ram());
    }

    /// Takes a vhost-user memory table. Ranges that are in the old and in the new one (same
    /// address, length, file and offset) stay as they are, and so does what is registered in
    /// them.
    ///
    /// # Errors
    /// A range without a file, overlapping ranges, or what `mmap` says; nothing is changed then.
    pub fn replace_ram(&self, memory: &GuestMemoryMmap) -> Result<(), AddressSpaceError> {
        let earlier = lock(&self.change);
        let old = self.snapshot();
        let mut ranges: Vec<Arc<Range>> = Vec::new();
        for region in memory.iter() {
            let start = region.start_addr().raw_value();
            let file_offset = region
                .file_offset()
                .ok_or(AddressSpaceError::NotShared { address: start })?;
            let (file, offset) = (file_offset.file().as_fd(), file_offset.start());
            memory_file::check_ram(file, (offset, region.len()))?;
            let (range, file) = ((start, region.len()), (file, offset));
            ranges.push(old.keep_or_map(self.kind, range, file, true)?);
        }
        ranges.sort_by_key(|r| r.start);
        for pair in ranges.windows(2) {
            if let [a, b] = pair
                && a.end() >= b.start
            {
                return Err(AddressSpaceError::Overlap {
                    address: b.start,
                    length: b.length,
                });
            }
        }
        self.publish(earlier, &old, ranges);
        Ok(())
    }

    /// Adds a range of guest-physical addresses behind which the bytes of a file lie: of a file of
    /// this host, such as a PCI function's BAR in sysfs, or one that somebody has sent and that was
    /// [checked](crate::memory_file).
    ///
    /// # Errors
    /// It overlaps another, the file is too short, or what `mmap` says; nothing is changed then.
    pub fn map(
        &self,
        start: u64,
        length: u64,
        file: BorrowedFd<'_>,
        file_offset: u64,
        writable: bool,
    ) -> Result<(), AddressSpaceError> {
        self.map_kind(self.kind, (start, length), (file, file_offset), writable)
    }

    /// As [`map`](Self::map), for memory of a device.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_device(
        &self,
        start: u64,
        length: u64,
        file: BorrowedFd<'_>,
        file_offset: u64,
        writable: bool,
    ) -> Result<(), AddressSpaceError> {
        self.map_kind(
            RangeKind::DeviceBar,
            (start, length),
            (file, file_offset),
            writable,
        )
    }

    fn map_kind(
        &self,
        kind: RangeKind,
        (start, length): (u64, u64),
        (file, file_offset): (BorrowedFd<'_>, u64),
        writable: bool,
    ) -> Result<(), AddressSpaceError> {
        let earlier = lock(&self.change);
        let stat = rustix::fs::fstat(file).map_err(std::io::Error::from)?;
        memory_file::holds(&stat, (file_offset, length))?;
        let none = Snapshot::default();
        let place = (file, file_offset);
        let range = none.keep_or_map(kind, (start, length), place, writable)?;
        let old = self.snapshot();
        let at = old.ranges.partition_point(|r| r.start < start);
        let before = at.checked_sub(1).and_then(|i| old.ranges.get(i));
        let after = old.ranges.get(at);
        if before.is_some_and(|r| r.end() >= start) || after.is_some_and(|r| r.start <= range.end())
        {
            return Err(AddressSpaceError::Overlap {
                address: start,
                length,
            });
        }
        let mut ranges = old.ranges.clone();
        ranges.insert(at, range);
        self.publish(earlier, &old, ranges);
        Ok(())
    }

    /// Takes away a range that [`map`](Self::map) has added. When this returns, nothing touches it.
    ///
    /// # Errors
    /// There is no such range.
    pub fn unmap(&self, start: u64, length: u64) -> Result<(), AddressSpaceError> {
        let earlier = lock(&self.change);
        let old = self.snapshot();
        let mut ranges = old.ranges.clone();
        ranges.retain(|r| (r.start, r.length) != (start, length));
        if ranges.len() == old.ranges.len() {
            return Err(AddressSpaceError::NotARange {
                address: start,
                length,
            });
        }
        self.publish(earlier, &old, ranges);
        Ok(())
    }

    /// The space as it is now, for transfers. Whoever takes a range away waits until all views
    /// that have it are dropped.
    #[must_use]
    pub fn view(&self) -> View {
        let current = read(&self.current);
        View::new(&current)
    }

    /// Makes `ranges` the current state. When this returns, nothing touches a range of an earlier
    /// state that is not among them. Whoever changes it meanwhile does not wait for that.
    fn publish(
        &self,
        mut earlier: MutexGuard<'_, Vec<Weak<Snapshot>>>,
        old: &Arc<Snapshot>,
        ranges: Vec<Arc<Range>>,
    ) {
        let gone: Vec<_> = old
            .ranges
            .iter()
            .filter(|r| !ranges.iter().any(|n| Arc::ptr_eq(r, n)))
            .cloned()
            .collect();
        *write(&self.current) = Arc::new(Snapshot::new(ranges));
        earlier.retain(|state| state.upgrade().is_some_and(|s| s.views.any()));
        earlier.push(Arc::downgrade(old));
        let states: Vec<_> = earlier.iter().filter_map(Weak::upgrade).collect();
        drop(earlier);
        let led: Vec<_> = lock(&self.led).iter().filter_map(Weak::upgrade).collect();
        for region in led {
            self.show(&region);
        }
        if gone.is_empty() {
            return;
        }
        for range in gone {
            range.drain();
        }
        for state in states {
            state.views.wait();
        }
    }

    /// Takes all memory away.
    pub fn clear(&self) {
        let earlier = lock(&self.change);
        let old = self.snapshot();
        self.publish(earlier, &old, Vec::new());
    }

    /// The kind and the NUMA node of the memory at `address`.
    #[must_use]
    pub fn locate(&self, address: u64, topology: &Topology) -> Option<(RangeKind, Option<Node>)> {
        let snapshot = self.snapshot();
        let range = snapshot.find(address)?;
        let node = topology.node_of_range(range.mapping.base(), range.mapping.len());
        Some((range.kind, node))
    }

    /// Calls `each` for all memory, in order: for a range that is bound to a node at once, for
    /// others in parts of up to `granule` bytes, each by the node of most of its sampled pages.
    pub fn place(&self, topology: &Topology, granule: u64, mut each: impl FnMut(Placed)) {
        let mut at = Some(0);
        while let Some(from) = at {
            at = self.place_some(topology, (granule, GRANULES_AT_ONCE), from, &mut each);
        }
    }

    /// As [`place`](Self::place) says of the part that an address is in, of which nothing before
    /// the address is looked at.
    #[must_use]
    pub fn place_at(&self, topology: &Topology, granule: u64, address: u64) -> Option<Placed> {
        let mut found = None;
        self.place_some(topology, (granule, 1), address, &mut |part| {
            found = (part.start..part.end).contains(&address).then_some(part);
        });
        found
    }

    /// As [`place`](Self::place), for some of the memory from an address on, in so many parts at
    /// most; returns where it goes on. So whoever takes memory away does not wait for all of it to
    /// be looked at.
    fn place_some(
        &self,
        topology: &Topology,
        (granule, most): (u64, usize),
        from: u64,
        each: &mut impl FnMut(Placed),
    ) -> Option<u64> {
        // The view keeps what is looked at mapped.
        let view = self.view();
        let ranges = &view.state().ranges;
        let range = ranges.get(ranges.partition_point(|r| r.end() < from))?;
        let (base, end) = (range.mapping.base(), range.start + range.length);
        if let Some(node) = topology.binding_of_range(base, range.mapping.len()) {
            each(Placed {
                range: range.start,
                start: range.start,
                end,
                node: Some(node),
                preferred: None,
            });
            return Some(end);
        }
        let address_of = |guest: u64| {
            base.wrapping_add(to_usize(guest - range.start))
                .cast_const()
        };
        let mut parts = Vec::with_capacity(most);
        let mut pages = Vec::with_capacity(most * usize::from(SAMPLES));
        let mut at = from.max(range.start);
        while at < end && parts.len() < most {
            let until = (at / granule + 1).saturating_mul(granule).min(end);
            parts.push((at, until));
            let step = (until - at) / u64::from(SAMPLES);
            pages.extend((0..SAMPLES).map(|n| address_of(at + step * u64::from(n))));
            at = until;
        }
        let preferred = topology.preference(base);
        let nodes = topology.nodes_of_pages(&pages);
        for ((start, end), nodes) in parts.into_iter().zip(nodes.chunks(usize::from(SAMPLES))) {
            each(Placed {
                range: range.start,
                start,
                end,
                node: majority(nodes),
                preferred,
            });
        }
        Some(at)
    }

    /// Ranges there are: (address, length in bytes, kind), in order.
    #[must_use]
    pub fn ranges(&self) -> Vec<(u64, u64, RangeKind)> {
        self.snapshot()
            .ranges
            .iter()
            .map(|r| (r.start, r.length, r.kind))
            .collect()
    }
}
