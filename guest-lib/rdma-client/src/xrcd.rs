//! Domains of extended reliable connections.

use crate::context::known;
use crate::pd::Destroyed;
use crate::{Context, Error};
use farlane_abi::Errno;
use farlane_abi::rdma::{OpenXrcd, VerbsVersion};
use farlane_transport::ShownFile;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A domain of a context: queue pairs that are targets, and the shared receive queues that messages
/// to them name (IBTA annex A14).
#[derive(Debug)]
pub struct Xrcd {
    context: Arc<Context>,
    handle: u32,
    destroyed: Destroyed,
    /// By which it was opened. Dropped last: the backend keeps the file of an open domain.
    _file: Option<ShownFile>,
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
        Ok(Self::of(context, handle, None))
    }

    /// Opens the domain of a file, which processes of one user of a host, or all of one VM, have
    /// together that have opened the file. `flags` are `XRCD_*` of [`farlane_abi::rdma`].
    ///
    /// # Errors
    /// Those of [`open`](Self::open); `EAGAIN` where there is no domain of this file and none is to
    /// be made, `EINVAL` where there is one and there may not be, `EOPNOTSUPP` where the backend
    /// or the driver cannot tell files.
    pub fn open_by_file(
        context: &Arc<Context>,
        file: BorrowedFd<'_>,
        flags: u32,
    ) -> Result<Arc<Self>, Error> {
        if context.version() < VerbsVersion::V2 {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let file = ShownFile::new(context.transport(), file)?;
        let opened = context.verbs().open_xrcd_of(&OpenXrcd {
            region: file.region().into(),
            flags: flags.into(),
        });
        Ok(Self::of(context, known(opened)?.get(), Some(file)))
    }

    fn of(context: &Arc<Context>, handle: u32, file: Option<ShownFile>) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            handle,
            destroyed: Destroyed::default(),
            _file: file,
        })
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
