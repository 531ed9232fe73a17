//! The copy engine, and of the compute engine what is not searching.

use crate::command::{Command, CommandError, Gather};
use crate::counters::{Counters, count};
use crate::memory::{Span, VideoMemory};
use crate::queue::Results;
use crate::search::{self, Patterns};
use farlane_abi::width::to_u64;
use farlane_pci::DmaSpace;

/// Bytes that are worked on between two looks at whether to go on.
pub const SLICE_BYTES: usize = 256 << 10;
/// Rows of a tile, for the same purpose.
const SLICE_ROWS: usize = 1024;

/// Why a command has not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// By a mistake of the driver.
    Failed(CommandError),
    /// The device was disabled, reset or given back: nobody waits for it any more.
    Ended,
}

impl From<CommandError> for Stop {
    fn from(error: CommandError) -> Self {
        Self::Failed(error)
    }
}

/// What an engine works with.
pub struct Engine<'a> {
    /// Video memory.
    pub memory: &'a VideoMemory,
    /// System memory.
    pub dma: &'a DmaSpace,
    /// Counters.
    pub counters: &'a Counters,
    /// Whether to go on with a command; gives others their turn.
    pub go_on: &'a dyn Fn() -> bool,
    /// A slice of private memory, and what a search keeps of the slice before.
    pub scratch: Vec<u8>,
    /// Of the last search: who searches chunk by chunk looks for the same again.
    pub patterns: Option<Patterns>,
}

impl Engine<'_> {
    /// Goes on, or does not.
    pub fn turn(&self) -> Result<(), Stop> {
        if (self.go_on)() {
            Ok(())
        } else {
            Err(Stop::Ended)
        }
    }

    /// Executes a command to its end, or until it is to end.
    pub fn execute(&mut self, command: &Command) -> Result<Results, Stop> {
        match *command {
            Command::Nop => Ok(Results::default()),
            Command::CopyIn { address, target } => self.copy_in(address, target),
            Command::CopyOut { source, address } => self.copy_out(source, address),
            Command::Copy { source, target } => self.copy(source, target),
            Command::Search(ref what) => search::search(self, what),
            Command::Checksum(range) => self.checksum(range),
            Command::Gather(ref tile) => self.gather(tile),
        }
    }

    fn copy_in(&mut self, address: u64, target: Span) -> Result<Results, Stop> {
        for (at, part) in target.parts(SLICE_BYTES) {
            self.turn()?;
            let (from, length) = (address + bytes(at), bytes(part.len()));
            let mut to = self.memory.pointer(part);
            let view = self.dma.view();
            let mapped = view.resolve(from, length, false, |run, bytes| {
                // SAFETY: the view keeps `bytes` bytes at `run` mapped; all runs together are as
                // long as `part`, which is mapped at `to`. Both may be the same memory.
                unsafe { std::ptr::copy(run, to, bytes) };
                to = to.wrapping_add(bytes);
            });
            drop(view);
            if mapped.is_err() {
                // Some of it is reached by messages, or not at all.
                self.scratch.resize(part.len(), 0);
                self.dma
                    .read(from, &mut self.scratch)
                    .map_err(|e| unreachable(&e))?;
                self.memory.write(part, &self.scratch);
            }
            count(&self.counters.copied_in_bytes, part.len());
        }
        Ok(Results::default())
    }

    fn copy_out(&mut self, source: Span, address: u64) -> Result<Results, Stop> {
        for (at, part) in source.parts(SLICE_BYTES) {
            self.turn()?;
            let (to, length) = (address + bytes(at), bytes(part.len()));
            let mut from = self.memory.pointer(part).cast_const();
            let view = self.dma.view();
            let mapped = view.resolve(to, length, true, |run, bytes| {
                // SAFETY: as in `copy_in`; `resolve` has checked that the run is writable.
                unsafe { std::ptr::copy(from, run, bytes) };
                from = from.wrapping_add(bytes);
            });
            drop(view);
            if mapped.is_err() {
                self.scratch.resize(part.len(), 0);
                self.memory.read(part, &mut self.scratch);
                self.dma
                    .write(to, &self.scratch)
                    .map_err(|e| unreachable(&e))?;
            }
            count(&self.counters.copied_out_bytes, part.len());
        }
        Ok(Results::default())
    }

    fn copy(&self, source: Span, target: Span) -> Result<Results, Stop> {
        // From the end where it lies, for nothing to be overwritten before it is copied.
        let backwards = source.is_before(target) && source.overlaps(target);
        let count = source.len().div_ceil(SLICE_BYTES);
        for step in 0..count {
            self.turn()?;
            let index = if backwards { count - 1 - step } else { step };
            let part = |span: Span| span.part(index * SLICE_BYTES, SLICE_BYTES);
            self.memory.copy(part(source), part(target));
        }
        Ok(Results::default())
    }

    fn checksum(&mut self, range: Span) -> Result<Results, Stop> {
        let mut sum = 0;
        for (_, part) in range.parts(SLICE_BYTES) {
            self.turn()?;
            self.scratch.resize(part.len(), 0);
            self.memory.read(part, &mut self.scratch);
            sum = crc32c::crc32c_append(sum, &self.scratch);
        }
        Ok(Results {
            result: sum.into(),
            written: 0,
        })
    }

    fn gather(&self, tile: &Gather) -> Result<Results, Stop> {
        let mut done = 0;
        for (row, (_, target)) in tile.target.parts(tile.width).enumerate() {
            let source = tile.source.part(row.saturating_mul(tile.pitch), tile.width);
            let parts = source.parts(SLICE_BYTES).zip(target.parts(SLICE_BYTES));
            for ((_, from), (_, to)) in parts {
                if done >= SLICE_BYTES || row.is_multiple_of(SLICE_ROWS) {
                    self.turn()?;
                    done = 0;
                }
                self.memory.copy(from, to);
                done += from.len();
            }
        }
        Ok(Results::default())
    }
}

fn bytes(length: usize) -> u64 {
    to_u64(length)
}

fn unreachable(error: &farlane_pci::DmaError) -> CommandError {
    log::debug!("{}", farlane_sys::chain(error));
    CommandError::Memory
}
