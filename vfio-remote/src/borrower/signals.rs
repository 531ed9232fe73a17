//! The eventfds by which the VMM is interrupted.

use farlane_pci::{EventSignal, InterruptKind, InterruptVector, Signal as _};
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Debug, Default)]
struct Bindings {
    vectors: BTreeMap<InterruptVector, Arc<OwnedFd>>,
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

impl Signals {
    fn bound(&self) -> MutexGuard<'_, Bindings> {
        lock(&self.0)
    }

    /// Binds a vector, or unbinds it.
    pub fn bind(&self, vector: InterruptVector, eventfd: Option<Arc<OwnedFd>>) {
        let mut bound = self.bound();
        match eventfd {
            Some(fd) => drop(bound.vectors.insert(vector, fd)),
            None => drop(bound.vectors.remove(&vector)),
        }
    }

    /// All vectors of a kind that are bound.
    pub fn bound_vectors(&self, kind: InterruptKind) -> Vec<(InterruptVector, Arc<OwnedFd>)> {
        self.bound()
            .vectors
            .iter()
            .filter(|(vector, _)| vector.kind() == kind)
            .map(|(&vector, fd)| (vector, Arc::clone(fd)))
            .collect()
    }

    /// Raises a vector as the VM sees it, if it is bound.
    pub fn raise(&self, vector: InterruptVector) {
        if let Some(fd) = self.bound().vectors.get(&vector) {
            farlane_sys::eventfd::signal(fd.as_fd());
        }
    }

    /// Raises a vector of the function, which the VM may see as MSI instead of MSI-X.
    pub fn raise_from_lender(&self, vector: InterruptVector) {
        let bound = self.bound();
        let seen = match vector {
            InterruptVector::Msix(number) if bound.translated => InterruptVector::Msi(number),
            other => other,
        };
        if let Some(fd) = bound.vectors.get(&seen) {
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
