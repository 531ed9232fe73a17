//! Queues as the user ABI of Linux's rxe driver has them (`include/uapi/rdma/rdma_user_rxe.h`, ABI
//! version 2), so that the provider of every distribution's rdma-core can drive the device of the
//! guest's kernel.
//!
//! A **ring** is a work queue or a completion queue in one segment: [`RingLayout`]. The process has
//! it mapped. Both words hold the index of an element, not a running number; one element stays
//! free, so that a full ring is told from an empty one. An element of a send queue is a
//! [`RxeSendEntry`], then elements or inline data; of a receive queue a [`RxeRecvEntry`], then
//! elements; of a completion queue a [`RxeCompletion`].
//!
//! What a process must not write lies in a **control block** of the kernel's, in another segment:
//! whether the backend has to be told of requests, and what completions raise an event.
//!
//! The provider tells nobody that it has posted a receive request, or taken a completion: only
//! send requests ring (`IB_USER_VERBS_CMD_POST_SEND` without requests).
//!
//! Nothing of an entry is taken on trust. Its length is the sum of its elements' lengths, never
//! [`length`](RxeDmaInfo::length) of a request with elements, nor the fields in which rxe's own
//! driver keeps its progress; its address vector is not looked at, only the address handle. What a
//! kernel alone may say has fields of its own ([`RxeRegister`], [`RxeAddressed`]).

use crate::wire::{numbers, pod, wire};
use zerocopy::little_endian::{U16, U32, U64};

/// `rxe_queue_buf::log2_elem_size`, for the process.
pub const RING_OFF_LOG2_STRIDE: usize = 0x000;
/// `rxe_queue_buf::index_mask`, for the process.
pub const RING_OFF_MASK: usize = 0x004;
/// `rxe_queue_buf::producer_index`.
pub const RING_OFF_PRODUCED: usize = 0x080;
/// `rxe_queue_buf::consumer_index`.
pub const RING_OFF_CONSUMED: usize = 0x100;
/// `rxe_queue_buf::data`.
pub const RING_OFF_ENTRIES: usize = 0x180;

/// Least distance of elements in bytes, a power of two.
pub const RING_MIN_STRIDE: u32 = 64;
/// Largest distance of elements in bytes.
pub const RING_MAX_STRIDE: u32 = 2048;

/// Control block of a queue pair or shared receive queue: whether the backend has to be told, as
/// [`QP_OFF_BACKEND_STATE`](crate::queue::QP_OFF_BACKEND_STATE).
pub const CONTROL_OFF_BACKEND_STATE: usize = 0x000;
/// Control block of a completion queue: as [`CQ_OFF_ARMED`](crate::queue::CQ_OFF_ARMED).
pub const CONTROL_OFF_ARMED: usize = 0x000;
/// Control block of a completion queue: as [`CQ_OFF_EVENTS`](crate::queue::CQ_OFF_EVENTS).
pub const CONTROL_OFF_EVENTS: usize = 0x040;
/// Length of a control block in bytes.
pub const CONTROL_BYTES: u64 = 0x080;

pod! {
    /// `struct rxe_send_wr`.
    pub struct RxeSendRequest {
        /// The caller's number for this request.
        pub wr_id: U64,
        /// Not looked at.
        pub reserved: U32,
        /// `enum ib_wr_opcode`.
        pub opcode: U32,
        /// `enum ib_send_flags`.
        pub send_flags: U32,
        /// Immediate data, or the key to invalidate.
        pub imm: U32,
        /// The union `wr`: as the opcode and the service type say it begins with a [`RxeRdma`],
        /// [`RxeAtomic`], [`RxeDatagram`], [`RxeBind`], [`RxeFlush`] or [`RxeRegister`]. What
        /// follows is not looked at.
        pub operands: [U64; 15],
    }

    /// `rxe_send_wr::wr.rdma`: RDMA and atomic writes.
    pub struct RxeRdma {
        /// Address at the peer.
        pub remote_addr: U64,
        /// Key of the peer's memory.
        pub rkey: U32,
        /// Not looked at.
        pub reserved: U32,
    }

    /// `rxe_send_wr::wr.atomic`.
    pub struct RxeAtomic {
        /// Address at the peer.
        pub remote_addr: U64,
        /// Value to compare with, or to add.
        pub compare_add: U64,
        /// Value to store.
        pub swap: U64,
        /// Key of the peer's memory.
        pub rkey: U32,
        /// Not looked at.
        pub reserved: U32,
    }

    /// `rxe_send_wr::wr.ud`, as far as it is looked at.
    pub struct RxeDatagram {
        /// Queue pair there.
        pub remote_qpn: U32,
        /// Q_Key.
        pub remote_qkey: U32,
        /// Not looked at.
        pub pkey_index: U16,
        /// Not looked at.
        pub reserved: U16,
        /// Address handle, as the kernel has told the process: the backend's. Zero of a context
        /// of the kernel: it is a [`RxeAddressed`].
        pub ah_num: U32,
    }

    /// `rxe_send_wr::wr.mw`: binding of a memory window.
    pub struct RxeBind {
        /// Where the window begins.
        pub addr: U64,
        /// Length in bytes.
        pub length: U64,
        /// Key of the region.
        pub mr_lkey: U32,
        /// The window's present key.
        pub mw_rkey: U32,
        /// The window's next key.
        pub rkey: U32,
        /// `ACCESS_*` of [`crate::rdma`].
        pub access: U32,
    }

    /// `rxe_send_wr::wr.flush`.
    pub struct RxeFlush {
        /// Address at the peer.
        pub remote_addr: U64,
        /// Length in bytes.
        pub length: U32,
        /// Key of the peer's memory.
        pub rkey: U32,
        /// Placement types: `FLUSH_GLOBAL`, `FLUSH_PERSISTENT` of [`crate::queue`].
        pub placement: u8,
        /// What is flushed: `FLUSH_OF_RANGE`, `FLUSH_OF_REGION`.
        pub level: u8,
        /// Not looked at.
        pub reserved: [u8; 6],
    }

    /// `struct rxe_dma_info` without what follows it: elements, or inline data.
    pub struct RxeDmaInfo {
        /// Bytes of inline data, where the flags say so; else not looked at.
        pub length: U32,
        /// Not looked at.
        pub resid: U32,
        /// Not looked at.
        pub cur_sge: U32,
        /// Number of [`Sge`](crate::queue::Sge) that follow.
        pub num_sge: U32,
        /// Not looked at.
        pub sge_offset: U32,
        /// Not looked at.
        pub reserved: U32,
    }

    /// `struct rxe_send_wqe` without what follows it.
    pub struct RxeSendEntry {
        /// The request.
        pub wr: RxeSendRequest,
        /// Of rxe's own driver: not looked at.
        pub progress: [U64; 5],
        /// How much data there is.
        pub dma: RxeDmaInfo,
    }

    /// `struct rxe_recv_wqe` without what follows it.
    pub struct RxeRecvEntry {
        /// The caller's number for this request.
        pub wr_id: U64,
        /// Not looked at.
        pub reserved: [U32; 2],
        /// How many elements there are.
        pub dma: RxeDmaInfo,
    }

    /// `struct ib_uverbs_wc` (`include/uapi/rdma/ib_user_verbs.h`).
    pub struct RxeCompletion {
        /// Number of the completed request.
        pub wr_id: U64,
        /// `enum ib_wc_status`.
        pub status: U32,
        /// `enum ib_uverbs_wc_opcode`.
        pub opcode: U32,
        /// Detail of an error.
        pub vendor_err: U32,
        /// Bytes transferred.
        pub byte_len: U32,
        /// Immediate data, or the key that was invalidated, where the flags say so.
        pub imm: U32,
        /// Number of the local queue pair.
        pub qp_num: U32,
        /// Number of the peer's queue pair.
        pub src_qp: U32,
        /// `enum ib_wc_flags`.
        pub wc_flags: U32,
        /// Index in the partition table.
        pub pkey_index: U16,
        /// Local identifier of a datagram's sender.
        pub slid: U16,
        /// Service level.
        pub sl: u8,
        /// Path bits of the receiver's local identifier.
        pub dlid_path_bits: u8,
        /// Port, from 1 up.
        pub port_num: u8,
        /// Zero.
        pub reserved: u8,
    }
}

wire! {
    /// `rxe_send_wr::wr.ud` of a context of the kernel, which says where the datagram goes instead
    /// of naming an address handle: the kernel makes its handles where nothing may wait for an
    /// answer. It begins as a [`RxeDatagram`].
    pub struct RxeAddressed as "farlane_rxe_addressed" {
        /// Queue pair there.
        pub remote_qpn: U32,
        /// Q_Key.
        pub remote_qkey: U32,
        /// Not looked at.
        pub reserved: U32,
        /// Zero: no address handle.
        pub ah_num: U32,
        /// GID of the port or multicast group.
        pub dgid: [u8; 16],
        /// For the global route header: 20 bits.
        pub flow_label: U32,
        /// Of the sender's own GIDs.
        pub sgid_index: u8,
        /// For the global route header.
        pub hop_limit: u8,
        /// For the global route header.
        pub traffic_class: u8,
        /// Service level, 4 bits.
        pub sl: u8,
    }

    /// Fast registration, in the place of `rxe_send_wr::wr.reg`, which is not part of the user ABI:
    /// pages of the VM's memory become what a registration of
    /// [`alloc_fast_mr`](crate::rdma::Verbs::alloc_fast_mr) is of.
    pub struct RxeRegister as "farlane_rxe_register" {
        /// Handle of the registration.
        pub mr: U32,
        /// Pages of its list that are meant, from the first on.
        pub pages: U32,
        /// Key that it gets: its own but for the low 8 bits.
        pub key: U32,
        /// `ACCESS_*` of [`crate::rdma`].
        pub access: U32,
        /// Address that work requests use for the first byte.
        pub iova: U64,
        /// Length in bytes.
        pub length: U64,
        /// Where it begins in the first page, in bytes.
        pub offset: U32,
        /// Zero.
        pub reserved: U32,
    }
}

const _: () = assert!(
    size_of::<RxeSendRequest>() == 144
        && size_of::<RxeSendEntry>() == 208
        && size_of::<RxeRecvEntry>() == 40
        && size_of::<RxeCompletion>() == 48
);

// Values of `enum ib_wr_opcode`.
numbers! { u32:
    /// RDMA write.
    WR_RDMA_WRITE = 0,
    /// RDMA write that consumes a receive request at the peer.
    WR_RDMA_WRITE_IMM = 1,
    /// Send.
    WR_SEND = 2,
    /// Send with immediate data.
    WR_SEND_IMM = 3,
    /// RDMA read.
    WR_RDMA_READ = 4,
    /// Compare and swap.
    WR_COMPARE_SWAP = 5,
    /// Fetch and add.
    WR_FETCH_ADD = 6,
    /// Invalidation of a key of the own side.
    WR_LOCAL_INVALIDATE = 7,
    /// Binding of a memory window.
    WR_BIND_WINDOW = 8,
    /// Send with invalidation of a key at the peer.
    WR_SEND_INVALIDATE = 9,
    /// Flush.
    WR_FLUSH = 14,
    /// Write of 8 bytes at once, which lie where inline data does.
    WR_ATOMIC_WRITE = 15,
    /// `IB_WR_REG_MR`, of a context of the kernel: fast registration ([`RxeRegister`]).
    WR_REG_MR = 32,
}

// Values of `enum ib_send_flags`.
numbers! { u32:
    /// Wait for earlier RDMA reads.
    WR_FLAG_FENCE = 1 << 0,
    /// The request completes into the completion queue.
    WR_FLAG_SIGNALED = 1 << 1,
    /// The peer's completion is a solicited one.
    WR_FLAG_SOLICITED = 1 << 2,
    /// The data lies in the work request.
    WR_FLAG_INLINE = 1 << 3,
}

/// Where the parts of a ring lie in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Elements, a power of two; so many less one can wait.
    pub slots: u32,
    /// Bytes from one element to the next, a power of two.
    pub stride: u32,
}

impl RingLayout {
    /// The layout of a ring in which at least `entries` of `bytes` each can wait; `None` where they
    /// are longer than [`RING_MAX_STRIDE`], or more than `most`.
    #[must_use]
    pub fn new(entries: u32, bytes: u32, most: u32) -> Option<Self> {
        if entries > most || bytes > RING_MAX_STRIDE {
            return None;
        }
        Some(Self {
            slots: entries.checked_add(1)?.checked_next_power_of_two()?.max(2),
            stride: bytes.next_power_of_two().max(RING_MIN_STRIDE),
        })
    }

    /// Bytes that it takes of a segment.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        RING_OFF_ENTRIES as u64 + u64::from(self.slots) * u64::from(self.stride)
    }

    /// Entries that can wait in it.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.slots - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_has_a_free_element_besides_what_it_holds() {
        let layout = |entries, bytes| RingLayout::new(entries, bytes, 1 << 14);
        let ring = |slots, stride| Some(RingLayout { slots, stride });
        assert_eq!(layout(0, 48), ring(2, 64));
        assert_eq!(layout(1, 48), ring(2, 64));
        assert_eq!(layout(3, 65), ring(4, 128));
        assert_eq!(layout(4, 2048), ring(8, 2048));
        assert_eq!(layout(1 << 14, 64), ring(1 << 15, 64));
        assert_eq!(layout((1 << 14) + 1, 64), None);
        assert_eq!(layout(1, 2049), None);
        let bytes = layout(3, 64).map(|ring| (ring.segment_bytes(), ring.entries()));
        assert_eq!(bytes, Some((0x180 + 4 * 64, 3)));
    }
}
