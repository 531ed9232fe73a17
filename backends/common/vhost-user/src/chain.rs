//! Chains of descriptors (virtio 1.2, 2.7.5): which guest memory a buffer is made of.

use crate::bits::{Descriptor, desc};
use crate::segment::Segment;
use crate::vring::Rings;
use farlane_zero_copy::AddressSpaceError;
use thiserror::Error;
use zerocopy::FromZeros as _;
use zerocopy::IntoBytes as _;

/// Most segments of one buffer.
pub const MAX_SEGMENTS: usize = 1026;
/// Descriptors of an indirect table that are read at once.
const AT_ONCE: usize = 32;

/// Why a chain cannot be followed. The queue is of no use then.
#[derive(Debug, Error)]
pub enum ChainError {
    /// A descriptor that is not in its table.
    #[error("A chain leads to descriptor {0}, which is not there")]
    Index(u16),
    /// It does not end.
    #[error("A chain of more than {0} descriptors")]
    Endless(usize),
    /// Memory to be read after memory to be written.
    #[error("A descriptor to be read follows one to be written")]
    Order,
    /// An indirect table that is none.
    #[error("An indirect table of {bytes} bytes with the flags {flags:#x}")]
    Table {
        /// Its length.
        bytes: u32,
        /// Its descriptor's flags.
        flags: u16,
    },
    /// A table that is not in memory.
    #[error(transparent)]
    Memory(#[from] AddressSpaceError),
}

/// What a buffer is made of.
#[derive(Debug, Default)]
pub struct Chain {
    /// Memory that the device reads; none is empty.
    pub readable: Vec<Segment>,
    /// Memory that it writes; none is empty.
    pub writable: Vec<Segment>,
}

impl Chain {
    /// Follows the chain that begins at descriptor `head`. What was known of another is forgotten.
    ///
    /// # Errors
    /// See [`ChainError`].
    pub fn follow(&mut self, rings: &Rings, head: u16) -> Result<(), ChainError> {
        self.readable.clear();
        self.writable.clear();
        let mut index = head;
        for _ in 0..rings.size() {
            let descriptor = rings.descriptor(index).ok_or(ChainError::Index(index))?;
            let flags = descriptor.flags.get();
            if flags & desc::INDIRECT != 0 {
                // 2.7.5.3.1: it is the last one.
                if flags & desc::NEXT != 0 {
                    let bytes = descriptor.length.get();
                    return Err(ChainError::Table { bytes, flags });
                }
                return self.follow_table(rings, &descriptor);
            }
            self.add(&descriptor)?;
            if flags & desc::NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next.get();
        }
        Err(ChainError::Endless(usize::from(rings.size())))
    }

    fn follow_table(&mut self, rings: &Rings, table: &Descriptor) -> Result<(), ChainError> {
        let (bytes, flags) = (table.length.get(), table.flags.get());
        let count = u16::try_from(bytes / 16).ok();
        let count = count.filter(|&count| count > 0 && bytes.is_multiple_of(16));
        let count = count.ok_or(ChainError::Table { bytes, flags })?;
        let mut window = [Descriptor::new_zeroed(); AT_ONCE];
        // Indices of the descriptors in the window. Drivers lay chains out one after the other.
        let mut first = 0;
        let mut end = 0;
        let mut index: u16 = 0;
        for _ in 0..usize::from(count).min(MAX_SEGMENTS) {
            if index >= count {
                return Err(ChainError::Index(index));
            }
            let at = usize::from(index);
            if !(first..end).contains(&at) {
                let fit = usize::from(count - index).min(AT_ONCE);
                let part = window.get_mut(..fit).unwrap_or_default();
                let address = table.address.get().wrapping_add(u64::from(index) * 16);
                (first, end) = (at, at + part.len());
                rings.view().read(address, part.as_mut_bytes())?;
            }
            let descriptor = window.get(at - first).copied();
            let descriptor = descriptor.ok_or(ChainError::Index(index))?;
            let flags = descriptor.flags.get();
            if flags & desc::INDIRECT != 0 {
                let bytes = descriptor.length.get();
                return Err(ChainError::Table { bytes, flags });
            }
            self.add(&descriptor)?;
            if flags & desc::NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next.get();
        }
        Err(ChainError::Endless(MAX_SEGMENTS))
    }

    fn add(&mut self, descriptor: &Descriptor) -> Result<(), ChainError> {
        let segment = Segment {
            address: descriptor.address.get(),
            bytes: descriptor.length.get().into(),
        };
        let is_writable = descriptor.flags.get() & desc::WRITE != 0;
        if !is_writable && !self.writable.is_empty() {
            return Err(ChainError::Order);
        }
        if segment.bytes > 0 {
            if is_writable {
                self.writable.push(segment);
            } else {
                self.readable.push(segment);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
