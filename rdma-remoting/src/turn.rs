//! A context's turn: its calls, and the turns of its queue pairs and shared receive queues.

use crate::call_ring::{CallRingError, Served};
use crate::context::{Context, Header};
use crate::counters;
use crate::engine::{Budget, OPERATION_COST, Progress};
use crate::round::{Look, Pace};
use crate::verbs::{CallHost, may_take_long};
use farlane_abi::control::EVENT_WAKE;
use farlane_abi::rdma::Verbs as _;
use farlane_sys::sync::lock;
use farlane_zero_copy::SharedMemory;
use std::cell::OnceCell;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

/// The turn in which calls come.
pub(crate) struct CallTurn<'a> {
    look: &'a Look,
    budget: &'a Budget,
    /// Whether the time of all calls is over.
    is_over: &'a dyn Fn() -> bool,
    /// What of the context's work was carried out in calls.
    pub carried_out: Progress,
}

impl<'a> CallTurn<'a> {
    fn new(look: &'a Look, budget: &'a Budget, is_over: &'a dyn Fn() -> bool) -> Self {
        Self {
            look,
            budget,
            is_over,
            carried_out: Progress::default(),
        }
    }
}

impl Context {
    /// One turn: answers its calls, passes on events that wait, and gives queue pairs turns that
    /// may have something to do.
    pub(crate) fn poll(self: &Arc<Self>, look: &Look, budget: &Budget) -> Progress {
        let mut progress = Progress::default();
        let Some(header) = self.served_header() else {
            return progress;
        };
        if !header.call_is_away.load(Ordering::Acquire) {
            progress = self.answer(header, look, budget);
        }
        let events = header.asyncs.pass_on();
        if events > 0 {
            progress.worked = true;
            progress.used.cost += OPERATION_COST * u64::from(events);
        }
        let rest = budget.rest(progress.used);
        progress.and(self.turn_of_ready(&header.memory, look, &rest, || look.clock()))
    }

    /// Answers its calls, up to one that may take long where others wait for the worker: that is
    /// the control thread's.
    fn answer(self: &Arc<Self>, header: &Header, look: &Look, budget: &Budget) -> Progress {
        let mut progress = Progress::default();
        let mut calls = lock(&header.calls);
        if calls.is_ready() {
            progress.worked = true;
            // One clock of all calls, which begins when somebody first looks at it.
            let clock = OnceCell::new();
            let is_over = || clock.get_or_init(|| look.clock())();
            let begin = || {
                is_over();
                &is_over
            };
            let mut host = CallHost::in_turn(self, CallTurn::new(look, budget, &is_over));
            let dispatch = |number, args: &[u8], out: &mut [u8]| host.dispatch(number, args, out);
            let is_here = |number| look.pace != Pace::Shared || !may_take_long(number);
            let served = calls.serve_those(begin, is_here, dispatch);
            progress = progress.and(host.carried_out());
            drop(calls);
            let served = self.answered(served);
            progress.used.cost += OPERATION_COST * u64::from(served.calls);
            if served.next_is_other {
                self.control.hand_over(self);
            }
        }
        progress
    }

    /// Counts calls that were answered, and wakes who waits for that.
    fn answered(&self, served: Result<Served, CallRingError>) -> Served {
        match served {
            Ok(served) => {
                counters::count(&self.counters.calls, u64::from(served.calls));
                if served.wake {
                    self.events.raise(EVENT_WAKE);
                }
                served
            }
            Err(e) => {
                self.cut_off(&e);
                Served::default()
            }
        }
    }

    /// The control thread: answers the call that is away, and gives the ring back to the worker.
    pub(crate) fn answer_away(self: &Arc<Self>) {
        if let Some(header) = self.served_header() {
            let mut host = CallHost::new(self);
            let dispatch = |number, args: &[u8], out: &mut [u8]| host.dispatch(number, args, out);
            let mut calls = lock(&header.calls);
            let served = calls.serve_next(dispatch);
            drop(calls);
            self.answered(served);
        }
        self.set_call_is_away(false);
        // Who has made another call meanwhile has woken a worker that did not look at it. Either
        // this sees the call, or whoever makes it sees that the worker sleeps, and rings.
        fence(Ordering::SeqCst);
        if self.header().is_some_and(Header::has_calls) {
            self.inbox().wake();
        }
    }

    /// Whether the next call is the control thread's.
    pub(crate) fn set_call_is_away(&self, is_away: bool) {
        if let Some(header) = self.header() {
            header.call_is_away.store(is_away, Ordering::Release);
        }
    }

    /// Gives queue pairs turns that may have something to do, until the time of a `clock` is over.
    fn turn_of_ready<C: Fn() -> bool>(
        &self,
        header: &SharedMemory,
        look: &Look,
        budget: &Budget,
        clock: impl Fn() -> C,
    ) -> Progress {
        let Some(mut ready) = self.ready_for_turns() else {
            return Progress {
                cut: true,
                ..Progress::default()
            };
        };
        let now = look.now;
        ready.call_scheduled(self.inbox(), now);
        ready.call_rung(header, now);
        if look.pace == Pace::Whole {
            ready.call_all(now);
        }
        ready.turn(look, budget, clock)
    }

    /// Carries out what is posted, in a call, as far as the turn has budget and time left.
    pub(crate) fn carry_out_posted(&self, turn: &CallTurn<'_>) -> Progress {
        let rest = turn.budget.rest(turn.carried_out.used);
        if rest.is_spent() || (turn.is_over)() {
            return Progress::default();
        }
        let header = self.served_header();
        header.map_or_else(Progress::default, |header| {
            self.turn_of_ready(&header.memory, turn.look, &rest, || turn.is_over)
        })
    }

    /// Whether a turn would find something to do, for a context of a server without workers.
    #[doc(hidden)]
    #[must_use]
    pub fn has_work(&self) -> bool {
        let Some(header) = self.served_header() else {
            return false;
        };
        let calls = lock(&header.calls);
        calls.is_ready()
            || header.asyncs.is_ready()
            || self.ready().iter().any(|one| one.is_ready())
    }

    /// [`poll`](Self::poll), for a context of a server without workers.
    #[doc(hidden)]
    pub fn turn_now(self: &Arc<Self>, now: Instant) -> Progress {
        let look = Look {
            now,
            node: None,
            until: None,
            sweep: 0,
            pace: Pace::Whole,
        };
        self.poll(&look, &Budget::UNBOUNDED)
    }
}
