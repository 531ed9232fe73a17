//! Tokens: what the slots of the shared header say, and the envelopes in phony pages.

use super::phony::PhonyBuffer;
use crate::sys::Direction;
use farlane_abi::arena::OFF_DEAD;
use farlane_abi::tunnel::{
    DIRECTION_INTO_DEVICE, DIRECTION_OUT_OF_DEVICE, ENVELOPE_MAGIC, Envelope, MAX_SLOTS, OFF_EPOCH,
    OFF_SLOT_COUNT, OFF_SLOTS, SECTOR_BYTES, SECTORS_PER_PAGE, SEQUENCE_END, SLOT_ARMED,
    SLOT_BYTES, SLOT_KEY, SLOT_LANDED, SLOT_LENGTH, SLOT_OFFSET, SLOT_REGION,
};
use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_transport::Map;
use rustix::io::Errno;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: usize = SECTOR_BYTES * SECTORS_PER_PAGE;
const ENVELOPE_BYTES: usize = size_of::<Envelope>();

/// Shared memory with slots: the context's first segment.
pub(crate) trait Header: Deref<Target = Map> + Send + Sync + std::fmt::Debug {}
impl<T: Deref<Target = Map> + Send + Sync + std::fmt::Debug> Header for T {}

/// The slots of a tunnel. Each is used by whoever has its phony page.
#[derive(Debug)]
pub(crate) struct Slots {
    header: Box<dyn Header>,
    /// The last sequence number of each slot.
    sequences: Vec<AtomicU64>,
}

/// Token of a phony page: slot, sequence number, envelope.
#[derive(Clone, Copy, Debug)]
struct Token {
    slot: usize,
    sequence: u64,
    /// Of the page's first sector.
    envelope: Envelope,
}

impl Token {
    /// Envelopes of the page's sectors, each with its offset in the page.
    fn envelopes(&self) -> impl Iterator<Item = (usize, Envelope)> {
        let offsets = (0..PAGE).step_by(SECTOR_BYTES);
        offsets.zip(0_u32..).map(|(offset, sector)| {
            let envelope = Envelope {
                sector: sector.into(),
                ..self.envelope
            };
            (offset, envelope)
        })
    }
}

/// Pages that are under way. Dropping it ends their tokens.
#[derive(Debug)]
pub(crate) struct TokenSet<'a> {
    slots: &'a Slots,
    tokens: Vec<Token>,
}

/// Neighbouring sectors of a request of which the same is true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sectors {
    /// Offsets in the request.
    pub(crate) range: Range<usize>,
    /// Whether the backend says that they have moved.
    pub(crate) landed: bool,
}

impl Slots {
    pub(crate) fn new(header: impl Header + 'static) -> Self {
        let room = header.len().saturating_sub(OFF_SLOTS) / SLOT_BYTES;
        let said = header
            .word(OFF_SLOT_COUNT)
            .load(Ordering::Acquire)
            .min(MAX_SLOTS);
        let count = to_usize(said.into()).min(room);
        Self {
            header: Box::new(header),
            sequences: (0..count).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.sequences.len()
    }

    /// Whether the backend is gone.
    pub(crate) fn is_dead(&self) -> bool {
        self.header.word(OFF_DEAD).load(Ordering::Acquire) != 0
    }

    fn word(&self, slot: usize, field: usize) -> &AtomicU64 {
        let word = self
            .header
            .at(OFF_SLOTS + slot * SLOT_BYTES + field, size_of::<u64>());
        // SAFETY: inside the mapping, which lives as long as `self`; slots and their fields are
        // multiples of eight; atomics may change under a shared reference.
        unsafe { word.cast::<AtomicU64>().as_ref() }
    }

    /// Makes tokens for the first `length` bytes, whole pages, of a phony buffer: they stand for
    /// `target` and what follows in device region `region`. Puts the envelopes into the pages.
    pub(crate) fn arm(
        &self,
        lent: &PhonyBuffer<'_>,
        region: u32,
        target: u64,
        length: usize,
        direction: Direction,
    ) -> Result<TokenSet<'_>, Errno> {
        let mut armed = TokenSet {
            slots: self,
            tokens: Vec::with_capacity(length / PAGE),
        };
        for page in 0..length / PAGE {
            let slot = lent.first_slot() + page;
            let sequence = self.arm_page(slot, region, target + (page * PAGE) as u64, direction)?;
            let key = [SLOT_KEY, SLOT_KEY + 8].map(|field| self.word(slot, field));
            let envelope = Envelope {
                magic: ENVELOPE_MAGIC.into(),
                key: key.map(|word| u64::from_le(word.load(Ordering::Acquire)).into()),
                sequence: sequence.into(),
                slot: u32::try_from(slot).map_err(|_| Errno::OVERFLOW)?.into(),
                sector: 0.into(),
            };
            let token = Token {
                slot,
                sequence,
                envelope,
            };
            armed.tokens.push(token);
            for (offset, envelope) in token.envelopes() {
                lent.put(page * PAGE + offset, envelope.as_bytes());
            }
        }
        Ok(armed)
    }

    fn arm_page(
        &self,
        slot: usize,
        region: u32,
        target: u64,
        direction: Direction,
    ) -> Result<u64, Errno> {
        let last = self.sequences.get(slot).ok_or(Errno::NOSPC)?;
        let sequence = last.load(Ordering::Relaxed) + 1;
        if sequence >= SEQUENCE_END {
            return Err(Errno::OVERFLOW);
        }
        last.store(sequence, Ordering::Relaxed);
        let direction = match direction {
            Direction::Read => DIRECTION_INTO_DEVICE,
            Direction::Write => DIRECTION_OUT_OF_DEVICE,
        };
        let epoch = self.header.word(OFF_EPOCH).load(Ordering::Acquire);
        let epoch = u32::from_le(epoch);
        let store = |field, value: u64, order| self.word(slot, field).store(value.to_le(), order);
        let halves = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        store(SLOT_REGION, halves(region, direction), Ordering::Relaxed);
        store(SLOT_OFFSET, target, Ordering::Relaxed);
        let bytes = u32::try_from(PAGE).map_err(|_| Errno::OVERFLOW)?;
        store(SLOT_LENGTH, halves(bytes, epoch), Ordering::Relaxed);
        store(SLOT_ARMED, sequence, Ordering::Release);
        Ok(sequence)
    }

    /// Sectors of a page that have moved, a bit each.
    fn landed(&self, token: Token) -> u64 {
        let word = u64::from_le(self.word(token.slot, SLOT_LANDED).load(Ordering::Acquire));
        if word >> 16 == token.sequence {
            word & 0xffff
        } else {
            0
        }
    }
}

impl TokenSet<'_> {
    /// What has become of the first `bytes` of the request, once it is done.
    pub(crate) fn runs(&self, bytes: usize) -> Vec<Sectors> {
        let mut runs: Vec<Sectors> = Vec::new();
        for (page, token) in self.tokens.iter().enumerate() {
            let bits = self.slots.landed(*token);
            for sector in 0..SECTORS_PER_PAGE {
                let start = page * PAGE + sector * SECTOR_BYTES;
                if start >= bytes {
                    return runs;
                }
                let end = (start + SECTOR_BYTES).min(bytes);
                let landed = bits >> sector & 1 == 1;
                match runs.last_mut() {
                    Some(last) if last.landed == landed => last.range.end = end,
                    _ => runs.push(Sectors {
                        range: start..end,
                        landed,
                    }),
                }
            }
        }
        runs
    }

    /// Whether a sector of these still carries its envelope, once the request is done: nothing was
    /// read into it.
    pub(crate) fn has_envelope(&self, lent: &PhonyBuffer<'_>, sectors: &Sectors) -> bool {
        let pages = self.tokens.iter().zip((0..).step_by(PAGE));
        pages
            .flat_map(|(token, page)| {
                let envelopes = token.envelopes();
                envelopes.map(move |(offset, envelope)| (page + offset, envelope))
            })
            .filter(|(at, _)| sectors.range.contains(at))
            .any(|(at, envelope)| lent.bytes(&(at..at + ENVELOPE_BYTES)) == envelope.as_bytes())
    }
}

impl Drop for TokenSet<'_> {
    fn drop(&mut self) {
        for token in &self.tokens {
            self.slots
                .word(token.slot, SLOT_ARMED)
                .store(0, Ordering::Release);
        }
    }
}
