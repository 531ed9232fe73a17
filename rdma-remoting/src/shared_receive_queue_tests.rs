//! Who takes what, who is told, and how often.

use crate::engine::soft::SoftSrq;
use crate::engine::{Budget, EngineSrq as _, LOOK_COST};
use crate::local::LocalQueue;
use crate::memory::PdHandle;
use crate::request::{RecvWqe, WqeError};
use crate::round::Look;
use crate::schedule::Schedule;
use crate::shared_receive_queue::SharedReceives;
use crate::work_queue::{QueueError, SharedSource, WorkSource};
use farlane_abi::rdma::{EVENT_SRQ_ERR, EVENT_SRQ_LIMIT_REACHED};
use farlane_sys::sync::lock;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Instant;

type Told = Arc<Mutex<Vec<u32>>>;

fn shared_from(source: impl SharedSource + 'static) -> (Arc<SharedReceives>, Told) {
    let told = Told::default();
    let events = {
        let told = Arc::clone(&told);
        Box::new(move |kind| lock(&told).push(kind))
    };
    let shared = SharedReceives::new(Box::new(source), PdHandle(1), events);
    (shared, told)
}

fn shared() -> (Arc<SharedReceives>, LocalQueue<RecvWqe>, Told) {
    let queue = LocalQueue::default();
    let (shared, told) = shared_from(queue.clone());
    (shared, queue, told)
}

fn take(shared: &SharedReceives) -> bool {
    shared.take(&mut RecvWqe::default()).unwrap()
}

#[test]
fn a_limit_is_told_of_once_each_time_it_is_set() {
    let (shared, queue, told) = shared();
    let count = || std::mem::take(&mut *lock(&told)).len();
    (0..8).for_each(|_| queue.post(RecvWqe::default()));
    shared.set_limit(6);
    assert_eq!((shared.limit(), count()), (6, 0));
    assert!(take(&shared) && take(&shared));
    assert_eq!(count(), 0, "as many as the limit are left");
    assert!(take(&shared));
    assert_eq!((shared.limit(), count()), (0, 1));
    assert!(take(&shared) && take(&shared));
    assert_eq!(count(), 0);
    // There are three: that is told at once, since nobody may ever take one.
    shared.set_limit(4);
    assert_eq!((shared.limit(), count()), (0, 1));
    shared.set_limit(3);
    shared.set_limit(0);
    while take(&shared) {}
    assert_eq!(count(), 0, "it is not armed");
}

/// A queue whose process has written nonsense.
struct Nonsense;

const ERROR: QueueError = QueueError::Index {
    produced: 9,
    consumed: 0,
    entries: 8,
};

impl WorkSource<RecvWqe> for Nonsense {
    fn take(&mut self, _: &mut RecvWqe) -> Result<bool, QueueError> {
        Err(ERROR)
    }

    fn retire(&mut self) {
        panic!("nothing was taken");
    }

    fn queued(&self) -> u32 {
        1
    }

    fn discard(&mut self) {}
}

impl SharedSource for Nonsense {
    fn want_rings(&self, _: bool) {}
}

#[test]
fn a_queue_that_makes_no_sense_is_dead_for_all_and_says_so_once() {
    let (shared, told) = shared_from(Nonsense);
    let waiters: Vec<_> = (0..99).map(|_| Waiter::new()).collect();
    waiters.iter().for_each(|waiter| waiter.wait(&shared));
    for _ in 0..3 {
        assert_eq!(shared.take(&mut RecvWqe::default()), Err(ERROR));
    }
    assert_eq!(*lock(&told), [EVENT_SRQ_ERR]);
    // Nobody waits for what will never come: all are told, and each turn tells what it can pay for.
    all_are_told(&shared, &waiters);
    assert!(shared.is_ready() && !shared.is_awaited());
    shared.set_limit(100);
    assert_eq!(*lock(&told), [EVENT_SRQ_ERR]);
}

/// All who wait are told of the end, of which some know; the others in turns that are paid.
fn all_are_told(shared: &Arc<SharedReceives>, waiters: &[Arc<Waiter>]) {
    let count = || waiters.iter().filter(|waiter| waiter.count() > 0).count();
    assert!((1..=64).contains(&count()), "{}", count());
    let turn = |budget| {
        let turn = Look::at(Instant::now()).turn(budget);
        SoftSrq::of(shared).progress(turn)
    };
    while shared.is_awaited() {
        let before = count();
        let came = turn(Budget::new(7 * LOOK_COST));
        assert!(came.worked && (1..=7).contains(&(count() - before)));
        assert_eq!(came.used.cost / LOOK_COST, (count() - before) as u64);
    }
    assert!(!turn(Budget::UNBOUNDED).worked);
    assert!(waiters.iter().all(|waiter| waiter.count() == 1));
}

#[test]
fn all_who_wait_for_a_queue_that_is_closed_are_told_in_turns() {
    let (shared, _, _) = shared();
    let waiters: Vec<_> = (0..200).map(|_| Waiter::new()).collect();
    waiters.iter().for_each(|waiter| waiter.wait(&shared));
    shared.close();
    all_are_told(&shared, &waiters);
}

/// A queue of bad requests.
struct Bad(u32);

impl WorkSource<RecvWqe> for Bad {
    fn take(&mut self, _: &mut RecvWqe) -> Result<bool, QueueError> {
        Err(WqeError::Elements(99).into())
    }

    fn retire(&mut self) {
        self.0 -= 1;
    }

    fn queued(&self) -> u32 {
        self.0
    }

    fn discard(&mut self) {}
}

impl SharedSource for Bad {
    fn want_rings(&self, _: bool) {}
}

#[test]
fn a_bad_request_is_taken_like_any() {
    let (shared, told) = shared_from(Bad(2));
    shared.set_limit(2);
    for left in [true, false] {
        let taken = shared.take(&mut RecvWqe::default());
        assert_eq!(taken, Err(WqeError::Elements(99).into()));
        assert_eq!(shared.is_ready(), left);
    }
    assert_eq!(*lock(&told), [EVENT_SRQ_LIMIT_REACHED]);
}

/// A queue with memory.
struct Lying(LocalQueue<RecvWqe>, Arc<()>);

impl WorkSource<RecvWqe> for Lying {
    fn take(&mut self, into: &mut RecvWqe) -> Result<bool, QueueError> {
        self.0.take(into)
    }

    fn retire(&mut self) {}

    fn queued(&self) -> u32 {
        assert!(Arc::strong_count(&self.1) > 1);
        self.0.queued()
    }

    fn discard(&mut self) {}
}

impl SharedSource for Lying {
    fn want_rings(&self, _: bool) {}
}

#[test]
fn a_queue_that_is_closed_has_no_memory_whoever_knows_it() {
    let (queue, memory) = (LocalQueue::default(), Arc::new(()));
    let (shared, told) = shared_from(Lying(queue.clone(), Arc::clone(&memory)));
    (0..3).for_each(|_| queue.post(RecvWqe::default()));
    assert!(take(&shared));
    assert_eq!(Arc::strong_count(&memory), 2);
    shared.close();
    assert_eq!(Arc::strong_count(&memory), 1);
    assert!(!take(&shared) && shared.is_ready() && !shared.is_awaited());
    shared.set_limit(9);
    shared.watch();
    shared.rest();
    assert!(!shared.pass_on() && lock(&told).is_empty());
    shared.close();
}

/// Waits as a queue pair does: it is in the list once.
struct Waiter {
    listed: AtomicBool,
    told: AtomicU32,
    me: Weak<Self>,
}

impl Waiter {
    fn new() -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            listed: AtomicBool::new(false),
            told: AtomicU32::new(0),
            me: me.clone(),
        })
    }

    fn weak(&self) -> Weak<dyn Schedule> {
        self.me.clone()
    }

    fn wait(&self, shared: &SharedReceives) {
        if !self.listed.swap(true, Ordering::AcqRel) {
            shared.wait(self.weak());
        }
    }

    fn count(&self) -> u32 {
        self.told.load(Ordering::SeqCst)
    }
}

impl Schedule for Waiter {
    fn schedule(&self) {
        self.listed.swap(false, Ordering::AcqRel);
        self.told.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn one_is_told_for_each_request_the_longest_waiting_first() {
    let (shared, queue, _) = shared();
    let waiters: Vec<_> = (0..4).map(|_| Waiter::new()).collect();
    let counts = || waiters.iter().map(|w| w.count()).collect::<Vec<_>>();
    waiters.iter().for_each(|waiter| waiter.wait(&shared));
    assert!(!shared.is_awaited() && !shared.pass_on());
    queue.post(RecvWqe::default());
    queue.post(RecvWqe::default());
    assert!(shared.is_awaited() && shared.pass_on());
    assert_eq!(counts(), [1, 1, 0, 0]);
    // Those two have not come; what is there goes to others.
    assert!(shared.is_awaited() && shared.pass_on());
    assert_eq!(counts(), [1, 1, 1, 1]);
    assert!(!shared.is_awaited() && !shared.pass_on());
    // Who is gone is not told, and nobody stays in the list for it.
    waiters[0].wait(&shared);
    waiters[1].wait(&shared);
    shared.forget(&waiters[0].weak());
    assert!(shared.pass_on());
    assert_eq!(counts(), [1, 2, 1, 1]);
    assert!(!shared.is_awaited());
}

#[test]
fn who_comes_to_wait_for_what_is_over_is_told_at_once() {
    let (closed, _, _) = shared();
    closed.close();
    let (dead, _) = shared_from(Nonsense);
    assert_eq!(dead.take(&mut RecvWqe::default()), Err(ERROR));
    for shared in [closed, dead] {
        let waiter = Waiter::new();
        for count in 1..3 {
            waiter.wait(&shared);
            assert_eq!(waiter.count(), count);
        }
        assert!(!shared.is_awaited());
    }
}

/// A step of a random program over a shared receive queue.
#[derive(Clone, Debug)]
enum Step {
    Post,
    /// A queue pair has a message: it takes a request or waits for one.
    Message(usize),
    /// A queue pair does not want any more, whether it is told or not.
    Leave(usize),
    /// The queue has a turn.
    Turn,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Post),
        3 => (0_usize..6).prop_map(Step::Message),
        1 => (0_usize..6).prop_map(Step::Leave),
        2 => Just(Step::Turn),
    ]
}

proptest! {
    /// While a queue pair waits and there are requests, the queue has turns until it is told; none
    /// is told that does not wait.
    #[test]
    fn nobody_waits_beside_a_request(steps in prop::collection::vec(step(), 0..120)) {
        let (shared, queue, _) = shared();
        let waiters: Vec<_> = (0..6).map(|_| Waiter::new()).collect();
        let mut waiting = BTreeSet::new();
        let mut told = [0; 6];
        for step in steps {
            match step {
                Step::Post => queue.post(RecvWqe::default()),
                Step::Message(at) => {
                    if take(&shared) {
                        waiting.remove(&at);
                    } else {
                        waiters[at].wait(&shared);
                        waiting.insert(at);
                    }
                }
                Step::Leave(at) => {
                    waiting.remove(&at);
                    shared.forget(&waiters[at].weak());
                    waiters[at].listed.store(false, Ordering::Release);
                }
                Step::Turn => {
                    shared.pass_on();
                }
            }
            // A queue that would have a turn has it in the end.
            if queue.is_empty() {
                prop_assert!(!shared.is_awaited());
                continue;
            }
            while shared.is_awaited() {
                prop_assert!(shared.pass_on());
            }
            for (at, waiter) in waiters.iter().enumerate() {
                let count = waiter.count();
                prop_assert!(count - told[at] <= 1, "told twice");
                if waiting.remove(&at) {
                    prop_assert_eq!(count - told[at], 1, "not told");
                }
                told[at] = count;
            }
        }
    }
}

/// Posters, those who wait, and the queue's turns in threads of their own: every request is taken.
#[test]
fn threads_that_wait_for_each_others_requests_take_them_all() {
    const REQUESTS: u32 = 2_000;
    let (shared, queue, _) = shared();
    let left = AtomicU32::new(REQUESTS);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let me = Waiter::new();
                while left.load(Ordering::SeqCst) > 0 {
                    if take(&shared) {
                        left.fetch_sub(1, Ordering::SeqCst);
                        continue;
                    }
                    let told = me.count();
                    me.wait(&shared);
                    // It looks once more, and then at nothing but whether it was told.
                    if shared.is_ready() {
                        continue;
                    }
                    while me.count() == told && left.load(Ordering::SeqCst) > 0 {
                        thread::yield_now();
                    }
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..REQUESTS {
                queue.post(RecvWqe::default());
                if queue.len() > 4 {
                    thread::yield_now();
                }
            }
        });
        scope.spawn(|| {
            while left.load(Ordering::SeqCst) > 0 {
                if !shared.pass_on() {
                    thread::yield_now();
                }
            }
        });
    });
    assert!(queue.is_empty());
}
