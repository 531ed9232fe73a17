//! A physical function in use by one borrower.

use crate::interrupts::InterruptRouter;
use crate::kernel::Kernel;
use crate::mappings::Mappings;
use crate::source::{Counts, Shared};
use farlane_abi::width::to_u64;
use farlane_pci::registers::{self, COMMAND_IO, COMMAND_MASTER, COMMAND_MEMORY};
use farlane_pci::{
    AccessError, AddressRange, DmaMapping, DmaTarget, Function, InterruptVector, Region, Signal,
};
use farlane_sys::sync::lock;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Where the command register is.
const COMMAND: u64 = registers::COMMAND as u64;

/// Registers have at most as many bytes. What is longer is data.
const REGISTER_BYTES: usize = 8;

/// Whether a function may master the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mastery {
    /// It may.
    Allowed,
    /// It may not now.
    Withheld,
    /// It may not any more.
    Ended,
}

/// A physical function in use.
///
/// It may access memory exactly while there is some mapped for it and nobody has forbidden it: the
/// command register is the lender's, and the borrower intercepts the bit of its own driver's.
#[derive(Debug)]
pub(crate) struct VfioFunction {
    shared: Arc<Shared>,
    interrupts: Option<InterruptRouter>,
    mappings: Mutex<Mappings>,
    /// Whether it may master the bus at all. Held while the command register changes; taken after
    /// `mappings`.
    mastery: Mutex<Mastery>,
}

impl VfioFunction {
    /// The function, which nobody else uses, as after a reset.
    pub fn take(shared: Arc<Shared>) -> io::Result<Self> {
        let kernel = Arc::clone(&shared.kernel);
        set_command(&*kernel, false)?;
        kernel.reset()?;
        set_command(&*kernel, false)?;
        let interrupts = InterruptRouter::start(kernel, Arc::clone(&shared.counts.interrupts))?;
        Ok(Self {
            shared,
            interrupts: Some(interrupts),
            mappings: Mutex::default(),
            mastery: Mutex::new(Mastery::Allowed),
        })
    }

    fn kernel(&self) -> &dyn Kernel {
        &*self.shared.kernel
    }

    fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    fn mappings(&self) -> MutexGuard<'_, Mappings> {
        lock(&self.mappings)
    }

    fn mastery(&self) -> MutexGuard<'_, Mastery> {
        lock(&self.mastery)
    }

    /// Has it master the bus, if there is a reason and it may.
    fn set_master(&self, wanted: bool) -> io::Result<()> {
        let mastery = self.mastery();
        set_command(self.kernel(), *mastery == Mastery::Allowed && wanted)
    }

    fn interrupts(&self) -> Result<&InterruptRouter, AccessError> {
        // There until the drop.
        self.interrupts
            .as_ref()
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected).into())
    }

    fn check(
        &self,
        region: Region,
        offset: u64,
        length: usize,
        write: bool,
    ) -> Result<(), AccessError> {
        let description = &self.shared.description;
        let allowed = description
            .region(region)
            .is_some_and(|r| if write { r.writable } else { r.readable });
        if length > 0 && allowed && description.contains(region, offset, length) {
            Ok(())
        } else {
            Err(AccessError::region(region, offset, length))
        }
    }

    /// Counts a mapping that has come or gone.
    fn count_change(&self, changes: &AtomicU64, mappings: &Mappings) {
        changes.fetch_add(1, Ordering::Relaxed);
        let bytes = &self.counts().mapped_bytes;
        bytes.store(mappings.bytes(), Ordering::Relaxed);
    }

    fn count_access(&self, length: usize) {
        let counts = self.counts();
        counts.accesses.fetch_add(1, Ordering::Relaxed);
        if length > REGISTER_BYTES {
            let bytes = to_u64(length);
            counts.payload_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}

/// Sets which accesses the function answers (all), and whether it makes some.
fn set_command(kernel: &dyn Kernel, master: bool) -> io::Result<()> {
    let mut bytes = [0; 2];
    kernel.read(Region::Config, COMMAND, &mut bytes)?;
    let old = u16::from_le_bytes(bytes);
    let new = command(old, master);
    if new != old {
        kernel.write(Region::Config, COMMAND, &new.to_le_bytes())?;
    }
    Ok(())
}

fn command(old: u16, master: bool) -> u16 {
    let on = COMMAND_IO | COMMAND_MEMORY;
    let new = (old | on) & !COMMAND_MASTER;
    if master { new | COMMAND_MASTER } else { new }
}

impl Function for VfioFunction {
    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        self.check(region, offset, data.len(), false)?;
        self.count_access(data.len());
        Ok(self.kernel().read(region, offset, data)?)
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        self.check(region, offset, data.len(), true)?;
        self.count_access(data.len());
        let kernel = self.kernel();
        let end = offset.saturating_add(to_u64(data.len()));
        if region != Region::Config || offset >= COMMAND + 2 || end <= COMMAND {
            return Ok(kernel.write(region, offset, data)?);
        }
        // Held so that the register does not change in between.
        let mappings = self.mappings();
        let mastery = self.mastery();
        let mut data = data.to_vec();
        let is_master = *mastery == Mastery::Allowed && !mappings.is_empty();
        let fixed = command(0, is_master).to_le_bytes();
        let kept = (COMMAND_IO | COMMAND_MEMORY | COMMAND_MASTER).to_le_bytes();
        for (place, byte) in (offset..end).zip(&mut data) {
            let at = place
                .checked_sub(COMMAND)
                .and_then(|i| usize::try_from(i).ok());
            if let Some((&mask, &value)) = at.and_then(|i| kept.get(i).zip(fixed.get(i))) {
                *byte = *byte & !mask | value & mask;
            }
        }
        Ok(kernel.write(region, offset, &data)?)
    }

    fn set_interrupt(
        &self,
        vector: InterruptVector,
        signal: Option<Arc<dyn Signal>>,
    ) -> Result<(), AccessError> {
        self.interrupts()?.set(vector, signal)
    }

    fn mask_intx(&self, masked: bool) -> Result<(), AccessError> {
        self.interrupts()?.mask_intx(masked)
    }

    fn set_bus_master(&self, may: bool) -> Result<(), AccessError> {
        {
            let mut mastery = self.mastery();
            if *mastery != Mastery::Ended {
                *mastery = match may {
                    true => Mastery::Allowed,
                    false => Mastery::Withheld,
                };
            }
        }
        if may {
            let mappings = self.mappings();
            return Ok(self.set_master(!mappings.is_empty())?);
        }
        // Whoever has the mappings may be waiting for the device.
        Ok(self.set_master(false)?)
    }

    fn end_bus_master(&self) -> Result<(), AccessError> {
        *self.mastery() = Mastery::Ended;
        Ok(self.set_master(false)?)
    }

    fn map(&self, mapping: DmaMapping) -> Result<(), AccessError> {
        let mut mappings = self.mappings();
        let first = mappings.is_empty();
        mappings.map(self.kernel(), &mapping)?;
        if first && let Err(error) = self.set_master(true) {
            mappings.clear(self.kernel());
            return Err(error.into());
        }
        self.count_change(&self.counts().maps, &mappings);
        let name = &self.shared.description.name;
        log::debug!("{name}: {} mapped", mapping.range);
        Ok(())
    }

    fn unmap(&self, range: AddressRange) -> Result<(), AccessError> {
        let mut mappings = self.mappings();
        // What it accesses after the last range has gone would be a fault of the IOMMU.
        if mappings.is_only(range) {
            self.set_master(false)?;
        }
        mappings.unmap(self.kernel(), range)?;
        self.count_change(&self.counts().unmaps, &mappings);
        let name = &self.shared.description.name;
        log::debug!("{name}: {range} unmapped");
        Ok(())
    }

    /// Its BARs, in the device's own file: type1 takes a mapping of a BAR as what another function
    /// reaches.
    fn memory(&self, region: Region, offset: u64, length: u64) -> Option<DmaTarget> {
        region.bar()?;
        let bytes = usize::try_from(length).ok()?;
        self.check(region, offset, bytes, false).ok()?;
        let place = self.kernel().region(region).offset.checked_add(offset)?;
        Some(DmaTarget::Device {
            file: Arc::new(self.kernel().file().ok()?),
            offset: place,
        })
    }

    fn reset(&self) -> Result<(), AccessError> {
        let mappings = self.mappings();
        self.kernel().reset()?;
        Ok(self.set_master(!mappings.is_empty())?)
    }
}

impl Drop for VfioFunction {
    fn drop(&mut self) {
        let name = &self.shared.description.name;
        let mut mappings = lock(&self.mappings);
        let kernel = &*self.shared.kernel;
        if let Err(e) = set_command(kernel, false) {
            log::error!("Cannot stop DMA of {name}: {e}");
        }
        drop(self.interrupts.take());
        // What the function has begun ends with the reset. Should it not, the IOMMU stops it.
        if let Err(e) = kernel.reset() {
            log::error!("Cannot reset {name}: {e}");
        }
        let count = mappings.clear(kernel);
        let counts = &self.shared.counts;
        counts.unmaps.fetch_add(count, Ordering::Relaxed);
        counts.mapped_bytes.store(0, Ordering::Relaxed);
        if let Some(why) = mappings.stuck() {
            self.shared.set_quarantine(why);
        }
        self.shared.release();
    }
}
