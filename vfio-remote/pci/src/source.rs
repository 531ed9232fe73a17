//! Where functions come from at the lender.

use crate::{AddressRange, Area, Description, InterruptVector, Region, Signal};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thiserror::Error;

/// Why a source cannot hand out its function.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The system, or the device, failed.
    #[error("Cannot {what}")]
    Failed {
        /// The operation that failed.
        what: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The function was taken already.
    #[error("The function is in use")]
    Busy,
}

impl SourceError {
    /// What has failed, for `map_err`.
    pub fn failed(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Failed { what, source }
    }
}

/// Why an operation on a function was refused.
#[derive(Debug, Error)]
pub enum AccessError {
    /// Outside of the region, or the region cannot be read or written so.
    #[error("{length} bytes at {offset:#x} of {region:?} cannot be accessed")]
    Region {
        /// Region that is accessed.
        region: Region,
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        length: usize,
    },
    /// No such interrupt.
    #[error("There is no {0}")]
    Interrupt(InterruptVector),
    /// Memory that cannot be mapped for it.
    #[error("{range} cannot be mapped for DMA: {why}")]
    Map {
        /// What was to be mapped.
        range: AddressRange,
        /// Reason.
        why: String,
    },
    /// The device failed, or is gone.
    #[error("The device failed")]
    Io(#[from] std::io::Error),
}

impl AccessError {
    /// [`Region`](Self::Region), for these bytes of a region.
    #[must_use]
    pub fn region(region: Region, offset: u64, length: usize) -> Self {
        Self::Region {
            region,
            offset,
            length,
        }
    }
}

/// Memory of a function that a borrower may map before it uses the function, and that no other
/// borrower ever sees.
#[derive(Clone, Debug)]
pub struct SharedArea {
    /// The region that it belongs to.
    pub region: Region,
    /// Where in the region.
    pub area: Area,
    /// Where its bytes are.
    pub file: Arc<OwnedFd>,
    /// Offset of its first byte in the file: not less than that in the region, and by the same
    /// difference for all areas of a region, because vfio-user has one number for both.
    pub file_offset: u64,
}

/// What one borrower has been given to map.
#[derive(Clone, Debug, Default)]
pub struct Attachment {
    /// All areas; the rest of each region is forwarded.
    pub areas: Vec<SharedArea>,
    /// What tells the borrower of the lender's end, by being closed. Transfers of the system's that
    /// outlive the process keep it open: what a disk has begun to write into the borrower's memory
    /// it goes on writing when the lender has been killed.
    pub liveness: Option<Arc<OwnedFd>>,
}

/// What lies behind a range of addresses that a function may reach.
#[derive(Clone, Debug)]
pub enum DmaTarget {
    /// A file that can be mapped: memory of a VM on this host, or the window of an NTB.
    File {
        /// The file.
        file: Arc<OwnedFd>,
        /// Offset of the first byte.
        offset: u64,
    },
    /// The same for memory of another device.
    Device {
        /// The file.
        file: Arc<OwnedFd>,
        /// Offset of the first byte.
        offset: u64,
    },
    /// Memory that is reached by messages.
    Remote(Arc<dyn crate::RemoteMemory>),
}

/// A range of addresses that a function may reach, as it sees them (guest-physical).
#[derive(Clone, Debug)]
pub struct DmaMapping {
    /// The range: not empty, of whole pages; it does not wrap around.
    pub range: AddressRange,
    /// Whether the function may write there.
    pub writable: bool,
    /// What lies there.
    pub target: DmaTarget,
}

/// A number that a function keeps about itself.
pub type Counter = farlane_worker::counters::Sample<'static>;

/// A device of the lender: something that can be lent again and again.
pub trait Source: Send + Sync {
    /// What it is.
    fn description(&self) -> &Description;

    /// Memory for one more borrower to map. Cheap; does not touch the device.
    ///
    /// # Errors
    /// Out of memory or descriptors.
    fn attach(&self) -> Result<Attachment, SourceError>;

    /// Takes the function for the borrower with this attachment: reset, without memory and
    /// interrupts. Memory of `attachment` is as after a reset.
    ///
    /// # Errors
    /// [`SourceError::Busy`] while an earlier [`Function`] of it lives; or the device fails.
    fn take(&self, attachment: &Attachment) -> Result<Box<dyn Function>, SourceError>;

    /// Why the function cannot be lent any more. None while it can, which is looked at whenever a
    /// use of it has ended.
    fn quarantine(&self) -> Option<String> {
        None
    }

    /// Has `tell` called, by a thread of its own, whenever the function must not be used any more
    /// for a reason that is not its user's: [`quarantine`](Self::quarantine) says which. Called
    /// once.
    fn watch(&self, tell: Arc<dyn Fn() + Send + Sync>) {
        let _ = tell;
    }

    /// Counters over all users since the start.
    fn counters(&self) -> Vec<Counter>;
}

/// A function in use by one borrower.
///
/// Calls may come from several threads; none may block for longer than the device takes for what
/// it has begun. Dropping it ends the use: nothing is touched any more when the drop returns, no
/// interrupt is raised, all mappings are gone and the device has been reset.
pub trait Function: Send + Sync {
    /// Reads a register or a stretch of a region. Never called for
    /// [`Region::Config`] bytes that the borrower virtualises.
    ///
    /// # Errors
    /// Out of bounds, or the device fails.
    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Result<(), AccessError>;

    /// Writes a register or a stretch of a region. Writes take effect in order.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Result<(), AccessError>;

    /// Sends a vector's interrupts to `signal`, or nowhere.
    ///
    /// # Errors
    /// No such vector; or the system refuses.
    fn set_interrupt(
        &self,
        vector: InterruptVector,
        signal: Option<Arc<dyn Signal>>,
    ) -> Result<(), AccessError>;

    /// Masks or unmasks INTx, which masks itself whenever it is raised by a level.
    ///
    /// # Errors
    /// There is no INTx; or the system refuses.
    fn mask_intx(&self, masked: bool) -> Result<(), AccessError>;

    /// Whether the function masters the bus: it accesses memory only while it may do that, and has
    /// some mapped. When it is taken it may. What it has begun before it may not any more ends with
    /// an unmapping, or with the drop. Taking this right away waits for nothing that other threads
    /// do with the function.
    ///
    /// # Errors
    /// The device fails.
    fn set_bus_master(&self, may: bool) -> Result<(), AccessError>;

    /// Takes the right to master the bus away for good: [`set_bus_master`](Self::set_bus_master)
    /// does not give it back, not even where it has begun before. Waits as little as that.
    ///
    /// # Errors
    /// The device fails.
    fn end_bus_master(&self) -> Result<(), AccessError>;

    /// Lets the function reach a range.
    ///
    /// # Errors
    /// It overlaps another, or cannot be mapped.
    fn map(&self, mapping: DmaMapping) -> Result<(), AccessError>;

    /// Takes a range away, exactly as it was mapped. When this returns, the function does not
    /// touch it.
    ///
    /// # Errors
    /// There is none such.
    fn unmap(&self, range: AddressRange) -> Result<(), AccessError>;

    /// `length` bytes at `offset` of one of its regions, for another function of this host to
    /// reach. None where it has no such memory besides that of its [`Attachment`]. Whoever maps it
    /// lets go of it before this function is dropped.
    fn memory(&self, region: Region, offset: u64, length: u64) -> Option<DmaTarget> {
        let _ = (region, offset, length);
        None
    }

    /// Function-level reset. Mappings and interrupts stay.
    ///
    /// # Errors
    /// The device fails.
    fn reset(&self) -> Result<(), AccessError>;
}
