//! Protection domains.

use crate::{Context, Error, ShownFile};
use farlane_abi::Errno;
use farlane_abi::rdma::ImportPd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A protection domain of a context.
#[derive(Debug)]
pub struct Pd {
    context: Arc<Context>,
    handle: u32,
    is_imported: bool,
    destroyed: Destroyed,
}

impl Pd {
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// `ENOMEM` where the backend has no room for another, `ENODEV` where it is gone.
    pub fn allocate(context: &Arc<Context>) -> Result<Arc<Self>, Error> {
        let handle = context.verbs().alloc_pd(&())?.get();
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            handle,
            is_imported: false,
            destroyed: Destroyed::default(),
        }))
    }

    /// Imports the protection domain that has this handle in the context of another process, to
    /// which `file` [leads](Context::import). Whatever can be made in a domain can
    /// be made in it; requests of all queue pairs of the domain name all memory that is registered
    /// there, of either process.
    ///
    /// # Errors
    /// `EINVAL` where there is none, or the context has ended; `ENOMEM` and `ENODEV` as
    /// [`allocate`](Self::allocate).
    pub fn import(
        context: &Arc<Context>,
        file: &ShownFile,
        handle: u32,
    ) -> Result<Arc<Self>, Error> {
        let import = ImportPd {
            region: file.region().into(),
            pd: handle.into(),
        };
        let handle = context.verbs().import_pd(&import)?.get();
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            handle,
            is_imported: true,
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

    /// Whether it is a name for another process's.
    pub(crate) fn is_imported(&self) -> bool {
        self.is_imported
    }

    /// Deallocates the protection domain.
    ///
    /// # Errors
    /// `EBUSY` while something is in it.
    pub fn destroy(&self) -> Result<(), Error> {
        self.destroyed
            .once(|| self.context.verbs().dealloc_pd(&self.handle.into()))
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // Nothing uses it any more; what a hostile answer leaves ends with the context.
        let _ = self.destroy();
    }
}

/// Whether an object is gone at the backend already.
#[derive(Debug, Default)]
pub(crate) struct Destroyed(AtomicBool);

impl Destroyed {
    /// Of what is another one's to destroy.
    pub(crate) fn already() -> Self {
        Self(AtomicBool::new(true))
    }

    /// Runs `destroy` unless it has succeeded before. A dead device has destroyed everything.
    pub(crate) fn once(&self, destroy: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        if self.0.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        match destroy() {
            Err(error) if error.errno() != Errno::ENODEV => {
                self.0.store(false, Ordering::Release);
                Err(error)
            }
            _ => Ok(()),
        }
    }
}
