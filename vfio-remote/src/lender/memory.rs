//! Memory of a VM that a device reaches by messages.

use super::posted::PostedWrites;
use super::proof::Word;
use crate::protocol::Sender;
use crate::protocol::message::{Fence, MAX_DATA_BYTES, ToBorrower};
use farlane_abi::width::{at_most, size_u32, to_u64, to_usize};
use farlane_pci::RemoteMemory;
use farlane_sys::sync::{held, lock};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a borrower may take to answer a device.
const PATIENCE: Duration = Duration::from_secs(5);
/// Answers that may still come too late. Who owes more gives the session up with the next one.
const MAX_LATE: usize = 1024;

#[derive(Debug, Default)]
struct State {
    next: u32,
    /// Messages that wait for an answer, and answers that wait to be taken.
    answers: HashMap<u32, Option<Result<Vec<u8>, i32>>>,
    /// Messages for whose answers nobody waits any more.
    late: BTreeSet<u32>,
    closed: bool,
}

/// The memory behind one session.
#[derive(Debug)]
pub(crate) struct BorrowerMemory {
    sender: Sender,
    state: Mutex<State>,
    changed: Condvar,
}

impl BorrowerMemory {
    pub fn new(sender: Sender) -> Self {
        Self {
            sender,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes an answer. False where nothing was asked that it answers.
    pub fn answer(&self, id: u32, result: Result<Vec<u8>, i32>) -> bool {
        let mut state = self.state();
        match state.answers.get_mut(&id) {
            Some(slot @ None) => {
                *slot = Some(result);
                self.changed.notify_all();
                true
            }
            Some(_) => false,
            None => state.late.remove(&id),
        }
    }

    /// Nothing will be answered any more: whoever waits fails.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }

    fn ask(&self, message: impl FnOnce(u32) -> ToBorrower) -> io::Result<u32> {
        let id = {
            let mut state = self.state();
            if state.closed {
                return Err(io::ErrorKind::NotConnected.into());
            }
            state.next = state.next.wrapping_add(1);
            let id = state.next;
            state.answers.insert(id, None);
            id
        };
        self.sender.send(&message(id), &[]).map_err(|e| {
            self.state().answers.remove(&id);
            self.sender.stop();
            io::Error::other(e)
        })?;
        Ok(id)
    }

    fn wait(&self, id: u32, until: Instant) -> io::Result<Vec<u8>> {
        let mut state = self.state();
        loop {
            if matches!(state.answers.get(&id), Some(Some(_)))
                && let Some(Some(result)) = state.answers.remove(&id)
            {
                return result.map_err(io::Error::from_raw_os_error);
            }
            let left = until.saturating_duration_since(Instant::now());
            if state.closed || left.is_zero() {
                state.answers.remove(&id);
                state.late.insert(id);
                if state.late.len() > MAX_LATE {
                    state.late.pop_first();
                }
                let kind = if state.closed {
                    io::ErrorKind::NotConnected
                } else {
                    io::ErrorKind::TimedOut
                };
                return Err(kind.into());
            }
            state = held(self.changed.wait_timeout(state, left)).0;
        }
    }

    /// Asks so many questions at once, then takes their answers. All of them come until then: a
    /// borrower that answers nothing does not hold the device for as many times as long.
    fn each(
        &self,
        count: usize,
        until: Instant,
        message: impl Fn(u32, usize) -> ToBorrower,
        mut done: impl FnMut(usize, Vec<u8>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut asked = Vec::new();
        let mut result = Ok(());
        for number in 0..count {
            match self.ask(|id| message(id, number)) {
                Ok(id) => asked.push((id, number)),
                Err(e) => {
                    result = Err(e);
                    break;
                }
            }
        }
        for (id, number) in asked {
            let answer = self.wait(id, until).and_then(|bytes| done(number, bytes));
            if result.is_ok() {
                result = answer;
            }
        }
        result
    }

    /// Asks for all parts of a range: (address, where in the range).
    fn each_part(
        &self,
        address: u64,
        length: usize,
        message: impl Fn(u32, u64, Part) -> ToBorrower,
        mut done: impl FnMut(Part, Vec<u8>) -> io::Result<()>,
    ) -> io::Result<()> {
        let part = |number: usize| {
            let start = number * MAX_DATA_BYTES;
            let length = at_most(to_u64(length - start), size_u32::<[u8; MAX_DATA_BYTES]>());
            Part { start, length }
        };
        self.each(
            length.div_ceil(MAX_DATA_BYTES),
            Instant::now() + PATIENCE,
            |id, number| {
                let part = part(number);
                let skip = to_u64(part.start);
                message(id, address.wrapping_add(skip), part)
            },
            |number, bytes| done(part(number), bytes),
        )
    }
}

/// A part of a range: what one message reads or writes.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Where in the range it begins.
    start: usize,
    /// Bytes, at most [`MAX_DATA_BYTES`].
    length: u32,
}

impl Part {
    /// Where in the range it is.
    fn range(self) -> Range<usize> {
        self.start..self.start + to_usize(self.length.into())
    }
}

/// The memory behind a session, for the device that is held under one lease.
#[derive(Debug)]
pub(crate) struct LeaseMemory {
    borrower: Arc<BorrowerMemory>,
    fence: Fence,
    /// What the device writes otherwise.
    written: Arc<PostedWrites>,
}

impl LeaseMemory {
    pub fn new(borrower: Arc<BorrowerMemory>, fence: Fence, written: Arc<PostedWrites>) -> Self {
        Self {
            borrower,
            fence,
            written,
        }
    }
}

impl LeaseMemory {
    /// Reads the words at these addresses, until then.
    pub fn words(&self, addresses: &[u64], until: Instant) -> io::Result<Vec<Word>> {
        let mut words = vec![Word::default(); addresses.len()];
        let message = |id, number: usize| ToBorrower::MemoryRead {
            id,
            fence: self.fence,
            address: addresses[number],
            length: size_u32::<Word>(),
        };
        let take = |number: usize, bytes| {
            let word = Word::try_from(bytes).map_err(|_| io::ErrorKind::InvalidData)?;
            words[number] = word;
            Ok(())
        };
        self.borrower.each(addresses.len(), until, message, take)?;
        Ok(words)
    }
}

impl RemoteMemory for LeaseMemory {
    fn read(&self, address: u64, data: &mut [u8]) -> io::Result<()> {
        self.borrower.each_part(
            address,
            data.len(),
            |id, address, part| ToBorrower::MemoryRead {
                id,
                fence: self.fence,
                address,
                length: part.length,
            },
            |part, bytes| {
                let place = &mut data[part.range()];
                if bytes.len() != place.len() {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                place.copy_from_slice(&bytes);
                Ok(())
            },
        )
    }

    /// After what was written through windows before: the one may say that the other is there.
    fn write(&self, address: u64, data: &[u8]) -> io::Result<()> {
        self.written.flush();
        self.borrower.each_part(
            address,
            data.len(),
            |id, address, part| ToBorrower::MemoryWrite {
                id,
                fence: self.fence,
                address,
                data: data[part.range()].to_vec(),
            },
            |_, _| Ok(()),
        )
    }
}
