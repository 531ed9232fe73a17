//! Descriptors that others have sent, or can have sent, and that are closed.
//!
//! `close` may ask whoever serves a file (`FUSE_FLUSH`), or wait for the peer of a socket
//! (`SO_LINGER`): for ever. That is so also of descriptors that nobody has received and that end
//! with the socket in which they lie. So they are closed on a thread of their own.

use crate::sync::lock;
use std::collections::HashMap;
use std::hash::Hash;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes of a thread's stack: it makes system calls.
const STACK: usize = 64 << 10;

/// How many descriptors of each sender are being closed.
#[derive(Debug)]
pub struct Closing<K>(Arc<Mutex<HashMap<K, usize>>>);

impl<K> Default for Closing<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Hash + Eq + Clone + Send + 'static> Closing<K> {
    fn counts(&self) -> MutexGuard<'_, HashMap<K, usize>> {
        lock(&self.0)
    }

    /// How many of a sender's are.
    #[must_use]
    pub fn of(&self, sender: &K) -> usize {
        self.counts().get(sender).copied().unwrap_or(0)
    }

    /// Closes `descriptors`. Afterwards what was taken for them is dropped, too.
    pub fn close(&self, sender: K, descriptors: Vec<OwnedFd>, taken: impl Send + 'static) {
        if descriptors.is_empty() {
            return;
        }
        let count = Count::new(Self(Arc::clone(&self.0)), sender, descriptors.len());
        // Where there is no thread they stay open, and counted.
        let held = ManuallyDrop::new((descriptors, taken, count));
        let close = move || drop(ManuallyDrop::into_inner(held));
        let thread = std::thread::Builder::new()
            .name("close".to_owned())
            .stack_size(STACK);
        if let Err(e) = thread.spawn(close) {
            log::warn!("Cannot close descriptors that were sent: {e}");
        }
    }
}

/// Some that are being closed.
struct Count<K: Hash + Eq + Clone + Send + 'static> {
    closing: Closing<K>,
    sender: K,
    descriptors: usize,
}

impl<K: Hash + Eq + Clone + Send + 'static> Count<K> {
    fn new(closing: Closing<K>, sender: K, descriptors: usize) -> Self {
        *closing.counts().entry(sender.clone()).or_default() += descriptors;
        Self {
            closing,
            sender,
            descriptors,
        }
    }
}

impl<K: Hash + Eq + Clone + Send + 'static> Drop for Count<K> {
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
