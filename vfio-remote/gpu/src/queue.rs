//! Ring mechanics: commands and completions in video memory.

use crate::command::CommandError;
use crate::memory::{Span, VideoMemory};
use farlane_abi::PAGE_BYTES;
use farlane_abi::gpu as abi;
use farlane_abi::width::to_usize;
use farlane_abi::zerocopy::{FromZeros as _, IntoBytes as _};
use farlane_worker::wake;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where a queue is: inside of video memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    offset: u64,
    commands: Span,
    completions: Span,
    entries: u32,
}

impl Place {
    /// A queue at `offset`, if it lies in video memory of so many bytes.
    pub fn new(memory_bytes: u64, offset: u64, entries: u32) -> Option<Self> {
        let fits = entries.is_power_of_two()
            && (abi::MIN_ENTRIES..=abi::MAX_ENTRIES).contains(&entries)
            && offset.is_multiple_of(PAGE_BYTES);
        if !fits {
            return None;
        }
        Span::new(memory_bytes, offset, abi::queue_bytes(entries))?;
        let ring =
            |at: u64, bytes: u64| Span::new(memory_bytes, offset + at, u64::from(entries) * bytes);
        Some(Self {
            offset,
            commands: ring(abi::QUEUE_HEADER_BYTES, abi::COMMAND_BYTES)?,
            completions: ring(abi::completions_offset(entries), abi::COMPLETION_BYTES)?,
            entries,
        })
    }
}

/// The driver has written a tail that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadTail;

/// What a command has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Results {
    /// See the operation.
    pub result: u64,
    /// See the operation.
    pub written: u64,
}

/// The device's end of a queue. What the driver can write is read once; what counts is kept here.
#[derive(Debug)]
pub struct Queue<'m> {
    memory: &'m VideoMemory,
    place: Place,
    tail: &'m AtomicU32,
    asleep: &'m AtomicU32,
    done: &'m AtomicU32,
    /// Commands that have been taken and completed.
    count: u32,
}

impl<'m> Queue<'m> {
    /// An empty queue; its header's words are zero. None where `place` is not of this memory.
    pub fn new(memory: &'m VideoMemory, place: Place) -> Option<Self> {
        let word = |at: u64| {
            let word = memory.word(place.offset + at)?;
            word.store(0, Ordering::SeqCst);
            Some(word)
        };
        Some(Self {
            memory,
            place,
            tail: word(abi::QUEUE_TAIL)?,
            asleep: word(abi::QUEUE_ASLEEP)?,
            done: word(abi::QUEUE_DONE)?,
            count: 0,
        })
    }

    /// Whether the driver has written commands that have not been taken, or nonsense.
    pub fn has_work(&self) -> bool {
        self.tail.load(Ordering::Relaxed) != self.count
    }

    fn slot(&self, ring: Span, bytes: u64) -> Span {
        let index = u64::from(self.count & (self.place.entries - 1));
        let at = to_usize(index * bytes);
        ring.part(at, to_usize(bytes))
    }

    /// The next command, copied out.
    pub fn next(&self) -> Result<Option<abi::Command>, BadTail> {
        let waiting = self.tail.load(Ordering::Acquire).wrapping_sub(self.count);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.place.entries {
            return Err(BadTail);
        }
        let mut command = abi::Command::new_zeroed();
        let slot = self.slot(self.place.commands, abi::COMMAND_BYTES);
        self.memory.read(slot, command.as_mut_bytes());
        Ok(Some(command))
    }

    /// The command that [`next`](Self::next) gave is complete.
    pub fn complete(&mut self, outcome: Result<Results, CommandError>) {
        let results = outcome.unwrap_or_default();
        let sequence = self.count.wrapping_add(1);
        let completion = abi::Completion {
            sequence: sequence.into(),
            status: outcome
                .map_or_else(CommandError::status, |_| abi::OK)
                .into(),
            result: results.result.into(),
            written: results.written.into(),
            reserved: 0.into(),
        };
        let slot = self.slot(self.place.completions, abi::COMPLETION_BYTES);
        self.memory.write(slot, completion.as_bytes());
        self.count = sequence;
        self.done.store(sequence, Ordering::Release);
    }

    /// Says that the device sleeps. It has to look once more after this.
    pub fn prepare_sleep(&self) {
        wake::announce(std::iter::once(self.asleep));
    }

    /// The device no longer sleeps.
    pub fn woke(&self) {
        wake::awake(std::iter::once(self.asleep));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::new_file;
    use proptest::prelude::*;
    use std::sync::Arc;

    #[test]
    fn places_outside_of_memory_are_none() {
        let bytes = abi::queue_bytes(16);
        assert!(Place::new(1 << 20, 0, 16).is_some());
        assert!(Place::new(bytes, 0, 16).is_some());
        assert!(Place::new(bytes - 1, 0, 16).is_none());
        for (offset, entries) in [
            (0, 0),
            (0, 1),
            (0, 3),
            (0, 8192),
            (8, 16),
            (u64::MAX - 0xfff, 16),
        ] {
            assert!(Place::new(1 << 20, offset, entries).is_none());
        }
    }

    proptest! {
        #[test]
        fn tails_that_are_too_far_ahead_are_refused(
            tails in prop::collection::vec(any::<u32>(), 1..20),
        ) {
            let memory = VideoMemory::new(Arc::new(new_file(1 << 16).unwrap()), 1 << 16).unwrap();
            let mut queue = Queue::new(&memory, Place::new(1 << 16, 0x1000, 16).unwrap()).unwrap();
            for tail in tails {
                memory.word(0x1000).unwrap().store(tail, Ordering::SeqCst);
                let ahead = tail.wrapping_sub(queue.count);
                match queue.next() {
                    Ok(None) => prop_assert_eq!(ahead, 0),
                    Ok(Some(_)) => {
                        prop_assert!(ahead <= 16);
                        queue.complete(Ok(Results::default()));
                    }
                    Err(BadTail) => prop_assert!(ahead > 16),
                }
            }
        }
    }
}
