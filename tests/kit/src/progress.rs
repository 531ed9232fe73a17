//! What a person sees while something takes long.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

/// A line a long step, and another one with the time every so often.
const TICK: Duration = Duration::from_secs(15);

/// Says one line about what happens.
pub fn note(text: &str) {
    eprintln!("farlane: {text}");
}

/// Runs a step that may take long, saying so at its start and while it lasts.
///
/// # Errors
/// Those of the step.
pub fn step<T>(what: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    note(&format!("{what} ..."));
    let start = Instant::now();
    let (ended, end) = channel::<()>();
    let result = thread::scope(|scope| {
        scope.spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(TICK) {
                note(&format!("{what} ... {} s", start.elapsed().as_secs()));
            }
        });
        let result = run();
        drop(ended);
        result
    });
    if result.is_ok() {
        note(&format!(
            "{what}: done in {:.1} s",
            start.elapsed().as_secs_f64()
        ));
    }
    result
}
