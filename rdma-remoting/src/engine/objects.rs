//! Objects of an engine besides queue pairs and memory.
//!
//! Each is made by an [`EngineContext`](super::EngineContext), and of a type that only its engine
//! knows. Whoever destroys one has seen to it that no other object uses it.

use super::{Progress, Schedule, Turn};
use crate::completion_queue::CompletionSink;
use crate::memory::PdHandle;
use crate::request::SrqNumber;
use crate::work_queue::{Entries, SharedSource};
use farlane_abi::Errno;
use std::any::Any;
use std::sync::Arc;

/// What an engine needs to make a completion queue.
pub struct CqSpec {
    /// Where completions go. It, not the engine, is what overruns.
    pub sink: Arc<dyn CompletionSink>,
    /// How many fit there.
    pub entries: u32,
}

/// A completion queue of an engine.
pub trait EngineCq: Any + Send + Sync {
    /// So many fit into its sink from now on. One that has room for more of its own is as good.
    ///
    /// # Errors
    /// `ENOMEM` where it cannot have that many; `EINVAL` where more wait in it.
    fn resize(&self, entries: u32) -> Result<(), Errno>;
    /// Ends it. When it returns, nothing goes to its sink any more.
    fn destroy(&self);
}

/// A domain of extended reliable connections (IBTA annex A14).
pub trait EngineXrcDomain: Any + Send + Sync {
    /// Ends it.
    fn destroy(&self);
}

/// What makes a shared receive queue one of a domain.
pub struct SrqDomain {
    /// Whose messages name it.
    pub domain: Arc<dyn EngineXrcDomain>,
    /// Where its requests complete.
    pub cq: Arc<dyn EngineCq>,
}

/// What an engine needs to make a shared receive queue.
pub struct SrqSpec {
    /// Protection domain of the memory that its requests name.
    pub pd: PdHandle,
    /// Where its requests come from.
    pub source: Box<dyn SharedSource>,
    /// Requests that it has room for.
    pub entries: u32,
    /// Elements that a request has at most.
    pub elements: u32,
    /// None for the requests of queue pairs that share it.
    pub domain: Option<SrqDomain>,
    /// Has it have a turn, as [`QpSpec::schedule`](super::QpSpec::schedule).
    pub schedule: Arc<dyn Schedule>,
    /// Told of asynchronous events, `EVENT_SRQ_*` of [`farlane_abi::rdma`].
    pub events: Box<dyn Fn(u32) + Send + Sync>,
}

/// A shared receive queue of an engine.
pub trait EngineSrq: Any + Send + Sync {
    /// Its number in its domain, where it is in one: never zero.
    fn number(&self) -> Option<SrqNumber>;
    /// Tells of fewer requests than `limit` from now on, once, also where there are fewer already;
    /// zero: not any more (IBTA 11.2.3.3, Modify SRQ).
    ///
    /// # Errors
    /// `EINVAL` where it never has as many.
    fn set_limit(&self, limit: u32) -> Result<(), Errno>;
    /// Has the requests that are posted from now on lie there; returns the number of the first one,
    /// as its [source](SharedSource::move_to) does.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the engine cannot; `EINVAL` where more wait than there is room for, or
    /// that is less than the limit, or nothing can be taken any more; `ENOMEM` where requests wait
    /// in too many places already.
    fn resize(&self, to: Entries) -> Result<u32, Errno>;
    /// The limit; zero where there is none, or it was told of.
    fn limit(&self) -> u32;
    /// Takes note of what was posted: its process has rung, or it was scheduled.
    fn progress(&self, turn: Turn) -> Progress;
    /// Whether a turn would find something to do: asked before it gets no more.
    fn is_ready(&self) -> bool;
    /// It has turns from now on: who posts need not ring.
    fn watch(&self);
    /// It has no more. From now on who posts rings, where the engine has to know.
    fn rest(&self);
    /// Ends it. When it returns, nothing is taken from its source, which is gone, nothing is moved
    /// for a message that names it, and nothing completes into its completion queue.
    fn destroy(&self);
}
