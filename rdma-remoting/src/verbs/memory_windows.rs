//! Memory windows.

use super::CallHost;
use crate::memory::WindowKind;
use crate::objects::WindowObject;
use farlane_abi::Errno;
use farlane_abi::rdma::{AllocMw, Handle, MW_TYPE_1, MW_TYPE_2, Mw};
use std::sync::Arc;

impl CallHost<'_> {
    pub(super) fn add_window(&self, args: &AllocMw) -> Result<Mw, Errno> {
        let kind = match args.mw_type.get() {
            MW_TYPE_1 => WindowKind::One,
            MW_TYPE_2 => WindowKind::Two,
            _ => return Err(Errno::EINVAL),
        };
        let mut objects = self.context.objects();
        let pd = Arc::clone(objects.pds.get(args.pd.get()).ok_or(Errno::EBADF)?);
        let (handle, window) = objects.windows.insert_with(|_| {
            let key = pd.keys.add(|engine| engine.alloc_mw(pd.engine, kind))?;
            Ok(WindowObject { key, pd })
        })?;
        Ok(Mw {
            handle: handle.into(),
            rkey: window.key.into(),
        })
    }

    pub(super) fn remove_window(&self, window: Handle) -> Result<(), Errno> {
        let removed = self.context.objects().windows.remove(window.get());
        let window = removed.ok_or(Errno::EBADF)?;
        window.end()
    }
}
