//! The thread that goes on renewing a lease.

use super::SessionError;
use super::shared::Shared;
use crate::link::message::{Fence, Request};
use farlane_zero_copy::chain;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Renews a lease until it is dropped.
pub(super) struct Heart {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Heart {
    fn drop(&mut self) {
        *self.stop.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Heart {
    pub fn start(shared: Arc<Shared>, fence: Fence, term: Duration) -> Result<Self, SessionError> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let theirs = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("lease".to_owned())
            .spawn(move || beat(&shared, fence, term, &theirs))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

/// Renews three times in a term.
fn beat(shared: &Shared, fence: Fence, term: Duration, stop: &(Mutex<bool>, Condvar)) {
    let interval = term / 3;
    loop {
        let stopped = stop.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (stopped, _) = stop
            .1
            .wait_timeout_while(stopped, interval, |stopped| !*stopped)
            .unwrap_or_else(PoisonError::into_inner);
        if *stopped {
            return;
        }
        drop(stopped);
        // Without an answer the lease is over when the term is: two intervals are left of it.
        if let Err(e) = shared.ask(Request::Renew { fence }, &[], interval * 2) {
            log::warn!("The lease cannot be renewed: {}", chain(&e));
            shared.lose_and_tell();
            return;
        }
        if let Some(tenure) = &mut *shared.tenure() {
            tenure.renewed = Instant::now();
        }
    }
}
