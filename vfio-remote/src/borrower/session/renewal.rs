//! The thread that goes on renewing a lease.

use super::SessionError;
use super::shared::Shared;
use crate::protocol::message::{Fence, Refusal, Request};
use farlane_sys::chain;
use farlane_sys::thread::OwnedThread;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Renews a lease until it is dropped. Says so when the device is lost.
pub(super) struct Renewer {
    shared: Arc<Shared>,
    _thread: OwnedThread,
}

impl Drop for Renewer {
    fn drop(&mut self) {
        self.shared.rest();
    }
}

impl Renewer {
    pub fn start(shared: Arc<Shared>, fence: Fence, term: Duration) -> Result<Self, SessionError> {
        let theirs = Arc::clone(&shared);
        let thread = OwnedThread::spawn("lease", move || renew(&theirs, fence, term))?;
        Ok(Self {
            shared,
            _thread: thread,
        })
    }
}

/// Renews three times in a term.
fn renew(shared: &Shared, fence: Fence, term: Duration) {
    let interval = term / 3;
    while shared.wait_to_renew(interval) {
        // Without an answer the lease is over when the term is: two intervals are left of it.
        let renewed = shared.ask(Request::Renew { fence }, &[], Instant::now() + interval * 2);
        if shared.rests() {
            return;
        }
        if let Err(e) = renewed {
            if matches!(e, SessionError::Refused(Refusal::Ended(_))) {
                shared.set_stopping(fence);
            }
            if !shared.is_notified() {
                log::warn!("The lease cannot be renewed: {}", chain(&e));
            }
            shared.hang_up();
            shared.lose_and_notify();
            // Who has not let go yet goes on saying so.
            match shared.can_ask() {
                true => continue,
                false => return,
            }
        }
        shared.renewed();
    }
}
