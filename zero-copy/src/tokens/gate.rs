//! Who is inside, and waiting until nobody is.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Lets transfers in until it is closed. Whoever closes it waits for those inside.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    inside: usize,
    closed: bool,
}

/// Somebody inside of a gate.
#[derive(Debug)]
pub struct Pass(Arc<Gate>);

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets one more in, unless the gate is closed.
    pub fn enter(self: &Arc<Self>) -> Option<Pass> {
        let mut state = self.state();
        if state.closed {
            return None;
        }
        state.inside += 1;
        Some(Pass(Arc::clone(self)))
    }

    /// Closes the gate. Nobody is inside when this returns.
    pub fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        while state.inside > 0 {
            state = self
                .idle
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Closes the gate, and waits at most `patience` for those inside. Says whether nobody is inside any more.
    pub fn close_within(&self, patience: Duration) -> bool {
        let mut state = self.state();
        state.closed = true;
        let (state, _) = self
            .idle
            .wait_timeout_while(state, patience, |state| state.inside > 0)
            .unwrap_or_else(PoisonError::into_inner);
        state.inside == 0
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.inside -= 1;
        if state.closed && state.inside == 0 {
            self.0.idle.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn closing_waits_for_those_inside_and_lets_nobody_in() {
        let gate = Arc::new(Gate::default());
        let passes = [gate.enter().unwrap(), gate.enter().unwrap()];
        let closed = Arc::new(AtomicBool::new(false));
        let closing = std::thread::spawn({
            let (gate, closed) = (Arc::clone(&gate), Arc::clone(&closed));
            move || {
                gate.close();
                closed.store(true, Ordering::SeqCst);
            }
        });
        while gate.enter().is_some() {
            std::thread::yield_now();
        }
        for pass in passes {
            assert!(!closed.load(Ordering::SeqCst));
            drop(pass);
        }
        closing.join().unwrap();
        gate.close();
        assert!(gate.enter().is_none());
    }

    #[test]
    fn closing_for_some_time_says_whether_somebody_is_inside() {
        let gate = Arc::new(Gate::default());
        let pass = gate.enter().unwrap();
        assert!(!gate.close_within(Duration::ZERO));
        assert!(gate.enter().is_none());
        assert!(!gate.close_within(Duration::from_millis(1)));
        drop(pass);
        assert!(gate.close_within(Duration::ZERO));
    }
}
