//! Interrupts on their way from a function to its user.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;

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

/// Where an interrupt goes. Raising one never blocks.
pub trait Signal: Send + Sync + std::fmt::Debug {
    /// Raises it.
    fn raise(&self);
}

/// An eventfd that the virtual machine monitor waits for. It must not block (`O_NONBLOCK`).
#[derive(Debug)]
pub struct EventSignal(OwnedFd);

impl EventSignal {
    /// Raises interrupts by adding one to `eventfd`, which has been checked to be one and not to
    /// block.
    #[must_use]
    pub fn new(eventfd: OwnedFd) -> Self {
        Self(eventfd)
    }
}

impl Signal for EventSignal {
    fn raise(&self) {
        // A full counter means that the reader is due to wake anyway.
        while rustix::io::write(&self.0, &1_u64.to_ne_bytes()) == Err(Errno::INTR) {}
    }
}
