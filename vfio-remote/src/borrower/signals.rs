//! The eventfds by which the VMM is interrupted.

use farlane_pci::{EventSignal, InterruptKind, Interrupts, Signal as _};
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Debug, Default)]
struct Bindings {
    /// By kind and vector.
    vectors: BTreeMap<(u8, u16), Arc<OwnedFd>>,
    request: Option<EventSignal>,
    /// MSI vectors of the VM are MSI-X vectors of the function.
    translated: bool,
    /// The device is wanted back, or gone: told as soon as somebody can be told.
    wanted: bool,
}

/// What is bound, and how it is raised. Used by the thread that serves the VMM and by the one
/// that receives from the lender.
#[derive(Debug, Default)]
pub(crate) struct Signals(Mutex<Bindings>);

/// The order of kinds is VFIO's (`VFIO_PCI_INTX_IRQ_INDEX` and so on).
fn number(kind: InterruptKind) -> u8 {
    match kind {
        InterruptKind::Intx => 0,
        InterruptKind::Msi => 1,
        InterruptKind::Msix => 2,
    }
}

/// The kind of a VFIO interrupt index.
pub(crate) fn kind_of(index: u32) -> Option<InterruptKind> {
    match index {
        0 => Some(InterruptKind::Intx),
        1 => Some(InterruptKind::Msi),
        2 => Some(InterruptKind::Msix),
        _ => None,
    }
}

/// How many vectors of a kind there are.
pub(crate) fn count_of(interrupts: Interrupts, kind: InterruptKind) -> u16 {
    match kind {
        InterruptKind::Intx => interrupts.intx,
        InterruptKind::Msi => interrupts.msi,
        InterruptKind::Msix => interrupts.msix,
    }
}

impl Signals {
    fn bound(&self) -> MutexGuard<'_, Bindings> {
        lock(&self.0)
    }

    /// Binds a vector, or unbinds it.
    pub fn bind(&self, kind: InterruptKind, vector: u16, eventfd: Option<Arc<OwnedFd>>) {
        let mut bound = self.bound();
        let key = (number(kind), vector);
        match eventfd {
            Some(fd) => drop(bound.vectors.insert(key, fd)),
            None => drop(bound.vectors.remove(&key)),
        }
    }

    /// All vectors of a kind that are bound.
    pub fn bound_vectors(&self, kind: InterruptKind) -> Vec<(u16, Arc<OwnedFd>)> {
        let number = number(kind);
        self.bound()
            .vectors
            .range((number, 0)..=(number, u16::MAX))
            .map(|(&(_, vector), fd)| (vector, Arc::clone(fd)))
            .collect()
    }

    /// Raises a vector as the VM sees it, if it is bound.
    pub fn raise(&self, kind: InterruptKind, vector: u16) {
        if let Some(fd) = self.bound().vectors.get(&(number(kind), vector)) {
            farlane_sys::eventfd::signal(fd.as_fd());
        }
    }

    /// Raises a vector of the function, which the VM may see as MSI instead of MSI-X.
    pub fn raise_from_lender(&self, kind: InterruptKind, vector: u16) {
        let bound = self.bound();
        let seen = match kind {
            InterruptKind::Msix if bound.translated => InterruptKind::Msi,
            other => other,
        };
        if let Some(fd) = bound.vectors.get(&(number(seen), vector)) {
            farlane_sys::eventfd::signal(fd.as_fd());
        }
    }

    /// Whether the VM sees MSI-X vectors of the function as MSI vectors.
    pub fn set_translated(&self, translated: bool) {
        self.bound().translated = translated;
    }

    /// Binds the request for the device (`VFIO_PCI_REQ_IRQ_INDEX`), upon which the VMM
    /// unplugs it.
    pub fn bind_request(&self, eventfd: Option<OwnedFd>) {
        let mut bound = self.bound();
        bound.request = eventfd.map(EventSignal::new);
        if bound.wanted
            && let Some(request) = &bound.request
        {
            request.raise();
        }
    }

    /// Asks the VMM to unplug the device.
    pub fn request_unplug(&self) {
        let mut bound = self.bound();
        bound.wanted = true;
        if let Some(request) = &bound.request {
            request.raise();
        }
    }

    /// As for a new device.
    pub fn clear(&self) {
        *self.bound() = Bindings::default();
    }

    /// The device is there (again).
    pub fn clear_unplug_request(&self) {
        self.bound().wanted = false;
    }
}
