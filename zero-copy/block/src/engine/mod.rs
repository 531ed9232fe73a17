//! What a disk controller does for a request, whatever its guest speaks.
//!
//! A controller has an [`Operation`] for each request, or for each part of one, in a [`Slots`]
//! place. It [advances](Operation::advance) it until that is [`Step::Done`], and tells it how each
//! operation of the ring [has ended](Operation::ended). What differs between controllers is in
//! their [`Files`]: which file or device it is, who else syncs it, and whether what has failed may
//! be done by another path.
//!
//! * [`slots`]: places of what is under way, by which the ring's completions are known.
//! * [`memory`]: the memory of an operation, and its transfer, by ring or system call.
//! * [`clear`]: giving back and zeroing ranges, with what comes instead where that is unsupported.
//! * [`operation`]: the steps of an operation, among them those that make it durable.

pub mod clear;
pub mod memory;
pub mod operation;
pub mod slots;

use crate::ring::Ring;
use crate::syncs::{Beside, UnderWay};
use memory::Access;
use std::io;

pub use clear::{Clear, Deallocate, Range};
pub use memory::Memory;
pub use operation::{Failure, Operation, Stage, Step, Trouble, Work};
pub use slots::{Slot, Slots};

/// Bytes of a file, one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// First one.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

impl Extent {
    /// The first byte after it.
    #[must_use]
    pub fn end(self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// The files of a controller.
pub trait Files {
    /// What a file is known by.
    type Id: Copy;

    /// How the bytes of a file are moved.
    ///
    /// # Errors
    /// There is no such file.
    fn access(&mut self, file: Self::Id) -> io::Result<Access<'_>>;

    /// The ring, and the number by which it knows a file.
    ///
    /// # Errors
    /// There is no such file.
    fn ring(&mut self, file: Self::Id) -> io::Result<(&mut Ring, u32)>;

    /// Whether the page cache of the host takes part: what it could not write back it tells of
    /// later, to a sync.
    fn is_cached(&self, file: Self::Id) -> bool;

    /// Whether a durable write is a write and then a sync, so that it is known which has failed.
    fn syncs_after(&self, file: Self::Id, from_device: bool) -> bool;

    /// How many syncs of a file have failed.
    fn failed_syncs(&self, file: Self::Id) -> u64;

    /// Whether a sync can still make durable what was written: for a write only what it has written
    /// itself, since so many had failed.
    fn can_sync(&self, file: Self::Id, since: Option<u64>) -> bool;

    /// A sync has failed, of an operation on blocks up to `end`.
    fn sync_has_failed(&mut self, file: Self::Id, errno: i32, end: Option<u64>);

    /// A sync begins. Returns what it is until it has ended, where others may be told of its
    /// errors.
    fn begin_sync(&self, file: Self::Id) -> Option<UnderWay>;

    /// Whether other syncs are over. If not, the controller is woken when it is time to ask again.
    fn are_over(&self, beside: &Beside) -> bool;

    /// Whether a file has fewer bytes than that now, or nobody knows.
    fn ends_before(&self, file: Self::Id, end: u64) -> bool;

    /// Whether blocks are given back by a device's command.
    fn discards_by_command(&self, _file: Self::Id) -> bool {
        false
    }

    /// Whether files can be zeroed in place, as far as is known.
    fn can_zero(&self) -> bool {
        true
    }

    /// They cannot.
    fn cannot_zero(&self) {}

    /// A file was written or cleared.
    fn wrote(&self, _file: Self::Id) {}

    /// Whether what has failed with this error, of blocks up to `end`, is to be done over another
    /// path.
    fn fails_over(&self, _end: Option<u64>, _errno: i32) -> bool {
        false
    }
}
