//! The tokens of one process: its slots, and the device memory that it may name.

use super::device_region::DeviceRegion;
use super::envelope::{Claim, Sectors};
use super::gate::{Gate, Pass};
use super::keys::Secret;
use super::slots::{Receipt, Slots};
use super::{Direction, TokenError};
use crate::SharedMemory;
use farlane_abi::Errno;
use farlane_abi::ids::RegionId;
use farlane_abi::tunnel::{
    Disk, MAX_DISKS, OFF_DISK_COUNT, OFF_DISKS, OFF_EPOCH, OFF_SLOT_COUNT, TOKEN_EPOCHS,
};
use farlane_sys::sync::{lock, read, write};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock};
use std::time::Duration;

/// How long requests under way are waited for, once, before whoever takes memory away is told to
/// ask again. The driver's other requests wait as long: as many as its queue holds are answered
/// long before it finds the backend dead.
const PATIENCE: Duration = Duration::from_millis(2);

/// One process of a VM.
#[derive(Debug)]
pub struct Context {
    slots: OnceLock<Slots>,
    devices: RwLock<HashMap<RegionId, Arc<DeviceRegion>>>,
    epoch: AtomicU32,
    gate: Arc<Gate>,
    /// Receipts that are not written because the VM does not run; `None` while it does.
    held_back: Mutex<Option<Vec<Receipt>>>,
}

/// What an open envelope leads to.
#[derive(Debug)]
pub struct Admitted {
    /// To be given to [`Context::landed`].
    pub receipt: Receipt,
    /// Keep the context and the region in use.
    pub passes: [Pass; 2],
}

impl Context {
    /// A process that has just come, at `epoch`.
    pub fn new(epoch: u32) -> Self {
        Self {
            slots: OnceLock::new(),
            devices: RwLock::default(),
            epoch: AtomicU32::new(epoch),
            gate: Arc::default(),
            held_back: Mutex::default(),
        }
    }

    /// Its header, in which the process finds `disks` and slots, whose keys are made with `secret`.
    pub fn set_header(
        &self,
        shared: SharedMemory,
        disks: &[Disk],
        secret: Secret,
    ) -> Result<(), Errno> {
        let fault = |_| Errno::EINVAL;
        let slots = Slots::new(shared, secret)?;
        let disks = disks.get(..MAX_DISKS).unwrap_or(disks);
        for (at, disk) in (OFF_DISKS..).step_by(size_of::<Disk>()).zip(disks) {
            slots.shared.write(at, disk).map_err(fault)?;
        }
        let disk_count = u32::try_from(disks.len()).map_err(|_| Errno::EINVAL)?;
        for (at, value) in [
            (OFF_DISK_COUNT, disk_count),
            (OFF_EPOCH, self.epoch.load(Ordering::Relaxed)),
            (OFF_SLOT_COUNT, slots.count),
        ] {
            let word = slots.shared.word(at).map_err(fault)?;
            word.store(value, Ordering::Release);
        }
        self.slots.set(slots).map_err(|_| Errno::EEXIST)
    }

    fn held_back(&self) -> MutexGuard<'_, Option<Vec<Receipt>>> {
        lock(&self.held_back)
    }

    /// The clock has gone on.
    pub fn set_epoch(&self, epoch: u32) {
        self.epoch.store(epoch, Ordering::Relaxed);
        let held = self.held_back();
        if held.is_none()
            && let Some(slots) = self.slots.get()
            && let Ok(word) = slots.shared.word(OFF_EPOCH)
        {
            word.store(epoch, Ordering::Release);
        }
    }

    /// Device memory `region` becomes known.
    pub fn add_device(&self, region: RegionId, memory: DeviceRegion) -> Result<(), Errno> {
        let mut devices = write(&self.devices);
        if devices.contains_key(&region) {
            return Err(Errno::EEXIST);
        }
        devices.insert(region, Arc::new(memory));
        Ok(())
    }

    /// Whether there is device memory `region`.
    pub fn has_device(&self, region: RegionId) -> bool {
        let devices = read(&self.devices);
        devices.contains_key(&region)
    }

    /// Takes device memory away: nothing more begins in it, and nothing touches it when this
    /// succeeds.
    ///
    /// # Errors
    /// `ENOENT` where there is none such, `EAGAIN` where requests that are under way have not ended
    /// within [`PATIENCE`].
    pub fn remove_device(&self, region: RegionId) -> Result<(), Errno> {
        let memory = {
            let devices = read(&self.devices);
            devices.get(&region).cloned().ok_or(Errno::ENOENT)?
        };
        if !memory.gate.close_within(PATIENCE) {
            return Err(Errno::EAGAIN);
        }
        let mut devices = write(&self.devices);
        devices.remove(&region);
        Ok(())
    }

    /// Checks and uses up what `claim` says of `sectors`, and calls `each(address, bytes)` for the
    /// runs of device memory that they stand for.
    pub fn admit(
        &self,
        claim: &Claim,
        sectors: Sectors,
        direction: Direction,
        mut each: impl FnMut(u64, u64),
    ) -> Result<Admitted, TokenError> {
        let own = self.gate.enter().ok_or(TokenError::Foreign)?;
        let slots = self.slots.get().ok_or(TokenError::Foreign)?;
        let wanted = slots.wanted(claim.slot, claim.sequence.get())?;
        let whole = Sectors::bits_of(wanted.length);
        slots.use_up(claim, sectors.bits(), whole)?;

        let age = self
            .epoch
            .load(Ordering::Relaxed)
            .wrapping_sub(wanted.epoch);
        if age >= TOKEN_EPOCHS {
            return Err(TokenError::Expired { slot: claim.slot });
        }
        if wanted.direction != direction {
            return Err(TokenError::Direction { slot: claim.slot });
        }
        let region = RegionId::new(wanted.region).and_then(|region| {
            let devices = read(&self.devices);
            devices.get(&region).cloned()
        });
        let gone = TokenError::NoRegion {
            region: wanted.region,
        };
        let Some(region) = region else {
            return Err(gone);
        };
        let Some(pass) = region.gate.enter() else {
            return Err(gone);
        };
        if direction == Direction::IntoDevice && !region.writable {
            return Err(TokenError::Direction { slot: claim.slot });
        }
        let inside = sectors.offset() + sectors.length() <= u64::from(wanted.length);
        let end = wanted.offset.checked_add(u64::from(wanted.length));
        if !inside || end.is_none_or(|end| end > region.length) {
            return Err(TokenError::OutOfBounds {
                region: wanted.region,
                offset: wanted.offset,
            });
        }
        region.runs(
            wanted.offset + sectors.offset(),
            sectors.length(),
            &mut each,
        );
        Ok(Admitted {
            receipt: Receipt {
                slot: claim.slot,
                sequence: claim.sequence.get(),
                sectors: sectors.bits(),
            },
            passes: [own, pass],
        })
    }

    /// Sectors have moved: tells the process.
    pub fn landed(&self, receipt: Receipt) {
        match self.held_back().as_mut() {
            Some(held) => held.push(receipt),
            None => self.write(receipt),
        }
    }

    fn write(&self, receipt: Receipt) {
        if let Some(slots) = self.slots.get() {
            slots.landed(receipt);
        }
    }

    /// The VM does not run: nothing of it is touched from here until [`resume`](Self::resume).
    pub fn suspend(&self) {
        self.held_back().get_or_insert_default();
    }

    /// Waits for what is under way now.
    pub fn drain(&self) {
        self.gate.drain();
    }

    /// The VM goes on.
    pub fn resume(&self) {
        let mut held = self.held_back();
        for receipt in held.take().into_iter().flatten() {
            self.write(receipt);
        }
    }

    /// The process has gone. Nothing of it is touched when this returns.
    pub fn close(&self) {
        // What is under way finishes; its receipts are for nobody.
        self.suspend();
        self.gate.close();
    }

    /// The process goes: nothing more of it begins, and nothing of it is touched when this
    /// succeeds.
    ///
    /// # Errors
    /// `EAGAIN` where requests that are under way have not ended within [`PATIENCE`].
    pub fn try_close(&self) -> Result<(), Errno> {
        self.suspend();
        match self.gate.close_within(PATIENCE) {
            true => Ok(()),
            false => Err(Errno::EAGAIN),
        }
    }
}
