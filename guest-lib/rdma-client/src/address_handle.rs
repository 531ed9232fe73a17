//! Address handles.

use crate::pd::Destroyed;
use crate::{Error, Pd};
use farlane_abi::rdma::CreateAh;
use std::sync::Arc;

/// An address in a protection domain, which datagrams name.
#[derive(Debug)]
pub struct AddressHandle {
    pd: Arc<Pd>,
    handle: u32,
    destroyed: Destroyed,
}

impl AddressHandle {
    /// Creates one of an address; the domain that this names is replaced.
    ///
    /// # Errors
    /// `EINVAL` of an address that none has, `EACCES` of one that the operator has excluded,
    /// `ENOMEM` where there are too many, `EOPNOTSUPP` or `ENOSYS` of a backend without datagrams,
    /// `ENODEV` where the device is gone.
    pub fn create(pd: &Arc<Pd>, address: &CreateAh) -> Result<Self, Error> {
        let handle = pd.context().verbs().create_ah(&CreateAh {
            pd: pd.handle().into(),
            ..*address
        })?;
        Ok(Self {
            pd: Arc::clone(pd),
            handle: handle.get(),
            destroyed: Destroyed::default(),
        })
    }

    /// Handle that requests name it by.
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Protection domain that it belongs to.
    #[must_use]
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Destroys it at the backend.
    ///
    /// # Errors
    /// `EBADF` of a handle that the backend does not know.
    pub fn destroy(&self) -> Result<(), Error> {
        let verbs = self.pd.context().verbs();
        self.destroyed
            .once(|| verbs.destroy_ah(&self.handle.into()))
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        // What a hostile answer leaves ends with the context.
        let _ = self.destroy();
    }
}
