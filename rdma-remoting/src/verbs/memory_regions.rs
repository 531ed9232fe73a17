//! Registration of memory.

use super::{CallHost, region_id};
use crate::counters;
use crate::ledger::{Resource, Share};
use crate::memory::{Access, MemoryRegion, PdHandle};
use crate::objects::{BufferObject, Pd};
use crate::request::MemoryKey;
use farlane_abi::Errno;
use farlane_abi::rdma::{Handle, MR_SOURCE_BUFFER, MR_SOURCE_PIN, Mr, RegMr};
use farlane_zero_copy::Region;
use std::sync::Arc;

/// What lasts as long as a memory region.
struct MemoryRegionUses {
    _pd: Arc<Pd>,
    _buffer: Option<Arc<BufferObject>>,
    _shares: [Share; 2],
}

impl CallHost<'_> {
    pub(super) fn register(&self, args: &RegMr) -> Result<Mr, Errno> {
        let access = Access::from_wire(args.access.get()).ok_or(Errno::EOPNOTSUPP)?;
        if access.lacks_local_write() {
            return Err(Errno::EINVAL);
        }
        let (length, iova) = (args.length.get(), args.iova.get());
        if length == 0 || iova.checked_add(length).is_none() {
            return Err(Errno::EINVAL);
        }
        let mut objects = self.context.objects();
        let pd = Arc::clone(objects.pds.get(args.pd.get()).ok_or(Errno::EBADF)?);
        let (region, buffer) = match args.source.get() {
            MR_SOURCE_PIN => (self.context.pin(region_id(args.object)?)?, None),
            MR_SOURCE_BUFFER => {
                let buffer = objects.buffers.get(args.object.get()).ok_or(Errno::EBADF)?;
                (Region::from_buffer(&buffer.buffer), Some(buffer.clone()))
            }
            _ => return Err(Errno::EINVAL),
        };
        let shares = [
            self.take(Resource::MemoryRegions, 1)?,
            self.take(Resource::MemoryRegionBytes, length)?,
        ];
        // A table of keys keeps the room that it has had: so does its share.
        if self.context.memory.len() >= objects.keys.amount() {
            objects.keys.grow(1).ok_or(Errno::ENOMEM)?;
        }
        let uses = MemoryRegionUses {
            _pd: pd,
            _buffer: buffer,
            _shares: shares,
        };
        let memory = MemoryRegion {
            pd: PdHandle(args.pd.get()),
            iova,
            offset: args.offset.get(),
            length,
            access,
            region,
            owner: Some(Arc::new(uses)),
        };
        memory.check().map_err(|e| {
            log::debug!("{:?}: registration refused: {e}", self.context);
            match e {
                farlane_zero_copy::RegionError::ReadOnly => Errno::EACCES,
                _ => Errno::EINVAL,
            }
        })?;
        let key = self.context.memory.insert(memory)?;
        counters::count(&self.context.counters.memory_regions, 1);
        Ok(Mr {
            handle: key.into(),
            lkey: key.into(),
            rkey: key.into(),
        })
    }

    pub(super) fn deregister(&self, mr: Handle) -> Result<(), Errno> {
        self.context
            .memory
            .remove(MemoryKey(mr.get()))
            .ok_or(Errno::EBADF)?;
        counters::uncount(&self.context.counters.memory_regions, 1);
        Ok(())
    }
}
