//! What the VMMs that come to one socket have in common.

use farlane_daemon::log_limit::LogLimit;
use farlane_sys::closing;
use farlane_sys::eventfd::closes_at_once;
use std::os::fd::{AsFd as _, OwnedFd};

/// Descriptors of one socket's VMMs that may take long to be closed, before the one that is served
/// has to go and the next one to wait.
pub(crate) const MAX_CLOSING: usize = 256;

/// One socket: its VMMs' share of the log, and their descriptors.
#[derive(Debug, Default)]
pub struct Socket {
    /// How much they can have logged, however often they come.
    pub limit: LogLimit,
    pub(crate) closing: closing::Closing<()>,
}

impl Socket {
    /// Closes a descriptor that a VMM has sent, whatever it is. Does not wait.
    pub fn discard(&self, file: OwnedFd) {
        self.discard_all(vec![file]);
    }

    /// Closes descriptors that a VMM has sent.
    pub fn discard_all(&self, mut files: Vec<OwnedFd>) {
        files.retain(|file| !closes_at_once(file.as_fd()));
        self.closing.close((), files, ());
    }

    /// Whether too many descriptors are being closed.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.closing.of(&()) > MAX_CLOSING
    }
}
