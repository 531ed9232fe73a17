//! The control queue of a VM: its requests and what they change.

use crate::contexts::Contexts;
use crate::events::{ContextEvents, EventQueue};
use crate::regions::{Complete, Regions, budget};
use crate::request::{ControlRequest, Extents, Kind, MAX_REQUEST_BYTES, Place, are_pages, parse};
use farlane_abi::Errno;
use farlane_abi::control::Reply;
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_daemon::log_limit::LogLimit;
use farlane_daemon::metrics::Sample;
use farlane_daemon::vring::{VmMemory, Vring, signal_used};
use farlane_daemon::warn_limited;
use farlane_sys::sync::lock;
use farlane_zero_copy::{AddressSpace, AddressSpaceError, Pool, Region, RegionError};
use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use vhost_user_backend::VringT as _;
use virtio_queue::{QueueOwnedT as _, QueueT as _};
use vm_memory::{GuestAddressSpace, GuestMemoryMmap};

/// Mappings of buffers that a context can have.
pub const MAX_MAPPINGS: u32 = 8192;

type Memory = <VmMemory as GuestAddressSpace>::T;
type Chain = virtio_queue::DescriptorChain<Memory>;

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
            Sample {
                name: "control_requests",
                help: "Control requests answered with success.",
                value: self.served.load(Ordering::Relaxed),
            },
            Sample {
                name: "control_refusals",
                help: "Control requests answered with an error.",
                value: self.refused.load(Ordering::Relaxed),
            },
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
    space: Arc<AddressSpace>,
    memory: VmMemory,
    events: Arc<EventQueue>,
    counters: Arc<RequestCounters>,
    ram_bytes: AtomicU64,
    limit: Arc<LogLimit>,
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
    /// The queue is stopped: by a reset, or because the VM pauses. Its next start tells.
    suspended: bool,
    /// The queue is disabled: the VM pauses.
    disabled: bool,
    /// The contexts are paused, as long as one of the two is so.
    paused: bool,
    /// Changed whenever the queue stops or is disabled.
    stops: u64,
    /// Changed when all contexts end.
    ends: u64,
    contexts: HashMap<u32, ContextState>,
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
    /// The control queue of a VM with these contexts and `memory`, of a device of this generation.
    /// What it logs goes by `limit`.
    #[must_use]
    pub fn new(
        name: String,
        contexts: Arc<dyn Contexts>,
        memory: VmMemory,
        events: Arc<EventQueue>,
        counters: Arc<RequestCounters>,
        limit: Arc<LogLimit>,
        generation: u64,
    ) -> Self {
        Self {
            name,
            contexts,
            space: AddressSpace::new(),
            memory,
            events,
            counters,
            ram_bytes: AtomicU64::new(0),
            limit,
            state: Mutex::new(State {
                generation,
                ..State::default()
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The VM's memory has changed.
    ///
    /// # Errors
    /// What [`AddressSpace::replace_ram`] says.
    pub fn replace_ram(&self, memory: &GuestMemoryMmap) -> Result<(), AddressSpaceError> {
        self.space.replace_ram(memory)?;
        let bytes = self.space.ranges().iter().map(|r| r.1).sum();
        self.ram_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// The VM has a window, backed by `pool`.
    pub fn set_window(&self, pool: Arc<Pool>) {
        self.state().window = Some(pool);
    }

    /// The device is reset, or the VM stops it: releases everything. When this returns nothing
    /// touches the VM's memory.
    pub fn stop(&self) {
        self.stop_locked(&mut self.state());
    }

    /// The queue stops: the guest has reset the device, or the VM pauses. Until it is started again
    /// nothing touches the VM's memory.
    pub fn suspend(&self) {
        let mut state = self.state();
        state.suspended = true;
        self.pause_locked(&mut state);
    }

    /// The queue is enabled, or disabled: then nothing touches the VM's memory until it is enabled.
    /// What was goes on after that.
    pub fn set_enabled(&self, enabled: bool) {
        let mut state = self.state();
        state.disabled = !enabled;
        if enabled {
            self.resume_locked(&mut state);
        } else {
            self.pause_locked(&mut state);
        }
    }

    /// The queue may have started: from its beginning after a reset, which ends what was, or where
    /// it was after a pause of the VM, which goes on.
    pub fn started(&self, vring: &Vring) {
        self.started_locked(&mut self.state(), vring);
    }

    fn started_locked(&self, state: &mut State, vring: &Vring) {
        if !state.suspended || state.ended {
            return;
        }
        // None: a kick that came before the queue stopped.
        let Some(base) = vring.started_at() else {
            return;
        };
        state.suspended = false;
        if base == 0 {
            // A pause after a whole number of rounds of the ring's index looks like a reset. A
            // driver that goes on finds another generation, and its contexts at their end.
            if !state.contexts.is_empty() {
                state.generation = state.generation.wrapping_add(1).max(1);
            }
            self.stop_locked(state);
        }
        self.resume_locked(state);
    }

    fn pause_locked(&self, state: &mut State) {
        // A request that waits for the VMM must not answer into a queue that is stopped.
        state.stops += 1;
        if !state.ended && !std::mem::replace(&mut state.paused, true) {
            self.contexts.pause();
        }
    }

    fn resume_locked(&self, state: &mut State) {
        if state.is_running() && std::mem::take(&mut state.paused) {
            self.contexts.resume();
        }
    }

    fn stop_locked(&self, state: &mut State) {
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
        state.ended = true;
        self.stop_locked(&mut state);
        self.space.clear();
    }

    /// Answers all requests in the queue.
    pub fn serve(&self, vring: &Vring, vmm: &impl MapWindow) {
        self.started(vring);
        loop {
            self.set_notification(vring, false);
            while self.serve_one(vring, vmm) {}
            // True: requests have come in between.
            if !self.set_notification(vring, true) {
                return;
            }
            if !self.serve_one(vring, vmm) {
                // A ring that says so for ever and has none, or a reset.
                return;
            }
        }
    }

    /// Asks the driver to tell of requests, or not to. That is written into the queue: not when it
    /// is stopped. Says whether there are requests of which it will not tell.
    fn set_notification(&self, vring: &Vring, enabled: bool) -> bool {
        let state = self.state();
        if !state.is_running() {
            return false;
        }
        // They fail where the queue's addresses are no memory, and then there is no request.
        if !enabled {
            let _ = vring.disable_notification();
            return false;
        }
        vring.enable_notification().unwrap_or(false)
    }

    fn serve_one(&self, vring: &Vring, vmm: &impl MapWindow) -> bool {
        let mut state = self.state();
        if !state.is_running() {
            return false;
        }
        let before = vring.queue_next_avail();
        let Some(chain) = self.next_chain(vring) else {
            return false;
        };
        let status = match self.read(&chain) {
            Ok((context, ControlRequest::WindowMap(place))) => {
                let (stops, ends) = (state.stops, state.ends);
                let granted = self.grant(&mut state, context, place);
                let pending = granted.and_then(|()| state.unmapped_window());
                let status = match pending {
                    Ok(None) => Ok(()),
                    Ok(Some(pool)) => {
                        drop(state);
                        let mapped = vmm.map_window(&pool);
                        state = self.state();
                        if state.ends != ends {
                            // Reset in between: the queue, and the request, are no more.
                            return false;
                        }
                        state.window_mapped = mapped.is_ok();
                        if state.stops != stops {
                            // Paused in between: the request comes again when the queue goes on,
                            // all before it being answered.
                            let _ = self.ungrant(&mut state, context, place);
                            // Unless it has begun anew. One that was stopped is begun by what it
                            // has answered.
                            let mut locked = vring.get_mut();
                            let queue = locked.get_queue_mut();
                            if !state.suspended && queue.next_avail() == before.wrapping_add(1) {
                                queue.set_next_avail(before);
                            }
                            return false;
                        }
                        mapped.map_err(|e| {
                            warn_limited!(self.limit, "{}: cannot map the window: {e}", self.name);
                            let _ = self.ungrant(&mut state, context, place);
                            Errno::EIO
                        })
                    }
                    Err(e) => Err(e),
                };
                self.note(context, &ControlRequest::WindowMap(place), status)
            }
            Ok((context, request)) => {
                let status = self.execute(&mut state, context, &request);
                self.note(context, &request, status)
            }
            Err(errno) => {
                warn_limited!(
                    self.limit,
                    "{}: a malformed control request: {errno}",
                    self.name
                );
                Err(errno)
            }
        };
        if status != Err(Errno::EAGAIN) {
            self.counters.count(status);
        }
        self.answer(vring, chain, status, state.generation);
        true
    }

    fn note(
        &self,
        context: u32,
        request: &ControlRequest,
        status: Result<(), Errno>,
    ) -> Result<(), Errno> {
        // It comes again.
        if let Err(errno) = status
            && errno != Errno::EAGAIN
        {
            let what = match request {
                ControlRequest::Attach { new, .. } => format!("{new:?}"),
                ControlRequest::AttachMore { region, .. } => format!("more of region {region}"),
                other => format!("{other:?}"),
            };
            warn_limited!(
                self.limit,
                "{}: context {context}: {what}: {errno}",
                self.name
            );
        }
        status
    }

    fn next_chain(&self, vring: &Vring) -> Option<Chain> {
        let mut queue = vring.get_mut();
        if !queue.is_enabled() || !queue.get_queue().ready() {
            return None;
        }
        let chains = queue.get_queue_mut().iter(self.memory.memory());
        match chains {
            Ok(mut chains) => chains.next(),
            Err(e) => {
                warn_limited!(self.limit, "{}: a broken control queue: {e}", self.name);
                None
            }
        }
    }

    /// Reads and parses what a chain holds, once: the guest may change it meanwhile.
    fn read(&self, chain: &Chain) -> Result<(u32, ControlRequest), Errno> {
        let memory = self.memory.memory();
        let mut reader = chain.clone().reader(&memory).map_err(|_| Errno::EFAULT)?;
        let length = reader.available_bytes();
        if length > MAX_REQUEST_BYTES {
            return Err(Errno::EPROTO);
        }
        // A request that could not be answered must not be carried out.
        let room = chain.clone().writer(&memory).map_err(|_| Errno::EFAULT)?;
        if room.available_bytes() < size_of::<Reply>() {
            return Err(Errno::EPROTO);
        }
        let mut bytes = vec![0; length];
        reader.read_exact(&mut bytes).map_err(|_| Errno::EFAULT)?;
        parse(&bytes)
    }

    fn answer(&self, vring: &Vring, chain: Chain, status: Result<(), Errno>, generation: u64) {
        let memory = self.memory.memory();
        let reply = Reply {
            status: status.map_or_else(Errno::to_wire, |()| 0).into(),
            value: generation.into(),
            ..Reply::default()
        };
        let head = chain.head_index();
        let bytes = reply.as_bytes();
        let written = chain.writer(&memory).is_ok_and(|mut writer| {
            writer.available_bytes() >= bytes.len() && writer.write_all(bytes).is_ok()
        });
        let length = if written { size_of::<Reply>() } else { 0 };
        let mut queue = vring.get_mut();
        if head >= queue.get_queue().size() {
            return;
        }
        // Fails where the used ring is no memory: nobody there to tell.
        let used = queue.add_used(head, u32::try_from(length).unwrap_or(0));
        if used.is_ok() && queue.needs_notification().unwrap_or(true) {
            signal_used(&queue);
        }
    }

    fn execute(
        &self,
        state: &mut State,
        context: u32,
        request: &ControlRequest,
    ) -> Result<(), Errno> {
        match request {
            ControlRequest::Ping => Ok(()),
            ControlRequest::Open => {
                let events = self.events.context(context);
                let pool = state.window.clone();
                self.contexts.open(context, Arc::clone(&events), pool)?;
                let mappings = 0;
                state
                    .contexts
                    .insert(context, ContextState { events, mappings });
                Ok(())
            }
            ControlRequest::Close => {
                self.contexts.close(context)?;
                if let Some(closed) = state.contexts.remove(&context) {
                    closed.events.close();
                }
                state.regions.forget_context(context);
                Ok(())
            }
            ControlRequest::Attach { new, extents } => {
                self.contexts.check(context)?;
                let extents = extents.clone();
                let budget = self.budget();
                let complete = state.regions.begin(context, *new, extents, budget)?;
                self.attach(state, context, complete)
            }
            ControlRequest::AttachMore { region, extents } => {
                self.contexts.check(context)?;
                let extents = extents.clone();
                let budget = self.budget();
                let complete = state.regions.add(context, *region, extents, budget)?;
                self.attach(state, context, complete)
            }
            ControlRequest::Detach { region } => {
                self.contexts.check(context)?;
                if state.regions.is_incomplete(context, *region) {
                    state.regions.forget(context, *region);
                    return Ok(());
                }
                self.contexts.detach(context, *region)?;
                state.regions.forget(context, *region);
                Ok(())
            }
            ControlRequest::WindowMap(place) => self.grant(state, context, *place),
            ControlRequest::WindowUnmap(place) => self.ungrant(state, context, *place),
        }
    }

    fn budget(&self) -> u64 {
        budget(self.ram_bytes.load(Ordering::Relaxed))
    }

    /// Makes a region whose extents have all come.
    fn attach(
        &self,
        state: &mut State,
        context: u32,
        complete: Option<Complete>,
    ) -> Result<(), Errno> {
        let Some(Complete { new, extents }) = complete else {
            return Ok(());
        };
        let region = new.region;
        let attached = match new.kind {
            Kind::Segment => self
                .region(context, region, &extents, true)
                .and_then(|memory| self.contexts.attach_segment(context, region, memory)),
            Kind::Pin { writable } => self
                .region(context, region, &extents, writable)
                .and_then(|memory| self.contexts.attach_pin(context, region, memory)),
            Kind::Phony | Kind::Device { .. } if !extents.iter().all(|e| are_pages(e.0, e.1)) => {
                Err(Errno::EINVAL)
            }
            Kind::Phony => self.contexts.attach_phony(context, region, extents),
            Kind::Device { writable } => self
                .contexts
                .attach_device(context, region, extents, writable),
        };
        if attached.is_err() {
            state.regions.forget(context, new.region);
        }
        attached
    }

    /// Memory of the VM that a process has announced.
    fn region(
        &self,
        context: u32,
        region: u32,
        extents: &Extents,
        writable: bool,
    ) -> Result<Region, Errno> {
        Region::from_guest(&self.space, extents, writable).map_err(|e| {
            warn_limited!(
                self.limit,
                "{}: context {context}: region {region}: {e}",
                self.name
            );
            region_errno(&e)
        })
    }

    /// Checks that the context may map a buffer, and holds the buffer for it.
    fn grant(&self, state: &mut State, context: u32, place: Place) -> Result<(), Errno> {
        let mine = state.contexts.get_mut(&context).ok_or(Errno::ENOENT)?;
        if mine.mappings >= MAX_MAPPINGS {
            return Err(Errno::ENOSPC);
        }
        self.contexts.window_map(context, place)?;
        mine.mappings += 1;
        Ok(())
    }

    fn ungrant(&self, state: &mut State, context: u32, place: Place) -> Result<(), Errno> {
        let mine = state.contexts.get_mut(&context).ok_or(Errno::ENOENT)?;
        self.contexts.window_unmap(context, place)?;
        mine.mappings = mine.mappings.saturating_sub(1);
        Ok(())
    }
}

impl State {
    /// Whether the VM's memory may be touched.
    fn is_running(&self) -> bool {
        !(self.ended || self.suspended || self.disabled)
    }

    /// The window, if the VMM has not mapped it yet.
    fn unmapped_window(&self) -> Result<Option<Arc<Pool>>, Errno> {
        let pool = self.window.as_ref().ok_or(Errno::EOPNOTSUPP)?;
        Ok((!self.window_mapped).then(|| Arc::clone(pool)))
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
