//! The objects of a context that have handles.

use crate::async_ring::ObjectEvents;
use crate::completion_queue::SharedCompletionQueue;
use crate::connections::NamedQueuePair;
use crate::context_keys::ContextKeys;
use crate::engine::{EngineCq, EngineQp, EngineSrq, Progress, Turn};
use crate::inbox::Scheduled;
use crate::ledger::Share;
use crate::memory::{DomainId, PdHandle};
use crate::ready::Served;
use crate::request::MemoryKey;
use crate::segment::Part;
use crate::table::Table;
use crate::xrc_domains::{Domain, FileId};
use farlane_abi::Errno;
use farlane_abi::rdma::{MAX_QPS, MAX_SRQS, VerbsVersion};
use farlane_sys::sync::lock;
use farlane_worker::wake;
use farlane_zero_copy::PoolBuffer;
use std::collections::HashSet;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};

/// Protection domains of a context: programs have one, or one a connection manager.
pub const MAX_PDS: u32 = 256;
/// Domains of extended reliable connections of a context.
pub const MAX_XRCDS: u32 = 256;
/// Completion queues of a context.
pub const MAX_CQS: u32 = 4096;
/// Memory regions of a context.
pub const MAX_MRS: u32 = 65536;
/// Memory windows of a context.
pub const MAX_MWS: u32 = MAX_MRS;
/// Host-allocated buffers of a context.
pub const MAX_BUFFERS: u32 = 1024;

/// A protection domain. What is in it holds it.
pub(crate) struct Pd {
    /// The engine's.
    pub engine: PdHandle,
    /// The same of all names of one domain.
    pub id: DomainId,
    /// Those that name what is in it: of its own context, or of the one that it was imported from.
    pub keys: Arc<ContextKeys>,
    /// Of which other one it is a further name.
    pub imported: Option<Imported>,
}

/// What an imported domain stands for, and what its process has there.
pub(crate) struct Imported {
    pub origin: Arc<Pd>,
    registrations: Mutex<HashSet<MemoryKey>>,
}

impl Imported {
    /// A further name of a domain, by which nothing was registered.
    pub fn name_of(origin: Arc<Pd>) -> Pd {
        Pd {
            engine: origin.engine,
            id: origin.id,
            keys: Arc::clone(&origin.keys),
            imported: Some(Self {
                origin,
                registrations: Mutex::default(),
            }),
        }
    }

    /// The key is of a registration that was made by this name.
    pub fn add(&self, key: MemoryKey) {
        lock(&self.registrations).insert(key);
    }

    /// Whether it is.
    pub fn has(&self, key: MemoryKey) -> bool {
        lock(&self.registrations).contains(&key)
    }

    /// It has ended.
    pub fn forget(&self, key: MemoryKey) {
        lock(&self.registrations).remove(&key);
    }

    /// All of them, which end with their process.
    pub fn take_all(&self) -> HashSet<MemoryKey> {
        std::mem::take(&mut *lock(&self.registrations))
    }
}

impl Pd {
    /// The domain itself, whichever name of it this is.
    pub fn itself(self: &Arc<Self>) -> &Arc<Self> {
        self.imported
            .as_ref()
            .map_or(self, |imported| &imported.origin)
    }
}

/// A domain of extended reliable connections that the process has open. What it has there holds
/// it.
pub(crate) struct XrcdObject {
    pub domain: Arc<Domain>,
    /// By which it was opened.
    pub _file: Option<Arc<FileId>>,
}

/// What makes a shared receive queue one of such a domain.
pub(crate) struct InDomain {
    pub _xrcd: Arc<XrcdObject>,
    pub _cq: Arc<CqObject>,
}

/// A completion queue and the memory it lies in.
pub(crate) struct CqObject {
    pub queue: Arc<SharedCompletionQueue>,
    pub engine: Arc<dyn EngineCq>,
    /// What of it does not move: of one that is a ring its control block.
    pub _part: Part,
    /// Where its entries lie, once it was resized; of one that is a ring always.
    pub entries: Mutex<Option<Part>>,
    pub _events: ObjectEvents,
    pub _share: Share,
}

/// A memory window.
pub(crate) struct WindowObject {
    /// A key that leads to it.
    pub key: MemoryKey,
    pub pd: Arc<Pd>,
}

impl WindowObject {
    /// Frees it. When this returns, nothing touches memory by its key.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn end(&self) -> Result<(), Errno> {
        match self.pd.keys.engine().dealloc_mw(self.key) {
            // It has ended with the context that the domain is of.
            Err(Errno::EBADF) if self.pd.imported.is_some() => Ok(()),
            ended => ended,
        }
    }
}

/// A queue pair, what it uses, and the memory it lies in.
pub(crate) struct QpObject {
    pub engine: Arc<dyn EngineQp>,
    pub scheduled: Arc<Scheduled>,
    /// None where others than its process may post, or nobody.
    pub memory: Option<QpMemory>,
    pub _pd: Option<Arc<Pd>>,
    pub _cqs: [Option<Arc<CqObject>>; 2],
    pub _srq: Option<Arc<SrqObject>>,
    pub _xrcd: Option<Arc<XrcdObject>>,
    pub _events: ObjectEvents,
    /// Connections may be made of it.
    pub _named: NamedQueuePair,
    pub _share: Share,
}

/// Where a queue pair lies.
pub(crate) struct QpMemory {
    /// Part with the word that says whether the process has to ring after it has posted.
    pub control: Part,
    /// Where it is there.
    pub state_at: usize,
    /// Of its queues, where they do not lie there.
    pub _rings: Vec<Part>,
}

impl QpObject {
    /// The word that says whether the process has to ring after it has posted.
    fn state_word(&self) -> impl Iterator<Item = &AtomicU32> {
        let memory = self.memory.as_ref();
        let word = memory.and_then(|memory| memory.control.memory.word(memory.state_at).ok());
        word.into_iter()
    }
}

impl Served for QpObject {
    fn turn(&self, turn: Turn) -> Progress {
        self.engine.progress(turn)
    }

    fn is_ready(&self) -> bool {
        self.engine.is_ready()
    }

    fn called(&self) {
        self.scheduled.called();
    }

    fn watch(&self) {
        wake::awake(self.state_word());
    }

    fn rest(&self) {
        wake::announce(self.state_word());
    }
}

/// A shared receive queue, what it uses, and the memory it lies in.
pub(crate) struct SrqObject {
    pub turns: Arc<SrqTurns>,
    /// Requests that it has room for.
    pub room: AtomicU32,
    /// Elements of a request.
    pub elements: u32,
    pub in_domain: Option<InDomain>,
    /// Of one that is a ring its control block.
    pub _part: Part,
    pub _pd: Arc<Pd>,
    pub _events: ObjectEvents,
    pub _share: Share,
}

/// A shared receive queue as it has turns.
pub(crate) struct SrqTurns {
    pub engine: Arc<dyn EngineSrq>,
    pub scheduled: Arc<Scheduled>,
}

/// Has a turn when it was rung.
impl Served for SrqTurns {
    fn turn(&self, turn: Turn) -> Progress {
        self.engine.progress(turn)
    }

    fn is_ready(&self) -> bool {
        self.engine.is_ready()
    }

    fn called(&self) {
        self.scheduled.called();
    }

    fn watch(&self) {
        self.engine.watch();
    }

    fn rest(&self) {
        self.engine.rest();
    }
}

/// What has turns in a context.
pub(crate) type Member = dyn Served + Send + Sync;

/// A host-allocated buffer. Its memory is free when the handle, every registration and every
/// mapping of it are gone.
#[derive(Debug)]
pub(crate) struct BufferObject {
    pub buffer: PoolBuffer,
}

/// Everything with a handle.
pub(crate) struct Objects {
    pub pds: Table<Pd>,
    pub cqs: Table<CqObject>,
    pub qps: Table<QpObject>,
    pub srqs: Table<SrqObject>,
    pub xrcds: Table<XrcdObject>,
    pub windows: Table<WindowObject>,
    pub buffers: Table<BufferObject>,
    /// The version that the process has settled, where it has asked.
    pub version: Option<VerbsVersion>,
    /// Buffers that the process has mapped, each by the handle that it gave.
    pub mapped: Vec<(u32, Arc<BufferObject>)>,
}

impl Default for Objects {
    fn default() -> Self {
        Self {
            pds: Table::new(MAX_PDS),
            cqs: Table::new(MAX_CQS),
            qps: Table::new(MAX_QPS),
            srqs: Table::new(MAX_SRQS),
            xrcds: Table::new(MAX_XRCDS),
            windows: Table::new(MAX_MWS),
            buffers: Table::new(MAX_BUFFERS),
            version: None,
            mapped: Vec::new(),
        }
    }
}
