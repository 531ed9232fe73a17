//! Subleases: a device of another lender reaches one that is held here, through a window of that
//! lender.
//!
//! Only the other lender can keep its device from the window, and only this one knows whether the
//! device behind it is still held. So the other lender has a sublease: it shows the key of the
//! device's lease, renews, and lets go before that lease counts as ended. One that says nothing has
//! let go by itself when its term is over, see [`silence`]. One that renews after it has been told
//! to let go says that it has not yet: if it falls silent then, nothing says that it ever has.

use super::device::Device;
use super::names::{Borrower, Standing};
use super::peers::PeerAccess;
use super::session::Control;
use crate::protocol::message::{Fence, MAX_WORDS, PeerKey, Refusal, ToBorrower};
use farlane_pci::{AddressRange, Description, DmaMapping, DmaSpace, Region};
use farlane_sys::chain;
use farlane_sys::sync::{held, lock};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

/// Subleases of one device.
const MAX_SUBLEASES: usize = 16;
/// How much longer than by its term another lender's device may go on, until that lender has
/// noticed and kept it from the window.
const STOPPING: Duration = Duration::from_secs(2);
/// How long another lender that goes on renewing may take to let go.
const LETTING_GO: Duration = Duration::from_secs(30);
/// Bytes of a word.
const WORD_BYTES: u64 = 8;

/// After how long without a renewal the other lender has let go. It counts its term from the answer
/// to a renewal, which may have been a term on its way.
fn silence(term: Duration) -> Duration {
    2 * term + STOPPING
}

/// What has come over the session of a sublease, and was heard: this lender may have been stopped,
/// or slow.
#[derive(Clone, Copy, Debug)]
enum Heard {
    Until(Instant),
    All,
}

#[derive(Debug)]
struct State {
    renewed: Instant,
    heard: Heard,
    /// It has been told to let go.
    ending: bool,
    /// It has renewed since: it has not let go yet.
    goes_on: bool,
    /// It has let go.
    released: bool,
    /// It has ended its session, which it does after it has let go, or with its process.
    gone: bool,
}

/// A sublease, at the lender whose device is reached.
#[derive(Debug)]
pub(crate) struct Sublease {
    pub fence: Fence,
    term: Duration,
    control: Weak<Control>,
    /// The other lender is of this host: while its session is there, time proves nothing of it.
    is_here: bool,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the device can be read for it. Held while it is: whoever does has the device's
    /// function meanwhile.
    readable: Mutex<bool>,
}

impl Sublease {
    fn new(
        fence: Fence,
        term: Duration,
        control: Weak<Control>,
        is_here: bool,
        begun: Instant,
    ) -> Self {
        Self {
            fence,
            term,
            control,
            is_here,
            state: Mutex::new(State {
                renewed: begun,
                heard: Heard::Until(begun),
                ending: false,
                goes_on: false,
                released: false,
                gone: false,
            }),
            changed: Condvar::new(),
            readable: Mutex::new(true),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The other lender goes on, or has not let go yet.
    pub fn renew(&self) -> Result<(), Refusal> {
        let mut state = self.state();
        if state.released {
            return Err(Refusal::Ended(self.fence));
        }
        state.renewed = Instant::now();
        state.goes_on |= state.ending;
        Ok(())
    }

    /// Whether the other lender has let go.
    pub fn is_released(&self) -> bool {
        self.state().released
    }

    /// Its device does not reach this one any more.
    pub fn release(&self) {
        self.state().released = true;
        self.changed.notify_all();
    }

    /// It has hung up, which it does after it has let go, or with its process. Of another host only
    /// the former can be heard: the end of a process does not say goodbye (`close_notify` of TLS).
    pub fn close(&self) {
        let mut state = self.state();
        state.gone = true;
        state.released |= !self.is_here;
        self.changed.notify_all();
    }

    /// Its session was broken off, by its end or by something in between. That is not heard of one
    /// of this host.
    pub fn break_off(&self) {
        self.state().gone |= !self.is_here;
        self.changed.notify_all();
    }

    /// All that had come over its session by then has been heard.
    pub fn has_heard(&self, until: Instant) {
        self.state().heard = Heard::Until(until);
        self.changed.notify_all();
    }

    /// Nothing more comes over its session.
    pub fn has_heard_all(&self) {
        self.state().heard = Heard::All;
        self.changed.notify_all();
    }

    /// It is not listened to any more, but for its end: that it has not let go yet cannot be heard.
    pub fn ignore(&self) {
        self.state().goes_on = true;
    }

    /// The device is read for it no more. Nobody else has its function for that when this returns.
    pub fn shut(&self) {
        *self.readable() = false;
    }

    /// The same, if it is not being read now.
    fn shut_now(&self) -> bool {
        let may = match self.readable.try_lock() {
            Ok(may) => Some(may),
            Err(TryLockError::Poisoned(may)) => Some(may.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        may.map(|mut may| *may = false).is_some()
    }

    fn readable(&self) -> MutexGuard<'_, bool> {
        lock(&self.readable)
    }

    /// Tells the other lender to let go.
    pub fn ask_back(&self) {
        self.state().ending = true;
        let fence = self.fence;
        let sender = self.control.upgrade().map(|control| control.sender.clone());
        if let Some(sender) = sender
            && let Err(e) = sender.send(&ToBorrower::Ended { fence }, &[])
        {
            // It goes on renewing, or falls silent.
            log::debug!("Another lender cannot be asked to let go: {e}");
        }
    }

    /// The other lender knows of it from now on. What it was told before that said nothing to it.
    pub fn announce(&self) {
        if self.state().ending {
            self.ask_back();
        }
    }

    /// Whether its device certainly reaches this one no more.
    fn is_over(&self, state: &State) -> bool {
        let has_ended = match self.is_here {
            true => state.gone,
            false => !state.goes_on,
        };
        state.released || (self.is_silent(state) && has_ended)
    }

    fn is_silent(&self, state: &State) -> bool {
        let since = match state.heard {
            Heard::Until(until) => until,
            Heard::All => Instant::now(),
        };
        since.saturating_duration_since(state.renewed) >= silence(self.term)
    }

    /// Whether nothing is to be done about it any more, whenever the device's lease ends.
    fn is_done(&self) -> bool {
        let state = self.state();
        state.released || (self.is_over(&state) && state.gone)
    }

    /// Waits until the other lender has let go, which was told to then: as long as it goes on
    /// renewing, for a bounded time. False if it may still hold on.
    pub fn wait(&self, told: Instant) -> bool {
        let latest = told + LETTING_GO.max(silence(self.term));
        let mut state = self.state();
        while !state.released && !self.is_silent(&state) {
            let now = Instant::now();
            if latest <= now {
                break;
            }
            // When that has passed, it is still to be heard that nothing has come.
            let silent_at = state.renewed + silence(self.term);
            let until = if now < silent_at {
                latest.min(silent_at)
            } else {
                latest
            };
            let left = until.saturating_duration_since(now);
            state = held(self.changed.wait_timeout(state, left)).0;
        }
        // Whoever goes on with it from now on is told so.
        state.released |= self.is_over(&state);
        state.released
    }
}

impl Device {
    /// A sublease for `lender`, at the other end of `control`. None where it does not know the key
    /// of the device's lease, or is who holds that: a holder would keep the device from others by
    /// it.
    pub fn sublet(
        &self,
        key: PeerKey,
        lender: &Borrower,
        control: &Arc<Control>,
        term: Duration,
    ) -> Result<Option<Arc<Sublease>>, Refusal> {
        let name = &self.offer.name;
        let mut state = self.state();
        let lent = state.lent.as_ref().filter(|lent| lent.is_opened_by(key));
        let fence = lent.map(|lent| lent.fence);
        // A lease that is over has none.
        let goes_on = |&fence: &Fence| {
            let until = state.lease.until(fence);
            until.is_some_and(|until| Instant::now() < until)
        };
        let Some(fence) = fence.filter(goes_on) else {
            return Ok(None);
        };
        let holder = state.lease.holder(Instant::now());
        let peer = control.sender.peer();
        let is_holder = holder.is_some_and(|(holder, ..)| peer.is_called(&holder));
        // Who administers the lender may call itself as it likes.
        if is_holder && lender.standing != Standing::Administrator {
            log::warn!("{name}: its holder, {}, asks to sublease it", lender.name);
            return Ok(None);
        }
        // One for which the device is being read is waited for when the lease ends.
        state
            .subleases
            .retain(|other| !(other.is_done() && other.shut_now()));
        if state.subleases.len() >= MAX_SUBLEASES {
            return Err(Refusal::Invalid(format!("{name} has too many subleases")));
        }
        let is_here = control.sender.hears_of_the_end();
        let control = Arc::downgrade(control);
        let sublease = Sublease::new(fence, term, control, is_here, Instant::now());
        let sublease = Arc::new(sublease);
        state.subleases.push(Arc::clone(&sublease));
        Ok(Some(sublease))
    }

    /// Words of the device's memory, under a sublease.
    pub fn words(
        &self,
        sublease: &Sublease,
        region: Region,
        offsets: &[u64],
    ) -> Result<Vec<u8>, Refusal> {
        let fence = sublease.fence;
        let name = &self.offer.name;
        if offsets.len() > MAX_WORDS || offsets.iter().any(|at| !at.is_multiple_of(WORD_BYTES)) {
            return Err(Refusal::Invalid(format!(
                "{} words of {name}",
                offsets.len()
            )));
        }
        // Until nobody has the function here any more.
        let may = sublease.readable();
        if !*may {
            return Err(Refusal::Ended(fence));
        }
        let lent = self.state().lent.clone();
        let lent = lent.filter(|lent| lent.fence == fence);
        let lent = lent.ok_or(Refusal::Ended(fence))?;
        let readable = Readable::new(lent, self.offer.source.description(), region)?;
        let mut words = Vec::new();
        for &offset in offsets {
            words.extend(readable.word(offset)?);
        }
        Ok(words)
    }
}

/// Memory of a device, in which reading changes nothing.
struct Readable<'a> {
    lent: PeerAccess,
    description: &'a Description,
    region: Region,
    /// What the holder maps, at its offsets in the region.
    areas: Arc<DmaSpace>,
}

impl<'a> Readable<'a> {
    fn new(
        lent: PeerAccess,
        description: &'a Description,
        region: Region,
    ) -> Result<Self, Refusal> {
        let areas = DmaSpace::new();
        for area in lent.areas.iter().filter(|area| area.region == region) {
            let mapped = areas.map(&DmaMapping {
                range: AddressRange::new(area.area.offset, area.area.size),
                writable: false,
                target: farlane_pci::DmaTarget::Device {
                    file: Arc::clone(&area.file),
                    offset: area.file_offset,
                },
            });
            mapped.map_err(|e| Refusal::Device(chain(&e)))?;
        }
        Ok(Self {
            lent,
            description,
            region,
            areas,
        })
    }

    fn word(&self, offset: u64) -> Result<[u8; 8], Refusal> {
        let mut word = [0; 8];
        if self.areas.read(offset, &mut word).is_ok() {
            return Ok(word);
        }
        let Self {
            description,
            region,
            ..
        } = *self;
        if !description.contains(region, offset, word.len()) || !description.is_prefetchable(region)
        {
            return Err(Refusal::Invalid(format!(
                "{offset:#x} of {region:?} is not memory that can be compared"
            )));
        }
        let function = self.lent.function.upgrade();
        let function = function.ok_or(Refusal::Ended(self.lent.fence))?;
        let read = function.read(region, offset, &mut word);
        read.map_err(super::registers::device_error)?;
        Ok(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERM: Duration = Duration::from_secs(1);

    fn sublease(is_here: bool, silent_for: Duration) -> Sublease {
        let begun = Instant::now().checked_sub(silent_for).unwrap();
        let sublease = Sublease::new(Fence(1), TERM, Weak::new(), is_here, begun);
        sublease.has_heard_all();
        sublease
    }

    #[test]
    fn time_says_that_another_lender_has_let_go_only_where_it_has_not_said_otherwise() {
        for (is_here, goes_on, gone, is_over) in [
            (false, false, false, true),
            (false, true, false, false),
            // Of a process of another host its session does not say how far it has come.
            (false, true, true, false),
            (true, false, false, false),
            (true, false, true, true),
            (true, true, true, true),
        ] {
            let sublease = sublease(is_here, silence(TERM));
            sublease.ask_back();
            (sublease.state().goes_on, sublease.state().gone) = (goes_on, gone);
            let said = (is_here, goes_on, gone);
            // What has come may still be to be heard.
            let renewed = sublease.state().renewed;
            sublease.has_heard(renewed + TERM);
            let told = Instant::now().checked_sub(LETTING_GO).unwrap();
            assert!(!sublease.wait(told), "{said:?}");
            sublease.has_heard(renewed + silence(TERM));
            assert_eq!(sublease.wait(Instant::now()), is_over, "{said:?}");
            sublease.release();
            assert!(sublease.wait(Instant::now()));
        }
    }

    #[test]
    fn one_that_renews_after_it_was_told_to_let_go_has_not_yet() {
        let sublease = sublease(false, Duration::ZERO);
        sublease.renew().unwrap();
        assert!(!sublease.state().goes_on);
        sublease.ask_back();
        sublease.renew().unwrap();
        assert!(sublease.state().goes_on);
        // All that hold one device have one time for it.
        let told = Instant::now().checked_sub(LETTING_GO).unwrap();
        assert!(!sublease.wait(told));
        sublease.release();
        assert_eq!(sublease.renew(), Err(Refusal::Ended(Fence(1))));
    }
}
