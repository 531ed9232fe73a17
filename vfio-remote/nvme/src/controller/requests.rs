//! Commands in flight: what has been begun and ends in a later turn.

use crate::bits::Status;
use crate::bounce::Bounce;
use crate::cmds::AdminCommand;
use crate::controller::completion::Permit;
use crate::data::DataPointer;
use crate::ids::{NamespaceId, SqId};
use crate::ring::Durable;
use farlane_block::engine::{Extent, Operation, Slot, Slots};
use farlane_pci::DmaView;
use farlane_zero_copy::slices::SliceList;
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
/// Lists of slices that are kept for later requests.
const MAX_SPARE_LISTS: usize = 64;

/// Whom the end of a request is told.
#[derive(Debug)]
pub enum Owner {
    /// A command.
    Command(Permit),
    /// The shutdown of the controller.
    Shutdown,
    /// Nobody: its command has been aborted.
    Nobody,
}

/// Use of data that is read by messages.
#[derive(Clone, Copy, Debug)]
pub enum Gathered {
    /// Write.
    Write {
        /// The namespace.
        namespace: NamespaceId,
        /// Its blocks, in bytes.
        extent: Extent,
        /// Force Unit Access.
        durable: Durable,
    },
    /// Compare.
    Compare {
        /// The namespace.
        namespace: NamespaceId,
        /// Its blocks, in bytes.
        extent: Extent,
    },
    /// Dataset Management: the data is the ranges.
    Ranges {
        /// The namespace.
        namespace: NamespaceId,
    },
    /// An admin command with attribute data.
    Admin(AdminCommand),
}

/// Work on namespaces.
#[derive(Debug)]
pub enum Task {
    /// Blocks are read: to the guest's memory, or to a copy that is then written there by messages.
    Read(Option<DataPointer>),
    /// Blocks are written.
    Write,
    /// Blocks are read, to be compared with the guest's data.
    Compare(Bounce),
    /// Blocks are zeroed.
    Zero,
    /// Blocks are given back.
    Trim,
    /// Namespaces are flushed, one after the other.
    Flush {
        /// Those that come after this one.
        left: VecDeque<NamespaceId>,
        /// An error, if there has been one.
        status: Status,
    },
}

/// Data that is written by messages.
#[derive(Clone, Copy, Debug)]
pub enum Scattered {
    /// So many bytes that were read.
    Read(u64),
    /// The data that answers an admin command.
    Admin {
        /// Dword 0 of the completion.
        dw0: u32,
    },
}

/// The phases of a request.
#[derive(Debug)]
pub enum Phase {
    /// Nothing has been done: its data is read by messages first.
    Gathering(Gathered),
    /// Something is done with a namespace.
    Running(Task, Operation<Rc<DmaView>, NamespaceId>),
    /// Data is written by messages.
    Scattering(Scattered),
}

/// Something in flight.
#[derive(Debug)]
pub struct Request {
    /// Whom its end is told.
    pub owner: Owner,
    /// Its phase.
    pub phase: Phase,
    is_admin: bool,
    /// Bytes that it copies at most at a time.
    copies: u64,
}

impl Request {
    /// One of which nothing has been done. It makes a copy of so many bytes of its data.
    pub fn new(owner: Owner, phase: Phase, data: u64) -> Self {
        let compares = matches!(
            phase,
            Phase::Gathering(Gathered::Compare { .. }) | Phase::Running(Task::Compare(_), _)
        );
        Self {
            is_admin: matches!(&owner, Owner::Command(permit) if permit.command().queue.is_admin()),
            copies: if compares { 2 * data } else { data },
            owner,
            phase,
        }
    }

    /// One that does something with a namespace, and copies nothing.
    pub fn run(owner: Owner, task: Task, operation: Operation<Rc<DmaView>, NamespaceId>) -> Self {
        Self::new(owner, Phase::Running(task, operation), 0)
    }
}

/// All requests, and the room for more.
#[derive(Debug, Default)]
pub struct Requests {
    slots: Slots<Request>,
    /// Bytes of copies, also of those that are on their way.
    admin_copies: u64,
    io_copies: u64,
    moved: u64,
    spare: Vec<SliceList>,
}

impl Requests {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Whether another command may be taken.
    pub fn has_room(&self, is_admin: bool) -> bool {
        if is_admin {
            self.slots.len() < MAX_REQUESTS && self.admin_copies < MAX_ADMIN_COPIES
        } else {
            self.slots.len() < MAX_IO_REQUESTS && self.io_copies < MAX_IO_COPIES
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

    /// Storage for a list of slices.
    pub fn list(&mut self) -> SliceList {
        self.spare.pop().unwrap_or_default()
    }

    /// Takes it back.
    pub fn give_list(&mut self, list: SliceList) {
        if self.spare.len() < MAX_SPARE_LISTS {
            self.spare.push(list);
        }
    }

    fn copies(&mut self, is_admin: bool) -> &mut u64 {
        if is_admin {
            &mut self.admin_copies
        } else {
            &mut self.io_copies
        }
    }

    /// Puts a request in a place, until it is removed.
    pub fn insert(&mut self, request: Request) -> Slot {
        *self.copies(request.is_admin) += request.copies;
        self.slots.insert(request)
    }

    /// What is in a place.
    pub fn get_mut(&mut self, slot: Slot) -> Option<&mut Request> {
        self.slots.get_mut(slot)
    }

    /// Takes the command away from its request, if nothing has been done of it.
    pub fn abandon(&mut self, queue: SqId, cid: u16) -> Option<Permit> {
        let request = self.slots.iter_mut().find(|request| {
            let is_named = matches!(&request.owner, Owner::Command(permit)
                if (permit.command().queue, permit.command().cid) == (queue, cid));
            is_named && matches!(request.phase, Phase::Gathering(_))
        })?;
        match std::mem::replace(&mut request.owner, Owner::Nobody) {
            Owner::Command(permit) => Some(permit),
            Owner::Shutdown | Owner::Nobody => None,
        }
    }

    /// A request has ended.
    pub fn remove(&mut self, slot: Slot) -> Option<Request> {
        let request = self.slots.remove(slot)?;
        *self.copies(request.is_admin) -= request.copies;
        Some(request)
    }
}
