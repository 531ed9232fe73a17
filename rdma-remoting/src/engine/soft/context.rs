//! A program's use of the software engine.

use super::MAX_QUEUE_PAIRS;
use super::fabric::Fabric;
use super::objects::{SoftCq, SoftSrq};
use super::qp::SoftQp;
use super::transport::Transport;
use crate::address::AddressVector;
use crate::engine::{
    AhHandle, ContextSpec, CqSpec, EngineContext, EngineCq, EngineQp, EngineSrq, EngineXrcDomain,
    QpSpec, SrqSpec,
};
use crate::memory::{FastRegion, MemoryRegion, MemoryTable, PdHandle, WindowKind};
use crate::request::MemoryKey;
use crate::table::Table;
use crate::xrc::XrcDomain;
use farlane_abi::Errno;
use farlane_sys::sync::lock;
use std::any::Any;
use std::sync::{Arc, Mutex};

/// Protection domains of a context.
const MAX_PDS: u32 = 1 << 16;

/// What the queue pairs of a context have in common.
pub struct Owner {
    pub spec: ContextSpec,
    /// The keys that their requests and those of their peers may name.
    pub memory: Arc<MemoryTable>,
}

/// A context of the software engine.
pub struct SoftContext {
    fabric: Arc<Fabric>,
    owner: Owner,
    pds: Mutex<Table<()>>,
}

impl SoftContext {
    pub(super) fn new(fabric: &Arc<Fabric>, spec: ContextSpec, memory: Arc<MemoryTable>) -> Self {
        Self {
            fabric: Arc::clone(fabric),
            owner: Owner { spec, memory },
            pds: Mutex::new(Table::new(MAX_PDS)),
        }
    }

    /// Its keys.
    #[cfg(test)]
    pub fn memory(&self) -> &MemoryTable {
        &self.owner.memory
    }
}

impl std::fmt::Debug for SoftContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SoftContext")
            .field("address", &self.owner.spec.address)
            .finish_non_exhaustive()
    }
}

impl EngineContext for SoftContext {
    fn alloc_pd(&self) -> Result<PdHandle, Errno> {
        lock(&self.pds).insert(()).map(PdHandle)
    }

    fn dealloc_pd(&self, pd: PdHandle) {
        lock(&self.pds).remove(pd.0);
    }

    fn reg_mr(&self, memory: MemoryRegion) -> Result<MemoryKey, Errno> {
        self.owner.memory.insert(memory)
    }

    fn alloc_fast_mr(&self, region: FastRegion) -> Result<MemoryKey, Errno> {
        self.owner.memory.insert_fast(region)
    }

    fn rereg_mr(&self, key: MemoryKey, memory: MemoryRegion) -> Result<(), Errno> {
        self.owner.memory.replace(key, memory).map(drop)
    }

    fn dereg_mr(&self, key: MemoryKey) -> Result<(), Errno> {
        self.owner.memory.deregister(key).map(drop)
    }

    fn withdraw_mr(&self, key: MemoryKey) -> Result<(), Errno> {
        self.owner.memory.withdraw(key).map(drop)
    }

    fn mr_owner(&self, key: MemoryKey) -> Option<Arc<dyn Any + Send + Sync>> {
        self.owner.memory.owner(key)
    }

    fn alloc_mw(&self, pd: PdHandle, kind: WindowKind) -> Result<MemoryKey, Errno> {
        self.owner.memory.insert_window(pd, kind)
    }

    fn dealloc_mw(&self, key: MemoryKey) -> Result<(), Errno> {
        self.owner.memory.remove_window(key)
    }

    fn keys(&self) -> u64 {
        self.owner.memory.len()
    }

    fn create_cq(&self, spec: CqSpec) -> Result<Arc<dyn EngineCq>, Errno> {
        Ok(SoftCq::new(spec.sink))
    }

    fn create_srq(&self, spec: SrqSpec) -> Result<Arc<dyn EngineSrq>, Errno> {
        Ok(SoftSrq::make(spec, &self.owner.memory)?)
    }

    fn create_xrc_domain(&self) -> Result<Arc<dyn EngineXrcDomain>, Errno> {
        Ok(Arc::<XrcDomain>::default())
    }

    /// A datagram's address is all that it needs.
    fn create_ah(&self, _: PdHandle, _: &AddressVector) -> Result<AhHandle, Errno> {
        Ok(AhHandle::default())
    }

    fn destroy_ah(&self, _: AhHandle) {}

    fn create_qp(&self, spec: QpSpec) -> Result<Arc<dyn EngineQp>, Errno> {
        let transport = Transport::from_wire(spec.kind).filter(|kind| kind.is_carried());
        let transport = transport.ok_or(Errno::EOPNOTSUPP)?;
        let qp = SoftQp::new(&self.owner, spec, transport, &self.fabric, MAX_QUEUE_PAIRS)?;
        Ok(Arc::new(qp))
    }

    fn close(&self) -> u64 {
        lock(&self.pds).drain();
        self.owner.memory.drain().len() as u64
    }
}

#[cfg(test)]
impl dyn EngineContext {
    /// Keys of one of the software engine, for tests of what they open.
    pub fn memory(&self) -> &MemoryTable {
        let context: &dyn Any = self;
        context.downcast_ref::<SoftContext>().unwrap().memory()
    }
}
