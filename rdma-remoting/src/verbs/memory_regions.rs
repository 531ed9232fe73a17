//! Registration of memory.

use super::{CallHost, region_id};
use crate::context_keys::ContextKeys;
use crate::counters;
use crate::engine::EngineContext;
use crate::ledger::{Resource, Share};
use crate::memory::{Access, FastRegion, MemoryRegion, PageList};
use crate::objects::{BufferObject, Imported, Objects, Pd};
use crate::request::MemoryKey;
use farlane_abi::Errno;
use farlane_abi::ids::RegionId;
use farlane_abi::rdma::{DeregMr, Handle, MR_SOURCE_BUFFER, MR_SOURCE_PIN, Mr, RegMr, ReregMr};
use farlane_abi::width::to_u64;
use farlane_abi::zerocopy::little_endian::U32;
use farlane_sys::sync::lock;
use farlane_zero_copy::{Region, RegionError};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// What lasts as long as a memory region, at most as long as its process: a window that is bound
/// to it may have it still, and does not keep what is in here.
struct MemoryRegionUses(Mutex<Option<InUse>>);

impl MemoryRegionUses {
    fn owner(uses: InUse) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(Arc::new(Self(Mutex::new(Some(uses)))))
    }
}

struct InUse {
    /// By the name of which it was made.
    pd: Arc<Pd>,
    _buffer: Option<Arc<BufferObject>>,
    /// It is of no memory, or of all, and never of other.
    is_fixed: bool,
    shares: Arc<Shares>,
}

impl InUse {
    /// Looks at that of a key; `EBADF` where the key is of no registration.
    fn look<R>(
        keys: &ContextKeys,
        key: MemoryKey,
        at: impl FnOnce(&Self) -> R,
    ) -> Result<R, Errno> {
        let owner = keys.engine().mr_owner(key).ok_or(Errno::EBADF)?;
        let uses = owner.downcast_ref::<MemoryRegionUses>();
        let uses = lock(&uses.ok_or(Errno::EBADF)?.0);
        uses.as_ref().map(at).ok_or(Errno::EBADF)
    }

    /// Has a registration end, and lets go of what it uses, whoever knows of that still.
    fn end(
        keys: &ContextKeys,
        key: MemoryKey,
        how: impl FnOnce(&dyn EngineContext) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let owner = keys.engine().mr_owner(key);
        how(&**keys.engine())?;
        let uses = owner.as_ref().and_then(|owner| owner.downcast_ref());
        let uses = uses.and_then(|MemoryRegionUses(uses)| lock(uses).take());
        drop(uses);
        Ok(())
    }
}

/// What of the ledger a key has, whatever is registered under it.
struct Shares {
    _region: Share,
    bytes: Mutex<Share>,
}

/// A registration as it was asked for: rights and bounds that make sense.
struct Wanted<'a> {
    args: &'a RegMr,
    access: Access,
}

impl<'a> Wanted<'a> {
    fn check(args: &'a RegMr) -> Result<Self, Errno> {
        let access = Access::from_wire(args.access.get()).ok_or(Errno::EOPNOTSUPP)?;
        if access.lacks_local_write() {
            return Err(Errno::EINVAL);
        }
        let (length, iova) = (args.length.get(), args.iova.get());
        // A key of a buffer may be for no byte of it, as one of device memory may.
        let is_empty = length == 0 && args.source.get() != MR_SOURCE_BUFFER;
        if is_empty || iova.checked_add(length).is_none() {
            return Err(Errno::EINVAL);
        }
        Ok(Self { args, access })
    }

    fn length(&self) -> u64 {
        self.args.length.get()
    }
}

/// The length in bytes of a registration in a domain, where it is of memory; `EINVAL` where the key
/// is of none there.
pub(super) fn registered_length(of: &Arc<Pd>, key: MemoryKey) -> Result<Option<u64>, Errno> {
    let is_there = |uses: &InUse| Arc::ptr_eq(uses.pd.itself(), of.itself());
    let length = InUse::look(&of.keys, key, |uses| {
        let length = lock(&uses.shares.bytes).amount();
        is_there(uses).then_some((!uses.is_fixed).then_some(length))
    });
    length.ok().flatten().ok_or(Errno::EINVAL)
}

/// Ends what was registered by this name of another context's domain. When this returns, nothing
/// touches memory by its keys. Returns how many registrations there were.
pub(crate) fn withdraw(pd: &Arc<Pd>) -> u64 {
    let keys = pd.imported.iter().flat_map(Imported::take_all);
    // Where the other context has ended it has ended these, too.
    let withdrawn =
        keys.filter(|key| InUse::end(&pd.keys, *key, |engine| engine.withdraw_mr(*key)).is_ok());
    to_u64(withdrawn.count())
}

impl CallHost<'_> {
    pub(super) fn register(&self, args: &RegMr) -> Result<Mr, Errno> {
        if let Some(memory) = self.all_memory(args) {
            return self.register_all(args, memory);
        }
        let wanted = Wanted::check(args)?;
        let objects = self.context.objects();
        let (pd, memory) = self.memory_region(&objects, &wanted, || {
            Ok(Arc::new(Shares {
                _region: self.take(Resource::MemoryRegions, 1)?,
                bytes: Mutex::new(self.take(Resource::MemoryRegionBytes, wanted.length())?),
            }))
        })?;
        let key = self.add_registration(&pd, memory)?;
        Ok(Mr {
            handle: key.into(),
            lkey: key.into(),
            rkey: key.into(),
        })
    }

    /// All memory of the VM, where that is to be registered.
    fn all_memory(&self, args: &RegMr) -> Option<Region> {
        let is_pin = args.source.get() == MR_SOURCE_PIN;
        let region = RegionId::new(args.object.get()).filter(|_| is_pin)?;
        self.context.all_memory(region)
    }

    /// What a registration uses that is of no memory of its process's choice.
    fn fixed(&self, pd: &Arc<Pd>) -> Result<InUse, Errno> {
        Ok(InUse {
            pd: Arc::clone(pd),
            _buffer: None,
            is_fixed: true,
            shares: Arc::new(Shares {
                _region: self.take(Resource::MemoryRegions, 1)?,
                bytes: Mutex::new(self.take(Resource::MemoryRegionBytes, 0)?),
            }),
        })
    }

    /// A registration of all memory of the VM, at guest-physical addresses that the first one is
    /// added to: a kernel has all of it mapped in a row. Those that would wrap around it does not
    /// have.
    fn register_all(&self, args: &RegMr, region: Region) -> Result<Mr, Errno> {
        let access = Access::from_wire(args.access.get()).ok_or(Errno::EOPNOTSUPP)?;
        let iova = args.iova.get();
        let length = region.len().min(u64::MAX - iova);
        if access.lacks_local_write() || length == 0 {
            return Err(Errno::EINVAL);
        }
        let objects = self.context.objects();
        let pd = Arc::clone(objects.pds.get(args.pd.get()).ok_or(Errno::EBADF)?);
        let uses = self.fixed(&pd)?;
        let memory = MemoryRegion {
            pd: pd.engine,
            iova,
            offset: 0,
            length,
            access,
            region,
            owner: MemoryRegionUses::owner(uses),
        };
        memory.check().map_err(|_| Errno::EACCES)?;
        let key = self.add_registration(&pd, memory)?;
        Ok(Mr {
            handle: key.into(),
            lkey: key.into(),
            rkey: key.into(),
        })
    }

    /// A registration for requests that say what it is of.
    pub(super) fn insert_fast(&self, pd: Handle, pages: Box<dyn PageList>) -> Result<Mr, Errno> {
        let objects = self.context.objects();
        let pd = Arc::clone(objects.pds.get(pd.get()).ok_or(Errno::EBADF)?);
        let uses = self.fixed(&pd)?;
        let region = FastRegion {
            pd: pd.engine,
            pages,
            owner: MemoryRegionUses::owner(uses),
        };
        let key = self.add_key(&pd, |engine| engine.alloc_fast_mr(region))?;
        Ok(Mr {
            handle: key.into(),
            lkey: key.into(),
            rkey: key.into(),
        })
    }

    /// Gives a registration a key, among those of the context that its domain is of.
    fn add_registration(&self, pd: &Pd, memory: MemoryRegion) -> Result<MemoryKey, Errno> {
        self.add_key(pd, |engine| engine.reg_mr(memory))
    }

    /// The same of one that the engine makes in this way.
    fn add_key(
        &self,
        pd: &Pd,
        make: impl FnOnce(&dyn EngineContext) -> Result<MemoryKey, Errno>,
    ) -> Result<MemoryKey, Errno> {
        let key = pd.keys.add(make)?;
        if let Some(imported) = &pd.imported {
            imported.add(key);
        }
        counters::count(&self.context.counters.memory_regions, 1);
        Ok(key)
    }

    /// A registration of no memory.
    pub(super) fn register_nothing(&self, pd: Handle) -> Result<Mr, Errno> {
        let objects = self.context.objects();
        let pd = Arc::clone(objects.pds.get(pd.get()).ok_or(Errno::EBADF)?);
        let uses = self.fixed(&pd)?;
        let memory = MemoryRegion {
            pd: pd.engine,
            iova: 0,
            offset: 0,
            length: u64::MAX,
            access: Access::LOCAL_WRITE,
            region: Region::null(u64::MAX),
            owner: MemoryRegionUses::owner(uses),
        };
        let key = self.add_registration(&pd, memory)?;
        Ok(Mr {
            handle: key.into(),
            lkey: key.into(),
            ..Mr::default()
        })
    }

    /// The memory region that is wanted, of memory that the context has, and the domain that it is
    /// to be in.
    fn memory_region(
        &self,
        objects: &Objects,
        wanted: &Wanted<'_>,
        shares: impl FnOnce() -> Result<Arc<Shares>, Errno>,
    ) -> Result<(Arc<Pd>, MemoryRegion), Errno> {
        let args = wanted.args;
        let pd = Arc::clone(objects.pds.get(args.pd.get()).ok_or(Errno::EBADF)?);
        let (region, buffer) = match args.source.get() {
            MR_SOURCE_PIN => (self.context.pin(region_id(args.object)?)?, None),
            MR_SOURCE_BUFFER => {
                let buffer = objects.buffers.get(args.object.get()).ok_or(Errno::EBADF)?;
                (Region::from_buffer(&buffer.buffer), Some(buffer.clone()))
            }
            _ => return Err(Errno::EINVAL),
        };
        let uses = InUse {
            pd: Arc::clone(&pd),
            _buffer: buffer,
            is_fixed: false,
            shares: shares()?,
        };
        let memory = MemoryRegion {
            pd: pd.engine,
            iova: args.iova.get(),
            offset: args.offset.get(),
            length: wanted.length(),
            access: wanted.access,
            region,
            owner: MemoryRegionUses::owner(uses),
        };
        memory.check().map_err(|e| {
            log::debug!("{:?}: registration refused: {e}", self.context);
            match e {
                RegionError::ReadOnly => Errno::EACCES,
                _ => Errno::EINVAL,
            }
        })?;
        Ok((pd, memory))
    }

    pub(super) fn reregister(&self, args: &ReregMr) -> Result<(), Errno> {
        let key = MemoryKey(args.mr.get());
        let pd = self.pd(args.registration.pd)?;
        let (is_fixed, shares) = InUse::look(&pd.keys, key, |uses| {
            let what = (uses.is_fixed, Arc::clone(&uses.shares));
            // Of each process are those that it has made, by this name where it is one.
            let is_own = match &pd.imported {
                None => uses.pd.imported.is_none(),
                Some(imported) => imported.has(key),
            };
            is_own.then_some(what).ok_or(Errno::EBADF)
        })??;
        if is_fixed {
            return Err(Errno::EINVAL);
        }
        let wanted = Wanted::check(&args.registration)?;
        let (pd, memory) =
            self.memory_region(&self.context.objects(), &wanted, || Ok(Arc::clone(&shares)))?;
        let mut bytes = lock(&shares.bytes);
        let had = bytes.amount();
        let more = wanted.length().saturating_sub(had);
        bytes.grow(more).ok_or(Errno::ENOMEM)?;
        let replaced = pd.keys.engine().rereg_mr(key, memory);
        bytes.shrink(if replaced.is_ok() {
            wanted.length()
        } else {
            had
        });
        replaced
    }

    /// A protection domain of the context, or its name of another one's.
    fn pd(&self, pd: U32) -> Result<Arc<Pd>, Errno> {
        let objects = self.context.objects();
        objects.pds.get(pd.get()).cloned().ok_or(Errno::EBADF)
    }

    pub(super) fn deregister(&self, mr: Handle) -> Result<(), Errno> {
        let key = MemoryKey(mr.get());
        let keys = &self.context.keys;
        // Who has imported a domain ends what he has registered there.
        if InUse::look(keys, key, |uses| uses.pd.imported.is_some())? {
            return Err(Errno::EBADF);
        }
        keys.engine().dereg_mr(key)?;
        counters::uncount(&self.context.counters.memory_regions, 1);
        Ok(())
    }

    pub(super) fn deregister_imported(&self, args: &DeregMr) -> Result<(), Errno> {
        let key = MemoryKey(args.mr.get());
        let pd = self.pd(args.pd)?;
        let imported = pd.imported.as_ref().ok_or(Errno::EINVAL)?;
        if !imported.has(key) {
            return Err(Errno::EBADF);
        }
        match InUse::end(&pd.keys, key, |engine| engine.dereg_mr(key)) {
            Ok(()) => counters::uncount(&self.context.counters.memory_regions, 1),
            // It has ended with the context that the domain is of.
            Err(Errno::EBADF) => {}
            Err(error) => return Err(error),
        }
        imported.forget(key);
        Ok(())
    }
}
