//! Work queues in shared memory, the backend's end.

use crate::request::{Addressing, RecvWqe, SendFormat, SendWqe, WorkRequest, WqeError};
use crate::ring::Place;
use crate::segment::Part;
use farlane_abi::Errno;
use farlane_abi::queue::{
    MAX_INLINE_BYTES, MAX_SGE, QP_OFF_BACKEND_STATE, QP_OFF_ENTRIES, QP_OFF_RECV_CONSUMED,
    QP_OFF_RECV_PRODUCED, QP_OFF_SEND_CONSUMED, QP_OFF_SEND_PRODUCED, QpLayout, RecvEntry,
    SendEntry, SendTail, Sge, SrqLayout,
};
use farlane_worker::wake;
use farlane_zero_copy::{OutOfBounds, SharedMemory};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use thiserror::Error;

/// Why nothing can be taken from a work queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum QueueError {
    /// The entry is not a work request; it counts as taken.
    #[error("Bad work request")]
    Request(#[from] WqeError),
    /// The producer word is nonsense; nothing in the queue can be trusted any more.
    #[error("Producer index {produced} of a queue of {entries} with consumer index {consumed}")]
    Index {
        /// Producer index that the process wrote.
        produced: u32,
        /// Consumer index.
        consumed: u32,
        /// Entries of the queue.
        entries: u32,
    },
    /// The queue is not where it should be. The layout is checked when the queue is made.
    #[error(transparent)]
    Bounds(#[from] OutOfBounds),
}

/// Where work requests come from.
///
/// A request is *taken*, carried out, and then *retired*, in order. Where others carry it out, the
/// engine takes some before the ones in front of them are retired; a receive request it retires at
/// once.
pub trait WorkSource<W>: Send {
    /// Takes the next request into `into`; false when there is none.
    ///
    /// # Errors
    /// See [`QueueError`]; a bad request has been taken.
    fn take(&mut self, into: &mut W) -> Result<bool, QueueError>;
    /// Gives the place of the oldest request that was taken back to the producer.
    fn retire(&mut self);
    /// Requests that can be taken; of a queue that makes no sense one, which is that error.
    fn queued(&self) -> u32;
    /// Whether something can be taken.
    fn is_ready(&self) -> bool {
        self.queued() > 0
    }
    /// Drops everything that is queued.
    fn discard(&mut self);
}

/// Where no request ever comes from.
#[derive(Clone, Copy, Debug)]
pub struct NoRequests;

impl<W> WorkSource<W> for NoRequests {
    fn take(&mut self, _: &mut W) -> Result<bool, QueueError> {
        Ok(false)
    }

    fn retire(&mut self) {}

    fn queued(&self) -> u32 {
        0
    }

    fn discard(&mut self) {}
}

/// A source of receive requests that several queue pairs take.
pub trait SharedSource: WorkSource<RecvWqe> {
    /// Who posts has to ring from now on, or need not any more. Whoever wants rings looks once more
    /// after this.
    fn want_rings(&self, wanted: bool);
    /// Has the requests that are posted from now on lie elsewhere. Those that wait stay where they
    /// are; returns the number of the first that does not.
    ///
    /// # Errors
    /// `EINVAL` where more wait than there is room for from now on, where it does not lie in shared
    /// memory, and of a queue that makes no sense; `ENOMEM` where requests wait in too many places
    /// already.
    fn move_to(&mut self, _to: Entries) -> Result<u32, Errno> {
        Err(Errno::EINVAL)
    }
}

/// Room for requests of a shared receive queue, at the distance that they have where they lie now.
#[derive(Debug)]
pub struct Entries {
    part: Part,
    /// A power of two.
    count: u32,
}

impl Entries {
    /// The beginning of `part`.
    ///
    /// # Errors
    /// [`OutOfBounds`] where that is shorter than the layout needs.
    pub(crate) fn new(part: Part, layout: &SrqLayout) -> Result<Self, OutOfBounds> {
        part.memory.require(layout.entries_bytes())?;
        let count = layout.entries;
        Ok(Self { part, count })
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }
}

/// In how many earlier places requests of a queue may wait that is moved: 100 bytes each, of a
/// queue alone. As often it can be doubled, from one request to as many as it may have, and more.
pub(crate) const MAX_EARLIER_PLACES: usize = 16;

const MAX_SEND_STRIDE: usize = {
    let elements = MAX_SGE as usize * size_of::<Sge>();
    let inline = MAX_INLINE_BYTES as usize;
    let payload = if elements > inline { elements } else { inline };
    (size_of::<SendEntry>() + size_of::<SendTail>() + payload).next_multiple_of(32)
};
const MAX_RECV_STRIDE: usize = size_of::<RecvEntry>() + MAX_SGE as usize * size_of::<Sge>() + 32;

/// A work queue of a queue pair in shared memory, whose entries have at most `N` bytes.
pub struct SharedQueue<W: WorkRequest, const N: usize> {
    /// How its entries are read.
    format: W::Format,
    memory: SharedMemory,
    place: Place,
    /// Requests taken so far.
    taken: u32,
    /// Requests whose place was given back so far.
    retired: u32,
    /// Where entries lie that come, once they were [moved](Self::move_entries).
    moved: Option<Part>,
    /// Where those lie that were there before that, oldest first.
    before: VecDeque<Before>,
}

/// Entries of a queue from before it was moved.
struct Before {
    /// Number of the first request behind them.
    until: u32,
    /// Where they lie; where the queue's words do, where there is none.
    part: Option<Part>,
    /// Of the entries.
    place: Place,
}

/// The send queue of a queue pair in shared memory.
pub type SharedSendQueue = SharedQueue<SendWqe, MAX_SEND_STRIDE>;
/// The receive queue of a queue pair in shared memory.
pub type SharedRecvQueue = SharedQueue<RecvWqe, MAX_RECV_STRIDE>;

impl<W: WorkRequest, const N: usize> std::fmt::Debug for SharedQueue<W, N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedQueue")
            .field("place", &self.place)
            .field("taken", &self.taken)
            .field("retired", &self.retired)
            .finish_non_exhaustive()
    }
}

impl<W: WorkRequest, const N: usize> SharedQueue<W, N> {
    fn new(memory: &SharedMemory, place: Place, format: W::Format) -> Self {
        Self {
            format,
            memory: memory.clone(),
            place,
            taken: 0,
            retired: 0,
            moved: None,
            before: VecDeque::new(),
        }
    }

    /// As [`SharedSource::move_to`].
    fn move_entries(&mut self, Entries { part, count }: Entries) -> Result<u32, Errno> {
        let first = self.produced().map_err(|_| Errno::EINVAL)?;
        if first.wrapping_sub(self.retired) > count {
            return Err(Errno::EINVAL);
        }
        // Nothing lies where nothing was posted since the time before.
        let waits_from = self.before.back().map_or(self.taken, |before| before.until);
        let is_empty = waits_from == first;
        if !is_empty && self.before.len() == MAX_EARLIER_PLACES {
            return Err(Errno::ENOMEM);
        }
        let place = self.place;
        (self.place.entries_at, self.place.entries) = (0, count);
        let part = self.moved.replace(part);
        if !is_empty {
            self.before.push_back(Before {
                until: first,
                part,
                place,
            });
        }
        Ok(first)
    }

    /// Where the next request lies.
    fn next(&self) -> (&SharedMemory, usize) {
        let (part, place) = match self.before.front() {
            Some(before) => (&before.part, &before.place),
            None => (&self.moved, &self.place),
        };
        let memory = part.as_ref().map_or(&self.memory, |part| &part.memory);
        (memory, place.entry(self.taken))
    }

    fn produced(&self) -> Result<u32, QueueError> {
        let word = self.memory.word(self.place.produced_at)?;
        let produced = word.load(Ordering::Acquire);
        // What the process has put in and not got back can never exceed the queue.
        let (consumed, entries) = (self.retired, self.place.entries);
        let queued = produced.wrapping_sub(consumed);
        if queued > entries || queued < self.taken.wrapping_sub(consumed) {
            return Err(QueueError::Index {
                produced,
                consumed,
                entries,
            });
        }
        Ok(produced)
    }

    /// Tells the process that its places up to here are free.
    fn give_back(&mut self, retired: u32) {
        self.retired = retired;
        if let Ok(word) = self.memory.word(self.place.consumed_at) {
            word.store(retired, Ordering::Release);
        }
    }
}

impl<W: WorkRequest, const N: usize> WorkSource<W> for SharedQueue<W, N> {
    fn take(&mut self, into: &mut W) -> Result<bool, QueueError> {
        if self.produced()? == self.taken {
            return Ok(false);
        }
        let mut buffer = [0; N];
        let entry = &mut buffer[..self.place.stride.min(N)];
        let (memory, at) = self.next();
        memory.read_bytes(at, entry)?;
        self.taken = self.taken.wrapping_add(1);
        if self.before.front().is_some_and(|b| b.until == self.taken) {
            self.before.pop_front();
        }
        into.parse_as(&self.format, entry)?;
        Ok(true)
    }

    fn retire(&mut self) {
        self.give_back(self.retired.wrapping_add(1));
    }

    fn queued(&self) -> u32 {
        self.produced()
            .map_or(1, |produced| produced.wrapping_sub(self.taken))
    }

    fn discard(&mut self) {
        if let Ok(word) = self.memory.word(self.place.produced_at) {
            self.taken = word.load(Ordering::Acquire);
            self.before.clear();
            self.give_back(self.taken);
        }
    }
}

impl SharedSource for SharedRecvQueue {
    fn move_to(&mut self, to: Entries) -> Result<u32, Errno> {
        self.move_entries(to)
    }

    fn want_rings(&self, wanted: bool) {
        let word = self.memory.word(QP_OFF_BACKEND_STATE).into_iter();
        if wanted {
            wake::announce(word);
        } else {
            wake::awake(word);
        }
    }
}

/// A shared receive queue in `memory`.
///
/// # Errors
/// [`OutOfBounds`] where the segment is shorter than the layout needs.
pub fn shared_receive_queue(
    memory: &SharedMemory,
    layout: &SrqLayout,
) -> Result<SharedRecvQueue, OutOfBounds> {
    memory.require(layout.segment_bytes())?;
    let place = Place {
        produced_at: QP_OFF_RECV_PRODUCED,
        consumed_at: QP_OFF_RECV_CONSUMED,
        entries_at: QP_OFF_ENTRIES,
        entries: layout.entries,
        stride: layout.stride,
    };
    Ok(SharedQueue::new(memory, place, ()))
}

/// Both queues of a queue pair in `memory`, which is connected.
///
/// # Errors
/// [`OutOfBounds`] where the segment is shorter than the layout needs.
pub fn shared_queues(
    memory: &SharedMemory,
    layout: &QpLayout,
) -> Result<(SharedSendQueue, SharedRecvQueue), OutOfBounds> {
    addressed_queues(memory, layout, Addressing::Connected)
}

/// The same of a queue pair whose requests say in this way whom they are for.
///
/// # Errors
/// [`OutOfBounds`] where the segment is shorter than the layout needs.
pub fn addressed_queues(
    memory: &SharedMemory,
    layout: &QpLayout,
    addressing: Addressing,
) -> Result<(SharedSendQueue, SharedRecvQueue), OutOfBounds> {
    memory.require(layout.segment_bytes())?;
    let sends = Place {
        produced_at: QP_OFF_SEND_PRODUCED,
        consumed_at: QP_OFF_SEND_CONSUMED,
        entries_at: QP_OFF_ENTRIES,
        entries: layout.send_entries,
        stride: layout.send_stride,
    };
    let recvs = Place {
        produced_at: QP_OFF_RECV_PRODUCED,
        consumed_at: QP_OFF_RECV_CONSUMED,
        entries_at: layout.recv_offset(),
        entries: layout.recv_entries,
        stride: layout.recv_stride,
    };
    let format = SendFormat {
        version: layout.version,
        addressing,
    };
    Ok((
        SharedQueue::new(memory, sends, format),
        SharedQueue::new(memory, recvs, ()),
    ))
}
