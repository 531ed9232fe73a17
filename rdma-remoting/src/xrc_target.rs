//! Targets of extended reliable connections: queue pairs of a domain, not of the process that made
//! them (IBTA A14; `ib_open_qp` of the kernel).
//!
//! A target lasts as long as somebody has it open. Each of those gets its events, and gives it
//! turns, as any of them may end.

use crate::address::GroupGid;
use crate::engine::{EngineQp, Progress, QpNumber, Schedule, Turn};
use crate::inbox::Scheduled;
use crate::xrc_domains::Domain;
use farlane_abi::Errno;
use farlane_abi::rdma::QpAttr;
use farlane_sys::sync::lock;
use std::sync::{Arc, Mutex};

/// How many may have a target open at once. Whoever changes what it waits for, a peer in its turn
/// or a call, has all of them scheduled, or tells them of an event.
pub(crate) const MAX_OPENERS: usize = 256;

/// Tells somebody of an event, `EVENT_*` of [`farlane_abi::rdma`].
pub(crate) type Teller = Arc<dyn Fn(u32) + Send + Sync>;

/// Who has a target open.
#[derive(Clone)]
struct Opener {
    scheduled: Arc<Scheduled>,
    tell: Teller,
}

/// Those who have a target open, by numbers of their own. Its lock is the innermost one: nobody is
/// called under it.
#[derive(Default)]
pub(crate) struct Openers(Mutex<List>);

#[derive(Default)]
struct List {
    all: Vec<(u64, Opener)>,
    next: u64,
    /// The last one has closed it.
    is_over: bool,
}

impl Openers {
    /// Adds one, and returns its number.
    ///
    /// # Errors
    /// `EINVAL` where the target has ended, `ENOMEM` where too many have it open.
    fn add(&self, scheduled: &Arc<Scheduled>, tell: Teller) -> Result<u64, Errno> {
        let mut list = lock(&self.0);
        if list.is_over {
            return Err(Errno::EINVAL);
        }
        if list.all.len() == MAX_OPENERS {
            return Err(Errno::ENOMEM);
        }
        let number = list.next;
        list.next += 1;
        let scheduled = Arc::clone(scheduled);
        list.all.push((number, Opener { scheduled, tell }));
        Ok(number)
    }

    /// Takes one out, once. Returns whether it was the last one.
    fn remove(&self, number: u64) -> bool {
        let mut list = lock(&self.0);
        let before = list.all.len();
        list.all.retain(|(its, _)| *its != number);
        list.is_over |= list.all.is_empty();
        before > 0 && list.all.is_empty()
    }

    fn all(&self) -> Vec<Opener> {
        let list = lock(&self.0);
        list.all.iter().map(|(_, opener)| opener.clone()).collect()
    }

    /// Tells each of an event.
    pub fn tell(&self, kind: u32) {
        for opener in self.all() {
            (opener.tell)(kind);
        }
    }
}

/// Each may be the one who still gives turns.
impl Schedule for Openers {
    fn schedule(&self) {
        for opener in self.all() {
            opener.scheduled.schedule();
        }
    }
}

/// A target.
pub(crate) struct XrcTarget {
    engine: Arc<dyn EngineQp>,
    openers: Arc<Openers>,
    domain: Arc<Domain>,
}

/// A target that a process has open: what it destroys it closes.
pub(crate) struct OpenTarget {
    target: Arc<XrcTarget>,
    opener: u64,
}

impl OpenTarget {
    /// Makes a target of a domain, which `scheduled` has open. `make` is given what schedules the
    /// engine's queue pair, and tells of its events.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn create(
        domain: &Arc<Domain>,
        (scheduled, tell): (&Arc<Scheduled>, Teller),
        make: impl FnOnce(&Arc<Openers>) -> Result<Arc<dyn EngineQp>, Errno>,
    ) -> Result<Self, Errno> {
        let openers = Arc::<Openers>::default();
        let opener = openers.add(scheduled, tell)?;
        let engine = make(&openers)?;
        let target = Arc::new(XrcTarget {
            engine,
            openers,
            domain: Arc::clone(domain),
        });
        let number = target.engine.number().get();
        lock(&domain.targets).insert(number, Arc::downgrade(&target));
        Ok(Self { target, opener })
    }

    /// Opens the target of this number.
    ///
    /// # Errors
    /// `EINVAL` where the domain has none, `ENOMEM` where too many have it open.
    pub fn open(
        domain: &Domain,
        number: QpNumber,
        (scheduled, tell): (&Arc<Scheduled>, Teller),
    ) -> Result<Self, Errno> {
        let target = domain.target(number).ok_or(Errno::EINVAL)?;
        let opener = target.openers.add(scheduled, tell)?;
        Ok(Self { target, opener })
    }
}

impl EngineQp for OpenTarget {
    fn number(&self) -> QpNumber {
        self.target.engine.number()
    }

    fn modify(&self, mask: u32, attr: &QpAttr) -> Result<(), Errno> {
        self.target.engine.modify(mask, attr)
    }

    fn query(&self) -> QpAttr {
        self.target.engine.query()
    }

    fn attach(&self, group: GroupGid) -> Result<(), Errno> {
        self.target.engine.attach(group)
    }

    fn detach(&self, group: GroupGid) -> Result<(), Errno> {
        self.target.engine.detach(group)
    }

    fn is_attached(&self) -> bool {
        self.target.engine.is_attached()
    }

    fn progress(&self, turn: Turn) -> Progress {
        self.target.engine.progress(turn)
    }

    fn is_ready(&self) -> bool {
        self.target.engine.is_ready()
    }

    fn pause(&self, paused: bool) {
        self.target.engine.pause(paused);
    }

    /// Closes it. The last one ends it.
    fn destroy(&self) {
        let target = &self.target;
        if target.openers.remove(self.opener) {
            // Its number may have a successor as soon as the engine has ended it.
            lock(&target.domain.targets).remove(&target.engine.number().get());
            target.engine.destroy();
        } else {
            // A turn that this one was to give.
            target.openers.schedule();
        }
    }
}
