//! Steering hints to a port: frames of a flow are to come from a queue of the table's choice. The
//! port is asked aside, by one worker at a time, and may refuse.

use super::key::FlowKey;
use crate::pairs::PairId;
use farlane_sys::sync::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Most hints that wait: half of them for rules that are to be set. Rules that are to be removed
/// have the others for themselves, and a flow with a rule is not forgotten while there is no room.
const MAX_WAITING: usize = 1024;

/// Microseconds after a refusal until a port is asked again.
const PAUSE_US: u64 = 100_000;

/// A hint that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct SteeringHint {
    /// The flow, as its frames are received.
    pub flow: FlowKey,
    pub rule: RuleChange,
}

/// What is to become of a flow's rule.
#[derive(Clone, Copy, Debug)]
pub(super) enum RuleChange {
    /// Frames are to come from queue `to`; a rule said queue `from` before, if any did.
    Set { to: PairId, from: Option<PairId> },
    /// Frames may come from any queue; the rule said queue `from`.
    Remove { from: PairId },
}

/// Hints that wait, in order: one that the port is asked for does until the port has answered.
#[derive(Debug, Default)]
pub(super) struct SteeringHints {
    queue: Mutex<VecDeque<SteeringHint>>,
    /// Their number, for a look without the lock.
    waiting: AtomicUsize,
    /// Held by the worker that asks the port: of two hints for one flow the later one is to count.
    /// Taken before any other lock.
    turn: Mutex<()>,
    /// The port is not asked before this time.
    resumes_us: AtomicU64,
}

impl SteeringHints {
    fn lock(&self) -> MutexGuard<'_, VecDeque<SteeringHint>> {
        lock(&self.queue)
    }

    fn change<T>(&self, change: impl FnOnce(&mut VecDeque<SteeringHint>) -> T) -> T {
        let mut queue = self.lock();
        let result = change(&mut queue);
        self.waiting.store(queue.len(), Ordering::Release);
        result
    }

    /// Frames of a flow are to come from queue `to`. `false`: this cannot be asked for now. While
    /// something else waits for the flow it cannot: the port would change the flow's queue twice.
    pub fn set(&self, flow: FlowKey, to: PairId, from: Option<PairId>, now_us: u64) -> bool {
        now_us >= self.resumes_us.load(Ordering::Acquire)
            && self.change(|hints| {
                let can =
                    hints.len() < MAX_WAITING / 2 && hints.iter().all(|hint| hint.flow != flow);
                if can {
                    let rule = RuleChange::Set { to, from };
                    hints.push_back(SteeringHint { flow, rule });
                }
                can
            })
    }

    /// Whether something can be taken back.
    pub fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Acquire) < MAX_WAITING
    }

    /// Frames of a flow may come from any queue again, which came from queue `from`. Where there
    /// was [room](Self::has_room) a moment ago: there are as many too many at most as there are
    /// workers.
    pub fn take_back(&self, flow: FlowKey, from: PairId) {
        let rule = RuleChange::Remove { from };
        self.change(|hints| hints.push_back(SteeringHint { flow, rule }));
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
    pub fn first(&self) -> Option<SteeringHint> {
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
