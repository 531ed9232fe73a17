//! Arguments and results of calls: completion queues, queue pairs, shared receive queues.

use crate::wire::wire;
use zerocopy::little_endian::{U16, U32};

wire! {
    /// Creation of a completion queue.
    pub struct CreateCq as "farlane_create_cq" {
        /// The segment that holds it, laid out as [`CqLayout`](crate::queue::CqLayout).
        pub region: U32,
        /// Where it begins there, a multiple of 64. No other queue overlaps it.
        pub offset: U32,
        /// Entries.
        pub entries: U32,
        /// Event index of its completion channel, or zero.
        pub event: U32,
    }

    /// Creation of a completion queue in version 3.
    pub struct CreateCqEx as "farlane_create_cq_ex" {
        /// As in version 1; its layout is that of the flags.
        pub base: CreateCq,
        /// `CQ_*`.
        pub flags: U32,
        /// Which of the [completion vectors](super::DeviceLimits::comp_vectors) its events come by.
        pub comp_vector: U32,
    }

    /// Another number of entries of a completion queue.
    pub struct ResizeCq as "farlane_resize_cq" {
        /// The completion queue.
        pub cq: U32,
        /// The segment that holds its entries from now on:
        /// [`CqLayout::entries_bytes`](crate::queue::CqLayout::entries_bytes).
        pub region: U32,
        /// Where they begin there, a multiple of 64. No other queue overlaps them.
        pub offset: U32,
        /// Entries.
        pub entries: U32,
    }

    /// Another number of requests of a shared receive queue.
    pub struct ResizeSrq as "farlane_resize_srq" {
        /// The shared receive queue.
        pub srq: U32,
        /// The segment that holds its entries from now on:
        /// [`SrqLayout::entries_bytes`](crate::queue::SrqLayout::entries_bytes) of as many
        /// elements as before.
        pub region: U32,
        /// Where they begin there, a multiple of 64. No other queue overlaps them.
        pub offset: U32,
        /// Requests.
        pub requests: U32,
    }

    /// Creation of a queue pair.
    pub struct CreateQp as "farlane_create_qp" {
        /// Protection domain.
        pub pd: U32,
        /// Completion queue of the send queue.
        pub send_cq: U32,
        /// Completion queue of the receive queue.
        pub recv_cq: U32,
        /// `enum ibv_qp_type`.
        pub qp_type: U32,
        /// The segment that holds it, laid out as [`QpLayout`](crate::queue::QpLayout) of the
        /// five numbers that follow after its place.
        pub region: U32,
        /// Where it begins there, a multiple of 64. No other queue overlaps it.
        pub offset: U32,
        /// Send requests.
        pub send_wr: U32,
        /// Elements of a send request.
        pub send_sge: U32,
        /// Inline bytes of a send request.
        pub inline_bytes: U32,
        /// Receive requests.
        pub recv_wr: U32,
        /// Elements of a receive request.
        pub recv_sge: U32,
        /// Not zero: every send request is signalled.
        pub signal_all: U32,
    }

    /// A new queue pair.
    pub struct Qp as "farlane_qp" {
        /// Its handle.
        pub handle: U32,
        /// Its number, 24 bits.
        pub qp_num: U32,
    }

    /// Change of a queue pair.
    pub struct ModifyQp as "farlane_modify_qp" {
        /// The queue pair.
        pub qp: U32,
        /// Which attributes are meant: `enum ibv_qp_attr_mask`.
        pub mask: U32,
        /// The attributes.
        pub attr: QpAttr,
    }

    /// Attributes of a queue pair, `struct ibv_qp_attr` where names are the same.
    pub struct QpAttr as "farlane_qp_attr" {
        /// `enum ibv_qp_state`.
        pub qp_state: u8,
        /// `enum ibv_qp_state`.
        pub cur_qp_state: u8,
        /// `enum ibv_mtu`.
        pub path_mtu: u8,
        /// `enum ibv_mig_state`.
        pub path_mig_state: u8,
        /// Port, from 1 up.
        pub port_num: u8,
        /// Outstanding reads as initiator.
        pub max_rd_atomic: u8,
        /// Outstanding reads as responder.
        pub max_dest_rd_atomic: u8,
        /// RNR timer that this queue pair asks of its peer (IBTA table 45).
        pub min_rnr_timer: u8,
        /// Local ack timeout, 4.096 us * 2^timeout; zero is infinite.
        pub timeout: u8,
        /// Retries.
        pub retry_cnt: u8,
        /// Retries when the receiver is not ready; 7 is infinite.
        pub rnr_retry: u8,
        /// Not zero: send queue is drained event wanted.
        pub en_sqd_async_notify: u8,
        /// Not zero while the send queue drains.
        pub sq_draining: u8,
        /// Not zero: the address has a global route header.
        pub is_global: u8,
        /// Index of the source GID.
        pub sgid_index: u8,
        /// Hop limit.
        pub hop_limit: u8,
        /// Traffic class.
        pub traffic_class: u8,
        /// Service level.
        pub sl: u8,
        /// Source path bits.
        pub src_path_bits: u8,
        /// Static rate.
        pub static_rate: u8,
        /// Port of the address, from 1 up.
        pub ah_port: u8,
        /// Zero.
        pub reserved: [u8; 1],
        /// Index in the partition table.
        pub pkey_index: U16,
        /// Peer's local identifier.
        pub dlid: U16,
        /// Zero.
        pub reserved2: U16,
        /// Flow label.
        pub flow_label: U32,
        /// Q_Key.
        pub qkey: U32,
        /// First packet sequence number expected.
        pub rq_psn: U32,
        /// First packet sequence number sent.
        pub sq_psn: U32,
        /// Peer's queue pair.
        pub dest_qp_num: U32,
        /// What the peer may do: `ACCESS_*`.
        pub qp_access_flags: U32,
        /// Peer's GID.
        pub dgid: [u8; 16],
    }

    /// Creation of a queue pair in version 2.
    pub struct CreateQpEx as "farlane_create_qp_ex" {
        /// As in version 1.
        pub base: CreateQp,
        /// Shared receive queue that its messages take receive requests from; zero for its own.
        pub srq: U32,
        /// Domain of a queue pair that is an XRC target; zero for others. A target has no queues:
        /// nothing else but the type is looked at.
        pub xrcd: U32,
    }

    /// A ring of [`crate::rxe`], which begins a segment.
    pub struct Ring as "farlane_ring" {
        /// The segment.
        pub region: U32,
        /// Elements, a power of two.
        pub slots: U32,
        /// Bytes from one element to the next, a power of two.
        pub stride: U32,
    }

    /// A control block of [`crate::rxe`].
    pub struct ControlBlock as "farlane_control_block" {
        /// The segment that holds it, which no process has mapped.
        pub region: U32,
        /// Where it begins there, a multiple of 64. Nothing else overlaps it.
        pub offset: U32,
    }

    /// Creation of a completion queue that is a ring.
    pub struct CreateCqRing as "farlane_create_cq_ring" {
        /// Its completions.
        pub ring: Ring,
        /// What its process must not write.
        pub control: ControlBlock,
        /// Event index of its completion channel, or zero.
        pub event: U32,
        /// Which of the [completion vectors](super::DeviceLimits::comp_vectors) its events come by.
        pub comp_vector: U32,
    }

    /// Creation of a queue pair whose work queues are rings.
    pub struct CreateQpRings as "farlane_create_qp_rings" {
        /// Protection domain.
        pub pd: U32,
        /// Completion queue of the send queue.
        pub send_cq: U32,
        /// Completion queue of the receive queue.
        pub recv_cq: U32,
        /// `enum ibv_qp_type`.
        pub qp_type: U32,
        /// Its send queue; zeros for an XRC target.
        pub send: Ring,
        /// Its receive queue; zeros where it has none of its own.
        pub recv: Ring,
        /// What its process must not write; zeros for an XRC target.
        pub control: ControlBlock,
        /// Elements of a send request.
        pub send_sge: U32,
        /// Inline bytes of a send request.
        pub inline_bytes: U32,
        /// Elements of a receive request.
        pub recv_sge: U32,
        /// Not zero: every send request is signalled.
        pub signal_all: U32,
        /// Shared receive queue that its messages take receive requests from; zero for its own.
        pub srq: U32,
        /// Domain of a queue pair that is an XRC target; zero for others.
        pub xrcd: U32,
    }

    /// Creation of a shared receive queue that is a ring.
    pub struct CreateSrqRing as "farlane_create_srq_ring" {
        /// Protection domain of the memory that its requests name.
        pub pd: U32,
        /// Its requests.
        pub ring: Ring,
        /// What its process must not write.
        pub control: ControlBlock,
        /// Elements of a request.
        pub elements: U32,
        /// Domain of one that serves extended reliable connections; zero for others.
        pub xrcd: U32,
        /// Completion queue of such a one; zero for others.
        pub cq: U32,
    }

    /// Another ring for a queue.
    pub struct MoveRing as "farlane_move_ring" {
        /// The completion queue, or shared receive queue.
        pub queue: U32,
        /// Where its entries lie from now on.
        pub ring: Ring,
    }

    /// Opening of the domain of a file.
    pub struct OpenXrcd as "farlane_open_xrcd" {
        /// The region that is the file.
        pub region: U32,
        /// `XRCD_*`.
        pub flags: U32,
    }

    /// Opening of a target of extended reliable connections.
    pub struct OpenQp as "farlane_open_qp" {
        /// Its domain.
        pub xrcd: U32,
        /// Its number.
        pub qp_num: U32,
    }

    /// Creation of an address handle, `struct ibv_ah_attr` where names are the same.
    pub struct CreateAh as "farlane_create_ah" {
        /// Protection domain.
        pub pd: U32,
        /// Flow label.
        pub flow_label: U32,
        /// GID of the port or of the multicast group, where there is a global route header.
        pub dgid: [u8; 16],
        /// Local identifier of the port, where there is none.
        pub dlid: U16,
        /// Not zero: there is a global route header.
        pub is_global: u8,
        /// Index of the source GID.
        pub sgid_index: u8,
        /// Hop limit.
        pub hop_limit: u8,
        /// Traffic class.
        pub traffic_class: u8,
        /// Service level.
        pub sl: u8,
        /// Source path bits.
        pub src_path_bits: u8,
        /// Static rate.
        pub static_rate: u8,
        /// Port, from 1 up.
        pub port_num: u8,
        /// Zero.
        pub reserved: [u8; 2],
    }

    /// A queue pair and a multicast group.
    pub struct McastGroup as "farlane_mcast_group" {
        /// The queue pair.
        pub qp: U32,
        /// GID of the group.
        pub gid: [u8; 16],
        /// Local identifier of the group: not looked at, the GID says which it is.
        pub lid: U32,
    }

    /// Creation of a shared receive queue.
    pub struct CreateSrq as "farlane_create_srq" {
        /// Protection domain of the memory that its requests name.
        pub pd: U32,
        /// The segment that holds it, laid out as [`SrqLayout`](crate::queue::SrqLayout) of the
        /// two numbers that follow after its place.
        pub region: U32,
        /// Where it begins there, a multiple of 64. No other queue overlaps it.
        pub offset: U32,
        /// Requests.
        pub requests: U32,
        /// Elements of a request.
        pub elements: U32,
        /// Domain of one that serves extended reliable connections; zero for others.
        pub xrcd: U32,
        /// Completion queue of such a one; zero for others.
        pub cq: U32,
    }

    /// A new shared receive queue.
    pub struct Srq as "farlane_srq" {
        /// Its handle.
        pub handle: U32,
        /// What requests of extended reliable connections name it by, 24 bits; zero where none can.
        pub number: U32,
    }

    /// Change of a shared receive queue.
    pub struct ModifySrq as "farlane_modify_srq" {
        /// The shared receive queue.
        pub srq: U32,
        /// Which attributes are meant: `SRQ_*`.
        pub mask: U32,
        /// Requests that it has room for.
        pub requests: U32,
        /// When fewer requests are left than this, that raises an event, once; zero for never.
        pub limit: U32,
    }

    /// Attributes of a shared receive queue, `struct ibv_srq_attr`.
    pub struct SrqAttr as "farlane_srq_attr" {
        /// Requests that it has room for.
        pub requests: U32,
        /// Elements of a request.
        pub elements: U32,
        /// Its limit, until the event.
        pub limit: U32,
    }
}
