//! How stretches of memory are taken away from the lender's device.
//!
//! A device that has begun something there, such as to read from a disk that does not answer, is
//! waited for as long as the VMM waits for us, once for all that one request of the VMM
//! takes away. Then the VMM is told that it was not done, and the stretch is as it was for the
//! device, until the lender says that it is not reached any more: the window goes on showing it,
//! and nothing else is shown there. The device is not lost.

use super::deadline::Deadline;
use super::layout::{Backing, Layout, LayoutError, Piece, Placement, Stretch, User};
use super::placement::free;
use farlane_pci::AddressRange;
use farlane_sys::chain;
use std::time::Duration;

/// A stretch that the device may still reach, and whose device that is.
pub(super) struct PendingUnmap {
    piece: Piece,
    user: User,
}

impl Layout {
    /// Has the device reach one stretch no more. Without a user of it there is nobody to be asked.
    /// A device that cannot be kept from it is given up; one that is still at it then reaches it
    /// until [`chase`](Self::chase) has seen it end.
    pub(super) fn hide(&mut self, address: u64, deadline: Deadline) {
        let Some(piece) = self.pieces.remove(&address) else {
            return;
        };
        let is_reached = !matches!(piece.placed, Placement::Nowhere(_));
        if is_reached && let Some(user) = self.user.clone() {
            // One after the other: the lender takes one range away at a time.
            let is_next = self.leaving.is_empty() && deadline.has_time(Duration::ZERO);
            if !is_next || !self.take_away(&user, &piece.stretch, true, deadline) {
                self.leaving.push_back(PendingUnmap { piece, user });
                return;
            }
        }
        self.release(piece);
    }

    /// Asks the lender. False where the device is still at it; true as well where it has been given
    /// up.
    fn take_away(
        &mut self,
        user: &User,
        stretch: &Stretch,
        again: bool,
        deadline: Deadline,
    ) -> bool {
        let range = stretch.range;
        match user.session.unmap(user.fence, range, again, deadline) {
            Ok(true) => true,
            Ok(false) => {
                log::warn!("{}: the device is still at {range}", self.name);
                false
            }
            Err(e) => {
                let why = format!("{range} are not taken away from it: {}", chain(&e));
                self.given_up(user, &why);
                true
            }
        }
    }

    fn given_up(&mut self, user: &User, why: &str) {
        log::error!("{}: given up: {why}", self.name);
        self.forget(user);
    }

    /// Sees what is leaving end, as far as it does in time. What is not `needed` is asked for once.
    pub(super) fn chase(&mut self, is_needed: bool, deadline: Deadline) {
        while deadline.has_time(Duration::ZERO)
            && let Some(PendingUnmap { piece, user }) = self.leaving.pop_front()
        {
            if !self.take_away(&user, &piece.stretch, is_needed, deadline) {
                self.leaving.push_front(PendingUnmap { piece, user });
                return;
            }
            self.release(piece);
        }
    }

    /// Another device's memory is about to go, whose owner does not wait longer: a device that is
    /// still at it then is given up.
    pub(super) fn give_up_for(&mut self, peer: u64, deadline: Deadline) {
        let is_peers =
            |leaving: &&PendingUnmap| leaving.piece.stretch.backing == Backing::Peer(peer);
        if self.leaving.iter().any(|leaving| is_peers(&leaving)) {
            self.chase(true, deadline);
        }
        let Some(PendingUnmap { piece, user }) = self.leaving.iter().find(is_peers) else {
            return;
        };
        let AddressRange { address, length } = piece.stretch.range;
        let why = format!("it is still at {length:#x} bytes of another device at {address:#x}");
        let user = user.clone();
        user.session.abandon();
        self.given_up(&user, &why);
        self.release_leaving();
    }

    /// There is nobody to be asked any more.
    pub(super) fn release_leaving(&mut self) {
        while let Some(PendingUnmap { piece, user }) = self.leaving.pop_front() {
            self.forget(&user);
            self.release(piece);
        }
    }

    /// Nothing of a range is leaving.
    pub(super) fn check_left(&self, range: AddressRange) -> Result<(), LayoutError> {
        match self.is_leaving(range) {
            true => Err(LayoutError::Busy(range)),
            false => Ok(()),
        }
    }

    /// Whether the device is still at what it has begun.
    pub fn is_busy(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Whether something of a range is leaving.
    pub(super) fn is_leaving(&self, range: AddressRange) -> bool {
        let mut stretches = self.leaving.iter().map(|leaving| leaving.piece.stretch);
        stretches.any(|stretch| stretch.range.overlaps(range))
    }

    /// This end's part of the way to a stretch is not needed any more.
    fn release(&mut self, piece: Piece) {
        let range = piece.stretch.range;
        match piece.placed {
            Placement::Window {
                way,
                slice,
                is_readable,
            } => {
                if is_readable {
                    let _ = self.messages.unmap(range);
                }
                if let Some(windows) = self.ways.get(way).and_then(|w| w.windows.as_ref()) {
                    free(windows, slice);
                }
            }
            Placement::Messages => {
                if let Err(e) = self.messages.unmap(range) {
                    log::debug!("{range} were not mapped: {}", chain(&e));
                }
            }
            Placement::There | Placement::Nowhere(_) => {}
        }
    }
}
