//! Host-allocated buffers.

use super::CallHost;
use crate::ledger::Resource;
use crate::objects::BufferObject;
use farlane_abi::rdma::{AllocBuffer, Buffer, Handle};
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_zero_copy::PoolError;

impl CallHost<'_> {
    pub(super) fn add_buffer(&self, args: &AllocBuffer) -> Result<Buffer, Errno> {
        if args.flags.get() != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let pool = self.context.pool.as_ref().ok_or(Errno::EOPNOTSUPP)?;
        let length = args.length.get();
        let is_separate = pool.window_fd().is_none();
        let shares = is_separate.then(|| {
            // What the pool refuses is not asked for.
            let fits = length <= pool.capacity_bytes();
            let pages = if fits { length.div_ceil(PAGE_BYTES) } else { 0 };
            Ok([
                self.take(Resource::BufferPages, pages)?,
                self.take(Resource::Mappings, 1)?,
                self.take(Resource::Descriptors, 1)?,
            ])
        });
        let shares = shares.transpose()?;
        let mut buffer = pool.allocate(length).map_err(|e| {
            log::debug!("{:?}: no buffer: {e}", self.context);
            match e {
                PoolError::Length(_) => Errno::EINVAL,
                PoolError::Full { .. } => Errno::ENOSPC,
                PoolError::Clearing(_) => Errno::EAGAIN,
                PoolError::Mapping(_) | PoolError::Io(_) => Errno::ENOMEM,
            }
        })?;
        if let Some(shares) = shares {
            buffer.keep(shares);
        }
        let (offset, length) = (buffer.offset(), buffer.length());
        let mut objects = self.context.objects();
        let handle = objects.buffers.insert(BufferObject { buffer })?;
        Ok(Buffer {
            handle: handle.into(),
            reserved: 0.into(),
            offset: offset.into(),
            length: length.into(),
        })
    }

    pub(super) fn remove_buffer(&self, buffer: Handle) -> Result<(), Errno> {
        let removed = self.context.objects().buffers.remove(buffer.get());
        removed.map(drop).ok_or(Errno::EBADF)
    }
}
