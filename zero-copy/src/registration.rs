//! What all handles to a registered buffer share: its memory, and the gates of who touches it.

mod access;
mod following;

use crate::topology::Node;
use crate::{Mapping, Process};
use farlane_sys::sync::write;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard};

pub(crate) use access::{Access, MappedRuns, Runs};
use following::Following;

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

/// Where the bytes of a registered buffer are.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Mapped here; sorted by `start`, without gaps but of a region that
    /// [has some](Registration::has_gaps).
    Mapped(Vec<Piece>),
    /// Reached by system calls.
    Process { process: Arc<Process>, address: u64 },
    /// None: it reads as zeroes, and what is written is discarded.
    Null,
}

/// A registered buffer, as all handles to it and the memory that it lies in know it.
#[derive(Debug)]
pub(crate) struct Registration {
    behind: Behind,
    pub length: u64,
    pub writable: bool,
    /// Some of its bytes are of no memory.
    pub has_gaps: bool,
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
        of: Arc<Registration>,
    },
}

/// Memory that may be touched while it is there.
#[derive(Debug)]
struct Own {
    gate: RwLock<Option<Memory>>,
    /// Where the memory is, of a region that has whatever its VM has: nothing lies behind the gate
    /// then, so that transfers of other regions do not look here.
    following: Option<Box<Following>>,
    /// Where it was found to lie.
    node: AtomicU32,
}

impl Own {
    fn new(memory: Option<Memory>, following: Option<Box<Following>>) -> Self {
        Self {
            gate: RwLock::new(memory),
            following,
            node: AtomicU32::new(NO_NODE),
        }
    }

    /// Opens the gate of what does not lie behind the one that all regions have.
    #[cold]
    fn enter_following(&self) -> Option<Gates<'_>> {
        self.following.as_ref()?.enter()
    }
}

/// A node that is not known.
const NO_NODE: u32 = u32::MAX;

impl Memory {
    /// Whether there is memory for all of these bytes, which lie inside.
    pub fn covers(&self, offset: u64, length: u64) -> bool {
        let Self::Mapped(pieces) = self else {
            return true;
        };
        let mut at = offset;
        let end = offset + length;
        let first = pieces.partition_point(|piece| piece.start + piece.length <= offset);
        for piece in &pieces[first..] {
            if at >= end || piece.start > at {
                break;
            }
            at = piece.start + piece.length;
        }
        at >= end
    }
}

impl Registration {
    pub fn new(memory: Memory, length: u64, writable: bool) -> Arc<Self> {
        Arc::new(Self {
            behind: Behind::Own(Own::new(Some(memory), None)),
            length,
            writable,
            has_gaps: false,
        })
    }

    /// One that has the memory that it is [given](Self::exchange), none yet, at any address.
    pub fn following(writable: bool) -> Arc<Self> {
        Arc::new(Self {
            behind: Behind::Own(Own::new(None, Some(Box::new(Following::new())))),
            length: u64::MAX,
            writable,
            has_gaps: true,
        })
    }

    /// Gives one that [follows](Self::following) what `now` finds, unless it has ended. When this
    /// returns, no transfer touches what it had before.
    pub fn exchange(&self, now: impl FnOnce() -> Memory) {
        if let Some(following) = &self.own().following {
            following.exchange(now);
        }
    }

    /// One of the same memory with an end of its own.
    pub fn share(self: &Arc<Self>) -> Arc<Self> {
        let of = match &self.behind {
            Behind::Own(_) => self,
            Behind::Shared { of, .. } => of,
        };
        Arc::new(Self {
            behind: Behind::Shared {
                open: RwLock::new(true),
                of: Arc::clone(of),
            },
            length: self.length,
            writable: self.writable,
            has_gaps: self.has_gaps,
        })
    }

    /// The node on which most of it lies, as [`set_node`](Self::set_node) was told.
    pub fn node(&self) -> Option<Node> {
        match self.own().node.load(Ordering::Relaxed) {
            NO_NODE => None,
            node => Some(Node(node)),
        }
    }

    pub fn set_node(&self, node: Option<Node>) {
        let node = node.map_or(NO_NODE, |node| node.0);
        self.own().node.store(node, Ordering::Relaxed);
    }

    fn own(&self) -> &Own {
        match &self.behind {
            Behind::Own(own) => own,
            Behind::Shared { of, .. } => of.own(),
        }
    }

    /// Opens the gates for a transfer, unless the region has ended, or is about to.
    pub fn enter(&self) -> Option<Gates<'_>> {
        match &self.behind {
            Behind::Own(own) => match own.gate.try_read() {
                Ok(memory) if memory.is_some() => Some(Gates {
                    memory,
                    _shared: None,
                }),
                _ => own.enter_following(),
            },
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
                if let Some(following) = &own.following {
                    following.end();
                }
            }
            Behind::Shared { open, .. } => {
                *write(open) = false;
            }
        }
    }
}

/// Gates that a transfer holds open.
pub(crate) struct Gates<'a> {
    memory: RwLockReadGuard<'a, Option<Memory>>,
    /// Of the region itself, where the memory is another's.
    _shared: Option<RwLockReadGuard<'a, bool>>,
}

impl Gates<'_> {
    pub fn memory(&self) -> &Memory {
        match &*self.memory {
            Some(memory) => memory,
            None => unreachable!("nobody enters a region that has ended"),
        }
    }
}
