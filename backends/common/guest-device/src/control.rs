//! The control queue of a VM: its requests and what they change.

use crate::contexts::{Contexts, Memory};
use crate::events::{ContextEvents, EventQueue};
use crate::regions::{Complete, Regions, budget};
use crate::request::{
    ContextRequest, ControlRequest, Extents, Kind, MAX_REQUEST_BYTES, NewRegion, WindowRange,
    are_pages, parse,
};
use crate::ring::{Chain, Ring};
use farlane_abi::Errno;
use farlane_abi::control::Reply;
use farlane_abi::ids::ContextId;
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_daemon::metrics::Sample;
use farlane_daemon::warn_limited;
use farlane_sys::sync::lock;
use farlane_vhost_user::channel::Channel;
use farlane_zero_copy::{Pool, Region, RegionError};
use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::Ipv6Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Mappings of buffers that a context can have.
pub const MAX_MAPPINGS: u32 = 8192;

/// Requests of all VMs and processes.
#[derive(Debug, Default)]
pub struct RequestCounters {
    /// Requests answered with success.
    pub served: AtomicU64,
    /// Requests answered with an error.
    pub refused: AtomicU64,
}

impl RequestCounters {
    /// Their present values.
    #[must_use]
    pub fn samples(&self) -> [Sample<'static>; 2] {
        [
            Sample::counter(
                "control_requests",
                "Control requests answered with success.",
                self.served.load(Ordering::Relaxed),
            ),
            Sample::counter(
                "control_refusals",
                "Control requests answered with an error.",
                self.refused.load(Ordering::Relaxed),
            ),
        ]
    }

    /// Counts one answer.
    pub fn count(&self, status: Result<(), Errno>) {
        let counter = match status {
            Ok(()) => &self.served,
            Err(_) => &self.refused,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Maps a VM's window: one call of [`Control`] to whoever talks to the VMM.
pub trait MapWindow {
    /// Maps all of `pool` into the VM. Waits for the VMM.
    ///
    /// # Errors
    /// What the VMM says.
    fn map_window(&self, pool: &Pool) -> std::io::Result<()>;
}

/// The control queue of one connection of a VM.
pub struct Control {
    name: String,
    contexts: Arc<dyn Contexts>,
    events: Arc<EventQueue>,
    counters: Arc<RequestCounters>,
    /// Of the VMM, which can have errors of the driver logged.
    channel: Arc<Channel>,
    /// Held from taking a request out of the queue to its answer, so that nothing of it happens
    /// after [`stop`](Self::stop). Never held while the VMM is waited for, which itself may wait
    /// for `stop`.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Named by each answer: another one where contexts of before are no more.
    generation: u64,
    /// The VM is gone for good.
    ended: bool,
    /// None where the queue is stopped or disabled: nothing touches the VM's memory then.
    ring: Option<Ring>,
    /// The contexts are paused since the queue has stopped.
    paused: bool,
    /// Changed whenever the queue stops.
    stops: u64,
    /// Changed when all contexts end.
    ends: u64,
    contexts: HashMap<ContextId, ContextState>,
    regions: Regions,
    window: Option<Arc<Pool>>,
    window_mapped: bool,
}

struct ContextState {
    events: Arc<ContextEvents>,
    mappings: u32,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control")
            .field("vm", &self.name)
            .finish_non_exhaustive()
    }
}

impl Control {
    /// The control queue of a VM with these contexts, of a device of this generation. It has not
    /// started.
    #[must_use]
    pub fn new(
        name: String,
        contexts: Arc<dyn Contexts>,
        events: Arc<EventQueue>,
        counters: Arc<RequestCounters>,
        channel: Arc<Channel>,
        generation: u64,
    ) -> Self {
        Self {
            name,
            contexts,
            events,
            counters,
            channel,
            state: Mutex::new(State {
                generation,
                ..State::default()
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The VM has a window, backed by `pool`.
    pub fn set_window(&self, pool: Arc<Pool>) {
        self.state().window = Some(pool);
    }

    /// The queue starts: where it was ([`resumes`](farlane_vhost_user::session::Setup::resumes),
    /// or after a pause of the VM), and then what was goes on, or from its beginning after a reset,
    /// which ends what was.
    pub fn start(&self, ring: Ring, resumes: bool) {
        let mut state = self.state();
        if state.ended {
            return;
        }
        let begins = !resumes && ring.next_available() == 0;
        state.ring = Some(ring);
        if std::mem::take(&mut state.paused) {
            if begins {
                // A pause after a whole number of rounds of the ring's index looks like a reset.
                self.begin_anew(&mut state);
            }
            self.contexts.resume();
        }
    }

    /// The queue stops, or is disabled: the guest has reset the device, or the VM pauses. Until it
    /// is started again nothing touches the VM's memory. Says at which request.
    pub fn stop(&self) -> u16 {
        let mut state = self.state();
        // A request that waits for the VMM must not answer into a queue that is stopped.
        state.stops += 1;
        if !state.ended && !std::mem::replace(&mut state.paused, true) {
            self.contexts.pause();
        }
        state.ring.take().map_or(0, |ring| ring.next_available())
    }

    /// The VMM resets the device: releases everything. When this returns nothing touches the VM's
    /// memory.
    pub fn reset(&self) {
        self.begin_anew(&mut self.state());
    }

    /// Ends all contexts. A driver that has not reset the device, and goes on, finds another
    /// generation.
    fn begin_anew(&self, state: &mut State) {
        if !state.contexts.is_empty() {
            state.generation = state.generation.wrapping_add(1).max(1);
        }
        self.end_contexts(state);
    }

    fn end_contexts(&self, state: &mut State) {
        state.stops += 1;
        state.ends += 1;
        self.contexts.close_all();
        for context in state.contexts.drain() {
            context.1.events.close();
        }
        state.regions.clear();
        // The VMM drops the mapping with the reset.
        state.window_mapped = false;
    }

    /// The VM is gone.
    pub fn end(&self) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.ended, true) {
            self.end_contexts(&mut state);
        }
    }

    /// Answers all requests in the queue.
    pub fn serve(&self, vmm: &impl MapWindow) {
        loop {
            self.ask_to_be_told(false);
            while self.serve_one(vmm) {}
            // True: requests have come in between.
            if !self.ask_to_be_told(true) {
                return;
            }
            if !self.serve_one(vmm) {
                // A ring that says so for ever and has none, or a reset.
                return;
            }
        }
    }

    /// Asks the driver to tell of requests, or not to. That is written into the queue: not when it
    /// is stopped. Says whether there are requests of which it will not tell.
    fn ask_to_be_told(&self, wanted: bool) -> bool {
        let state = self.state();
        let Some(ring) = state.running() else {
            return false;
        };
        if !wanted {
            ring.will_look();
            return false;
        }
        ring.ask_to_be_told()
    }

    fn serve_one(&self, vmm: &impl MapWindow) -> bool {
        let mut state = self.state();
        let Some(chain) = self.take(&state) else {
            return false;
        };
        let status = match self.read(&chain) {
            Ok(ControlRequest::Ping) => Ok(()),
            Ok(ControlRequest::AddGid { index, gid }) => {
                let status = self.contexts.add_gid(index, gid);
                self.note_gid(index, gid, status)
            }
            Ok(ControlRequest::RemoveGid { index }) => self.contexts.remove_gid(index),
            Ok(ControlRequest::Context(context, ContextRequest::WindowMap(place))) => {
                let status;
                (state, status) = match self.map_window(state, vmm, context, place) {
                    Some(mapped) => mapped,
                    None => return false,
                };
                self.note(context, &ContextRequest::WindowMap(place), status)
            }
            Ok(ControlRequest::Context(context, request)) => {
                let status = self.execute(&mut state, context, &request);
                self.note(context, &request, status)
            }
            Err(errno) => {
                warn_limited!(
                    self.channel.limit(),
                    "{}: a malformed control request: {errno}",
                    self.name
                );
                Err(errno)
            }
        };
        if status != Err(Errno::EAGAIN) {
            self.counters.count(status);
        }
        answer(&state, chain, status);
        true
    }

    /// Lets a context map a buffer, for which the VMM is asked to map the window if it has not done
    /// so. None where the queue has stopped meanwhile, and there is nothing to answer: the request
    /// comes again when the queue goes on, all before it being answered.
    fn map_window<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        vmm: &impl MapWindow,
        context: ContextId,
        place: WindowRange,
    ) -> Option<(MutexGuard<'a, State>, Result<(), Errno>)> {
        let (stops, ends) = (state.stops, state.ends);
        let granted = self.grant(&mut state, context, place);
        let pool = match granted.and_then(|()| state.unmapped_window()) {
            Ok(Some(pool)) => pool,
            Ok(None) => return Some((state, Ok(()))),
            Err(e) => return Some((state, Err(e))),
        };
        drop(state);
        let mapped = vmm.map_window(&pool);
        let mut state = self.state();
        if state.ends != ends {
            // Reset in between: the queue, and the request, are no more.
            return None;
        }
        state.window_mapped = mapped.is_ok();
        if state.stops != stops || mapped.is_err() {
            let _ = self.ungrant(&mut state, context, place);
        }
        if state.stops != stops {
            return None;
        }
        let status = mapped.map_err(|e| {
            let limit = self.channel.limit();
            warn_limited!(limit, "{}: cannot map the window: {e}", self.name);
            Errno::EIO
        });
        Some((state, status))
    }

    fn note(
        &self,
        context: ContextId,
        request: &ContextRequest,
        status: Result<(), Errno>,
    ) -> Result<(), Errno> {
        // It comes again.
        if let Err(errno) = status
            && errno != Errno::EAGAIN
        {
            let what = match request {
                ContextRequest::Attach { new, .. } => format!("{new:?}"),
                ContextRequest::AttachMore { region, .. } => format!("more of region {region}"),
                other => format!("{other:?}"),
            };
            warn_limited!(
                self.channel.limit(),
                "{}: context {context}: {what}: {errno}",
                self.name
            );
        }
        status
    }

    /// A GID that a guest does not get: its operator wants to know.
    fn note_gid(&self, index: u32, gid: [u8; 16], status: Result<(), Errno>) -> Result<(), Errno> {
        if let Err(errno) = status {
            let address = Ipv6Addr::from(gid).to_canonical();
            let limit = self.channel.limit();
            warn_limited!(limit, "{}: GID {index}: {address}: {errno}", self.name);
        }
        status
    }

    /// Takes the next request.
    fn take(&self, state: &State) -> Option<Chain> {
        let taken = state.running()?.take();
        taken.unwrap_or_else(|e| {
            let limit = self.channel.limit();
            warn_limited!(limit, "{}: a broken control queue: {e}", self.name);
            None
        })
    }

    /// Reads and parses what a chain holds, once: the guest may change it meanwhile.
    fn read(&self, chain: &Chain) -> Result<ControlRequest, Errno> {
        let memory = chain.memory();
        let mut reader = chain.clone().reader(memory).map_err(|_| Errno::EFAULT)?;
        let length = reader.available_bytes();
        if length > MAX_REQUEST_BYTES {
            return Err(Errno::EPROTO);
        }
        // A request that could not be answered must not be carried out.
        let room = chain.clone().writer(memory).map_err(|_| Errno::EFAULT)?;
        if room.available_bytes() < size_of::<Reply>() {
            return Err(Errno::EPROTO);
        }
        let mut bytes = vec![0; length];
        reader.read_exact(&mut bytes).map_err(|_| Errno::EFAULT)?;
        parse(&bytes)
    }

    fn execute(
        &self,
        state: &mut State,
        context: ContextId,
        request: &ContextRequest,
    ) -> Result<(), Errno> {
        match request {
            ContextRequest::Open { of_kernel } => {
                let events = self.events.context(context);
                let pool = state.window.clone();
                match of_kernel {
                    false => self.contexts.open(context, Arc::clone(&events), pool)?,
                    true => self
                        .contexts
                        .open_of_kernel(context, Arc::clone(&events), pool)?,
                }
                let mappings = 0;
                state
                    .contexts
                    .insert(context, ContextState { events, mappings });
                Ok(())
            }
            ContextRequest::Close => {
                self.contexts.close(context)?;
                if let Some(closed) = state.contexts.remove(&context) {
                    closed.events.close();
                }
                state.regions.forget_context(context);
                Ok(())
            }
            ContextRequest::Attach { new, extents } => {
                self.contexts.check(context)?;
                let extents = extents.clone();
                let budget = state.budget();
                let complete = state.regions.begin(context, *new, extents, budget)?;
                self.attach(state, context, complete)
            }
            ContextRequest::AttachMore { region, extents } => {
                self.contexts.check(context)?;
                let extents = extents.clone();
                let budget = state.budget();
                let complete = state.regions.add(context, *region, extents, budget)?;
                self.attach(state, context, complete)
            }
            ContextRequest::Detach { region } => {
                self.contexts.check(context)?;
                if state.regions.is_incomplete(context, *region) {
                    state.regions.forget(context, *region);
                    return Ok(());
                }
                self.contexts.detach(context, *region)?;
                state.regions.forget(context, *region);
                Ok(())
            }
            ContextRequest::WindowMap(place) => self.grant(state, context, *place),
            ContextRequest::WindowUnmap(place) => self.ungrant(state, context, *place),
        }
    }

    /// Makes a region whose extents have all come.
    fn attach(
        &self,
        state: &mut State,
        context: ContextId,
        complete: Option<Complete>,
    ) -> Result<(), Errno> {
        let Some(Complete { new, extents }) = complete else {
            return Ok(());
        };
        let memory = self.memory(state, context, &new, extents);
        let attached = memory.and_then(|memory| self.contexts.attach(context, new.region, memory));
        if attached.is_err() {
            state.regions.forget(context, new.region);
        }
        attached
    }

    /// What a process has announced, as the backend gets it.
    fn memory(
        &self,
        state: &State,
        context: ContextId,
        new: &NewRegion,
        extents: Extents,
    ) -> Result<Memory, Errno> {
        if new.kind.is_whole_pages() && !extents.iter().all(|e| are_pages(e.0, e.1)) {
            return Err(Errno::EINVAL);
        }
        let region = |writable| {
            let ring = state.running().ok_or(Errno::EFAULT)?;
            Region::from_guest(ring.space(), &extents, writable).map_err(|e| {
                let (limit, name, region) = (self.channel.limit(), &self.name, new.region);
                warn_limited!(limit, "{name}: context {context}: region {region}: {e}");
                region_errno(&e)
            })
        };
        Ok(match new.kind {
            Kind::Segment => Memory::Segment(region(true)?),
            Kind::Pin { writable } => Memory::Pin(region(writable)?),
            Kind::Phony => Memory::Phony(extents),
            Kind::Device { writable } => Memory::Device {
                runs: extents,
                writable,
            },
            Kind::File => Memory::File(new.address),
            Kind::AllMemory { writable } => {
                let space = state.running().ok_or(Errno::EFAULT)?.space();
                let memory = Region::all_of_guest(space, writable);
                Memory::All {
                    memory: memory.map_err(|e| region_errno(&e))?,
                    space: Arc::clone(space),
                }
            }
            // Refused where it is parsed: a VM sends no file.
            Kind::Shared { .. } => return Err(Errno::EINVAL),
            // A guest's driver says which pages they are.
            Kind::AddressSpace { .. } => return Err(Errno::EOPNOTSUPP),
        })
    }

    /// Checks that the context may map a buffer, and holds the buffer for it.
    fn grant(
        &self,
        state: &mut State,
        context: ContextId,
        place: WindowRange,
    ) -> Result<(), Errno> {
        let mine = state.contexts.get_mut(&context).ok_or(Errno::ENOENT)?;
        if mine.mappings >= MAX_MAPPINGS {
            return Err(Errno::ENOSPC);
        }
        self.contexts.window_map(context, place)?;
        mine.mappings += 1;
        Ok(())
    }

    fn ungrant(
        &self,
        state: &mut State,
        context: ContextId,
        place: WindowRange,
    ) -> Result<(), Errno> {
        let mine = state.contexts.get_mut(&context).ok_or(Errno::ENOENT)?;
        self.contexts.window_unmap(context, place)?;
        mine.mappings = mine.mappings.saturating_sub(1);
        Ok(())
    }
}

impl State {
    /// The queue, if the VM's memory may be touched.
    fn running(&self) -> Option<&Ring> {
        self.ring.as_ref().filter(|_| !self.ended)
    }

    /// What all regions may cost.
    fn budget(&self) -> u64 {
        let ranges = self.running().map(|ring| ring.space().ranges());
        budget(ranges.iter().flatten().map(|range| range.1).sum())
    }

    /// The window, if the VMM has not mapped it yet.
    fn unmapped_window(&self) -> Result<Option<Arc<Pool>>, Errno> {
        let pool = self.window.as_ref().ok_or(Errno::EOPNOTSUPP)?;
        Ok((!self.window_mapped).then(|| Arc::clone(pool)))
    }
}

/// Writes the answer to a request, and gives its buffer back.
fn answer(state: &State, chain: Chain, status: Result<(), Errno>) {
    let Some(ring) = state.running() else {
        return;
    };
    let reply = Reply {
        status: status.map_or_else(Errno::to_wire, |()| 0).into(),
        value: state.generation.into(),
        ..Reply::default()
    };
    let head = chain.head_index();
    let bytes = reply.as_bytes();
    let memory = ring.memory();
    let written = chain.writer(&memory).is_ok_and(|mut writer| {
        writer.available_bytes() >= bytes.len() && writer.write_all(bytes).is_ok()
    });
    if ring.put(head, if written { bytes.len() } else { 0 }) {
        ring.tell();
    }
}

/// What a guest is told of a region that cannot be made.
#[must_use]
pub fn region_errno(error: &RegionError) -> Errno {
    match error {
        RegionError::Space(_) => Errno::EFAULT,
        RegionError::Mapping(_) | RegionError::Io(_) => Errno::ENOMEM,
        _ => Errno::EINVAL,
    }
}
