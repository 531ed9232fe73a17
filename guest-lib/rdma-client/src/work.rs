//! Posting work: the producer's ends of send queues and receive queues.

use crate::Sge;
use crate::arena::Part;
use crate::header::Header;
use crate::qp::Qp;
use farlane_abi::Errno;
use farlane_abi::queue::{
    OP_ATOMIC_WRITE, OP_BIND_WINDOW, OP_COMPARE_SWAP, OP_FETCH_ADD, OP_FLUSH, OP_LOCAL_INVALIDATE,
    OP_RDMA_READ, QP_OFF_BACKEND_STATE, QP_OFF_ENTRIES, QP_OFF_RECV_CONSUMED, QP_OFF_RECV_PRODUCED,
    QP_OFF_SEND_CONSUMED, QP_OFF_SEND_PRODUCED, RecvEntry, SEND_INLINE, SEND_TAIL, SendEntry,
    SendTail,
};
use farlane_abi::rdma::{QPT_XRC_SEND, VerbsVersion};
use farlane_abi::zerocopy::IntoBytes as _;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

/// The data of a send request.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Lies in registered memory.
    Gather(&'a [Sge]),
    /// Is copied into the request, one piece after the other.
    Inline(&'a [&'a [u8]]),
}

/// A request of the send queue.
#[derive(Clone, Copy, Debug)]
pub struct SendRequest<'a> {
    /// The caller's number for it.
    pub wr_id: u64,
    /// `OP_*` of [`farlane_abi::queue`].
    pub opcode: u8,
    /// `SEND_*` of [`farlane_abi::queue`]; `SEND_INLINE` follows from the payload.
    pub flags: u8,
    /// Immediate data, in the byte order of the caller's choice.
    pub imm: u32,
    /// RDMA: address at the peer.
    pub remote_addr: u64,
    /// RDMA: key of the peer's memory.
    pub rkey: u32,
    /// What to send, or where an RDMA read goes.
    pub payload: Payload<'a>,
}

/// A request of the receive queue.
#[derive(Clone, Copy, Debug)]
pub struct RecvRequest<'a> {
    /// The caller's number for it.
    pub wr_id: u64,
    /// Where the data goes.
    pub scatter: &'a [Sge],
}

/// The producer's end of one queue.
#[derive(Debug, Default)]
pub(crate) struct Producer {
    /// Requests written so far, published or not.
    pub(crate) produced: u32,
    /// The consumer word when it was last looked at.
    pub(crate) consumed: u32,
    /// Where entries lie, of a queue that was resized.
    pub(crate) moved: Option<Moved>,
}

/// Where the entries of a queue lie that was resized.
#[derive(Debug)]
pub(crate) struct Moved {
    /// At its beginning.
    pub part: Part,
    /// A power of two.
    pub entries: u32,
    /// Number of the first request that lies there.
    pub first: u32,
    /// What the backend may read still, each until it has consumed so many: but what lies where
    /// the queue's words do.
    pub before: Vec<(u32, Part)>,
}

impl Moved {
    /// All that the backend may read.
    pub fn into_parts(self) -> impl Iterator<Item = Part> {
        let before = self.before.into_iter().map(|(_, part)| part);
        before.chain([self.part])
    }
}

impl Producer {
    /// The index to write next, `None` when all `entries` are in use. `consumed` loads the
    /// consumer word. A word that makes no sense looks like a full queue.
    #[inline]
    fn vacant(&mut self, entries: u32, consumed: impl FnOnce() -> u32) -> Option<usize> {
        if self.produced.wrapping_sub(self.consumed) >= entries {
            self.consumed = consumed();
            if self.produced.wrapping_sub(self.consumed) >= entries {
                return None;
            }
        }
        Some((self.produced & (entries - 1)) as usize)
    }
}

/// The producer's end of a queue, locked. What was written is published, and the backend woken once
/// if it sleeps, when this is dropped.
#[derive(Debug)]
struct Batch<'a> {
    qp: &'a Qp,
    producer: MutexGuard<'a, Producer>,
    published: u32,
    /// Offset of the producer word in the queue pair's segment.
    word: usize,
}

impl<'a> Batch<'a> {
    fn new(qp: &'a Qp, producer: MutexGuard<'a, Producer>, word: usize) -> Self {
        let published = producer.produced;
        Self {
            qp,
            producer,
            published,
            word,
        }
    }
}

/// Publishes what was written into a queue, and has the backend woken if it sleeps.
#[inline]
fn publish(part: &Part, header: &Header, bit: u32, word: usize, produced: u32) {
    part.word(word).store(produced, Ordering::Release);
    header.ring(part.word(QP_OFF_BACKEND_STATE), bit);
}

impl Drop for Batch<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.producer.produced != self.published {
            let (part, produced) = (self.qp.map(), self.producer.produced);
            publish(part, self.qp.header(), self.qp.slot(), self.word, produced);
        }
    }
}

/// The send queue of a queue pair, locked. What was pushed is published, and the backend woken
/// once if it sleeps, by [`ring`](Self::ring) or drop.
#[derive(Debug)]
pub struct SendQueue<'a>(Batch<'a>);

impl<'a> SendQueue<'a> {
    pub(crate) fn new(qp: &'a Qp, producer: MutexGuard<'a, Producer>) -> Self {
        Self(Batch::new(qp, producer, QP_OFF_SEND_PRODUCED))
    }

    /// The version of its requests.
    #[must_use]
    pub fn version(&self) -> VerbsVersion {
        self.0.qp.layout().version
    }

    /// How many requests fit now.
    #[must_use]
    pub fn room(&mut self) -> u32 {
        let consumed = self.0.qp.map().word(QP_OFF_SEND_CONSUMED);
        self.0.producer.consumed = consumed.load(Ordering::Acquire);
        let used = self
            .0
            .producer
            .produced
            .wrapping_sub(self.0.producer.consumed);
        self.0.qp.layout().send_entries.saturating_sub(used)
    }

    /// Writes a request into the next entry.
    ///
    /// # Errors
    /// `ENOMEM` when the queue is full, `EINVAL` for an opcode that the queue's version does not
    /// have, too many elements or too much inline data.
    #[inline]
    pub fn push(&mut self, request: &SendRequest<'_>) -> Result<(), Errno> {
        self.write(request, None, 0)
    }

    /// The same of a request that has operands besides.
    ///
    /// # Errors
    /// Those of [`push`](Self::push), and `EINVAL` where the queue's version has no operands.
    #[inline]
    pub fn push_with(&mut self, request: &SendRequest<'_>, tail: &SendTail) -> Result<(), Errno> {
        self.write(request, Some(tail), 0)
    }

    /// The same of a request that goes to a shared receive queue of this number: on an initiator of
    /// an extended reliable connection.
    ///
    /// # Errors
    /// Those of [`push_with`](Self::push_with).
    #[inline]
    pub fn push_to(
        &mut self,
        srq: u32,
        request: &SendRequest<'_>,
        tail: Option<&SendTail>,
    ) -> Result<(), Errno> {
        match (tail, request.opcode) {
            // They go nowhere.
            (tail, OP_LOCAL_INVALIDATE | OP_BIND_WINDOW) => self.write(request, tail, 0),
            (Some(tail), _) => self.write(request, Some(tail), srq),
            (None, _) => {
                let tail = SendTail {
                    a: u64::from(srq).into(),
                    ..SendTail::default()
                };
                self.write(request, Some(&tail), 0)
            }
        }
    }

    /// Whether each request has to say which [shared receive queue](Self::push_to) it goes to.
    #[must_use]
    pub fn names_queues(&self) -> bool {
        self.0.qp.qp_type() == QPT_XRC_SEND
    }

    #[inline]
    fn write(
        &mut self,
        request: &SendRequest<'_>,
        tail: Option<&SendTail>,
        number: u32,
    ) -> Result<(), Errno> {
        let qp = self.0.qp;
        let map = qp.map();
        let last = match qp.layout().version {
            VerbsVersion::V1 if tail.is_some() => return Err(Errno::EINVAL),
            VerbsVersion::V1 => OP_RDMA_READ,
            VerbsVersion::V2 => OP_ATOMIC_WRITE,
            VerbsVersion::V3 => OP_FLUSH,
        };
        if request.opcode > last {
            return Err(Errno::EINVAL);
        }
        let consumed = || map.word(QP_OFF_SEND_CONSUMED).load(Ordering::Acquire);
        let index = self
            .0
            .producer
            .vacant(qp.layout().send_entries, consumed)
            .ok_or(Errno::ENOMEM)?;
        let offset = QP_OFF_ENTRIES + index * qp.layout().send_stride;
        let mut payload = offset + size_of::<SendEntry>();
        let mut entry = SendEntry {
            wr_id: request.wr_id.into(),
            opcode: request.opcode,
            flags: request.flags & !(SEND_INLINE | SEND_TAIL),
            imm: request.imm.into(),
            remote_addr: request.remote_addr.into(),
            rkey: request.rkey.into(),
            // Atomic operations and flushes have no inline bytes, and their tail no room.
            inline_bytes: number.into(),
            ..SendEntry::default()
        };
        if let Some(tail) = tail {
            entry.flags |= SEND_TAIL;
            // SAFETY: the backend does not touch an entry whose index it has not been given, and
            // the lock keeps our own threads out.
            unsafe { map.write(payload, tail) };
            payload += size_of::<SendTail>();
        }
        match request.payload {
            Payload::Gather(sges) => {
                let count = within(sges.len(), qp.caps().send_sge)?;
                entry.num_sge = u16::try_from(count).map_err(|_| Errno::EINVAL)?.into();
                // SAFETY: as above.
                unsafe { map.write_bytes(payload, sges.as_bytes()) };
            }
            Payload::Inline(pieces) => {
                if !may_be_inline(request.opcode) {
                    return Err(Errno::EINVAL);
                }
                let bytes = pieces.iter().map(|piece| piece.len()).sum();
                entry.inline_bytes = within(bytes, qp.caps().inline_bytes)?.into();
                entry.flags |= SEND_INLINE;
                let mut at = payload;
                for piece in pieces {
                    // SAFETY: as above.
                    unsafe { map.write_bytes(at, piece) };
                    at += piece.len();
                }
            }
        }
        // SAFETY: as above.
        unsafe { map.write(offset, &entry) };
        self.0.producer.produced = self.0.producer.produced.wrapping_add(1);
        Ok(())
    }

    /// Publishes what was pushed.
    pub fn ring(self) {}

    /// Publishes nothing of what was pushed: it was not.
    pub fn take_back(mut self) {
        self.0.producer.produced = self.0.published;
    }
}

/// Where receive requests lie: those of a queue pair, or shared ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecvPlace<'a> {
    pub part: &'a Part,
    pub header: &'a Header,
    /// Which bit rings it.
    pub bit: u32,
    /// Offset of the entries.
    pub entries_at: usize,
    /// How many there are, a power of two.
    pub entries: u32,
    /// Bytes from one to the next.
    pub stride: usize,
    /// Elements that a request may have.
    pub elements: u32,
}

/// A receive queue, locked. What was pushed is published, and the backend woken once if it sleeps,
/// by [`ring`](Self::ring) or drop.
#[derive(Debug)]
pub struct RecvQueue<'a> {
    place: RecvPlace<'a>,
    producer: MutexGuard<'a, Producer>,
    published: u32,
}

impl Drop for RecvQueue<'_> {
    #[inline]
    fn drop(&mut self) {
        let (place, produced) = (self.place, self.producer.produced);
        if produced != self.published {
            let word = QP_OFF_RECV_PRODUCED;
            publish(place.part, place.header, place.bit, word, produced);
        }
    }
}

impl<'a> RecvQueue<'a> {
    pub(crate) fn new(place: RecvPlace<'a>, producer: MutexGuard<'a, Producer>) -> Self {
        let published = producer.produced;
        Self {
            place,
            producer,
            published,
        }
    }

    /// Writes a request into the next entry.
    ///
    /// # Errors
    /// `ENOMEM` when the queue is full, `EINVAL` for too many elements.
    #[inline]
    pub fn push(&mut self, request: &RecvRequest<'_>) -> Result<(), Errno> {
        let (place, part) = (self.place, self.place.part);
        let consumed = || part.word(QP_OFF_RECV_CONSUMED).load(Ordering::Acquire);
        let entries = self.producer.moved.as_ref();
        let entries = entries.map_or(place.entries, |moved| moved.entries);
        let index = self
            .producer
            .vacant(entries, consumed)
            .ok_or(Errno::ENOMEM)?;
        let (part, begin) = match &self.producer.moved {
            None => (part, place.entries_at),
            Some(moved) => (&moved.part, 0),
        };
        let offset = begin + index * place.stride;
        let entry = RecvEntry {
            wr_id: request.wr_id.into(),
            num_sge: within(request.scatter.len(), place.elements)?.into(),
            ..RecvEntry::default()
        };
        // SAFETY: the backend does not touch an entry whose index it has not been given, and the
        // lock keeps our own threads out.
        unsafe {
            part.write(offset, &entry);
            part.write_bytes(offset + size_of::<RecvEntry>(), request.scatter.as_bytes());
        }
        self.producer.produced = self.producer.produced.wrapping_add(1);
        Ok(())
    }

    /// Publishes what was pushed.
    pub fn ring(self) {}
}

/// Whether the data of an operation may lie in its request: it has some, and sends it.
#[inline]
fn may_be_inline(opcode: u8) -> bool {
    !matches!(
        opcode,
        OP_RDMA_READ
            | OP_COMPARE_SWAP
            | OP_FETCH_ADD
            | OP_LOCAL_INVALIDATE
            | OP_BIND_WINDOW
            | OP_FLUSH
    )
}

/// `count` if it is not above `limit`.
#[inline]
fn within(count: usize, limit: u32) -> Result<u32, Errno> {
    u32::try_from(count)
        .ok()
        .filter(|&count| count <= limit)
        .ok_or(Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_queue_holds_exactly_its_entries_wherever_its_words_wrap(
            start: u32,
            log_entries in 0_u32..10,
            takes in proptest::collection::vec(0_u32..40, 1..60),
        ) {
            let entries = 1 << log_entries;
            let mut producer = Producer { produced: start, consumed: start, moved: None };
            let mut consumed = start;
            for take in takes {
                while let Some(index) = producer.vacant(entries, || consumed) {
                    prop_assert_eq!(index, (producer.produced % entries) as usize);
                    producer.produced = producer.produced.wrapping_add(1);
                }
                prop_assert_eq!(producer.produced.wrapping_sub(consumed), entries);
                consumed = consumed.wrapping_add(take.min(entries));
            }
        }

        #[test]
        fn a_consumer_word_that_makes_no_sense_never_yields_more_room(produced: u32, word: u32) {
            let consumed = produced.wrapping_sub(8);
            let mut producer = Producer { produced, consumed, moved: None };
            let vacant = producer.vacant(8, || word);
            prop_assert_eq!(vacant.is_some(), produced.wrapping_sub(word) < 8);
        }
    }
}
