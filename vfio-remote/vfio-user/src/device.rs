//! What a device is to the server.

use crate::Client;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Most regions of a device: QEMU refuses more.
pub const MAX_REGIONS: u32 = 100;
/// Most interrupt types of a device: QEMU refuses more.
pub const MAX_IRQ_TYPES: u32 = 50;

/// What can be said of a device as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// How many regions it has; 9 for PCI (`VFIO_PCI_NUM_REGIONS`), at most [`MAX_REGIONS`].
    pub regions: u32,
    /// How many interrupt types it has; 5 for PCI (`VFIO_PCI_NUM_IRQS`), at most
    /// [`MAX_IRQ_TYPES`].
    pub irqs: u32,
    /// Whether it can be reset.
    pub resettable: bool,
}

impl DeviceInfo {
    /// A PCI function that can be reset.
    pub const PCI: Self = Self {
        regions: 9,
        irqs: 5,
        resettable: true,
    };
}

/// Part of a region that a client may map.
#[derive(Clone, Debug)]
pub struct MapArea {
    /// Offset in the region; a multiple of the page size.
    pub offset: u64,
    /// Bytes; a multiple of the page size, not zero.
    pub size: u64,
    /// Where its bytes are. Areas in one file share the `Arc`: that is how the server knows it.
    pub file: Arc<OwnedFd>,
    /// Offset of its first byte in the file. The protocol has one number for all areas of a region:
    /// `file_offset - offset` is the same for all, and not negative.
    pub file_offset: u64,
}

/// A region.
///
/// While a client is connected, size and rights do not change.
#[derive(Clone, Debug, Default)]
pub struct RegionInfo {
    /// Bytes; zero where there is no such region.
    pub size: u64,
    /// Whether it can be read.
    pub readable: bool,
    /// Whether it can be written.
    pub writable: bool,
    /// What of it can be mapped. They do not overlap.
    ///
    /// Where all lie in one file, the client is sent that descriptor. Where they lie in several, it
    /// is sent one for each area, in their order, as far as it takes so many; areas beyond are not
    /// offered to it. QEMU 11.1 takes one descriptor a region: it refuses a device with more.
    pub areas: Vec<MapArea>,
}

/// An interrupt type.
///
/// While a client is connected it does not change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IrqInfo {
    /// How many interrupts there are of it.
    pub count: u32,
    /// They can signal an eventfd.
    pub eventfd: bool,
    /// They can be masked.
    pub maskable: bool,
    /// They mask themselves when raised.
    pub automasked: bool,
    /// They are set up together, and none can be added while others are in use.
    pub noresize: bool,
}

/// What is done with interrupts, or is to be announced by an eventfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Mask.
    Mask,
    /// Unmask.
    Unmask,
    /// Raise.
    Trigger,
}

/// `VFIO_USER_DEVICE_SET_IRQS`. Index, first number and count are in what [`Device::irq`] says.
#[derive(Debug)]
pub enum IrqRequest {
    /// Nothing is signalled for any interrupt of the type any more.
    Disable {
        /// Index of the interrupt type.
        index: u32,
    },
    /// Sets what is signalled: when the interrupt is raised ([`IrqAction::Trigger`]), or, to
    /// whoever wants to know, when the other side masks or unmasks it.
    ///
    /// For [`IrqAction::Unmask`], Linux's VFIO takes the eventfd as an input: whenever it is
    /// signalled, the interrupt is unmasked. QEMU uses it so.
    Bind {
        /// Index of the interrupt type.
        index: u32,
        /// The first interrupt.
        start: u32,
        /// What happens.
        action: IrqAction,
        /// One for each interrupt from `start` on; `None` signals nothing any more. They are
        /// eventfds and do not block.
        eventfds: Vec<Option<OwnedFd>>,
    },
    /// Does something to interrupts now. [`IrqAction::Trigger`] signals the eventfd that is bound.
    Perform {
        /// Index of the interrupt type.
        index: u32,
        /// The first interrupt.
        start: u32,
        /// What.
        action: IrqAction,
        /// For each interrupt from `start` on, whether it is meant.
        selected: Vec<bool>,
    },
}

/// Memory of a client.
#[derive(Debug)]
pub struct DmaMap {
    /// First address; a multiple of [`PAGE_BYTES`](crate::PAGE_BYTES).
    pub address: u64,
    /// Bytes; a multiple of [`PAGE_BYTES`](crate::PAGE_BYTES), not zero. `address + size` does not
    /// wrap, and nothing else is mapped there.
    pub size: u64,
    /// Whether the device may read it.
    pub readable: bool,
    /// Whether the device may write it.
    pub writable: bool,
    /// A regular file (that is, also a memfd), open for what is allowed, and the offset of the
    /// first byte; a multiple of [`PAGE_BYTES`](crate::PAGE_BYTES). It was long enough when it was
    /// looked at: its owner can cut it short at any time. Without one, the memory is reached by
    /// messages through [`Client`].
    pub file: Option<(OwnedFd, u64)>,
}

/// What a client does instead of sending a message for an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoFdKind {
    /// Signals an eventfd, on any write or on those of one value.
    Eventfd {
        /// The value.
        datamatch: Option<u64>,
        /// The region is one of I/O ports.
        ports: bool,
    },
    /// Sends what KVM's proposed ioregionfd sends.
    Region {
        /// The region is one of I/O ports.
        ports: bool,
        /// Writes are not answered.
        posted_writes: bool,
        /// Is sent along.
        user_data: u64,
    },
}

/// Part of a region that is reached through a descriptor.
#[derive(Clone, Debug)]
pub struct IoFd {
    /// Offset in the region.
    pub offset: u64,
    /// Bytes; zero where the size of an access does not matter.
    pub size: u64,
    /// The descriptor. Parts that share one share the `Arc`.
    pub fd: Arc<OwnedFd>,
    /// How it is used.
    pub kind: IoFdKind,
}

/// A device that a [`Server`](crate::Server) serves.
///
/// All calls come from the one thread that serves it. An error is sent to the client as it is.
pub trait Device: Send {
    /// A client is there: the version has been negotiated. Nothing is mapped, no eventfd is bound.
    ///
    /// `client` reaches memory without a file, from any thread but the one that makes this call: it
    /// is the one that takes the answers.
    fn connected(&mut self, client: Client);

    /// A request of the client begins, or its end: what follows until the next call of this is for
    /// it, and the client waits until all of that is done.
    fn begin_request(&mut self) {}

    /// The client is about to be gone: every range that is left is unmapped after this, and every
    /// interrupt type that is used is disabled. A device for which that takes long can let go of
    /// everything at once here.
    fn disconnecting(&mut self) {}

    /// The client has gone. Before, every range that was left has been unmapped by
    /// [`dma_unmap`](Self::dma_unmap), and every interrupt type that was used has been disabled.
    /// The protocol wants the device's own state to be kept.
    fn disconnected(&mut self);

    /// What the device is.
    fn info(&self) -> DeviceInfo;

    /// A region, or `None` where there is none with this number.
    fn region(&mut self, index: u32) -> Option<RegionInfo>;

    /// An interrupt type, or `None` where there is none with this number.
    fn irq(&self, index: u32) -> Option<IrqInfo>;

    /// Reads from a region. The bytes are in it, there is at least one, and it can be read.
    ///
    /// # Errors
    /// As the device likes.
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno>;

    /// Writes to a region. The bytes are in it, there is at least one, and it can be written.
    ///
    /// # Errors
    /// As the device likes.
    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), Errno>;

    /// Descriptors through which parts of a region can be reached.
    ///
    /// # Errors
    /// As the device likes.
    fn io_fds(&mut self, region: u32) -> Result<Vec<IoFd>, Errno> {
        let _ = region;
        Ok(Vec::new())
    }

    /// Sets interrupts up, or does something to them.
    ///
    /// # Errors
    /// As the device likes.
    fn set_irqs(&mut self, request: IrqRequest) -> Result<(), Errno>;

    /// Shows memory to the device.
    ///
    /// # Errors
    /// As the device likes; then nothing is mapped.
    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno>;

    /// Takes memory away: exactly a range that was mapped. The device does not touch it any more
    /// when this returns.
    ///
    /// # Errors
    /// As the device likes; then the range is still mapped.
    fn dma_unmap(&mut self, address: u64, size: u64) -> Result<(), Errno>;

    /// Resets the device. Memory stays mapped, eventfds stay bound.
    ///
    /// # Errors
    /// As the device likes.
    fn reset(&mut self) -> Result<(), Errno>;
}
