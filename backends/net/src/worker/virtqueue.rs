//! A ring that a worker serves: where it is, how far it is, and whom to tell.

use super::QueueError;
use farlane_sys::eventfd;
use farlane_vhost_user::call::Call;
use farlane_vhost_user::session::Setup;
use farlane_vhost_user::vring::{Layout, Progress, RingError, Rings};
use farlane_zero_copy::AddressSpace;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

/// Turns with work after which memory is looked at anew: whoever changes it waits for as long.
const TURNS_WITH_VIEW: u32 = 64;

/// A ring in use.
pub(super) struct Virtqueue {
    index: u16,
    space: Arc<AddressSpace>,
    layout: Layout,
    call: Arc<Call>,
    error: Arc<Call>,
    kick: Option<OwnedFd>,
    pub progress: Progress,
    /// The ring in memory; not kept over a wait.
    rings: Option<Rc<Rings>>,
    turns: u32,
    pub broken: bool,
}

impl Virtqueue {
    pub fn new(setup: Setup) -> Self {
        Self {
            index: setup.index,
            space: setup.space,
            layout: setup.layout,
            call: setup.call,
            error: setup.error,
            kick: setup.kick,
            progress: Progress::new(setup.event_index, setup.next_available, 0),
            rings: None,
            turns: 0,
            broken: false,
        }
    }

    /// Finds out how far the ring is.
    pub fn begin(&mut self) -> Result<(), QueueError> {
        let rings = self.rings()?;
        let (event_index, base) = (self.progress.event_index, self.progress.next_available);
        self.progress = Progress::resume(event_index, base, &rings);
        self.progress.will_look(&rings);
        Ok(())
    }

    pub fn index(&self) -> u16 {
        self.index
    }

    pub fn size(&self) -> u16 {
        self.layout.size
    }

    /// The ring in memory as it is now.
    pub fn rings(&mut self) -> Result<Rc<Rings>, RingError> {
        if let Some(rings) = &self.rings {
            return Ok(Rc::clone(rings));
        }
        let rings = Rc::new(Rings::map(self.space.view(), &self.layout)?);
        self.turns = 0;
        self.rings = Some(Rc::clone(&rings));
        Ok(rings)
    }

    /// Another turn had work. Returns whether memory is to be looked at anew, and whatever was
    /// found in it forgotten.
    pub fn turned(&mut self) -> bool {
        // A queue that has been found broken is not mapped again, and counts on.
        self.turns = self.turns.saturating_add(1);
        self.turns >= TURNS_WITH_VIEW
    }

    /// Nothing is known of memory any more.
    pub fn forget(&mut self) {
        self.rings = None;
    }

    /// Shows the driver all used buffers. Returns whether it was told of them.
    pub fn show(&mut self) -> Result<bool, RingError> {
        if !self.progress.has_unpublished() {
            return Ok(false);
        }
        let rings = self.rings()?;
        self.progress.publish(&rings);
        Ok(self.progress.must_tell(&rings) && self.call.signal())
    }

    /// Asks to be told of the next buffer. Returns whether there is one beyond `ahead` already.
    pub fn arm(&mut self, ahead: u16) -> Result<bool, RingError> {
        let rings = self.rings()?;
        self.progress.ask_to_be_told_after(&rings, ahead);
        let next = self.progress.next_available.wrapping_add(ahead);
        let found = rings.available_index() != next;
        if found {
            self.progress.will_look(&rings);
        }
        Ok(found)
    }

    /// It need not be told of the next buffer any more.
    pub fn disarm(&mut self) -> Result<(), RingError> {
        let rings = self.rings()?;
        self.progress.will_look(&rings);
        Ok(())
    }

    /// What the driver writes to tell; none if it never tells.
    pub fn kick(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(|kick| kick.as_fd())
    }

    /// Takes notice of the driver's kick.
    pub fn take_kick(&self) -> bool {
        self.kick
            .as_ref()
            .is_some_and(|kick| eventfd::drain(kick.as_fd()) > 0)
    }

    /// It cannot go on. Returns whether that is new.
    pub fn breaks(&mut self) -> bool {
        self.rings = None;
        if std::mem::replace(&mut self.broken, true) {
            return false;
        }
        self.error.signal();
        true
    }
}
