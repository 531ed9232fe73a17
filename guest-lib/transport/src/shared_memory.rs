//! Private memory of the program that the backend can map while it is registered.
//!
//! Where that is allowed ([`allow_sharing`]), pages that are registered move into a memfd, and back
//! into private memory when nothing of them is registered any more. In between a child of `fork`
//! shares them with its parent instead of having a copy, and advice (`madvise`, `mlock`) that they
//! were given holds no more. What is written at the moment of a move may be lost, so
//!
//! * the program must not write memory while it registers it, or ends its registration, and nothing
//!   else may have pages of it pinned (`io_uring`'s buffers, another device);
//! * nothing is moved that is registered already, in part or whole: peers may be writing it.

use crate::maps::{Behind, FileId, behind};
use crate::{Origin, PerProcess};
use farlane_abi::PAGE_BYTES;
use farlane_abi::control::MAX_SHARED_BYTES;
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
use farlane_sys::{Mmap, memory_file};
use rustix::fs::{FallocateFlags, SealFlags};
use rustix::fs::{fallocate, fcntl_add_seals, fstat};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::with_exposed_provenance;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The environment variable by which a user allows a program's private memory to become shared
/// while it is registered: `1`.
pub const SHARE_VARIABLE: &str = "FARLANE_SHARE_MEMORY";

/// Shorter memory is not moved: that would cost more than it saves.
const FEWEST_BYTES: usize = 64 << 10;

static ALLOWED: AtomicBool = AtomicBool::new(false);

/// Says whether transports over a socket that are opened from now on may share private memory. Only
/// one library of a process may allow that: what others have registered it does not know.
pub fn allow_sharing(allowed: bool) {
    ALLOWED.store(allowed, Ordering::Relaxed);
}

/// Whether they may.
pub(crate) fn is_sharing_allowed() -> bool {
    ALLOWED.load(Ordering::Relaxed)
}

/// What is registered of this process's memory, and what was moved of it. A child begins anew: what
/// its parent has moved it shares with that, and the rest is its own memory.
static LEDGER: PerProcess<Mutex<Ledger>> = PerProcess::new();

#[derive(Default)]
struct Ledger {
    registered: HashMap<u64, Range<usize>>,
    next: u64,
    moved: Vec<Moved>,
}

/// Private memory that lies in a memfd now.
struct Moved {
    file: FileId,
    range: Range<usize>,
}

/// Memory that is registered. When it is dropped nobody else's writes may be under way to it.
#[derive(Debug)]
pub(crate) struct Registered {
    id: u64,
    origin: Origin,
}

impl Registered {
    /// Takes note of `length` bytes at `address`. Moves them into a memfd, which it returns, where
    /// they are whole pages and the process's own, and nothing of them is registered.
    ///
    /// # Safety
    /// The memory is mapped. Nobody writes it now, nor when the last registration of it ends.
    pub(crate) unsafe fn new(address: usize, length: usize) -> (Self, Option<OwnedFd>) {
        let range = address..address.saturating_add(length);
        let mut ledger = lock(LEDGER.get());
        let file = if ledger.may_move(&range) {
            // SAFETY: as promised; it is private, as the kernel has said.
            unsafe { move_to_file(&range) }.ok()
        } else {
            None
        };
        let file = file.map(|(id, file)| {
            let range = range.clone();
            ledger.moved.push(Moved { file: id, range });
            file
        });
        let id = ledger.next;
        ledger.next += 1;
        ledger.registered.insert(id, range);
        let origin = Origin::here();
        (Self { id, origin }, file)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // A child has its parent's ledger, and ends nothing of that.
        if !self.origin.is_here() {
            return;
        }
        let mut ledger = lock(LEDGER.get());
        let Some(range) = ledger.registered.remove(&self.id) else {
            return;
        };
        ledger.move_back(&range);
    }
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

impl Ledger {
    fn is_registered(&self, range: &Range<usize>) -> bool {
        let mut all = self.registered.values();
        all.any(|registered| overlap(registered, range))
    }

    fn may_move(&self, range: &Range<usize>) -> bool {
        let page = to_usize(PAGE_BYTES);
        (FEWEST_BYTES..=to_usize(MAX_SHARED_BYTES)).contains(&range.len())
            && range.start.is_multiple_of(page)
            && range.end.is_multiple_of(page)
            && !self.is_registered(range)
            && what_is_behind(range) == Some(Behind::Private)
    }

    /// Moves back what lies in a range, wholly or in part, and is not registered any more.
    fn move_back(&mut self, range: &Range<usize>) {
        let mut index = 0;
        while let Some(moved) = self.moved.get(index) {
            if overlap(&moved.range, range) && !self.is_registered(&moved.range) {
                // Whatever fails: it stays shared.
                let _ = self.moved.swap_remove(index).move_back();
            } else {
                index += 1;
            }
        }
    }
}

fn what_is_behind(range: &Range<usize>) -> Option<Behind> {
    let maps = std::fs::read("/proc/self/maps").ok()?;
    behind(&String::from_utf8_lossy(&maps), range)
}

/// Moves pages into a memfd, all of which is there, and which cannot shrink.
///
/// # Safety
/// They are private memory, and nobody writes them now.
unsafe fn move_to_file(range: &Range<usize>) -> Result<(FileId, OwnedFd), Errno> {
    let length = range.len() as u64;
    // Beyond it the kernel would end the program.
    if getrlimit(Resource::Fsize)
        .current
        .is_some_and(|most| most < length)
    {
        return Err(Errno::FBIG);
    }
    let file = memory_file("farlane-shared")?;
    fallocate(&file, FallocateFlags::empty(), 0, length)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    let id = FileId::of(&fstat(&file)?);
    let pages = Mmap::shared(&file, 0, range.len(), Mmap::READ_WRITE)?;
    // SAFETY: as promised.
    unsafe { replace_by(range, pages) }?;
    Ok((id, file))
}

impl Moved {
    /// Moves pages back into private memory, where the program still has them there.
    fn move_back(&self) -> Result<(), Errno> {
        let (file, offset) = (self.file, 0);
        if what_is_behind(&self.range) != Some(Behind::File { file, offset }) {
            return Ok(());
        }
        let pages = Mmap::anonymous(self.range.len())?;
        // SAFETY: mapped, as the kernel says; nobody writes it now, by the contract of who moved
        // it.
        unsafe { replace_by(&self.range, pages) }
    }
}

/// Replaces the pages of a range by those of a mapping as long, with the bytes that they had.
///
/// # Safety
/// They are mapped, and nobody writes them now.
unsafe fn replace_by(range: &Range<usize>, pages: Mmap) -> Result<(), Errno> {
    let from = with_exposed_provenance::<u8>(range.start);
    // SAFETY: mapped, as promised, and as long as the new pages, which nobody else has.
    unsafe { std::ptr::copy_nonoverlapping(from, pages.base().as_ptr(), pages.len()) };
    // SAFETY: the same bytes take the place of those that were there.
    unsafe { pages.move_to(range.start) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 2 * FEWEST_BYTES;

    fn filled(memory: &Mmap, with: u8) {
        // SAFETY: this test's own mapping.
        unsafe { memory.base().as_ptr().write_bytes(with, memory.len()) };
    }

    fn byte(memory: &Mmap, at: usize) -> u8 {
        // SAFETY: inside of this test's own mapping.
        unsafe { memory.base().as_ptr().add(at).read_volatile() }
    }

    fn register(memory: &Mmap, skip: usize, length: usize) -> (Registered, Option<OwnedFd>) {
        let address = memory.base().as_ptr().expose_provenance() + skip;
        // SAFETY: mapped, and this thread alone has it.
        unsafe { Registered::new(address, length) }
    }

    fn byte_of(file: &OwnedFd, at: u64) -> u8 {
        let mut byte = [0];
        rustix::io::pread(file, &mut byte, at).unwrap();
        byte[0]
    }

    #[test]
    fn private_memory_is_shared_until_nothing_of_it_is_registered() {
        let memory = Mmap::anonymous(BYTES).unwrap();
        filled(&memory, 1);
        let (first, file) = register(&memory, 0, BYTES);
        let file = file.unwrap();
        assert_eq!(byte_of(&file, 0), 1);
        rustix::io::pwrite(&file, &[2], 5000).unwrap();
        assert_eq!((byte(&memory, 5000), byte(&memory, 5001)), (2, 1));
        // A part of it, and what begins in it, are not moved once more.
        let (part, none) = register(&memory, 4096, FEWEST_BYTES);
        assert!(none.is_none());
        drop(first);
        filled(&memory, 3);
        assert_eq!(byte_of(&file, 5000), 3);
        drop(part);
        filled(&memory, 4);
        assert_eq!((byte_of(&file, 0), byte(&memory, 0)), (3, 4));
    }

    /// Another thread may be registering memory when a child is made.
    #[test]
    fn a_child_registers_memory_whoever_of_its_parent_does_meanwhile() {
        let memory = Mmap::anonymous(BYTES).unwrap();
        let (registered, file) = register(&memory, 0, BYTES);
        assert!(file.is_some());
        let taken = lock(LEDGER.get());
        // SAFETY: the child has memory of its own registered, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child where it waits for ever.
            unsafe { libc::alarm(60) };
            // The parent's is shared with it, and ends with it.
            drop(registered);
            let is_shared = register(&memory, 0, BYTES).1.is_none();
            let own = Mmap::anonymous(BYTES).unwrap();
            let is_moved = register(&own, 0, BYTES).1.is_some();
            // SAFETY: ends the child without running anything of the test harness.
            unsafe { libc::_exit(i32::from(!is_shared || !is_moved)) };
        }
        drop(taken);
        let mut status = -1;
        // SAFETY: waits for the child just made.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }

    #[test]
    fn what_is_registered_in_part_is_not_moved() {
        let memory = Mmap::anonymous(BYTES).unwrap();
        let (part, none) = register(&memory, BYTES - 8, 8);
        assert!(none.is_none());
        let (whole, none) = register(&memory, 0, BYTES);
        assert!(none.is_none(), "a peer may write the last bytes");
        drop((whole, part));
        assert!(register(&memory, 0, BYTES).1.is_some());
    }

    #[test]
    fn only_whole_private_pages_are_moved() {
        let file = memory_file("t").unwrap();
        rustix::fs::ftruncate(&file, BYTES as u64).unwrap();
        let shared = Mmap::shared(&file, 0, BYTES, Mmap::READ_WRITE).unwrap();
        assert!(register(&shared, 0, BYTES).1.is_none());
        let memory = Mmap::anonymous(BYTES).unwrap();
        for (skip, length) in [(8, BYTES - 8), (0, BYTES - 8), (0, FEWEST_BYTES - 4096)] {
            assert!(
                register(&memory, skip, length).1.is_none(),
                "{length} at {skip}"
            );
        }
    }

    #[test]
    fn what_the_program_has_replaced_is_not_touched() {
        let memory = Mmap::anonymous(BYTES).unwrap();
        let (registered, file) = register(&memory, 0, BYTES);
        assert!(file.is_some());
        let other = Mmap::anonymous(BYTES).unwrap();
        filled(&other, 9);
        // SAFETY: this test's own addresses; `memory` unmaps what is there when it ends.
        unsafe { other.move_to(memory.base().as_ptr().expose_provenance()) }.unwrap();
        drop(registered);
        assert_eq!(byte(&memory, 0), 9);
    }
}
