//! What carries out work: engines behind one trait.
//!
//! The remoting above knows queues in shared memory, handles and calls; an engine knows queue
//! pairs, memory keys and the transport. They meet in [`QpSpec`]: where requests come from, which
//! memory they may name, and where completions go. The same engine can therefore be driven without
//! any remoting.

mod budget;
pub mod soft;

use crate::address::GroupGid;
pub use crate::address::{Destination, PortAddress, QpNumber, RawGid};
pub use budget::{Budget, FLUSH_COST, LOOK_COST, OPERATION_COST, QUANTUM, Spending, Usage};

use crate::completion_queue::CompletionSink;
use crate::counters::Counters;
use crate::ledger::Account;
use crate::memory::{MemoryTable, PdHandle};
use crate::request::{RecvWqe, SendWqe};
pub use crate::schedule::Schedule;
use crate::shared_receive_queue::SharedReceives;
use crate::work_queue::WorkSource;
use crate::xrc::XrcDomain;
use farlane_abi::Errno;
use farlane_abi::rdma::{DeviceAttr, DeviceLimits, PortAttr, QpAttr};
use farlane_sys::log_limit::LogLimit;
use farlane_zero_copy::topology::Node;
use std::sync::Arc;
use std::time::Instant;

/// Where a queue pair takes receive requests from.
pub enum Receives {
    /// Its own queue.
    Own(Box<dyn WorkSource<RecvWqe>>),
    /// A queue that others take from, too.
    Shared(Arc<SharedReceives>),
    /// Those of a domain: each message names one (IBTA annex A14).
    Domain(Arc<XrcDomain>),
}

/// What an engine needs to make a queue pair.
pub struct QpSpec {
    /// Transport service type, of `enum ibv_qp_type`.
    pub kind: u32,
    /// Protection domain of its work requests; one that is none where it takes those of a domain.
    pub pd: PdHandle,
    /// Of the port that it belongs to.
    pub address: PortAddress,
    /// Memory that its requests and its peer's may name.
    pub memory: Arc<MemoryTable>,
    /// Where send requests come from.
    pub sends: Box<dyn WorkSource<SendWqe>>,
    /// Where receive requests come from.
    pub recvs: Receives,
    /// Where send completions go.
    pub send_cq: Arc<dyn CompletionSink>,
    /// Where receive completions go.
    pub recv_cq: Arc<dyn CompletionSink>,
    /// Every send request is signalled.
    pub signal_all: bool,
    /// Called when something that it waits for has changed, or it was changed itself. Only who
    /// posts requests does not call it.
    pub schedule: Arc<dyn Schedule>,
    /// Told of asynchronous events, `EVENT_*` of [`farlane_abi::rdma`].
    pub events: Box<dyn Fn(u32) + Send + Sync>,
    /// Counters of the server.
    pub counters: Arc<Counters>,
    /// Of what its owner can have logged.
    pub limit: Arc<LogLimit>,
    /// What not every queue pair has.
    pub extras: QpExtras,
}

/// Whom the port of a queue pair may have to do with.
pub trait Admission: Send + Sync {
    /// Whether the port with this GID is one of them.
    fn admits(&self, gid: &RawGid) -> bool;
}

/// What not every queue pair has: nothing of it by default.
#[derive(Clone, Default)]
pub struct QpExtras {
    /// Whom its port takes datagrams of, and sends those of multicast groups to; all where there
    /// is none.
    pub admission: Option<Arc<dyn Admission>>,
    /// Who pays for the multicast groups that it is in; nobody where there is none.
    pub account: Option<Arc<Account>>,
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
}

impl From<Instant> for Turn {
    fn from(now: Instant) -> Self {
        Self {
            now,
            node: None,
            budget: Budget::new(QUANTUM),
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

/// An RDMA engine: makes queue pairs, and carries out their work.
pub trait Engine: Send + Sync {
    /// Attributes of the device. The GUID is the port's and filled in above.
    fn device(&self) -> DeviceAttr;
    /// Limits of what not every engine has: zero where this one has it not. Those of objects that
    /// are not the engine's are filled in above.
    fn limits(&self) -> DeviceLimits;
    /// Attributes of its port.
    fn port(&self) -> PortAttr;
    /// Makes a queue pair in the reset state.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for a kind that the engine does not have, `ENOMEM` when there are too many.
    fn create_qp(&self, spec: QpSpec) -> Result<Arc<dyn EngineQp>, Errno>;
}

/// A queue pair of an engine.
pub trait EngineQp: Send + Sync {
    /// Its number, unique at its port.
    fn number(&self) -> QpNumber;
    /// Changes attributes and state; `mask` is `enum ibv_qp_attr_mask`.
    ///
    /// # Errors
    /// `EINVAL` for a transition or attribute that the present state does not allow (IBTA
    /// 11.2.5.2).
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
