//! Memory of the VM, and how the lender's device reaches it.

use super::deadline::Deadline;
use super::peers::Target;
use super::resolve::{PeerPath, PeerWindow};
use super::session::{Doubt, Session, SessionError};
use super::unmapping::PendingUnmap;
use crate::bridge;
use crate::protocol::message::{Bridge, Fence, Request};
use farlane_ntb::{Ntb, WindowSlice, WindowSpace};
use farlane_pci::{AddressRange, DmaSpace};
use farlane_sys::chain;
use farlane_vfio_user::{Client, DmaMap};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thiserror::Error;

/// Why memory is not as the VM asks for it.
#[derive(Debug, Error)]
pub(crate) enum LayoutError {
    /// The lender refuses memory of the VM.
    #[error("The device does not reach {range}: {why}")]
    Unreachable {
        /// What it does not reach.
        range: AddressRange,
        /// What the ways to it say.
        why: String,
    },
    /// The device is still at what it has begun there.
    #[error("The device is still at {0}")]
    Busy(AddressRange),
    /// No time is left to ask the lender for all that is needed.
    #[error("The lender takes too long to be shown memory")]
    TimedOut,
    /// A lender fell silent before it said that its device had stopped.
    #[error("The device may still reach what it has reached, {0}")]
    InDoubt(Doubt),
    /// The session has failed, or the lender: the device is given up.
    #[error("The device is given up")]
    Session(#[from] SessionError),
}

/// Who reaches the memory: the device while it is held and a bus master.
#[derive(Clone)]
pub(crate) struct User {
    pub session: Arc<Session>,
    pub fence: Fence,
    pub client: Client,
}

/// Who is asked for a way to a stretch, and until when.
pub(super) struct Requester<'a> {
    pub user: &'a User,
    pub deadline: Deadline,
}

/// What lies behind a stretch of guest-physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// A file of the VMM.
    Ram,
    /// Another device, by the number of its publication.
    Peer(u64),
    /// Something that only the VMM knows.
    Vmm,
}

/// A stretch of addresses that the device is to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub range: AddressRange,
    pub writable: bool,
    pub backing: Backing,
}

impl Stretch {
    fn is_of_a_peer(&self) -> bool {
        matches!(self.backing, Backing::Peer(_))
    }
}

/// How the device reaches a stretch.
#[derive(Debug)]
pub(super) enum Placement {
    /// Through a window of one of the bridges, which this end has set up.
    Window {
        way: usize,
        slice: WindowSlice,
        /// The lender can read it by messages too, to compare.
        is_readable: bool,
    },
    /// By messages.
    Messages,
    /// The lender knows how.
    There,
    /// Not at all: why.
    Nowhere(String),
}

/// A stretch that has been dealt with.
pub(super) struct Piece {
    pub stretch: Stretch,
    pub placed: Placement,
    pub path: Option<PeerPath>,
}

/// Memory as the VMM shows it.
pub(super) struct Range {
    size: u64,
    writable: bool,
    pub file: Option<(Arc<OwnedFd>, u64)>,
}

/// A bridge to the lender; none where only the lender knows it.
pub(super) struct Way {
    pub name: String,
    /// Whether the lender compares what it sees there with what this end reads: both are
    /// configured, and may not fit.
    pub is_compared: bool,
    pub windows: Option<WindowSpace>,
}

/// All memory of the VM: its own, and that of its other devices.
pub(crate) struct Layout {
    /// Name of the device, for people.
    pub(super) name: String,
    pub(super) ranges: BTreeMap<u64, Range>,
    /// Memory of the VM's other devices, by number.
    pub(super) targets: BTreeMap<u64, Arc<Target>>,
    pub(super) pieces: BTreeMap<u64, Piece>,
    /// What the device may still reach of what it is to reach no more.
    pub(super) leaving: VecDeque<PendingUnmap>,
    /// What is to be shown and is not, as something that leaves is in the way, or as there was no
    /// time left; who is told that there is something.
    put_off: Vec<Stretch>,
    pub(super) tell_put_off: Option<Box<dyn Fn() + Send>>,
    pub(super) ways: Vec<Way>,
    pub(super) peer_windows: Vec<PeerWindow>,
    /// What is reached by messages now.
    pub(super) messages: Arc<DmaSpace>,
    pub(super) user: Option<User>,
    /// Whose device may still reach memory: see [`Session::doubt`].
    pub(super) doubt: Option<Arc<Session>>,
}

impl Layout {
    pub fn new(name: &str, peer_windows: Vec<PeerWindow>) -> Self {
        Self {
            name: name.to_owned(),
            ranges: BTreeMap::new(),
            targets: BTreeMap::new(),
            pieces: BTreeMap::new(),
            leaving: VecDeque::new(),
            put_off: Vec::new(),
            tell_put_off: None,
            ways: Vec::new(),
            peer_windows,
            messages: DmaSpace::new(),
            user: None,
            doubt: None,
        }
    }

    /// What the lender of a new session may reach by messages: nothing yet. The lender of the
    /// session before reaches nothing any more.
    pub fn new_messages(&mut self) -> Arc<DmaSpace> {
        self.messages = DmaSpace::new();
        Arc::clone(&self.messages)
    }

    /// The VMM is gone, and with it all of the VM's own memory. Nobody uses it.
    pub fn clear(&mut self) {
        self.lose_user();
        self.ranges.clear();
        self.ways.clear();
    }

    /// Takes the bridges of a new session. `descriptors` begin with theirs, which are taken off.
    pub fn set_bridges(
        &mut self,
        bridges: &[Bridge],
        own: &[(String, Arc<dyn Ntb>)],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<(), SessionError> {
        self.ways.clear();
        for bridge in bridges {
            let way = match bridge {
                Bridge::Shm => {
                    if descriptors.is_empty() {
                        return Err(SessionError::Nonsense);
                    }
                    let socket = descriptors.remove(0);
                    let ntb =
                        bridge::shm(socket).map_err(|e| SessionError::Io(io::Error::other(e)))?;
                    bridge::wait_up(&*ntb);
                    Way {
                        name: "shm".to_owned(),
                        is_compared: false,
                        windows: Some(WindowSpace::new(ntb)),
                    }
                }
                Bridge::Named(name) => {
                    let ntb = own.iter().find(|(own, _)| own == name);
                    if ntb.is_none() {
                        log::debug!(
                            "The lender has a window {name}, of which nothing is known here"
                        );
                    }
                    Way {
                        name: name.clone(),
                        is_compared: true,
                        windows: ntb.map(|(_, ntb)| WindowSpace::new(Arc::clone(ntb))),
                    }
                }
            };
            self.ways.push(way);
        }
        Ok(())
    }

    /// The VM has memory there. Where the device cannot reach it, the VM has none there. Here and
    /// in what follows, all that is waited for is over by the deadline.
    pub fn add(&mut self, map: DmaMap, deadline: Deadline) -> Result<(), LayoutError> {
        let address = map.address;
        let range = Range {
            size: map.size,
            writable: map.writable,
            file: map.file.map(|(file, offset)| (Arc::new(file), offset)),
        };
        let whole = AddressRange::new(address, range.size);
        self.ranges.insert(address, range);
        // Without a user nothing is shown, and nothing is in the way.
        let is_shown = self.user.is_some();
        if is_shown && self.is_leaving(whole) {
            self.chase(true, deadline);
        }
        let settled = self.settle(false, deadline);
        let settled = settled.and_then(|()| match is_shown {
            true => self
                .check_left(whole)
                .and_then(|()| self.check_in_time(whole)),
            false => Ok(()),
        });
        if let Err(LayoutError::Unreachable { .. } | LayoutError::Busy(_) | LayoutError::TimedOut) =
            &settled
        {
            self.ranges.remove(&address);
            self.follow(false, deadline);
        }
        settled
    }

    /// The VM has no memory there any more. The device does not reach it when this has succeeded.
    pub fn remove(&mut self, range: AddressRange, deadline: Deadline) -> Result<(), LayoutError> {
        self.ranges.remove(&range.address);
        let is_leaving = self.is_leaving(range);
        self.follow(is_leaving, deadline);
        self.check_doubt()?;
        self.check_left(range)
    }

    /// Whether the device reaches nothing but what it is shown, as far as this end knows.
    pub fn check_doubt(&mut self) -> Result<(), LayoutError> {
        match self.doubt.as_ref().and_then(|session| session.doubt()) {
            Some(doubt) => Err(LayoutError::InDoubt(doubt)),
            None => {
                self.doubt = None;
                Ok(())
            }
        }
    }

    /// Another device of the VM has memory there.
    pub fn add_target(&mut self, id: u64, target: Arc<Target>, deadline: Deadline) {
        self.targets.insert(id, target);
        self.follow(false, deadline);
    }

    /// It has it no more. This device does not reach it when this returns.
    pub fn remove_target(&mut self, id: u64, deadline: Deadline) {
        self.targets.remove(&id);
        self.follow(false, deadline);
        self.give_up_for(id, deadline);
    }

    /// Has the device reach all memory, and then master the bus.
    pub fn set_user(&mut self, user: User, deadline: Deadline) -> Result<(), LayoutError> {
        self.user = Some(user);
        let wanted = self.wanted();
        let mut ranges = wanted.values().map(|stretch| stretch.range);
        if ranges.any(|range| self.is_leaving(range)) {
            self.chase(true, deadline);
        }
        self.settle(false, deadline)?;
        for stretch in &self.put_off {
            self.check_left(stretch.range)?;
        }
        self.check_in_time(AddressRange::new(0, u64::MAX))?;
        if !deadline.has_time_to_ask() {
            return Err(LayoutError::TimedOut);
        }
        Ok(self.set_bus_master(true, deadline)?)
    }

    /// Nothing of the VM's own memory in a range has been put off. Memory of other devices may come
    /// later.
    fn check_in_time(&self, range: AddressRange) -> Result<(), LayoutError> {
        let mut own = self.put_off.iter().filter(|s| !s.is_of_a_peer());
        match own.any(|stretch| stretch.range.overlaps(range)) {
            true => Err(LayoutError::TimedOut),
            false => Ok(()),
        }
    }

    /// Whether something is still to be shown.
    pub fn is_put_off(&self) -> bool {
        self.user.is_some() && !self.put_off.is_empty()
    }

    /// Shows what has been put off, where the way is free in time.
    pub fn try_again(&mut self, deadline: Deadline) {
        if self.is_put_off() {
            self.follow(true, deadline);
        }
    }

    /// Has the device master the bus no more, and then reach nothing, of which the lender is told.
    pub fn remove_user(&mut self, deadline: Deadline) {
        if let Err(e) = self.set_bus_master(false, deadline) {
            log::error!("{}: given up: {}", self.name, chain(&e));
        }
        self.chase(true, deadline);
        self.hide_all(deadline);
        self.user = None;
    }

    fn hide_all(&mut self, deadline: Deadline) {
        let addresses: Vec<u64> = self.pieces.keys().copied().collect();
        for address in addresses {
            self.hide(address, deadline);
        }
    }

    fn set_bus_master(&mut self, may: bool, deadline: Deadline) -> Result<(), SessionError> {
        let Some(user) = self.user.clone() else {
            return Ok(());
        };
        let (session, fence) = (&user.session, user.fence);
        let set = session.ask(Request::SetBusMaster { fence, may }, &[], deadline);
        if set.is_err() {
            session.give_up(fence, deadline);
            self.forget(&user);
        }
        set
    }

    /// The device is gone: it is shown nothing any more, and there is nobody to be told.
    pub fn lose_user(&mut self) {
        if let Some(user) = self.user.take() {
            self.forget(&user);
        }
        self.release_leaving();
        // Nobody is asked.
        self.hide_all(Deadline::begin());
    }

    /// Nobody is asked any more to keep the device from memory.
    pub(super) fn forget(&mut self, user: &User) {
        self.user
            .take_if(|own| Arc::ptr_eq(&own.session, &user.session));
        if user.session.doubt().is_some() {
            self.doubt = Some(Arc::clone(&user.session));
        }
    }

    /// Whether the VM has memory of its own in a range.
    pub fn has_ram(&self, range: AddressRange) -> bool {
        let before = self.ranges.range(..range.end());
        before
            .filter(|(_, range)| range.file.is_some())
            .any(|(&start, ram)| AddressRange::new(start, ram.size).end() > range.address)
    }

    /// By how many stretches of each path other devices are reached.
    pub fn paths(&self) -> BTreeMap<PeerPath, u64> {
        let mut paths = BTreeMap::new();
        for path in self.pieces.values().filter_map(|piece| piece.path) {
            *paths.entry(path).or_default() += 1;
        }
        paths
    }

    /// What the device is to reach: the VM's own memory, other devices where that is not, and where
    /// nothing is known of neither, what the VMM has.
    fn wanted(&self) -> BTreeMap<u64, Stretch> {
        let mut wanted = BTreeMap::new();
        let mut devices: BTreeMap<u64, u64> = BTreeMap::new();
        for (&id, target) in &self.targets {
            let publication = &target.publication;
            let range = AddressRange::new(publication.address, publication.length);
            let before = devices.range(..range.end()).next_back();
            let is_taken = before.is_some_and(|(&start, &bytes)| start + bytes > range.address);
            if is_taken || self.has_ram(range) {
                continue;
            }
            devices.insert(range.address, range.length);
            let stretch = Stretch {
                range,
                writable: publication.writable,
                backing: Backing::Peer(id),
            };
            wanted.insert(range.address, stretch);
        }
        for (&address, range) in &self.ranges {
            let stretch = |address, length, backing| Stretch {
                range: AddressRange::new(address, length),
                writable: range.writable,
                backing,
            };
            if range.file.is_some() {
                wanted.insert(address, stretch(address, range.size, Backing::Ram));
                continue;
            }
            let end = address + range.size;
            let mut at = address;
            for (&start, &bytes) in devices.range(..end) {
                if start + bytes <= at {
                    continue;
                }
                if start > at {
                    wanted.insert(at, stretch(at, start - at, Backing::Vmm));
                }
                at = start + bytes;
            }
            if at < end {
                wanted.insert(at, stretch(at, end - at, Backing::Vmm));
            }
        }
        wanted
    }

    /// As [`settle`](Self::settle), where nothing of the VM's own memory is new.
    fn follow(&mut self, asks: bool, deadline: Deadline) {
        if let Err(e) = self.settle(asks, deadline) {
            log::warn!("{}: {}", self.name, chain(&e));
        }
    }

    /// Has the device reach what it is to reach, and nothing else. The VM's memory in files must be
    /// reached, and some of its memory: a VM has ranges, such as its firmware, that no device
    /// needs. A stretch is put off where something that leaves is in the way, or where no time is
    /// left; whether what leaves has left is asked where more is to leave, or whoever calls `asks`.
    fn settle(&mut self, asks: bool, deadline: Deadline) -> Result<(), LayoutError> {
        let wanted = self.wanted();
        let stale = self.pieces.iter().filter(|(address, piece)| {
            wanted
                .get(address)
                .is_none_or(|stretch| *stretch != piece.stretch)
        });
        let stale: Vec<u64> = stale.map(|(&address, _)| address).collect();
        // One range leaves after the other.
        if asks || !stale.is_empty() {
            self.chase(false, deadline);
        }
        for address in stale {
            self.hide(address, deadline);
        }
        self.put_off.clear();
        // Other devices' memory can wait.
        let (later, first): (Vec<_>, Vec<_>) =
            wanted.into_values().partition(Stretch::is_of_a_peer);
        for stretch in first.into_iter().chain(later) {
            let address = stretch.range.address;
            let Some(user) = self.user.clone() else {
                return Ok(());
            };
            if self.pieces.contains_key(&address) {
                continue;
            }
            if self.is_leaving(stretch.range) || !deadline.has_time_to_ask() {
                self.put_off.push(stretch);
                continue;
            }
            let asked = Requester {
                user: &user,
                deadline,
            };
            match self.show(&stretch, &asked) {
                Ok((placed, path)) => {
                    let piece = Piece {
                        stretch,
                        placed,
                        path,
                    };
                    self.pieces.insert(address, piece);
                }
                Err(e) => {
                    user.session.give_up(user.fence, deadline);
                    self.lose_user();
                    return Err(e.into());
                }
            }
        }
        if let Some(tell) = &self.tell_put_off
            && !self.put_off.is_empty()
        {
            tell();
        }
        self.check_own_memory()
    }

    /// See [`settle`](Self::settle).
    fn check_own_memory(&self) -> Result<(), LayoutError> {
        let pieces = self.pieces.values();
        let own = pieces.filter(|piece| !piece.stretch.is_of_a_peer());
        let missing = |piece: &&Piece| matches!(piece.placed, Placement::Nowhere(_));
        let mut reached = own.clone().filter(|piece| !missing(piece));
        // Of what it reaches some of, only what is in files must not be missing.
        let needed = reached.next().map(|_| Backing::Ram);
        let is_needed = |piece: &&Piece| needed.is_none_or(|kind| piece.stretch.backing == kind);
        match own.filter(missing).find(is_needed) {
            Some(Piece {
                stretch,
                placed: Placement::Nowhere(why),
                ..
            }) => Err(LayoutError::Unreachable {
                range: stretch.range,
                why: why.clone(),
            }),
            _ => Ok(()),
        }
    }
}
