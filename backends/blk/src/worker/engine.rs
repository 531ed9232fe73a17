//! The turns of a worker.

use super::handing::Handing;
use super::requests::Requests;
use super::{Broken, Task};
use crate::counters::count;
use crate::disk::Disk;
use crate::limb::steering::Steering;
use crate::paths::Paths;
use crate::paths::ring::PathRing;
use farlane_block::ring::Event;
use farlane_daemon::warn_limited;
use farlane_sys::chain;
use farlane_vhost_user::call::Call;
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::inflight::QueueInflight;
use farlane_vhost_user::session::Setup;
use farlane_vhost_user::vring::{Layout, Progress, RingError, Rings};
use farlane_worker::idle::{Idle, Rest};
use farlane_zero_copy::AddressSpace;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Most requests that are taken in one turn.
const AT_ONCE: usize = 64;
/// Turns with work after which memory is looked at anew: whoever changes it waits for as long.
const TURNS_WITH_VIEW: u32 = 64;
/// Pause after the ring has failed.
const PAUSE: Duration = Duration::from_millis(10);
/// How often a queue is looked at whose driver never tells of requests.
const LOOK: Duration = Duration::from_millis(1);
/// How often requests are looked at that wait for a path.
const LOOK_AT_STRANDED: Duration = Duration::from_millis(5);

/// The worker's side of a queue.
pub(super) struct Engine {
    pub(super) index: u16,
    pub(super) disk: Arc<Disk>,
    space: Arc<AddressSpace>,
    layout: Layout,
    call: Arc<Call>,
    error: Arc<Call>,
    pub(super) writeback: Arc<AtomicBool>,
    stopping: Arc<AtomicBool>,
    inflight: Option<QueueInflight>,
    pub(super) paths: Arc<Paths>,
    pub(super) ring: PathRing,
    /// Wakes it.
    pub(super) wake: Arc<OwnedFd>,
    /// Its limb.
    pub(super) home: usize,
    /// The nodes of the VM's memory; none on a machine with one node.
    pub(super) steering: Option<Steering>,
    /// Transfers at other limbs; none where there are no others.
    pub(super) handing: Option<Handing>,
    idle: Idle,
    progress: Progress,
    /// The queue in memory; not kept over a wait. Requests keep what they began with.
    pub(super) rings: Option<Rc<Rings>>,
    turns_with_view: u32,
    pub(super) requests: Requests,
    /// Heads that a predecessor has left.
    resubmit: VecDeque<u16>,
    /// Requests of the driver among them: one that was split has several places.
    pub(super) taken: usize,
    /// Requests that wait for room for a copy, and how many have one.
    pub(super) waiting: VecDeque<usize>,
    pub(super) copying: usize,
    /// Requests that wait for syncs of others to end.
    pub(super) unsettled: VecDeque<usize>,
    /// Requests that wait for a path, and when they were looked at.
    pub(super) stranded: VecDeque<usize>,
    looked: Instant,
    /// Requests that have ended and are not in the used ring: first descriptor, bytes written.
    pub(super) ended: Vec<(u16, u32)>,
    batch: Vec<u16>,
    chain: Chain,
    broken: bool,
    /// How often a queue is looked at whose driver never tells.
    look: Option<Duration>,
}

impl Engine {
    pub(super) fn new(setup: Setup, task: Task, wake: Arc<OwnedFd>) -> io::Result<Self> {
        let Task {
            disk,
            writeback,
            stopping,
            steering,
            home,
        } = task;
        let handing = Handing::new(&disk)?;
        let kicks: Vec<_> = setup
            .kick
            .iter()
            .chain([&*wake])
            .map(|fd| fd.as_fd())
            .chain(handing.as_ref().map(Handing::fd))
            .collect();
        let paths = Arc::clone(disk.paths());
        Ok(Self {
            ring: PathRing::new(Arc::clone(&paths), &kicks)?,
            paths,
            wake,
            home,
            steering,
            handing,
            idle: Idle::new(true),
            progress: Progress::new(setup.event_index, setup.next_available, 0),
            index: setup.index,
            disk,
            space: setup.space,
            layout: setup.layout,
            call: setup.call,
            error: setup.error,
            writeback,
            stopping,
            inflight: setup.inflight,
            rings: None,
            turns_with_view: 0,
            requests: Requests::default(),
            resubmit: VecDeque::new(),
            taken: 0,
            waiting: VecDeque::new(),
            copying: 0,
            unsettled: VecDeque::new(),
            stranded: VecDeque::new(),
            looked: Instant::now(),
            ended: Vec::new(),
            batch: Vec::new(),
            chain: Chain::default(),
            broken: false,
            look: setup.kick.is_none().then_some(LOOK),
        })
    }

    /// Works until it is told to stop. Nothing is under way then.
    pub(super) fn run(&mut self) -> u16 {
        self.work();
        if let Some(inflight) = self.inflight.as_mut().filter(|_| self.broken) {
            // A queue that is stopped has nothing under way. The driver resets it, or finds it as
            // it was: from its first request on that was not completed.
            inflight.forget();
        }
        self.progress.next_available
    }

    fn work(&mut self) {
        if let Err(e) = self.recover() {
            self.breaks(&e);
        }
        loop {
            let stopping = self.stopping.load(Ordering::Acquire);
            let result = self.turn(stopping).and_then(|worked| {
                if stopping && self.is_idle() {
                    return Ok(true);
                }
                if worked {
                    self.idle.worked();
                } else {
                    self.rest(stopping)?;
                }
                Ok(false)
            });
            match result {
                Ok(true) => return,
                Ok(false) => (),
                Err(e) => {
                    self.breaks(&e);
                    if self.requests.is_empty() && stopping {
                        return;
                    }
                    // Whatever it was, it is not to be met again at full speed.
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Whether nothing is under way. What a predecessor has begun is under way until it is done: a
    /// queue that is stopped before may be another driver's when it is started again.
    fn is_idle(&self) -> bool {
        let left = !self.broken && !self.resubmit.is_empty();
        self.requests.is_empty() && self.ended.is_empty() && !left
    }

    /// Finds out where the queue is, and what a predecessor has left.
    fn recover(&mut self) -> Result<(), Broken> {
        let rings = self.rings()?;
        let used = rings.used_index();
        let mut next_available = self.progress.next_available;
        if let Some(inflight) = &mut self.inflight {
            let left = inflight.recover(used);
            // Whatever was taken is either used or under way, so this is where the predecessor was;
            // the front-end of a backend that was killed does not know.
            let count = u16::try_from(left.len()).unwrap_or(0);
            next_available = used.wrapping_add(count);
            if count > 0 {
                log::info!(
                    "Disk {}, queue {}: goes on with {count} requests",
                    self.disk.serial(),
                    self.index
                );
                crate::counters::count(&self.disk.counters().resubmitted, count.into());
            }
            self.resubmit = left.into();
        }
        self.progress = Progress::new(self.progress.event_index, next_available, used);
        self.progress.will_look(&rings);
        Ok(())
    }

    /// No further request is taken.
    fn breaks(&mut self, why: &Broken) {
        if !std::mem::replace(&mut self.broken, true) {
            let limit = self.disk.limit();
            let (serial, index) = (self.disk.serial(), self.index);
            warn_limited!(limit, "Disk {serial}, queue {index}: {}", chain(why));
            self.error.signal();
        }
        // They will not become visible any more, where that is what failed.
        self.ended.clear();
    }

    /// The queue in memory as it is now.
    fn rings(&mut self) -> Result<Rc<Rings>, RingError> {
        if let Some(rings) = &self.rings {
            return Ok(Rc::clone(rings));
        }
        let rings = Rc::new(Rings::map(self.space.view(), &self.layout)?);
        self.turns_with_view = 0;
        self.rings = Some(Rc::clone(&rings));
        Ok(rings)
    }

    /// One turn. Returns whether there was anything to do.
    fn turn(&mut self, stopping: bool) -> Result<bool, Broken> {
        let mut worked = self.reap()?;
        if !self.broken {
            worked |= self.take(stopping)?;
        }
        self.ring.submit()?;
        worked |= self.reap()?;
        worked |= self.show()?;
        if worked {
            self.turns_with_view += 1;
            if self.turns_with_view >= TURNS_WITH_VIEW {
                self.rings = None;
            }
        }
        Ok(worked)
    }

    /// Takes what the ring has done.
    fn reap(&mut self) -> Result<bool, Broken> {
        let mut worked = false;
        while let Some(event) = self.ring.take_event() {
            match event {
                Event::Kick => count(&self.disk.counters().kicks, 1),
                Event::Done { slot, result } => {
                    worked = true;
                    if let Some(mut request) = self.requests.take(slot) {
                        let step = self.stepped(slot, &mut request, result);
                        self.after(slot, request, step);
                    }
                }
            }
        }
        if self.handing.is_some() {
            worked |= self.take_answers();
        }
        if !self.unsettled.is_empty() {
            worked |= self.look_at_unsettled();
        }
        if !self.stranded.is_empty() && self.looked.elapsed() >= LOOK_AT_STRANDED {
            worked |= self.look_at_stranded();
            self.looked = Instant::now();
        }
        Ok(worked)
    }

    /// Takes requests: those of a predecessor, then new ones unless the queue is stopping.
    fn take(&mut self, stopping: bool) -> Result<bool, Broken> {
        if stopping && self.resubmit.is_empty() {
            return Ok(false);
        }
        let rings = self.rings()?;
        let mut worked = false;
        for _ in 0..AT_ONCE {
            // A driver that reuses descriptors under way has more requests than descriptors.
            if self.taken + self.ended.len() >= usize::from(rings.size()) {
                break;
            }
            let mut is_begun = false;
            let head = match self.resubmit.pop_front() {
                Some(head) => {
                    is_begun = true;
                    head
                }
                None if stopping => break,
                None => match self.progress.take(&rings)? {
                    None => break,
                    Some(head) => {
                        if let Some(inflight) = &mut self.inflight {
                            inflight.begin(head);
                        }
                        head
                    }
                },
            };
            worked = true;
            let mut chain = std::mem::take(&mut self.chain);
            let result = self.start(&rings, head, is_begun, &mut chain);
            self.chain = chain;
            result?;
        }
        Ok(worked)
    }

    /// Shows the driver what has ended.
    fn show(&mut self) -> Result<bool, Broken> {
        if self.ended.is_empty() {
            return Ok(false);
        }
        let rings = self.rings()?;
        self.batch.clear();
        for (head, written) in self.ended.drain(..) {
            self.progress.put(&rings, head, written);
            if let Some(inflight) = &mut self.inflight {
                inflight.prepare(head);
                self.batch.push(head);
            }
        }
        self.progress.publish(&rings);
        if let Some(inflight) = &mut self.inflight {
            inflight.end(&self.batch, self.progress.next_used);
        }
        if self.progress.must_tell(&rings) && self.call.signal() {
            count(&self.disk.counters().interrupts, 1);
        }
        Ok(true)
    }

    /// There was nothing to do.
    fn rest(&mut self, stopping: bool) -> Result<(), Broken> {
        match self.idle.idle() {
            Rest::Look => Ok(()),
            // A driver that has to tell of a request writes an eventfd: that costs less than
            // looking again and again, and wakes at once.
            Rest::Nap(_) | Rest::Sleep => self.sleep(stopping),
        }
    }

    /// Waits for a driver that tells of a request, for the ring, or to be told to stop.
    fn sleep(&mut self, stopping: bool) -> Result<(), Broken> {
        let takes = !stopping && !self.broken;
        if takes {
            let rings = self.rings()?;
            self.progress.ask_to_be_told(&rings);
            let has_room = self.taken < usize::from(rings.size());
            if has_room && self.progress.has_more(&rings) {
                self.progress.will_look(&rings);
                return Ok(());
            }
        }
        self.rings = None;
        // A driver that never tells is looked after, and so are requests that wait for a path.
        let look = self.look.filter(|_| takes);
        let stranded = (!self.stranded.is_empty()).then_some(LOOK_AT_STRANDED);
        let limit = look.into_iter().chain(stranded).min();
        let may_sleep = self.handing.as_mut().is_none_or(Handing::announce);
        let waited = if may_sleep {
            self.ring.wait(limit)
        } else {
            Ok(())
        };
        if let Some(handing) = &mut self.handing {
            handing.awake();
        }
        waited?;
        if takes {
            let rings = self.rings()?;
            self.progress.will_look(&rings);
        }
        Ok(())
    }
}
