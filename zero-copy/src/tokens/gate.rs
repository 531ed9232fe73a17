//! Who is inside, and waiting until nobody is.

use farlane_sys::sync::{held, lock};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Lets transfers in until it is closed. Whoever closes it waits for those inside.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Held by whoever waits for those that came before.
    draining: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// How many are inside that entered in even and in odd phases.
    inside: [usize; 2],
    /// Whether those who enter now do so in an odd phase.
    phase: bool,
    closed: bool,
    /// Whether somebody waits for those inside of a gate that is open.
    drains: bool,
}

/// Somebody inside of a gate.
#[derive(Debug)]
pub struct Pass {
    gate: Arc<Gate>,
    phase: bool,
}

impl State {
    fn is_empty(&self) -> bool {
        self.inside == [0; 2]
    }
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        goes_on: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'a, State> {
        held(self.changed.wait_while(state, goes_on))
    }

    /// Lets one more in, unless the gate is closed.
    pub fn enter(self: &Arc<Self>) -> Option<Pass> {
        let mut state = self.state();
        if state.closed {
            return None;
        }
        let phase = state.phase;
        state.inside[usize::from(phase)] += 1;
        Some(Pass {
            gate: Arc::clone(self),
            phase,
        })
    }

    /// Closes the gate. Nobody is inside when this returns.
    pub fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        drop(self.wait(state, |state| !state.is_empty()));
    }

    /// Closes the gate, and says whether nobody is inside any more. Who closes it first waits at
    /// most `patience` for that.
    pub fn close_within(&self, patience: Duration) -> bool {
        let mut state = self.state();
        if std::mem::replace(&mut state.closed, true) {
            return state.is_empty();
        }
        let (state, _) = held(
            self.changed
                .wait_timeout_while(state, patience, |state| !state.is_empty()),
        );
        state.is_empty()
    }

    /// Waits for those inside. Others may enter meanwhile, and are not waited for.
    pub fn drain(&self) {
        let _one = lock(&self.draining);
        let mut state = self.state();
        let before = state.phase;
        // Nobody is inside of the next phase: the last one who waited has waited for them.
        state.phase = !before;
        state.drains = true;
        let mut state = self.wait(state, |state| state.inside[usize::from(before)] > 0);
        state.drains = false;
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.gate.state();
        let inside = &mut state.inside[usize::from(self.phase)];
        *inside -= 1;
        if *inside == 0 && (state.closed || state.drains) {
            self.gate.changed.notify_all();
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
        // Once it is closed nobody waits.
        assert!(!gate.close_within(Duration::MAX));
        drop(pass);
        assert!(gate.close_within(Duration::ZERO));
    }

    #[test]
    fn draining_waits_for_those_who_came_before_alone() {
        let gate = Arc::new(Gate::default());
        for _ in 0..3 {
            let early = gate.enter().unwrap();
            let drained = Arc::new(AtomicBool::new(false));
            let draining = std::thread::spawn({
                let (gate, drained) = (Arc::clone(&gate), Arc::clone(&drained));
                move || {
                    gate.drain();
                    drained.store(true, Ordering::SeqCst);
                }
            });
            while !gate.state().drains {
                std::thread::yield_now();
            }
            let late = gate.enter().unwrap();
            assert!(!drained.load(Ordering::SeqCst));
            drop(early);
            draining.join().unwrap();
            drop(late);
        }
        let early = gate.enter().unwrap();
        assert!(!gate.close_within(Duration::ZERO));
        drop(early);
        gate.drain();
        gate.close();
    }
}
