//! The remoted verbs: the control path of RDMA, as a call table.
//!
//! The data path (posting work, polling completions) makes no call: see [`crate::queue`].

use crate::call_table;
use crate::wire::wire;
use zerocopy::little_endian::{U16, U32, U64};

/// A handle of an object of the calling context.
pub type Handle = U32;

/// Bits of a handle that say its object's slot; it has the slot's number plus one there.
pub const HANDLE_SLOT_BITS: u32 = 22;
/// Queue pairs of a context: their slots are below this number.
pub const MAX_QPS: u32 = 4096;
/// Shared receive queues of a context: their slots are below this number.
pub const MAX_SRQS: u32 = 1024;

/// The slot of an object by its handle: a number of its own among the objects of its type that
/// there are. `None` for a handle that names nothing.
#[must_use]
pub const fn slot_of(handle: u32) -> Option<u32> {
    (handle & ((1 << HANDLE_SLOT_BITS) - 1)).checked_sub(1)
}

call_table! {
    /// Verbs by API remoting.
    pub trait Verbs / VerbsStubs / VERBS_CALLS {
        /// Does nothing: the round trip of a call.
        1 => fn nop(()) -> ();
        /// Attributes of the device.
        2 => fn query_device(()) -> DeviceAttr;
        /// Attributes of a port, from 1 up.
        3 => fn query_port(U32) -> PortAttr;
        /// An entry of a port's GID table.
        4 => fn query_gid(QueryGid) -> Gid;
        /// Allocates a protection domain.
        5 => fn alloc_pd(()) -> Handle;
        /// Frees a protection domain. `EBUSY` while something is in it.
        6 => fn dealloc_pd(Handle) -> ();
        /// Registers memory.
        7 => fn reg_mr(RegMr) -> Mr;
        /// Ends a registration, by its handle.
        8 => fn dereg_mr(Handle) -> ();
        /// Creates a completion queue.
        9 => fn create_cq(CreateCq) -> Handle;
        /// Destroys a completion queue. `EBUSY` while a queue pair uses it.
        10 => fn destroy_cq(Handle) -> ();
        /// Creates a queue pair.
        11 => fn create_qp(CreateQp) -> Qp;
        /// Changes attributes and state of a queue pair.
        12 => fn modify_qp(ModifyQp) -> ();
        /// Attributes and state of a queue pair.
        13 => fn query_qp(Handle) -> QpAttr;
        /// Destroys a queue pair.
        14 => fn destroy_qp(Handle) -> ();
        /// Allocates a buffer in host memory (paper section IV-C). `EAGAIN` where there is room as
        /// soon as memory that was freed is cleared.
        15 => fn alloc_buffer(AllocBuffer) -> Buffer;
        /// Frees a buffer. Its memory is given to nobody else before the last mapping is gone.
        16 => fn free_buffer(Handle) -> ();
        /// Settles the version of the calls and queues that follow: the highest one that both
        /// sides have. Once a context; one that does not ask has version 1, which is the calls
        /// above. `EOPNOTSUPP` where there is none, `EBUSY` the second time.
        17 => fn negotiate(VersionRange) -> U32;
        /// Limits of what version 1 does not have.
        18 => fn device_limits(()) -> DeviceLimits;
        /// Creates a queue pair laid out as [`QpLayout::with_tail`]. `EOPNOTSUPP` in version 1.
        ///
        /// [`QpLayout::with_tail`]: crate::queue::QpLayout::with_tail
        19 => fn create_qp_ex(CreateQpEx) -> Qp;
        /// Creates an address handle. `EACCES` of a port that the operator does not let this one
        /// talk to.
        21 => fn create_ah(CreateAh) -> Handle;
        /// Destroys an address handle. Requests that name it and are not complete fail.
        22 => fn destroy_ah(Handle) -> ();
        /// Has a datagram queue pair receive what is sent to a multicast group.
        23 => fn attach_mcast(McastGroup) -> ();
        /// Ends that. `EINVAL` where it does not.
        24 => fn detach_mcast(McastGroup) -> ();
        /// Creates a shared receive queue. `EOPNOTSUPP` in version 1.
        25 => fn create_srq(CreateSrq) -> Srq;
        /// Changes a shared receive queue.
        26 => fn modify_srq(ModifySrq) -> ();
        /// Attributes of a shared receive queue.
        27 => fn query_srq(Handle) -> SrqAttr;
        /// Destroys a shared receive queue. `EBUSY` while a queue pair uses it.
        28 => fn destroy_srq(Handle) -> ();
        /// Puts another registration in the place of one, whose handle and keys it gets. When it
        /// is answered nobody touches the memory of the one before. With an error that one stays;
        /// `EBUSY` while something else is bound to it.
        33 => fn rereg_mr(ReregMr) -> ();
        /// Has the entries of a completion queue lie elsewhere, from the next completion on. The
        /// answer is the number of that completion: those before it, and the queue's words, stay
        /// where they are. `EINVAL` where more completions wait than there is room for.
        34 => fn resize_cq(ResizeCq) -> U32;
        /// Has the entries of a shared receive queue lie elsewhere, from the next request on that
        /// is posted: its process posts none meanwhile. The answer is the number of that request;
        /// those before it, and the queue's words, stay where they are. `EINVAL` where more
        /// requests wait than there is room for, or where that is less than the queue's limit;
        /// `ENOMEM` where requests wait in 16 earlier places; `EOPNOTSUPP` before version 3.
        35 => fn resize_srq(ResizeSrq) -> U32;
        /// Creates a completion queue as [`create_cq`](Self::create_cq), with more attributes.
        /// `EINVAL` for a completion vector that there is not, `EOPNOTSUPP` for flags that are not
        /// known, and before version 3.
        36 => fn create_cq_ex(CreateCqEx) -> Handle;
        /// The device's clock. `EOPNOTSUPP` before version 3.
        37 => fn query_clock(()) -> DeviceTime;
        /// Allocates a registration of all addresses in a protection domain that is of no memory:
        /// its owner's requests read zeros there, and what they write is discarded. It has no key
        /// for peers, which is zero, and ends as any other. `EOPNOTSUPP` before version 3.
        38 => fn alloc_null_mr(Handle) -> Mr;
        /// Opens a domain of extended reliable connections (IBTA annex A14). `EOPNOTSUPP` in
        /// version 1.
        29 => fn open_xrcd(()) -> Handle;
        /// Closes such a domain. `EBUSY` while something is in it.
        40 => fn close_xrcd(Handle) -> ();
        /// Opens the domain of extended reliable connections of a file, which contexts of one
        /// tenant have together: `EAGAIN` where there is none and none is to be made, `EINVAL`
        /// where there is one and there may not be. It is that of the file until the last one has
        /// closed it, and the file's region cannot be detached meanwhile.
        43 => fn open_xrcd_of(OpenXrcd) -> Handle;
        /// Opens a target of such a domain that any of its contexts has made. `destroy_qp` closes
        /// it; it ends with the last one. `EINVAL` where the domain has none of this number,
        /// `ENOMEM` where 256 have it open.
        44 => fn open_qp(OpenQp) -> Qp;
        /// Has the file that is this region stand for the calling context: whoever shows it may
        /// import what is in it. The region cannot be detached from then on. `EBUSY` the second
        /// time, and where the file stands for another context.
        45 => fn share_context(U32) -> ();
        /// Whether the file that is this region stands for a context of the tenant: `EINVAL` where
        /// it does not, or not any more.
        46 => fn import_context(U32) -> ();
        /// A handle of a protection domain of the context that a file stands for. Queue pairs can
        /// be made in it, other than of datagrams and without a shared receive queue, whose
        /// requests name the memory of that context; nothing else (`EOPNOTSUPP`).
        47 => fn import_pd(ImportPd) -> Handle;
        /// The keys of a registration in an imported domain; `EINVAL` where it is in another one.
        48 => fn import_mr(ImportMr) -> ImportedMr;
        /// Creates a completion queue that is a ring of [`crate::rxe`], of
        /// [`RxeCompletion`](crate::rxe::RxeCompletion)s. `EOPNOTSUPP` before version 3, as the
        /// calls that follow.
        50 => fn create_cq_ring(CreateCqRing) -> Handle;
        /// Creates a queue pair whose work queues are rings.
        51 => fn create_qp_rings(CreateQpRings) -> Qp;
        /// Creates a shared receive queue that is a ring.
        52 => fn create_srq_ring(CreateSrqRing) -> Srq;
        /// Has the completions of a queue lie in another ring. Those that wait are moved there, and
        /// the process takes none meanwhile. `EINVAL` where more wait than there is room for.
        53 => fn resize_cq_ring(MoveRing) -> ();
        /// The same of the requests of a shared receive queue, whose process posts none meanwhile.
        /// `EINVAL`, too, where that is less than the queue's limit.
        54 => fn resize_srq_ring(MoveRing) -> ();
        /// Allocates a registration for fast registration, which is of no memory yet. `EPERM` of a
        /// context that is not the kernel's.
        55 => fn alloc_fast_mr(AllocFastMr) -> Mr;
        /// Allocates a memory window, which is not bound.
        30 => fn alloc_mw(AllocMw) -> Mw;
        /// Frees a memory window, bound or not.
        31 => fn dealloc_mw(Handle) -> ();
    }
}

/// Version of the verbs: which calls and which forms of queues a context uses. It is not that of
/// the messages which set a context up ([`crate::config`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum VerbsVersion {
    /// Calls 1 to 16; send requests of a head and elements or inline data.
    #[default]
    V1 = 1,
    /// Send requests may have a [`SendTail`](crate::queue::SendTail).
    V2 = 2,
    /// Shared receive queues may be resized; send requests may flush; completions may say when they
    /// came.
    V3 = 3,
}

impl VerbsVersion {
    /// All, the newest first.
    const ALL: [Self; 3] = [Self::V3, Self::V2, Self::V1];

    /// That of a number; `None` for one that this side does not have.
    #[must_use]
    pub fn from_wire(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|v| v.to_wire() == number)
    }

    /// Its number.
    #[must_use]
    pub const fn to_wire(self) -> u32 {
        self as u32
    }
}

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

    /// Registration of `length` bytes from `offset` of a pin or buffer.
    pub struct RegMr as "farlane_reg_mr" {
        /// Protection domain.
        pub pd: U32,
        /// `MR_SOURCE_*`.
        pub source: U32,
        /// The pin's region id, or the buffer's handle.
        pub object: U32,
        /// `ACCESS_*`.
        pub access: U32,
        /// Offset in the pin or buffer, in bytes.
        pub offset: U64,
        /// Length in bytes.
        pub length: U64,
        /// Address that work requests use for the first byte.
        pub iova: U64,
    }

    /// Another registration in the place of one.
    pub struct ReregMr as "farlane_rereg_mr" {
        /// Handle of the registration.
        pub mr: U32,
        /// Zero.
        pub reserved: U32,
        /// What it is from now on.
        pub registration: RegMr,
    }

    /// A memory region.
    pub struct Mr as "farlane_mr" {
        /// Its handle.
        pub handle: U32,
        /// Key for local use.
        pub lkey: U32,
        /// Key for the peer's use.
        pub rkey: U32,
    }

    /// Allocation of a memory window.
    pub struct AllocMw as "farlane_alloc_mw" {
        /// Protection domain.
        pub pd: U32,
        /// `MW_TYPE_*`.
        pub mw_type: U32,
    }

    /// A memory window.
    pub struct Mw as "farlane_mw" {
        /// Its handle.
        pub handle: U32,
        /// The key by which it is bound for the first time.
        pub rkey: U32,
    }

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
        /// Which of the [completion vectors](DeviceLimits::comp_vectors) its events come by.
        pub comp_vector: U32,
    }

    /// The device's clock.
    pub struct DeviceTime as "farlane_device_time" {
        /// As completions have it: [`TimedCompletion`](crate::queue::TimedCompletion).
        pub time: U64,
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

    /// Versions of the verbs that one side has.
    pub struct VersionRange as "farlane_version_range" {
        /// The lowest.
        pub min: U32,
        /// The highest.
        pub max: U32,
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
        /// Which of the [completion vectors](DeviceLimits::comp_vectors) its events come by.
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

    /// Allocation of a registration for fast registration.
    pub struct AllocFastMr as "farlane_alloc_fast_mr" {
        /// Protection domain.
        pub pd: U32,
        /// The segment that begins with the list of its pages: their guest-physical addresses, 64
        /// bits each, little-endian.
        pub region: U32,
        /// Pages that the list has room for.
        pub pages: U32,
        /// Length of a page in bytes, a power of two from 4096 up.
        pub page_bytes: U32,
    }

    /// Opening of the domain of a file.
    pub struct OpenXrcd as "farlane_open_xrcd" {
        /// The region that is the file.
        pub region: U32,
        /// `XRCD_*`.
        pub flags: U32,
    }

    /// Import of a protection domain.
    pub struct ImportPd as "farlane_import_pd" {
        /// The region that is the file which stands for its context.
        pub region: U32,
        /// Its handle there.
        pub pd: U32,
    }

    /// Import of a registration.
    pub struct ImportMr as "farlane_import_mr" {
        /// The domain that it is in, which was imported.
        pub pd: U32,
        /// Its handle where it was made.
        pub mr: U32,
    }

    /// A registration of another context.
    pub struct ImportedMr as "farlane_imported_mr" {
        /// Key for local use.
        pub lkey: U32,
        /// Key for the peer's use.
        pub rkey: U32,
        /// Length in bytes.
        pub length: U64,
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

    /// Allocation of a buffer in host memory.
    pub struct AllocBuffer as "farlane_alloc_buffer" {
        /// Bytes wanted.
        pub length: U64,
        /// Zero.
        pub flags: U32,
        /// Zero.
        pub reserved: U32,
    }

    /// A buffer in host memory.
    pub struct Buffer as "farlane_buffer" {
        /// Its handle.
        pub handle: U32,
        /// Zero.
        pub reserved: U32,
        /// Offset in the window.
        pub offset: U64,
        /// Length in bytes, whole pages.
        pub length: U64,
    }
}

impl DeviceLimits {
    /// What of them there is in this version.
    #[must_use]
    pub fn of_version(self, version: VerbsVersion) -> Self {
        match version {
            VerbsVersion::V1 | VerbsVersion::V2 => Self {
                device_cap_flags: (self.device_cap_flags.get() & !DEVICE_CAPS_OF_V3).into(),
                completion_timestamp_mask: 0.into(),
                hca_core_clock: 0.into(),
                odp_rc_caps: (self.odp_rc_caps.get() & !ODP_FLUSH).into(),
                odp_xrc_caps: (self.odp_xrc_caps.get() & !ODP_FLUSH).into(),
                comp_vectors: 0.into(),
                ..self
            },
            VerbsVersion::V3 => self,
        }
    }
}

impl VersionRange {
    /// What this side has.
    #[must_use]
    pub fn ours() -> Self {
        let [newest, .., oldest] = VerbsVersion::ALL;
        Self {
            min: oldest.to_wire().into(),
            max: newest.to_wire().into(),
        }
    }

    /// The newest version of this side that is in it.
    #[must_use]
    pub fn newest(&self) -> Option<VerbsVersion> {
        let is_in = |v: &VerbsVersion| (self.min.get()..=self.max.get()).contains(&v.to_wire());
        VerbsVersion::ALL.into_iter().find(is_in)
    }
}

/// Number of the queue pairs of a multicast group, in datagrams that are sent to it.
pub const MULTICAST_QPN: u32 = 0x00ff_ffff;

/// `RegMr::source`: a pin.
pub const MR_SOURCE_PIN: u32 = 1;
/// `RegMr::source`: a host-allocated buffer.
pub const MR_SOURCE_BUFFER: u32 = 2;

macro_rules! numbers {
    ($ty:ty: $($(#[$doc:meta])* $name:ident = $value:expr,)*) => {
        $($(#[$doc])* pub const $name: $ty = $value;)*
    };
}

// Values of `enum ibv_access_flags`.
numbers! { u32:
    /// The process may be written by its own receives and reads.
    ACCESS_LOCAL_WRITE = 1 << 0,
    /// The peer may write.
    ACCESS_REMOTE_WRITE = 1 << 1,
    /// The peer may read.
    ACCESS_REMOTE_READ = 1 << 2,
    /// The peer may do atomic operations.
    ACCESS_REMOTE_ATOMIC = 1 << 3,
    /// Memory windows may be bound to it.
    ACCESS_MW_BIND = 1 << 4,
    /// The peer may flush it: see to it that what it has written is visible.
    ACCESS_FLUSH_GLOBAL = 1 << 8,
    /// Hints (relaxed ordering, huge pages) that may be ignored: `IBV_ACCESS_OPTIONAL_RANGE`.
    ACCESS_OPTIONAL = 0x3ff0_0000,
}

// Flags of an [`OpenXrcd`].
numbers! { u32:
    /// A domain is made where there is none.
    XRCD_CREATE = 1,
    /// Where there is one it is not opened.
    XRCD_EXCLUSIVE = 2,
}

// Values of `enum ibv_atomic_cap`.
numbers! { u32:
    /// Atomic operations are atomic among those of the device.
    ATOMIC_HCA = 1,
}

// Device capability flags, of `enum ibv_device_cap_flags` and its extension.
numbers! { u64:
    /// Shared receive queues can be resized.
    DEVICE_SRQ_RESIZE = 1 << 13,
    /// Memory windows of type 1.
    DEVICE_MEM_WINDOW = 1 << 17,
    /// Memory windows of type 2, which belong to a protection domain and the queue pair that binds
    /// them.
    DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24,
    /// Flushes that make visible what was written.
    DEVICE_FLUSH_GLOBAL = 1 << 38,
    /// Writes of 8 bytes at once.
    DEVICE_ATOMIC_WRITE = 1 << 40,
}

/// Capabilities that come with version 3.
const DEVICE_CAPS_OF_V3: u64 = DEVICE_SRQ_RESIZE | DEVICE_FLUSH_GLOBAL;

// Values of `enum ibv_mw_type`.
numbers! { u32:
    /// Bound again whenever its owner likes.
    MW_TYPE_1 = 1,
    /// Bound once, until its key is invalidated.
    MW_TYPE_2 = 2,
}

/// `CreateCqEx::flags`: its entries are [`TimedCompletion`](crate::queue::TimedCompletion).
pub const CQ_TIMED: u32 = 1 << 0;

// Values of `enum ibv_qp_type`.
numbers! { u32:
    /// Reliable connection.
    QPT_RC = 2,
    /// Unreliable connection.
    QPT_UC = 3,
    /// Unreliable datagram.
    QPT_UD = 4,
    /// Initiator of an extended reliable connection.
    QPT_XRC_SEND = 9,
    /// Target of an extended reliable connection.
    QPT_XRC_RECV = 10,
}

// Values of `enum ibv_qp_state`.
numbers! { u8:
    /// Reset.
    QPS_RESET = 0,
    /// Initialised.
    QPS_INIT = 1,
    /// Ready to receive.
    QPS_RTR = 2,
    /// Ready to send.
    QPS_RTS = 3,
    /// Send queue drained.
    QPS_SQD = 4,
    /// Send queue error.
    QPS_SQE = 5,
    /// Error.
    QPS_ERR = 6,
}

// Values of `enum ibv_qp_attr_mask`.
numbers! { u32:
    /// `qp_state`.
    QP_STATE = 1 << 0,
    /// `cur_qp_state`.
    QP_CUR_STATE = 1 << 1,
    /// `en_sqd_async_notify`.
    QP_EN_SQD_ASYNC_NOTIFY = 1 << 2,
    /// `qp_access_flags`.
    QP_ACCESS_FLAGS = 1 << 3,
    /// `pkey_index`.
    QP_PKEY_INDEX = 1 << 4,
    /// `port_num`.
    QP_PORT = 1 << 5,
    /// `qkey`.
    QP_QKEY = 1 << 6,
    /// Address vector.
    QP_AV = 1 << 7,
    /// `path_mtu`.
    QP_PATH_MTU = 1 << 8,
    /// `timeout`.
    QP_TIMEOUT = 1 << 9,
    /// `retry_cnt`.
    QP_RETRY_CNT = 1 << 10,
    /// `rnr_retry`.
    QP_RNR_RETRY = 1 << 11,
    /// `rq_psn`.
    QP_RQ_PSN = 1 << 12,
    /// `max_rd_atomic`.
    QP_MAX_QP_RD_ATOMIC = 1 << 13,
    /// Alternate path.
    QP_ALT_PATH = 1 << 14,
    /// `min_rnr_timer`.
    QP_MIN_RNR_TIMER = 1 << 15,
    /// `sq_psn`.
    QP_SQ_PSN = 1 << 16,
    /// `max_dest_rd_atomic`.
    QP_MAX_DEST_RD_ATOMIC = 1 << 17,
    /// `path_mig_state`.
    QP_PATH_MIG_STATE = 1 << 18,
    /// Capabilities.
    QP_CAP = 1 << 19,
    /// `dest_qp_num`.
    QP_DEST_QPN = 1 << 20,
    /// Rate limit.
    QP_RATE_LIMIT = 1 << 25,
}

/// What a connection has to be given to go from Reset to Init (ibv_modify_qp(3)).
pub const QP_TO_INIT: u32 = QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS;
/// What a reliable connection has to be given to go from Init to RTR.
pub const QP_TO_RTR: u32 = QP_STATE
    | QP_AV
    | QP_PATH_MTU
    | QP_DEST_QPN
    | QP_RQ_PSN
    | QP_MAX_DEST_RD_ATOMIC
    | QP_MIN_RNR_TIMER;
/// From RTR to RTS.
pub const QP_TO_RTS: u32 =
    QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC;
/// What an unreliable connection has to be given to go from Init to RTR.
pub const UC_TO_RTR: u32 = QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN;
/// From RTR to RTS.
pub const UC_TO_RTS: u32 = QP_STATE | QP_SQ_PSN;
/// What an unreliable datagram queue pair has to be given to go from Reset to Init.
pub const UD_TO_INIT: u32 = QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_QKEY;
/// From Init to RTR.
pub const UD_TO_RTR: u32 = QP_STATE;
/// From RTR to RTS.
pub const UD_TO_RTS: u32 = QP_STATE | QP_SQ_PSN;
/// What the target of an extended reliable connection has to be given to go from RTR to RTS; to
/// RTR it takes what a reliable connection does, and the initiator what an unreliable one does.
pub const XRC_TARGET_TO_RTS: u32 = QP_STATE | QP_TIMEOUT | QP_SQ_PSN;

// Bits of `struct ibv_odp_caps`.
numbers! { u64:
    /// On-demand paging of registrations.
    ODP_SUPPORT = 1,
    /// A registration of all memory that the process has.
    ODP_IMPLICIT = 2,
}
numbers! { u32:
    /// Send.
    ODP_SEND = 1,
    /// Receive.
    ODP_RECV = 2,
    /// RDMA write.
    ODP_WRITE = 4,
    /// RDMA read.
    ODP_READ = 8,
    /// Atomics.
    ODP_ATOMIC = 16,
    /// Receive by a request of a shared receive queue.
    ODP_SRQ_RECV = 32,
    /// Flush.
    ODP_FLUSH = 64,
}

/// Bit of device_cap_flags: extended reliable connections.
pub const DEVICE_XRC: u64 = 1 << 20;

// Values of `enum ibv_srq_attr_mask`.
numbers! { u32:
    /// `max_wr`.
    SRQ_MAX_WR = 1 << 0,
    /// `srq_limit`.
    SRQ_LIMIT = 1 << 1,
}

// Values of `enum ibv_event_type`.
numbers! { u32:
    /// A completion queue overran.
    EVENT_CQ_ERR = 0,
    /// A queue pair went to the error state.
    EVENT_QP_FATAL = 1,
    /// The peer sent an invalid request.
    EVENT_QP_REQ_ERR = 2,
    /// The peer violated access rights.
    EVENT_QP_ACCESS_ERR = 3,
    /// First message on a connection.
    EVENT_COMM_EST = 4,
    /// The send queue is drained.
    EVENT_SQ_DRAINED = 5,
    /// The device is gone or unusable.
    EVENT_DEVICE_FATAL = 8,
    /// A shared receive queue is unusable.
    EVENT_SRQ_ERR = 14,
    /// A shared receive queue has fewer requests than its limit.
    EVENT_SRQ_LIMIT_REACHED = 15,
    /// No request of a shared receive queue is with the queue pair any more.
    EVENT_QP_LAST_WQE_REACHED = 16,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(min: u32, max: u32) -> VersionRange {
        VersionRange {
            min: min.into(),
            max: max.into(),
        }
    }

    #[test]
    fn the_newest_version_of_both_sides_is_taken() {
        assert_eq!(range(1, 1).newest(), Some(VerbsVersion::V1));
        assert_eq!(range(1, 2).newest(), Some(VerbsVersion::V2));
        assert_eq!(range(2, 9).newest(), Some(VerbsVersion::V3));
        assert_eq!(VersionRange::ours().newest(), Some(VerbsVersion::V3));
        for (min, max) in [(4, 9), (0, 0), (2, 1), (u32::MAX, 0)] {
            assert_eq!(range(min, max).newest(), None);
        }
    }

    #[test]
    fn each_version_has_its_number() {
        for version in VerbsVersion::ALL {
            assert_eq!(VerbsVersion::from_wire(version.to_wire()), Some(version));
        }
        assert_eq!(VerbsVersion::from_wire(0), None);
        assert_eq!(VerbsVersion::from_wire(4), None);
    }

    #[test]
    fn a_version_has_no_capabilities_of_a_later_one() {
        let all = DeviceLimits {
            device_cap_flags: u64::MAX.into(),
            odp_rc_caps: u32::MAX.into(),
            odp_xrc_caps: u32::MAX.into(),
            completion_timestamp_mask: u64::MAX.into(),
            hca_core_clock: 1.into(),
            comp_vectors: 2.into(),
            ..DeviceLimits::default()
        };
        assert_eq!(all.of_version(VerbsVersion::V3), all);
        let before = all.of_version(VerbsVersion::V2);
        let later = DEVICE_SRQ_RESIZE | DEVICE_FLUSH_GLOBAL;
        assert_eq!(before.device_cap_flags.get(), !later);
        assert_eq!(before.odp_rc_caps.get(), !ODP_FLUSH);
        assert_eq!(before.odp_xrc_caps.get(), !ODP_FLUSH);
        let clock = [before.completion_timestamp_mask, before.hca_core_clock];
        assert_eq!(clock.map(U64::get), [0, 0]);
        assert_eq!(before.comp_vectors.get(), 0);
    }
}
