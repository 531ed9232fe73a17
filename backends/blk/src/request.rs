//! Requests: from descriptors and bytes that a guest has written to something that is what it says.

use crate::bits::{Header, ID_BYTES, RANGE_UNMAP, SECTOR, WireRange, kind};
use farlane_abi::width::to_usize;
use farlane_block::engine::{Deallocate, Extent, Range};
use zerocopy::FromBytes as _;

/// Most ranges of one DISCARD or WRITE_ZEROES.
pub const MAX_RANGES: u32 = 32;
/// Most sectors of such a range: 2 GiB.
pub const MAX_RANGE_SECTORS: u32 = 1 << 22;
/// Bytes of a request's header.
pub const HEADER_BYTES: usize = size_of::<Header>();

/// What a disk has to know of itself to judge requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Its size in sectors.
    pub sectors: u64,
    /// Whether it cannot be written.
    pub read_only: bool,
}

/// Bytes of the disk that are read. The used ring has to say how many were written to the guest's
/// memory in 32 bits (virtio 1.2, 2.7.8), so there are not more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadExtent {
    /// First one.
    pub offset: u64,
    /// How many: whole sectors, so that the status can be counted as well.
    pub bytes: u32,
}

impl From<ReadExtent> for Extent {
    fn from(read: ReadExtent) -> Self {
        Self {
            offset: read.offset,
            bytes: read.bytes.into(),
        }
    }
}

/// A request without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Fill the guest's memory from here.
    Read(ReadExtent),
    /// Take the guest's memory there.
    Write(Extent),
    /// What has been written is to last.
    Flush,
    /// The serial number is asked for.
    GetId,
    /// Ranges, which are in the request's data, are not needed any more.
    Discard,
    /// Ranges, which are in the request's data, are to be zeroes.
    WriteZeroes,
}

impl Request {
    /// Its type (virtio 1.2, 5.2.6).
    #[must_use]
    pub fn kind(&self) -> u32 {
        match self {
            Self::Read(_) => kind::IN,
            Self::Write(_) => kind::OUT,
            Self::Flush => kind::FLUSH,
            Self::GetId => kind::GET_ID,
            Self::Discard => kind::DISCARD,
            Self::WriteZeroes => kind::WRITE_ZEROES,
        }
    }

    /// Bytes that it reads or writes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Read(extent) => extent.bytes.into(),
            Self::Write(extent) => extent.bytes,
            Self::Flush | Self::GetId | Self::Discard | Self::WriteZeroes => 0,
        }
    }
}

/// Why a request is answered with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// There is no such request.
    #[error("Requests of type {0} are not known")]
    Unknown(u32),
    /// Not a number of whole sectors.
    #[error("{0} bytes of data are not whole sectors")]
    Length(u64),
    /// More than a driver may ask for (virtio 1.2, 2.7.5.2).
    #[error("{0} bytes are too many for one buffer")]
    TooLong(u64),
    /// Beyond the end.
    #[error("{bytes} bytes at sector {sector} are not all on the disk")]
    Beyond {
        /// First sector.
        sector: u64,
        /// Bytes.
        bytes: u64,
    },
    /// The disk is read-only.
    #[error("The disk is read-only")]
    ReadOnly,
    /// A range has flags that it must not have.
    #[error("A range has the flags {0:#x}")]
    Flags(u32),
    /// Too many ranges, too long ones, or none.
    #[error("{0} bytes of ranges")]
    Ranges(u64),
}

impl Limits {
    fn extent(&self, sector: u64, bytes: u64) -> Result<Extent, RequestError> {
        let beyond = RequestError::Beyond { sector, bytes };
        if !bytes.is_multiple_of(SECTOR) {
            return Err(RequestError::Length(bytes));
        }
        let end = sector.checked_add(bytes / SECTOR).ok_or(beyond)?;
        if end > self.sectors {
            return Err(beyond);
        }
        // In bytes it fits: a disk's size does.
        let offset = sector.checked_mul(SECTOR).ok_or(beyond)?;
        Ok(Extent { offset, bytes })
    }

    fn read_extent(&self, sector: u64, bytes: u64) -> Result<ReadExtent, RequestError> {
        let Extent { offset, bytes } = self.extent(sector, bytes)?;
        let bytes = u32::try_from(bytes).map_err(|_| RequestError::TooLong(bytes))?;
        Ok(ReadExtent { offset, bytes })
    }

    fn writable(&self) -> Result<(), RequestError> {
        if self.read_only {
            return Err(RequestError::ReadOnly);
        }
        Ok(())
    }
}

/// Reads a header. `readable` are the bytes of data that the guest gives, `writable` those that it
/// wants, the status not among them.
///
/// # Errors
/// See [`RequestError`].
pub fn parse(
    header: &[u8; HEADER_BYTES],
    readable: u64,
    writable: u64,
    limits: Limits,
) -> Result<Request, RequestError> {
    let Ok(header) = Header::read_from_bytes(header) else {
        return Err(RequestError::Unknown(u32::MAX));
    };
    let sector = header.sector.get();
    match header.kind.get() {
        kind::IN => Ok(Request::Read(limits.read_extent(sector, writable)?)),
        kind::OUT => {
            limits.writable()?;
            Ok(Request::Write(limits.extent(sector, readable)?))
        }
        kind::FLUSH => Ok(Request::Flush),
        kind::GET_ID => match writable {
            // Virtio 1.2, 5.2.6: exactly so many bytes.
            n if usize::try_from(n).is_ok_and(|n| n >= ID_BYTES) => Ok(Request::GetId),
            n => Err(RequestError::Length(n)),
        },
        kind::DISCARD => ranges(readable, limits).map(|()| Request::Discard),
        kind::WRITE_ZEROES => ranges(readable, limits).map(|()| Request::WriteZeroes),
        other => Err(RequestError::Unknown(other)),
    }
}

fn ranges(readable: u64, limits: Limits) -> Result<(), RequestError> {
    limits.writable()?;
    let most = size_of::<WireRange>() * to_usize(MAX_RANGES.into());
    let length = to_usize(readable);
    if length == 0 || !length.is_multiple_of(size_of::<WireRange>()) || length > most {
        return Err(RequestError::Ranges(readable));
    }
    Ok(())
}

/// Reads the ranges of a DISCARD or WRITE_ZEROES.
///
/// # Errors
/// See [`RequestError`].
pub fn parse_ranges(
    request: Request,
    data: &[u8],
    limits: Limits,
) -> Result<Vec<Range>, RequestError> {
    let chunks = data.chunks_exact(size_of::<WireRange>());
    let parsed = chunks.map(|chunk| {
        let Ok(range) = WireRange::read_from_bytes(chunk) else {
            return Err(RequestError::Ranges(0));
        };
        let flags = range.flags.get();
        // 5.2.6.2: the unmap flag of a DISCARD is an error.
        let known = match request {
            Request::WriteZeroes => RANGE_UNMAP,
            _ => 0,
        };
        if flags & !known != 0 {
            return Err(RequestError::Flags(flags));
        }
        let sectors = range.sectors.get();
        if sectors > MAX_RANGE_SECTORS {
            return Err(RequestError::Ranges(u64::from(sectors) * SECTOR));
        }
        Ok(Range {
            extent: limits.extent(range.sector.get(), u64::from(sectors) * SECTOR)?,
            deallocate: if flags & RANGE_UNMAP != 0 {
                Deallocate::Preferred
            } else {
                Deallocate::Never
            },
        })
    });
    parsed.collect()
}

#[cfg(test)]
mod tests;
