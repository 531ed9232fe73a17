//! Opening a request: what its segments are made of, and what stands for tokens that are not good.

use super::context::Context;
use super::envelope::{self, ENVELOPE_BYTES, Sectors};
use super::forgotten::Forgotten;
use super::gate::Pass;
use super::slots::Receipt;
use super::{Direction, Secret, State, TokenError};
use crate::View;
use farlane_abi::PAGE_BYTES;
use farlane_abi::tunnel::{SECTOR_BYTES, SECTORS_PER_PAGE};
use farlane_abi::width::to_usize;
use std::sync::Arc;

/// What is written where no good token stands for a page.
#[repr(C, align(4096))]
struct Zeroes([u8; SECTOR_BYTES * SECTORS_PER_PAGE]);

static ZEROES: Zeroes = Zeroes([0; SECTOR_BYTES * SECTORS_PER_PAGE]);

/// Whether an envelope whose key was made with `secret` lies at an address. Anybody can write down
/// what looks like one.
fn has_envelope(ram: &View, address: u64, secret: Option<Secret>) -> bool {
    let mut bytes = [0; ENVELOPE_BYTES];
    let Ok(sectors) = Sectors::new(address, SECTOR_BYTES as u64) else {
        return false;
    };
    ram.read(address, &mut bytes).is_ok()
        && envelope::parse(address, &bytes, sectors)
            .is_ok_and(|claim| secret.is_some_and(|secret| secret.has_made(claim.key)))
}

/// A request whose bytes lie elsewhere. While it lives, its memory stays.
#[derive(Debug)]
pub struct Opened {
    direction: Direction,
    runs: Vec<(*mut u8, usize)>,
    refused: Vec<(u64, u64)>,
    why: Option<TokenError>,
    tunnelled: u64,
    receipts: Vec<(Arc<Context>, Receipt)>,
    _passes: Vec<[Pass; 2]>,
    _views: [View; 2],
}

// SAFETY: the pointers are to shared mappings that the views keep, which are not bound to a thread.
unsafe impl Send for Opened {}

impl Opened {
    /// Where the request's bytes are, in order: first byte, bytes. Others access them at any time.
    #[must_use]
    pub fn runs(&self) -> &[(*mut u8, usize)] {
        &self.runs
    }

    /// Whether they are to be written: those of a read of the disk.
    #[must_use]
    pub fn is_written(&self) -> bool {
        self.direction == Direction::IntoDevice
    }

    /// Bytes of phony pages that no good token stands for: first one, counted in the request, and
    /// how many; in order, not adjacent. A read moves them into the phony pages themselves. A write
    /// has zeroes among its [runs](Self::runs) instead: to leave these bytes of the disk as they
    /// are would show what others have written there to who reads a file system's new block. Whose
    /// pages they are is told by there being no receipt.
    #[must_use]
    pub fn refused(&self) -> &[(u64, u64)] {
        &self.refused
    }

    /// Why the first of them was [refused](Self::refused).
    #[must_use]
    pub fn why_refused(&self) -> Option<&TokenError> {
        self.why.as_ref()
    }

    /// Bytes of device memory among them.
    #[must_use]
    pub fn tunnelled_bytes(&self) -> u64 {
        self.tunnelled
    }

    /// All bytes have moved: tells the processes. To be called before the request is completed.
    pub fn landed(self) {
        for (context, receipt) in &self.receipts {
            context.landed(*receipt);
        }
    }
}

/// How often a request has been begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    First,
    Again,
}

/// A request that is being opened.
pub(super) struct Opening {
    direction: Direction,
    turn: Turn,
    ram: View,
    device: View,
    /// Bytes of the request that have been looked at.
    at: u64,
    /// Whether some of them are to be moved.
    useful: bool,
    runs: Vec<(*mut u8, usize)>,
    refused: Vec<(u64, u64)>,
    why: Option<TokenError>,
    tunnelled: u64,
    receipts: Vec<(Arc<Context>, Receipt)>,
    passes: Vec<[Pass; 2]>,
    /// Whether no token is to be used.
    suspended: bool,
    secret: Option<Secret>,
}

impl Opening {
    /// Of a request without segments so far.
    pub fn new(state: &State, ram: View, device: View, direction: Direction, turn: Turn) -> Self {
        Self {
            direction,
            turn,
            ram,
            device,
            at: 0,
            useful: false,
            runs: Vec::new(),
            refused: Vec::new(),
            why: None,
            tunnelled: 0,
            receipts: Vec::new(),
            passes: Vec::new(),
            suspended: state.suspended,
            secret: state.secret,
        }
    }

    /// Whether the request's memory is written.
    fn writes(&self) -> bool {
        self.direction == Direction::IntoDevice
    }

    /// Adds a segment, piece by piece: phony pages, and what lies between them.
    pub fn segment(
        &mut self,
        state: &State,
        mut address: u64,
        mut length: u64,
    ) -> Result<(), TokenError> {
        while length > 0 {
            let found = state
                .phony
                .range(..=address)
                .next_back()
                .map(|(_, phony)| phony)
                .filter(|phony| phony.end > address);
            let piece = match found {
                Some(found) => {
                    let piece = (PAGE_BYTES - address % PAGE_BYTES).min(length);
                    let moved = if !self.suspended {
                        self.envelope(&found.context, address, piece)
                    } else if self.writes() || !has_envelope(&self.ram, address, self.secret) {
                        self.plain(address, piece)?;
                        Ok(())
                    } else {
                        Err(TokenError::Suspended { address })
                    };
                    match moved {
                        Ok(()) => self.useful = true,
                        // Another backend may have written it, and told the process so.
                        Err(why) if self.turn == Turn::Again && !self.writes() => return Err(why),
                        Err(why) => self.refuse(address, piece, why)?,
                    }
                    piece
                }
                None => {
                    let next = state.phony.range(address..).next();
                    let piece = next.map_or(length, |(&at, _)| (at - address).min(length));
                    self.ordinary(&state.forgotten, address, piece)?
                }
            };
            self.at = self.at.saturating_add(piece);
            address = address.saturating_add(piece);
            length -= piece;
        }
        Ok(())
    }

    /// Adds the first bytes of a piece that is no phony buffer, and returns how many.
    ///
    /// Whoever writes forgotten envelopes has his answer without an error: a process may have had
    /// them written by others, as a part of a file, and their request, of a file system's journal
    /// for instance, is not to fail.
    fn ordinary(
        &mut self,
        forgotten: &Forgotten,
        address: u64,
        length: u64,
    ) -> Result<u64, TokenError> {
        let mut piece = length;
        if !self.writes() && forgotten.overlaps(address, address.saturating_add(length)) {
            piece = (PAGE_BYTES - address % PAGE_BYTES).min(length);
            if self.is_phony(address, piece) {
                if self.turn == Turn::Again {
                    return Err(TokenError::Orphan { address });
                }
                self.useful = true;
                self.refuse(address, piece, TokenError::Orphan { address })?;
                return Ok(piece);
            }
        }
        self.plain(address, piece)?;
        self.useful = true;
        Ok(piece)
    }

    /// Whether a part of a page is one of a phony page: all of its sectors carry envelopes.
    fn is_phony(&self, address: u64, length: u64) -> bool {
        let sector = SECTOR_BYTES as u64;
        let mut sectors = (0..length / sector).map(|at| address + at * sector);
        length >= sector && sectors.all(|at| has_envelope(&self.ram, at, self.secret))
    }

    fn envelope(
        &mut self,
        context: &Arc<Context>,
        address: u64,
        length: u64,
    ) -> Result<(), TokenError> {
        let sectors = Sectors::new(address, length)?;
        let mut bytes = [0; ENVELOPE_BYTES];
        self.ram.read(address, &mut bytes)?;
        let claim = envelope::parse(address, &bytes, sectors)?;
        let writes = self.writes();
        let device = &self.device;
        let (mut found, mut resolved) = (Vec::new(), Ok(()));
        let admitted = context.admit(&claim, sectors, self.direction, |address, run| {
            if resolved.is_ok() {
                let found = &mut found;
                resolved =
                    device.resolve(address, run, writes, |base, run| found.push((base, run)));
            }
        })?;
        resolved?;
        for (base, run) in found {
            push(&mut self.runs, base, run);
        }
        self.tunnelled += length;
        self.receipts.push((Arc::clone(context), admitted.receipt));
        self.passes.push(admitted.passes);
        Ok(())
    }

    /// Adds memory of the guest as it is.
    fn plain(&mut self, address: u64, length: u64) -> Result<(), TokenError> {
        let writes = self.writes();
        let runs = &mut self.runs;
        self.ram
            .resolve(address, length, writes, |base, run| push(runs, base, run))?;
        Ok(())
    }

    /// A piece of a phony page has no good token.
    fn refuse(&mut self, address: u64, length: u64, why: TokenError) -> Result<(), TokenError> {
        if self.writes() {
            // What the guest has asked to be read there may be there: it is memory of whoever
            // asked.
            self.plain(address, length)?;
        } else {
            for at in (0..length).step_by(ZEROES.0.len()) {
                let bytes = to_usize(length - at);
                let zeroes = ZEROES.0.as_ptr().cast_mut();
                self.runs.push((zeroes, bytes.min(ZEROES.0.len())));
            }
        }
        match self.refused.last_mut() {
            Some((start, bytes)) if *start + *bytes == self.at => *bytes += length,
            _ => self.refused.push((self.at, length)),
        }
        self.why.get_or_insert(why);
        Ok(())
    }

    /// The request, if it is one of phony buffers.
    pub fn finish(self) -> Result<Option<Opened>, TokenError> {
        match self.why {
            Some(why) if !self.useful => Err(why),
            None if self.receipts.is_empty() => Ok(None),
            why => Ok(Some(Opened {
                direction: self.direction,
                runs: self.runs,
                refused: self.refused,
                why,
                tunnelled: self.tunnelled,
                receipts: self.receipts,
                _passes: self.passes,
                _views: [self.ram, self.device],
            })),
        }
    }
}

/// Adds a run, or makes the last one longer.
fn push(runs: &mut Vec<(*mut u8, usize)>, base: *mut u8, length: usize) {
    if let Some((last, bytes)) = runs.last_mut()
        && last.wrapping_add(*bytes) == base
    {
        *bytes += length;
        return;
    }
    runs.push((base, length));
}
