//! Interrupts on their way from a function to its user.

use farlane_sys::eventfd;
use serde::{Deserialize, Serialize};
use std::fmt;
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

impl InterruptKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Intx, Self::Msi, Self::Msix];
}

/// One of the interrupts of a function: its kind, and its number among those of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum InterruptVector {
    /// The pin: a function has one at most.
    Intx,
    /// The message of this number, PCI 3.0, 6.8.1.
    Msi(u16),
    /// The message that this entry of the table tells, PCI 3.0, 6.8.2.
    Msix(u16),
}

impl InterruptVector {
    /// The vector of this number, where a function can have it.
    #[must_use]
    pub const fn new(kind: InterruptKind, number: u16) -> Option<Self> {
        match (kind, number) {
            (InterruptKind::Intx, 0) => Some(Self::Intx),
            (InterruptKind::Intx, _) => None,
            (InterruptKind::Msi, number) => Some(Self::Msi(number)),
            (InterruptKind::Msix, number) => Some(Self::Msix(number)),
        }
    }

    /// Its kind.
    #[must_use]
    pub const fn kind(self) -> InterruptKind {
        match self {
            Self::Intx => InterruptKind::Intx,
            Self::Msi(_) => InterruptKind::Msi,
            Self::Msix(_) => InterruptKind::Msix,
        }
    }

    /// Its number among the vectors of its kind.
    #[must_use]
    pub const fn number(self) -> u16 {
        match self {
            Self::Intx => 0,
            Self::Msi(number) | Self::Msix(number) => number,
        }
    }
}

impl fmt::Display for InterruptVector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Intx => write!(f, "INTx"),
            Self::Msi(number) => write!(f, "MSI vector {number}"),
            Self::Msix(number) => write!(f, "MSI-X vector {number}"),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Interrupts;

    #[test]
    fn a_function_has_one_pin_and_as_many_messages_as_it_says() {
        let interrupts = Interrupts {
            intx: 1,
            msi: 0,
            msix: 3,
        };
        let pin = interrupts.vectors(InterruptKind::Intx, 0, 1);
        assert_eq!(pin, Some(vec![InterruptVector::Intx]));
        let two = [InterruptVector::Msix(1), InterruptVector::Msix(2)];
        let found = interrupts.vectors(InterruptKind::Msix, 1, 2);
        assert_eq!(found.as_deref(), Some(&two[..]));
        for (kind, first, count) in [
            (InterruptKind::Intx, 1, 1),
            (InterruptKind::Intx, 0, 2),
            (InterruptKind::Msi, 0, 1),
            (InterruptKind::Msix, 2, 2),
            (InterruptKind::Msix, u16::MAX, 1),
            (InterruptKind::Msix, 0, usize::MAX),
        ] {
            assert_eq!(interrupts.vectors(kind, first, count), None);
        }
        for kind in InterruptKind::ALL {
            let vector = InterruptVector::new(kind, 0).unwrap();
            assert_eq!((vector.kind(), vector.number()), (kind, 0));
            let other = InterruptVector::new(kind, 7);
            assert_eq!(other.is_some(), kind != InterruptKind::Intx);
        }
    }
}
