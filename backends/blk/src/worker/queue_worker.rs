//! The turns of a worker.

use super::files::PathFiles;
use super::offload::Offload;
use super::requests::Requests;
use super::virtqueue::Virtqueue;
use super::{Broken, Task};
use crate::counters::count;
use crate::disk::Disk;
use crate::paths::ring::PathRing;
use crate::per_node::steering::Steering;
use farlane_block::ring::Event;
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::session::Setup;
use farlane_worker::idle::{Idle, Rest};
use farlane_worker::policy;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Most requests that are taken in one turn.
const AT_ONCE: usize = 64;
/// Pause after the ring has failed.
const PAUSE: Duration = Duration::from_millis(10);
/// How often a queue is looked at whose driver never tells of requests.
const LOOK: Duration = Duration::from_millis(1);
/// How often requests are looked at that wait for a path.
const LOOK_AT_STRANDED: Duration = Duration::from_millis(5);

/// The worker's side of a queue.
pub struct QueueWorker {
    pub(super) disk: Arc<Disk>,
    pub(super) writeback: Arc<AtomicBool>,
    stopping: Arc<AtomicBool>,
    pub(super) queue: Virtqueue,
    pub(super) files: PathFiles,
    pub(super) requests: Requests,
    /// The node that it runs on: its index.
    pub(super) home: usize,
    /// The nodes of the VM's memory; none on a machine with one node.
    pub(super) steering: Option<Steering>,
    /// Transfers at other nodes; none where there are no others.
    pub(super) offload: Option<Offload>,
    idle: Idle,
    /// When requests that wait for a path were looked at.
    looked: Instant,
    chain: Chain,
    /// How often a queue is looked at whose driver never tells.
    look: Option<Duration>,
}

impl QueueWorker {
    pub(super) fn new(setup: Setup, task: Task, wake: Arc<OwnedFd>) -> io::Result<Self> {
        let Task {
            disk,
            writeback,
            stopping,
            steering,
            home,
        } = task;
        let offload = Offload::new(&disk)?;
        let kicks: Vec<_> = setup
            .kick
            .iter()
            .chain([&*wake])
            .map(|fd| fd.as_fd())
            .chain(offload.as_ref().map(Offload::fd))
            .collect();
        let ring = PathRing::new(Arc::clone(disk.paths()), &kicks)?;
        Ok(Self {
            files: PathFiles::new(ring, Arc::clone(&disk), wake),
            requests: Requests::default(),
            home,
            steering,
            offload,
            idle: Idle::new(policy::REQUESTS),
            looked: Instant::now(),
            chain: Chain::default(),
            look: setup.kick.is_none().then_some(LOOK),
            queue: Virtqueue::new(setup, Arc::clone(&disk)),
            disk,
            writeback,
            stopping,
        })
    }

    /// Works until it is told to stop. Nothing is under way then. Returns the running number of the
    /// first buffer that was not taken.
    pub(super) fn run(&mut self) -> u16 {
        self.work();
        self.queue.end()
    }

    fn work(&mut self) {
        if let Err(e) = self.queue.recover() {
            self.queue.breaks(&e);
        }
        loop {
            let stopping = self.stopping.load(Ordering::Acquire);
            let result = self.turn(stopping).and_then(|worked| {
                if stopping && self.requests.slots.is_empty() && self.queue.is_idle() {
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
                    self.queue.breaks(&e);
                    if self.requests.slots.is_empty() && stopping {
                        return;
                    }
                    // Whatever it was, it is not to be met again at full speed.
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// One turn. Returns whether there was anything to do.
    fn turn(&mut self, stopping: bool) -> Result<bool, Broken> {
        let mut worked = self.reap();
        if self.queue.may_take(stopping) {
            worked |= self.take(stopping)?;
        }
        self.files.ring.submit()?;
        worked |= self.reap();
        worked |= self.queue.show()?;
        if worked {
            self.queue.worked();
        }
        Ok(worked)
    }

    /// Takes what the ring and other nodes have done.
    fn reap(&mut self) -> bool {
        let mut worked = false;
        while let Some(event) = self.files.ring.take_event() {
            match event {
                Event::Kick => count(&self.disk.counters().kicks, 1),
                Event::Done { slot, result } => {
                    worked = true;
                    self.ended(slot, result);
                }
            }
        }
        while let Some(offload) = &mut self.offload
            && let Some((slot, result)) = offload.take(&mut self.requests)
        {
            worked = true;
            self.ended(slot, result);
        }
        if !self.requests.unsettled.is_empty() {
            worked |= self.look_at_unsettled();
        }
        if !self.requests.stranded.is_empty() && self.looked.elapsed() >= LOOK_AT_STRANDED {
            worked |= self.look_at_stranded();
            self.looked = Instant::now();
        }
        worked
    }

    /// Takes requests. Returns whether there were any.
    fn take(&mut self, stopping: bool) -> Result<bool, Broken> {
        let rings = self.queue.rings()?;
        for taken in 0..AT_ONCE {
            let Some(head) = self.queue.take(&rings, stopping)? else {
                return Ok(taken > 0);
            };
            let mut chain = std::mem::take(&mut self.chain);
            let result = self.start(&rings, head, &mut chain);
            self.chain = chain;
            result?;
        }
        Ok(true)
    }

    /// There was nothing to do.
    fn rest(&mut self, stopping: bool) -> Result<(), Broken> {
        let limit = match self.idle.idle() {
            Rest::Look => return Ok(()),
            Rest::Nap(limit) => Some(limit),
            Rest::Sleep(limit) => limit,
        };
        self.sleep(stopping, limit)?;
        self.idle.woke();
        Ok(())
    }

    /// Waits for a driver that tells of a request, for the ring, or to be told to stop, or until
    /// `limit` is over.
    fn sleep(&mut self, stopping: bool, limit: Option<Duration>) -> Result<(), Broken> {
        let takes = !stopping && !self.queue.is_broken();
        if takes && !self.queue.ask_to_be_told()? {
            return Ok(());
        }
        self.queue.forget_rings();
        // A driver that never tells is looked after, and so are requests that wait for a path.
        let look = self.look.filter(|_| takes);
        let stranded = (!self.requests.stranded.is_empty()).then_some(LOOK_AT_STRANDED);
        let limit = look.into_iter().chain(stranded).chain(limit).min();
        let may_sleep = self.offload.as_mut().is_none_or(Offload::announce);
        let waited = if may_sleep {
            self.files.ring.wait(limit)
        } else {
            Ok(())
        };
        if let Some(offload) = &mut self.offload {
            offload.awake();
        }
        waited?;
        if takes {
            self.queue.will_look()?;
        }
        Ok(())
    }
}
