//! Wire layout of vfio-user, protocol version 0.1 (QEMU's `docs/interop/vfio-user.rst`).
//!
//! All numbers have the host's byte order. Every message begins with a [`Header`]; offsets of what
//! follows are given from its end. Structures that the protocol takes over from VFIO are those of
//! `linux/vfio.h`.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a [`Header`].
pub const HEADER_BYTES: usize = size_of::<Header>();

/// Major version that this crate speaks.
pub const MAJOR: u16 = 0;
/// Highest minor version that it speaks.
pub const MINOR: u16 = 1;

/// What a message asks for, "Commands".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Command {
    /// Negotiates the version: the first message.
    Version = 1,
    /// Shows memory to the server.
    DmaMap = 2,
    /// Takes memory away.
    DmaUnmap = 3,
    /// What the device is.
    DeviceGetInfo = 4,
    /// What a region is.
    DeviceGetRegionInfo = 5,
    /// Descriptors through which a region can be reached.
    DeviceGetRegionIoFds = 6,
    /// What an interrupt type is.
    DeviceGetIrqInfo = 7,
    /// Sets interrupts up.
    DeviceSetIrqs = 8,
    /// Reads from a region.
    RegionRead = 9,
    /// Writes to a region.
    RegionWrite = 10,
    /// Reads memory of the client: from server to client.
    DmaRead = 11,
    /// Writes memory of the client: from server to client.
    DmaWrite = 12,
    /// Resets the device.
    DeviceReset = 13,
    /// Dirty page tracking of protocol versions before migration was taken over from VFIO.
    DirtyPages = 14,
    /// Several writes in one message.
    RegionWriteMulti = 15,
    /// Features, which are all about migration.
    DeviceFeature = 16,
    /// Reads migration data.
    MigDataRead = 17,
    /// Writes migration data.
    MigDataWrite = 18,
}

impl Command {
    /// All commands, in the order of their numbers, which begin at 1 and have no gap.
    pub const ALL: [Self; 18] = [
        Self::Version,
        Self::DmaMap,
        Self::DmaUnmap,
        Self::DeviceGetInfo,
        Self::DeviceGetRegionInfo,
        Self::DeviceGetRegionIoFds,
        Self::DeviceGetIrqInfo,
        Self::DeviceSetIrqs,
        Self::RegionRead,
        Self::RegionWrite,
        Self::DmaRead,
        Self::DmaWrite,
        Self::DeviceReset,
        Self::DirtyPages,
        Self::RegionWriteMulti,
        Self::DeviceFeature,
        Self::MigDataRead,
        Self::MigDataWrite,
    ];

    /// The command of a number.
    #[must_use]
    pub fn from_wire(number: u16) -> Option<Self> {
        let index = usize::from(number).checked_sub(1)?;
        Self::ALL.get(index).copied()
    }

    /// Its number.
    #[must_use]
    pub const fn to_wire(self) -> u16 {
        // A fieldless enumeration with this representation: nothing can be lost.
        self as u16
    }
}

/// [`Header::flags`]: bits of the message's type.
pub const FLAGS_TYPE: u32 = 0xf;
/// A command.
pub const TYPE_COMMAND: u32 = 0;
/// A reply.
pub const TYPE_REPLY: u32 = 1;
/// [`Header::flags`] of a command: it is not answered.
pub const FLAG_NO_REPLY: u32 = 1 << 4;
/// [`Header::flags`] of a reply: the command failed.
pub const FLAG_ERROR: u32 = 1 << 5;

/// "Header".
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Header {
    /// Chosen by who sends the command; the reply has the same.
    pub id: u16,
    /// [`Command`].
    pub command: u16,
    /// Bytes of the message, with this header.
    pub size: u32,
    /// `FLAGS_*`, `FLAG_*`.
    pub flags: u32,
    /// Error number where the reply has [`FLAG_ERROR`].
    pub error: u32,
}

/// `VFIO_USER_VERSION`; capabilities follow as JSON text that ends with a zero byte.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Version {
    /// Major.
    pub major: u16,
    /// Minor.
    pub minor: u16,
}

/// [`DmaMap::flags`]: the device may read.
pub const DMA_READ: u32 = 1 << 0;
/// [`DmaMap::flags`]: the device may write.
pub const DMA_WRITE: u32 = 1 << 1;

/// `VFIO_USER_DMA_MAP`, with at most one descriptor.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaMap {
    /// Bytes of this structure.
    pub argsz: u32,
    /// [`DMA_READ`], [`DMA_WRITE`].
    pub flags: u32,
    /// Offset in the descriptor's file.
    pub offset: u64,
    /// Address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
}

/// [`DmaUnmap::flags`]: wants the dirty pages, `VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP`.
pub const UNMAP_GET_DIRTY_BITMAP: u32 = 1 << 0;
/// [`DmaUnmap::flags`]: all ranges; `address` and `size` are zero, `VFIO_DMA_UNMAP_FLAG_ALL`.
pub const UNMAP_ALL: u32 = 1 << 1;

/// `VFIO_USER_DMA_UNMAP`, and its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaUnmap {
    /// Most bytes of the reply.
    pub argsz: u32,
    /// `UNMAP_*`.
    pub flags: u32,
    /// Address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
}

/// [`DeviceInfo::flags`]: the device can be reset.
pub const DEVICE_RESET: u32 = 1 << 0;
/// [`DeviceInfo::flags`]: it is a PCI function.
pub const DEVICE_PCI: u32 = 1 << 1;

/// `VFIO_USER_DEVICE_GET_INFO`, and its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Most bytes of the reply; in the reply, bytes of a whole one.
    pub argsz: u32,
    /// `DEVICE_*`.
    pub flags: u32,
    /// Regions.
    pub num_regions: u32,
    /// Interrupt types.
    pub num_irqs: u32,
}

/// [`RegionInfo::flags`]: can be read.
pub const REGION_READ: u32 = 1 << 0;
/// [`RegionInfo::flags`]: can be written.
pub const REGION_WRITE: u32 = 1 << 1;
/// [`RegionInfo::flags`]: can be mapped.
pub const REGION_MMAP: u32 = 1 << 2;
/// [`RegionInfo::flags`]: capabilities follow.
pub const REGION_CAPS: u32 = 1 << 3;

/// `VFIO_USER_DEVICE_GET_REGION_INFO`, and the beginning of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionInfo {
    /// Most bytes of the reply; in the reply, bytes of a whole one.
    pub argsz: u32,
    /// `REGION_*`.
    pub flags: u32,
    /// Index of the region.
    pub index: u32,
    /// Offset of the first capability from the beginning of this structure.
    pub cap_offset: u32,
    /// Length in bytes.
    pub size: u64,
    /// What is added to an offset in the region to get one in the file.
    pub offset: u64,
}

/// [`CapHeader::id`] of [`SparseMmap`], `VFIO_REGION_INFO_CAP_SPARSE_MMAP`.
pub const CAP_SPARSE_MMAP: u16 = 1;

/// The beginning of a capability, `struct vfio_info_cap_header`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CapHeader {
    /// Which: `CAP_*`.
    pub id: u16,
    /// Version of it.
    pub version: u16,
    /// Offset of the next one from the beginning of [`RegionInfo`], or zero.
    pub next: u32,
}

/// Which parts of a region can be mapped; so many [`SparseArea`]s follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseMmap {
    /// What all capabilities begin with.
    pub header: CapHeader,
    /// Number of entries.
    pub nr_areas: u32,
    /// Reserved: zero.
    pub reserved: u32,
}

/// A part of a region.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct SparseArea {
    /// Offset in the region.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// `VFIO_USER_DEVICE_GET_REGION_IO_FDS`, and the beginning of its reply, which so many [`IoFd`]s
/// follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionIoFds {
    /// Most bytes of the reply; in the reply, bytes of a whole one.
    pub argsz: u32,
    /// Reserved: zero.
    pub flags: u32,
    /// Index of the region.
    pub index: u32,
    /// How many, in the reply.
    pub count: u32,
}

/// [`IoFd::kind`]: an ioeventfd.
pub const IO_FD_IOEVENTFD: u32 = 0;
/// [`IoFd::kind`]: an ioregionfd.
pub const IO_FD_IOREGIONFD: u32 = 1;
/// [`IoFd::flags`] of an ioeventfd: only for one value, `KVM_IOEVENTFD_FLAG_DATAMATCH`.
pub const IOEVENTFD_DATAMATCH: u32 = 1 << 0;
/// [`IoFd::flags`] of an ioeventfd: an I/O port, `KVM_IOEVENTFD_FLAG_PIO`.
pub const IOEVENTFD_PIO: u32 = 1 << 1;
/// [`IoFd::flags`] of an ioregionfd: an I/O port, `KVM_IOREGION_PIO`.
pub const IOREGION_PIO: u32 = 1 << 0;
/// [`IoFd::flags`] of an ioregionfd: writes are not answered, `KVM_IOREGION_POSTED_WRITES`.
pub const IOREGION_POSTED_WRITES: u32 = 1 << 1;

/// A part of a region that is reached through a descriptor.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct IoFd {
    /// Offset in the region.
    pub offset: u64,
    /// Bytes, or zero where the size of the access does not matter.
    pub size: u64,
    /// Which of the descriptors of the message.
    pub fd_index: u32,
    /// `IO_FD_*`.
    pub kind: u32,
    /// `IOEVENTFD_*` or `IOREGION_*`.
    pub flags: u32,
    /// Reserved: zero.
    pub padding: u32,
    /// What is compared (ioeventfd), or given back (ioregionfd).
    pub value: u64,
}

/// [`IrqInfo::flags`]: can signal an eventfd.
pub const IRQ_EVENTFD: u32 = 1 << 0;
/// [`IrqInfo::flags`]: can be masked.
pub const IRQ_MASKABLE: u32 = 1 << 1;
/// [`IrqInfo::flags`]: masks itself when raised.
pub const IRQ_AUTOMASKED: u32 = 1 << 2;
/// [`IrqInfo::flags`]: vectors cannot be added while others are in use.
pub const IRQ_NORESIZE: u32 = 1 << 3;

/// `VFIO_USER_DEVICE_GET_IRQ_INFO`, and its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqInfo {
    /// Most bytes of the reply; in the reply, bytes of a whole one.
    pub argsz: u32,
    /// `IRQ_*`.
    pub flags: u32,
    /// Index of the interrupt type.
    pub index: u32,
    /// How many there are of it.
    pub count: u32,
}

/// [`IrqSet::flags`]: no data.
pub const IRQ_SET_DATA_NONE: u32 = 1 << 0;
/// [`IrqSet::flags`]: a byte for each, not zero where it is meant.
pub const IRQ_SET_DATA_BOOL: u32 = 1 << 1;
/// [`IrqSet::flags`]: a descriptor for each, or none for none of them.
pub const IRQ_SET_DATA_EVENTFD: u32 = 1 << 2;
/// [`IrqSet::flags`]: mask.
pub const IRQ_SET_ACTION_MASK: u32 = 1 << 3;
/// [`IrqSet::flags`]: unmask.
pub const IRQ_SET_ACTION_UNMASK: u32 = 1 << 4;
/// [`IrqSet::flags`]: raise.
pub const IRQ_SET_ACTION_TRIGGER: u32 = 1 << 5;

/// `VFIO_USER_DEVICE_SET_IRQS`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqSet {
    /// Bytes of this structure and its data.
    pub argsz: u32,
    /// One `IRQ_SET_DATA_*` and one `IRQ_SET_ACTION_*`.
    pub flags: u32,
    /// Index of the interrupt type.
    pub index: u32,
    /// The first one.
    pub start: u32,
    /// Number of entries.
    pub count: u32,
}

/// `VFIO_USER_REGION_READ` and `VFIO_USER_REGION_WRITE`, and their replies; data follows a write
/// and the reply to a read.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionAccess {
    /// Offset in the region.
    pub offset: u64,
    /// Index of the region.
    pub region: u32,
    /// Bytes of data.
    pub count: u32,
}

/// `VFIO_USER_DMA_READ` and `VFIO_USER_DMA_WRITE`, and their replies; data follows a write and the
/// reply to a read.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaAccess {
    /// Address in the client's memory.
    pub address: u64,
    /// Bytes of data.
    pub count: u64,
}

/// `VFIO_USER_REGION_WRITE_MULTI`, and its reply; so many [`WriteOne`]s follow the command.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WriteMulti {
    /// How many writes.
    pub wr_cnt: u64,
}

/// One of several writes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct WriteOne {
    /// Offset in the region.
    pub offset: u64,
    /// Index of the region.
    pub region: u32,
    /// Bytes of it, at most 8.
    pub count: u32,
    /// The bytes.
    pub data: [u8; 8],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_protocol() {
        assert_eq!(HEADER_BYTES, 16);
        assert_eq!(size_of::<Version>(), 4);
        assert_eq!(size_of::<DmaMap>(), 32);
        assert_eq!(size_of::<DmaUnmap>(), 24);
        assert_eq!(size_of::<DeviceInfo>(), 16);
        assert_eq!(size_of::<RegionInfo>(), 32);
        assert_eq!(size_of::<SparseMmap>(), 16);
        assert_eq!(size_of::<SparseArea>(), 16);
        assert_eq!(size_of::<RegionIoFds>(), 16);
        assert_eq!(size_of::<IoFd>(), 40);
        assert_eq!(size_of::<IrqInfo>(), 16);
        assert_eq!(size_of::<IrqSet>(), 20);
        assert_eq!(size_of::<RegionAccess>(), 16);
        assert_eq!(size_of::<DmaAccess>(), 16);
        assert_eq!(size_of::<WriteMulti>(), 8);
        assert_eq!(size_of::<WriteOne>(), 24);
    }

    #[test]
    fn every_command_has_the_number_of_its_place() {
        for (number, command) in (1..).zip(Command::ALL) {
            assert_eq!(command.to_wire(), number);
            assert_eq!(Command::from_wire(number), Some(command));
        }
        assert_eq!(Command::from_wire(0), None);
        assert_eq!(Command::from_wire(19), None);
        assert_eq!(Command::from_wire(u16::MAX), None);
    }
}
