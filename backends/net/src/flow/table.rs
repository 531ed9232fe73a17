//! The flow table: which worker gets a frame next (IOctoRFS, ioctopus-asplos20, 3.3 and 4.2).

use super::course::{Course, Dropped, Moment, Patience, Step};
use super::hash::{KeyedHash, Scaling};
use super::key::FlowKey;
use super::parse::{Parsed, Signal};
use super::shard::{Named, Promotion, Shard, Slot};
use super::votes::{Pace, Votes};
use super::wishes::{Rule, Wishes};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

/// Parts of the table, each with a lock of its own.
const SHARDS: usize = 64;

/// Entries that a [`tick`](FlowTable::tick) looks at.
const TICK_STEPS: usize = 8;

/// Wishes that the port is asked for in one turn of a worker, whose frames wait meanwhile.
const WISHES_AT_ONCE: usize = 64;

/// Frames in each direction that make a flow established. Of TCP those count that neither open a connection nor end one: what a
/// sender under another's name has the guest say, however often.
const ESTABLISHED: u8 = 2;

/// Whether a frame counts.
fn counts(signal: Signal) -> bool {
    !matches!(signal, Signal::Open | Signal::Close)
}

/// Groups of unknown flows, in a part.
const STRANGERS: usize = 512;

/// Microseconds after which nothing of a frame is under way any more.
const LONG_AGO_US: u64 = 1_000_000;

/// No queue.
const NONE: u16 = u16::MAX;

/// Where flows of which the guest has sent nothing go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Into the queue of the worker that reads them: the port has spread them.
    Arrival,
    /// Into a queue by their hash: the port has fewer queues than the guest.
    Hash,
}

/// What a table is made with.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Queue pairs of the device.
    pub queues: u16,
    /// Flows that are known at most.
    pub capacity: usize,
    /// Where unknown flows go.
    pub placement: Placement,
    /// Microseconds after which a flow of which nothing is seen is forgotten.
    pub idle_us: u64,
    /// How fast a flow follows its process.
    pub pace: Pace,
    /// How long it may be held for that.
    pub patience: Patience,
}

impl Settings {
    /// The usual for so many queue pairs: 65,536 flows, forgotten after 30 s.
    #[must_use]
    pub fn usual(queues: u16, placement: Placement) -> Self {
        Self {
            queues,
            capacity: 1 << 16,
            placement,
            idle_us: 30_000_000,
            pace: Pace::default(),
            patience: Patience::default(),
        }
    }
}

/// Names the flow of a frame that is under way between workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    shard: u16,
    slot: Slot,
    /// End of the frame's segment.
    end: Option<u32>,
    /// Who has read it.
    from: u16,
}

/// What a worker is to do with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Put it into the worker's own receive queue, before any other frame, or throw it away.
    Deliver,
    /// Send it to another worker, in order.
    Forward {
        /// The worker.
        to: u16,
        /// What that one is to do.
        task: Task,
    },
    /// Keep it: the flow is moving. After reading anew what the driver has consumed of queue `on`, [`FlowTable::retry`].
    Hold {
        /// The flow.
        ticket: Ticket,
        /// The queue that has to drain.
        on: u16,
    },
}

/// What a worker is to do with a frame that another has sent to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Put it into its own receive queue, then [`FlowTable::delivered`].
    Deliver(Ticket),
    /// The same, of a flow that the table does not know: nothing to say afterwards.
    Stray,
    /// Read its own port queue until that is empty, then [`FlowTable::sequenced`].
    Sequence(Ticket),
    /// Held by itself.
    Held(Ticket),
}

/// What is kept of a flow.
#[derive(Clone, Copy, Debug)]
struct Flow {
    course: Course,
    votes: Votes,
    received: u8,
    sent: u8,
    /// The port's queue that was last asked for: the port has it, or the wish waits.
    rule: u16,
}

impl Flow {
    fn new(course: Course) -> Self {
        Self {
            course,
            votes: Votes::default(),
            received: 0,
            sent: 0,
            rule: NONE,
        }
    }
}

/// Counts of what the table has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Flows known now.
    pub flows: u64,
    /// Those of them that are established.
    pub established: u64,
    /// Moves that were begun.
    pub moves: u64,
    /// Flows that were forgotten, to make room or because they were idle.
    pub forgotten: u64,
    /// Flows for which there was no room.
    pub refused: u64,
}

/// A part of the table.
struct Part {
    flows: Shard<Flow>,
    /// When a flow that is not known was last seen to arrive, in microseconds, by some bits of its hash; zero: never.
    strangers: Box<[u64; STRANGERS]>,
}

impl Part {
    fn stranger(&mut self, within: u32) -> Option<&mut u64> {
        let index = usize::try_from(within >> 16).ok()?;
        self.strangers.get_mut(index % STRANGERS)
    }
}

/// The table, shared by all workers.
pub struct FlowTable {
    settings: Settings,
    shards: Box<[Mutex<Part>]>,
    hash: KeyedHash,
    active: AtomicU16,
    consumed: Box<[AtomicU64]>,
    /// Only while a driver has configured it; `scaled` says so without the lock.
    scaling: RwLock<Option<Scaling>>,
    scaled: AtomicBool,
    wishes: Wishes,
    /// Queues of the port that flows can be steered to.
    port_queues: AtomicU16,
    moves: AtomicU64,
    forgotten: AtomicU64,
    refused: AtomicU64,
    next_shard: AtomicUsize,
}

impl FlowTable {
    /// An empty table. All queue pairs are in use.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self::with_hash(settings, KeyedHash::default())
    }

    /// An empty table with a hash of the caller's, for fuzz targets.
    #[doc(hidden)]
    #[must_use]
    pub fn with_hash(settings: Settings, hash: KeyedHash) -> Self {
        let each = settings.capacity.div_ceil(SHARDS);
        Self {
            shards: (0..SHARDS)
                .map(|_| {
                    Mutex::new(Part {
                        flows: Shard::new(each),
                        strangers: Box::new([0; STRANGERS]),
                    })
                })
                .collect(),
            hash,
            active: AtomicU16::new(settings.queues.max(1)),
            consumed: (0..settings.queues.max(1))
                .map(|_| AtomicU64::new(0))
                .collect(),
            scaling: RwLock::new(None),
            scaled: AtomicBool::new(false),
            wishes: Wishes::default(),
            port_queues: AtomicU16::new(settings.queues),
            moves: AtomicU64::new(0),
            forgotten: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            next_shard: AtomicUsize::new(0),
            settings,
        }
    }

    /// The driver uses so many queue pairs from now on.
    pub fn set_queues(&self, active: u16) {
        self.active.store(
            active.clamp(1, self.settings.queues.max(1)),
            Ordering::Release,
        );
    }

    /// The driver wants frames placed by its own rule (virtio 1.2, 5.1.6.5.6), or no longer. While it does, nothing is learned.
    pub fn set_scaling(&self, scaling: Option<Scaling>) {
        let mut place = self.scaling.write().unwrap_or_else(PoisonError::into_inner);
        self.scaled.store(scaling.is_some(), Ordering::Release);
        *place = scaling;
    }

    /// The port has no way to steer flows: no wishes from now on.
    pub fn port_cannot_steer(&self) {
        self.port_queues.store(0, Ordering::Release);
    }

    /// The port can steer flows to its first so many queues.
    pub fn port_steers(&self, queues: u16) {
        self.port_queues.store(queues, Ordering::Release);
    }

    /// The driver has consumed so many of the used elements of a receive queue, counted from its beginning, without wrapping.
    pub fn set_consumed(&self, queue: u16, position: u64) {
        if let Some(place) = self.consumed.get(usize::from(queue)) {
            place.fetch_max(position, Ordering::AcqRel);
        }
    }

    /// Queues begin anew (the device was reset): all flows are forgotten, and what the port was asked for, too; positions begin at zero.
    pub fn reset(&self) {
        for shard in &self.shards {
            lock(shard).flows.clear(|_, _| self.count_forgotten());
        }
        self.wishes.clear();
        for place in &self.consumed {
            place.store(0, Ordering::Release);
        }
        self.set_scaling(None);
    }

    /// A frame that a worker has read from its port queue. `next`: the position in its receive queue that the frame would end at.
    pub fn received(&self, worker: u16, frame: &Parsed, next: u64, now_us: u64) -> Route {
        let active = self.active.load(Ordering::Acquire);
        let Some(key) = frame.flow else {
            return self.stray(worker, 0, active);
        };
        let hash = self.hash.flow(&key);
        let (number, within) = split(hash);
        let mut part = self.shard(number);
        let at = Moment {
            worker,
            // A queue that is not in use has no positions.
            next: if worker < active { next } else { 0 },
            now: now_us,
        };
        let slot = match part.flows.find(&key, within) {
            Some(slot) => slot,
            None => {
                let target = self.place(&key, hash, worker, active);
                let known = if target == worker {
                    None
                } else {
                    self.insert(&mut part, key, within, target, now_us)
                };
                let Some(slot) = known else {
                    // Every frame of the flow goes this way, as long as it is not known.
                    if let Some(seen) = part.stranger(within) {
                        *seen = now_us.max(1);
                    }
                    return self.stray(worker, worker % active, active);
                };
                slot
            }
        };
        let shard = &mut part.flows;
        let promote = match shard.get(slot, now_us) {
            Some((_, flow)) if counts(frame.signal) => {
                flow.received = flow.received.saturating_add(1);
                flow.received == ESTABLISHED && flow.sent >= ESTABLISHED
            }
            _ => false,
        };
        if promote {
            self.promote(shard, slot);
        }
        let end = frame.sequence.map(|sequence| sequence.end);
        let ticket = Ticket {
            shard: number,
            slot,
            end,
            from: worker,
        };
        self.step(shard, ticket, at, |course, patience, consumed| {
            course.received(at, end, patience, consumed)
        })
    }

    /// A frame that came with [`Task::Sequence`], once the worker has seen its own port queue empty.
    pub fn sequenced(&self, worker: u16, ticket: Ticket, next: u64, now_us: u64) -> Route {
        let mut shard = self.shard(ticket.shard);
        let at = Moment {
            worker,
            next,
            now: now_us,
        };
        self.step(
            &mut shard.flows,
            ticket,
            at,
            |course, patience, consumed| {
                course.sequenced(at, ticket.from, ticket.end, patience, consumed)
            },
        )
    }

    /// The oldest frame of a flow that the worker holds: may it go?
    pub fn retry(&self, worker: u16, ticket: Ticket, next: u64, now_us: u64) -> Route {
        let mut shard = self.shard(ticket.shard);
        let at = Moment {
            worker,
            next,
            now: now_us,
        };
        self.step(
            &mut shard.flows,
            ticket,
            at,
            |course, patience, consumed| course.retried(at, ticket.end, patience, consumed),
        )
    }

    /// A frame that came with [`Task::Deliver`] is in the worker's queue and ends at this position, or was thrown away.
    pub fn delivered(&self, ticket: Ticket, position: u64) {
        let mut shard = self.shard(ticket.shard);
        if let Some((_, flow)) = shard.flows.peek(ticket.slot) {
            flow.course.delivered(position);
        }
    }

    /// A frame with a task was thrown away.
    pub fn dropped(&self, task: Task) {
        let (ticket, how) = match task {
            Task::Stray => return,
            Task::Deliver(ticket) => (ticket, Dropped::Forwarded),
            Task::Sequence(ticket) => (ticket, Dropped::Sequenced),
            Task::Held(ticket) => (ticket, Dropped::Held),
        };
        let mut shard = self.shard(ticket.shard);
        if let Some((_, flow)) = shard.flows.peek(ticket.slot) {
            flow.course.dropped(how);
        }
    }

    /// A frame that the guest has sent on a queue.
    pub fn transmitted(&self, queue: u16, frame: &Parsed, now_us: u64) {
        let active = self.active.load(Ordering::Acquire);
        let Some(key) = frame.flow.map(FlowKey::reversed) else {
            return;
        };
        if queue >= active {
            return;
        }
        let hash = self.hash.flow(&key);
        let (number, within) = split(hash);
        let mut part = self.shard(number);
        let scaled = self.scaled.load(Ordering::Acquire);
        let Some(slot) = part.flows.find(&key, within) else {
            if !scaled
                && frame.signal != Signal::Close
                && let Some(slot) = self.insert(&mut part, key, within, queue, now_us)
                && let Some((_, flow)) = part.flows.peek(slot)
            {
                flow.sent = u8::from(counts(frame.signal));
            }
            return;
        };
        let shard = &mut part.flows;
        let Some((_, flow)) = shard.get(slot, now_us) else {
            return;
        };
        let mut promote = false;
        if counts(frame.signal) {
            flow.sent = flow.sent.saturating_add(1);
            promote = flow.sent == ESTABLISHED && flow.received >= ESTABLISHED;
        }
        if let Some(number) = frame.sequence.and_then(|sequence| sequence.acknowledges) {
            flow.course.acknowledged(number);
        }
        if !scaled {
            let pace = &self.settings.pace;
            let home = flow.course.target();
            let vote = if frame.signal == Signal::Open {
                // A connection begins: nothing of it has come.
                (home != queue).then_some(queue)
            } else {
                flow.votes.count(home, queue, frame.signal, now_us, pace)
            };
            if let Some(queue) = vote {
                flow.course.aim(queue);
                self.moves.fetch_add(1, Ordering::Relaxed);
            }
        }
        if promote {
            self.promote(shard, slot);
        }
    }

    /// Forgets what is idle, a few entries at a time. For every worker, once in a while.
    pub fn tick(&self, now_us: u64) {
        let number = self.next_shard.fetch_add(1, Ordering::Relaxed) % SHARDS;
        let Some(shard) = self.shards.get(number) else {
            return;
        };
        // Whoever has the lock is busy with the shard; there will be another tick.
        let Ok(mut shard) = shard.try_lock() else {
            return;
        };
        shard.flows.expire(
            TICK_STEPS,
            now_us,
            self.settings.idle_us,
            |flow, seen_us| self.spare(flow, seen_us, now_us),
            |key, flow| self.forget(key, flow),
        );
    }

    /// Asks the port, `steer(flow, queue)`, for what would spare handing over: frames of a flow from a queue, or from any (`None`).
    /// `false`: it cannot at all, and is not asked any more. What it refuses is asked for again later. Returns whether there is more
    /// to be asked for now.
    ///
    /// # Errors
    /// The first that the port has had.
    pub fn steer(
        &self,
        now_us: u64,
        mut steer: impl FnMut(&FlowKey, Option<u16>) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let Some(_turn) = self.wishes.turn(now_us) else {
            return Ok(false);
        };
        let mut result = Ok(());
        for _ in 0..WISHES_AT_ONCE {
            let Some(wish) = self.wishes.take() else {
                break;
            };
            let queue = match wish.rule {
                Rule::Set { to, .. } => Some(to),
                Rule::TakeBack => None,
            };
            let error = match steer(&wish.flow, queue) {
                Ok(true) => continue,
                Ok(false) => {
                    self.port_cannot_steer();
                    continue;
                }
                Err(error) => error,
            };
            self.wishes.pause(now_us);
            match wish.rule {
                Rule::Set { to, from } => self.refused(&wish.flow, to, from),
                Rule::TakeBack => {
                    // The flow may be forgotten: nobody else will say so again.
                    self.wishes.put_back(wish);
                    return Err(error);
                }
            }
            result = result.and(Err(error));
        }
        result.map(|()| self.wishes.are_due(now_us))
    }

    /// The port has not taken the rule of a flow, and keeps the one before.
    fn refused(&self, key: &FlowKey, to: u16, from: Option<u16>) {
        let (number, within) = split(self.hash.flow(key));
        let mut part = self.shard(number);
        if let Some(slot) = part.flows.find(key, within)
            && let Some((_, flow)) = part.flows.peek(slot)
            && flow.rule == to
        {
            flow.rule = from.unwrap_or(NONE);
        }
    }

    /// What the table has done, and how full it is.
    #[must_use]
    pub fn census(&self) -> Census {
        let mut census = Census {
            moves: self.moves.load(Ordering::Relaxed),
            forgotten: self.forgotten.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            ..Census::default()
        };
        for shard in &self.shards {
            let shard = lock(shard);
            census.flows += u64::try_from(shard.flows.len()).unwrap_or(u64::MAX);
            census.established += u64::try_from(shard.flows.protected()).unwrap_or(u64::MAX);
        }
        census
    }

    /// Takes a step of a flow's course, and asks the port for what would spare the next one.
    fn step(
        &self,
        shard: &mut Shard<Flow>,
        ticket: Ticket,
        at: Moment,
        take: impl FnOnce(&mut Course, &Patience, &dyn Fn(u16) -> u64) -> Step,
    ) -> Route {
        let active = self.active.load(Ordering::Acquire);
        let established = shard.is_protected(ticket.slot);
        let Some((key, flow)) = shard.get(ticket.slot, at.now) else {
            return self.stray(at.worker, 0, active);
        };
        if self.scaled.load(Ordering::Acquire) {
            flow.course
                .aim(self.scaled_queue(key).unwrap_or(0) % active);
        } else if flow.course.target() >= active {
            flow.course.aim(flow.course.target() % active);
        }
        if at.worker < active
            && flow
                .course
                .sequencer()
                .is_some_and(|sequencer| sequencer >= active)
        {
            flow.course.release();
        }
        let consumed = |queue: u16| self.consumed(queue, active);
        let step = take(&mut flow.course, &self.settings.patience, &consumed);
        if established
            && !flow.course.is_moving()
            && let (Some(home), Some(sequencer)) = (flow.course.home(), flow.course.sequencer())
            && home != sequencer
            && home != flow.rule
            && home < self.port_queues.load(Ordering::Acquire)
            && (flow.rule == NONE || flow.rule == sequencer)
            && self
                .wishes
                .set(*key, home, (flow.rule != NONE).then_some(flow.rule), at.now)
        {
            flow.rule = home;
        }
        match step {
            Step::Deliver => Route::Deliver,
            Step::Forward(to) => Route::Forward {
                to,
                task: Task::Deliver(ticket),
            },
            Step::Sequence(to) => Route::Forward {
                to,
                task: Task::Sequence(ticket),
            },
            Step::Hold(on) => Route::Hold { ticket, on },
        }
    }

    fn consumed(&self, queue: u16, active: u16) -> u64 {
        if queue >= active {
            // Nothing waits in a queue that is not in use.
            return u64::MAX;
        }
        self.consumed
            .get(usize::from(queue))
            .map_or(u64::MAX, |place| place.load(Ordering::Acquire))
    }

    fn stray(&self, worker: u16, to: u16, active: u16) -> Route {
        if worker < active {
            Route::Deliver
        } else {
            Route::Forward {
                to,
                task: Task::Stray,
            }
        }
    }

    /// The queue of a flow of which the guest has sent nothing.
    fn place(&self, key: &FlowKey, hash: u64, worker: u16, active: u16) -> u16 {
        if let Some(queue) = self.scaled_queue(key) {
            return queue % active;
        }
        match self.settings.placement {
            Placement::Arrival if worker < active => worker,
            _ => u16::try_from((hash >> 32) % u64::from(active)).unwrap_or(0),
        }
    }

    fn scaled_queue(&self, key: &FlowKey) -> Option<u16> {
        if !self.scaled.load(Ordering::Acquire) {
            return None;
        }
        self.scaling
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(|scaling| scaling.queue(key))
    }

    /// Makes a flow known, that is to have this home.
    fn insert(
        &self,
        part: &mut Part,
        key: FlowKey,
        within: u32,
        target: u16,
        now_us: u64,
    ) -> Option<Slot> {
        let source = self.hash.source(&key).to_le_bytes()[0];
        let seen = part.stranger(within).map_or(0, |seen| *seen);
        let course = if seen == 0 || now_us.saturating_sub(seen) >= LONG_AGO_US {
            Course::placed(target)
        } else {
            Course::known(target)
        };
        let slot = part.flows.insert(
            Named {
                key,
                hash: within,
                source,
            },
            Flow::new(course),
            now_us,
            |flow, seen_us| self.spare(flow, seen_us, now_us),
            |key, flow| self.forget(key, flow),
        );
        if slot.is_none() {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        slot
    }

    fn promote(&self, shard: &mut Shard<Flow>, slot: Slot) {
        if let Promotion::Instead(other) = shard.promote(slot)
            && let Some((key, flow)) = shard.peek(other)
        {
            // Long before it can be forgotten its frames come as those of strangers do.
            if flow.rule != NONE && self.wishes.has_room() {
                self.wishes.take_back(*key);
                flow.rule = NONE;
            }
        }
    }

    /// Whether a flow may be forgotten without reordering it. What a driver has consumed is not looked at while a queue is idle;
    /// a frame that is a second old is done with.
    fn spare(&self, flow: &Flow, seen_us: u64, now_us: u64) -> bool {
        let active = self.active.load(Ordering::Acquire);
        let old = now_us.saturating_sub(seen_us) >= LONG_AGO_US;
        let can_take_back = flow.rule == NONE || self.wishes.has_room();
        can_take_back
            && flow.course.is_idle(|queue| {
                if old {
                    u64::MAX
                } else {
                    self.consumed(queue, active)
                }
            })
    }

    fn forget(&self, key: &FlowKey, flow: &Flow) {
        self.count_forgotten();
        if flow.rule != NONE {
            self.wishes.take_back(*key);
        }
    }

    fn count_forgotten(&self) {
        self.forgotten.fetch_add(1, Ordering::Relaxed);
    }

    fn shard(&self, number: u16) -> MutexGuard<'_, Part> {
        lock(&self.shards[usize::from(number) % SHARDS])
    }
}

/// The shard of a hash, and the part of it that is used there.
fn split(hash: u64) -> (u16, u32) {
    let [a, b, c, d, e, ..] = hash.to_le_bytes();
    (u16::from(e) % 64, u32::from_le_bytes([a, b, c, d]))
}

fn lock(shard: &Mutex<Part>) -> MutexGuard<'_, Part> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
