//! A pair of queues (NVMe 1.4, 4.1).

use super::Command;
use super::memory::Memory;
use crate::{low, to_usize};
use farlane_zero_copy::SharedMemory;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use zerocopy::IntoBytes as _;

/// An answer to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Command-specific.
    pub dword0: u32,
    /// The command.
    pub cid: u16,
    /// Status code in bits 7:0, type in 10:8, do not retry in 14. Zero is success.
    pub status: u16,
    /// Head of the submission queue.
    pub sq_head: u16,
}

impl Completion {
    /// Type and code without the other bits.
    #[must_use]
    pub fn code(&self) -> u16 {
        self.status & 0x7ff
    }
}

/// Where the doorbells of a queue pair are.
#[derive(Clone, Debug)]
pub(crate) enum Bell {
    /// Registers: to be written by the transport.
    Trapped,
    /// A page that is mapped.
    Page(SharedMemory),
    /// Shadow doorbells at an offset of memory, with the page of event indices at another, and
    /// registers for when the controller asks to be rung.
    Shadow {
        memory: SharedMemory,
        doorbells: usize,
        events: usize,
    },
}

/// A submission queue and its completion queue.
#[derive(Debug)]
pub struct Queue {
    pub(crate) id: u16,
    entries: u32,
    submissions: SharedMemory,
    sq: usize,
    completions: SharedMemory,
    cq: usize,
    tail: u32,
    sq_head: u32,
    head: u32,
    phase: u32,
    rung: u32,
    rung_head: u32,
    pub(crate) bell: Bell,
}

/// Whether an index that goes from `old` to `new` passes `event` (NVMe 1.4, 7.13).
fn passes(event: u32, new: u32, old: u32) -> bool {
    let low = |n: u32| n & 0xffff;
    low(new.wrapping_sub(event).wrapping_sub(1)) < low(new.wrapping_sub(old))
}

impl Queue {
    pub(crate) fn new(id: u16, entries: u32, memory: &Memory, sq: u64, cq: u64) -> Self {
        Self::across(id, entries, (memory, sq), (memory, cq))
    }

    /// A queue pair in two memories.
    pub(crate) fn across(id: u16, entries: u32, sq: (&Memory, u64), cq: (&Memory, u64)) -> Self {
        Self {
            id,
            entries,
            submissions: sq.0.bytes().clone(),
            sq: sq.0.offset(sq.1),
            completions: cq.0.bytes().clone(),
            cq: cq.0.offset(cq.1),
            tail: 0,
            sq_head: 0,
            head: 0,
            phase: 1,
            rung: 0,
            rung_head: 0,
            bell: Bell::Trapped,
        }
    }

    /// Its identifier.
    #[must_use]
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Entries of each.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Offset in memory of the page of shadow doorbells, if the queue uses them.
    #[must_use]
    pub fn shadow_doorbells(&self) -> Option<usize> {
        match self.bell {
            Bell::Shadow { doorbells, .. } => Some(doorbells),
            Bell::Trapped | Bell::Page(_) => None,
        }
    }

    /// Whether no command can be put into it.
    #[must_use]
    pub fn is_full(&self) -> bool {
        (self.tail + 1) % self.entries == self.sq_head
    }

    /// Puts a command into the submission queue. False if that is full.
    pub fn push(&mut self, command: &Command) -> bool {
        if self.is_full() {
            return false;
        }
        let at = self.sq + to_usize(self.tail) * 64;
        let written = self.submissions.write_bytes(at, command.as_bytes()).is_ok();
        self.tail = (self.tail + 1) % self.entries;
        written
    }

    /// Takes an answer.
    pub fn pop(&mut self) -> Option<Completion> {
        let at = self.cq + to_usize(self.head) * 16;
        let last = self.completions.word(at + 12).ok()?.load(Ordering::Acquire);
        if last >> 16 & 1 != self.phase {
            return None;
        }
        let word = |offset: usize| {
            let word = self.completions.word(at + offset).ok()?;
            Some(word.load(Ordering::Relaxed))
        };
        let completion = Completion {
            dword0: word(0)?,
            cid: low(last),
            status: low(last >> 17),
            sq_head: low(word(8)?),
        };
        self.sq_head = u32::from(completion.sq_head) % self.entries;
        self.head += 1;
        if self.head == self.entries {
            self.head = 0;
            self.phase ^= 1;
        }
        Some(completion)
    }

    fn publish(&self, lane: usize, value: u32, old: u32) -> bool {
        let offset = usize::from(self.id) * 8 + lane;
        let store = |memory: &SharedMemory, at: usize| {
            let word: Option<&AtomicU32> = memory.word(at).ok();
            if let Some(word) = word {
                word.store(value, Ordering::Release);
            }
        };
        match &self.bell {
            Bell::Trapped => true,
            Bell::Page(page) => {
                store(page, offset);
                false
            }
            Bell::Shadow {
                memory,
                doorbells,
                events,
            } => {
                store(memory, doorbells + offset);
                fence(Ordering::SeqCst);
                let event = memory.word(events + offset);
                event.is_ok_and(|e| passes(e.load(Ordering::Relaxed), value, old))
            }
        }
    }

    /// Tells the controller of new commands. Returns the tail if the register has to be written.
    #[must_use]
    pub(crate) fn ring_tail(&mut self) -> Option<u32> {
        let old = std::mem::replace(&mut self.rung, self.tail);
        if old == self.tail {
            return None;
        }
        self.publish(0, self.tail, old).then_some(self.tail)
    }

    /// Tells the controller of answers taken. Returns the head if the register has to be written.
    #[must_use]
    pub(crate) fn ring_head(&mut self) -> Option<u32> {
        let old = std::mem::replace(&mut self.rung_head, self.head);
        if old == self.head {
            return None;
        }
        self.publish(4, self.head, old).then_some(self.head)
    }
}
