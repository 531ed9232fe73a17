//! Interrupts on their way from a function to its user.

use farlane_sys::eventfd;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd as _, OwnedFd};

/// How a function interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum InterruptKind {
    /// By a pin.
    Intx,
    /// Message-signalled, PCI 3.0, 6.8.1.
    Msi,
    /// Message-signalled with a table, PCI 3.0, 6.8.2.
    Msix,
}

/// Where an interrupt goes. Raising one waits for nobody; it may read over a bridge.
pub trait Signal: Send + Sync + std::fmt::Debug {
    /// Raises it.
    fn raise(&self);
}

/// An eventfd that the VMM waits for.
#[derive(Debug)]
pub struct EventSignal(OwnedFd);

impl EventSignal {
    /// Raises interrupts by adding one to `eventfd`, which has been checked to be one.
    #[must_use]
    pub fn new(eventfd: OwnedFd) -> Self {
        Self(eventfd)
    }
}

impl Signal for EventSignal {
    fn raise(&self) {
        // A full counter means that the reader is due to wake anyway.
        eventfd::signal(self.0.as_fd());
    }
}
