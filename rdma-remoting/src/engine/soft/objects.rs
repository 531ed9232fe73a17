//! Completion queues, shared receive queues and domains, as contexts of the software engine make
//! them.
//!
//! A completion queue is its sink, and a message takes from a shared receive queue what lies in its
//! ring: neither costs a message anything.

use crate::completion_queue::{CompletionSink, NoCompletions};
use crate::engine::{
    EngineCq, EngineSrq, EngineXrcDomain, Progress, Receives as Named, SrqSpec, Turn,
};
use crate::memory::MemoryTable;
use crate::request::{RecvWqe, SrqNumber};
use crate::shared_receive_queue::SharedReceives;
use crate::work_queue::{Entries, WorkSource};
use crate::xrc::XrcDomain;
use farlane_abi::Errno;
use farlane_abi::rdma::EVENT_SRQ_ERR;
use farlane_abi::width::to_usize;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// An object of the software engine; `EINVAL` for one of another engine.
fn own<T: Any + Send + Sync>(object: Arc<dyn Any + Send + Sync>) -> Result<Arc<T>, Errno> {
    object.downcast().map_err(|_| Errno::EINVAL)
}

/// A completion queue.
pub struct SoftCq {
    sink: Arc<dyn CompletionSink>,
}

impl SoftCq {
    /// One whose completions go there.
    #[must_use]
    pub fn new(sink: Arc<dyn CompletionSink>) -> Arc<Self> {
        Arc::new(Self { sink })
    }

    /// Where completions of half a queue pair go; nowhere where it has none.
    pub(super) fn sink_of(cq: Option<Arc<dyn EngineCq>>) -> Result<Arc<dyn CompletionSink>, Errno> {
        Ok(match cq {
            Some(cq) => Arc::clone(&own::<Self>(cq)?.sink),
            None => Arc::new(NoCompletions),
        })
    }
}

impl fmt::Debug for SoftCq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftCq").finish_non_exhaustive()
    }
}

impl EngineCq for SoftCq {
    fn resize(&self, _: u32) -> Result<(), Errno> {
        Ok(())
    }

    fn destroy(&self) {}
}

impl EngineXrcDomain for XrcDomain {
    fn destroy(&self) {}
}

/// Requests that several queue pairs take, and the keys that these name.
#[derive(Clone, Debug)]
pub struct Shared {
    pub receives: Arc<SharedReceives>,
    /// Of another context than a queue pair, or of the same one. None of no context: those of the
    /// queue pair.
    pub memory: Option<Arc<MemoryTable>>,
}

/// A shared receive queue, and its place in a domain.
#[derive(Debug)]
pub struct SoftSrq {
    shared: Shared,
    domain: Option<(Arc<XrcDomain>, SrqNumber)>,
}

impl SoftSrq {
    /// One of no context and no domain.
    #[must_use]
    pub fn of(receives: &Arc<SharedReceives>) -> Arc<Self> {
        Arc::new(Self {
            shared: Shared {
                receives: Arc::clone(receives),
                memory: None,
            },
            domain: None,
        })
    }

    /// One whose requests name keys of this table.
    pub(super) fn make(spec: SrqSpec, memory: &Arc<MemoryTable>) -> Result<Arc<Self>, Errno> {
        let (tell, schedule) = (spec.events, spec.schedule);
        let events = Box::new(move |kind| {
            tell(kind);
            if kind == EVENT_SRQ_ERR {
                // Its turns tell whoever waits for it.
                schedule.schedule();
            }
        });
        let receives = SharedReceives::new(spec.source, spec.pd, events);
        let domain = spec.domain.map(|place| {
            let domain = own::<XrcDomain>(place.domain)?;
            let sink = SoftCq::sink_of(Some(place.cq))?;
            let number = domain.add(&receives, memory, sink);
            Ok((domain, number))
        });
        Ok(Arc::new(Self {
            shared: Shared {
                receives,
                memory: Some(Arc::clone(memory)),
            },
            domain: domain.transpose()?,
        }))
    }
}

impl EngineSrq for SoftSrq {
    fn number(&self) -> Option<SrqNumber> {
        self.domain.as_ref().map(|(_, number)| *number)
    }

    fn set_limit(&self, limit: u32) -> Result<(), Errno> {
        self.shared.receives.set_limit(limit);
        Ok(())
    }

    fn resize(&self, to: Entries) -> Result<u32, Errno> {
        self.shared.receives.move_to(to)
    }

    fn limit(&self) -> u32 {
        self.shared.receives.limit()
    }

    /// Each that it tells costs a look.
    fn progress(&self, turn: Turn) -> Progress {
        let mut budget = turn.budget.spend();
        let told = self.shared.receives.pass_on_to(to_usize(budget.looks()));
        (0..told).for_each(|_| budget.passed_over());
        Progress {
            worked: told > 0,
            used: budget.used(),
            ..Progress::default()
        }
    }

    fn is_ready(&self) -> bool {
        self.shared.receives.is_awaited()
    }

    fn watch(&self) {
        self.shared.receives.watch();
    }

    /// Only where somebody waits.
    fn rest(&self) {
        self.shared.receives.rest();
    }

    fn destroy(&self) {
        match &self.domain {
            Some((domain, number)) => domain.remove(*number),
            None => self.shared.receives.close(),
        }
    }
}

/// Where a queue pair takes receive requests from.
pub enum Receives {
    /// Its own queue.
    Own(Box<dyn WorkSource<RecvWqe>>),
    /// A queue that others take from, too.
    Shared(Shared),
    /// Those of a domain: each message names one (IBTA annex A14).
    Domain(Arc<XrcDomain>),
}

impl TryFrom<Named> for Receives {
    type Error = Errno;

    /// `EINVAL` for objects of another engine.
    fn try_from(named: Named) -> Result<Self, Errno> {
        Ok(match named {
            Named::Own(source) => Self::Own(source),
            Named::Shared(srq) => Self::Shared(own::<SoftSrq>(srq)?.shared.clone()),
            Named::Domain(domain) => Self::Domain(own(domain)?),
        })
    }
}

#[cfg(test)]
impl dyn EngineSrq {
    /// The requests of one of the software engine, for tests of where they lie.
    pub fn receives(&self) -> &Arc<SharedReceives> {
        let srq: &dyn Any = self;
        &srq.downcast_ref::<SoftSrq>().unwrap().shared.receives
    }
}
