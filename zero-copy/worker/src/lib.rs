//! Threads that serve queues, whatever is in the queues.
//!
//! * [`mod@counters`]: numbers that it adds to.
//! * [`histogram`]: how long what it does takes.
//! * [`idle`]: how a worker waits for the next request.
//! * [`mailbox`]: how one worker passes work to another.
//! * [`policy`]: how long it polls, naps and sleeps.
//! * [`thread`]: what its thread does first.
//! * [`wake`]: sleeping without missing what others post.

pub mod counters;
pub mod histogram;
pub mod idle;
pub mod mailbox;
pub mod policy;
pub mod thread;
pub mod wake;

/// Of the standard library; `tests/loom.rs` has loom's in its place.
mod sync {
    pub use std::sync::atomic;
}

use std::os::fd::OwnedFd;

/// An eventfd that does not block.
impl wake::Event for OwnedFd {
    fn raise(&self) {
        // Fails only where it has been raised 2^64 - 2 times, and then it is raised.
        while rustix::io::write(self, &1_u64.to_ne_bytes()) == Err(rustix::io::Errno::INTR) {}
    }
}
