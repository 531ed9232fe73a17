//! The protocols between workers on which nothing may be lost, checked with
//! [loom](https://docs.rs/loom): every order in which their loads and stores can happen.
//!
//! The sources are those of the product; here they are compiled with loom's atomics and locks, so
//! that neither the product nor what it depends on is built a second time.

#![allow(clippy::unwrap_used)]

/// What the library takes from the standard library.
mod sync {
    pub use crate::Counter as WorkerEvent;
    pub use crate::wake;
    pub use loom::sync::{Mutex, MutexGuard};

    pub mod atomic {
        pub use crate::sequential::{AtomicU64, AtomicUsize};
        pub use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
    }

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
    }
}

/// loom takes a sequentially consistent access for one that acquires and releases;
/// it knows fences.
mod sequential {
    use super::{Ordering, fence};

    fn between<T>(order: Ordering, access: impl FnOnce() -> T) -> T {
        let fence = || {
            if order == Ordering::SeqCst {
                fence(Ordering::SeqCst);
            }
        };
        fence();
        let value = access();
        fence();
        value
    }

    macro_rules! sequential {
        ($($name:ident of $number:ty,)*) => {
            $(
                #[derive(Debug, Default)]
                pub struct $name(loom::sync::atomic::$name);

                #[allow(dead_code, reason = "not all of each")]
                impl $name {
                    pub fn load(&self, order: Ordering) -> $number {
                        between(order, || self.0.load(order))
                    }

                    pub fn store(&self, value: $number, order: Ordering) {
                        between(order, || self.0.store(value, order));
                    }

                    pub fn swap(&self, value: $number, order: Ordering) -> $number {
                        between(order, || self.0.swap(value, order))
                    }

                    pub fn fetch_add(&self, value: $number, order: Ordering) -> $number {
                        between(order, || self.0.fetch_add(value, order))
                    }
                }
            )*
        };
    }

    sequential! { AtomicU64 of u64, AtomicUsize of usize, }
}

#[allow(dead_code, reason = "the product uses more of it")]
#[path = "../src/hand.rs"]
mod hand;
#[allow(dead_code, reason = "the product uses more of it")]
#[path = "../src/inbox.rs"]
mod inbox;
#[path = "../src/schedule.rs"]
mod schedule;
#[allow(dead_code, reason = "the product uses more of it")]
#[path = "../src/shared_receive_queue.rs"]
mod shared_receive_queue;
#[allow(dead_code, reason = "the product uses more of it")]
#[path = "../src/engine/soft/waits.rs"]
mod waits;
#[allow(dead_code, reason = "the product uses more of it")]
#[path = "../../zero-copy/worker/src/wake.rs"]
pub mod wake;

mod engine {
    pub use crate::schedule::Schedule;
}
use farlane_rdma_remoting::{memory, request, work_queue};

use farlane_rdma_remoting::memory::PdHandle;
use farlane_rdma_remoting::request::RecvWqe;
use farlane_rdma_remoting::work_queue::{QueueError, SharedSource, WorkSource};
use hand::Hand;
use inbox::{Inbox, Scheduled};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use schedule::Schedule;
use shared_receive_queue::SharedReceives;
// loom's own panics when it is dropped after a deadlock.
use std::sync::Arc;
use waits::{Place, Receiver, Requesting};
use wake::{Event, Sleep};

/// An eventfd, or that a queue pair has a turn: counts, and a wait for it blocks.
pub struct Counter(Mutex<u32>, Condvar);

impl Event for Counter {
    fn raise(&self) {
        *self.0.lock().unwrap() += 1;
        self.1.notify_all();
    }
}

impl Counter {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(0), Condvar::new()))
    }

    fn wait(&self) {
        let mut count = self.0.lock().unwrap();
        while *count == 0 {
            count = self.1.wait(count).unwrap();
        }
        *count = 0;
    }
}

/// All that can happen with up to so many changes of thread at any place. loom reports a deadlock
/// where somebody waits for ever.
fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// What a context is made of, which goes when it was taken from its worker.
struct Memory(UnsafeCell<u32>);

// SAFETY: loom sees to it that nobody touches it while somebody else changes it.
unsafe impl Sync for Memory {}

/// A worker gives two turns to what it has in its list, and another thread takes that from the
/// list; what is not in hand then has gone.
fn run_hand(take: impl Fn(&Hand, *const Memory) -> bool + Send + Sync + Copy + 'static) {
    check(3, move || {
        let shared = Arc::new((Hand::default(), Memory(UnsafeCell::new(0))));
        let worker = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (hand, memory) = &*shared;
                for _ in 0..2 {
                    if !take(hand, memory) {
                        break;
                    }
                    // SAFETY: a read of a number; loom complains of a change beside it.
                    memory
                        .0
                        .with(|value| assert_eq!(unsafe { *value }, 0, "it has gone"));
                }
                hand.put_down();
            })
        };
        let (hand, memory) = &*shared;
        hand.change();
        let address = std::ptr::from_ref(memory).addr();
        if !hand.holds(|held| held == address) {
            // SAFETY: a write of a number; loom complains of whoever reads it meanwhile.
            memory.0.with_mut(|value| unsafe { *value = 1 });
        }
        worker.join().unwrap();
    });
}

#[test]
fn loom_what_was_taken_from_a_list_and_is_not_in_hand_has_no_turn() {
    run_hand(|hand, memory| hand.take(memory, 0));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn loom_who_looks_at_the_list_before_it_says_what_it_takes_has_what_is_gone() {
    run_hand(|hand, memory| {
        if hand.generation() != 0 {
            return false;
        }
        // Whether the list has changed meanwhile is not asked.
        let _ = hand.take(memory, 0) || hand.take(memory, 1);
        true
    });
}

/// Workers schedule queue pairs that another one serves, which sees all that they have done: each
/// schedules one of those of a context. `told_late`: nobody serves it at first. `look` is a turn of
/// what was scheduled.
fn run_inbox(
    whom: &'static [usize],
    told_late: bool,
    look: impl Fn(&Scheduled, &AtomicU32) -> u32 + Send + Sync + Copy + 'static,
) {
    check(2, move || {
        let sleep = Arc::new(Sleep::new(Counter(Mutex::new(0), Condvar::new())));
        let inbox = Arc::<Inbox>::default();
        let tell = || inbox.tell(Some(Arc::clone(&sleep)));
        if !told_late {
            tell();
        }
        let one = |slot| (Scheduled::new(&inbox, slot), AtomicU32::new(0));
        let queue_pairs = Arc::new([one(0), one(1)]);
        let threads: Vec<_> = whom
            .iter()
            .map(|&whom| {
                let queue_pairs = Arc::clone(&queue_pairs);
                thread::spawn(move || {
                    let (scheduled, done) = &queue_pairs[whom];
                    done.fetch_add(1, Ordering::Release);
                    scheduled.schedule();
                })
            })
            .collect();
        if told_late {
            tell();
        }
        let mut seen = [0; 2];
        let mut turn = || {
            let called = inbox.take();
            for slot in &called {
                let at = usize::try_from(*slot).unwrap();
                let (scheduled, done) = &queue_pairs[at];
                seen[at] = look(scheduled, done);
            }
            let all = seen[0] + seen[1];
            (
                !called.is_empty(),
                usize::try_from(all).unwrap() == whom.len(),
            )
        };
        loop {
            if turn().1 {
                break;
            }
            sleep.announce();
            let (worked, is_done) = turn();
            if is_done {
                break;
            }
            if !worked {
                sleep.event.wait();
            }
            sleep.awake();
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

/// The turn of a queue pair that has left the inbox.
fn look(scheduled: &Scheduled, done: &AtomicU32) -> u32 {
    scheduled.called();
    done.load(Ordering::Acquire)
}

#[test]
fn loom_who_is_scheduled_has_a_turn_that_begins_after_that() {
    run_inbox(&[0], false, look);
    run_inbox(&[0, 0], false, look);
    run_inbox(&[0, 1], false, look);
}

#[test]
fn loom_what_was_scheduled_before_a_worker_serves_it_is_found_by_that() {
    run_inbox(&[0], true, look);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_who_is_called_after_its_turn_misses_what_came_in_between() {
    run_inbox(&[0, 0], false, |scheduled, done| {
        let seen = done.load(Ordering::Acquire);
        scheduled.called();
        seen
    });
}

/// A requester, which has a turn when the counter is raised.
fn requester() -> (Arc<Counter>, Requesting) {
    let turns = Counter::new();
    let raised = Arc::clone(&turns);
    (turns, Requesting::new(Arc::new(move || raised.raise())))
}

/// A requester waits for something at its peer, which another worker changes.
fn run_pair(
    wait: impl Fn(&Receiver, &Requesting) + Send + Sync + Copy + 'static,
    changed: impl Fn(&Receiver, &Requesting) + Send + Sync + Copy + 'static,
) {
    check(3, move || {
        let (turns, requesting) = requester();
        let shared = Arc::new((Receiver::default(), requesting, AtomicU32::new(0)));
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.2.store(1, Ordering::Release);
                changed(&shared.0, &shared.1);
            })
        };
        let (receiver, requesting, state) = &*shared;
        while state.load(Ordering::Acquire) == 0 {
            wait(receiver, requesting);
            // It looks once more.
            if state.load(Ordering::Acquire) == 0 {
                turns.wait();
            }
        }
        other.join().unwrap();
    });
}

#[test]
fn loom_who_waits_for_a_receive_request_is_told() {
    run_pair(Receiver::wait, |receiver, _| receiver.changed());
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_without_the_fence_a_receive_request_is_missed() {
    run_pair(Receiver::wait, |receiver, _| receiver.pass_on());
}

#[test]
fn loom_who_waits_for_an_answer_is_told() {
    run_pair(
        |_, requesting| requesting.wait(),
        |_, requesting| {
            fence(Ordering::SeqCst);
            requesting.peer_changed();
        },
    );
}

/// A queue of requests that are all alike.
#[derive(Clone)]
struct Source(Arc<AtomicU32>);

impl WorkSource<RecvWqe> for Source {
    fn take(&mut self, _: &mut RecvWqe) -> Result<bool, QueueError> {
        // Nobody else takes: the shared receive queue is locked.
        let is_there = self.is_ready();
        if is_there {
            self.0.fetch_sub(1, Ordering::AcqRel);
        }
        Ok(is_there)
    }

    fn retire(&mut self) {}

    fn queued(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    fn discard(&mut self) {}
}

impl SharedSource for Source {
    fn want_rings(&self, _: bool) {}
}

/// A shared receive queue, and whether it has ended.
struct Shared {
    queue: Arc<SharedReceives>,
    has_ended: AtomicU32,
}

/// Requesters that wait for requests of a shared receive queue, each by the queue pair of its peer.
/// Another worker finds `requests` of them one by one, and ends the queue then where it `closes`.
fn run_shared(
    waiters: usize,
    requests: u32,
    closes: bool,
    wait: impl Fn(&Arc<Place>, &SharedReceives) + Send + Sync + Copy + 'static,
) {
    // The more there is, the fewer: it takes seconds.
    check(if closes { 2 } else { 3 }, move || {
        let source = Source(Arc::new(AtomicU32::new(0)));
        let events = Box::new(|_| ());
        let shared = Arc::new(Shared {
            queue: SharedReceives::new(Box::new(source.clone()), PdHandle(1), events),
            has_ended: AtomicU32::new(0),
        });
        let threads: Vec<_> = (0..waiters)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || wait_for_one(&shared, wait))
            })
            .collect();
        for _ in 0..requests {
            source.0.fetch_add(1, Ordering::AcqRel);
            // Its turns, as long as they find somebody.
            while shared.queue.pass_on() {}
        }
        if closes {
            shared.has_ended.store(1, Ordering::Release);
            shared.queue.close();
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

/// Until it has taken one, or the queue has ended.
fn wait_for_one(shared: &Shared, wait: impl Fn(&Arc<Place>, &SharedReceives)) {
    let (turns, requesting) = requester();
    let receiver = Arc::<Receiver>::default();
    let place = Place::new(&shared.queue, &receiver);
    let mut request = RecvWqe::default();
    let is_over = || shared.has_ended.load(Ordering::Acquire) != 0;
    while !is_over() && !shared.queue.take(&mut request).unwrap() {
        receiver.wait(&requesting);
        wait(&place, &shared.queue);
        // It looks once more.
        if !shared.queue.is_ready() {
            turns.wait();
        }
    }
    place.leave();
}

#[test]
fn loom_who_waits_for_a_shared_request_gets_one() {
    run_shared(1, 1, false, Place::enlist);
    run_shared(2, 2, false, Place::enlist);
}

#[test]
fn loom_who_waits_for_a_shared_receive_queue_that_ends_is_told() {
    run_shared(1, 0, true, Place::enlist);
    run_shared(2, 1, true, Place::enlist);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_who_is_in_no_list_of_a_shared_receive_queue_misses_its_request() {
    run_shared(1, 1, false, |_, _| ());
}
