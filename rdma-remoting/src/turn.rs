//! A context's turn: its calls, and the turns of its queue pairs.

use crate::context::Context;
use crate::counters;
use crate::engine::Progress;
use crate::objects::QpObject;
use crate::round::{Look, Pace};
use crate::verbs::CallHost;
use farlane_abi::control::EVENT_WAKE;
use farlane_abi::rdma::Verbs as _;
use farlane_sys::sync::lock;
use std::sync::Arc;
use std::time::Instant;

impl Context {
    /// One turn: answers its calls, and gives queue pairs turns, of which there are so many left
    /// for those that are idle.
    pub(crate) fn poll(self: &Arc<Self>, look: &Look, idle: &mut usize) -> Progress {
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
                    counters::count(&self.counters.calls, u64::from(served.calls));
                    if served.wake {
                        self.events.raise(EVENT_WAKE);
                    }
                }
                Err(e) => self.cut_off(&e),
            }
        }
        drop(calls);
        let mut rota = self.rota();
        let turn = |qp: &Arc<QpObject>| qp.engine.progress(look.turn);
        progress.and(rota.turn_of_context(look, idle, turn))
    }

    /// Whether a turn would find something to do, for a context of a server without workers.
    #[doc(hidden)]
    #[must_use]
    pub fn has_work(&self) -> bool {
        let Some(header) = self.served_header() else {
            return false;
        };
        let calls = lock(&header.calls);
        calls.is_ready() || self.rota().iter().any(|qp| qp.engine.is_ready())
    }

    /// [`poll`](Self::poll), for a context of a server without workers.
    #[doc(hidden)]
    pub fn turn_now(self: &Arc<Self>, now: Instant) -> Progress {
        let (turn, sweep, pace) = (now.into(), 0, Pace::Whole);
        self.poll(&Look { turn, sweep, pace }, &mut usize::MAX.clone())
    }
}
