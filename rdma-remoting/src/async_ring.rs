//! Asynchronous events of a process: in a ring in memory shared with it, and those that the ring
//! has no room for in memory of ours.
//!
//! An event is told once: a queue pair's last request, the limit of a shared receive queue. None
//! is lost because the process takes its events late: it waits here, in order, each kind of each
//! object once, and comes into the ring in the context's turns. The process rings when it has
//! emptied the ring ([`farlane_abi::arena`]).

use crate::ring::{Place, Producer, Words};
use farlane_abi::arena::{
    ASYNC_ENTRIES, AsyncEvent, OFF_ASYNC_CONSUMED, OFF_ASYNC_PRODUCED, OFF_ASYNC_RING,
};
use farlane_abi::control::EVENT_ASYNC;
use farlane_abi::rdma::EVENT_DEVICE_FATAL;
use farlane_sys::sync::lock;
use farlane_zero_copy::SharedMemory;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};

/// Delivers events to a process.
pub trait EventSink: Send + Sync {
    /// Event `index` has happened, once. Called from worker threads: must not wait for the
    /// process.
    fn raise(&self, index: u32);
}

/// The asynchronous event ring. Nothing is called, and no other lock but the ring's own taken,
/// under its lock.
pub(crate) struct AsyncRing {
    ring: Producer,
    events: Arc<dyn EventSink>,
    waiting: Mutex<Waiting>,
    /// Something waits.
    any: AtomicBool,
}

/// Tells one object from all others of the ring, also where those had its handle.
type ObjectNumber = u64;

/// Events that are not in the ring: as many as objects have kinds.
#[derive(Default)]
struct Waiting {
    /// By age.
    events: BTreeMap<u64, (ObjectNumber, AsyncEvent)>,
    /// Their ages, by object and kind.
    ages: BTreeMap<(ObjectNumber, u32), u64>,
    /// The next age.
    next: u64,
    /// Objects so far.
    objects: ObjectNumber,
    /// No more are told.
    ended: bool,
}

impl Waiting {
    fn add(&mut self, object: ObjectNumber, event: AsyncEvent) {
        let age = self.next;
        let known = self.ages.entry((object, event.kind.get()));
        if *known.or_insert(age) == age {
            self.events.insert(age, (object, event));
            self.next += 1;
        }
    }

    fn oldest(&self) -> Option<&AsyncEvent> {
        self.events.first_key_value().map(|(_, (_, event))| event)
    }

    fn remove_oldest(&mut self) {
        if let Some((_, (object, event))) = self.events.pop_first() {
            self.ages.remove(&(object, event.kind.get()));
        }
    }

    fn forget(&mut self, object: ObjectNumber) {
        let of_object = |(&key, &age): (&(ObjectNumber, u32), &u64)| (key, age);
        let kinds = (object, 0)..=(object, u32::MAX);
        while let Some((key, age)) = self.ages.range(kinds.clone()).next().map(of_object) {
            self.ages.remove(&key);
            self.events.remove(&age);
        }
    }
}

impl AsyncRing {
    pub fn new(memory: SharedMemory, events: Arc<dyn EventSink>) -> Self {
        let place = Place {
            produced_at: OFF_ASYNC_PRODUCED,
            consumed_at: OFF_ASYNC_CONSUMED,
            entries_at: OFF_ASYNC_RING,
            entries: ASYNC_ENTRIES,
            stride: size_of::<AsyncEvent>(),
            words: Words::Numbers,
        };
        Self {
            ring: Producer::new(memory, place),
            events,
            waiting: Mutex::default(),
            any: AtomicBool::new(false),
        }
    }

    /// Puts events that wait into the ring, as far as there is room; returns how many. Costs a load
    /// where none waits.
    pub fn pass_on(&self) -> u32 {
        if !self.is_waiting() {
            return 0;
        }
        let count = self.put(&mut lock(&self.waiting));
        self.raise(count);
        count
    }

    /// Whether an event waits.
    fn is_waiting(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Whether [`pass_on`](Self::pass_on) would find something to do.
    pub fn is_ready(&self) -> bool {
        self.is_waiting() && self.ring.has_room()
    }

    /// The device is gone for the process: the last event says so.
    pub fn end(&self) {
        let mut waiting = lock(&self.waiting);
        *waiting = Waiting {
            ended: true,
            ..Waiting::default()
        };
        self.any.store(false, Ordering::Release);
        let event = AsyncEvent {
            kind: EVENT_DEVICE_FATAL.into(),
            ..Default::default()
        };
        // Where there is no room the process reads it in its header, after the events that there
        // are.
        let _ = self.ring.push(&event);
        drop(waiting);
        self.raise(1);
    }

    fn raise(&self, count: u32) {
        for _ in 0..count {
            self.events.raise(EVENT_ASYNC);
        }
    }

    fn put(&self, waiting: &mut Waiting) -> u32 {
        let mut count = 0;
        while count < ASYNC_ENTRIES
            && let Some(event) = waiting.oldest()
            && self.ring.push(event).is_some()
        {
            waiting.remove_oldest();
            count += 1;
        }
        self.any
            .store(!waiting.events.is_empty(), Ordering::Release);
        count
    }
}

/// What one object's events are told with.
struct Teller {
    ring: Arc<AsyncRing>,
    number: ObjectNumber,
    handle: u32,
    /// It was destroyed. Written under the ring's lock.
    gone: AtomicBool,
}

impl Teller {
    /// Tells of an event: after those that wait, and once as long as it does itself.
    fn tell(&self, kind: u32) {
        let ring = &self.ring;
        let count = {
            let mut waiting = lock(&ring.waiting);
            if waiting.ended || self.gone.load(Ordering::Relaxed) {
                return;
            }
            let event = AsyncEvent {
                kind: kind.into(),
                object: self.handle.into(),
                ..Default::default()
            };
            waiting.add(self.number, event);
            ring.any.store(true, Ordering::Release);
            // The worker may sleep. Either this sees that the process has made room, or the
            // process does that later, and rings for a worker that then sees the event.
            fence(Ordering::SeqCst);
            ring.put(&mut waiting)
        };
        ring.raise(count);
    }
}

/// The events of one object, as long as it exists: what waits of them ends with this.
pub(crate) struct ObjectEvents(Arc<Teller>);

impl ObjectEvents {
    /// Of the object with this handle.
    pub fn new(ring: &Arc<AsyncRing>, handle: u32) -> Self {
        let number = {
            let mut waiting = lock(&ring.waiting);
            waiting.objects += 1;
            waiting.objects
        };
        Self(Arc::new(Teller {
            ring: Arc::clone(ring),
            number,
            handle,
            gone: AtomicBool::new(false),
        }))
    }

    /// Tells of events, `EVENT_*` of [`farlane_abi::rdma`]: from any thread, without waiting for
    /// the process, and of none once the object is gone.
    pub fn teller(&self) -> impl Fn(u32) + Send + Sync + use<> {
        let teller = Arc::clone(&self.0);
        move |kind| teller.tell(kind)
    }
}

impl Drop for ObjectEvents {
    fn drop(&mut self) {
        let mut waiting = lock(&self.0.ring.waiting);
        self.0.gone.store(true, Ordering::Relaxed);
        waiting.forget(self.0.number);
        let is_empty = waiting.events.is_empty();
        self.0.ring.any.store(!is_empty, Ordering::Release);
    }
}

#[cfg(test)]
mod tests;
