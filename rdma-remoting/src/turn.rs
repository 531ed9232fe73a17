//! A context's turn: its calls, and the turns of its queue pairs and shared receive queues.

use crate::context::Context;
use crate::counters;
use crate::engine::{Budget, OPERATION_COST, Progress, Turn};
use crate::round::{Look, Pace};
use crate::verbs::CallHost;
use farlane_abi::control::EVENT_WAKE;
use farlane_abi::rdma::Verbs as _;
use farlane_sys::sync::lock;
use std::sync::Arc;
use std::time::Instant;

impl Context {
    /// One turn: answers its calls, and gives queue pairs turns that may have something to do.
    pub(crate) fn poll(self: &Arc<Self>, look: &Look) -> Progress {
        let mut progress = Progress::default();
        let Some(header) = self.served_header() else {
            return progress;
        };
        let mut calls = lock(&header.calls);
        if calls.is_ready() {
            progress.worked = true;
            let mut host = CallHost::new(self);
            let dispatch = |number, args: &[u8], out: &mut [u8]| host.dispatch(number, args, out);
            match calls.serve(|| look.clock(), dispatch) {
                Ok(served) => {
                    let calls = u64::from(served.calls);
                    counters::count(&self.counters.calls, calls);
                    progress.used.cost += OPERATION_COST * calls;
                    if served.wake {
                        self.events.raise(EVENT_WAKE);
                    }
                }
                Err(e) => self.cut_off(&e),
            }
        }
        drop(calls);
        let mut ready = self.ready();
        let now = look.turn.now;
        ready.call_scheduled(self.inbox(), now);
        ready.call_rung(&header.memory, now);
        if look.pace == Pace::Whole {
            ready.call_all(now);
        }
        progress.and(ready.turn(look, || look.clock()))
    }

    /// Whether a turn would find something to do, for a context of a server without workers.
    #[doc(hidden)]
    #[must_use]
    pub fn has_work(&self) -> bool {
        let Some(header) = self.served_header() else {
            return false;
        };
        let calls = lock(&header.calls);
        calls.is_ready() || self.ready().iter().any(|one| one.is_ready())
    }

    /// [`poll`](Self::poll), for a context of a server without workers.
    #[doc(hidden)]
    pub fn turn_now(self: &Arc<Self>, now: Instant) -> Progress {
        let (sweep, pace) = (0, Pace::Whole);
        let turn = Turn {
            budget: Budget::UNBOUNDED,
            ..now.into()
        };
        self.poll(&Look { turn, sweep, pace })
    }
}
