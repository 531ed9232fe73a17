//! Buffers of a receive queue: found in guest memory a little ahead, filled and used in order.

use super::QueueError;
use super::virtqueue::Virtqueue;
use crate::bits::{HEADER_BYTES, low32};
use crate::header::MAX_FRAME;
use farlane_abi::width::{to_u64, to_usize};
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::segment::Segment;
use farlane_zero_copy::View;
use farlane_zero_copy::placement::{NodeMap, Placement};
use farlane_zero_copy::slices::{GuestRuns, GuestSlices, SliceList};
use farlane_zero_copy::topology::Node;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

/// Most runs of memory that a frame is received into: below the kernel's limit of vectors (1024),
/// with room for what is around them.
pub(super) const MAX_RUNS: usize = 960;

/// Most bytes of a buffer that are of use: the largest frame with its header.
pub(super) const MAX_BUFFER: usize = MAX_FRAME + HEADER_BYTES;

/// The first [`MAX_BUFFER`] bytes of guest memory: a buffer may be said to have terabytes, on many
/// nodes.
fn useful(segments: &[Segment]) -> impl Iterator<Item = Segment> {
    let mut left = to_u64(MAX_BUFFER);
    segments.iter().map_while(move |segment| {
        let bytes = segment.bytes.min(left);
        left -= bytes;
        let address = segment.address;
        (bytes > 0).then_some(Segment { address, bytes })
    })
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

    /// Calls `each(node, bytes)` for the parts of a segment by their nodes, in order.
    pub fn cut(&self, segment: Segment, mut each: impl FnMut(Node, u64)) {
        match self.only {
            Some(node) => each(node, segment.bytes),
            None => self
                .map
                .cut(segment.address, segment.bytes, |node, _, bytes| {
                    each(node, bytes);
                }),
        }
    }
}

#[derive(Debug)]
struct Buffer {
    head: u16,
    bytes: usize,
}

/// Buffers that were found and are not used.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    found: VecDeque<Buffer>,
    /// How many: not more than the queue has entries.
    count: u16,
    /// Their memory, one after the other.
    memory: Option<GuestSlices<Rc<View>>>,
    /// The nodes of that, in order.
    nodes: VecDeque<(Node, u64)>,
    bytes: usize,
    /// No further run of memory is found, whatever the driver adds.
    is_full: bool,
    spare: SliceList,
    chain: Chain,
}

impl Buffers {
    /// Forgets them: they are found again. Nothing of the guest's memory is kept.
    pub fn forget(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.spare = memory.into_list();
        }
        self.found.clear();
        self.count = 0;
        self.nodes.clear();
        self.bytes = 0;
        self.is_full = false;
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether no more are found until some are used: they are in too many runs of memory.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    pub fn len(&self) -> u16 {
        self.count
    }

    /// Finds further ones until they have so many bytes, or only one where a frame may have only
    /// one.
    pub fn find(
        &mut self,
        queue: &mut Virtqueue,
        bytes: usize,
        several: bool,
        places: &Places,
    ) -> Result<(), QueueError> {
        let suffice = |bytes_found, is_empty: bool| bytes_found >= bytes || !(several || is_empty);
        if suffice(self.bytes, self.found.is_empty()) {
            return Ok(());
        }
        let rings = queue.rings()?;
        let memory = self.memory.get_or_insert_with(|| {
            GuestSlices::new(
                Rc::clone(rings.view()),
                std::mem::take(&mut self.spare),
                true,
            )
        });
        while !suffice(self.bytes, self.found.is_empty()) {
            let runs = memory.vectors().len();
            self.is_full = runs >= MAX_RUNS;
            if self.is_full {
                return Ok(());
            }
            let Some(head) = queue.progress.peek(&rings, self.count)? else {
                return Ok(());
            };
            self.chain.follow(&rings, head)?;
            let mut room = 0;
            for segment in useful(&self.chain.writable) {
                memory.push(segment.address, segment.bytes)?;
                room += to_usize(segment.bytes);
            }
            let added = memory.vectors().len() - runs;
            if room == 0 || added > MAX_RUNS {
                return Err(QueueError::Buffer { runs: added, room });
            }
            if runs + added > MAX_RUNS {
                memory.truncate(runs);
                self.is_full = true;
                return Ok(());
            }
            for segment in useful(&self.chain.writable) {
                places.cut(segment, |node, bytes| self.nodes.push_back((node, bytes)));
            }
            self.bytes += room;
            self.count += 1;
            self.found.push_back(Buffer { head, bytes: room });
        }
        Ok(())
    }

    /// Their memory, from byte `offset` on.
    pub fn at(&self, offset: usize) -> GuestRuns<'_> {
        let memory = self.memory.as_ref();
        memory.map_or_else(GuestRuns::default, |memory| memory.at(offset))
    }

    /// How many of them a frame of so many bytes takes; all, where they have fewer.
    pub fn count_for(&self, bytes: usize) -> u16 {
        self.fill(bytes).0
    }

    /// How many buffers a frame of so many bytes is going to take: where those that were found
    /// have fewer, as many more as it takes of those like the last.
    pub fn expected_for(&self, bytes: usize) -> u64 {
        let (count, left) = self.fill(bytes);
        let like_the_last = self.found.back().map_or(left, |buffer| buffer.bytes);
        u64::from(count) + to_u64(left.div_ceil(like_the_last.max(1)))
    }

    /// How many of them a frame of so many bytes fills, and how many bytes are left then.
    fn fill(&self, bytes: usize) -> (u16, usize) {
        let (mut count, mut left) = (0, bytes);
        for buffer in &self.found {
            if left == 0 {
                break;
            }
            count += 1;
            left = left.saturating_sub(buffer.bytes);
        }
        (count, left)
    }

    /// Uses the first ones for a frame of so many bytes; tells of what lies on which node.
    pub fn use_up(
        &mut self,
        queue: &mut Virtqueue,
        bytes: usize,
        mut each: impl FnMut(Node, u64),
    ) -> Result<u16, QueueError> {
        let rings = queue.rings()?;
        let mut left = bytes;
        let (mut count, mut all) = (0, 0);
        while left > 0 {
            let Some(buffer) = self.found.pop_front() else {
                break;
            };
            let used = left.min(buffer.bytes);
            self.pass(to_u64(buffer.bytes), to_u64(used), &mut each);
            queue.progress.put(&rings, buffer.head, low32(to_u64(used)));
            queue.progress.skip(1);
            count += 1;
            left -= used;
            all += buffer.bytes;
        }
        self.bytes -= all;
        self.count -= count;
        self.is_full = false;
        if let Some(memory) = &mut self.memory {
            memory.skip(all);
        }
        Ok(count)
    }

    /// Passes over the nodes of a buffer of `bytes` bytes, of which the first `used` are used.
    fn pass(&mut self, bytes: u64, used: u64, each: &mut impl FnMut(Node, u64)) {
        let (mut left, mut used) = (bytes, used);
        while left > 0
            && let Some((node, part)) = self.nodes.pop_front()
        {
            let here = used.min(part);
            if here > 0 {
                each(node, here);
            }
            used -= here;
            left = left.saturating_sub(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_zero_copy::AddressSpace;
    use farlane_zero_copy::placement::Given;
    use farlane_zero_copy::topology::{Described, Topology};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd as _;

    #[test]
    fn a_frame_may_be_expected_to_take_more_buffers_than_a_queue_has() {
        let tiny = Buffer { head: 0, bytes: 1 };
        let buffers = Buffers {
            found: VecDeque::from([tiny]),
            count: 1,
            ..Buffers::default()
        };
        assert_eq!(buffers.count_for(MAX_BUFFER), 1);
        assert_eq!(buffers.expected_for(MAX_BUFFER), to_u64(MAX_BUFFER));
        assert_eq!(buffers.expected_for(1), 1);
        assert_eq!(Buffers::default().expected_for(MAX_BUFFER), 1);
    }

    #[test]
    fn a_buffer_is_found_as_far_as_a_frame_may_need_it() {
        const RAM: u64 = 16 << 20;
        const PAGE: u64 = 4096;
        let file = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, RAM).unwrap();
        let space = AddressSpace::new();
        space.map(0, RAM, file.as_fd(), 0, true).unwrap();
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
            let mut parts = Vec::new();
            useful(segments).for_each(|s| places.cut(s, |_, bytes| parts.push(bytes)));
            (parts.len(), parts.iter().sum::<u64>())
        };
        let segment = |bytes| Segment { address: 0, bytes };
        assert_eq!(
            found(&[segment(2 * PAGE), segment(100)]),
            (3, 2 * PAGE + 100)
        );
        let bytes = to_u64(MAX_BUFFER);
        let most = usize::try_from(bytes.div_ceil(PAGE)).unwrap();
        assert_eq!(found(&[segment(RAM); 1000]), (most, bytes));
        assert_eq!(
            found(&[segment(bytes - 1), segment(RAM), segment(RAM)]),
            (most + 1, bytes)
        );
    }
}
