//! Work queues and completion queues in shared memory.
//!
//! A **queue pair** lies in one segment, beside others: [`QpLayout`]. The producer words are
//! written by the process, the consumer words by the backend; both count freely and wrap at 2^32.
//! An entry may be reused when the consumer word has passed it.
//!
//! A **shared receive queue** lies in one segment: [`SrqLayout`]. It is the receive half of a queue
//! pair: the same words in the same places.
//!
//! A **completion queue** lies in one segment: [`CqLayout`]. The producer word is written by the
//! backend, the consumer word by the process.
//!
//! Number of entries is always a power of two, so that an index is the word masked.

use crate::rdma::VerbsVersion;
use crate::wire::{numbers, pod};
use zerocopy::little_endian::{U16, U32, U64};

/// Where queues may begin in a segment: at multiples of this, so that no two have a word in one
/// cache line.
pub const QUEUE_ALIGN: u64 = 64;

/// Send queue: producer word (process).
pub const QP_OFF_SEND_PRODUCED: usize = 0x000;
/// Send queue: consumer word (backend).
pub const QP_OFF_SEND_CONSUMED: usize = 0x040;
/// Receive queue: producer word (process).
pub const QP_OFF_RECV_PRODUCED: usize = 0x080;
/// Receive queue: consumer word (backend).
pub const QP_OFF_RECV_CONSUMED: usize = 0x0c0;
/// Whether the backend has to be told of requests: as
/// [`OFF_BACKEND_STATE`](crate::arena::OFF_BACKEND_STATE), of this queue pair.
pub const QP_OFF_BACKEND_STATE: usize = 0x100;
/// First byte of the send queue's entries.
pub const QP_OFF_ENTRIES: usize = 0x140;

/// Completion queue: producer word (backend).
pub const CQ_OFF_PRODUCED: usize = 0x000;
/// Completion queue: consumer word (process).
pub const CQ_OFF_CONSUMED: usize = 0x040;
/// Completion queue: notification request, `ARM_*`. Set by the process, cleared by the backend
/// when it raises the event.
pub const CQ_OFF_ARMED: usize = 0x080;
/// Completion queue: events raised so far, free-running (backend).
pub const CQ_OFF_EVENTS: usize = 0x0c0;
/// First byte of the completion queue's entries.
pub const CQ_OFF_ENTRIES: usize = 0x100;

/// No notification is wanted.
pub const ARM_NONE: u32 = 0;
/// The next completion raises an event.
pub const ARM_NEXT: u32 = 1;
/// The next solicited or failed completion raises an event.
pub const ARM_SOLICITED: u32 = 2;

/// Largest number of entries of a work queue.
pub const MAX_WQ_ENTRIES: u32 = 1 << 14;
/// Largest number of entries of a completion queue.
pub const MAX_CQ_ENTRIES: u32 = 1 << 20;
/// Largest number of scatter/gather elements of a work request.
pub const MAX_SGE: u32 = 16;
/// Largest number of inline bytes of a work request.
pub const MAX_INLINE_BYTES: u32 = 1024;
/// Largest message in bytes.
pub const MAX_MESSAGE_BYTES: u32 = 1 << 30;

pod! {
    /// Head of a send work request; a [`SendTail`] where the flags say so, then scatter/gather
    /// elements or inline data follow it.
    pub struct SendEntry {
        /// The caller's number for this request.
        pub wr_id: U64,
        /// `OP_*`.
        pub opcode: u8,
        /// `SEND_*`.
        pub flags: u8,
        /// Number of [`Sge`] that follow; zero when inline.
        pub num_sge: U16,
        /// Immediate data, in the byte order of the caller's choice. Invalidation: the key.
        /// Binding: the present key of the window.
        pub imm: U32,
        /// RDMA and atomics: address at the peer. Binding: where the window begins.
        pub remote_addr: U64,
        /// RDMA and atomics: key of the peer's memory. Binding: the window's next key.
        pub rkey: U32,
        /// Bytes of inline data that follow. Atomics and flushes of an extended reliable
        /// connection: number of the shared receive queue.
        pub inline_bytes: U32,
    }

    /// Operands of a send work request for which its head has no room, where
    /// [`SEND_TAIL`] is set: exactly where this lists its opcode or transport.
    ///
    /// | | `a` | `b` |
    /// |---|---|---|
    /// | [`OP_COMPARE_SWAP`] | value to compare with | value to store |
    /// | [`OP_FETCH_ADD`] | value to add | zero |
    /// | [`OP_FLUSH`] | length in bytes | low: `FLUSH_*`; high: `FLUSH_OF_*` |
    /// | [`OP_BIND_WINDOW`] | length in bytes | low: key of the region; high: `ACCESS_*` |
    /// | datagrams | low half: address handle; high half: queue pair number | low half: Q_Key |
    /// | extended reliable connections | low half: number of the shared receive queue | zero |
    ///
    /// [`OP_LOCAL_INVALIDATE`], which is no message, has no operands on extended reliable
    /// connections either.
    pub struct SendTail {
        /// First operand.
        pub a: U64,
        /// Second operand.
        pub b: U64,
    }

    /// Head of a receive work request; scatter/gather elements follow it.
    pub struct RecvEntry {
        /// The caller's number for this request.
        pub wr_id: U64,
        /// Number of [`Sge`] that follow.
        pub num_sge: U32,
        /// Zero.
        pub reserved: U32,
    }

    /// A scatter/gather element.
    pub struct Sge {
        /// Address, in the address range of the memory region.
        pub addr: U64,
        /// Length in bytes.
        pub length: U32,
        /// Key of the memory region.
        pub lkey: U32,
    }

    /// A completion.
    pub struct Completion {
        /// Number of the completed request.
        pub wr_id: U64,
        /// `WC_STATUS_*`, as `enum ibv_wc_status`.
        pub status: u8,
        /// `WC_OPCODE_*`, as `enum ibv_wc_opcode`.
        pub opcode: u8,
        /// `WC_FLAG_*`, as `enum ibv_wc_flags`.
        pub flags: U16,
        /// Bytes transferred.
        pub byte_len: U32,
        /// Immediate data where the flags say so.
        pub imm: U32,
        /// Number of the local queue pair.
        pub qp_num: U32,
        /// Number of the peer's queue pair.
        pub src_qp: U32,
        /// Detail of an error. Of a datagram that was received: its sender's local identifier in
        /// the low half, the service level in the byte above.
        pub vendor_err: U32,
    }

    /// A completion of a queue whose completions say when they came.
    pub struct TimedCompletion {
        /// The completion.
        pub completion: Completion,
        /// When it came, by the device's clock: in nanoseconds, since a moment that is the same for
        /// all contexts of the device.
        pub time: U64,
    }
}

impl SendTail {
    /// That of a datagram: its address handle, the queue pair there, and the Q_Key.
    #[must_use]
    pub fn datagram(handle: u32, number: u32, qkey: u32) -> Self {
        Self {
            a: (u64::from(number) << 32 | u64::from(handle)).into(),
            b: u64::from(qkey).into(),
        }
    }
}

/// Bytes before the data of a datagram in the memory that receives it: a global route header where
/// [`WC_FLAG_GRH`] is set (IBTA 11.4.1.2).
pub const GRH_BYTES: u32 = 40;

/// RDMA write.
pub const OP_RDMA_WRITE: u8 = 0;
/// RDMA write that consumes a receive request at the peer.
pub const OP_RDMA_WRITE_IMM: u8 = 1;
/// Send.
pub const OP_SEND: u8 = 2;
/// Send with immediate data.
pub const OP_SEND_IMM: u8 = 3;
/// RDMA read.
pub const OP_RDMA_READ: u8 = 4;
/// Compare and swap of 8 bytes at the peer.
pub const OP_COMPARE_SWAP: u8 = 5;
/// Fetch and add of 8 bytes at the peer.
pub const OP_FETCH_ADD: u8 = 6;
/// Invalidation of a key of the own side.
pub const OP_LOCAL_INVALIDATE: u8 = 7;
/// Binding of a memory window.
pub const OP_BIND_WINDOW: u8 = 8;
/// Send with invalidation of a key at the peer.
pub const OP_SEND_INVALIDATE: u8 = 9;
/// Write of 8 bytes at the peer at once.
pub const OP_ATOMIC_WRITE: u8 = 10;
/// Flush of what was written at the peer; from version 3 on.
pub const OP_FLUSH: u8 = 11;

/// Placement types of a flush: what was written is visible to all who see the memory.
pub const FLUSH_GLOBAL: u32 = 1 << 0;
/// What was written outlasts a loss of power.
pub const FLUSH_PERSISTENT: u32 = 1 << 1;
/// What a flush is of: bytes from its address on.
pub const FLUSH_OF_RANGE: u32 = 0;
/// All that its key names.
pub const FLUSH_OF_REGION: u32 = 1;

/// The request completes into the completion queue.
pub const SEND_SIGNALED: u8 = 1 << 0;
/// The peer's completion is a solicited one.
pub const SEND_SOLICITED: u8 = 1 << 1;
/// Wait for earlier RDMA reads.
pub const SEND_FENCE: u8 = 1 << 2;
/// The data lies in the work request.
pub const SEND_INLINE: u8 = 1 << 3;
/// A [`SendTail`] follows the head; from version 2 on.
pub const SEND_TAIL: u8 = 1 << 4;

/// The first bytes of the message's buffer are a global route header, or room for one.
pub const WC_FLAG_GRH: u16 = 1 << 0;
/// Immediate data is valid.
pub const WC_FLAG_IMM: u16 = 1 << 1;
/// `imm` is the key that was invalidated.
pub const WC_FLAG_INVALIDATED: u16 = 1 << 3;

// Values of `enum ibv_wc_status`.
numbers! { u8:
    /// Success.
    WC_STATUS_SUCCESS = 0,
    /// Local length error.
    WC_STATUS_LOC_LEN_ERR = 1,
    /// Local QP operation error.
    WC_STATUS_LOC_QP_OP_ERR = 2,
    /// Local protection error.
    WC_STATUS_LOC_PROT_ERR = 4,
    /// Flushed: the queue pair was in, or went to, the error state.
    WC_STATUS_WR_FLUSH_ERR = 5,
    /// Memory window bind error.
    WC_STATUS_MW_BIND_ERR = 6,
    /// Remote invalid request.
    WC_STATUS_REM_INV_REQ_ERR = 9,
    /// Remote access error.
    WC_STATUS_REM_ACCESS_ERR = 10,
    /// Remote operation error.
    WC_STATUS_REM_OP_ERR = 11,
    /// Transport retry counter exceeded.
    WC_STATUS_RETRY_EXC_ERR = 12,
    /// Receiver-not-ready retry counter exceeded.
    WC_STATUS_RNR_RETRY_EXC_ERR = 13,
}

// Values of `enum ibv_wc_opcode`.
numbers! { u8:
    /// Send.
    WC_OPCODE_SEND = 0,
    /// RDMA write.
    WC_OPCODE_RDMA_WRITE = 1,
    /// RDMA read.
    WC_OPCODE_RDMA_READ = 2,
    /// Compare and swap.
    WC_OPCODE_COMPARE_SWAP = 3,
    /// Fetch and add.
    WC_OPCODE_FETCH_ADD = 4,
    /// Binding of a memory window.
    WC_OPCODE_BIND_WINDOW = 5,
    /// Invalidation of a key of the own side.
    WC_OPCODE_LOCAL_INVALIDATE = 6,
    /// Flush.
    WC_OPCODE_FLUSH = 8,
    /// Write of 8 bytes at once.
    WC_OPCODE_ATOMIC_WRITE = 9,
    /// Registration by a request of a kernel, which has a number of its own for it.
    WC_OPCODE_REGISTER = 10,
    /// Receive.
    WC_OPCODE_RECV = 128,
    /// Receive consumed by an RDMA write with immediate.
    WC_OPCODE_RECV_RDMA_WITH_IMM = 129,
}

/// Where the parts of a queue pair lie in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpLayout {
    /// Entries of the send queue, a power of two.
    pub send_entries: u32,
    /// Bytes from one send entry to the next.
    pub send_stride: usize,
    /// Entries of the receive queue, a power of two.
    pub recv_entries: u32,
    /// Bytes from one receive entry to the next.
    pub recv_stride: usize,
    /// What its send entries may be.
    pub version: VerbsVersion,
}

/// Bytes from one receive entry to the next, of at most so many elements.
fn recv_stride(elements: u32) -> usize {
    let payload = elements.max(1) as usize * size_of::<Sge>();
    (size_of::<RecvEntry>() + payload).next_multiple_of(32)
}

impl QpLayout {
    /// The layout of version 1 for the given capabilities, `None` where one is beyond its limit.
    /// Counts are rounded up to powers of two.
    #[must_use]
    pub fn new(
        send_wr: u32,
        send_sge: u32,
        inline_bytes: u32,
        recv_wr: u32,
        recv_sge: u32,
    ) -> Option<Self> {
        let v1 = VerbsVersion::V1;
        Self::of(v1, send_wr, send_sge, inline_bytes, recv_wr, recv_sge)
    }

    /// The same of version 2: a send entry has room for a [`SendTail`] besides.
    #[must_use]
    pub fn with_tail(
        send_wr: u32,
        send_sge: u32,
        inline_bytes: u32,
        recv_wr: u32,
        recv_sge: u32,
    ) -> Option<Self> {
        let v2 = VerbsVersion::V2;
        Self::of(v2, send_wr, send_sge, inline_bytes, recv_wr, recv_sge)
    }

    /// The layout of a version.
    #[must_use]
    pub fn of(
        version: VerbsVersion,
        send_wr: u32,
        send_sge: u32,
        inline_bytes: u32,
        recv_wr: u32,
        recv_sge: u32,
    ) -> Option<Self> {
        if send_wr > MAX_WQ_ENTRIES
            || recv_wr > MAX_WQ_ENTRIES
            || send_sge > MAX_SGE
            || recv_sge > MAX_SGE
            || inline_bytes > MAX_INLINE_BYTES
        {
            return None;
        }
        let payload = (send_sge.max(1) as usize * size_of::<Sge>()).max(inline_bytes as usize);
        let tail = match version {
            VerbsVersion::V1 => 0,
            VerbsVersion::V2 | VerbsVersion::V3 => size_of::<SendTail>(),
        };
        Some(Self {
            send_entries: send_wr.max(1).next_power_of_two(),
            send_stride: (size_of::<SendEntry>() + tail + payload).next_multiple_of(32),
            recv_entries: recv_wr.max(1).next_power_of_two(),
            recv_stride: recv_stride(recv_sge),
            version,
        })
    }

    /// Bytes that a send entry has room for behind its head: a tail, and elements or inline data.
    #[must_use]
    pub fn send_payload(&self) -> usize {
        self.send_stride - size_of::<SendEntry>()
    }

    /// Offset of the receive queue's entries.
    #[must_use]
    pub fn recv_offset(&self) -> usize {
        QP_OFF_ENTRIES + self.send_entries as usize * self.send_stride
    }

    /// Bytes that it takes of a segment, a multiple of [`QUEUE_ALIGN`].
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        let end = self.recv_offset() + self.recv_entries as usize * self.recv_stride;
        (end as u64).next_multiple_of(QUEUE_ALIGN)
    }
}

/// Where the parts of a shared receive queue lie in its segment: its words are
/// [`QP_OFF_RECV_PRODUCED`], [`QP_OFF_RECV_CONSUMED`] and [`QP_OFF_BACKEND_STATE`], and its
/// [`RecvEntry`]s begin at [`QP_OFF_ENTRIES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqLayout {
    /// Entries, a power of two.
    pub entries: u32,
    /// Bytes from one entry to the next.
    pub stride: usize,
}

impl SrqLayout {
    /// The layout for at least `requests` of `elements` each, `None` where one is beyond its
    /// limit.
    #[must_use]
    pub fn new(requests: u32, elements: u32) -> Option<Self> {
        (requests <= MAX_WQ_ENTRIES && elements <= MAX_SGE).then(|| Self {
            entries: requests.max(1).next_power_of_two(),
            stride: recv_stride(elements),
        })
    }

    /// Bytes that it takes of a segment, a multiple of [`QUEUE_ALIGN`].
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        QP_OFF_ENTRIES as u64 + self.entries_bytes()
    }

    /// Bytes that its entries take of a segment alone, a multiple of [`QUEUE_ALIGN`].
    #[must_use]
    pub fn entries_bytes(&self) -> u64 {
        let bytes = self.entries as usize * self.stride;
        (bytes as u64).next_multiple_of(QUEUE_ALIGN)
    }
}

/// Where the parts of a completion queue lie in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqLayout {
    /// Entries, a power of two.
    pub entries: u32,
    /// They are [`TimedCompletion`]s; else [`Completion`]s.
    pub is_timed: bool,
}

impl CqLayout {
    /// The layout for at least `entries`, `None` where that is beyond the limit.
    #[must_use]
    pub fn new(entries: u32) -> Option<Self> {
        Self::of(entries, false)
    }

    /// The same of entries that have a time or not.
    #[must_use]
    pub fn of(entries: u32, is_timed: bool) -> Option<Self> {
        (entries <= MAX_CQ_ENTRIES).then(|| Self {
            entries: entries.max(1).next_power_of_two(),
            is_timed,
        })
    }

    /// Bytes from one entry to the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        match self.is_timed {
            true => size_of::<TimedCompletion>(),
            false => size_of::<Completion>(),
        }
    }

    /// Bytes that it takes of a segment, a multiple of [`QUEUE_ALIGN`].
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        (CQ_OFF_ENTRIES as u64 + self.entries_bytes()).next_multiple_of(QUEUE_ALIGN)
    }

    /// Bytes that its entries take of a segment alone, a multiple of [`QUEUE_ALIGN`].
    #[must_use]
    pub fn entries_bytes(&self) -> u64 {
        let bytes = self.entries as usize * self.stride();
        (bytes as u64).next_multiple_of(QUEUE_ALIGN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_leaves_an_entry_of_one_element_in_one_cache_line() {
        let layout = QpLayout::with_tail(8, 1, 0, 8, 1).unwrap();
        assert_eq!(layout.send_stride, 64);
        assert_eq!(QpLayout::new(8, 1, 0, 8, 1).unwrap().send_stride, 64);
    }

    #[test]
    fn a_tail_takes_nothing_of_what_was_asked_for() {
        for (sge, inline) in [(1, 0), (2, 0), (16, 64), (1, 1024)] {
            let layout = QpLayout::with_tail(4, sge, inline, 1, 1).unwrap();
            let wanted = (sge as usize * size_of::<Sge>()).max(inline as usize);
            assert!(layout.send_payload() >= size_of::<SendTail>() + wanted);
        }
    }

    #[test]
    fn a_shared_receive_queue_has_limits_and_holds_its_entries() {
        assert_eq!(SrqLayout::new(MAX_WQ_ENTRIES + 1, 1), None);
        assert_eq!(SrqLayout::new(1, MAX_SGE + 1), None);
        let layout = SrqLayout::new(100, 3).unwrap();
        assert_eq!((layout.entries, layout.stride), (128, 64));
        assert_eq!(layout.segment_bytes(), 0x140 + 128 * 64);
    }
}
