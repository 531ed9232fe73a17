//! Work queues in shared memory, the backend's end.

use crate::request::rxe::{RxeRecvFormat, RxeSendFormat};
use crate::request::{Addressing, EntryFormat, RecvWqe, SendFormat, WqeError};
use crate::ring::{Place, Words, copy_entries};
use crate::segment::Part;
use farlane_abi::Errno;
use farlane_abi::queue::{
    MAX_INLINE_BYTES, MAX_SGE, QP_OFF_BACKEND_STATE, QP_OFF_ENTRIES, QP_OFF_RECV_CONSUMED,
    QP_OFF_RECV_PRODUCED, QP_OFF_SEND_CONSUMED, QP_OFF_SEND_PRODUCED, QpLayout, RecvEntry,
    SendEntry, SendTail, Sge, SrqLayout,
};
use farlane_abi::rxe::{
    CONTROL_OFF_BACKEND_STATE, RING_MAX_STRIDE, RingLayout, RxeRecvEntry, RxeSendEntry,
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
    /// Whether who posts can be asked to ring. Where it cannot, whoever waits for a request has to
    /// look.
    fn rings(&self) -> bool {
        true
    }
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

/// Room for requests of a shared receive queue.
#[derive(Debug)]
pub struct Entries {
    part: Part,
    to: RoomFor,
}

/// What there is room for.
#[derive(Clone, Copy, Debug)]
enum RoomFor {
    /// So many entries, a power of two, at the distance that they have where they lie now.
    Entries(u32),
    /// A ring of the user ABI of rxe.
    Ring(RingLayout),
}

impl Entries {
    /// The beginning of `part`.
    ///
    /// # Errors
    /// [`OutOfBounds`] where that is shorter than the layout needs.
    pub(crate) fn new(part: Part, layout: &SrqLayout) -> Result<Self, OutOfBounds> {
        part.memory.require(layout.entries_bytes())?;
        let to = RoomFor::Entries(layout.entries);
        Ok(Self { part, to })
    }

    /// A ring that is `part`.
    ///
    /// # Errors
    /// [`OutOfBounds`] where that is shorter than the layout needs.
    pub(crate) fn ring(part: Part, layout: RingLayout) -> Result<Self, OutOfBounds> {
        part.memory.require(layout.segment_bytes())?;
        let to = RoomFor::Ring(layout);
        Ok(Self { part, to })
    }

    /// How many can wait there.
    #[must_use]
    pub fn count(&self) -> u32 {
        match self.to {
            RoomFor::Entries(count) => count,
            RoomFor::Ring(layout) => layout.entries(),
        }
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
const MAX_RXE_SEND_BYTES: usize = size_of::<RxeSendEntry>() + MAX_INLINE_BYTES as usize;
const MAX_RXE_RECV_BYTES: usize = size_of::<RxeRecvEntry>() + MAX_SGE as usize * size_of::<Sge>();
const _: () = assert!(MAX_RXE_SEND_BYTES <= RING_MAX_STRIDE as usize);

/// A work queue in shared memory, whose entries are read as `F`s and have at most `N` bytes that
/// are looked at.
pub struct SharedQueue<F, const N: usize> {
    /// How its entries are read.
    format: F,
    /// Where the word lies that says whether who posts has to ring.
    state: (SharedMemory, usize),
    /// Where the queue's other words lie, and its entries until they are moved.
    memory: SharedMemory,
    place: Place,
    /// Requests taken so far.
    taken: u32,
    /// Requests whose place was given back so far.
    retired: u32,
    /// Who posts can be asked to ring.
    rings: bool,
    /// Where entries lie that come, once they were [moved](Self::move_entries), and that of a
    /// shared receive queue that is a ring of the user ABI of rxe.
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
pub type SharedSendQueue = SharedQueue<SendFormat, MAX_SEND_STRIDE>;
/// The receive queue of a queue pair in shared memory.
pub type SharedRecvQueue = SharedQueue<(), MAX_RECV_STRIDE>;
/// A send queue as the user ABI of rxe has it.
pub type RxeSendQueue = SharedQueue<RxeSendFormat, MAX_RXE_SEND_BYTES>;
/// A receive queue as the user ABI of rxe has it.
pub type RxeRecvQueue = SharedQueue<RxeRecvFormat, MAX_RXE_RECV_BYTES>;

impl<F, const N: usize> std::fmt::Debug for SharedQueue<F, N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedQueue")
            .field("place", &self.place)
            .field("taken", &self.taken)
            .field("retired", &self.retired)
            .finish_non_exhaustive()
    }
}

impl<F, const N: usize> SharedQueue<F, N> {
    fn new(memory: &SharedMemory, place: Place, format: F) -> Self {
        Self {
            format,
            state: (memory.clone(), QP_OFF_BACKEND_STATE),
            memory: memory.clone(),
            place,
            taken: 0,
            retired: 0,
            rings: true,
            moved: None,
            before: VecDeque::new(),
        }
    }

    /// As [`SharedSource::move_to`].
    fn move_entries(&mut self, part: Part, count: u32) -> Result<u32, Errno> {
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

    /// The same of a ring: the requests that wait lie there, too, from its beginning on, and its
    /// words.
    fn move_ring(&mut self, part: Part, layout: &RingLayout) -> Result<(), Errno> {
        let produced = self.produced().map_err(|_| Errno::EINVAL)?;
        let waiting = produced.wrapping_sub(self.taken);
        let place = Place::of_indices(layout);
        // None of those that were taken has its place still: a shared queue gives it back at once.
        if self.taken != self.retired || waiting > place.room() {
            return Err(Errno::EINVAL);
        }
        let from = (&self.memory, &self.place);
        let to = (&part.memory, &place);
        copy_entries(from, self.taken, waiting, to, self.bytes()).ok_or(Errno::EINVAL)?;
        (self.taken, self.retired) = (0, 0);
        self.memory = part.memory.clone();
        self.place = place;
        self.moved = Some(part);
        Ok(())
    }

    /// Bytes of an entry that are looked at.
    fn bytes(&self) -> usize {
        self.place.stride.min(N)
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
        // What the process has put in and not got back can never exceed the queue.
        let (consumed, entries) = (self.retired, self.place.entries);
        let queued = self.place.distance(consumed, word.load(Ordering::Acquire));
        let produced = consumed.wrapping_add(queued);
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
            word.store(self.place.word(retired), Ordering::Release);
        }
    }
}

impl<W, F: EntryFormat<W>, const N: usize> WorkSource<W> for SharedQueue<F, N> {
    fn take(&mut self, into: &mut W) -> Result<bool, QueueError> {
        if self.produced()? == self.taken {
            return Ok(false);
        }
        let mut buffer = [0; N];
        let entry = &mut buffer[..self.bytes()];
        let (memory, at) = self.next();
        memory.read_bytes(at, entry)?;
        self.taken = self.taken.wrapping_add(1);
        if self.before.front().is_some_and(|b| b.until == self.taken) {
            self.before.pop_front();
        }
        self.format.parse(into, entry)?;
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
            let queued = self
                .place
                .distance(self.retired, word.load(Ordering::Acquire));
            self.taken = self.retired.wrapping_add(queued);
            self.before.clear();
            self.give_back(self.taken);
        }
    }

    fn rings(&self) -> bool {
        self.rings
    }
}

impl<F: EntryFormat<RecvWqe>, const N: usize> SharedSource for SharedQueue<F, N> {
    fn move_to(&mut self, Entries { part, to }: Entries) -> Result<u32, Errno> {
        match (self.place.words, to) {
            (Words::Numbers, RoomFor::Entries(count)) => self.move_entries(part, count),
            (Words::Indices, RoomFor::Ring(layout)) => {
                self.move_ring(part, &layout)?;
                Ok(self.taken)
            }
            (Words::Numbers, RoomFor::Ring(_)) | (Words::Indices, RoomFor::Entries(_)) => {
                Err(Errno::EINVAL)
            }
        }
    }

    fn want_rings(&self, wanted: bool) {
        let (memory, at) = &self.state;
        let word = memory.word(*at).into_iter();
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
        words: Words::Numbers,
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
        words: Words::Numbers,
    };
    let recvs = Place {
        produced_at: QP_OFF_RECV_PRODUCED,
        consumed_at: QP_OFF_RECV_CONSUMED,
        entries_at: layout.recv_offset(),
        entries: layout.recv_entries,
        stride: layout.recv_stride,
        words: Words::Numbers,
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

/// A send queue that is a ring of the user ABI of rxe, in `ring`. `control` is its control block.
///
/// # Errors
/// [`OutOfBounds`] where the ring is shorter than the layout needs.
pub fn rxe_send_queue(
    ring: &SharedMemory,
    layout: &RingLayout,
    control: &SharedMemory,
    format: RxeSendFormat,
) -> Result<RxeSendQueue, OutOfBounds> {
    rxe_queue(ring, layout, control, format)
}

/// The same of a receive queue, whose process tells nobody what it posts.
///
/// # Errors
/// As of [`rxe_send_queue`].
pub fn rxe_recv_queue(
    ring: &SharedMemory,
    layout: &RingLayout,
    control: &SharedMemory,
    format: RxeRecvFormat,
) -> Result<RxeRecvQueue, OutOfBounds> {
    let queue = rxe_queue(ring, layout, control, format)?;
    Ok(SharedQueue {
        rings: false,
        ..queue
    })
}

/// The same of a shared receive queue, which has its ring until it is moved.
pub(crate) fn rxe_shared_receive_queue(
    ring: Part,
    layout: &RingLayout,
    control: &SharedMemory,
    format: RxeRecvFormat,
) -> Result<RxeRecvQueue, OutOfBounds> {
    let queue = rxe_recv_queue(&ring.memory, layout, control, format)?;
    Ok(SharedQueue {
        moved: Some(ring),
        ..queue
    })
}

fn rxe_queue<F, const N: usize>(
    ring: &SharedMemory,
    layout: &RingLayout,
    control: &SharedMemory,
    format: F,
) -> Result<SharedQueue<F, N>, OutOfBounds> {
    ring.require(layout.segment_bytes())?;
    let queue = SharedQueue::new(ring, Place::of_indices(layout), format);
    Ok(SharedQueue {
        state: (control.clone(), CONTROL_OFF_BACKEND_STATE),
        ..queue
    })
}

#[cfg(test)]
mod tests;
