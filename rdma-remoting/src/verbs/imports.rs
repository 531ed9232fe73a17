//! What processes have of each other's contexts (`ibv_import_device` and what follows).

use super::{CallHost, region_id};
use crate::context::Context;
use crate::objects::Imported;
use crate::request::MemoryKey;
use crate::verbs::memory_regions::registered_length;
use farlane_abi::Errno;
use farlane_abi::rdma::{Handle, ImportMr, ImportPd, ImportedMr};
use farlane_abi::zerocopy::little_endian::U32;
use std::sync::Arc;

impl CallHost<'_> {
    pub(super) fn share(&self, region: U32) -> Result<(), Errno> {
        let file = self.context.file(region_id(region)?)?;
        self.context.share_as(file)
    }

    /// The context that a file stands for.
    pub(super) fn shared_context(&self, region: U32) -> Result<Arc<Context>, Errno> {
        let file = self.context.file(region_id(region)?)?;
        self.context.shared.find(*file).ok_or(Errno::EINVAL)
    }

    pub(super) fn import_domain(&self, args: &ImportPd) -> Result<Handle, Errno> {
        let of = self.shared_context(args.region)?;
        // Not both contexts' objects at once: the other one may do the same.
        let origin = {
            let objects = of.objects();
            let pd = objects.pds.get(args.pd.get()).ok_or(Errno::EINVAL)?;
            if pd.imported.is_some() {
                return Err(Errno::EOPNOTSUPP);
            }
            Arc::clone(pd)
        };
        let name = Imported::name_of(origin);
        let imported = self.context.objects().pds.insert(name);
        imported.map(Into::into)
    }

    pub(super) fn import_registration(&self, args: &ImportMr) -> Result<ImportedMr, Errno> {
        let objects = self.context.objects();
        let pd = objects.pds.get(args.pd.get()).ok_or(Errno::EBADF)?;
        if pd.imported.is_none() {
            return Err(Errno::EINVAL);
        }
        let key = MemoryKey(args.mr.get());
        let length = registered_length(pd, key)?;
        // One of no memory has no key for peers, and no end.
        let rkey = length.map_or(U32::ZERO, |_| key.into());
        Ok(ImportedMr {
            lkey: key.into(),
            rkey,
            length: length.unwrap_or(u64::MAX).into(),
        })
    }
}
