//! What carries out work: engines behind one trait.
//!
//! The remoting above knows queues in shared memory, handles and calls; an engine knows the objects
//! of an adapter and the transport. They meet in [`EngineContext`], where these objects are made,
//! and in what they are made of ([`QpSpec`], [`CqSpec`], [`SrqSpec`]): where requests come from,
//! and where completions go. The same engine can therefore be driven without any remoting.

mod budget;
mod objects;
pub mod soft;

use crate::address::{AddressVector, GroupGid};
pub use crate::address::{AhHandle, Destination, PortAddress, QpNumber, RawGid};
use crate::traffic::Traffic;
pub(crate) use budget::is_past;
pub use budget::{Budget, FLUSH_COST, LOOK_COST, OPERATION_COST, QUANTUM, Spending, Usage};

pub use objects::{CqSpec, EngineCq, EngineSrq, EngineXrcDomain, SrqDomain, SrqSpec};

use crate::counters::Counters;
use crate::ledger::Account;
use crate::memory::{FastRegion, MemoryRegion, PdHandle, WindowKind};
use crate::request::{MemoryKey, RecvWqe, SendWqe};
pub use crate::schedule::Schedule;
use crate::work_queue::WorkSource;
use farlane_abi::Errno;
use farlane_abi::rdma::{DeviceAttr, DeviceLimits, PortAttr, QpAttr};
use farlane_sys::log_limit::LogLimit;
use farlane_zero_copy::WordLocks;
use farlane_zero_copy::topology::Node;
use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// Where a queue pair takes receive requests from.
pub enum Receives {
    /// Its own queue.
    Own(Box<dyn WorkSource<RecvWqe>>),
    /// A queue that others take from, too.
    Shared(Arc<dyn EngineSrq>),
    /// Those of a domain: each message names one (IBTA annex A14).
    Domain(Arc<dyn EngineXrcDomain>),
}

/// What an engine needs to open a context.
#[derive(Clone, Default)]
pub struct ContextSpec {
    /// Of the port that it belongs to.
    pub address: PortAddress,
    /// Memory regions that it may have, and as many windows.
    pub regions: u32,
    /// Locks of the words of its memory, of which other contexts may have some, too: atomic
    /// operations exclude each other by them.
    pub locks: Arc<WordLocks>,
    /// Whom its port takes datagrams of, and sends those of multicast groups to; all where there
    /// is none.
    pub admission: Option<Arc<dyn Admission>>,
    /// Who pays for the multicast groups that its queue pairs are in; nobody where there is none.
    pub account: Option<Arc<Account>>,
    /// Counters of the server.
    pub counters: Arc<Counters>,
    /// What its port carries out and receives.
    pub traffic: Arc<Traffic>,
    /// Of what its owner can have logged.
    pub limit: Arc<LogLimit>,
}

/// How large the queues of a queue pair are (`struct ibv_qp_cap`): an engine whose adapter has
/// queues of its own makes them so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpDepths {
    /// Send requests that have not completed, at most.
    pub sends: u32,
    /// Elements that a send request has at most.
    pub send_elements: u32,
    /// Bytes of the inline data of a send request, at most.
    pub inline_bytes: u32,
    /// Receive requests that have not completed, at most; zero where it takes those of others.
    pub recvs: u32,
    /// Elements that a receive request has at most.
    pub recv_elements: u32,
}

/// What an engine needs to make a queue pair.
pub struct QpSpec {
    /// Transport service type, of `enum ibv_qp_type`.
    pub kind: u32,
    /// Protection domain of its work requests; [`PdHandle::NONE`] where it takes those of a domain.
    pub pd: PdHandle,
    /// How large its queues are.
    pub depths: QpDepths,
    /// Where send requests come from.
    pub sends: Box<dyn WorkSource<SendWqe>>,
    /// Where receive requests come from.
    pub recvs: Receives,
    /// Where send completions go; none where it sends nothing.
    pub send_cq: Option<Arc<dyn EngineCq>>,
    /// Where receive completions go; none where it receives nothing, or each of its messages names
    /// a shared receive queue.
    pub recv_cq: Option<Arc<dyn EngineCq>>,
    /// Every send request is signalled.
    pub signal_all: bool,
    /// Called when something that it waits for has changed, or it was changed itself. Only who
    /// posts requests does not call it.
    pub schedule: Arc<dyn Schedule>,
    /// Told of asynchronous events, `EVENT_*` of [`farlane_abi::rdma`].
    pub events: Box<dyn Fn(u32) + Send + Sync>,
}

/// Whom the port of a queue pair may have to do with.
pub trait Admission: Send + Sync {
    /// Whether the port with this GID is one of them.
    fn admits(&self, gid: &RawGid) -> bool;
}

/// What ports are called.
pub trait PortNames: Send + Sync {
    /// The GID of the [address](PortAddress) of the port that has this one; none where no port has
    /// it.
    fn home(&self, gid: &RawGid) -> Option<RawGid>;
}

/// Bytes of a management datagram (IBTA 13.4).
pub const MANAGEMENT_BYTES: usize = 256;

/// A management datagram between queue pairs 1 of two ports (IBTA 13.5.1).
#[derive(Clone, Copy, Debug)]
pub struct ManagementDatagram<'a> {
    /// The sender's port.
    pub port: PortAddress,
    /// GID of the sender.
    pub from: RawGid,
    /// GID of the receiver.
    pub to: RawGid,
    /// The datagram.
    pub bytes: &'a [u8; MANAGEMENT_BYTES],
}

/// Serves queue pair 1 of ports that have none of their own.
pub trait Management: Send + Sync {
    /// Takes what a queue pair 1 has sent to such a port. Whoever calls holds locks of queue pairs:
    /// none of them is taken, and nobody waited for who has one.
    fn take(&self, datagram: &ManagementDatagram<'_>);
    /// Whether a connection of this port names a queue pair of this number, which need not be
    /// there: no new one gets it. Whoever calls holds the lock of queue pairs' names.
    fn is_named(&self, port: &RawGid, number: QpNumber) -> bool;
}

/// A turn of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Time at which it begins.
    pub now: Instant,
    /// The node of the worker that gives it, where workers belong to nodes.
    pub node: Option<Node>,
    /// How much it may carry out.
    pub budget: Budget,
    /// When it ends, where it does: what begins after that is one request at most, and a portion of
    /// the one at hand.
    pub until: Option<Instant>,
}

impl From<Instant> for Turn {
    fn from(now: Instant) -> Self {
        Self {
            now,
            node: None,
            budget: Budget::new(QUANTUM),
            until: None,
        }
    }
}

/// What a turn of a queue pair did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// There was something to do.
    pub worked: bool,
    /// When to come back though nothing new arrives: a retry timer.
    pub deadline: Option<Instant>,
    /// There was no time for some: of those it says nothing.
    pub cut: bool,
    /// Queue pairs that had a turn and nothing to do, where it is one of several.
    pub idle: usize,
    /// How much was carried out.
    pub used: Usage,
    /// There was more to do than its budget: a turn with another one goes on.
    pub more: bool,
}

impl Progress {
    /// The progress of both turns together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            worked: self.worked || other.worked,
            deadline: earlier(self.deadline, other.deadline),
            cut: self.cut || other.cut,
            idle: self.idle.saturating_add(other.idle),
            used: self.used.and(other.used),
            more: self.more || other.more,
        }
    }
}

/// The smaller one, where there are two.
pub(crate) fn earlier<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// An RDMA engine: carries out the work of its contexts.
pub trait Engine: Send + Sync {
    /// Attributes of the device. The GUID is the port's and filled in above.
    fn device(&self) -> DeviceAttr;
    /// Limits of what not every engine has: zero where this one has it not. Those of objects that
    /// are not the engine's are filled in above.
    fn limits(&self) -> DeviceLimits;
    /// Attributes of its port.
    fn port(&self) -> PortAttr;
    /// Peers may name a port by more than the GID of its [address](ContextSpec::address): who
    /// knows which. Called once, before any context is open.
    fn name_ports(&self, _names: Arc<dyn PortNames>) {}
    /// Who serves queue pair 1 of ports that have none. Called once, before any context is open.
    fn manage_by(&self, _management: Arc<dyn Management>) {}
    /// Whether the port with this address has a queue pair 1.
    fn has_general_services(&self, _port: &RawGid) -> bool {
        false
    }
    /// Brings a datagram to queue pair 1 of the port that it is for, or loses it. False where that
    /// has none. It is sent by a port that has none.
    fn deliver_management(&self, _datagram: &ManagementDatagram<'_>) -> bool {
        false
    }
    /// Opens a context, in which nothing is.
    ///
    /// # Errors
    /// `ENOMEM` when there are too many.
    fn open(&self, spec: ContextSpec) -> Result<Arc<dyn EngineContext>, Errno>;
    /// What it waits for besides, each for one worker. Asked for once, before any context is open.
    /// There is none where whoever does something for a queue pair schedules it.
    fn sources(&self) -> Vec<Arc<dyn EventSource>> {
        Vec::new()
    }
}

/// Where an engine learns of what others have done for it: an adapter's completions, a socket, a
/// doorbell of another host. One worker, always the same, looks there in each of its rounds, and
/// waits there when it sleeps.
///
/// Contexts are served by other workers, too, and queue pairs are paused and destroyed by any
/// thread while [`take`](Self::take) goes on. What those calls promise holds against it, and is the
/// engine's to keep:
///
/// * When [`pause(true)`](EngineQp::pause) has returned, nothing of that queue pair completes: what
///   others have done for it meanwhile stays with the engine until it goes on.
/// * When [`destroy`](EngineQp::destroy) has returned, nothing of that queue pair completes, ever:
///   what there was of it is dropped, and so is what is done for it later. Nor is it scheduled.
///
/// So both wait for a `take` that has such a thing in hand: for no longer than that takes, since
/// `take` itself waits for nobody. A source outlives all contexts; from the end of its worker on it
/// is asked for nothing.
pub trait EventSource: Send + Sync {
    /// Takes note of what there is, of so much at most as a turn may take: completions go to their
    /// queues, whoever waits is scheduled. Returns whether there was something.
    fn take(&self) -> bool;
    /// The worker is about to sleep, and looks once more after this: has the descriptor become
    /// readable when there is something from now on.
    fn arm(&self);
    /// The descriptor. It is watched for edges, and nobody but the source reads it.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// A program's use of an engine: the objects that it has there. Names and keys are the engine's
/// choice. Whoever ends an object has seen to it that no other one uses it, but where it says
/// otherwise.
pub trait EngineContext: Any + Send + Sync {
    /// Makes a protection domain, never [`PdHandle::NONE`].
    ///
    /// # Errors
    /// `ENOMEM` when there are too many.
    fn alloc_pd(&self) -> Result<PdHandle, Errno>;
    /// Ends a protection domain.
    fn dealloc_pd(&self, pd: PdHandle);
    /// Registers memory. Returns its key, local and remote.
    ///
    /// # Errors
    /// `ENOMEM` when there are too many.
    fn reg_mr(&self, memory: MemoryRegion) -> Result<MemoryKey, Errno>;
    /// Registers other memory under a key. When this returns, nothing touches the memory before by
    /// the key.
    ///
    /// # Errors
    /// Those of [`dereg_mr`](Self::dereg_mr).
    fn rereg_mr(&self, key: MemoryKey, memory: MemoryRegion) -> Result<(), Errno>;
    /// Makes a registration that requests make. Returns its key until then, which
    /// [`dereg_mr`](Self::dereg_mr), [`mr_owner`](Self::mr_owner) and requests know it by for ever.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the engine has none, `ENOMEM` when there are too many.
    fn alloc_fast_mr(&self, _region: FastRegion) -> Result<MemoryKey, Errno> {
        Err(Errno::EOPNOTSUPP)
    }
    /// Ends a registration. When this returns, no request touches the memory, also none that is in
    /// progress (IBTA, 10.6.6.2.6).
    ///
    /// # Errors
    /// `EBADF` for a key that is no region's; `EBUSY` while a window is bound to it (IBTA
    /// 10.6.7.1).
    fn dereg_mr(&self, key: MemoryKey) -> Result<(), Errno>;
    /// The same of a registration whose maker is gone: where windows are bound to it, they reach
    /// nothing from then on.
    ///
    /// # Errors
    /// `EBADF` for a key that is no region's.
    fn withdraw_mr(&self, key: MemoryKey) -> Result<(), Errno>;
    /// [Owner](MemoryRegion::owner) of what is registered under a key, if there is one.
    fn mr_owner(&self, key: MemoryKey) -> Option<Arc<dyn Any + Send + Sync>>;
    /// Makes a memory window that is not bound. Returns the key by which it is bound for the first
    /// time.
    ///
    /// # Errors
    /// `ENOMEM` when there are too many.
    fn alloc_mw(&self, pd: PdHandle, kind: WindowKind) -> Result<MemoryKey, Errno>;
    /// Ends a memory window, bound or not, by any key that it has had. When this returns, nothing
    /// touches memory by its key.
    ///
    /// # Errors
    /// `EBADF` where there is none.
    fn dealloc_mw(&self, key: MemoryKey) -> Result<(), Errno>;
    /// How many regions and windows there are.
    fn keys(&self) -> u64;
    /// Makes a completion queue.
    ///
    /// # Errors
    /// `ENOMEM` when there are too many.
    fn create_cq(&self, spec: CqSpec) -> Result<Arc<dyn EngineCq>, Errno>;
    /// Makes a shared receive queue.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the engine has none, `EINVAL` for a domain or completion queue of another
    /// engine, `ENOMEM` when there are too many.
    fn create_srq(&self, spec: SrqSpec) -> Result<Arc<dyn EngineSrq>, Errno>;
    /// Makes a domain of extended reliable connections. It and its targets last until they are
    /// destroyed, whatever becomes of this context, and other contexts of the port use them, too.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the engine has none, `ENOMEM` when there are too many.
    fn create_xrc_domain(&self) -> Result<Arc<dyn EngineXrcDomain>, Errno>;
    /// Makes an address handle of a protection domain. Datagrams have it besides the address.
    ///
    /// # Errors
    /// `ENOMEM` when there are too many.
    fn create_ah(&self, pd: PdHandle, address: &AddressVector) -> Result<AhHandle, Errno>;
    /// Ends an address handle, unless it has ended with the context. A request that was taken
    /// before may have it still, and is sent, or fails.
    fn destroy_ah(&self, ah: AhHandle);
    /// Makes a queue pair in the reset state.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for a kind that the engine does not have, `EINVAL` for objects of another
    /// engine, `ENOMEM` when there are too many.
    fn create_qp(&self, spec: QpSpec) -> Result<Arc<dyn EngineQp>, Errno>;
    /// Ends all that has no end of its own: protection domains, memory keys and address handles, of
    /// which no queue pair makes use any more. Returns how many regions there were. When this
    /// returns, nothing touches their memory.
    fn close(&self) -> u64;
}

/// A queue pair of an engine.
pub trait EngineQp: Send + Sync {
    /// Its number, unique at its port.
    fn number(&self) -> QpNumber;
    /// Changes attributes and state; `mask` is `enum ibv_qp_attr_mask`.
    ///
    /// # Errors
    /// `EINVAL` for a transition or attribute that the present state does not allow (IBTA
    /// 11.2.5.2), `EACCES` for an address of a port that has the name only since it was
    /// [admitted](Admission).
    fn modify(&self, mask: u32, attr: &QpAttr) -> Result<(), Errno>;
    /// Present attributes and state.
    fn query(&self) -> QpAttr;
    /// Has it receive what is sent to this multicast group. Twice is as once.
    ///
    /// # Errors
    /// `EINVAL` for a queue pair that receives no datagrams, `ENOMEM` where its port or its account
    /// has as many memberships as it may have, or the port as many queue pairs in this group.
    fn attach(&self, group: GroupGid) -> Result<(), Errno>;
    /// Ends that.
    ///
    /// # Errors
    /// `EINVAL` where it is not in this group.
    fn detach(&self, group: GroupGid) -> Result<(), Errno>;
    /// Whether it is in a multicast group.
    fn is_attached(&self) -> bool;
    /// Carries out what is queued, within the budget of the turn: others have theirs then. A
    /// request that waits costs nothing.
    fn progress(&self, turn: Turn) -> Progress;
    /// Whether a turn would find something to do: asked before it gets no more.
    fn is_ready(&self) -> bool;
    /// Stops or goes on: while paused it carries out nothing, answers no peer, and nothing touches
    /// its queues and its memory. When it returns from pausing, what was under way has ended.
    fn pause(&self, paused: bool);
    /// Ends it. When it returns, nothing touches its queues and completion queues any more.
    fn destroy(&self);
}
