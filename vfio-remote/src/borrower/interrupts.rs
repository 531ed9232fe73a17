//! Interrupts of a borrowed function: who is signalled, and by whom.

use super::deadline::Deadline;
use super::device::Borrowed;
use super::session::{Session, SessionError};
use super::signals::{count_of, kind_of};
use crate::protocol::message::{Delivery, Fence, MAX_VECTORS, Request};
use farlane_pci::InterruptKind;
use farlane_vfio_user::{DeviceInfo, Errno, IrqAction, IrqInfo};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// VFIO's interrupt index of a request for the device (`VFIO_PCI_REQ_IRQ_INDEX`).
const REQUEST_IRQ: u32 = 4;

impl Borrowed {
    /// What the function's interrupts are that the VM sees as of this kind.
    fn kind_at_lender(&self, kind: InterruptKind) -> InterruptKind {
        match kind {
            InterruptKind::Msi if self.translated => InterruptKind::Msix,
            other => other,
        }
    }

    /// Tells the lender where all vectors of a kind go.
    pub(super) fn send_vectors(&mut self, kind: InterruptKind) {
        let bound = self.signals.bound_vectors(kind);
        let theirs = self.kind_at_lender(kind);
        self.with_device("set interrupts", |session, fence, deadline| {
            bound.iter().try_for_each(|(vector, eventfd)| {
                send_vector((session, fence, deadline), theirs, *vector, Some(eventfd))
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
            count: u32::from(count_of(self.interrupts, kind)),
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
        let theirs = self.kind_at_lender(kind);
        let mut vector = u16::try_from(start).map_err(|_| Errno::INVAL)?;
        for eventfd in eventfds {
            let eventfd = eventfd.map(Arc::new);
            self.signals.bind(kind, vector, eventfd.clone());
            self.with_device("set an interrupt", |session, fence, deadline| {
                send_vector((session, fence, deadline), theirs, vector, eventfd.as_ref())
            });
            vector = vector.checked_add(1).ok_or(Errno::INVAL)?;
        }
        Ok(())
    }

    pub(super) fn disable(&mut self, index: u32) -> Result<(), Errno> {
        if index == REQUEST_IRQ {
            self.signals.bind_request(None);
            return Ok(());
        }
        let kind = kind_of(index).ok_or(Errno::INVAL)?;
        let theirs = self.kind_at_lender(kind);
        for (vector, _) in self.signals.bound_vectors(kind) {
            self.signals.bind(kind, vector, None);
            self.with_device("unset an interrupt", |session, fence, deadline| {
                send_vector((session, fence, deadline), theirs, vector, None)
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
            let vector = u16::try_from(number).map_err(|_| Errno::INVAL)?;
            match (action, kind) {
                (IrqAction::Trigger, _) => self.signals.raise(kind, vector),
                (IrqAction::Mask | IrqAction::Unmask, InterruptKind::Intx) => {
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

/// Tells the lender where a vector goes.
fn send_vector(
    (session, fence, deadline): (&Session, Fence, Deadline),
    kind: InterruptKind,
    vector: u16,
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
        kind,
        first: vector,
        vectors: vec![delivery],
    };
    session.ask(request, &fds, deadline)
}
