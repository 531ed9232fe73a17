//! From what the device says to the bytes and descriptors of a reply.

use crate::wire::{self, Command, HEADER_BYTES, Header};
use crate::{IoFd, IoFdKind, MAX_AREAS, MapArea, PAGE_BYTES, RegionInfo};
use farlane_abi::width::size_u32;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thiserror::Error;
use zerocopy::{Immutable, IntoBytes};

/// What a device has said and should not have.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DeviceError {
    /// Areas that are not in the region, not made of pages, or overlap.
    #[error("Region {region} of {size:#x} bytes has no area of {length:#x} bytes at {offset:#x}")]
    Area {
        /// Index of the region.
        region: u32,
        /// Its size in bytes.
        size: u64,
        /// Offset of the area.
        offset: u64,
        /// Its bytes.
        length: u64,
    },
    /// Areas that cannot be described by one offset.
    #[error("Areas of region {0} have different offsets in their files")]
    FileOffset(u32),
    /// More than a reply has room for.
    #[error("Region {0} has too many areas")]
    Count(u32),
}

/// A reply as it is sent.
#[derive(Debug, Default)]
pub struct Reply {
    /// Header and body.
    pub bytes: Vec<u8>,
    /// Descriptors.
    pub fds: Vec<Arc<OwnedFd>>,
}

impl Reply {
    /// Begins anew: a reply without body.
    pub(crate) fn start(&mut self) {
        self.bytes.clear();
        self.fds.clear();
        self.bytes.resize(HEADER_BYTES, 0);
    }

    /// Appends a structure.
    pub(crate) fn push<T: IntoBytes + Immutable>(&mut self, part: &T) {
        self.bytes.extend_from_slice(part.as_bytes());
    }

    /// Appends bytes, which are zero until they are filled.
    pub(crate) fn reserve(&mut self, count: usize) -> &mut [u8] {
        let start = self.bytes.len();
        self.bytes.resize(start + count, 0);
        &mut self.bytes[start..]
    }

    /// Fills in the header of the reply to `command`. An error has no body.
    pub(crate) fn finish(&mut self, command: &Header, result: Result<(), Errno>) {
        // Replies are not longer than what the client has asked for, some megabytes.
        let size =
            result.and_then(|()| u32::try_from(self.bytes.len()).map_err(|_| Errno::MSGSIZE));
        if size.is_err() {
            self.start();
        }
        let error = size.err();
        let header = Header {
            id: command.id,
            command: command.command,
            size: size.unwrap_or(size_u32::<Header>()),
            flags: wire::TYPE_REPLY | error.map_or(0, |_| wire::FLAG_ERROR),
            error: error.map_or(0, |error| error.raw_os_error().unsigned_abs()),
        };
        self.bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
    }
}

/// The reply to `VFIO_USER_DEVICE_GET_REGION_INFO`, to a client that takes `room` bytes of body and
/// `max_fds` descriptors.
///
/// # Errors
/// The device has described the region wrongly.
pub fn region_info(
    reply: &mut Reply,
    index: u32,
    info: &RegionInfo,
    room: u32,
    max_fds: usize,
) -> Result<(), DeviceError> {
    let mut fixed = wire::RegionInfo {
        index,
        size: info.size,
        ..Default::default()
    };
    if info.readable {
        fixed.flags |= wire::REGION_READ;
    }
    if info.writable {
        fixed.flags |= wire::REGION_WRITE;
    }
    check_areas(index, info)?;
    let mut areas = &info.areas[..];
    let one_file = areas
        .windows(2)
        .all(|w| Arc::ptr_eq(&w[0].file, &w[1].file));
    if !one_file || max_fds == 0 {
        // One descriptor for each, as libvfio-user and SPDK have it.
        areas = &areas[..areas.len().min(max_fds)];
    }
    let fixed_bytes = size_of::<wire::RegionInfo>();
    let mut total = fixed_bytes;
    if let Some(first) = areas.first() {
        fixed.flags |= wire::REGION_MMAP | wire::REGION_CAPS;
        fixed.offset = first.file_offset - first.offset;
        fixed.cap_offset = u32::try_from(fixed_bytes).map_err(|_| DeviceError::Count(index))?;
        total += size_of::<wire::SparseMmap>() + areas.len() * size_of::<wire::SparseArea>();
    }
    fixed.argsz = u32::try_from(total).map_err(|_| DeviceError::Count(index))?;
    if fixed.argsz > room {
        // The client asks again with more room. Nothing is found at an offset that is not there,
        // and QEMU 11.1 refuses capabilities that are announced without one.
        fixed.flags &= !wire::REGION_CAPS;
        fixed.cap_offset = 0;
        reply.push(&fixed);
        return Ok(());
    }
    reply.push(&fixed);
    if areas.is_empty() {
        return Ok(());
    }
    let count = u32::try_from(areas.len()).map_err(|_| DeviceError::Count(index))?;
    push_sparse_mmap(reply, areas, count);
    let files = if one_file { &areas[..1] } else { areas };
    reply
        .fds
        .extend(files.iter().map(|area| Arc::clone(&area.file)));
    Ok(())
}

/// The capability that says which areas can be mapped.
fn push_sparse_mmap(reply: &mut Reply, areas: &[MapArea], nr_areas: u32) {
    reply.push(&wire::SparseMmap {
        header: wire::CapHeader {
            id: wire::CAP_SPARSE_MMAP,
            version: 1,
            next: 0,
        },
        nr_areas,
        reserved: 0,
    });
    for area in areas {
        reply.push(&wire::SparseArea {
            offset: area.offset,
            size: area.size,
        });
    }
}

fn check_areas(index: u32, info: &RegionInfo) -> Result<(), DeviceError> {
    if info.areas.len() > MAX_AREAS {
        return Err(DeviceError::Count(index));
    }
    let base = info
        .areas
        .first()
        .and_then(|first| first.file_offset.checked_sub(first.offset));
    for (number, area) in info.areas.iter().enumerate() {
        let end = area.offset.checked_add(area.size);
        let overlaps = |other: &crate::MapArea| {
            area.offset < other.offset.saturating_add(other.size)
                && other.offset < area.offset.saturating_add(area.size)
        };
        let bad = area.size == 0
            || !(area.offset | area.size).is_multiple_of(PAGE_BYTES)
            || end.is_none_or(|end| end > info.size)
            || info.areas[..number].iter().any(overlaps);
        if bad {
            return Err(DeviceError::Area {
                region: index,
                size: info.size,
                offset: area.offset,
                length: area.size,
            });
        }
        if base.is_none() || area.file_offset.checked_sub(area.offset) != base {
            return Err(DeviceError::FileOffset(index));
        }
    }
    Ok(())
}

/// The reply to `VFIO_USER_DEVICE_GET_REGION_IO_FDS`, as above. `size` is the region's.
///
/// # Errors
/// The device has described the region wrongly.
pub fn io_fds(
    reply: &mut Reply,
    index: u32,
    size: u64,
    parts: &[IoFd],
    room: u32,
    max_fds: usize,
) -> Result<(), DeviceError> {
    let mut fds: Vec<Arc<OwnedFd>> = Vec::new();
    let mut entries = Vec::new();
    for part in parts {
        if part
            .offset
            .checked_add(part.size)
            .is_none_or(|end| end > size)
            || part.offset >= size
        {
            return Err(DeviceError::Area {
                region: index,
                size,
                offset: part.offset,
                length: part.size,
            });
        }
        let known = fds.iter().position(|fd| Arc::ptr_eq(fd, &part.fd));
        let fd_index = known.unwrap_or(fds.len());
        if fd_index == fds.len() {
            if fds.len() >= max_fds {
                // The client sends messages for what it has no descriptor for.
                continue;
            }
            fds.push(Arc::clone(&part.fd));
        }
        let mut entry = io_fd(part);
        entry.fd_index = u32::try_from(fd_index).map_err(|_| DeviceError::Count(index))?;
        entries.push(entry);
    }
    let total = size_of::<wire::RegionIoFds>() + entries.len() * size_of::<wire::IoFd>();
    let argsz = u32::try_from(total).map_err(|_| DeviceError::Count(index))?;
    reply.push(&wire::RegionIoFds {
        argsz,
        flags: 0,
        index,
        count: u32::try_from(entries.len()).map_err(|_| DeviceError::Count(index))?,
    });
    if argsz <= room {
        for entry in &entries {
            reply.push(entry);
        }
        reply.fds = fds;
    }
    Ok(())
}

fn io_fd(part: &IoFd) -> wire::IoFd {
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    let (kind, flags, value) = match part.kind {
        IoFdKind::Eventfd { datamatch, ports } => (
            wire::IO_FD_IOEVENTFD,
            flag(datamatch.is_some(), wire::IOEVENTFD_DATAMATCH) | flag(ports, wire::IOEVENTFD_PIO),
            datamatch.unwrap_or(0),
        ),
        IoFdKind::Region {
            ports,
            posted_writes,
            user_data,
        } => (
            wire::IO_FD_IOREGIONFD,
            flag(ports, wire::IOREGION_PIO) | flag(posted_writes, wire::IOREGION_POSTED_WRITES),
            user_data,
        ),
    };
    wire::IoFd {
        offset: part.offset,
        size: part.size,
        fd_index: 0,
        kind,
        flags,
        padding: 0,
        value,
    }
}

/// The reply to a version proposal. `capabilities` ends with a zero byte.
pub fn version(reply: &mut Reply, minor: u16, capabilities: &[u8]) {
    reply.push(&wire::Version {
        major: wire::MAJOR,
        minor,
    });
    reply.bytes.extend_from_slice(capabilities);
}

/// Names a command for a log.
pub fn name(header: &Header) -> String {
    match Command::from_wire(header.command) {
        Some(command) => format!("{command:?}"),
        None => format!("command {}", header.command),
    }
}
