//! Interrupts of a borrowed function: who is signalled, and by whom.

use super::deadline::Deadline;
use super::device::Borrowed;
use super::session::{Session, SessionError};
use crate::protocol::message::{Delivery, Fence, MAX_VECTORS, Request};
use farlane_pci::{InterruptKind, InterruptVector};
use farlane_vfio_user::{DeviceInfo, Errno, IrqAction, IrqInfo};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// VFIO's interrupt index of a request for the device (`VFIO_PCI_REQ_IRQ_INDEX`).
const REQUEST_IRQ: u32 = 4;

impl Borrowed {
    /// Which of the function's vectors the VM sees as this one.
    fn at_lender(&self, vector: InterruptVector) -> InterruptVector {
        match vector {
            InterruptVector::Msi(number) if self.translated => InterruptVector::Msix(number),
            other => other,
        }
    }

    /// Tells the lender where all vectors of a kind go.
    pub(super) fn send_vectors(&mut self, kind: InterruptKind) {
        let mut bound = self.signals.bound_vectors(kind);
        for (vector, _) in &mut bound {
            *vector = self.at_lender(*vector);
        }
        self.with_device("set interrupts", |session, fence, deadline| {
            bound.iter().try_for_each(|(vector, eventfd)| {
                send_vector((session, fence, deadline), *vector, Some(eventfd))
            })
        });
    }

    pub(super) fn has_intx(&self) -> bool {
        self.interrupts.intx > 0
    }

    /// Whether the VMM may be asked to unplug the device.
    fn can_be_unplugged(&self) -> bool {
        self.interrupts.msix == 0
    }

    /// What the VMM is told of an interrupt type.
    pub(super) fn interrupt_info(&self, index: u32) -> Option<IrqInfo> {
        if index == REQUEST_IRQ && self.can_be_unplugged() {
            return Some(IrqInfo {
                count: 1,
                eventfd: true,
                noresize: true,
                ..IrqInfo::default()
            });
        }
        if index >= DeviceInfo::PCI.irqs {
            return None;
        }
        let Some(kind) = kind_of(index) else {
            return Some(IrqInfo::default());
        };
        let is_intx = kind == InterruptKind::Intx;
        Some(IrqInfo {
            count: self.interrupts.count(kind).into(),
            eventfd: true,
            maskable: is_intx,
            automasked: is_intx,
            noresize: kind == InterruptKind::Msi,
        })
    }

    pub(super) fn bind(
        &mut self,
        index: u32,
        start: u32,
        eventfds: Vec<Option<OwnedFd>>,
    ) -> Result<(), Errno> {
        if index == REQUEST_IRQ {
            let eventfd = eventfds.into_iter().next().flatten();
            self.signals.bind_request(eventfd);
            return Ok(());
        }
        let kind = kind_of(index).ok_or(Errno::INVAL)?;
        for (number, eventfd) in (start..).zip(eventfds) {
            let vector = vector_of(kind, number)?;
            let theirs = self.at_lender(vector);
            let eventfd = eventfd.map(Arc::new);
            self.signals.bind(vector, eventfd.clone());
            self.with_device("set an interrupt", |session, fence, deadline| {
                send_vector((session, fence, deadline), theirs, eventfd.as_ref())
            });
        }
        Ok(())
    }

    pub(super) fn disable(&mut self, index: u32) -> Result<(), Errno> {
        if index == REQUEST_IRQ {
            self.signals.bind_request(None);
            return Ok(());
        }
        let kind = kind_of(index).ok_or(Errno::INVAL)?;
        for (vector, _) in self.signals.bound_vectors(kind) {
            let theirs = self.at_lender(vector);
            self.signals.bind(vector, None);
            self.with_device("unset an interrupt", |session, fence, deadline| {
                send_vector((session, fence, deadline), theirs, None)
            });
        }
        Ok(())
    }

    pub(super) fn perform(
        &mut self,
        index: u32,
        start: u32,
        action: IrqAction,
        selected: &[bool],
    ) -> Result<(), Errno> {
        if index == REQUEST_IRQ {
            if action == IrqAction::Trigger && selected.contains(&true) {
                self.signals.request_unplug();
                return Ok(());
            }
            return Err(Errno::OPNOTSUPP);
        }
        let kind = kind_of(index).ok_or(Errno::INVAL)?;
        for (number, _) in (start..).zip(selected).filter(|&(_, &selected)| selected) {
            match (action, vector_of(kind, number)?) {
                (IrqAction::Trigger, vector) => self.signals.raise(vector),
                (IrqAction::Mask | IrqAction::Unmask, InterruptVector::Intx) => {
                    let masked = action == IrqAction::Mask;
                    self.with_device("mask INTx", |session, fence, deadline| {
                        session.ask(Request::MaskIntx { fence, masked }, &[], deadline)
                    });
                }
                _ => return Err(Errno::OPNOTSUPP),
            }
        }
        Ok(())
    }
}

/// The kind of a VFIO interrupt index (`VFIO_PCI_INTX_IRQ_INDEX` and so on).
fn kind_of(index: u32) -> Option<InterruptKind> {
    match index {
        0 => Some(InterruptKind::Intx),
        1 => Some(InterruptKind::Msi),
        2 => Some(InterruptKind::Msix),
        _ => None,
    }
}

/// The vector that the VMM names.
fn vector_of(kind: InterruptKind, number: u32) -> Result<InterruptVector, Errno> {
    let number = u16::try_from(number).map_err(|_| Errno::INVAL)?;
    InterruptVector::new(kind, number).ok_or(Errno::INVAL)
}

/// Tells the lender where a vector goes.
fn send_vector(
    (session, fence, deadline): (&Session, Fence, Deadline),
    vector: InterruptVector,
    eventfd: Option<&Arc<OwnedFd>>,
) -> Result<(), SessionError> {
    const { assert!(MAX_VECTORS >= 1) };
    let fds: Vec<BorrowedFd<'_>> = match eventfd {
        Some(fd) if session.carries_descriptors() => vec![fd.as_fd()],
        _ => Vec::new(),
    };
    let delivery = match (eventfd, fds.is_empty()) {
        (None, _) => Delivery::Off,
        (Some(_), true) => Delivery::Message,
        (Some(_), false) => Delivery::Eventfd,
    };
    let request = Request::SetInterrupts {
        fence,
        kind: vector.kind(),
        first: vector.number(),
        vectors: vec![delivery],
    };
    session.ask(request, &fds, deadline)
}
