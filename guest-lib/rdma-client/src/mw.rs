//! Memory windows.

use crate::pd::Destroyed;
use crate::{Errno, Error, Pd, VerbsVersion};
use farlane_abi::rdma::AllocMw;
use std::sync::Arc;

/// A memory window of a protection domain. Requests bind it to part of a memory region.
#[derive(Debug)]
pub struct Mw {
    pd: Arc<Pd>,
    handle: u32,
    rkey: u32,
    destroyed: Destroyed,
}

impl Mw {
    /// Allocates one of a type, `MW_TYPE_*` of [`farlane_abi::rdma`].
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the backend has none, `EINVAL` for a type that does not exist, `ENOMEM`
    /// where it has no room for another, `ENODEV` where it is gone.
    pub fn allocate(pd: &Arc<Pd>, mw_type: u32) -> Result<Self, Error> {
        let context = pd.context();
        if context.version() < VerbsVersion::V2 || context.limits()?.max_mw.get() == 0 {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let mw = context.verbs().alloc_mw(&AllocMw {
            pd: pd.handle().into(),
            mw_type: mw_type.into(),
        })?;
        Ok(Self {
            pd: Arc::clone(pd),
            handle: mw.handle.get(),
            rkey: mw.rkey.get(),
            destroyed: Destroyed::default(),
        })
    }

    /// Protection domain that it belongs to.
    #[must_use]
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Handle that calls name it by.
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// The key by which it is bound for the first time.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Frees it. When this returns, nobody touches memory by its key.
    ///
    /// # Errors
    /// `EBADF` of a handle that the backend does not know.
    pub fn destroy(&self) -> Result<(), Error> {
        let verbs = self.pd.context().verbs();
        self.destroyed
            .once(|| verbs.dealloc_mw(&self.handle.into()))
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // What a hostile answer leaves ends with the context.
        let _ = self.destroy();
    }
}
