//! Domains of extended reliable connections.

use crate::pd::Destroyed;
use crate::{Context, Error};
use farlane_abi::Errno;
use farlane_abi::rdma::VerbsVersion;
use std::sync::Arc;

/// A domain of a context: queue pairs that are targets, and the shared receive queues that messages
/// to them name (IBTA annex A14).
#[derive(Debug)]
pub struct Xrcd {
    context: Arc<Context>,
    handle: u32,
    destroyed: Destroyed,
}

impl Xrcd {
    /// Opens a domain.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the backend has none, `ENOMEM` where it has no room for another, `ENODEV`
    /// where it is gone.
    pub fn open(context: &Arc<Context>) -> Result<Arc<Self>, Error> {
        if context.version() < VerbsVersion::V2 {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let handle = context.verbs().open_xrcd(&())?.get();
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            handle,
            destroyed: Destroyed::default(),
        }))
    }

    /// The context it belongs to.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Handle that calls name it by.
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Closes the domain.
    ///
    /// # Errors
    /// `EBUSY` while something is in it.
    pub fn destroy(&self) -> Result<(), Error> {
        self.destroyed
            .once(|| self.context.verbs().close_xrcd(&self.handle.into()))
    }
}

impl Drop for Xrcd {
    fn drop(&mut self) {
        // Nothing uses it any more; what a hostile answer leaves ends with the context.
        let _ = self.destroy();
    }
}
