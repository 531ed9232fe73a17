//! Address tunnelling, the backend's side: envelopes in phony buffers lead to device memory.
//!
//! [`farlane_abi::tunnel`] says what both sides agree on (spin-atc17, section 5.1). [`Tokens`]
//! holds it for one VM: a device of the VM makes its processes, phony buffers and device memory
//! known, and the VM's disks [`open`](Tokens::open) the requests that come from phony buffers.

mod context;
mod device_region;
mod envelope;
mod error;
mod forgotten;
mod gate;
mod keys;
mod opening;
mod slots;

use crate::{AddressSpace, SharedMemory, View};
use context::Context;
use device_region::DeviceRegion;
pub use error::TokenError;
use farlane_abi::ids::{ContextId, RegionId};
use farlane_abi::tunnel::Disk;
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_sys::sync::{read, write};
use forgotten::Forgotten;
pub use keys::Secret;
pub use opening::Opened;
use opening::{Opening, Turn};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// A read of the disk.
    IntoDevice,
    /// A write of the disk.
    OutOfDevice,
}

/// Pages of a phony buffer.
#[derive(Debug)]
struct Phony {
    end: u64,
    region: RegionId,
    owner: ContextId,
    context: Arc<Context>,
}

#[derive(Debug, Default)]
struct State {
    contexts: HashMap<ContextId, Arc<Context>>,
    /// By guest-physical address of the first byte; disjoint.
    phony: BTreeMap<u64, Phony>,
    /// What may carry envelopes and is no phony buffer that is known: of an earlier backend, which
    /// has made its keys with the same secret, or from before a reset.
    forgotten: Forgotten,
    epoch: u32,
    suspended: bool,
    /// What keys are made with, here and by the backend before.
    secret: Option<Secret>,
}

/// The tokens of one VM.
#[derive(Debug)]
pub struct Tokens {
    device_memory: Arc<AddressSpace>,
    disks: Vec<Disk>,
    /// Whether there are phony buffers, or pages that were: looked at for every request.
    any: AtomicBool,
    state: RwLock<State>,
}

impl Tokens {
    /// Tokens for `device_memory`, in requests of `disks`.
    #[must_use]
    pub fn new(device_memory: Arc<AddressSpace>, disks: Vec<Disk>) -> Arc<Self> {
        Arc::new(Self {
            device_memory,
            disks,
            any: AtomicBool::new(false),
            state: RwLock::new(State {
                epoch: 1,
                ..State::default()
            }),
        })
    }

    fn state(&self) -> RwLockReadGuard<'_, State> {
        read(&self.state)
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        write(&self.state)
    }

    /// Says whether requests are to be looked at.
    fn look(&self, state: &State) {
        let any = !state.phony.is_empty() || !state.forgotten.is_empty();
        self.any.store(any, Ordering::Release);
    }

    /// Opens the envelopes of a request whose data lies in `segments` (guest-physical address,
    /// bytes) of `ram`. `None` for one that moves what lies there, and nothing else. Segments of
    /// ordinary memory beside phony pages stay what they are.
    ///
    /// The guest's block layer merges requests of several processes. So a token that is no good
    /// costs its own page, see [`Opened::refused`].
    ///
    /// # Errors
    /// See [`TokenError`]: nothing of the request can be moved, or a part of it is no memory.
    pub fn open(
        &self,
        ram: &View,
        direction: Direction,
        segments: &[(u64, u64)],
    ) -> Result<Option<Opened>, TokenError> {
        self.open_for(ram, direction, segments, Turn::First)
    }

    /// The same for a request that another backend had begun. What its process has a receipt of,
    /// from that one, is on the disk and stays there: a write of forgotten envelopes is an error.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_again(
        &self,
        ram: &View,
        direction: Direction,
        segments: &[(u64, u64)],
    ) -> Result<Option<Opened>, TokenError> {
        self.open_for(ram, direction, segments, Turn::Again)
    }

    fn open_for(
        &self,
        ram: &View,
        direction: Direction,
        segments: &[(u64, u64)],
        turn: Turn,
    ) -> Result<Option<Opened>, TokenError> {
        if !self.any.load(Ordering::Acquire) {
            return Ok(None);
        }
        let state = self.state();
        let concerned = |&(address, length): &(u64, u64)| {
            let end = address.saturating_add(length);
            let phony = state.phony.range(..end).next_back();
            phony.is_some_and(|(_, phony)| phony.end > address)
                || direction == Direction::OutOfDevice && state.forgotten.overlaps(address, end)
        };
        if !segments.iter().any(concerned) {
            return Ok(None);
        }
        let device = self.device_memory.view();
        let mut opening = Opening::new(&state, ram.clone(), device, direction, turn);
        for &(address, length) in segments {
            opening.segment(&state, address, length)?;
        }
        opening.finish()
    }

    /// The VM has been told this secret by whoever served it last: none if nobody has. Returns what
    /// it is to be told now.
    ///
    /// Another one than that of this backend is of one that is no more. The VM's processes may not
    /// know yet, and write phony buffers to its disks: an envelope of that backend is not written
    /// as if it were data, wherever it lies.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn hand_over(&self, told: Option<Secret>) -> io::Result<Secret> {
        let mut state = self.state_mut();
        if let Some(told) = told
            && state.secret != Some(told)
            && state.contexts.is_empty()
        {
            // Whoever comes next has to tell the envelopes of both.
            state.secret = Some(told);
            state.forgotten.add(0, u64::MAX);
            self.look(&state);
        }
        state.secret()
    }

    /// Opens context `id`.
    ///
    /// # Errors
    /// `EEXIST` for one in use.
    pub fn open_context(&self, id: ContextId) -> Result<(), Errno> {
        let mut state = self.state_mut();
        if state.contexts.contains_key(&id) {
            return Err(Errno::EEXIST);
        }
        let context = Context::new(state.epoch);
        if state.suspended {
            context.suspend();
        }
        state.contexts.insert(id, Arc::new(context));
        Ok(())
    }

    /// Whether context `id` is open.
    #[must_use]
    pub fn has_context(&self, id: ContextId) -> bool {
        self.state().contexts.contains_key(&id)
    }

    /// Whether there are contexts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.state().contexts.is_empty()
    }

    fn context(&self, id: ContextId) -> Result<Arc<Context>, Errno> {
        let state = self.state();
        state.contexts.get(&id).cloned().ok_or(Errno::ENOENT)
    }

    /// Closes context `id`: nothing more of it begins, and nothing of it is touched when this
    /// succeeds.
    ///
    /// # Errors
    /// `ENOENT` where none is open, `EAGAIN` where requests are still under way: it is to be asked
    /// again.
    pub fn close_context(&self, id: ContextId) -> Result<(), Errno> {
        self.context(id)?.try_close()?;
        // Not before: what still comes out of its pages is refused, not written as it stands there.
        let mut state = self.state_mut();
        state.contexts.remove(&id);
        state.phony.retain(|_, phony| phony.owner != id);
        self.look(&state);
        Ok(())
    }

    /// Closes all contexts. Those that come next are of a VM that runs.
    ///
    /// Processes of these may live, and what they have begun to write may still be on its way to a
    /// disk: until their phony pages are made known again, envelopes in them are not written as if
    /// they were data, as in [`hand_over`](Self::hand_over).
    pub fn close_all(&self) {
        let contexts = {
            let mut state = self.state_mut();
            for (start, phony) in std::mem::take(&mut state.phony) {
                state.forgotten.add(start, phony.end);
            }
            self.look(&state);
            state.suspended = false;
            std::mem::take(&mut state.contexts)
        };
        for context in contexts.values() {
            context.close();
        }
    }

    /// The header of context `id`.
    ///
    /// # Errors
    /// `EEXIST` where it has one, `EINVAL` for memory that is too small.
    pub fn set_header(&self, id: ContextId, shared: SharedMemory) -> Result<(), Errno> {
        let secret = self.state_mut().secret().map_err(|_| Errno::EIO)?;
        self.context(id)?.set_header(shared, &self.disks, secret)
    }

    /// Whole guest-physical pages of context `id` that are phony.
    ///
    /// # Errors
    /// `EBUSY` where some are already, `EINVAL` for parts of pages, `ENOENT` where no such context
    /// is open.
    pub fn add_phony(
        &self,
        id: ContextId,
        region: RegionId,
        pages: &[(u64, u64)],
    ) -> Result<(), Errno> {
        let mut state = self.state_mut();
        let context = state.contexts.get(&id).cloned().ok_or(Errno::ENOENT)?;
        let mut added = Vec::new();
        let result = pages.iter().try_for_each(|&(start, length)| {
            let whole =
                start.is_multiple_of(PAGE_BYTES) && length.is_multiple_of(PAGE_BYTES) && length > 0;
            let end = start
                .checked_add(length)
                .filter(|_| whole)
                .ok_or(Errno::EINVAL)?;
            let before = state.phony.range(..end).next_back();
            if before.is_some_and(|(_, phony)| phony.end > start) {
                return Err(Errno::EBUSY);
            }
            added.push(start);
            let context = Arc::clone(&context);
            let phony = Phony {
                end,
                region,
                owner: id,
                context,
            };
            state.phony.insert(start, phony);
            Ok(())
        });
        if result.is_err() {
            for start in added {
                state.phony.remove(&start);
            }
        } else {
            for &(start, length) in pages {
                state.forgotten.remove(start, start.saturating_add(length));
            }
        }
        self.look(&state);
        result
    }

    /// Device memory of context `id`: guest-physical runs, and whether bytes may be written there.
    ///
    /// # Errors
    /// `EEXIST` for a region in use, `ENOENT` where no such context is open.
    pub fn add_device(
        &self,
        id: ContextId,
        region: RegionId,
        runs: &[(u64, u64)],
        writable: bool,
    ) -> Result<(), Errno> {
        self.context(id)?
            .add_device(region, DeviceRegion::new(runs, writable))
    }

    /// Takes a phony buffer or device memory away. Nothing touches device memory of it when this
    /// succeeds.
    ///
    /// # Errors
    /// `ENOENT` where there is none such, `EAGAIN` where requests are still under way in it: it is
    /// to be asked again.
    pub fn detach(&self, id: ContextId, region: RegionId) -> Result<(), Errno> {
        let context = self.context(id)?;
        if context.has_device(region) {
            return context.remove_device(region);
        }
        let mut state = self.state_mut();
        let before = state.phony.len();
        state
            .phony
            .retain(|_, phony| (phony.owner, phony.region) != (id, region));
        self.look(&state);
        if state.phony.len() == before {
            return Err(Errno::ENOENT);
        }
        Ok(())
    }

    /// A second has passed.
    pub fn tick(&self) {
        let (epoch, contexts) = {
            let mut state = self.state_mut();
            state.epoch = state.epoch.wrapping_add(1).max(1);
            let contexts: Vec<_> = state.contexts.values().cloned().collect();
            (state.epoch, contexts)
        };
        for context in contexts {
            context.set_epoch(epoch);
        }
    }

    /// The VM does not run, or resets the device: until [`resume`](Self::resume) or
    /// [`close_all`](Self::close_all), which of both is not known yet, its processes are told
    /// nothing, and tokens are not used. Device memory is touched by requests that are under way
    /// until this returns, and then by none. Phony pages are what they are: memory of whoever has
    /// them by now. What is read goes into them, and what is in them is written, but for an
    /// envelope, which is refused.
    pub fn suspend(&self) {
        let contexts: Vec<_> = {
            let mut state = self.state_mut();
            state.suspended = true;
            for context in state.contexts.values() {
                context.suspend();
            }
            state.contexts.values().cloned().collect()
        };
        for context in contexts {
            context.drain();
        }
    }

    /// Whether it is so.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.state().suspended
    }

    /// The VM goes on.
    pub fn resume(&self) {
        let mut state = self.state_mut();
        state.suspended = false;
        for context in state.contexts.values() {
            context.resume();
        }
    }
}

impl State {
    /// The secret; the first call makes one.
    fn secret(&mut self) -> io::Result<Secret> {
        match self.secret {
            Some(secret) => Ok(secret),
            None => Ok(*self.secret.insert(Secret::random()?)),
        }
    }
}
