//! Devices of other lenders, which windows show, as devices of this one reach them; and ranges of
//! others, here and there.

use super::ForeignBar;
use super::device::Device;
use super::peers::PeerRange;
use super::posted::{PostedWrites, WriteWindow};
use super::proof::Word;
use crate::borrower::{ReleaseFn, Subtenant};
use crate::protocol::message::{MAX_WORDS, PeerKey, PeerName, Refusal};
use farlane_pci::{AccessError, DmaMapping, Function, Region};
use farlane_sys::chain;
use farlane_sys::sync::lock;
use std::fmt;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// How long it may take to take everything away, before a device is kept from all memory: it begins
/// nothing more then. Shorter than the other lender allows for.
const TAKING_AWAY: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    /// The sublease has ended: nothing can be reached any more.
    is_over: bool,
    uses: Vec<Arc<PeerRange>>,
}

/// The ranges that one device of this lender reaches in one of another lender.
pub(super) struct ForeignRanges {
    state: Mutex<State>,
    /// The windows through which it may write there.
    written: PostedWrites,
    /// The device of this lender, until it is given back. Never the last reference to it: the lock
    /// is held while it is used.
    source: Mutex<Option<Weak<dyn Function>>>,
}

impl fmt::Debug for ForeignRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignRanges").finish_non_exhaustive()
    }
}

impl ForeignRanges {
    /// Whether nothing can be reached any more.
    pub fn is_over(&self) -> bool {
        self.state().is_over
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn source(&self) -> MutexGuard<'_, Option<Weak<dyn Function>>> {
        lock(&self.source)
    }

    /// The source is about to go. Nobody has it here when this returns.
    fn part(&self) {
        *self.source() = None;
    }

    /// The source begins nothing more. What it has begun ends when what it reaches has been taken
    /// away.
    fn keep_from_memory(&self) {
        let source = self.source();
        if let Some(function) = source.as_ref().and_then(Weak::upgrade)
            && let Err(e) = function.end_bus_master()
        {
            log::error!("A device cannot be kept from memory: {}", chain(&e));
        }
    }

    /// Keeps the source from memory if it takes too long until what is returned is dropped.
    fn hurry(self: &Arc<Self>) -> impl Sized + use<> {
        let (ended, end) = channel::<()>();
        let uses = Arc::clone(self);
        let watcher = std::thread::Builder::new().name("bus master".to_owned());
        let watching = watcher.spawn(move || {
            if end.recv_timeout(TAKING_AWAY) == Err(RecvTimeoutError::Timeout) {
                uses.keep_from_memory();
            }
        });
        if watching.is_err() {
            self.keep_from_memory();
        }
        ended
    }

    /// Takes them away. False if the source may go on to reach one. Otherwise what it has written
    /// there has arrived, too.
    fn end(self: &Arc<Self>) -> bool {
        let mut state = self.state();
        state.is_over = true;
        // They are there until they have ended.
        let uses = state.uses.clone();
        drop(state);
        if uses.is_empty() {
            self.written.flush();
            return true;
        }
        let in_time = self.hurry();
        // All of them, also after one that fails.
        let mut failed = None;
        for used in uses {
            failed = used.end().err().or(failed);
        }
        drop(in_time);
        let Some(e) = failed else {
            self.state().uses.clear();
            self.written.flush();
            return true;
        };
        log::error!("A device of another lender is not let go of: {}", chain(&e));
        // What it has begun has not ended by that.
        self.keep_from_memory();
        false
    }
}

/// A device of another lender, as far as one device of this lender may reach it: as long as the
/// other lender's device is held.
pub(crate) struct ForeignDevice {
    key: PeerKey,
    uses: Arc<ForeignRanges>,
    subtenant: Subtenant,
}

impl ForeignDevice {
    /// Takes a sublease of what a window shows, for `source`, as the lender `name`.
    pub fn open(
        name: &str,
        bar: &ForeignBar,
        key: PeerKey,
        source: &Arc<dyn Function>,
        until: Instant,
    ) -> Result<Arc<Self>, Refusal> {
        let uses = Arc::new(ForeignRanges {
            state: Mutex::default(),
            written: PostedWrites::default(),
            source: Mutex::new(Some(Arc::downgrade(source))),
        });
        let ended = Arc::clone(&uses);
        let let_go: ReleaseFn = Box::new(move || ended.end());
        let device = bar.name();
        let opened = Subtenant::open(&bar.connector, name, (&device, key), let_go, until);
        let subtenant = opened.map_err(|e| {
            uses.part();
            let PeerName { lender, device } = &device;
            Refusal::Invalid(format!("no sublease of {lender}/{device}: {}", chain(&e)))
        })?;
        Ok(Arc::new(Self {
            key,
            uses,
            subtenant,
        }))
    }

    /// Whether it is one that such a key opens, and has not ended.
    pub fn is_live(&self, key: PeerKey) -> bool {
        self.key == key && !self.is_over()
    }

    /// Whether the sublease has ended.
    pub fn is_over(&self) -> bool {
        self.uses.is_over()
    }

    /// The device of this lender is about to go. Nobody has it here when this returns.
    pub fn part(&self) {
        self.uses.part();
    }

    /// Whether nothing of it is reached.
    pub fn is_unused(&self) -> bool {
        self.uses.state().uses.is_empty()
    }

    /// Words of its memory, as its lender reads them.
    pub fn words(&self, region: Region, offsets: &[u64], until: Instant) -> io::Result<Vec<Word>> {
        let mut words = Vec::new();
        for part in offsets.chunks(MAX_WORDS) {
            let read = self.subtenant.words(region, part.to_vec(), until);
            let bytes = read.map_err(io::Error::other)?;
            words.extend(bytes.chunks_exact(size_of::<Word>()).map(|bytes| {
                let mut word = Word::default();
                word.copy_from_slice(bytes);
                word
            }));
        }
        Ok(words)
    }

    /// Has `source` reach a range of it, until that is ended or the sublease is. What that writes
    /// goes `through` a window.
    pub fn reach(
        &self,
        source: &Arc<dyn Function>,
        mapping: DmaMapping,
        through: Option<&mut WriteWindow>,
    ) -> Result<Arc<PeerRange>, Refusal> {
        if let Some(through) = through {
            self.uses.written.add(through);
            through.foreign = Some(Arc::clone(&self.uses));
        }
        let mut state = self.uses.state();
        if state.is_over {
            return Err(Refusal::Invalid("the sublease has ended".to_owned()));
        }
        // One that ends from now on waits for what is here, and takes it away.
        let register = |used: &Arc<PeerRange>| {
            state.uses.push(Arc::clone(used));
            drop(state);
        };
        PeerRange::map(source, mapping, register, |used| self.forget(used))
    }

    /// A range was taken away.
    pub fn forget(&self, used: &Arc<PeerRange>) {
        let mut state = self.uses.state();
        state.uses.retain(|other| !Arc::ptr_eq(other, used));
    }
}

impl Drop for ForeignDevice {
    fn drop(&mut self) {
        self.part();
        // Once it is over, its memory may be another's.
        if !self.is_over() {
            self.uses.written.flush();
        }
        self.subtenant.give_back();
    }
}

/// Whose device is reached.
#[derive(Clone)]
pub(super) enum Owner {
    /// This lender's.
    Here(Arc<Device>),
    /// Another lender's.
    Foreign(Arc<ForeignDevice>),
}

/// A range of another device.
#[derive(Clone)]
pub(super) struct PeerMapping {
    owner: Owner,
    range: Arc<PeerRange>,
}

impl PeerMapping {
    pub fn new(owner: Owner, range: Arc<PeerRange>) -> Self {
        Self { owner, range }
    }

    /// Takes the range away, unless that has been done. See [`PeerRange::end`].
    pub fn end(&self) -> Result<(), AccessError> {
        self.range.end()
    }

    /// The range goes with the function. False if it was not to be taken away before.
    pub fn take(&self) -> bool {
        let taken = self.range.take();
        if taken {
            self.forget();
        }
        taken
    }

    /// The function is about to go.
    pub fn part(&self) {
        if let Owner::Foreign(device) = &self.owner {
            device.part();
        }
    }

    /// Nobody has to take it away any more.
    pub fn forget(&self) {
        match &self.owner {
            Owner::Here(device) => device.forget(&self.range),
            Owner::Foreign(device) => device.forget(&self.range),
        }
    }
}
