//! Where the data of a command lies: physical region pages and scatter gather lists (NVMe 1.4,
//! 4.3 and 4.4).

use crate::bits::{PAGE, Status};
use farlane_abi::width::to_usize;
use farlane_pci::{DmaSpace, DmaView};

/// Most descriptors of one scatter gather list that are followed.
const MAX_DESCRIPTORS: usize = 4096;
const DESCRIPTOR_BYTES: usize = 16;
/// Most descriptors that are read at once.
const DESCRIPTORS_AT_ONCE: u32 = 64;

/// It cannot be reached (from here).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreachable;

/// Memory of the guest.
pub trait GuestMemory {
    /// Copies from it.
    ///
    /// # Errors
    /// Not all of it can be read from here.
    fn read(&self, address: u64, data: &mut [u8]) -> Result<(), Unreachable>;

    /// Copies to it.
    ///
    /// # Errors
    /// Not all of it can be written from here.
    fn write(&self, address: u64, data: &[u8]) -> Result<(), Unreachable>;
}

impl GuestMemory for DmaView {
    fn read(&self, address: u64, data: &mut [u8]) -> Result<(), Unreachable> {
        Self::read(self, address, data).map_err(|_| Unreachable)
    }

    fn write(&self, address: u64, data: &[u8]) -> Result<(), Unreachable> {
        Self::write(self, address, data).map_err(|_| Unreachable)
    }
}

impl GuestMemory for DmaSpace {
    fn read(&self, address: u64, data: &mut [u8]) -> Result<(), Unreachable> {
        Self::read(self, address, data)
            .map_err(|e| log::debug!("{e}"))
            .map_err(|()| Unreachable)
    }

    fn write(&self, address: u64, data: &[u8]) -> Result<(), Unreachable> {
        Self::write(self, address, data)
            .map_err(|e| log::debug!("{e}"))
            .map_err(|()| Unreachable)
    }
}

/// The data pointer of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPointer {
    /// Two physical region page entries.
    Prp(u64, u64),
    /// One descriptor of a scatter gather list.
    Sgl([u8; DESCRIPTOR_BYTES]),
}

/// What a data pointer describes (NVMe 1.4, 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataBuffer {
    /// Where the controller reads data, of a Write for example.
    Source,
    /// Where it writes data, of a Read for example.
    Destination,
}

/// Some bytes of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where; nowhere if the bytes are to be discarded (a bit bucket), of a destination.
    pub address: Option<u64>,
    /// Bytes, not zero.
    pub length: u64,
}

/// Why the data of a command cannot be located.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkError {
    /// It is wrong.
    Status(Status),
    /// A list cannot be reached.
    Unreachable,
}

impl From<Status> for WalkError {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl From<Unreachable> for WalkError {
    fn from(_: Unreachable) -> Self {
        Self::Unreachable
    }
}

/// Appends, as a part of the segment before where it continues that.
fn append(segments: &mut Vec<Segment>, address: Option<u64>, length: u64) {
    if length == 0 {
        return;
    }
    if let Some(last) = segments.last_mut()
        && let (Some(before), Some(address)) = (last.address, address)
        && before.checked_add(last.length) == Some(address)
    {
        last.length += length;
        return;
    }
    segments.push(Segment { address, length });
}

impl DataPointer {
    /// Appends the segments of `buffer` that hold `length` bytes of data to `segments`, which is
    /// empty.
    ///
    /// # Errors
    /// See [`WalkError`]. Some segments may have been appended.
    pub fn walk<M: GuestMemory>(
        &self,
        buffer: DataBuffer,
        length: u64,
        memory: &M,
        segments: &mut Vec<Segment>,
    ) -> Result<(), WalkError> {
        match *self {
            Self::Prp(first, second) => walk_prp(first, second, length, memory, segments),
            Self::Sgl(descriptor) => walk_sgl(descriptor, buffer, length, memory, segments),
        }
    }
}

/// NVMe 1.4, 4.3: the first entry may have an offset; the second is the second page or, if more
/// than that remains, a list, whose last entry in a page is another list if more remains.
fn walk_prp<M: GuestMemory>(
    first: u64,
    second: u64,
    length: u64,
    memory: &M,
    segments: &mut Vec<Segment>,
) -> Result<(), WalkError> {
    if !first.is_multiple_of(4) {
        return Err(Status::INVALID_PRP_OFFSET.into());
    }
    let here = length.min(PAGE - first % PAGE);
    append(segments, Some(first), here);
    let mut rest = length - here;
    if rest == 0 {
        return Ok(());
    }
    if rest <= PAGE {
        if !second.is_multiple_of(PAGE) {
            return Err(Status::INVALID_PRP_OFFSET.into());
        }
        append(segments, Some(second), rest);
        return Ok(());
    }
    let mut list = second;
    let mut buffer = [0_u8; 4096];
    loop {
        if !list.is_multiple_of(8) {
            return Err(Status::INVALID_PRP_OFFSET.into());
        }
        let slots = (PAGE - list % PAGE) / 8;
        let wanted = rest.div_ceil(PAGE).min(slots);
        let bytes = to_usize(wanted * 8);
        let entries = buffer.get_mut(..bytes).ok_or(Unreachable)?;
        memory.read(list, entries)?;
        let mut last = 0;
        for (slot, entry) in (1..=wanted).zip(entries.as_chunks().0) {
            let entry = u64::from_le_bytes(*entry);
            if slot == slots && rest > PAGE {
                last = entry;
                break;
            }
            if !entry.is_multiple_of(PAGE) {
                return Err(Status::INVALID_PRP_OFFSET.into());
            }
            let here = rest.min(PAGE);
            append(segments, Some(entry), here);
            rest -= here;
        }
        if rest == 0 {
            return Ok(());
        }
        // Only the first list may begin inside of a page: each further one then holds at least
        // one page of data, and the walk ends.
        if !last.is_multiple_of(PAGE) {
            return Err(Status::INVALID_PRP_OFFSET.into());
        }
        list = last;
    }
}

/// Scatter gather list descriptor types (figure 114).
const DATA_BLOCK: u8 = 0;
const BIT_BUCKET: u8 = 1;
const SEGMENT: u8 = 2;
const LAST_SEGMENT: u8 = 3;

struct Descriptor {
    address: u64,
    length: u32,
    kind: u8,
}

impl Descriptor {
    fn parse(bytes: &[u8]) -> Result<Self, Status> {
        let (address, rest) = bytes
            .split_first_chunk()
            .ok_or(Status::INVALID_SGL_SEGMENT)?;
        let (length, rest) = rest
            .split_first_chunk()
            .ok_or(Status::INVALID_SGL_SEGMENT)?;
        let id = rest.last().copied().unwrap_or(0xff);
        // Addresses only: no offsets, no keys (4.4.1, sub type).
        if id & 0xf != 0 {
            return Err(Status::INVALID_SGL_TYPE);
        }
        Ok(Self {
            address: u64::from_le_bytes(*address),
            length: u32::from_le_bytes(*length),
            kind: id >> 4,
        })
    }
}

/// The list as far as it has been followed.
struct Walk<'a> {
    buffer: DataBuffer,
    rest: u64,
    followed: usize,
    segments: &'a mut Vec<Segment>,
}

impl Walk<'_> {
    /// Takes a descriptor; returns the segment of descriptors that it points at.
    fn take(&mut self, bytes: &[u8], is_last: bool) -> Result<Option<Descriptor>, WalkError> {
        self.followed += 1;
        if self.followed > MAX_DESCRIPTORS {
            return Err(Status::INVALID_SGL_COUNT.into());
        }
        let descriptor = Descriptor::parse(bytes)?;
        let length = u64::from(descriptor.length);
        match descriptor.kind {
            // As if its length were zero (figure 115).
            BIT_BUCKET if self.buffer == DataBuffer::Source => Ok(None),
            DATA_BLOCK | BIT_BUCKET => {
                let address = (descriptor.kind == DATA_BLOCK).then_some(descriptor.address);
                if address.is_some_and(|a| a.checked_add(length).is_none()) {
                    return Err(Status::DATA_TRANSFER_ERROR.into());
                }
                // A list may be longer than the data.
                let here = length.min(self.rest);
                append(self.segments, address, here);
                self.rest -= here;
                Ok(None)
            }
            SEGMENT | LAST_SEGMENT if is_last => {
                let whole = descriptor.length.is_multiple_of(16) && descriptor.length > 0;
                if !whole || descriptor.address.checked_add(length).is_none() {
                    return Err(Status::INVALID_SGL_SEGMENT.into());
                }
                Ok(Some(descriptor))
            }
            SEGMENT | LAST_SEGMENT => Err(Status::INVALID_SGL_SEGMENT.into()),
            _ => Err(Status::INVALID_SGL_TYPE.into()),
        }
    }
}

fn walk_sgl<M: GuestMemory>(
    first: [u8; DESCRIPTOR_BYTES],
    buffer: DataBuffer,
    length: u64,
    memory: &M,
    segments: &mut Vec<Segment>,
) -> Result<(), WalkError> {
    let mut walk = Walk {
        buffer,
        rest: length,
        followed: 0,
        segments,
    };
    let mut next = walk.take(&first, true)?;
    let mut descriptors = [0_u8; DESCRIPTOR_BYTES * 64];
    while let Some(segment) = next.take() {
        let mut left = segment.length / 16;
        let mut at = segment.address;
        while left > 0 && walk.rest > 0 {
            let count = left.min(DESCRIPTORS_AT_ONCE);
            let bytes = to_usize(u64::from(count) * 16);
            let part = descriptors.get_mut(..bytes).ok_or(Unreachable)?;
            memory.read(at, part)?;
            at = at.wrapping_add(u64::from(count) * 16);
            for descriptor in part.chunks_exact(DESCRIPTOR_BYTES) {
                left -= 1;
                if walk.rest > 0 {
                    let is_last = left == 0 && segment.kind == SEGMENT;
                    next = walk.take(descriptor, is_last)?;
                }
            }
        }
        if walk.rest == 0 {
            return Ok(());
        }
    }
    if walk.rest > 0 {
        return Err(Status::INVALID_SGL_LENGTH.into());
    }
    Ok(())
}

/// Copies the bytes of `segments` into `data`, which is as long as they are.
///
/// # Errors
/// Not all of them can be read from here.
pub fn gather<M: GuestMemory>(
    memory: &M,
    segments: &[Segment],
    data: &mut [u8],
) -> Result<(), Unreachable> {
    let mut rest = data;
    for segment in segments {
        let length = usize::try_from(segment.length).map_err(|_| Unreachable)?;
        let (part, after) = rest.split_at_mut_checked(length).ok_or(Unreachable)?;
        memory.read(segment.address.ok_or(Unreachable)?, part)?;
        rest = after;
    }
    Ok(())
}

/// Copies `data` to where `segments` are, which together are at least as long.
///
/// # Errors
/// Not all of them can be written from here; a part may have been.
pub fn scatter<M: GuestMemory>(
    memory: &M,
    segments: &[Segment],
    data: &[u8],
) -> Result<(), Unreachable> {
    let mut rest = data;
    for segment in segments {
        let length = usize::try_from(segment.length).map_err(|_| Unreachable)?;
        let (part, after) = rest.split_at(length.min(rest.len()));
        if let Some(address) = segment.address
            && !part.is_empty()
        {
            memory.write(address, part)?;
        }
        rest = after;
    }
    Ok(())
}

#[cfg(test)]
#[path = "data_tests.rs"]
mod tests;
