//! A device on offer.

use super::lease::{Fences, Lease, TakeError};
use super::peers::{PeerAccess, PeerRange};
use super::session::Control;
use super::sublease::Sublease;
use crate::protocol::message::{DeviceStatus, Fence, Holder, MappingStatus, PeerStatus, Refusal};
use farlane_pci::{Function, Source};
use farlane_sys::chain;
use farlane_sys::sync::{held, lock};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// How long one who wants a device waits for one who is just returning it.
const RETURN_PATIENCE: Duration = Duration::from_secs(2);

/// What is offered, and to whom.
pub struct Offer {
    /// Name of the device.
    pub name: String,
    /// Where it comes from.
    pub source: Box<dyn Source>,
    /// Who may borrow it; empty for everybody who can connect.
    pub borrowers: Vec<String>,
}

pub(super) struct State {
    pub(super) lease: Lease,
    /// The holder's session.
    pub(super) control: Weak<Control>,
    reach: Reach,
    /// What other devices can reach of it, while it is held.
    pub lent: Option<PeerAccess>,
    /// Those of this lender that do.
    pub users: Vec<Arc<PeerRange>>,
    /// Other lenders whose devices do.
    pub subleases: Vec<Arc<Sublease>>,
    /// What it may still reach, as it was not reset: that is kept for it.
    kept: Vec<Box<dyn Send>>,
}

/// What the holder of a device has it reach.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reach {
    /// The first ranges.
    pub mappings: Vec<MappingStatus>,
    /// How many there are.
    pub count: u32,
    /// How many bytes.
    pub bytes: u64,
    /// Over how many bridges most of it.
    pub hops: Option<u32>,
    /// Other devices.
    pub peers: Vec<PeerStatus>,
}

/// A device and its lease.
pub(crate) struct Device {
    pub offer: Offer,
    state: Mutex<State>,
    /// The lease has changed.
    changed: Condvar,
    attached: AtomicU32,
}

impl Device {
    pub fn new(offer: Offer, fences: Fences, term: Duration) -> Self {
        Self {
            offer,
            state: Mutex::new(State {
                lease: Lease::new(fences, term),
                control: Weak::new(),
                reach: Reach::default(),
                lent: None,
                users: Vec::new(),
                subleases: Vec::new(),
                kept: Vec::new(),
            }),
            changed: Condvar::new(),
            attached: AtomicU32::new(0),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub fn attach(&self) {
        self.attached.fetch_add(1, Ordering::Relaxed);
    }

    pub fn detach(&self) {
        self.attached.fetch_sub(1, Ordering::Relaxed);
    }

    /// Makes `holder` the one who holds it. Waits for one who is returning it.
    pub fn take(&self, holder: &str, control: &Arc<Control>) -> Result<Fence, Refusal> {
        let until = Instant::now() + RETURN_PATIENCE;
        let mut state = self.state();
        loop {
            let now = Instant::now();
            match state.lease.take(holder, now) {
                Ok(fence) => {
                    state.control = Arc::downgrade(control);
                    return Ok(fence);
                }
                Err(TakeError::Held(holder)) => return Err(Refusal::Busy { holder }),
                Err(TakeError::Returning) if now < until => {
                    state = held(self.changed.wait_timeout(state, until - now)).0;
                }
                Err(TakeError::Quarantined(why)) => return Err(quarantined(&why)),
                Err(TakeError::Returning) => {
                    return Err(Refusal::Busy {
                        holder: "somebody who is returning it".to_owned(),
                    });
                }
            }
        }
    }

    /// The device is ready for its holder, whose term begins.
    pub fn begin(&self, fence: Fence) {
        self.state().lease.begin(fence, Instant::now());
    }

    /// The lease is over: what comes under it is refused. The device is still to be given back.
    pub fn expire(&self, fence: Fence) {
        self.state().lease.begin_return(fence);
    }

    pub fn renew(&self, fence: Fence) -> Result<(), Refusal> {
        self.state().lease.renew(fence, Instant::now())
    }

    /// When the lease ends unless it is renewed.
    pub fn until(&self, fence: Fence) -> Option<Instant> {
        self.state().lease.until(fence)
    }

    /// The holder has it now: others can reach what it has for them.
    pub fn lend(&self, lent: PeerAccess) {
        self.state().lent = Some(lent);
    }

    /// Its function begins nothing more in memory, for good.
    pub fn keep_from_memory(&self, function: &dyn Function) {
        if let Err(e) = function.end_bus_master() {
            let name = &self.offer.name;
            log::error!("{name}: cannot be kept from memory: {}", chain(&e));
        }
    }

    /// Ends a lease; `reset` makes the device as new. Before, no other device reaches it any more.
    /// Where one of these is not to be had, the device is quarantined. False where it has not been
    /// reset.
    pub fn give_back(&self, fence: Fence, reset: impl FnOnce()) -> bool {
        let name = &self.offer.name;
        let mut state = self.state();
        state.lease.begin_return(fence);
        state.lent = None;
        let users = std::mem::take(&mut state.users);
        let subleases = std::mem::take(&mut state.subleases);
        drop(state);
        for sublease in &subleases {
            sublease.ask_back();
        }
        let told = Instant::now();
        let mut quarantine = None;
        for used in users {
            if let Err(e) = used.end() {
                let why = format!("another device does not let go of it: {}", chain(&e));
                quarantine.get_or_insert(why);
            }
        }
        if !subleases.iter().all(|sublease| sublease.wait(told)) {
            let why = "another lender does not let go of it".to_owned();
            quarantine.get_or_insert(why);
        }
        for sublease in &subleases {
            sublease.shut();
        }
        reset();
        // Under the lock, so that a reason that comes later finds a device on offer.
        let mut state = self.state();
        let failed = self.offer.source.quarantine();
        let is_reset = failed.is_none();
        match quarantine.or(failed) {
            None => state.lease.finish_return(fence),
            Some(why) => {
                log::error!("{name}: quarantined, and not lent any more: {why}");
                state.lease.quarantine(fence, why);
            }
        }
        state.control = Weak::new();
        state.reach = Reach::default();
        self.changed.notify_all();
        is_reset
    }

    /// Keeps what the device may still reach as long as this process runs.
    pub fn keep(&self, what: impl Send + 'static) {
        self.state().kept.push(Box::new(what));
    }

    /// Takes the device off offer, and from its holder, if its source says that it must not be lent
    /// any more.
    pub fn look_at_the_source(&self) {
        let mut state = self.state();
        let Some(why) = self.offer.source.quarantine() else {
            return;
        };
        state.lease.withdraw(why);
        drop(state);
        self.changed.notify_all();
        if let Some((holder, fence)) = self.holder() {
            holder.revoke(fence, Duration::ZERO);
        }
    }

    /// What the holder has mapped now.
    pub fn report(&self, reach: Reach) {
        self.state().reach = reach;
    }

    /// The session of whoever holds it, and the lease.
    pub fn holder(&self) -> Option<(Arc<Control>, Fence)> {
        let state = self.state();
        let (_, fence, _) = state.lease.holder(Instant::now())?;
        Some((state.control.upgrade()?, fence))
    }

    /// Who has it, and is not just returning it: the session, and the name.
    pub fn held_by(&self) -> Option<(Arc<Control>, String)> {
        let state = self.state();
        let holder = state.lease.held_by()?.to_owned();
        Some((state.control.upgrade()?, holder))
    }

    /// Waits until nobody holds it, and it is on offer.
    pub fn wait_offered(&self, patience: Duration) -> Result<(), Refusal> {
        let state = self.state();
        let (state, _) = held(
            self.changed
                .wait_timeout_while(state, patience, |s| !s.lease.is_free()),
        );
        match state.lease.quarantined() {
            Some(why) => Err(quarantined(why)),
            None if state.lease.is_free() => Ok(()),
            None => Err(Refusal::Device("it does not come back".to_owned())),
        }
    }

    pub fn status(&self, borrowers: &[String]) -> DeviceStatus {
        let state = self.state();
        let holder = state
            .lease
            .holder(Instant::now())
            .map(|(name, fence, held)| Holder {
                name,
                fence: fence.0,
                held_seconds: held.as_secs(),
                mappings: state.reach.mappings.clone(),
                mapping_count: state.reach.count,
                mapped_bytes: state.reach.bytes,
                hops: state.reach.hops,
                peers: state.reach.peers.clone(),
            });
        DeviceStatus {
            name: self.offer.name.clone(),
            about: self.offer.source.description().name.clone(),
            holder,
            attached: self.attached.load(Ordering::Relaxed),
            borrowers: borrowers.to_vec(),
            quarantine: state.lease.quarantined().map(str::to_owned),
        }
    }
}

fn quarantined(why: &str) -> Refusal {
    Refusal::Device(format!("it is quarantined: {why}"))
}
