//! Commands in flight: what has been begun and ends in a later turn.

use crate::bits::Status;
use crate::bounce::Bounce;
use crate::cmds::AdminCommand;
use crate::controller::completion::CommandId;
use crate::data::DataPointer;
use crate::ring::{Durable, Fallocate, Repeats};
use crate::syncs::{Beside, UnderWay};
use farlane_pci::DmaView;
use std::collections::VecDeque;
use std::rc::Rc;

/// Most commands in flight, those of the admin queue, and others.
const MAX_REQUESTS: usize = 1024;
const MAX_IO_REQUESTS: usize = MAX_REQUESTS - 16;
/// Bytes of copies there may be at a time before no further command is taken, for those of the
/// admin queue and for others: each has its own, so that deletions and aborts find room. One
/// command more makes a copy of at most 1 MiB, or two to compare them.
const MAX_ADMIN_COPIES: u64 = 2 << 20;
const MAX_IO_COPIES: u64 = 16 << 20;

/// Who waits for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A command.
    Command(CommandId),
    /// The shutdown of the controller.
    Shutdown,
    /// Nobody: its command has been aborted.
    Nobody,
}

/// How blocks are zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// By the file system.
    By(Fallocate),
    /// By writing zeroes.
    Writing,
}

/// What is done.
#[derive(Debug)]
pub enum Work {
    /// A read.
    Read,
    /// A write, then perhaps a flush.
    Write(Durable),
    /// Data of the guest to be compared with the namespace's, which is read to here.
    Compare(Bounce),
    /// Flushes of some namespaces.
    Flush {
        /// Those that have not been flushed.
        left: VecDeque<usize>,
        /// An error, if there has been one.
        status: Status,
    },
    /// Zeroing, then perhaps a flush.
    Zero {
        /// How.
        how: Zeroing,
        /// Whether it is to be durable.
        durable: Durable,
    },
    /// Extents in bytes to be given back.
    Trim(VecDeque<(u64, u64)>),
    /// The ranges of a Dataset Management command, to be read.
    Ranges,
    /// The data of an admin command, to be read.
    Admin(AdminCommand),
    /// The data that answers an admin command, to be written.
    Answer {
        /// Dword 0 of the completion.
        dw0: u32,
    },
}

/// A sync of a namespace.
#[derive(Debug)]
pub enum SyncState {
    /// It is under way; through the page cache, where others may be told of its errors.
    UnderWay(Option<UnderWay>),
    /// It has ended. These others have to end before it is known how.
    Ended(Option<Beside>),
}

/// Something in flight.
#[derive(Debug)]
pub struct Request {
    /// Who waits.
    pub owner: Owner,
    /// What is done.
    pub work: Work,
    /// Nothing has been done: its data has to be read by messages first.
    pub awaits_data: bool,
    /// Index of the namespace.
    pub namespace: usize,
    /// Where the guest's data is, if it is copied.
    pub pointer: DataPointer,
    /// First byte in the namespace.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Bytes of them that are done.
    pub done: u64,
    /// Its operations that had to be done again.
    pub repeats: Repeats,
    /// The sync that makes what was done durable, once it has been begun.
    pub sync: Option<SyncState>,
    /// What the kernel reads or writes.
    pub iovecs: Vec<libc::iovec>,
    /// Some of that memory is another device's.
    pub from_device: bool,
    /// How many syncs of the namespace had failed when it began to write.
    pub failed_syncs: u64,
    /// Keeps that memory mapped, if it is the guest's.
    pub view: Option<Rc<DmaView>>,
    /// That memory, if it is not.
    pub data: Bounce,
}

impl Request {
    /// A request without data.
    pub fn new(owner: Owner, work: Work, namespace: usize, offset: u64, length: u64) -> Self {
        Self {
            owner,
            work,
            awaits_data: false,
            namespace,
            pointer: DataPointer::Prp(0, 0),
            offset,
            length,
            done: 0,
            repeats: Repeats::default(),
            sync: None,
            iovecs: Vec::new(),
            from_device: false,
            failed_syncs: 0,
            view: None,
            data: Bounce::default(),
        }
    }

    /// Index of the namespace that its sync is of, or the next one: none when all are flushed.
    pub fn syncs(&self) -> Option<usize> {
        match &self.work {
            Work::Flush { left, .. } => left.front().copied(),
            _ => Some(self.namespace),
        }
    }

    /// Whether it is of a command of the admin queue.
    fn is_admin(&self) -> bool {
        matches!(self.owner, Owner::Command(id) if id.queue == 0)
    }

    /// Bytes that it copies at most at a time, of `length` bytes of its command's data.
    pub fn copies(&self, length: usize) -> u64 {
        let each = u64::try_from(length).unwrap_or(u64::MAX);
        match self.work {
            Work::Compare(_) => each.saturating_mul(2),
            _ => each,
        }
    }
}

/// A place for a request.
#[derive(Debug, Default)]
struct Slot {
    /// Not while it makes a step.
    request: Option<Request>,
    is_admin: bool,
    /// Bytes that it copies.
    copies: u64,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Requests {
    slots: Vec<Slot>,
    free: Vec<usize>,
    used: usize,
    /// Bytes of copies, also of those that are on their way.
    admin_copies: u64,
    io_copies: u64,
    moved: u64,
    spare: Vec<Vec<libc::iovec>>,
}

impl Requests {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Whether another command may be taken.
    pub fn has_room(&self, is_admin: bool) -> bool {
        if is_admin {
            self.used < MAX_REQUESTS && self.admin_copies < MAX_ADMIN_COPIES
        } else {
            self.used < MAX_IO_REQUESTS && self.io_copies < MAX_IO_COPIES
        }
    }

    /// Bytes moved by all commands so far.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Notes bytes moved.
    pub fn note_moved(&mut self, bytes: u64) {
        self.moved = self.moved.wrapping_add(bytes);
    }

    /// An empty vector of vectors.
    pub fn vectors(&mut self) -> Vec<libc::iovec> {
        self.spare.pop().unwrap_or_default()
    }

    fn copies(&mut self, is_admin: bool) -> &mut u64 {
        if is_admin {
            &mut self.admin_copies
        } else {
            &mut self.io_copies
        }
    }

    /// Makes room for a request that copies so many bytes at a time, until it is released.
    pub fn claim(&mut self, request: &Request, copies: u64) -> usize {
        self.used += 1;
        let is_admin = request.is_admin();
        *self.copies(is_admin) += copies;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        if let Some(place) = self.slots.get_mut(slot) {
            (place.is_admin, place.copies) = (is_admin, copies);
        }
        slot
    }

    /// Keeps a request while something is under way.
    pub fn put(&mut self, slot: usize, request: Request) {
        if let Some(place) = self.slots.get_mut(slot) {
            place.request = Some(request);
        }
    }

    /// Takes it back.
    pub fn take(&mut self, slot: usize) -> Option<Request> {
        self.slots.get_mut(slot)?.request.take()
    }

    /// Takes the command away from its request, if nothing has been done of it.
    pub fn abandon(&mut self, queue: u16, cid: u16) -> Option<CommandId> {
        self.slots
            .iter_mut()
            .filter_map(|slot| slot.request.as_mut())
            .find_map(|request| match request.owner {
                Owner::Command(id) if request.awaits_data && (id.queue, id.cid) == (queue, cid) => {
                    request.owner = Owner::Nobody;
                    Some(id)
                }
                _ => None,
            })
    }

    /// A request has ended.
    pub fn release(&mut self, slot: usize, mut iovecs: Vec<libc::iovec>) {
        let ended = self.slots.get_mut(slot).map(std::mem::take);
        let Slot {
            is_admin, copies, ..
        } = ended.unwrap_or_default();
        *self.copies(is_admin) -= copies;
        self.used -= 1;
        self.free.push(slot);
        if self.spare.len() < 64 {
            iovecs.clear();
            self.spare.push(iovecs);
        }
    }
}
