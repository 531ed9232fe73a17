//! Threads with names: those whose owner waits for them, and those that nobody waits for.

use std::io;
use std::thread::{Builder, JoinHandle};

/// Starts a thread that nobody waits for.
///
/// # Errors
/// The system refuses one.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = Builder::new().name(name.to_owned());
    thread.spawn(work).map(drop)
}

/// A thread. Dropping this waits for its end: whatever tells it to end comes before.
#[derive(Debug)]
pub struct OwnedThread(Option<JoinHandle<()>>);

impl OwnedThread {
    /// Starts a thread that does `work`.
    ///
    /// # Errors
    /// The system refuses one.
    pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let thread = Builder::new().name(name.to_owned()).spawn(work)?;
        Ok(Self(Some(thread)))
    }
}

impl Drop for OwnedThread {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            if thread.join().is_err() {
                log::error!("The thread {name} has panicked");
            }
        }
    }
}
