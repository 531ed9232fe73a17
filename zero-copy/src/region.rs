//! Registered buffers.

mod access;

use crate::address_space::{AddressSpace, AddressSpaceError};
use crate::memory_file::{self, MemoryFileError, Source};
use crate::placement::Given;
use crate::topology::{Node, Topology};
use crate::{Mapping, MappingError, PoolBuffer, Process, SharedMemory};
use farlane_abi::PAGE_BYTES;
use farlane_abi::width::to_usize;
use farlane_sys::sync::write;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard};
use thiserror::Error;

pub(crate) use access::{Access, MappedRuns, Runs};

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
    /// A write to a region that is not writable.
    #[error("The region is not writable")]
    ReadOnly,
    /// The region was revoked.
    #[error("The region is gone")]
    Revoked,
    /// A mapping failed.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The system failed.
    #[error("Cannot examine the file of a region")]
    Io(#[from] std::io::Error),
}

/// A run of mapped memory inside of a region.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Offset of its first byte in the region.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// Guest-physical address of its first byte, where it is a VM's.
    pub guest: Option<u64>,
    /// Offset of its first byte in the mapping.
    pub offset: usize,
    /// Keeps the memory mapped.
    pub mapping: Arc<Mapping>,
    /// The file behind it, and where.
    pub file: Arc<OwnedFd>,
    /// Offset of the first byte in the file.
    pub file_offset: u64,
}

impl Piece {
    /// The node on which it lies, as it is given or else as the topology knows it.
    fn node(&self, topology: &Topology, given: &[Given]) -> Option<Node> {
        let said = self.guest.and_then(|address| {
            let holds = |g: &&Given| address.checked_sub(g.start).is_some_and(|at| at < g.length);
            given.iter().rev().find(holds).map(|given| given.node)
        });
        said.or_else(|| {
            let base = self.mapping.base().wrapping_add(self.offset);
            let length = to_usize(self.length);
            topology
                .binding_of_range(base, length)
                .or_else(|| topology.node_of_range(base, length))
        })
    }
}

#[derive(Debug)]
pub(crate) enum Memory {
    /// Mapped here; sorted by `start`, without gaps.
    Mapped(Vec<Piece>),
    /// Reached by system calls.
    Process { process: Arc<Process>, address: u64 },
}

#[derive(Debug)]
pub(crate) struct Inner {
    behind: Behind,
    pub length: u64,
    pub writable: bool,
}

/// What a region is of. Each has a gate: its readers are transfers under way, its writer is the one
/// who revokes. A reader never waits (it takes a pending writer for a revocation), so no order
/// between the gates of two regions is needed.
#[derive(Debug)]
enum Behind {
    Own(Own),
    /// Another region's memory, with an end of its own. It does not keep the memory: the other
    /// region does, as long as it is open.
    Shared {
        open: RwLock<bool>,
        of: Arc<Inner>,
    },
}

/// Memory that may be touched while it is there.
#[derive(Debug)]
struct Own {
    gate: RwLock<Option<Memory>>,
    /// Where it was found to lie.
    node: AtomicU32,
}

/// A node that is not known.
const NO_NODE: u32 = u32::MAX;

impl Inner {
    fn own(&self) -> &Own {
        match &self.behind {
            Behind::Own(own) => own,
            Behind::Shared { of, .. } => of.own(),
        }
    }

    /// Opens the gates for a transfer, unless the region has ended, or is about to.
    fn enter(&self) -> Option<Gates<'_>> {
        match &self.behind {
            Behind::Own(own) => {
                let memory = own.gate.try_read().ok()?;
                memory.is_some().then_some(Gates {
                    memory,
                    _shared: None,
                })
            }
            Behind::Shared { open, of } => {
                let open = open.try_read().ok().filter(|open| **open)?;
                let gates = of.enter()?;
                Some(Gates {
                    _shared: Some(open),
                    ..gates
                })
            }
        }
    }

    /// Ends all access. When it returns, no transfer touches the memory, and the region does not
    /// keep it any more.
    pub fn revoke(&self) {
        match &self.behind {
            Behind::Own(own) => {
                let mut gate = write(&own.gate);
                let memory = gate.take();
                drop(gate);
                // Many extents take long: nobody who finds the gate locked has to.
                drop(memory);
            }
            Behind::Shared { open, .. } => {
                *write(open) = false;
            }
        }
    }
}

/// Gates that a transfer holds open.
struct Gates<'a> {
    memory: RwLockReadGuard<'a, Option<Memory>>,
    /// Of the region itself, where the memory is another's.
    _shared: Option<RwLockReadGuard<'a, bool>>,
}

impl Gates<'_> {
    fn memory(&self) -> &Memory {
        match &*self.memory {
            Some(memory) => memory,
            None => unreachable!("nobody enters a region that has ended"),
        }
    }
}

/// A registered buffer of a guest application or a host process: a list of extents, plus rights.
///
/// Cloning gives another handle to the same buffer.
#[derive(Clone, Debug)]
pub struct Region {
    inner: Arc<Inner>,
}

impl Region {
    fn new(memory: Memory, length: u64, writable: bool) -> Self {
        Self {
            inner: Arc::new(Inner {
                behind: Behind::Own(Own {
                    gate: RwLock::new(Some(memory)),
                    node: AtomicU32::new(NO_NODE),
                }),
                length,
                writable,
            }),
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
        let of = match &self.inner.behind {
            Behind::Own(_) => &self.inner,
            Behind::Shared { of, .. } => of,
        };
        Self {
            inner: Arc::new(Inner {
                behind: Behind::Shared {
                    open: RwLock::new(true),
                    of: Arc::clone(of),
                },
                length: self.inner.length,
                writable: self.inner.writable,
            }),
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

    /// The first `length` bytes of a memfd that somebody else made. It must be sealed against
    /// shrinking, so that touching it never faults.
    ///
    /// # Errors
    /// See [`RegionError::File`] and [`RegionError::Shrinks`]; what `mmap` says.
    pub fn from_memfd(fd: OwnedFd, length: u64, writable: bool) -> Result<Self, RegionError> {
        if length == 0 {
            return Err(RegionError::Empty);
        }
        if !memory_file::check(fd.as_fd(), (0, length), writable, Source::Peer)? {
            return Err(RegionError::Shrinks { length });
        }
        let mapping = Mapping::new(fd.as_fd(), 0, length, writable)?;
        Ok(Self::new(
            Memory::Mapped(vec![Piece {
                start: 0,
                length,
                guest: None,
                offset: 0,
                mapping: Arc::new(mapping),
                file: Arc::new(fd),
                file_offset: 0,
            }]),
            length,
            writable,
        ))
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
            None => 0,
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
                if let Some(node) = piece.node(topology, given) {
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
        let node = most.map_or(NO_NODE, |(node, _)| node.0);
        self.inner.own().node.store(node, Ordering::Relaxed);
    }

    /// The node on which most of it lies; none where nobody has [found out](Self::locate), or its
    /// memory is not known to lie on one.
    #[must_use]
    pub fn node(&self) -> Option<Node> {
        match self.inner.own().node.load(Ordering::Relaxed) {
            NO_NODE => None,
            node => Some(Node(node)),
        }
    }

    /// Ends all access through this region. When it returns, no transfer touches the memory, none
    /// will, and what is left of the region keeps nothing of it: neither its mappings nor the list
    /// of its extents.
    pub fn revoke(&self) {
        self.inner.revoke();
    }

    /// Checks and opens `[offset, offset + length)` for a transfer.
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
        Ok(Access {
            gates: self.inner.enter().ok_or(RegionError::Revoked)?,
            offset,
            length,
        })
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
    /// does not begin at a page boundary, or extents do not meet at such; what `mmap` says.
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
        if pieces.len() > MAX_STITCHED_EXTENTS {
            return Err(refuse());
        }
        let length = self.inner.length;
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

#[cfg(test)]
mod tests;
