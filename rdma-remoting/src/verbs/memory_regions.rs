//! Registration of memory.

use super::{CallHost, region_id};
use crate::counters;
use crate::ledger::{Resource, Share};
use crate::memory::{Access, MemoryRegion};
use crate::objects::{BufferObject, Objects, Pd};
use crate::request::MemoryKey;
use farlane_abi::Errno;
use farlane_abi::rdma::{Handle, MR_SOURCE_BUFFER, MR_SOURCE_PIN, Mr, RegMr, ReregMr};
use farlane_sys::sync::lock;
use farlane_zero_copy::{Region, RegionError};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// What lasts as long as a memory region.
struct MemoryRegionUses {
    pd: Arc<Pd>,
    _buffer: Option<Arc<BufferObject>>,
    /// It is of no memory.
    is_null: bool,
    shares: Arc<Shares>,
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

/// The domain of a registration, and its length in bytes where it is of memory, by what lasts as
/// long as it.
pub(super) fn registration(owner: &Arc<dyn Any + Send + Sync>) -> Option<(&Arc<Pd>, Option<u64>)> {
    let uses = owner.downcast_ref::<MemoryRegionUses>()?;
    let length = lock(&uses.shares.bytes).amount();
    Some((&uses.pd, (!uses.is_null).then_some(length)))
}

impl CallHost<'_> {
    pub(super) fn register(&self, args: &RegMr) -> Result<Mr, Errno> {
        let wanted = Wanted::check(args)?;
        let mut objects = self.context.objects();
        let memory = self.memory_region(&objects, &wanted, || {
            Ok(Arc::new(Shares {
                _region: self.take(Resource::MemoryRegions, 1)?,
                bytes: Mutex::new(self.take(Resource::MemoryRegionBytes, wanted.length())?),
            }))
        })?;
        self.make_room_for_a_key(&mut objects)?;
        let key = self.context.engine_context.reg_mr(memory)?;
        counters::count(&self.context.counters.memory_regions, 1);
        Ok(Mr {
            handle: key.into(),
            lkey: key.into(),
            rkey: key.into(),
        })
    }

    /// A registration of no memory.
    pub(super) fn register_nothing(&self, pd: Handle) -> Result<Mr, Errno> {
        let mut objects = self.context.objects();
        let pd = Arc::clone(objects.pds.get(pd.get()).ok_or(Errno::EBADF)?);
        pd.require_own()?;
        let engine_pd = pd.engine;
        let uses = MemoryRegionUses {
            pd,
            _buffer: None,
            is_null: true,
            shares: Arc::new(Shares {
                _region: self.take(Resource::MemoryRegions, 1)?,
                bytes: Mutex::new(self.take(Resource::MemoryRegionBytes, 0)?),
            }),
        };
        self.make_room_for_a_key(&mut objects)?;
        let key = self.context.engine_context.reg_mr(MemoryRegion {
            pd: engine_pd,
            iova: 0,
            offset: 0,
            length: u64::MAX,
            access: Access::LOCAL_WRITE,
            region: Region::null(u64::MAX),
            owner: Some(Arc::new(uses)),
        })?;
        counters::count(&self.context.counters.memory_regions, 1);
        Ok(Mr {
            handle: key.into(),
            lkey: key.into(),
            ..Mr::default()
        })
    }

    /// The memory region that is wanted, of memory that the context has.
    fn memory_region(
        &self,
        objects: &Objects,
        wanted: &Wanted<'_>,
        shares: impl FnOnce() -> Result<Arc<Shares>, Errno>,
    ) -> Result<MemoryRegion, Errno> {
        let args = wanted.args;
        let pd = Arc::clone(objects.pds.get(args.pd.get()).ok_or(Errno::EBADF)?);
        pd.require_own()?;
        let (region, buffer) = match args.source.get() {
            MR_SOURCE_PIN => (self.context.pin(region_id(args.object)?)?, None),
            MR_SOURCE_BUFFER => {
                let buffer = objects.buffers.get(args.object.get()).ok_or(Errno::EBADF)?;
                (Region::from_buffer(&buffer.buffer), Some(buffer.clone()))
            }
            _ => return Err(Errno::EINVAL),
        };
        let engine_pd = pd.engine;
        let uses = MemoryRegionUses {
            pd,
            _buffer: buffer,
            is_null: false,
            shares: shares()?,
        };
        let memory = MemoryRegion {
            pd: engine_pd,
            iova: args.iova.get(),
            offset: args.offset.get(),
            length: wanted.length(),
            access: wanted.access,
            region,
            owner: Some(Arc::new(uses)),
        };
        memory.check().map_err(|e| {
            log::debug!("{:?}: registration refused: {e}", self.context);
            match e {
                RegionError::ReadOnly => Errno::EACCES,
                _ => Errno::EINVAL,
            }
        })?;
        Ok(memory)
    }

    pub(super) fn reregister(&self, args: &ReregMr) -> Result<(), Errno> {
        let key = MemoryKey(args.mr.get());
        let owner = self
            .context
            .engine_context
            .mr_owner(key)
            .ok_or(Errno::EBADF)?;
        let uses = owner.downcast_ref::<MemoryRegionUses>();
        let uses = uses.ok_or(Errno::EBADF)?;
        if uses.is_null {
            return Err(Errno::EINVAL);
        }
        let shares = Arc::clone(&uses.shares);
        drop(owner);
        let wanted = Wanted::check(&args.registration)?;
        let memory =
            self.memory_region(&self.context.objects(), &wanted, || Ok(Arc::clone(&shares)))?;
        let mut bytes = lock(&shares.bytes);
        let had = bytes.amount();
        let more = wanted.length().saturating_sub(had);
        bytes.grow(more).ok_or(Errno::ENOMEM)?;
        let replaced = self.context.engine_context.rereg_mr(key, memory);
        bytes.shrink(if replaced.is_ok() {
            wanted.length()
        } else {
            had
        });
        replaced
    }

    /// Takes the room of another memory key. A table of keys keeps the room that it has had: so
    /// does its share.
    pub(super) fn make_room_for_a_key(&self, objects: &mut Objects) -> Result<(), Errno> {
        if self.context.engine_context.keys() >= objects.keys.amount() {
            objects.keys.grow(1).ok_or(Errno::ENOMEM)?;
        }
        Ok(())
    }

    pub(super) fn deregister(&self, mr: Handle) -> Result<(), Errno> {
        let key = MemoryKey(mr.get());
        self.context.engine_context.dereg_mr(key)?;
        counters::uncount(&self.context.counters.memory_regions, 1);
        Ok(())
    }
}
