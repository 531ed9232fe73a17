//! The remoted verbs: the control path of RDMA, as a call table.
//!
//! The data path (posting work, polling completions) makes no call: see [`crate::queue`].

mod connections;
mod device;
mod memory;
mod numbers;
mod queues;
mod version;

use crate::call_table;
use zerocopy::little_endian::U32;

pub use connections::*;
pub use device::*;
pub use memory::*;
pub use numbers::*;
pub use queues::*;
pub use version::*;

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
        /// A handle of a protection domain of the context that a file stands for, in which can be
        /// whatever can be in one of the calling context's own. Requests of any queue pair of the
        /// domain name what is registered there, whoever has registered it.
        47 => fn import_pd(ImportPd) -> Handle;
        /// The keys of a registration in an imported domain; `EINVAL` where it is in another one.
        48 => fn import_mr(ImportMr) -> ImportedMr;
        /// Ends a registration that was made by a handle of an imported domain, as
        /// [`dereg_mr`](Self::dereg_mr) does with those of the context's own.
        49 => fn dereg_imported_mr(DeregMr) -> ();
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
        /// context that is not the kernel's, `EINVAL` of one that has not attached all memory of
        /// the VM. Its handle is the key that it has until a request gives it another one.
        55 => fn alloc_fast_mr(AllocFastMr) -> Mr;
        /// What a port has carried out and received, from 1 up.
        68 => fn port_counters(U32) -> PortCounters;
        /// Allocates a memory window, which is not bound.
        30 => fn alloc_mw(AllocMw) -> Mw;
        /// Frees a memory window, bound or not.
        31 => fn dealloc_mw(Handle) -> ();
        /// Whether the port may have to do with one that has this GID: `EHOSTUNREACH` where there
        /// is none such, `EACCES` where an operator does not let them, `EOPNOTSUPP` where the
        /// guest's kernel manages the connections of the port itself, as of all calls that ask for
        /// connections.
        56 => fn cm_reach(Gid) -> ();
        /// Binds an id. `EADDRINUSE` where another one is, `EADDRNOTAVAIL` of a GID that the port
        /// does not have, `ENOMEM` where there are as many ids as there may be.
        57 => fn cm_bind(CmBind) -> CmBound;
        /// Has an id listen: requests of peers come as events.
        58 => fn cm_listen(CmListen) -> ();
        /// Asks for a connection, or a queue pair of datagrams. The answer comes as an event.
        59 => fn cm_connect(CmConnect) -> Handle;
        /// Accepts a request. `EINVAL` of an id that is not in a state for it, as of the calls that
        /// follow.
        60 => fn cm_accept(CmAccept) -> ();
        /// Rejects a request, or a reply.
        61 => fn cm_reject(CmReject) -> ();
        /// The connection's queue pair is ready, after a reply; or, at the other end, data has come
        /// before the peer has said so.
        62 => fn cm_establish(Handle) -> ();
        /// Ends a connection.
        63 => fn cm_disconnect(Handle) -> ();
        /// Destroys an id, whatever it is. No event of it comes any more. Returns how many waited:
        /// their event index was raised once for each.
        64 => fn cm_destroy(Handle) -> U32;
        /// Has the events of an id, those that wait too, come by another event index. Returns how
        /// many waited: the index before was raised once for each, and this one is, too.
        65 => fn cm_migrate(CmMigrate) -> U32;
        /// Attributes of a connection's queue pair.
        66 => fn cm_qp_attr(CmQpState) -> CmQpAttr;
        /// The next event that has come by this event index. `EAGAIN` where none waits.
        67 => fn cm_next_event(U32) -> CmEvent;
    }
}
