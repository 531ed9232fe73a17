//! From the bytes and descriptors of a command to a [`Request`].
//!
//! What can be judged from the message alone is judged here; what depends on the device and on what
//! the client has done before, in the session.

use crate::wire::{self, Command, Header};
use crate::{IrqAction, MAX_TRANSFER_BYTES, PAGE_BYTES};
use farlane_abi::width::to_u64;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes as _, KnownLayout};

/// Why a command is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RequestError {
    /// A header that no command has.
    #[error("A command has flags {0:#x}")]
    Flags(u32),
    /// A number that the protocol does not give.
    #[error("There is no command {0}")]
    Unknown(u16),
    /// A command that only the server sends.
    #[error("{0:?} is not for the client to send")]
    Direction(Command),
    /// A command that this server does not carry out, and has not offered.
    #[error("{0:?} is not supported")]
    Unsupported(Command),
    /// Too few or too many bytes.
    #[error("{command:?} has {got} bytes, not {expected}")]
    Length {
        /// Command that was sent.
        command: Command,
        /// Bytes after the header.
        got: usize,
        /// As many as there should be; with what the message says of itself.
        expected: u64,
    },
    /// `argsz` does not fit.
    #[error("{command:?} has argsz {argsz}, not {expected} or more")]
    ArgSize {
        /// Command that was sent.
        command: Command,
        /// What it says.
        argsz: u32,
        /// What there has to be.
        expected: usize,
    },
    /// Bits or combinations that the protocol does not define.
    #[error("{command:?} has {field} {value:#x}")]
    Field {
        /// Command that was sent.
        command: Command,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// Too few or too many descriptors.
    #[error("{command:?} comes with {got} descriptors, not {expected}")]
    Descriptors {
        /// Command that was sent.
        command: Command,
        /// How many came.
        got: usize,
        /// How many may come.
        expected: u32,
    },
    /// A range that is empty, not made of pages, or wraps around.
    #[error("{size:#x} bytes at {address:#x} are no range of pages")]
    Range {
        /// Address of the first byte.
        address: u64,
        /// Length in bytes.
        size: u64,
    },
    /// More data than was agreed.
    #[error("{count} bytes are more than {MAX_TRANSFER_BYTES}")]
    Transfer {
        /// Length in bytes.
        count: u32,
    },
}

impl RequestError {
    /// What the client is told.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            Self::Unknown(_) => Errno::NOSYS,
            Self::Unsupported(_) => Errno::OPNOTSUPP,
            Self::Transfer { .. } => Errno::TOOBIG,
            _ => Errno::INVAL,
        }
    }
}

/// `VFIO_USER_DMA_MAP`.
#[derive(Debug)]
pub struct MapRequest {
    /// First address; a multiple of [`PAGE_BYTES`].
    pub address: u64,
    /// Bytes; a multiple of [`PAGE_BYTES`], not zero. `address + size` does not wrap.
    pub size: u64,
    /// The device may read.
    pub readable: bool,
    /// The device may write.
    pub writable: bool,
    /// What was sent along, and the offset in it, a multiple of [`PAGE_BYTES`]. `offset + size`
    /// does not wrap.
    pub file: Option<(OwnedFd, u64)>,
}

/// Which interrupts `VFIO_USER_DEVICE_SET_IRQS` is about.
#[derive(Debug)]
pub enum IrqData<'a> {
    /// All of them.
    None,
    /// Those whose byte is not zero; as many as there are interrupts.
    Bool(&'a [u8]),
    /// None of them any more, or each with a descriptor.
    Eventfd(Vec<OwnedFd>),
}

/// `VFIO_USER_DEVICE_SET_IRQS`.
#[derive(Debug)]
pub struct IrqsRequest<'a> {
    /// Index of the interrupt type.
    pub index: u32,
    /// The first one.
    pub start: u32,
    /// How many, with `start` at most 2^32. Zero is "disable", and comes with no data, `start` zero
    /// and [`IrqAction::Trigger`].
    pub count: u32,
    /// What happens.
    pub action: IrqAction,
    /// To which.
    pub data: IrqData<'a>,
}

/// A command that is whole and means something.
#[derive(Debug)]
pub enum Request<'a> {
    /// `VFIO_USER_VERSION`.
    Version {
        /// Proposed major version.
        major: u16,
        /// Proposed minor version.
        minor: u16,
        /// JSON text without its zero byte; empty where there is none.
        capabilities: &'a [u8],
    },
    /// `VFIO_USER_DMA_MAP`.
    DmaMap(MapRequest),
    /// `VFIO_USER_DMA_UNMAP` of one range.
    DmaUnmap {
        /// Address of the first byte.
        address: u64,
        /// Bytes; not zero.
        size: u64,
    },
    /// `VFIO_USER_DMA_UNMAP` of all ranges.
    DmaUnmapAll,
    /// `VFIO_USER_DEVICE_GET_INFO`.
    DeviceInfo,
    /// `VFIO_USER_DEVICE_GET_REGION_INFO`.
    RegionInfo {
        /// Index of the region.
        index: u32,
        /// Bytes that the client takes after the header; at least the fixed part.
        room: u32,
    },
    /// `VFIO_USER_DEVICE_GET_REGION_IO_FDS`.
    RegionIoFds {
        /// Index of the region.
        index: u32,
        /// As above.
        room: u32,
    },
    /// `VFIO_USER_DEVICE_GET_IRQ_INFO`.
    IrqInfo {
        /// Index of the interrupt type.
        index: u32,
    },
    /// `VFIO_USER_DEVICE_SET_IRQS`.
    SetIrqs(IrqsRequest<'a>),
    /// `VFIO_USER_REGION_READ`.
    RegionRead {
        /// Index of the region.
        region: u32,
        /// Offset in it.
        offset: u64,
        /// Bytes, at most [`MAX_TRANSFER_BYTES`].
        count: u32,
    },
    /// `VFIO_USER_REGION_WRITE`.
    RegionWrite {
        /// Index of the region.
        region: u32,
        /// Offset in it.
        offset: u64,
        /// The bytes, at most [`MAX_TRANSFER_BYTES`].
        data: &'a [u8],
    },
    /// `VFIO_USER_REGION_WRITE_MULTI`.
    RegionWriteMulti(Writes<'a>),
    /// `VFIO_USER_DEVICE_RESET`.
    Reset,
}

/// Several writes.
#[derive(Clone, Copy, Debug)]
pub struct Writes<'a>(&'a [u8]);

impl Writes<'_> {
    /// The writes, in order. Each has at most 8 bytes.
    pub fn iter(&self) -> impl Iterator<Item = wire::WriteOne> + '_ {
        let each = self.0.chunks_exact(size_of::<wire::WriteOne>());
        each.filter_map(|bytes| wire::WriteOne::read_from_bytes(bytes).ok())
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len() / size_of::<wire::WriteOne>()
    }
}

/// A message while it is taken apart.
struct Message<'a> {
    command: Command,
    body: &'a [u8],
    fds: Vec<OwnedFd>,
}

impl<'a> Message<'a> {
    /// A structure at the beginning, and what follows it.
    fn split<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<(T, &'a [u8]), RequestError> {
        T::read_from_prefix(self.body).map_err(|_| self.length(to_u64(size_of::<T>())))
    }

    /// A structure that is all there is.
    fn whole<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T, RequestError> {
        T::read_from_bytes(self.body).map_err(|_| self.length(to_u64(size_of::<T>())))
    }

    fn length(&self, expected: u64) -> RequestError {
        RequestError::Length {
            command: self.command,
            got: self.body.len(),
            expected,
        }
    }

    fn no_fds(&self) -> Result<(), RequestError> {
        self.fds_at_most(0)
    }

    fn fds_at_most(&self, expected: u32) -> Result<(), RequestError> {
        if u32::try_from(self.fds.len()).is_ok_and(|got| got <= expected) {
            return Ok(());
        }
        Err(self.descriptors(expected))
    }

    fn descriptors(&self, expected: u32) -> RequestError {
        RequestError::Descriptors {
            command: self.command,
            got: self.fds.len(),
            expected,
        }
    }

    /// The client takes the fixed part of the reply.
    fn room(&self, argsz: u32, expected: usize) -> Result<u32, RequestError> {
        if usize::try_from(argsz).is_ok_and(|argsz| argsz >= expected) {
            return Ok(argsz);
        }
        Err(RequestError::ArgSize {
            command: self.command,
            argsz,
            expected,
        })
    }

    /// `argsz` of commands where it tells the size of the command itself.
    fn own_size(&self, argsz: u32) -> Result<(), RequestError> {
        if usize::try_from(argsz).is_ok_and(|argsz| argsz == self.body.len()) {
            return Ok(());
        }
        Err(RequestError::ArgSize {
            command: self.command,
            argsz,
            expected: self.body.len(),
        })
    }

    /// Fields that "must be zero".
    fn zero(&self, field: &'static str, value: impl Into<u64>) -> Result<(), RequestError> {
        match value.into() {
            0 => Ok(()),
            value => Err(self.field(field, value)),
        }
    }

    fn field(&self, field: &'static str, value: impl Into<u64>) -> RequestError {
        RequestError::Field {
            command: self.command,
            field,
            value: value.into(),
        }
    }
}

/// Takes a command apart. `body` is all that follows the header; descriptors that are not in the
/// result are closed.
///
/// # Errors
/// See [`RequestError`].
pub fn parse<'a>(
    header: &Header,
    body: &'a [u8],
    fds: Vec<OwnedFd>,
) -> Result<Request<'a>, RequestError> {
    if header.flags & !wire::FLAG_NO_REPLY != wire::TYPE_COMMAND {
        return Err(RequestError::Flags(header.flags));
    }
    let command =
        Command::from_wire(header.command).ok_or(RequestError::Unknown(header.command))?;
    let message = Message { command, body, fds };
    match command {
        Command::Version => version(&message),
        Command::DmaMap => dma_map(message),
        Command::DmaUnmap => dma_unmap(&message),
        Command::DeviceGetInfo => device_info(&message),
        Command::DeviceGetRegionInfo => region_info(&message),
        Command::DeviceGetRegionIoFds => io_fds(&message),
        Command::DeviceGetIrqInfo => irq_info(&message),
        Command::DeviceSetIrqs => set_irqs(message),
        Command::RegionRead => region_read(&message),
        Command::RegionWrite => region_write(&message),
        Command::RegionWriteMulti => write_multi(&message),
        Command::DeviceReset => {
            message.no_fds()?;
            if body.is_empty() {
                Ok(Request::Reset)
            } else {
                Err(message.length(0))
            }
        }
        Command::DmaRead | Command::DmaWrite => Err(RequestError::Direction(command)),
        Command::DirtyPages
        | Command::DeviceFeature
        | Command::MigDataRead
        | Command::MigDataWrite => Err(RequestError::Unsupported(command)),
    }
}

fn version<'a>(message: &Message<'a>) -> Result<Request<'a>, RequestError> {
    message.no_fds()?;
    let (version, data) = message.split::<wire::Version>()?;
    let capabilities = match data {
        [] => data,
        [text @ .., 0] => text,
        [.., last] => return Err(message.field("last byte", *last)),
    };
    Ok(Request::Version {
        major: version.major,
        minor: version.minor,
        capabilities,
    })
}

fn check_range(address: u64, size: u64) -> Result<(), RequestError> {
    let aligned = (address | size).is_multiple_of(PAGE_BYTES);
    if size == 0 || !aligned || address.checked_add(size).is_none() {
        return Err(RequestError::Range { address, size });
    }
    Ok(())
}

fn dma_map(mut message: Message<'_>) -> Result<Request<'_>, RequestError> {
    message.fds_at_most(1)?;
    let map = message.whole::<wire::DmaMap>()?;
    message.own_size(map.argsz)?;
    let readable = map.flags & wire::DMA_READ != 0;
    let writable = map.flags & wire::DMA_WRITE != 0;
    if map.flags & !(wire::DMA_READ | wire::DMA_WRITE) != 0 || !(readable || writable) {
        return Err(message.field("flags", map.flags));
    }
    check_range(map.address, map.size)?;
    let file = match message.fds.pop() {
        Some(fd) => {
            check_range(map.offset, map.size)?;
            Some((fd, map.offset))
        }
        // "zero if the region is not mappable"
        None => {
            message.zero("offset", map.offset)?;
            None
        }
    };
    Ok(Request::DmaMap(MapRequest {
        address: map.address,
        size: map.size,
        readable,
        writable,
        file,
    }))
}

fn dma_unmap<'a>(message: &Message<'a>) -> Result<Request<'a>, RequestError> {
    message.no_fds()?;
    let unmap = message.whole::<wire::DmaUnmap>()?;
    message.room(unmap.argsz, size_of::<wire::DmaUnmap>())?;
    match unmap.flags {
        0 => {
            check_range(unmap.address, unmap.size)?;
            Ok(Request::DmaUnmap {
                address: unmap.address,
                size: unmap.size,
            })
        }
        wire::UNMAP_ALL => {
            message.zero("address", unmap.address)?;
            message.zero("size", unmap.size)?;
            Ok(Request::DmaUnmapAll)
        }
        flags => Err(message.field("flags", flags)),
    }
}

fn device_info<'a>(message: &Message<'a>) -> Result<Request<'a>, RequestError> {
    message.no_fds()?;
    let info = message.whole::<wire::DeviceInfo>()?;
    message.room(info.argsz, size_of::<wire::DeviceInfo>())?;
    message.zero("flags", info.flags)?;
    message.zero("num_regions", info.num_regions)?;
    message.zero("num_irqs", info.num_irqs)?;
    Ok(Request::DeviceInfo)
}

fn region_info<'a>(message: &Message<'a>) -> Result<Request<'a>, RequestError> {
    message.no_fds()?;
    let info = message.whole::<wire::RegionInfo>()?;
    let room = message.room(info.argsz, size_of::<wire::RegionInfo>())?;
    message.zero("flags", info.flags)?;
    message.zero("cap_offset", info.cap_offset)?;
    message.zero("size", info.size)?;
    message.zero("offset", info.offset)?;
    Ok(Request::RegionInfo {
        index: info.index,
        room,
    })
}

fn io_fds<'a>(message: &Message<'a>) -> Result<Request<'a>, RequestError> {
    message.no_fds()?;
    let info = message.whole::<wire::RegionIoFds>()?;
    let room = message.room(info.argsz, size_of::<wire::RegionIoFds>())?;
    message.zero("flags", info.flags)?;
    message.zero("count", info.count)?;
    Ok(Request::RegionIoFds {
        index: info.index,
        room,
    })
}

fn irq_info<'a>(message: &Message<'a>) -> Result<Request<'a>, RequestError> {
    message.no_fds()?;
    let info = message.whole::<wire::IrqInfo>()?;
    message.room(info.argsz, size_of::<wire::IrqInfo>())?;
    message.zero("flags", info.flags)?;
    message.zero("count", info.count)?;
    Ok(Request::IrqInfo { index: info.index })
}

fn set_irqs(message: Message<'_>) -> Result<Request<'_>, RequestError> {
    let (set, data) = message.split::<wire::IrqSet>()?;
    message.own_size(set.argsz)?;
    const ACTIONS: u32 =
        wire::IRQ_SET_ACTION_MASK | wire::IRQ_SET_ACTION_UNMASK | wire::IRQ_SET_ACTION_TRIGGER;
    let action = match set.flags & ACTIONS {
        wire::IRQ_SET_ACTION_MASK => IrqAction::Mask,
        wire::IRQ_SET_ACTION_UNMASK => IrqAction::Unmask,
        wire::IRQ_SET_ACTION_TRIGGER => IrqAction::Trigger,
        _ => return Err(message.field("flags", set.flags)),
    };
    if set.start.checked_add(set.count).is_none() {
        return Err(message.field("start", set.start));
    }
    let fixed = size_of::<wire::IrqSet>();
    let kind = set.flags & !ACTIONS;
    let data_bytes = match kind {
        wire::IRQ_SET_DATA_BOOL => u64::from(set.count),
        wire::IRQ_SET_DATA_NONE | wire::IRQ_SET_DATA_EVENTFD => 0,
        _ => return Err(message.field("flags", set.flags)),
    };
    if u64::try_from(data.len()) != Ok(data_bytes) {
        let expected = to_u64(fixed).saturating_add(data_bytes);
        return Err(message.length(expected));
    }
    if kind != wire::IRQ_SET_DATA_EVENTFD {
        message.no_fds()?;
    }
    let disable = kind == wire::IRQ_SET_DATA_NONE && action == IrqAction::Trigger && set.start == 0;
    if set.count == 0 && !disable {
        return Err(message.field("count", set.count));
    }
    let data = match kind {
        wire::IRQ_SET_DATA_BOOL => IrqData::Bool(data),
        wire::IRQ_SET_DATA_EVENTFD => {
            let got = u32::try_from(message.fds.len());
            if !message.fds.is_empty() && got != Ok(set.count) {
                return Err(message.descriptors(set.count));
            }
            IrqData::Eventfd(message.fds)
        }
        _ => IrqData::None,
    };
    Ok(Request::SetIrqs(IrqsRequest {
        index: set.index,
        start: set.start,
        count: set.count,
        action,
        data,
    }))
}

fn check_transfer(count: u32) -> Result<(), RequestError> {
    if count > MAX_TRANSFER_BYTES {
        return Err(RequestError::Transfer { count });
    }
    Ok(())
}

fn region_read<'a>(message: &Message<'a>) -> Result<Request<'a>, RequestError> {
    message.no_fds()?;
    let access = message.whole::<wire::RegionAccess>()?;
    check_transfer(access.count)?;
    Ok(Request::RegionRead {
        region: access.region,
        offset: access.offset,
        count: access.count,
    })
}

fn region_write<'a>(message: &Message<'a>) -> Result<Request<'a>, RequestError> {
    message.no_fds()?;
    let (access, data) = message.split::<wire::RegionAccess>()?;
    check_transfer(access.count)?;
    if usize::try_from(access.count) != Ok(data.len()) {
        let fixed = access.as_bytes().len();
        return Err(message.length(to_u64(fixed) + u64::from(access.count)));
    }
    Ok(Request::RegionWrite {
        region: access.region,
        offset: access.offset,
        data,
    })
}

fn write_multi<'a>(message: &Message<'a>) -> Result<Request<'a>, RequestError> {
    message.no_fds()?;
    let (multi, data) = message.split::<wire::WriteMulti>()?;
    let each = size_of::<wire::WriteOne>();
    let bytes = usize::try_from(multi.wr_cnt)
        .ok()
        .and_then(|count| count.checked_mul(each));
    if bytes != Some(data.len()) {
        let fixed = to_u64(multi.as_bytes().len());
        let each = to_u64(each);
        return Err(message.length(multi.wr_cnt.saturating_mul(each).saturating_add(fixed)));
    }
    let writes = Writes(data);
    if let Some(one) = writes.iter().find(|one| one.count > 8) {
        return Err(message.field("count", one.count));
    }
    Ok(Request::RegionWriteMulti(writes))
}

#[cfg(test)]
mod tests;
