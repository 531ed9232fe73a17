//! Memory of one device that another one of the same lender reaches (device-lending-2019, section
//! 6): both are held for the same VM.

use super::device::Device;
use super::reach::DmaRange;
use crate::protocol::message::{Fence, PeerKey, Refusal};
use farlane_pci::{AccessError, AddressRange, DmaMapping, DmaTarget, Function, Region, SharedArea};
use farlane_sys::chain;
use farlane_sys::sync::lock;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// What a device has for others, while it is held.
#[derive(Clone)]
pub(crate) struct PeerAccess {
    /// Number of the lease.
    pub fence: Fence,
    /// Who knows it is told it by the holder.
    pub key: PeerKey,
    /// Memory that the holder has been given to map.
    pub areas: Vec<SharedArea>,
    /// Never the last reference to it.
    pub function: Weak<dyn Function>,
}

/// Whether the source of a [`PeerRange`] reaches its range.
enum RangeState {
    /// As long as this is not taken away from it.
    Mapped(Arc<dyn Function>),
    /// Not yet, or no more.
    Unmapped,
    /// It was not to be taken away, and goes with the source.
    Stuck,
}

/// A range that another device, the source, reaches in this one.
pub(crate) struct PeerRange {
    range: AddressRange,
    /// Held while the range is taken away, and while it is being mapped.
    reached: Mutex<RangeState>,
}

impl PeerRange {
    /// Has `source` reach a range. `register` makes it known to whoever may end it; from then on
    /// that waits for the mapping. Where it cannot be mapped, `forget` undoes that.
    pub fn map(
        source: &Arc<dyn Function>,
        mapping: DmaMapping,
        register: impl FnOnce(&Arc<Self>),
        forget: impl FnOnce(&Arc<Self>),
    ) -> Result<Arc<Self>, Refusal> {
        let used = Arc::new(Self {
            range: mapping.range,
            reached: Mutex::new(RangeState::Unmapped),
        });
        let mut reached = used.reached();
        register(&used);
        let mapped = source.map(mapping);
        if mapped.is_ok() {
            *reached = RangeState::Mapped(Arc::clone(source));
        }
        drop(reached);
        if let Err(e) = mapped {
            forget(&used);
            return Err(Refusal::Invalid(chain(&e)));
        }
        Ok(used)
    }

    fn reached(&self) -> MutexGuard<'_, RangeState> {
        lock(&self.reached)
    }

    /// Takes the range away, unless that has been done. When this has succeeded, the source does
    /// not touch it; else it may, and this can be tried again.
    pub fn end(&self) -> Result<(), AccessError> {
        let mut reached = self.reached();
        match &*reached {
            RangeState::Mapped(function) => function.unmap(self.range)?,
            RangeState::Unmapped => {}
            RangeState::Stuck => return Err(std::io::Error::other("it was not taken away").into()),
        }
        *reached = RangeState::Unmapped;
        Ok(())
    }

    /// The source is about to go. Takes the range away before, as far as that can be had, and says
    /// whether it was. Nobody else has the source's function when this returns.
    pub fn take(&self) -> bool {
        let ended = self.end();
        if let Err(e) = &ended {
            log::warn!(
                "A device keeps memory of another one until it is reset: {}",
                chain(e)
            );
            *self.reached() = RangeState::Stuck;
        }
        ended.is_ok()
    }
}

impl PeerAccess {
    /// Whether somebody knows the key. Takes as long for each wrong one.
    pub fn is_opened_by(&self, key: PeerKey) -> bool {
        let pairs = self.key.0.iter().zip(key.0);
        pairs.fold(0, |differences, (ours, theirs)| {
            differences | (ours ^ theirs)
        }) == 0
    }

    /// Where bytes of the device are.
    fn find(&self, region: Region, offset: u64, length: u64) -> Option<DmaTarget> {
        let end = offset.checked_add(length)?;
        let area = self.areas.iter().find(|a| {
            let a_end = a.area.offset.checked_add(a.area.size);
            a.region == region && a.area.offset <= offset && a_end.is_some_and(|e| end <= e)
        });
        match area {
            Some(found) => Some(DmaTarget::Device {
                file: Arc::clone(&found.file),
                offset: found.file_offset + (offset - found.area.offset),
            }),
            None => self.function.upgrade()?.memory(region, offset, length),
        }
    }
}

impl Device {
    /// Has `source` reach `length` bytes of this device at `address`, until that is ended or this
    /// device's lease is.
    pub fn reach(
        &self,
        key: PeerKey,
        (region, offset): (Region, u64),
        source: &Arc<dyn Function>,
        range: DmaRange,
    ) -> Result<Arc<PeerRange>, Refusal> {
        let name = &self.offer.name;
        let mut state = self.state();
        let lent = state.lent.as_ref().filter(|lent| lent.is_opened_by(key));
        let lent = lent.ok_or_else(|| Refusal::Invalid(format!("{name} has another key")))?;
        let described = self.offer.source.description().region(region);
        let described = described.filter(|d| {
            let end = offset.checked_add(range.addresses.length);
            let is_inside = end.is_some_and(|end| end <= d.size);
            is_inside && region.bar().is_some() && (d.writable || !range.writable)
        });
        let target = described.and_then(|_| lent.find(region, offset, range.addresses.length));
        let target = target.ok_or_else(|| {
            Refusal::Invalid(format!(
                "{name} has no memory for others at {offset:#x} of {region:?}"
            ))
        })?;
        // A lease that ends from now on waits for what is here, and takes it away. Nobody else
        // waits for it.
        let register = |used: &Arc<PeerRange>| {
            state.users.push(Arc::clone(used));
            drop(state);
        };
        PeerRange::map(source, range.mapping(target), register, |used| {
            self.forget(used)
        })
    }

    /// A range was taken away, or is about to be.
    pub fn forget(&self, used: &Arc<PeerRange>) {
        self.state().users.retain(|other| !Arc::ptr_eq(other, used));
    }
}
