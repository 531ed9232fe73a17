//! Registered buffers.

use crate::memory_file::{self, MemoryFileError, Source};
use crate::placement::Given;
use crate::registration::{Access, Gates, Memory, Piece, Registration};
use crate::topology::{Node, Topology};
use crate::{AddressSpace, AddressSpaceError, Mapping, MappingError};
use crate::{PoolBuffer, Process, SharedFiles, SharedMemory};
use farlane_abi::PAGE_BYTES;
use farlane_abi::width::to_usize;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use thiserror::Error;

/// Largest number of extents that [`Region::stitch`] maps one by one. The kernel limits mappings
/// of a process (`vm.max_map_count`, 65530 unless changed).
const MAX_STITCHED_EXTENTS: usize = 8192;
/// Extents whose nodes are asked for between two moments at which the region can be revoked.
const PIECES_AT_ONCE: usize = 1024;

/// Why a region could not be made or reached.
#[derive(Debug, Error)]
pub enum RegionError {
    /// No bytes.
    #[error("A region of no bytes")]
    Empty,
    /// Addresses that wrap around.
    #[error("{length:#x} bytes at {address:#x} wrap around")]
    Wraps {
        /// First byte.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// A guest address without memory.
    #[error(transparent)]
    Space(#[from] AddressSpaceError),
    /// A file that must not be mapped.
    #[error("The file of a region cannot be used")]
    File(#[from] MemoryFileError),
    /// The file could become shorter than the region.
    #[error("The file behind a region of {length:#x} bytes can shrink")]
    Shrinks {
        /// Bytes of the region.
        length: u64,
    },
    /// The pages of the file are those of hugetlbfs, of which there may be none when needed.
    #[error("The file behind a region has huge pages")]
    HugePages,
    /// The file has holes.
    #[error("The file behind a region has not all its pages")]
    Sparse,
    /// The region cannot be one mapping: its extents do not meet at page boundaries, or are too
    /// many, or its memory belongs to a process.
    #[error("A region of {extents} extents cannot be one mapping")]
    NotContiguous {
        /// Number of extents.
        extents: usize,
    },
    /// Bytes beyond the end.
    #[error("{length:#x} bytes at {offset:#x} end beyond the region's {size:#x}")]
    Bounds {
        /// Offset in the region.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Bytes of the region.
        size: u64,
    },
    /// Bytes for which there is no memory.
    #[error("{length:#x} bytes at {offset:#x} of the region are not memory")]
    Gap {
        /// Offset in the region.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// A write to a region that is not writable.
    #[error("The region is not writable")]
    ReadOnly,
    /// The region was revoked.
    #[error("The region is gone")]
    Revoked,
    /// A word of an atomic operation that lies across others, or in several extents.
    #[error("No word of 8 bytes begins at {address:#x}")]
    Misaligned {
        /// Where it begins.
        address: u64,
    },
    /// A word of an atomic operation that somebody else operates on. It may be tried again.
    #[error("A word of the region is in use")]
    Busy,
    /// A mapping failed.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The system failed.
    #[error("Cannot examine the file of a region")]
    Io(#[from] std::io::Error),
}

/// A registered buffer of a guest application or a host process: a list of extents, plus rights.
///
/// Cloning gives another handle to the same buffer.
#[derive(Clone, Debug)]
pub struct Region {
    inner: Arc<Registration>,
}

/// Whether there is memory for all of these bytes of a region with gaps.
#[cold]
fn has_memory(gates: &Gates<'_>, offset: u64, length: u64) -> Result<(), RegionError> {
    match gates.memory().covers(offset, length) {
        true => Ok(()),
        false => Err(RegionError::Gap { offset, length }),
    }
}

impl Region {
    pub(crate) fn new(memory: Memory, length: u64, writable: bool) -> Self {
        Self {
            inner: Registration::new(memory, length, writable),
        }
    }

    /// A region of the same memory with an end of its own: to [revoke](Self::revoke) it leaves
    /// other handles to this one as they are, to revoke those ends both. Where there is no other
    /// handle that is this one itself, which then lets its memory go when it ends.
    #[must_use]
    pub fn share(self) -> Self {
        if Arc::strong_count(&self.inner) == 1 {
            return self;
        }
        Self {
            inner: self.inner.share(),
        }
    }

    /// A buffer of a VM: runs of guest-physical memory as (address, length in bytes), in the
    /// buffer's order, exact to the byte.
    ///
    /// # Errors
    /// No bytes, or addresses without memory behind them.
    pub fn from_guest(
        space: &AddressSpace,
        extents: &[(u64, u64)],
        writable: bool,
    ) -> Result<Self, RegionError> {
        let mut pieces = Vec::with_capacity(extents.len());
        let mut start = 0u64;
        let snapshot = space.snapshot();
        for &(address, length) in extents {
            let mut guest = address;
            snapshot.resolve(address, length, |range, offset, run| {
                pieces.push(Piece {
                    start,
                    length: run,
                    guest: Some(guest),
                    offset,
                    mapping: Arc::clone(&range.mapping),
                    file: Arc::clone(&range.file),
                    file_offset: range.file_offset + offset as u64,
                });
                start += run;
                guest += run;
            })?;
        }
        if pieces.is_empty() {
            return Err(RegionError::Empty);
        }
        let region = Self::new(Memory::Mapped(pieces), start, writable);
        snapshot.attach(extents, &region.inner)?;
        Ok(region)
    }

    /// All memory that a VM has, also what comes later: the offset of a byte is its guest-physical
    /// address. Where there is no memory, or none any more, nothing is reached.
    ///
    /// # Errors
    /// [`RegionError::Empty`] where there is none now.
    pub fn all_of_guest(space: &AddressSpace, writable: bool) -> Result<Self, RegionError> {
        let region = Self {
            inner: Registration::following(writable),
        };
        space.lead(&region.inner);
        match region.extents() {
            0 => Err(RegionError::Empty),
            _ => Ok(region),
        }
    }

    /// The first `length` bytes of a memfd that somebody else made. It must be sealed against
    /// shrinking, so that touching it never faults.
    ///
    /// # Errors
    /// See [`RegionError::File`], [`RegionError::Shrinks`] and [`RegionError::HugePages`]; what
    /// `mmap` says.
    pub fn from_memfd(fd: OwnedFd, length: u64, writable: bool) -> Result<Self, RegionError> {
        Self::check_memfd(&fd, (0, length), writable)?;
        let mapping = Mapping::new(fd.as_fd(), 0, length, writable)?;
        let piece = Piece {
            start: 0,
            length,
            guest: None,
            offset: 0,
            mapping: Arc::new(mapping),
            file: Arc::new(fd),
            file_offset: 0,
        };
        Ok(Self::new(Memory::Mapped(vec![piece]), length, writable))
    }

    /// `length` bytes at `offset` of a memfd that another process has mapped, too, and that nobody
    /// can change any more but for its bytes: it is sealed against shrinking, this seals it against
    /// holes, and it has all its pages. So touching it neither faults nor takes memory.
    ///
    /// # Errors
    /// No bytes, see [`RegionError::File`], [`RegionError::Shrinks`],
    /// [`RegionError::HugePages`] and [`RegionError::Sparse`]; what `mmap` says.
    pub fn from_full_memfd(
        fd: OwnedFd,
        offset: u64,
        length: u64,
        writable: bool,
    ) -> Result<Self, RegionError> {
        SharedFiles::default().region(vec![(fd, offset, length)], writable)
    }

    /// Checks bytes of a memfd that a process has sent.
    pub(crate) fn check_memfd(
        fd: &OwnedFd,
        (offset, length): (u64, u64),
        writable: bool,
    ) -> Result<(), RegionError> {
        if length == 0 {
            return Err(RegionError::Empty);
        }
        if !memory_file::check(fd.as_fd(), (offset, length), writable, Source::Peer)? {
            return Err(RegionError::Shrinks { length });
        }
        // They may run out when they are touched.
        if memory_file::has_huge_pages(fd.as_fd())? {
            return Err(RegionError::HugePages);
        }
        Ok(())
    }

    /// Memory of another process, at its own addresses.
    ///
    /// # Errors
    /// No bytes, or addresses that wrap around. Whether the addresses are mapped shows when they
    /// are used.
    pub fn from_process(
        process: &Arc<Process>,
        address: u64,
        length: u64,
        writable: bool,
    ) -> Result<Self, RegionError> {
        if length == 0 {
            return Err(RegionError::Empty);
        }
        if address.checked_add(length).is_none() {
            return Err(RegionError::Wraps { address, length });
        }
        Ok(Self::new(
            Memory::Process {
                process: Arc::clone(process),
                address,
            },
            length,
            writable,
        ))
    }

    /// No memory, of `length` bytes: it reads as zeroes, and what is written is discarded.
    ///
    /// # Examples
    /// ```
    /// use farlane_zero_copy::{Region, copy_from_slice, copy_to_slice};
    /// let region = Region::null(u64::MAX);
    /// copy_from_slice(&region, 1 << 40, &[1; 8])?;
    /// let mut bytes = [2; 8];
    /// copy_to_slice(&region, 1 << 40, &mut bytes)?;
    /// assert_eq!(bytes, [0; 8]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn null(length: u64) -> Self {
        Self::new(Memory::Null, length, true)
    }

    /// A buffer of a pool, whole.
    #[must_use]
    pub fn from_buffer(buffer: &PoolBuffer) -> Self {
        let (mapping, file, offset) = buffer.parts();
        Self::new(
            Memory::Mapped(vec![Piece {
                start: 0,
                length: buffer.length(),
                guest: None,
                offset,
                mapping: Arc::clone(mapping),
                file: Arc::clone(file),
                file_offset: offset as u64,
            }]),
            buffer.length(),
            true,
        )
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.inner.length
    }

    /// Never: a region has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.length == 0
    }

    /// Whether it may be written.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.inner.writable
    }

    /// Number of extents; none where it was revoked.
    #[must_use]
    pub fn extents(&self) -> usize {
        match self.inner.enter().as_ref().map(Gates::memory) {
            Some(Memory::Mapped(pieces)) => pieces.len(),
            Some(Memory::Process { .. }) => 1,
            Some(Memory::Null) | None => 0,
        }
    }

    /// How many mappings and files it has that are nobody else's: none of the memory of a VM or of
    /// a process.
    #[must_use]
    pub fn own_files(&self) -> usize {
        match self.inner.enter().as_ref().map(Gates::memory) {
            Some(Memory::Mapped(pieces)) => pieces.iter().filter(|p| p.guest.is_none()).count(),
            _ => 0,
        }
    }

    /// Finds out on which node most of it lies: what is `given` is believed, other memory is asked
    /// about. All handles to it know then.
    pub fn locate(&self, topology: &Topology, given: &[Given]) {
        let mut bytes: BTreeMap<Node, u64> = BTreeMap::new();
        let mut at = 0;
        // Entered anew each time: who revokes it does not wait for all of it to be looked at.
        while let Some(gates) = self.inner.enter()
            && let Memory::Mapped(pieces) = gates.memory()
            && let Some(pieces) = pieces.get(at..).filter(|pieces| !pieces.is_empty())
        {
            let pieces = &pieces[..pieces.len().min(PIECES_AT_ONCE)];
            at += pieces.len();
            for piece in pieces {
                if let Some(node) = node_of(piece, topology, given) {
                    *bytes.entry(node).or_default() += piece.length;
                }
            }
        }
        if at == 0 {
            return;
        }
        let most = bytes
            .into_iter()
            .max_by_key(|&(node, bytes)| (bytes, std::cmp::Reverse(node)));
        self.inner.set_node(most.map(|(node, _)| node));
    }

    /// The node on which most of it lies; none where nobody has [found out](Self::locate), or its
    /// memory is not known to lie on one.
    #[must_use]
    pub fn node(&self) -> Option<Node> {
        self.inner.node()
    }

    /// Ends all access through this region. When it returns, no transfer touches the memory, none
    /// will, and what is left of the region keeps nothing of it: neither its mappings nor the list
    /// of its extents.
    pub fn revoke(&self) {
        self.inner.revoke();
    }

    /// Checks and opens `[offset, offset + length)` for a transfer.
    #[inline]
    pub(crate) fn access(
        &self,
        offset: u64,
        length: u64,
        write: bool,
    ) -> Result<Access<'_>, RegionError> {
        self.check(offset, length)?;
        if write && !self.inner.writable {
            return Err(RegionError::ReadOnly);
        }
        let gates = self.inner.enter().ok_or(RegionError::Revoked)?;
        if self.inner.has_gaps {
            has_memory(&gates, offset, length)?;
        }
        Ok(Access::new(gates, offset, length))
    }

    /// Checks that `[offset, offset + length)` lies inside.
    ///
    /// # Errors
    /// [`RegionError::Bounds`].
    pub fn check(&self, offset: u64, length: u64) -> Result<(), RegionError> {
        match offset.checked_add(length) {
            Some(end) if end <= self.inner.length => Ok(()),
            _ => Err(RegionError::Bounds {
                offset,
                length,
                size: self.inner.length,
            }),
        }
    }

    /// Maps all extents next to each other: one contiguous mapping of the same pages, whatever
    /// their order in guest memory. This is the paper's guest-to-host zero-copy mapping (section
    /// IV-A) without a host kernel module.
    ///
    /// # Errors
    /// [`RegionError::ReadOnly`] where it is not writable; [`RegionError::NotContiguous`] where it
    /// does not begin at a page boundary, or extents do not meet at such, or where it is all memory
    /// of a VM; what `mmap` says.
    pub fn stitch(&self) -> Result<SharedMemory, RegionError> {
        if !self.inner.writable {
            return Err(RegionError::ReadOnly);
        }
        let gates = self.inner.enter().ok_or(RegionError::Revoked)?;
        let Memory::Mapped(pieces) = gates.memory() else {
            return Err(RegionError::NotContiguous { extents: 1 });
        };
        let refuse = || RegionError::NotContiguous {
            extents: pieces.len(),
        };
        if pieces.len() > MAX_STITCHED_EXTENTS || self.inner.has_gaps {
            return Err(refuse());
        }
        let length = self.inner.length;
        // Laid over a smaller mapping, a huge page would replace what lies behind that; and what is
        // sealed is not mapped again.
        let mut stays = false;
        for piece in pieces {
            let file = piece.file.as_fd();
            stays |= memory_file::has_huge_pages(file)? || memory_file::is_sealed(file);
        }
        if stays {
            return match &pieces[..] {
                [piece] if piece.file_offset.is_multiple_of(PAGE_BYTES) => {
                    let mapping = Arc::clone(&piece.mapping);
                    Ok(SharedMemory::inside(
                        mapping,
                        piece.offset,
                        to_usize(length),
                    ))
                }
                _ => Err(refuse()),
            };
        }
        let mut mapping = Mapping::reserve(length.next_multiple_of(PAGE_BYTES))?;
        for piece in pieces {
            let is_last = piece.start + piece.length == length;
            if !piece.file_offset.is_multiple_of(PAGE_BYTES)
                || !is_last && !piece.length.is_multiple_of(PAGE_BYTES)
            {
                return Err(refuse());
            }
            let bytes = to_usize(piece.length.next_multiple_of(PAGE_BYTES));
            let at = to_usize(piece.start);
            mapping.overlay(at, piece.file.as_fd(), piece.file_offset, bytes)?;
        }
        Ok(SharedMemory::first(mapping, to_usize(length)))
    }
}

/// The node on which a piece lies, as it is given or else as the topology knows it.
fn node_of(piece: &Piece, topology: &Topology, given: &[Given]) -> Option<Node> {
    let said = piece.guest.and_then(|address| {
        let holds = |g: &&Given| address.checked_sub(g.start).is_some_and(|at| at < g.length);
        given.iter().rev().find(holds).map(|given| given.node)
    });
    said.or_else(|| {
        let base = piece.mapping.base().wrapping_add(piece.offset);
        let length = to_usize(piece.length);
        topology
            .binding_of_range(base, length)
            .or_else(|| topology.node_of_range(base, length))
    })
}

#[cfg(test)]
mod tests;
