//! Descriptors that others have sent, or can have sent, and that are closed.
//!
//! `close` may ask whoever serves a file (`FUSE_FLUSH`), or wait for the peer of a socket (`SO_LINGER`): for ever. That is so also of
//! descriptors that nobody has received and that end with the socket in which they lie. So each connection is closed on a thread of its own.

use farlane_rdma_remoting::Share;
use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a thread's stack: it makes system calls.
const STACK: usize = 64 << 10;

/// Of processes of other users, so many descriptors: those of more are closed at once, whatever they wait for.
const MOST_OF_STRANGERS: usize = 1024;

/// By whom descriptors were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Sender {
    /// A process that was let in, with this number.
    Process(i32),
    /// One of another user.
    Stranger,
}

/// How many descriptors of each sender are being closed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Closing(Arc<Mutex<HashMap<Sender, usize>>>);

impl Closing {
    fn counts(&self) -> MutexGuard<'_, HashMap<Sender, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many of a sender's are.
    pub fn of(&self, sender: Sender) -> usize {
        self.counts().get(&sender).copied().unwrap_or(0)
    }

    /// Closes `descriptors`. What the process has taken for them is given back afterwards.
    pub fn close(&self, sender: Sender, descriptors: Vec<OwnedFd>, share: Option<Share>) {
        if sender == Sender::Stranger && self.of(sender) >= MOST_OF_STRANGERS {
            return;
        }
        let count = Count::new(self.clone(), sender, descriptors.len());
        // Where there is no thread they stay open, and counted.
        let held = ManuallyDrop::new((descriptors, share, count));
        let close = move || drop(ManuallyDrop::into_inner(held));
        let thread = std::thread::Builder::new()
            .name("host-close".to_owned())
            .stack_size(STACK);
        if let Err(e) = thread.spawn(close) {
            log::warn!("Cannot close descriptors of {sender:?}: {e}");
        }
    }
}

/// Some that are being closed.
struct Count {
    closing: Closing,
    sender: Sender,
    descriptors: usize,
}

impl Count {
    fn new(closing: Closing, sender: Sender, descriptors: usize) -> Self {
        *closing.counts().entry(sender).or_default() += descriptors;
        Self {
            closing,
            sender,
            descriptors,
        }
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        let mut counts = self.closing.counts();
        if let Some(count) = counts.get_mut(&self.sender) {
            *count -= self.descriptors;
            if *count == 0 {
                counts.remove(&self.sender);
            }
        }
    }
}
