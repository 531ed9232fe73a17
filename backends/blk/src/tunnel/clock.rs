//! The clock by which tokens expire.

use farlane_sys::sync::{held, lock};
use farlane_zero_copy::tokens::Tokens;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long an epoch is.
const EPOCH: Duration = Duration::from_secs(1);

/// Counts epochs while there are processes.
#[derive(Debug)]
pub struct Clock {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Starts a clock that stands still.
#[derive(Clone, Debug)]
pub struct ClockHandle(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    runs: bool,
    ends: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn run(&self, tokens: &Tokens) {
        let mut state = self.state();
        while !state.ends {
            if !state.runs {
                state = held(self.changed.wait(state));
                continue;
            }
            let (next, waited) = held(self.changed.wait_timeout(state, EPOCH));
            state = next;
            if waited.timed_out() {
                drop(state);
                tokens.tick();
                state = self.state();
                // Whoever comes from now on starts the clock again.
                state.runs = !tokens.is_empty();
            }
        }
    }
}

impl Clock {
    /// A clock for `tokens`, which stands still.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn new(tokens: Arc<Tokens>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread = std::thread::Builder::new()
            .name("tunnel clock".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.run(&tokens)
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// What starts it.
    pub fn handle(&self) -> ClockHandle {
        ClockHandle(Arc::clone(&self.shared))
    }
}

impl ClockHandle {
    /// There is a process: the clock goes.
    pub fn start(&self) {
        let mut state = self.0.state();
        if !state.runs {
            state.runs = true;
            self.0.changed.notify_all();
        }
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.shared.state().ends = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
