//! A queue in guest memory: what the driver makes available, and what it is shown.

use super::Broken;
use crate::bits::Status;
use crate::counters::count;
use crate::disk::Disk;
use crate::request::Request as Kind;
use farlane_abi::width::to_u64;
use farlane_daemon::warn_limited;
use farlane_sys::chain;
use farlane_vhost_user::call::Call;
use farlane_vhost_user::inflight::QueueInflight;
use farlane_vhost_user::session::Setup;
use farlane_vhost_user::vring::{Layout, Progress, RingError, Rings};
use farlane_zero_copy::slices::GuestByte;
use farlane_zero_copy::{AddressSpace, View};
use probe::probe;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// Turns with work after which memory is looked at anew: whoever changes it waits for as long.
const TURNS_WITH_VIEW: u32 = 64;

/// A request that the driver waits for: it is answered once.
#[must_use]
#[derive(Debug)]
pub struct Completion {
    head: u16,
    status: GuestByte<Rc<View>>,
    /// The request.
    pub kind: Kind,
    taken: Instant,
    is_answered: bool,
}

impl Completion {
    /// Keeps the guest's memory mapped.
    pub fn view(&self) -> &Rc<View> {
        self.status.holder()
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        debug_assert!(
            self.is_answered || std::thread::panicking(),
            "Request {} is not answered",
            self.head
        );
    }
}

/// A request that was taken: its first descriptor, and whether a predecessor has begun it.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    pub descriptor: u16,
    pub is_begun: bool,
    taken: Instant,
}

/// A request that has ended and is not in the used ring.
#[derive(Debug)]
struct Ended {
    head: u16,
    /// Bytes.
    written: u32,
    kind: Kind,
    taken: Instant,
}

/// A queue of the driver.
pub struct Virtqueue {
    pub index: u16,
    disk: Arc<Disk>,
    space: Arc<AddressSpace>,
    layout: Layout,
    call: Arc<Call>,
    error: Arc<Call>,
    inflight: Option<QueueInflight>,
    progress: Progress,
    /// The queue in memory; not kept over a wait. Requests keep what they began with.
    rings: Option<Rc<Rings>>,
    turns_with_view: u32,
    /// Heads that a predecessor has left.
    resubmit: VecDeque<u16>,
    /// Requests that are to be answered.
    taken: usize,
    ended: Vec<Ended>,
    /// When requests were taken since what has ended was shown last: one look at the clock.
    taking: Option<Instant>,
    batch: Vec<u16>,
    is_broken: bool,
}

impl Virtqueue {
    pub fn new(setup: Setup, disk: Arc<Disk>) -> Self {
        Self {
            index: setup.index,
            disk,
            space: setup.space,
            layout: setup.layout,
            call: setup.call,
            error: setup.error,
            inflight: setup.inflight,
            progress: Progress::new(setup.event_index, setup.next_available, 0),
            rings: None,
            turns_with_view: 0,
            resubmit: VecDeque::new(),
            taken: 0,
            ended: Vec::new(),
            taking: None,
            batch: Vec::new(),
            is_broken: false,
        }
    }

    /// Whether it is of no use any more.
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Whether nothing of it is left to be begun or shown. What a predecessor has begun is under
    /// way until it is done: a queue that is stopped before may be another driver's when it is
    /// started again.
    pub fn is_idle(&self) -> bool {
        let left = !self.is_broken && !self.resubmit.is_empty();
        self.taken == 0 && self.ended.is_empty() && !left
    }

    /// Finds out where the queue is, and what a predecessor has left.
    pub fn recover(&mut self) -> Result<(), Broken> {
        let rings = self.rings()?;
        let used = rings.used_index();
        let mut next_available = self.progress.next_available;
        if let Some(inflight) = &mut self.inflight {
            let left = inflight.recover(used);
            // Whatever was taken is either used or under way, so this is where the predecessor was;
            // the front-end of a backend that was killed does not know.
            next_available = left.iter().fold(used, |index, _| index.wrapping_add(1));
            if !left.is_empty() {
                let count = left.len();
                log::info!(
                    "Disk {}, queue {}: goes on with {count} requests",
                    self.disk.serial(),
                    self.index
                );
                crate::counters::count(&self.disk.counters().resubmitted, to_u64(count));
            }
            self.resubmit = left.into();
        }
        self.progress = Progress::new(self.progress.event_index, next_available, used);
        self.progress.will_look(&rings);
        Ok(())
    }

    /// No further request is taken.
    pub fn breaks(&mut self, why: &Broken) {
        if !std::mem::replace(&mut self.is_broken, true) {
            let limit = self.disk.limit();
            let (serial, index) = (self.disk.serial(), self.index);
            warn_limited!(limit, "Disk {serial}, queue {index}: {}", chain(why));
            self.error.signal();
        }
        // They will not become visible any more, where that is what failed.
        self.ended.clear();
    }

    /// Ends it. Returns the running number of the first buffer that was not taken.
    pub fn end(&mut self) -> u16 {
        if let Some(inflight) = self.inflight.as_mut().filter(|_| self.is_broken) {
            // A queue that is stopped has nothing under way. The driver resets it, or finds it as
            // it was: from its first request on that was not completed.
            inflight.forget();
        }
        self.progress.next_available
    }

    /// The queue in memory as it is now.
    pub fn rings(&mut self) -> Result<Rc<Rings>, RingError> {
        if let Some(rings) = &self.rings {
            return Ok(Rc::clone(rings));
        }
        let rings = Rc::new(Rings::map(self.space.view(), &self.layout)?);
        self.turns_with_view = 0;
        self.rings = Some(Rc::clone(&rings));
        Ok(rings)
    }

    /// A turn with work has ended.
    pub fn worked(&mut self) {
        self.turns_with_view += 1;
        if self.turns_with_view >= TURNS_WITH_VIEW {
            self.rings = None;
        }
    }

    /// Whether requests may be taken: those of a predecessor, or new ones.
    pub fn may_take(&self, stopping: bool) -> bool {
        !self.is_broken && (!stopping || !self.resubmit.is_empty())
    }

    /// Takes a request: one of a predecessor, then new ones unless the queue is stopping.
    pub fn take(&mut self, rings: &Rings, stopping: bool) -> Result<Option<Head>, RingError> {
        // A driver that reuses descriptors under way has more requests than descriptors.
        if self.taken + self.ended.len() >= usize::from(rings.size()) {
            return Ok(None);
        }
        if let Some(descriptor) = self.resubmit.pop_front() {
            return Ok(Some(self.head(descriptor, true)));
        }
        if stopping {
            return Ok(None);
        }
        let Some(descriptor) = self.progress.take(rings)? else {
            return Ok(None);
        };
        if let Some(inflight) = &mut self.inflight {
            inflight.begin(descriptor);
        }
        Ok(Some(self.head(descriptor, false)))
    }

    fn head(&mut self, descriptor: u16, is_begun: bool) -> Head {
        Head {
            descriptor,
            is_begun,
            taken: *self.taking.get_or_insert_with(Instant::now),
        }
    }

    /// A request is to be answered from now on.
    pub fn begin(&mut self, head: Head, status: GuestByte<Rc<View>>, kind: Kind) -> Completion {
        self.taken += 1;
        probe!(
            farlane,
            blk_begin,
            Arc::as_ptr(&self.disk),
            self.index,
            head.descriptor,
            kind.kind(),
            kind.bytes()
        );
        Completion {
            head: head.descriptor,
            status,
            kind,
            taken: head.taken,
            is_answered: false,
        }
    }

    /// Tells the guest how a request has ended; it sees it when the batch is [shown](Self::show).
    pub fn answer(&mut self, mut completion: Completion, status: Status, written: u32) {
        completion.is_answered = true;
        self.taken -= 1;
        probe!(
            farlane,
            blk_end,
            Arc::as_ptr(&self.disk),
            self.index,
            completion.head,
            status as u8
        );
        completion.status.store(status as u8);
        self.ended.push(Ended {
            head: completion.head,
            written: written + 1,
            kind: completion.kind,
            taken: completion.taken,
        });
    }

    /// Shows the driver what has ended.
    pub fn show(&mut self) -> Result<bool, Broken> {
        self.taking = None;
        if self.ended.is_empty() {
            return Ok(false);
        }
        let rings = self.rings()?;
        self.batch.clear();
        let (now, times) = (Instant::now(), self.disk.times());
        for ended in self.ended.drain(..) {
            let head = ended.head;
            if let Some(times) = times.of(&ended.kind) {
                times.add(now.saturating_duration_since(ended.taken));
            }
            self.progress.put(&rings, head, ended.written);
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

    /// The worker will sleep: asks the driver to tell of its next request. False if there is one.
    pub fn ask_to_be_told(&mut self) -> Result<bool, Broken> {
        let rings = self.rings()?;
        self.progress.ask_to_be_told(&rings);
        let has_room = self.taken < usize::from(rings.size());
        if has_room && self.progress.has_more(&rings) {
            self.progress.will_look(&rings);
            return Ok(false);
        }
        Ok(true)
    }

    /// Forgets where the queue is in memory.
    pub fn forget_rings(&mut self) {
        self.rings = None;
    }

    /// The worker looks again: the driver need not tell of requests.
    pub fn will_look(&mut self) -> Result<(), Broken> {
        let rings = self.rings()?;
        self.progress.will_look(&rings);
        Ok(())
    }
}
