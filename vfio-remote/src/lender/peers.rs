//! Memory of one device that another one of the same lender reaches (device-lending-2019, section
//! 6): both are held for the same VM.

use super::device::Device;
use crate::link::message::{PeerKey, Refusal};
use farlane_pci::{AccessError, DmaMapping, DmaTarget, Function, Region, SharedArea};
use farlane_zero_copy::chain;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What a device has for others, while it is held.
pub(crate) struct Lent {
    /// Who knows it is told it by the holder.
    pub key: PeerKey,
    /// Memory that the holder has been given to map.
    pub areas: Vec<SharedArea>,
    /// Never the last reference to it.
    pub function: Weak<dyn Function>,
}

/// A range that another device, the source, reaches in this one.
pub(crate) struct PeerUse {
    address: u64,
    length: u64,
    /// None once the range has been taken away. Held while it is, and while it is being mapped.
    source: Mutex<Option<Arc<dyn Function>>>,
}

impl PeerUse {
    /// Takes the range away, unless that has been done. When this has succeeded, the source does not
    /// touch it; else it may, and this can be tried again.
    pub fn end(&self) -> Result<(), AccessError> {
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = &*source {
            function.unmap(self.address, self.length)?;
        }
        *source = None;
        Ok(())
    }

    /// The range ends with the source. Nobody else has its function when this returns.
    pub fn take(&self) {
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        drop(source.take());
    }
}

impl Lent {
    /// Whether somebody knows the key. Takes as long for each wrong one.
    fn is_opened_by(&self, key: PeerKey) -> bool {
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
        (address, length, writable): (u64, u64, bool),
    ) -> Result<Arc<PeerUse>, Refusal> {
        let name = &self.offer.name;
        let mut state = self.state();
        let lent = state.lent.as_ref().filter(|lent| lent.is_opened_by(key));
        let lent = lent.ok_or_else(|| Refusal::Invalid(format!("{name} has another key")))?;
        let described = self.offer.source.description().region(region);
        let described = described.filter(|d| {
            let inside = offset.checked_add(length).is_some_and(|end| end <= d.size);
            inside && region.bar().is_some() && (d.writable || !writable)
        });
        let target = described.and_then(|_| lent.find(region, offset, length));
        let target = target.ok_or_else(|| {
            Refusal::Invalid(format!(
                "{name} has no memory for others at {offset:#x} of {region:?}"
            ))
        })?;
        let mapping = DmaMapping {
            address,
            length,
            writable,
            target,
        };
        let used = Arc::new(PeerUse {
            address,
            length,
            source: Mutex::default(),
        });
        // A lease that ends from now on waits for what is here, and takes it away. Nobody else waits for it.
        let mut slot = used.source.lock().unwrap_or_else(PoisonError::into_inner);
        state.users.push(Arc::clone(&used));
        drop(state);
        let mapped = source.map(mapping);
        if mapped.is_ok() {
            *slot = Some(Arc::clone(source));
        }
        drop(slot);
        if let Err(e) = mapped {
            self.forget(&used);
            return Err(Refusal::Invalid(chain(&e)));
        }
        Ok(used)
    }

    /// A range was taken away, or is about to be.
    pub fn forget(&self, used: &Arc<PeerUse>) {
        self.state().users.retain(|other| !Arc::ptr_eq(other, used));
    }
}
