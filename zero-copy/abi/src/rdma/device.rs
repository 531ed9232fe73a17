//! Arguments and results of calls: the device and its ports.

use crate::wire::wire;
use zerocopy::little_endian::{U16, U32, U64};

wire! {
    /// Attributes of the device, `struct ibv_device_attr` where names are the same.
    pub struct DeviceAttr as "farlane_device_attr" {
        /// Bytes, big-endian in meaning: the node's GUID.
        pub node_guid: [u8; 8],
        /// Longest registration in bytes.
        pub max_mr_size: U64,
        /// Capability flags.
        pub device_cap_flags: U64,
        /// Vendor.
        pub vendor_id: U32,
        /// Part.
        pub vendor_part_id: U32,
        /// Revision.
        pub hw_ver: U32,
        /// Queue pairs.
        pub max_qp: U32,
        /// Work requests in a queue.
        pub max_qp_wr: U32,
        /// Scatter/gather elements in a request.
        pub max_sge: U32,
        /// Completion queues.
        pub max_cq: U32,
        /// Entries of a completion queue.
        pub max_cqe: U32,
        /// Memory regions.
        pub max_mr: U32,
        /// Protection domains.
        pub max_pd: U32,
        /// Outstanding RDMA reads of a queue pair as responder.
        pub max_qp_rd_atom: U32,
        /// Outstanding RDMA reads of a queue pair as initiator.
        pub max_qp_init_rd_atom: U32,
        /// Outstanding RDMA reads of the device as responder.
        pub max_res_rd_atom: U32,
        /// Largest inline data in bytes.
        pub max_inline_data: U32,
        /// Entries of the partition table.
        pub max_pkeys: U32,
        /// Ports.
        pub phys_port_cnt: U32,
        /// Version of the engine, NUL padded.
        pub fw_ver: [u8; 32],
    }

    /// Attributes of a port, `struct ibv_port_attr` where names are the same.
    pub struct PortAttr as "farlane_port_attr" {
        /// Largest message in bytes.
        pub max_msg_sz: U32,
        /// Entries of the GID table.
        pub gid_tbl_len: U32,
        /// Entries of the partition table.
        pub pkey_tbl_len: U32,
        /// Capability flags.
        pub port_cap_flags: U32,
        /// `enum ibv_port_state`.
        pub state: u8,
        /// `enum ibv_mtu`.
        pub max_mtu: u8,
        /// `enum ibv_mtu`.
        pub active_mtu: u8,
        /// `IBV_LINK_LAYER_*`.
        pub link_layer: u8,
        /// Link width.
        pub active_width: u8,
        /// Link speed.
        pub active_speed: u8,
        /// Physical state.
        pub phys_state: u8,
        /// Zero.
        pub reserved: u8,
        /// Local identifier: what an address names that has no global route header. Not zero.
        pub lid: U16,
        /// Zero.
        pub reserved2: U16,
    }

    /// What a port has carried out and received since the backend was started, all of its contexts
    /// together. Names are those that drivers of the kernel have in `hw_counters` where the meaning
    /// is the same: of requests and bytes efa's, of requests of peers and of errors mlx5's and
    /// rxe's. There are no packets to count: a message is moved whole.
    pub struct PortCounters as "farlane_port_counters" {
        /// Sends, and datagrams, that ended in success.
        pub send_wrs: U64,
        /// Payload bytes of them.
        pub send_bytes: U64,
        /// Receive requests that ended in success.
        pub recv_wrs: U64,
        /// Payload bytes that sends of peers have brought into them.
        pub recv_bytes: U64,
        /// RDMA writes that ended in success.
        pub rdma_write_wrs: U64,
        /// Payload bytes of them.
        pub rdma_write_bytes: U64,
        /// Payload bytes that RDMA writes of peers have brought.
        pub rdma_write_recv_bytes: U64,
        /// RDMA reads that ended in success.
        pub rdma_read_wrs: U64,
        /// Payload bytes of them.
        pub rdma_read_bytes: U64,
        /// Payload bytes that RDMA reads of peers have fetched.
        pub rdma_read_resp_bytes: U64,
        /// Atomic operations that ended in success.
        pub atomic_wrs: U64,
        /// Other requests, such as bindings, that ended in success.
        pub local_wrs: U64,
        /// RDMA writes of peers.
        pub rx_write_requests: U64,
        /// RDMA reads of peers.
        pub rx_read_requests: U64,
        /// Atomic operations of peers.
        pub rx_atomic_requests: U64,
        /// Messages of unreliable queue pairs that nobody received.
        pub tx_drops: U64,
        /// Messages to unreliable queue pairs that met no receive request.
        pub out_of_buffer: U64,
        /// Times a peer had no receive request for a message.
        pub rcvd_rnr_err: U64,
        /// Times a peer has not answered in time.
        pub local_ack_timeout_err: U64,
        /// Requests that failed since no peer has answered.
        pub retry_exceeded_err: U64,
        /// Requests that failed since the peer had no receive request.
        pub retry_rnr_exceeded_err: U64,
        /// Send requests that ended in an error, but flushed ones.
        pub req_cqe_error: U64,
        /// Receive requests that ended in an error, but flushed ones.
        pub resp_cqe_error: U64,
        /// Send requests that were flushed.
        pub req_cqe_flush_error: U64,
        /// Receive requests that were flushed.
        pub resp_cqe_flush_error: U64,
        /// Zero.
        pub reserved: [U64; 7],
    }

    /// Which GID.
    pub struct QueryGid as "farlane_query_gid" {
        /// Port, from 1 up.
        pub port: U32,
        /// Index in its table.
        pub index: U32,
    }

    /// A GID, in network byte order.
    pub struct Gid as "farlane_gid" {
        /// The bytes.
        pub raw: [u8; 16],
    }

    /// The device's clock.
    pub struct DeviceTime as "farlane_device_time" {
        /// As completions have it: [`TimedCompletion`](crate::queue::TimedCompletion).
        pub time: U64,
    }

    /// Limits of the device beyond [`DeviceAttr`], `struct ibv_device_attr` and `struct
    /// ibv_device_attr_ex` where names are the same. What the device does not have is zero.
    pub struct DeviceLimits as "farlane_device_limits" {
        /// Capability flags, besides those of [`DeviceAttr`].
        pub device_cap_flags: U64,
        /// Device memory in bytes.
        pub max_dm_size: U64,
        /// Bits of a completion's time that are valid.
        pub completion_timestamp_mask: U64,
        /// Frequency of that time in kHz.
        pub hca_core_clock: U64,
        /// On-demand paging: `IBV_ODP_SUPPORT*`.
        pub odp_general_caps: U64,
        /// On-demand paging of reliable connections: `IBV_ODP_SUPPORT_*` of operations.
        pub odp_rc_caps: U32,
        /// The same of unreliable connections.
        pub odp_uc_caps: U32,
        /// The same of datagrams.
        pub odp_ud_caps: U32,
        /// The same of extended reliable connections.
        pub odp_xrc_caps: U32,
        /// `enum ibv_atomic_cap`.
        pub atomic_cap: U32,
        /// Shared receive queues.
        pub max_srq: U32,
        /// Requests in a shared receive queue.
        pub max_srq_wr: U32,
        /// Elements of a request in a shared receive queue.
        pub max_srq_sge: U32,
        /// Address handles.
        pub max_ah: U32,
        /// Memory windows.
        pub max_mw: U32,
        /// Multicast groups.
        pub max_mcast_grp: U32,
        /// Queue pairs of a multicast group.
        pub max_mcast_qp_attach: U32,
        /// Queue pairs of all multicast groups.
        pub max_total_mcast_qp_attach: U32,
        /// Completion vectors; zero stands for one.
        pub comp_vectors: U32,
        /// Zero.
        pub reserved: [U32; 16],
    }
}
