//! The flow table: which worker gets a frame next (IOctoRFS, ioctopus-asplos20, 3.3 and 4.2).
//!
//! * [`settings`]: what it is made with.
//! * `known`: which flows it knows; `rules`: what the port is asked for.

mod known;
mod rules;
pub mod settings;

use super::hash::{KeyedHash, Scaling};
use super::hints::SteeringHints;
use super::key::FlowKey;
use super::order::{FlowOrder, HoldLimits, Moment, Span};
use super::parse::{Parsed, Signal};
use super::route::{Route, Ticket};
use super::shard::Shard;
use crate::bits::{low16, low32};
use crate::pairs::{PairCount, PairId};
use farlane_sys::sync::{lock, read, write};
use known::{Flow, TablePart};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, RwLock};

pub use known::FlowCounts;
pub use settings::{Placement, Settings};

/// Parts of the table, each with a lock of its own.
const SHARDS: usize = 64;

/// A step of a flow's order.
type Step = fn(&mut FlowOrder, Moment, Ticket, &HoldLimits, &dyn Fn(PairId) -> u64) -> Route;

/// The table, shared by all workers.
pub struct FlowTable {
    settings: Settings,
    shards: Box<[Mutex<TablePart>]>,
    hash: KeyedHash,
    active: AtomicU16,
    consumed: Box<[AtomicU64]>,
    /// Only while a driver has configured it; `scaled` says so without the lock.
    scaling: RwLock<Option<Scaling>>,
    scaled: AtomicBool,
    hints: SteeringHints,
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
                .map(|_| Mutex::new(TablePart::new(each)))
                .collect(),
            hash,
            active: AtomicU16::new(settings.queues.max(PairCount::ONE).0),
            consumed: settings
                .queues
                .max(PairCount::ONE)
                .ids()
                .map(|_| AtomicU64::new(0))
                .collect(),
            scaling: RwLock::new(None),
            scaled: AtomicBool::new(false),
            hints: SteeringHints::default(),
            port_queues: AtomicU16::new(settings.queues.0),
            moves: AtomicU64::new(0),
            forgotten: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            next_shard: AtomicUsize::new(0),
            settings,
        }
    }

    /// Queue pairs that the driver uses: one at least.
    fn active(&self) -> PairCount {
        PairCount(self.active.load(Ordering::Acquire))
    }

    /// The driver uses so many queue pairs from now on.
    pub fn set_queues(&self, active: PairCount) {
        let most = self.settings.queues.max(PairCount::ONE);
        let active = active.clamp(PairCount::ONE, most);
        self.active.store(active.0, Ordering::Release);
    }

    /// The driver wants frames placed by its own rule (virtio 1.2, 5.1.6.5.6), or no longer. While
    /// it does, nothing is learned.
    pub fn set_scaling(&self, scaling: Option<Scaling>) {
        let mut place = write(&self.scaling);
        self.scaled.store(scaling.is_some(), Ordering::Release);
        *place = scaling;
    }

    /// The driver has consumed so many of the used elements of a receive queue, counted from its
    /// beginning, without wrapping.
    pub fn set_consumed(&self, queue: PairId, position: u64) {
        if let Some(place) = self.consumed.get(queue.index()) {
            place.fetch_max(position, Ordering::AcqRel);
        }
    }

    /// Queues begin anew (the device was reset): all flows are forgotten, and what the port was
    /// asked for, too; positions begin at zero.
    pub fn reset(&self) {
        for shard in &self.shards {
            lock(shard).flows.clear(|_, _| self.count_forgotten());
        }
        self.hints.clear();
        for place in &self.consumed {
            place.store(0, Ordering::Release);
        }
        self.set_scaling(None);
    }

    /// A frame that a worker has read from its port queue. `next`: where in its receive queue the
    /// frame would be.
    pub fn received(&self, worker: PairId, frame: &Parsed, next: Span, now_us: u64) -> Route {
        let active = self.active();
        let Some(key) = frame.flow else {
            return untracked(worker, PairId::FIRST, active);
        };
        let hash = self.hash.flow(&key);
        let (number, within) = split(hash);
        let mut part = self.shard(number);
        // A queue that is not in use has no positions.
        let nowhere = Span { begin: 0, end: 0 };
        let at = Moment {
            worker,
            next: Some(if active.contains(worker) {
                next
            } else {
                nowhere
            }),
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
                    if let Some(seen) = part.unknown_seen_mut(within) {
                        *seen = now_us.max(1);
                    }
                    return untracked(worker, active.wrap(worker), active);
                };
                slot
            }
        };
        let shard = &mut part.flows;
        let promote = shard
            .get(slot, now_us)
            .is_some_and(|(_, flow)| flow.has_come(frame.signal));
        if promote {
            Self::promote(shard, slot);
        }
        let ticket = Ticket {
            shard: number,
            slot,
            end: frame.sequence.map(|sequence| sequence.end),
            from: worker,
        };
        self.step(shard, ticket, at, FlowOrder::received)
    }

    /// A frame that came by [`Route::Sequence`], once the worker has seen its own port queue
    /// empty. It may have to wait for buffers: when it is in the worker's own queue, that is told
    /// as of one that was forwarded.
    pub fn sequenced(&self, worker: PairId, ticket: Ticket, now_us: u64) -> Route {
        self.ask_again(worker, ticket, now_us, FlowOrder::sequenced)
    }

    /// The oldest frame of a flow that the worker holds: may it go? As
    /// [`sequenced`](Self::sequenced).
    pub fn retry(&self, worker: PairId, ticket: Ticket, now_us: u64) -> Route {
        self.ask_again(worker, ticket, now_us, FlowOrder::retried)
    }

    fn ask_again(&self, worker: PairId, ticket: Ticket, now_us: u64, take: Step) -> Route {
        let mut shard = self.shard(ticket.shard);
        let at = Moment {
            worker,
            next: None,
            now: now_us,
        };
        self.step(&mut shard.flows, ticket, at, take)
    }

    /// A frame that came by [`Route::Forward`] is in the worker's queue and ends at this position,
    /// or was thrown away.
    pub fn delivered(&self, ticket: Ticket, position: u64) {
        let mut shard = self.shard(ticket.shard);
        if let Some((_, flow)) = shard.flows.peek(ticket.slot) {
            flow.order.delivered(position);
        }
    }

    /// A frame was thrown away on this route.
    pub fn dropped(&self, route: &Route) {
        let Some(ticket) = route.ticket() else {
            return;
        };
        let mut shard = self.shard(ticket.shard);
        if let Some((_, flow)) = shard.flows.peek(ticket.slot) {
            flow.order.dropped(route);
        }
    }

    /// A frame that the guest has sent on a queue.
    pub fn transmitted(&self, queue: PairId, frame: &Parsed, now_us: u64) {
        let active = self.active();
        let Some(key) = frame.flow.map(FlowKey::reversed) else {
            return;
        };
        if !active.contains(queue) {
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
                flow.has_gone(frame.signal);
            }
            return;
        };
        let shard = &mut part.flows;
        let Some((_, flow)) = shard.get(slot, now_us) else {
            return;
        };
        let promote = flow.has_gone(frame.signal);
        if let Some(number) = frame.sequence.and_then(|sequence| sequence.acknowledges) {
            flow.order.acknowledged(number);
        }
        if !scaled {
            let follow = &self.settings.follow;
            let home = flow.order.target();
            let vote = if frame.signal == Signal::Open {
                // A connection begins: nothing of it has come.
                (home != queue).then_some(queue)
            } else {
                flow.votes.count(home, queue, frame.signal, now_us, follow)
            };
            if let Some(queue) = vote {
                flow.order.aim(queue);
                self.moves.fetch_add(1, Ordering::Relaxed);
            }
        }
        if promote {
            Self::promote(shard, slot);
        }
    }

    /// Takes a step of a flow's order, and asks the port for what would spare the next one.
    fn step(&self, shard: &mut Shard<Flow>, ticket: Ticket, at: Moment, take: Step) -> Route {
        let active = self.active();
        let established = shard.is_protected(ticket.slot);
        let Some((key, flow)) = shard.get(ticket.slot, at.now) else {
            return untracked(at.worker, PairId::FIRST, active);
        };
        if let Some(queue) = self.scaled_queue(key) {
            flow.order.aim(active.wrap(queue));
        } else if !active.contains(flow.order.target()) {
            flow.order.aim(active.wrap(flow.order.target()));
        }
        if active.contains(at.worker)
            && flow
                .order
                .sequencer()
                .is_some_and(|sequencer| !active.contains(sequencer))
        {
            flow.order.release();
        }
        let consumed = |queue: PairId| self.consumed(queue, active);
        let limits = &self.settings.limits;
        let route = take(&mut flow.order, at, ticket, limits, &consumed);
        if established {
            self.hint(key, flow, active, at.now);
        } else {
            self.take_back(key, flow);
        }
        route
    }

    fn consumed(&self, queue: PairId, active: PairCount) -> u64 {
        if !active.contains(queue) {
            // Nothing waits in a queue that is not in use.
            return u64::MAX;
        }
        self.consumed
            .get(queue.index())
            .map_or(u64::MAX, |place| place.load(Ordering::Acquire))
    }

    /// The queue of a flow of which the guest has sent nothing.
    fn place(&self, key: &FlowKey, hash: u64, worker: PairId, active: PairCount) -> PairId {
        if let Some(queue) = self.scaled_queue(key) {
            return active.wrap(queue);
        }
        match self.settings.placement {
            Placement::Arrival if active.contains(worker) => worker,
            _ => active.by_hash(low32(hash >> 32)),
        }
    }

    fn scaled_queue(&self, key: &FlowKey) -> Option<PairId> {
        if !self.scaled.load(Ordering::Acquire) {
            return None;
        }
        read(&self.scaling)
            .as_ref()
            .map(|scaling| scaling.queue(key))
    }

    fn shard(&self, number: u16) -> MutexGuard<'_, TablePart> {
        lock(&self.shards[usize::from(number) % SHARDS])
    }
}

/// The route of a frame of no tracked flow: to queue `to` where the worker's own is not in use.
fn untracked(worker: PairId, to: PairId, active: PairCount) -> Route {
    if active.contains(worker) {
        Route::Deliver
    } else {
        Route::Forward { to, flow: None }
    }
}

/// The shard of a hash, and the part of it that is used there.
fn split(hash: u64) -> (u16, u32) {
    (low16(hash >> 32) % 64, low32(hash))
}

#[cfg(test)]
mod tests;
