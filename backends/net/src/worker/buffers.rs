//! Buffers of a receive queue: found in guest memory a little ahead, filled and used in order.

use super::Broken;
use super::end::End;
use crate::bits::HEADER_BYTES;
use crate::header::MAX_FRAME;
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::segment::Segment;
use farlane_vhost_user::vring::Rings;
use farlane_zero_copy::placement::{NodeMap, Placement};
use farlane_zero_copy::topology::Node;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most pieces that a frame is received into: below the kernel's limit of vectors, with room for
/// what is around them.
pub(super) const MAX_PIECES: usize = 960;

/// Guest memory that is one run in the backend's memory, and on one node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub base: *mut u8,
    pub bytes: usize,
    pub node: Node,
}

/// Most bytes of a buffer that are of use: the largest frame with its header.
pub(super) fn most_bytes() -> u64 {
    u64::try_from(MAX_FRAME + HEADER_BYTES).unwrap_or(u64::MAX)
}

/// Adds the pieces that guest memory is made of, as far as it is of use: a buffer may be said to
/// have terabytes, on many nodes.
pub(super) fn resolve(
    rings: &Rings,
    segments: &[Segment],
    writable: bool,
    places: &Places,
    pieces: &mut Vec<Piece>,
) -> Result<(), Broken> {
    let mut left = most_bytes();
    for segment in segments {
        let bytes = segment.bytes.min(left);
        if bytes == 0 {
            break;
        }
        left -= bytes;
        let mut at = segment.address;
        rings
            .view()
            .resolve(segment.address, bytes, writable, |base, run| {
                let length = u64::try_from(run).unwrap_or(u64::MAX);
                if let Some(node) = places.only {
                    pieces.push(Piece {
                        base,
                        bytes: run,
                        node,
                    });
                } else {
                    let mut done = 0;
                    places.map.cut(at, length, |node, _, bytes| {
                        let bytes = usize::try_from(bytes).unwrap_or(0);
                        pieces.push(Piece {
                            base: base.wrapping_add(done),
                            bytes,
                            node,
                        });
                        done += bytes;
                    });
                }
                at = at.wrapping_add(length);
            })?;
    }
    Ok(())
}

/// Where the VM's memory lies, as of some generation of its placement.
#[derive(Debug)]
pub(super) struct Places {
    placement: Arc<Placement>,
    generation: u64,
    map: Arc<NodeMap>,
    /// The node of all of it, if it is one.
    only: Option<Node>,
}

impl Places {
    pub fn new(placement: Arc<Placement>) -> Self {
        let generation = placement.generation();
        let map = placement.map();
        let only = map.is_uniform().then(|| map.node_of(0));
        Self {
            placement,
            generation,
            map,
            only,
        }
    }

    /// Looks whether memory has moved. Returns whether it has.
    pub fn refresh(&mut self) -> bool {
        let moved = self.placement.generation() != self.generation;
        if moved {
            *self = Self::new(Arc::clone(&self.placement));
        }
        moved
    }
}

#[derive(Debug)]
struct Buffer {
    head: u16,
    bytes: usize,
    pieces: Vec<Piece>,
}

/// Buffers that were found and are not used.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    found: VecDeque<Buffer>,
    bytes: usize,
    pieces: usize,
    /// No further piece is found, whatever the driver adds.
    is_full: bool,
    spare: Vec<Vec<Piece>>,
    chain: Chain,
}

impl Buffers {
    /// Forgets them: they are found again.
    pub fn forget(&mut self) {
        while let Some(buffer) = self.found.pop_front() {
            self.recycle(buffer.pieces);
        }
        self.bytes = 0;
        self.pieces = 0;
        self.is_full = false;
    }

    fn recycle(&mut self, mut pieces: Vec<Piece>) {
        pieces.clear();
        self.spare.push(pieces);
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether no more are found until some are used: they are in too many pieces.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    pub fn len(&self) -> u16 {
        u16::try_from(self.found.len()).unwrap_or(u16::MAX)
    }

    /// Finds further ones until they have so many bytes, or only one where a frame may have only
    /// one.
    pub fn find(
        &mut self,
        end: &mut End,
        bytes: usize,
        several: bool,
        places: &Places,
    ) -> Result<(), Broken> {
        if self.bytes >= bytes || (!several && !self.found.is_empty()) {
            return Ok(());
        }
        let rings = end.rings()?;
        while self.bytes < bytes && (several || self.found.is_empty()) && self.pieces < MAX_PIECES {
            let Some(head) = end.progress.peek(&rings, self.len())? else {
                return Ok(());
            };
            self.chain.follow(&rings, head)?;
            let mut pieces = self.spare.pop().unwrap_or_default();
            resolve(&rings, &self.chain.writable, true, places, &mut pieces)?;
            let room: usize = pieces.iter().map(|piece| piece.bytes).sum();
            if room == 0 || pieces.len() > MAX_PIECES {
                let pieces = pieces.len();
                return Err(Broken::Buffer { pieces, room });
            }
            if self.pieces + pieces.len() > MAX_PIECES {
                self.recycle(pieces);
                self.is_full = true;
                return Ok(());
            }
            self.bytes += room;
            self.pieces += pieces.len();
            self.found.push_back(Buffer {
                head,
                bytes: room,
                pieces,
            });
        }
        self.is_full = self.pieces >= MAX_PIECES;
        Ok(())
    }

    /// Their memory, from byte `skip` on.
    pub fn pieces(&self, skip: usize) -> impl Iterator<Item = Piece> {
        skip_bytes(self.found.iter().flat_map(|buffer| &buffer.pieces), skip)
    }

    /// How many of them a frame of so many bytes takes. Where they have fewer, as many more as it
    /// takes of those like the last.
    pub fn count_for(&self, bytes: usize) -> u16 {
        let mut left = bytes;
        let mut count = 0_u16;
        for buffer in &self.found {
            count = count.saturating_add(1);
            left = left.saturating_sub(buffer.bytes);
            if left == 0 {
                return count;
            }
        }
        let like_the_last = self.found.back().map_or(left, |buffer| buffer.bytes);
        let more = left.div_ceil(like_the_last.max(1));
        count.saturating_add(u16::try_from(more).unwrap_or(u16::MAX))
    }

    /// Uses the first ones for a frame of so many bytes; tells of what lies on which node.
    pub fn use_up(
        &mut self,
        end: &mut End,
        bytes: usize,
        mut each: impl FnMut(Node, usize),
    ) -> Result<u16, Broken> {
        let rings = end.rings()?;
        let mut left = bytes;
        let mut count = 0;
        while left > 0 {
            let Some(buffer) = self.found.pop_front() else {
                break;
            };
            let used = left.min(buffer.bytes);
            let mut here = used;
            for piece in &buffer.pieces {
                let part = here.min(piece.bytes);
                if part > 0 {
                    each(piece.node, part);
                }
                here -= part;
            }
            let written = u32::try_from(used).unwrap_or(u32::MAX);
            end.progress.put(&rings, buffer.head, written);
            end.progress.skip(1);
            count += 1;
            left -= used;
            self.bytes -= buffer.bytes;
            self.pieces -= buffer.pieces.len();
            self.is_full = false;
            self.recycle(buffer.pieces);
        }
        Ok(count)
    }
}

/// Pieces from byte `skip` on.
pub(super) fn skip_bytes<'a>(
    pieces: impl Iterator<Item = &'a Piece>,
    skip: usize,
) -> impl Iterator<Item = Piece> {
    let mut skip = skip;
    pieces.filter_map(move |piece| {
        let less = skip.min(piece.bytes);
        skip -= less;
        (less < piece.bytes).then(|| Piece {
            base: piece.base.wrapping_add(less),
            bytes: piece.bytes - less,
            node: piece.node,
        })
    })
}

/// Copies bytes into pieces, one after the other, as far as both go.
pub(super) fn copy_in(pieces: impl Iterator<Item = Piece>, bytes: &[u8]) {
    let mut rest = bytes;
    for piece in pieces {
        let (part, after) = rest.split_at(piece.bytes.min(rest.len()));
        if part.is_empty() {
            return;
        }
        // SAFETY: pieces come from `resolve` as writable memory of a view that whoever has them
        // keeps; the guest may write it meanwhile, so that no reference to it is made.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), piece.base, part.len()) };
        rest = after;
    }
}

/// Copies bytes out of pieces. Returns how many there were.
pub(super) fn copy_out(pieces: impl Iterator<Item = Piece>, bytes: &mut [u8]) -> usize {
    let length = bytes.len();
    let mut rest = bytes;
    for piece in pieces {
        let fit = piece.bytes.min(rest.len());
        if fit == 0 {
            break;
        }
        let (part, after) = std::mem::take(&mut rest).split_at_mut(fit);
        // SAFETY: as above; what is read is whatever is there.
        unsafe { std::ptr::copy_nonoverlapping(piece.base, part.as_mut_ptr(), fit) };
        rest = after;
    }
    length - rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_vhost_user::vring::Layout;
    use farlane_zero_copy::AddressSpace;
    use farlane_zero_copy::placement::Given;
    use farlane_zero_copy::topology::{Described, Topology};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd as _;

    #[test]
    fn a_buffer_is_found_as_far_as_a_frame_may_need_it() {
        const RAM: u64 = 16 << 20;
        const PAGE: u64 = 4096;
        let file = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, RAM).unwrap();
        let space = AddressSpace::new();
        space.map(0, RAM, file.as_fd(), 0, true).unwrap();
        let layout = Layout {
            size: 4,
            descriptors: 0,
            available: 0x1000,
            used: 0x2000,
        };
        let rings = Rings::map(space.view(), &layout).unwrap();
        // Every other page is on the second node.
        let given = (0..RAM / PAGE).step_by(2).map(|page| Given {
            start: page * PAGE,
            length: PAGE,
            node: Node(1),
        });
        let topology = Topology::of(Described::new(&[&[0], &[1]]));
        let placement = Placement::unseen(space, topology, given.collect());
        let places = Places::new(placement);
        let found = |segments: &[Segment]| {
            let mut pieces = Vec::new();
            resolve(&rings, segments, true, &places, &mut pieces).unwrap();
            let bytes: usize = pieces.iter().map(|piece| piece.bytes).sum();
            (pieces.len(), u64::try_from(bytes).unwrap())
        };
        let segment = |bytes| Segment { address: 0, bytes };
        assert_eq!(
            found(&[segment(2 * PAGE), segment(100)]),
            (3, 2 * PAGE + 100)
        );
        let bytes = most_bytes();
        let most = usize::try_from(bytes.div_ceil(PAGE)).unwrap();
        assert_eq!(found(&[segment(RAM); 1000]), (most, bytes));
        assert_eq!(
            found(&[segment(bytes - 1), segment(RAM), segment(RAM)]),
            (most + 1, bytes)
        );
    }
}
