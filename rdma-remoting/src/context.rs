//! The objects of one process: what it owns, and what ends with it.

mod regions;

use crate::address_handles::AddressHandles;
use crate::async_ring::{AsyncRing, EventSink};
use crate::call_ring::{CallRing, CallRingError};
use crate::clock::DeviceClock;
use crate::connections::PortConnections;
use crate::context_keys::ContextKeys;
use crate::counters::{self, Counters};
use crate::engine::{ContextSpec, Destination, Engine, EngineContext, PortAddress, RawGid, Turn};
use crate::gids::PortGids;
use crate::inbox::Inbox;
use crate::ledger::Account;
use crate::objects::{BufferObject, MAX_MRS, Member, Objects};
use crate::peers::Reach;
use crate::ready::Ready;
use crate::shared_contexts::SharedContexts;
use crate::throughput::Throughput;
use crate::traffic::Traffic;
use crate::verbs::withdraw;
use crate::xrc_domains::{DomainsByFile, FileId};
use farlane_abi::Errno;
use farlane_abi::arena::{OFF_BACKEND_STATE, OFF_DEAD};
use farlane_abi::control::EVENT_WAKE;
use farlane_abi::ids::{ContextId, RegionId};
use farlane_abi::width::to_u64;
use farlane_sys::log_limit::LogLimit;
use farlane_sys::sync::lock;
use farlane_sys::warn_limited;
use farlane_zero_copy::topology::Node;
use farlane_zero_copy::{Pool, Region, SharedMemory};
use regions::Attached;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

pub(crate) struct Header {
    pub memory: SharedMemory,
    /// Taken by the worker that serves the context, and by nobody else.
    pub calls: Mutex<CallRing>,
    pub asyncs: Arc<AsyncRing>,
}

/// Whose a context is: a port's.
pub(crate) struct Owner {
    /// The port's guest's kernel.
    pub is_kernel: bool,
    pub label: String,
    pub address: PortAddress,
    pub reach: Arc<Reach>,
    pub gids: Arc<PortGids>,
    pub on_demand: bool,
    pub engine: Arc<dyn Engine>,
    pub counters: Arc<Counters>,
    pub traffic: Arc<Traffic>,
    pub account: Arc<Account>,
    pub throughput: Arc<Throughput>,
    pub limit: Arc<LogLimit>,
    pub domains: Arc<DomainsByFile>,
    pub shared: Arc<SharedContexts>,
    pub connections: Arc<PortConnections>,
    pub clock: DeviceClock,
    pub comp_vectors: u32,
}

/// One process's use of a device: an open `/dev/farlaneN`, or a connection to the host socket.
pub struct Context {
    id: ContextId,
    label: String,
    address: PortAddress,
    /// Whom it may connect to.
    reach: Arc<Reach>,
    /// It is the guest's kernel's.
    pub(crate) is_kernel: bool,
    /// Its port's.
    pub(crate) gids: Arc<PortGids>,
    /// Whether its memory need be there only when it is used.
    pub(crate) on_demand: bool,
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) events: Arc<dyn EventSink>,
    pub(crate) pool: Option<Arc<Pool>>,
    pub(crate) counters: Arc<Counters>,
    /// What its port carries out and receives.
    pub(crate) traffic: Arc<Traffic>,
    /// Its objects there.
    pub(crate) engine_context: Arc<dyn EngineContext>,
    /// Keys of memory, of which others may have some in domains that they have imported.
    pub(crate) keys: Arc<ContextKeys>,
    /// Whom its datagrams may name.
    pub(crate) addresses: Arc<AddressHandles>,
    /// What it takes of what all share.
    pub(crate) account: Arc<Account>,
    /// What its tenant carries out.
    throughput: Arc<Throughput>,
    /// Of what it can have logged.
    pub(crate) limit: Arc<LogLimit>,
    /// Domains of extended reliable connections that its tenant's contexts have together.
    pub(crate) domains: Arc<DomainsByFile>,
    /// Contexts that its tenant's processes have let others have.
    pub(crate) shared: Arc<SharedContexts>,
    /// Connection management of its port.
    pub(crate) connections: Arc<PortConnections>,
    /// The file that stands for it there.
    shared_as: Mutex<Option<Arc<FileId>>>,
    /// By which its completions say when they came.
    pub(crate) clock: DeviceClock,
    /// How many completion vectors there are: one for each worker.
    pub(crate) comp_vectors: u32,
    header: OnceLock<Header>,
    regions: Mutex<HashMap<RegionId, Attached>>,
    objects: Mutex<Objects>,
    /// Which queue pairs and shared receive queues have turns.
    ready: Mutex<Ready<Member>>,
    /// Those that are scheduled.
    inbox: Arc<Inbox>,
    /// Cut off because of what it wrote.
    failed: AtomicBool,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("of", &self.label)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// What a process may map: a buffer's file and place.
#[derive(Debug)]
pub struct BufferMapping(Arc<BufferObject>);

impl BufferMapping {
    /// The file that holds it.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.buffer.fd()
    }

    /// Offset in the file, which for a VM is the offset in its window.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.0.buffer.offset()
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.0.buffer.length()
    }
}

impl Context {
    pub(crate) fn new(
        id: ContextId,
        owner: Owner,
        events: Arc<dyn EventSink>,
        pool: Option<Arc<Pool>>,
    ) -> Result<Arc<Self>, Errno> {
        let Owner {
            is_kernel,
            label,
            address,
            reach,
            gids,
            on_demand,
            engine,
            counters,
            traffic,
            account,
            throughput,
            limit,
            domains,
            shared,
            connections,
            clock,
            comp_vectors,
        } = owner;
        let engine_context = engine.open(ContextSpec {
            address,
            regions: MAX_MRS,
            locks: Arc::clone(account.word_locks()),
            admission: Some(reach.admission()),
            account: Some(Arc::clone(&account)),
            counters: Arc::clone(&counters),
            traffic: Arc::clone(&traffic),
            limit: Arc::clone(&limit),
        })?;
        counters::count(&counters.contexts, 1);
        let keys = ContextKeys::new(&engine_context, &account);
        Ok(Arc::new(Self {
            id,
            label,
            address,
            reach,
            gids,
            is_kernel,
            on_demand,
            engine,
            events,
            pool,
            counters,
            traffic,
            engine_context,
            keys,
            addresses: Arc::default(),
            account,
            throughput,
            limit,
            domains,
            shared,
            connections,
            shared_as: Mutex::default(),
            clock,
            comp_vectors,
            header: OnceLock::new(),
            regions: Mutex::default(),
            objects: Mutex::default(),
            ready: Mutex::default(),
            inbox: Arc::default(),
            failed: AtomicBool::new(false),
        }))
    }

    /// Its number at its port.
    pub(crate) fn id(&self) -> ContextId {
        self.id
    }

    /// The GID that the operator has given the port.
    #[must_use]
    pub fn gid(&self) -> RawGid {
        self.address.gid
    }

    /// What peers name the port by.
    pub(crate) fn address(&self) -> PortAddress {
        self.address
    }

    /// The ports that the operator lets it have to do with.
    pub(crate) fn reach(&self) -> &Arc<Reach> {
        &self.reach
    }

    /// Whether the operator lets it have to do with the port that this names.
    pub(crate) fn may_reach(&self, destination: Destination) -> bool {
        self.reach.includes(destination)
    }

    fn regions(&self) -> MutexGuard<'_, HashMap<RegionId, Attached>> {
        lock(&self.regions)
    }

    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        lock(&self.objects)
    }

    pub(crate) fn asyncs(&self) -> Option<Arc<AsyncRing>> {
        self.header.get().map(|h| Arc::clone(&h.asyncs))
    }

    /// Has a file stand for it.
    ///
    /// # Errors
    /// `EBUSY` where one does, or it stands for another context.
    pub(crate) fn share_as(self: &Arc<Self>, file: Arc<FileId>) -> Result<(), Errno> {
        let mut shared_as = lock(&self.shared_as);
        if shared_as.is_some() {
            return Err(Errno::EBUSY);
        }
        self.shared.add(*file, self)?;
        *shared_as = Some(file);
        Ok(())
    }

    /// The process maps a buffer: the one with this handle, or, with handle zero, the one that
    /// lies exactly there.
    ///
    /// # Errors
    /// `EACCES` where this context has no such buffer.
    pub fn window_map(
        &self,
        handle: u32,
        offset: u64,
        length: u64,
    ) -> Result<BufferMapping, Errno> {
        let mut objects = self.objects();
        let lies_there =
            |b: &&Arc<BufferObject>| b.buffer.offset() == offset && b.buffer.length() == length;
        let buffer = match handle {
            0 => objects.buffers.iter().find(lies_there),
            handle => objects.buffers.get(handle).filter(lies_there),
        };
        let buffer = Arc::clone(buffer.ok_or(Errno::EACCES)?);
        objects.mapped.push((handle, Arc::clone(&buffer)));
        Ok(BufferMapping(buffer))
    }

    /// A mapping of a buffer is gone.
    ///
    /// # Errors
    /// `ENOENT` where nothing is mapped there.
    pub fn window_unmap(&self, handle: u32, offset: u64, length: u64) -> Result<(), Errno> {
        let mut objects = self.objects();
        let at = objects.mapped.iter().position(|(h, b)| {
            *h == handle && b.buffer.offset() == offset && b.buffer.length() == length
        });
        objects.mapped.swap_remove(at.ok_or(Errno::ENOENT)?);
        Ok(())
    }

    /// Which have turns. Taken by the worker that serves the context, and where no worker does.
    pub(crate) fn ready(&self) -> MutexGuard<'_, Ready<Member>> {
        lock(&self.ready)
    }

    /// Where its queue pairs are scheduled.
    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// The node on which most bytes of its segments lie; none where it is not known of any.
    pub(crate) fn node(&self) -> Option<Node> {
        let mut bytes: BTreeMap<Node, u64> = BTreeMap::new();
        for attached in self.regions().values() {
            if let Attached::Segment {
                memory: Some(memory),
                ..
            } = attached
                && let Some(node) = memory.node()
            {
                *bytes.entry(node).or_default() += memory.len();
            }
        }
        let most = bytes
            .into_iter()
            .max_by_key(|&(node, bytes)| (bytes, Reverse(node)));
        most.map(|(node, _)| node)
    }

    /// The regions that the process has attached and that were [found](Region::locate) on a node
    /// when they were.
    #[must_use]
    pub fn attached(&self) -> Vec<Region> {
        let memory = |attached: &Attached| match attached {
            Attached::Segment { memory, .. } => memory.clone(),
            Attached::Pin { memory, .. } => memory.node().map(|_| memory.clone()),
            Attached::File(_) | Attached::All { .. } => None,
        };
        self.regions().values().filter_map(memory).collect()
    }

    /// Whether another context is of the same tenant.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.account, &other.account)
    }

    /// What its tenant carries out.
    pub(crate) fn throughput(&self) -> &Arc<Throughput> {
        &self.throughput
    }

    /// The word that says whether the backend must be woken.
    pub(crate) fn state_word(&self) -> Option<&AtomicU32> {
        self.header.get()?.memory.word(OFF_BACKEND_STATE).ok()
    }

    /// Its header, while it gets turns: it is there, and the context was not cut off.
    pub(crate) fn served_header(&self) -> Option<&Header> {
        let header = self.header.get()?;
        (!self.failed.load(Ordering::Relaxed)).then_some(header)
    }

    /// Gives the process up, because of what it wrote into its call ring.
    pub(crate) fn cut_off(&self, why: &CallRingError) {
        warn_limited!(self.limit, "{self:?} is cut off: {why}");
        self.failed.store(true, Ordering::Relaxed);
        counters::count(&self.counters.refused, 1);
        if let Some(header) = self.header.get() {
            if let Ok(dead) = header.memory.word(OFF_DEAD) {
                dead.store(1, Ordering::SeqCst);
            }
            header.asyncs.end();
        }
        self.events.raise(EVENT_WAKE);
    }

    /// Has every queue pair stop, or go on. The context must not get turns meanwhile.
    pub(crate) fn pause(&self, paused: bool) {
        for qp in self.objects().qps.iter() {
            qp.engine.pause(paused);
        }
    }

    /// Releases everything, in this order: connections, queue pairs (no new transfer begins, those
    /// under way end), memory keys, pins and segments, shared receive queues, completion queues,
    /// buffers.
    /// When it returns nothing touches the process's memory.
    pub(crate) fn teardown(&self) {
        // Nobody comes to what is in it any more.
        if let Some(file) = lock(&self.shared_as).take() {
            self.shared.forget(*file);
        }
        self.connections.close(self.id);
        let ((qps, windows, pds, srqs, cqs, xrcds, buffers, mapped), leaving) = {
            let mut objects = self.objects();
            let qps = objects.qps.drain();
            let parts = (
                qps,
                objects.windows.drain(),
                objects.pds.drain(),
                objects.srqs.drain(),
                objects.cqs.drain(),
                objects.xrcds.drain(),
                objects.buffers.drain(),
                std::mem::take(&mut objects.mapped),
            );
            (parts, self.ready().clear())
        };
        for qp in &qps {
            qp.engine.destroy();
        }
        drop(qps);
        srqs.iter().for_each(|srq| srq.turns.engine.destroy());
        // Those who wait for a queue of a domain may be of other contexts.
        let ended = srqs.iter().map(|srq| Arc::clone(&srq.turns) as Arc<Member>);
        for one in ended.chain(leaving) {
            while one.is_ready() && one.turn(Turn::from(Instant::now())).worked {}
        }
        cqs.iter().for_each(|cq| cq.engine.destroy());
        self.addresses.clear();
        let count = to_u64(srqs.len());
        counters::uncount(&self.counters.shared_receive_queues, count);
        // Those of the context's own domains end with it.
        for window in windows.iter().filter(|window| window.pd.imported.is_some()) {
            let _ = window.end();
        }
        let elsewhere: u64 = pds.iter().map(withdraw).sum();
        let regions = self.keys.close() + elsewhere;
        counters::uncount(&self.counters.memory_regions, regions);
        for attached in std::mem::take(&mut *self.regions()).into_values() {
            if let Attached::Pin { memory, .. } | Attached::All { memory, .. } = attached {
                memory.revoke();
            }
        }
        drop((windows, pds, srqs, cqs, xrcds, buffers, mapped));
        counters::uncount(&self.counters.contexts, 1);
    }
}
