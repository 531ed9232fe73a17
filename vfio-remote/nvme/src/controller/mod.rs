//! A controller in use: one worker thread, which owns the queues, the commands in flight and the
//! ring.
//!
//! A turn looks at the registers, takes what has ended, takes new commands of each queue in turn
//! (a bounded number, so that no queue starves another), tells the kernel of the transfers, and
//! interrupts once for each completion queue that has new entries.

mod abort;
mod admin;
mod completion;
mod fetch;
mod files;
mod io;
mod memory;
mod queues;
mod requests;
mod shadow;
mod steps;
mod sync;
mod transfer;

use crate::bits::{PAGE, Status};
use crate::data::Segment;
use crate::error_log::{ErrorLog, Failure};
use crate::features::{AsyncEvent, Events, Features};
use crate::identify::Identity;
use crate::ids::{CqId, SqId};
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::remote::Remote;
use crate::ring::Ring;
use crate::shared::{Notice, Shared};
use farlane_block::engine::Slot;
use farlane_pci::DmaView;
use farlane_sys::{log_limited, warn_limited};
use farlane_worker::idle::{Idle, Rest};
use farlane_worker::policy::doorbells;
use files::NamespaceFiles;
use memory::KeptView;
use queues::Queues;
use requests::Requests;
use shadow::Shadow;
use std::collections::VecDeque;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use sync::Shutdown;

pub use completion::{CommandId, Permit};

/// How often an interrupt that is put off is looked at.
const PUT_OFF_NAP: Duration = Duration::from_micros(20);

/// Life of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Disabled (CC.EN is zero).
    Disabled,
    /// Enabled; fetching commands.
    Running,
    /// After a fatal error (CSTS.CFS), until the driver resets the controller.
    Failed,
    /// Being reset: commands in flight end, then all state is dropped.
    Resetting,
}

/// The worker's side of a controller.
pub struct Controller {
    shared: Arc<Shared>,
    identity: Arc<Identity>,
    files: NamespaceFiles,
    remote: Remote,
    state: State,
    shutdown: Shutdown,
    stopping: bool,
    view: KeptView,
    queues: Queues,
    /// The submission queue that the next turn begins with.
    first: SqId,
    requests: Requests,
    /// Requests that wait for syncs of others to end.
    unsettled: VecDeque<Slot>,
    shadow: Option<Shadow>,
    features: Features,
    events: Events,
    errors: ErrorLog,
    idle: Idle,
    /// An interrupt is being coalesced.
    put_off: bool,
    /// Space for looking up where data is.
    segments: Vec<Segment>,
}

impl Controller {
    /// A disabled controller for the calling thread. `rings` says whether doorbells ring. `link`
    /// stays open for as long as anything is under way, however this process ends.
    pub fn new(
        shared: Arc<Shared>,
        identity: Arc<Identity>,
        link: Option<&OwnedFd>,
        rings: bool,
    ) -> std::io::Result<Self> {
        let files: Vec<_> = identity
            .namespaces
            .iter()
            .map(|n| n.file().map_or(-1, |file| file.as_raw_fd()))
            // Last: nothing is done with it. The kernel lets go of a ring's files when all that was
            // under way has ended, which it does not wait for where it closes those of a process
            // that was killed.
            .chain(link.map(|link| link.as_raw_fd()))
            .collect();
        let ring = Ring::new(&files, &[shared.sleep.event.as_fd()])?;
        Ok(Self {
            remote: Remote::start(Arc::clone(&shared))?,
            files: NamespaceFiles::new(ring, Arc::clone(&identity)),
            state: State::Disabled,
            shutdown: Shutdown::Idle,
            stopping: false,
            view: KeptView::default(),
            queues: Queues::new(identity.io_queues),
            first: SqId::ADMIN,
            requests: Requests::default(),
            unsettled: VecDeque::new(),
            shadow: None,
            features: identity.default_features(),
            events: Events::default(),
            errors: ErrorLog::default(),
            idle: Idle::new(doorbells(rings)),
            put_off: false,
            segments: Vec::new(),
            shared,
            identity,
        })
    }

    /// Works until it is told to stop; nothing is in flight then.
    pub fn run(&mut self) {
        loop {
            let worked = match self.turn() {
                Ok(worked) => worked,
                Err(e) => {
                    self.ring_failed(&e);
                    // Whatever it was, it is not to be met again at full speed.
                    std::thread::sleep(Duration::from_millis(10));
                    false
                }
            };
            if self.stopping && self.state == State::Disabled {
                return;
            }
            if worked {
                self.idle.worked();
            } else if let Err(e) = self.rest() {
                self.ring_failed(&e);
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    fn ring_failed(&mut self, error: &std::io::Error) {
        let limit = &self.identity.limit;
        log_limited!(
            log::Level::Error,
            limit,
            "The controller's ring failed: {error}"
        );
        self.fail();
    }

    /// Gives turns until there is nothing to do and nothing in flight.
    pub fn settle_down(&mut self) -> std::io::Result<()> {
        while self.turn()?
            || self.shared.has_notices()
            || !self.remote.is_idle()
            || !self.requests.is_empty()
        {
            std::thread::yield_now();
        }
        // As before a wait.
        self.view.forget();
        Ok(())
    }

    /// One turn. Returns whether there was anything to do.
    fn turn(&mut self) -> std::io::Result<bool> {
        let mut worked = self.take_notices();
        self.view.drop_stale(&self.shared.dma);
        worked |= self.reap();
        if self.state == State::Running {
            worked |= self.flush_backlogs();
            worked |= self.take_commands();
            self.files.ring.submit()?;
            worked |= self.reap();
        } else {
            self.files.ring.submit()?;
        }
        worked |= self.settle();
        self.put_off = self.interrupt();
        Ok(worked)
    }

    fn take_notices(&mut self) -> bool {
        let notices = self.shared.take_notices();
        if notices.has(Notice::Stop) {
            self.stopping = true;
            self.begin_reset();
        }
        if notices.has(Notice::Control) {
            self.look_at_registers();
        }
        if notices.has(Notice::Pin) {
            self.evaluate_pin();
        }
        if notices.has(Notice::BadDoorbell) && self.state == State::Running {
            self.report(AsyncEvent::InvalidDoorbell);
        }
        notices.has(Notice::Control) || notices.has(Notice::Stop)
    }

    fn look_at_registers(&mut self) {
        let mut registers = self.shared.registers();
        if registers.take_reset() {
            drop(registers);
            self.begin_reset();
            return;
        }
        // What the driver asks for meanwhile is seen when it is over.
        if self.state == State::Resetting {
            return;
        }
        let shutdown = registers.take_shutdown();
        let enabled = registers.is_enabled();
        drop(registers);
        if self.state == State::Disabled && enabled && !self.stopping {
            self.enable();
        }
        if shutdown && !self.stopping {
            self.begin_shutdown();
        }
    }

    fn enable(&mut self) {
        let mut registers = self.shared.registers();
        let queues = registers.admin_queues().filter(|q| {
            let ends = |at: u64, entries: u32| at.checked_add(u64::from(entries) * 64).is_some();
            q.sq.is_multiple_of(PAGE) && ends(q.sq, q.sq_entries) && ends(q.cq, q.cq_entries)
        });
        let Some(queues) = queues else {
            warn_limited!(
                self.identity.limit,
                "The driver enables the controller with values that are not offered"
            );
            registers.failed();
            self.state = State::Failed;
            return;
        };
        self.shared.doorbells.clear();
        let cq = CompletionQueue::new(queues.cq, queues.cq_entries, Some(0));
        self.queues.create_cq(CqId::ADMIN, cq);
        let sq = SubmissionQueue::new(queues.sq, queues.sq_entries, CqId::ADMIN);
        self.queues.create_sq(SqId::ADMIN, sq);
        self.state = State::Running;
        registers.ready();
        log::debug!("Enabled: {queues:x?}");
    }

    /// What is under way ends, and nothing else is begun.
    fn begin_reset(&mut self) {
        self.state = State::Resetting;
        self.remote.drop_jobs(true);
    }

    /// Ends a reset once nothing is in flight any more. Returns whether it did.
    fn settle(&mut self) -> bool {
        if self.state != State::Resetting || !self.requests.is_empty() || !self.remote.is_idle() {
            return false;
        }
        self.queues.clear();
        self.shadow = None;
        self.features = self.identity.default_features();
        self.errors = ErrorLog::default();
        self.events = Events::default();
        self.shared.interrupts.clear_pending();
        self.view.forget();
        self.state = State::Disabled;
        self.remote.drop_jobs(false);
        let mut registers = self.shared.registers();
        registers.stopped();
        self.shared.settle();
        drop(registers);
        // It may have been enabled again meanwhile.
        self.look_at_registers();
        true
    }

    /// A fatal error: no further command is taken (CSTS.CFS).
    fn fail(&mut self) {
        if self.state == State::Running {
            self.state = State::Failed;
            self.shared.registers().failed();
        }
    }

    /// Memory as it is now.
    fn view(&mut self) -> Rc<DmaView> {
        self.view.get(&self.shared.dma)
    }

    /// There was nothing to do.
    fn rest(&mut self) -> std::io::Result<()> {
        // A controller that takes no commands waits for its registers to be written.
        let rest = match self.state {
            State::Running => self.idle.idle(),
            _ => Rest::Sleep(None),
        };
        match rest {
            Rest::Look => return Ok(()),
            Rest::Nap(_) | Rest::Sleep(_) if self.put_off => return self.sleep(Some(PUT_OFF_NAP)),
            Rest::Nap(limit) => self.sleep(Some(limit))?,
            Rest::Sleep(limit) => self.sleep(limit)?,
        }
        self.idle.woke();
        Ok(())
    }

    fn sleep(&mut self, limit: Option<Duration>) -> std::io::Result<()> {
        let arm = limit.is_none() && self.state == State::Running;
        if arm {
            self.arm_doorbells();
        }
        self.shared.sleep.announce();
        if !self.shared.has_notices() && !self.doorbells_rang() {
            self.view.forget();
            self.files.ring.wait(limit)?;
        }
        self.shared.woke();
        if arm {
            self.disarm_doorbells();
        }
        Ok(())
    }

    /// Reports an event to the driver.
    fn report(&mut self, event: AsyncEvent) {
        self.log_failure(&Failure {
            command: None,
            status: Status::INVALID_FIELD,
        });
        if let Some((cid, dword)) = self.events.report(event) {
            self.complete_event(cid, dword);
        }
    }

    /// Completes a held event request.
    fn complete_event(&mut self, cid: u16, dword: u32) {
        if let Some(sq) = self.queues.sq_mut(SqId::ADMIN) {
            sq.began();
        }
        let permit = Permit::new(CommandId::admin(cid));
        self.complete(permit, Status::SUCCESS, dword);
    }
}
