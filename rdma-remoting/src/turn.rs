//! A context's turn: its calls, and the turns of its queue pairs and shared receive queues.

use crate::call_ring::{CallRingError, Served};
use crate::context::{Context, Header};
use crate::counters;
use crate::engine::{Budget, OPERATION_COST, Progress};
use crate::round::{Look, Pace};
use crate::verbs::CallHost;
use farlane_abi::control::EVENT_WAKE;
use farlane_abi::rdma::Verbs as _;
use farlane_sys::sync::lock;
use farlane_zero_copy::SharedMemory;
use std::cell::OnceCell;
use std::sync::Arc;
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

    /// When it has begun.
    pub fn now(&self) -> Instant {
        self.look.now
    }
}

impl Context {
    /// One turn: answers its calls, passes on events that wait, and gives queue pairs turns that
    /// may have something to do.
    pub(crate) fn poll(self: &Arc<Self>, look: &Look, budget: &Budget) -> Progress {
        let Some(header) = self.served_header() else {
            return Progress::default();
        };
        let mut progress = self.answer(header, look, budget);
        let events = header.asyncs.pass_on();
        if events > 0 {
            progress.worked = true;
            progress.used.cost += OPERATION_COST * u64::from(events);
        }
        let rest = budget.rest(progress.used);
        progress.and(self.turn_of_ready(&header.memory, look, &rest, || look.clock()))
    }

    /// Answers its calls.
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
            let dispatch = |number, args: &[u8], out: &mut [u8]| {
                let begin = Instant::now();
                let outcome = host.dispatch(number, args, out);
                self.traffic.calls.add(begin.elapsed());
                outcome
            };
            let served = calls.serve(begin, dispatch);
            progress = progress.and(host.carried_out());
            drop(calls);
            progress.used.cost += OPERATION_COST * u64::from(self.answered(served));
        }
        progress
    }

    /// Counts calls that were answered, and wakes who waits for that. Returns how many.
    fn answered(&self, served: Result<Served, CallRingError>) -> u32 {
        match served {
            Ok(served) => {
                counters::count(&self.counters.calls, u64::from(served.calls));
                if served.wake {
                    self.events.raise(EVENT_WAKE);
                }
                served.calls
            }
            Err(e) => {
                self.cut_off(&e);
                0
            }
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
        let mut ready = self.ready();
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
            idle: usize::MAX,
        };
        let progress = self.poll(&look, &Budget::UNBOUNDED);
        self.connections.turn(now);
        progress
    }
}
