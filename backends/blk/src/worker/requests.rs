//! Requests under way.

use crate::bits::Status;
use crate::limb::steering::Lies;
use crate::request::{Extent, Range};
use farlane_block::bounce::Bounce;
use farlane_block::ring::{Fallocate, Repeats};
use farlane_block::syncs::{Beside, UnderWay};
use farlane_vhost_user::vring::Rings;
use farlane_zero_copy::tokens::Opened;
use farlane_zero_copy::topology::Node;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

/// What is done.
#[derive(Debug)]
pub enum Work {
    /// The file is read.
    Read(Extent),
    /// The file is written.
    Write(Extent),
    /// What was written is made durable.
    Flush,
    /// Ranges are given back.
    Discard(Vec<Range>),
    /// Ranges are zeroed.
    Zero(Vec<Range>),
}

/// How a range is given back or zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clearing {
    /// Given back by a block device (`BLKDISCARD`), whatever it reads as then.
    Discarding,
    /// By the file system or the device (`fallocate(2)`).
    By(Fallocate),
    /// By writing zeroes.
    Writing,
}

/// The last byte of a request, in guest memory.
#[derive(Clone, Copy, Debug)]
pub struct StatusByte(*const AtomicU8);

impl StatusByte {
    /// The byte at `base`.
    ///
    /// # Safety
    /// It is mapped and writable as long as this is used.
    pub unsafe fn new(base: *mut u8) -> Self {
        Self(base.cast_const().cast())
    }

    /// Tells how the request has ended.
    pub fn set(self, status: Status) {
        // SAFETY: as `new` asks; others write it, which atomics allow.
        unsafe { &*self.0 }.store(status as u8, Ordering::Release);
    }
}

/// A request whose parts are done by several limbs, or over several paths. It
/// ends when all parts have.
#[derive(Debug)]
pub struct Whole {
    pub work: Work,
    /// Parts that have not ended.
    pub left: Cell<usize>,
    /// The first error of a part, if there was one.
    pub status: Cell<Status>,
    /// Keeps a device's memory mapped.
    pub opened: RefCell<Option<Opened>>,
}

/// A failure on a path, and what has been tried since.
#[derive(Debug)]
pub struct Failure {
    /// What the system said last.
    pub errno: i32,
    /// Paths on which it has failed in this round, a bit each.
    pub tried: u32,
    /// Rounds that are over.
    pub rounds: u8,
    /// It has waited for a path.
    pub has_waited: bool,
    /// When it failed first.
    pub since: Instant,
}

/// A request under way, or a part of one.
#[derive(Debug)]
pub struct Request {
    /// Its first descriptor.
    pub head: u16,
    /// The request that it is a part of.
    pub whole: Option<Rc<Whole>>,
    /// The limb that moves its data.
    pub by: usize,
    /// That one, if its data is to be handed to it.
    pub limb: Option<usize>,
    /// The path that it goes over.
    pub path: usize,
    /// Where its data lies.
    pub lies: Lies,
    /// What has failed.
    pub failure: Option<Box<Failure>>,
    /// Up to where each path had been written when it began: of a sync.
    pub marks: Vec<u64>,
    /// Whether it is counted among those that are copied.
    pub is_copying: bool,
    pub work: Work,
    pub status: StatusByte,
    /// Keeps the guest's memory mapped.
    pub rings: Rc<Rings>,
    /// Keeps a device's memory mapped; of a part, its whole does.
    pub opened: Option<Opened>,
    /// Memory that has not been read or written yet.
    pub vectors: Vec<libc::iovec>,
    /// Whether its data is copied through a buffer of ours.
    pub copies: bool,
    /// That buffer.
    pub bounce: Option<Bounce>,
    /// The vector of that buffer, or of zeroes.
    pub own_vectors: Vec<libc::iovec>,
    /// Bytes that have been moved, of its data or of the range that it is at.
    pub done: u64,
    /// The range that it is at.
    pub range: usize,
    /// How that is given back or zeroed, once it has been begun.
    pub clearing: Option<Clearing>,
    /// Whether what is under way is a write that is to be durable when it is complete.
    pub is_durable: bool,
    /// How many syncs of the disk had failed when it began: of a durable write.
    pub failed_syncs: u64,
    /// Its operations that had to be done again.
    pub repeats: Repeats,
    /// All is done but making it durable.
    pub syncing: bool,
    /// While that is under way, where others may be told of its errors.
    pub sync: Option<UnderWay>,
    /// Then, until these have ended.
    pub beside: Option<Beside>,
}

impl Request {
    /// Whether its data is in the memory of a device.
    pub fn is_tunnelled(&self) -> bool {
        let whole = || {
            self.whole
                .as_ref()
                .is_some_and(|whole| whole.opened.borrow().is_some())
        };
        self.opened.is_some() || whole()
    }

    /// A request of which nothing has been done.
    pub fn new(head: u16, work: Work, status: StatusByte, rings: Rc<Rings>) -> Self {
        Self {
            head,
            whole: None,
            by: 0,
            limb: None,
            path: 0,
            lies: Lies::On(Node(0)),
            failure: None,
            marks: Vec::new(),
            is_copying: false,
            work,
            status,
            rings,
            opened: None,
            vectors: Vec::new(),
            copies: false,
            bounce: None,
            own_vectors: Vec::new(),
            done: 0,
            range: 0,
            clearing: None,
            is_durable: false,
            failed_syncs: 0,
            repeats: Repeats::default(),
            syncing: false,
            sync: None,
            beside: None,
        }
    }
}

/// Places of requests under way.
#[derive(Debug, Default)]
pub struct Requests {
    slots: Vec<Option<Box<Request>>>,
    free: Vec<usize>,
    /// Vectors of former requests, to be used again.
    vectors: Vec<Vec<libc::iovec>>,
}

impl Requests {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A place, for a request that is [put](Self::put) there.
    pub fn reserve(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        })
    }

    /// Puts a request in its place.
    pub fn put(&mut self, slot: usize, request: Box<Request>) {
        if let Some(place) = self.slots.get_mut(slot) {
            *place = Some(request);
        }
    }

    /// Takes a request out of its place, which stays its own.
    pub fn take(&mut self, slot: usize) -> Option<Box<Request>> {
        self.slots.get_mut(slot)?.take()
    }

    /// A place is free.
    pub fn release(&mut self, slot: usize) {
        self.free.push(slot);
    }

    /// An empty vector.
    pub fn vectors(&mut self) -> Vec<libc::iovec> {
        self.vectors.pop().unwrap_or_default()
    }

    /// Takes a vector back.
    pub fn give_vectors(&mut self, mut vectors: Vec<libc::iovec>) {
        vectors.clear();
        if self.vectors.len() < 64 {
            self.vectors.push(vectors);
        }
    }
}
