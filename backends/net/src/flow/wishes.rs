//! What the flow table asks of a port: frames of a flow from a queue of its choice. It is asked
//! aside, by one worker at a time, and may refuse.

use super::key::FlowKey;
use farlane_sys::sync::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Wishes that wait, at most: half of them for flows that are to be steered. What is to be taken
/// back has the others for itself, and a flow with a rule is not forgotten while there is no room.
const MOST: usize = 1024;

/// Microseconds after a refusal until a port is asked again.
const PAUSE_US: u64 = 100_000;

/// A wish.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    /// The flow, as its frames are received.
    pub flow: FlowKey,
    pub rule: Rule,
}

/// What is to become of a flow's rule.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rule {
    /// Frames come from queue `to`; before they came from queue `from`, if from a certain one.
    Set { to: u16, from: Option<u16> },
    /// Frames may come from any queue; before they came from queue `from`.
    TakeBack { from: u16 },
}

/// Wishes that wait, in order: one that the port is asked for does until the port has answered.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    queue: Mutex<VecDeque<Wish>>,
    /// How many, for a look without the lock.
    waiting: AtomicUsize,
    /// Held by the worker that asks the port: of two wishes for one flow the later one is to count.
    /// Taken before any other lock.
    turn: Mutex<()>,
    /// The port is not asked before this time.
    resumes_us: AtomicU64,
}

impl Wishes {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Wish>> {
        lock(&self.queue)
    }

    fn change<T>(&self, change: impl FnOnce(&mut VecDeque<Wish>) -> T) -> T {
        let mut queue = self.lock();
        let result = change(&mut queue);
        self.waiting.store(queue.len(), Ordering::Release);
        result
    }

    /// Frames of a flow are to come from queue `to`. `false`: this cannot be asked for now. While
    /// something else waits for the flow it cannot: the port would change the flow's queue twice.
    pub fn set(&self, flow: FlowKey, to: u16, from: Option<u16>, now_us: u64) -> bool {
        now_us >= self.resumes_us.load(Ordering::Acquire)
            && self.change(|wishes| {
                let can = wishes.len() < MOST / 2 && wishes.iter().all(|wish| wish.flow != flow);
                if can {
                    let rule = Rule::Set { to, from };
                    wishes.push_back(Wish { flow, rule });
                }
                can
            })
    }

    /// Whether something can be taken back.
    pub fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Acquire) < MOST
    }

    /// Frames of a flow may come from any queue again, which came from queue `from`. Where there
    /// was [room](Self::has_room) a moment ago: there are as many too many at most as there are
    /// workers.
    pub fn take_back(&self, flow: FlowKey, from: u16) {
        let rule = Rule::TakeBack { from };
        self.change(|wishes| wishes.push_back(Wish { flow, rule }));
    }

    /// The right to ask the port, where there is something to ask for, nobody else does, and it is
    /// not to be left alone.
    pub fn turn(&self, now_us: u64) -> Option<MutexGuard<'_, ()>> {
        let due = self.are_due(now_us);
        due.then(|| self.turn.try_lock().ok()).flatten()
    }

    /// Whether there is something to ask for, and the port is not to be left alone.
    pub fn are_due(&self, now_us: u64) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
            && now_us >= self.resumes_us.load(Ordering::Acquire)
    }

    /// The oldest. For who has the [turn](Self::turn).
    pub fn first(&self) -> Option<Wish> {
        self.lock().front().copied()
    }

    /// The port has answered the oldest, which waits no longer. For who has the [turn](Self::turn).
    pub fn answered(&self) {
        self.change(VecDeque::pop_front);
    }

    /// The port has refused: it is left alone for a while.
    pub fn pause(&self, now_us: u64) {
        self.resumes_us
            .store(now_us.saturating_add(PAUSE_US), Ordering::Release);
    }

    /// Forgets all, when nobody asks the port.
    pub fn clear(&self) {
        let _turn = lock(&self.turn);
        self.change(VecDeque::clear);
        self.resumes_us.store(0, Ordering::Release);
    }
}
