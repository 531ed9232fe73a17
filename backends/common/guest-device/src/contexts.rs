//! What a backend makes of its guests' processes and their memory.

use crate::events::ContextEvents;
use crate::request::Extents;
use farlane_abi::Errno;
use farlane_abi::ids::{ContextId, RegionId};
use farlane_zero_copy::{AddressSpace, Pool, Region};
use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A range of the window, or a buffer, or both: see [`farlane_abi::control::OP_WINDOW_MAP`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowRange {
    /// Handle of the buffer, or zero.
    pub buffer: u32,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Memory that a process announces, by what it is for.
#[derive(Debug)]
pub enum Memory {
    /// Rings and queues, which process and backend share: writable. A context's first one is its
    /// header.
    Segment(Region),
    /// Memory of the program.
    Pin(Region),
    /// All memory of the VM, at guest-physical addresses, for a context of its kernel.
    All {
        /// As it is now.
        memory: Region,
        /// As it will be.
        space: Arc<AddressSpace>,
    },
    /// A phony buffer: runs of whole guest-physical pages.
    Phony(Extents),
    /// Device memory.
    Device {
        /// Runs of guest-physical addresses in whole pages, which may be no memory (any more).
        runs: Extents,
        /// Whether the backend may write it.
        writable: bool,
    },
    /// A file that the process has open, by a number that no other file has meanwhile.
    File(u64),
}

/// The contexts of one VM. A context is an open file of `/dev/farlaneN`.
///
/// What a guest may ask for and a backend does not have is refused with `EOPNOTSUPP`.
pub trait Contexts: Send + Sync {
    /// `FEATURE_*` of [`farlane_abi::config`], without the window's.
    fn features(&self) -> u32;

    /// The GID that the guest is shown, zeroes where there is none.
    fn gid(&self) -> [u8; 16] {
        [0; 16]
    }

    /// MAC address of the network interface that the device belongs to, zeroes where none is named.
    fn mac(&self) -> [u8; 6] {
        [0; 6]
    }

    /// The guest sets entry `index` of the port's GID table.
    ///
    /// # Errors
    /// `EINVAL` for an entry that there is not and for no GID of a port, `EACCES` for one that the
    /// operator does not let it have, `EEXIST` where the entry has one, `EADDRINUSE` where another
    /// port has it.
    fn add_gid(&self, index: u32, gid: [u8; 16]) -> Result<(), Errno> {
        let _ = (index, gid);
        Err(Errno::EOPNOTSUPP)
    }

    /// It clears it.
    ///
    /// # Errors
    /// `ENOENT` where it has no GID.
    fn remove_gid(&self, index: u32) -> Result<(), Errno> {
        let _ = index;
        Err(Errno::EOPNOTSUPP)
    }

    /// Opens a context, whose events go to `events` and whose host-allocated buffers come from
    /// `window`.
    ///
    /// # Errors
    /// `EEXIST` for an id in use.
    fn open(
        &self,
        context: ContextId,
        events: Arc<ContextEvents>,
        window: Option<Arc<Pool>>,
    ) -> Result<(), Errno>;

    /// The same of a context of the guest's kernel, which may do what the kernel alone vouches for.
    ///
    /// # Errors
    /// As of [`open`](Self::open); `EOPNOTSUPP` where there are none.
    fn open_of_kernel(
        &self,
        context: ContextId,
        events: Arc<ContextEvents>,
        window: Option<Arc<Pool>>,
    ) -> Result<(), Errno> {
        let _ = (context, events, window);
        Err(Errno::EOPNOTSUPP)
    }

    /// Closes a context and releases everything it owns. When it succeeds nothing touches its
    /// memory any more.
    ///
    /// # Errors
    /// `ENOENT` where none is open, `EAGAIN` where something still touches its memory: the driver
    /// asks again. Its other requests wait as long as this takes, and after a few seconds it finds
    /// the device dead.
    fn close(&self, context: ContextId) -> Result<(), Errno>;

    /// Whether a context is open.
    ///
    /// # Errors
    /// `ENOENT` where it is not.
    fn check(&self, context: ContextId) -> Result<(), Errno>;

    /// Makes memory of a process known.
    ///
    /// # Errors
    /// `EEXIST` for an id in use, `EINVAL` for memory that does not do, `EBUSY` for pages that are
    /// another phony buffer's, `EOPNOTSUPP` for a kind that the backend does not have.
    fn attach(&self, context: ContextId, region: RegionId, memory: Memory) -> Result<(), Errno>;

    /// Takes memory away. When this succeeds nothing touches it any more.
    ///
    /// # Errors
    /// `ENOENT` for an unknown region, `EBUSY` for a segment in use, `EAGAIN` as in
    /// [`close`](Self::close).
    fn detach(&self, context: ContextId, region: RegionId) -> Result<(), Errno>;

    /// Closes all contexts: the VM is gone, or has reset the device.
    fn close_all(&self);

    /// The VM is stopped: nothing touches its memory when this returns.
    fn pause(&self);

    /// The VM goes on after [`pause`](Self::pause).
    fn resume(&self);

    /// The process maps a buffer of the window.
    ///
    /// # Errors
    /// `EACCES` where the context has no such buffer.
    fn window_map(&self, context: ContextId, place: WindowRange) -> Result<(), Errno> {
        let _ = (context, place);
        Err(Errno::EOPNOTSUPP)
    }

    /// A mapping of a buffer is gone.
    ///
    /// # Errors
    /// `ENOENT` where nothing is mapped there.
    fn window_unmap(&self, context: ContextId, place: WindowRange) -> Result<(), Errno> {
        let _ = (context, place);
        Err(Errno::EOPNOTSUPP)
    }

    /// The VM's doorbell: an eventfd that wakes whoever serves the contexts. It is in use until
    /// what this returns is dropped; nothing is returned where there is nobody to wake.
    ///
    /// # Errors
    /// The system refuses.
    fn add_doorbell(&self, bell: OwnedFd) -> io::Result<Option<Box<dyn Any + Send>>>;
}
