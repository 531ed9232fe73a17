//! Configuration space of a borrowed function: what is virtual is here, and what follows from it.

use super::bars::Decoded;
use super::device::{Borrowed, Presence, RETRY};
use super::layout::{LayoutError, User};
use super::session::{RegisterAddress, SessionError};
use crate::protocol::message::{Refusal, Request};
use farlane_abi::width::to_usize;
use farlane_pci::{AddressRange, ConfigSpace, Effects, Region};
use farlane_sys::chain;
use farlane_vfio_user::{AccessPause, Client};
use std::sync::Arc;
use std::time::Duration;

/// No smaller stretch of a BAR can be mapped.
const PAGE_BYTES: u64 = 4096;
/// So much of the VMM's time is kept for the reset itself.
const RESETTING: Duration = Duration::from_millis(500);

impl Borrowed {
    /// A device that ends what it is at may be at the VMM's memory, and this is the thread that
    /// would take the answer: that fails.
    fn pause_access(&self) -> Option<AccessPause> {
        self.client.as_ref().map(Client::pause_access)
    }

    /// Shows memory to the device if it is a bus master, else takes it away. So much of the
    /// VMM's time is kept.
    pub(super) fn follow_bus_master(&mut self, kept: Duration) {
        let Presence::Held(session, fence) = &self.presence else {
            return;
        };
        let (session, fence) = (Arc::clone(session), *fence);
        let is_master = self.space.as_ref().is_some_and(ConfigSpace::is_bus_master);
        match self.client.clone().filter(|_| is_master) {
            None => {
                let _held_off = self.pause_access();
                let mut layout = self.layout();
                layout.remove_user(self.deadline().earlier(kept));
            }
            Some(client) => {
                let user = User {
                    session: Arc::clone(&session),
                    fence,
                    client,
                };
                let mut layout = self.layout();
                let shown = layout.set_user(user, self.deadline().earlier(kept));
                drop(layout);
                if let Err(e) = shown {
                    log::error!("{}: given up: {}", self.config.device, chain(&e));
                    match e {
                        LayoutError::Busy { .. } => session.abandon(),
                        _ => session.give_up(fence, self.deadline()),
                    }
                }
            }
        }
        self.notice_loss();
    }

    /// Publishes the memory behind the device's BARs where the guest has put them, and nothing
    /// while it is not decoded, or where the VM has memory of its own.
    pub(super) fn follow_bars(&mut self) {
        let Some(bars) = self.bars.clone() else {
            return;
        };
        self.notice_loss();
        let mut decoded = Vec::new();
        if self.presence.held().is_some() {
            for region in Region::ALL {
                self.decode(region, &mut decoded);
            }
            let layout = self.layout();
            decoded.retain(|d| !layout.has_ram(d.range));
        }
        bars.follow(&decoded, self.deadline());
        // What other devices have taken of the time is not this one's lender's.
        self.has_waited();
    }

    /// The stretches of a BAR that answer: those that can be mapped, or all of one that is reached
    /// by the lender alone.
    fn decode(&self, region: Region, decoded: &mut Vec<Decoded>) {
        let space = self.space.as_ref();
        let Some((address, size)) = space.and_then(|space| space.decoded(region)) else {
            return;
        };
        let described = self.session().map(|s| &s.attached.description);
        let Some(described) = described.and_then(|d| d.region(region)).cloned() else {
            return;
        };
        let stretch = |offset, length, file| Decoded {
            range: AddressRange::new(address + offset, length),
            writable: described.writable,
            region,
            offset,
            file,
        };
        let before = decoded.len();
        for area in self.areas.iter().filter(|a| a.region == region) {
            let end = area.area.offset.checked_add(area.area.size);
            if end.is_none_or(|end| end > size) {
                continue;
            }
            let file = Some((Arc::clone(&area.file), area.file_offset));
            decoded.push(stretch(area.area.offset, area.area.size, file));
        }
        if decoded.len() == before && size >= PAGE_BYTES {
            decoded.push(stretch(0, size, None));
        }
    }

    pub(super) fn config_read(&mut self, offset: u64, data: &mut [u8]) {
        self.notice_loss();
        if matches!(&self.presence, Presence::Refused(_, when) if when.elapsed() >= RETRY) {
            self.take();
        }
        let answers = matches!(self.presence, Presence::Attached(_) | Presence::Held(..));
        let Some(space) = self.space.as_ref().filter(|_| answers) else {
            data.fill(0xff);
            return;
        };
        space.read(offset, data);
        let foreign = space.foreign(offset, data.len());
        if self.held().is_none() {
            return;
        }
        for (at, length) in foreign {
            let skip = to_usize(at - offset);
            if let Some(part) = data.get_mut(skip..skip.saturating_add(length)) {
                self.device_read(Region::Config, at, part);
            }
        }
    }

    pub(super) fn config_write(&mut self, offset: u64, data: &[u8]) {
        self.notice_loss();
        let Some(space) = self.space.as_mut() else {
            return;
        };
        let Effects {
            bus_master,
            intx_disable,
            reset,
            forward,
        } = space.write(offset, data);
        if bus_master == Some(true) || space.has_memory_space() {
            self.take_at_first_access();
        }
        self.follow_bars();
        if bus_master.is_some() {
            self.follow_bus_master(Duration::ZERO);
        }
        if let Some(masked) = intx_disable {
            self.mask_intx(masked);
        }
        for (at, bytes) in forward {
            self.with_device("write configuration space", |session, fence, deadline| {
                let at = RegisterAddress::new(fence, Region::Config, at);
                session.post(at, &bytes, deadline)
            });
        }
        if reset {
            self.reset_function();
        }
    }

    /// Resets the device in use, and what of it is virtual: it is no bus master, decodes nothing
    /// and masks nothing (PCI Express 3.0, 6.6.2).
    pub(super) fn reset_function(&mut self) {
        let _held_off = self.pause_access();
        let was_silent = self.space.as_mut().is_some_and(|space| {
            let was_silent = space.is_intx_disabled();
            space.reset();
            was_silent
        });
        self.follow_bars();
        self.follow_bus_master(RESETTING);
        let is_busy = self.layout().is_busy();
        self.with_device("reset", |session, fence, deadline| match is_busy {
            // There is no time to wait for it again.
            true => {
                session.abandon();
                Err(SessionError::Refused(Refusal::InProgress))
            }
            false => session.ask(Request::Reset { fence }, &[], deadline),
        });
        if was_silent {
            self.mask_intx(false);
        }
    }

    /// Tells the lender of a device that was just taken, whose INTx is not silent, where the guest
    /// has silenced it before.
    pub(super) fn follow_intx(&mut self) {
        if self
            .space
            .as_ref()
            .is_some_and(ConfigSpace::is_intx_disabled)
        {
            self.mask_intx(true);
        }
    }

    /// Tells the lender whether INTx is silent.
    fn mask_intx(&mut self, masked: bool) {
        if self.has_intx() {
            self.with_device("mask INTx", |session, fence, deadline| {
                session.ask(Request::MaskIntx { fence, masked }, &[], deadline)
            });
        }
    }
}
