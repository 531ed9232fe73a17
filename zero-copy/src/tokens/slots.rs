//! The slots of a context: what the process arms, and what the backend keeps of it.

use super::envelope::Claim;
use super::keys::{Keys, Secret};
use super::{Direction, TokenError};
use crate::SharedMemory;
use farlane_abi::Errno;
use farlane_abi::tunnel::{
    DIRECTION_INTO_DEVICE, DIRECTION_OUT_OF_DEVICE, MAX_SLOTS, OFF_SLOTS, SECTOR_BYTES,
    SECTORS_PER_PAGE, SLOT_ARMED, SLOT_BYTES, SLOT_KEY, SLOT_LANDED, SLOT_LENGTH, SLOT_OFFSET,
    SLOT_REGION,
};
use farlane_abi::width::{at_most, halves, to_u64, to_usize};
use farlane_sys::sync::lock;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Mutex, MutexGuard};

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
pub struct Slots {
    pub shared: SharedMemory,
    /// How many there are.
    pub count: u32,
    /// Locked after what [`Context`](super::context::Context) holds back.
    slots: Mutex<(Vec<Slot>, Keys)>,
}

/// Sectors of one token that are under way.
#[derive(Clone, Copy, Debug)]
pub struct Receipt {
    pub slot: u32,
    pub sequence: u64,
    pub sectors: u8,
}

/// What the process says of a slot, read once.
pub struct Wanted {
    pub region: u32,
    pub direction: Direction,
    pub offset: u64,
    pub length: u32,
    pub epoch: u32,
}

impl Slots {
    /// As many as there is room for in `shared`, with keys made with `secret`.
    pub fn new(shared: SharedMemory, secret: Secret) -> Result<Self, Errno> {
        let room = shared.len().saturating_sub(OFF_SLOTS) / SLOT_BYTES;
        let count = at_most(to_u64(room), MAX_SLOTS);
        let mut keys = Keys::new(secret);
        let mut slots = Vec::new();
        for slot in 0..count {
            let key = keys.next().map_err(|_| Errno::EIO)?;
            let written = shared.write(Self::at(slot, SLOT_KEY), &key);
            written.map_err(|_| Errno::EINVAL)?;
            slots.push(Slot {
                key,
                sequence: 0,
                used: 0,
                landed: 0,
                whole: 0,
            });
        }
        Ok(Self {
            shared,
            count,
            slots: Mutex::new((slots, keys)),
        })
    }

    fn at(slot: u32, field: usize) -> usize {
        OFF_SLOTS + to_usize(slot.into()) * SLOT_BYTES + field
    }

    fn word(&self, slot: u32, field: usize) -> Result<u64, TokenError> {
        self.shared
            .read(Self::at(slot, field))
            .map_err(|_| TokenError::Foreign)
    }

    /// Reads a slot that must be armed with `sequence`.
    pub fn wanted(&self, slot: u32, sequence: u64) -> Result<Wanted, TokenError> {
        let stale = || TokenError::Stale { slot };
        if self.word(slot, SLOT_ARMED)? != sequence {
            return Err(stale());
        }
        // What was stored before it was armed.
        fence(Ordering::Acquire);
        let [region, direction] = halves(self.word(slot, SLOT_REGION)?);
        let [length, epoch] = halves(self.word(slot, SLOT_LENGTH)?);
        let direction = match direction {
            DIRECTION_INTO_DEVICE => Direction::IntoDevice,
            DIRECTION_OUT_OF_DEVICE => Direction::OutOfDevice,
            _ => return Err(stale()),
        };
        let bytes = to_usize(length.into());
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
    pub fn use_up(&self, claim: &Claim, sectors: u8, whole: u8) -> Result<(), TokenError> {
        let mut slots = self.lock();
        let slot = slots.0.get_mut(to_usize(claim.slot.into()));
        let slot = slot.ok_or(TokenError::Foreign)?;
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
    pub fn landed(&self, receipt: Receipt) {
        let mut slots = self.lock();
        let (slots, keys) = &mut *slots;
        let Some(slot) = slots.get_mut(to_usize(receipt.slot.into())) else {
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
