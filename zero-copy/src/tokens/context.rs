//! The tokens of one process: its slots, and the device memory that it may name.

use super::envelope::{Claim, Sectors};
use super::gate::{Gate, Pass};
use super::keys::{Keys, Secret};
use super::{Direction, TokenError};
use crate::SharedMemory;
use farlane_abi::Errno;
use farlane_abi::tunnel::{
    DIRECTION_INTO_DEVICE, DIRECTION_OUT_OF_DEVICE, Disk, MAX_DISKS, MAX_SLOTS, OFF_DISK_COUNT,
    OFF_DISKS, OFF_EPOCH, OFF_SLOT_COUNT, OFF_SLOTS, SECTOR_BYTES, SECTORS_PER_PAGE, SLOT_ARMED,
    SLOT_BYTES, SLOT_KEY, SLOT_LANDED, SLOT_LENGTH, SLOT_OFFSET, SLOT_REGION, TOKEN_EPOCHS,
};
use farlane_sys::sync::{lock, read, write};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock};
use std::time::Duration;

/// How long requests under way are waited for, once, before whoever takes memory away is told to
/// ask again. The driver's other requests wait as long: as many as its queue holds are answered
/// long before it finds the backend dead.
const PATIENCE: Duration = Duration::from_millis(2);

/// Device memory that a process has mapped.
#[derive(Debug)]
pub struct DeviceRegion {
    /// Guest-physical runs, each with the offset of its first byte in the region.
    runs: Vec<(u64, u64, u64)>,
    length: u64,
    writable: bool,
    gate: Arc<Gate>,
}

impl DeviceRegion {
    /// Runs of guest-physical addresses: (address, bytes).
    pub fn new(extents: &[(u64, u64)], writable: bool) -> Self {
        let mut length = 0;
        let runs = extents
            .iter()
            .map(|&(address, bytes)| {
                let run = (length, address, bytes);
                length += bytes;
                run
            })
            .collect();
        Self {
            runs,
            length,
            writable,
            gate: Arc::default(),
        }
    }

    /// Calls `each(address, bytes)` for the runs of `length` bytes at `offset`, which are inside.
    fn runs(&self, offset: u64, length: u64, each: &mut impl FnMut(u64, u64)) {
        let mut at = self
            .runs
            .partition_point(|&(start, _, bytes)| start + bytes <= offset);
        let (mut offset, mut left) = (offset, length);
        while let Some(&(start, address, bytes)) = self.runs.get(at) {
            if left == 0 {
                return;
            }
            let skip = offset - start;
            let run = (bytes - skip).min(left);
            each(address + skip, run);
            offset += run;
            left -= run;
            at += 1;
        }
    }
}

/// What the backend keeps of a slot. The process cannot change it.
#[derive(Clone, Copy, Debug)]
struct Slot {
    key: [u64; 2],
    /// The highest sequence number that was used.
    sequence: u64,
    /// Its sectors that were used.
    used: u8,
    /// Its sectors that have moved.
    landed: u8,
    /// Sectors that it has.
    whole: u8,
}

/// The slots of a context and the memory that they are in.
#[derive(Debug)]
struct Slots {
    shared: SharedMemory,
    /// Locked after [`Context::held_back`].
    slots: Mutex<(Vec<Slot>, Keys)>,
}

/// One process of a VM.
#[derive(Debug)]
pub struct Context {
    slots: OnceLock<Slots>,
    devices: RwLock<HashMap<u32, Arc<DeviceRegion>>>,
    epoch: AtomicU32,
    gate: Arc<Gate>,
    /// Receipts that are not written because the VM does not run; `None` while it does.
    held_back: Mutex<Option<Vec<Receipt>>>,
}

/// Sectors of one token that are under way.
#[derive(Clone, Copy, Debug)]
pub struct Receipt {
    slot: usize,
    sequence: u64,
    sectors: u8,
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
        let room = shared.len().saturating_sub(OFF_SLOTS) / SLOT_BYTES;
        let count = u32::try_from(room).unwrap_or(u32::MAX).min(MAX_SLOTS);
        let mut keys = Keys::new(secret);
        let mut slots = Vec::new();
        let fault = |_| Errno::EINVAL;
        for slot in 0..usize::try_from(count).unwrap_or(0) {
            let key = keys.next().map_err(|_| Errno::EIO)?;
            shared
                .write(OFF_SLOTS + slot * SLOT_BYTES + SLOT_KEY, &key)
                .map_err(fault)?;
            slots.push(Slot {
                key,
                sequence: 0,
                used: 0,
                landed: 0,
                whole: 0,
            });
        }
        let disks = disks.get(..MAX_DISKS).unwrap_or(disks);
        for (at, disk) in (OFF_DISKS..).step_by(size_of::<Disk>()).zip(disks) {
            shared.write(at, disk).map_err(fault)?;
        }
        let word = |at, value: u32| {
            shared
                .word(at)
                .map(|word| word.store(value, Ordering::Release))
                .map_err(fault)
        };
        word(OFF_DISK_COUNT, u32::try_from(disks.len()).unwrap_or(0))?;
        word(OFF_EPOCH, self.epoch.load(Ordering::Relaxed))?;
        word(OFF_SLOT_COUNT, count)?;
        let slots = Mutex::new((slots, keys));
        self.slots
            .set(Slots { shared, slots })
            .map_err(|_| Errno::EEXIST)
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
    pub fn add_device(&self, region: u32, memory: DeviceRegion) -> Result<(), Errno> {
        let mut devices = write(&self.devices);
        if devices.contains_key(&region) {
            return Err(Errno::EEXIST);
        }
        devices.insert(region, Arc::new(memory));
        Ok(())
    }

    /// Whether there is device memory `region`.
    pub fn has_device(&self, region: u32) -> bool {
        let devices = read(&self.devices);
        devices.contains_key(&region)
    }

    /// Takes device memory away: nothing more begins in it, and nothing touches it when this
    /// succeeds.
    ///
    /// # Errors
    /// `ENOENT` where there is none such, `EAGAIN` where requests that are under way have not ended
    /// within [`PATIENCE`].
    pub fn remove_device(&self, region: u32) -> Result<(), Errno> {
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
        let slot = usize::try_from(claim.slot).map_err(|_| TokenError::Foreign)?;
        let wanted = slots.wanted(slot, claim.sequence.get())?;
        let whole = Sectors::bits_of(wanted.length);
        slots.use_up(slot, claim, sectors.bits(), whole)?;

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
        let region = {
            let devices = read(&self.devices);
            devices.get(&wanted.region).cloned()
        };
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
                slot,
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

/// What the process says of a slot, read once.
struct Wanted {
    region: u32,
    direction: Direction,
    offset: u64,
    length: u32,
    epoch: u32,
}

impl Slots {
    fn at(slot: usize, field: usize) -> usize {
        OFF_SLOTS + slot * SLOT_BYTES + field
    }

    fn word(&self, slot: usize, field: usize) -> Result<u64, TokenError> {
        self.shared
            .read(Self::at(slot, field))
            .map_err(|_| TokenError::Foreign)
    }

    /// Reads a slot that must be armed with `sequence`.
    fn wanted(&self, slot: usize, sequence: u64) -> Result<Wanted, TokenError> {
        let stale = || TokenError::Stale {
            slot: u32::try_from(slot).unwrap_or(u32::MAX),
        };
        if self.word(slot, SLOT_ARMED)? != sequence {
            return Err(stale());
        }
        // What was stored before it was armed.
        fence(Ordering::Acquire);
        let halves = |word: u64| {
            let low = u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0);
            let high = u32::try_from(word >> 32).unwrap_or(0);
            (low, high)
        };
        let (region, direction) = halves(self.word(slot, SLOT_REGION)?);
        let (length, epoch) = halves(self.word(slot, SLOT_LENGTH)?);
        let direction = match direction {
            DIRECTION_INTO_DEVICE => Direction::IntoDevice,
            DIRECTION_OUT_OF_DEVICE => Direction::OutOfDevice,
            _ => return Err(stale()),
        };
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        let most = SECTOR_BYTES * SECTORS_PER_PAGE;
        if !(SECTOR_BYTES..=most).contains(&bytes) || !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(stale());
        }
        Ok(Wanted {
            region,
            direction,
            offset: self.word(slot, SLOT_OFFSET)?,
            length,
            epoch,
        })
    }

    fn lock(&self) -> MutexGuard<'_, (Vec<Slot>, Keys)> {
        lock(&self.slots)
    }

    /// Uses up `sectors` of a token, once.
    fn use_up(
        &self,
        index: usize,
        claim: &Claim,
        sectors: u8,
        whole: u8,
    ) -> Result<(), TokenError> {
        let mut slots = self.lock();
        let slot = slots.0.get_mut(index).ok_or(TokenError::Foreign)?;
        if slot.key != claim.key {
            return Err(TokenError::Forged { slot: claim.slot });
        }
        let sequence = claim.sequence.get();
        if sequence < slot.sequence {
            return Err(TokenError::Stale { slot: claim.slot });
        }
        if sequence > slot.sequence {
            slot.sequence = sequence;
            slot.used = 0;
            slot.landed = 0;
            slot.whole = whole;
        }
        if sectors & !slot.whole != 0 || sectors & slot.used != 0 {
            return Err(TokenError::Replayed { slot: claim.slot });
        }
        slot.used |= sectors;
        Ok(())
    }

    /// Writes a receipt. After the last sector the slot gets another key.
    fn landed(&self, receipt: Receipt) {
        let mut slots = self.lock();
        let (slots, keys) = &mut *slots;
        let Some(slot) = slots.get_mut(receipt.slot) else {
            return;
        };
        if slot.sequence != receipt.sequence {
            return;
        }
        slot.landed |= receipt.sectors;
        if slot.landed == slot.whole
            && let Ok(key) = keys.next()
        {
            slot.key = key;
            let _ = self.shared.write(Self::at(receipt.slot, SLOT_KEY), &key);
        }
        let word = receipt.sequence << 16 | u64::from(slot.landed);
        // Whoever sees the receipt sees the bytes and the new key.
        fence(Ordering::Release);
        let _ = self
            .shared
            .write(Self::at(receipt.slot, SLOT_LANDED), &word);
    }
}
