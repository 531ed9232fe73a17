//! Memory of the program that others can map: bytes of a file of memory.
//!
//! What is such memory already (a memfd, a file of tmpfs or hugetlbfs, as DPDK and SPDK allocate)
//! is found by its mapping. Where the user has allowed it ([`SHARE_VARIABLE`]), private memory
//! becomes such memory while it is registered: its pages move into a memfd, and back into private
//! memory with the last registration. In between
//!
//! * a child of `fork` shares them with its parent instead of having a copy;
//! * what another thread writes at the very moment of a move may be lost, so that the program must
//!   not write memory while it registers it, or ends the registration.

use crate::Origin;
use crate::maps::{Behind, FileId, behind};
use farlane_abi::PAGE_BYTES;
use farlane_abi::width::to_usize;
use farlane_sys::Mmap;
use farlane_sys::sync::lock;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate};
use rustix::fs::{OFlags, fcntl_getfl, memfd_create};
use rustix::io::Errno;
use std::ffi::CStr;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::ptr::with_exposed_provenance;
use std::sync::Mutex;

/// The environment variable that allows private memory to become shared while it is registered:
/// `1`.
pub const SHARE_VARIABLE: &str = "FARLANE_SHARE_MEMORY";

/// Shorter memory is not looked at: the list of all mappings is read for that.
const FEWEST_BYTES: usize = 64 << 10;

/// Memory of the program that is bytes of a file.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    /// The file. It may be another owner's, too.
    pub(crate) file: OwnedFd,
    /// Offset of the first byte in it.
    pub(crate) offset: u64,
    lease: Option<Lease>,
}

impl SharedMemory {
    /// What keeps it as it is: to be held as long as somebody relies on that.
    pub(crate) fn into_lease(self) -> Option<Lease> {
        self.lease
    }
}

/// One user of memory that was moved.
#[derive(Debug)]
pub(crate) struct Lease {
    file: FileId,
    origin: Origin,
}

/// Private memory that lies in a memfd now.
#[derive(Debug)]
struct Moved {
    id: FileId,
    file: OwnedFd,
    range: Range<usize>,
    users: usize,
}

/// All that was moved of this process.
static MOVED: Mutex<Vec<Moved>> = Mutex::new(Vec::new());

/// Finds the file behind `length` bytes at `address`, to be written if `writable`; moves them into
/// one if they are private and `may_move`. `None` where there is none.
///
/// # Safety
/// The memory is mapped, and nobody writes it now, if `may_move`.
pub(crate) unsafe fn shared_memory(
    address: usize,
    length: usize,
    writable: bool,
    may_move: bool,
) -> Option<SharedMemory> {
    if length < FEWEST_BYTES {
        return None;
    }
    let range = address..address.checked_add(length)?;
    let mut moved = lock(&MOVED);
    let maps = std::fs::read("/proc/self/maps").ok()?;
    match behind(&String::from_utf8_lossy(&maps), &range)? {
        Behind::File {
            file,
            offset,
            writable: allowed,
        } if allowed || !writable => {
            if let Some(known) = moved.iter_mut().find(|moved| moved.id == file) {
                return known.lease(offset).ok();
            }
            Some(SharedMemory {
                file: descriptor_of(file, writable)?,
                offset,
                lease: None,
            })
        }
        Behind::Private if may_move && is_pages(&range) => {
            // SAFETY: private memory, as the kernel says; the rest is promised by the caller.
            let mut new = unsafe { Moved::new(range) }.ok()?;
            let shared = new.lease(0);
            moved.push(new);
            shared.ok()
        }
        _ => None,
    }
}

fn is_pages(range: &Range<usize>) -> bool {
    let page = to_usize(PAGE_BYTES);
    range.start.is_multiple_of(page) && range.end.is_multiple_of(page)
}

/// A descriptor of this process for a file of memory, as a new one.
fn descriptor_of(id: FileId, writable: bool) -> Option<OwnedFd> {
    let entries = std::fs::read_dir("/proc/self/fd").ok()?;
    entries.flatten().find_map(|entry| {
        let number: RawFd = entry.file_name().to_str()?.parse().ok()?;
        // SAFETY: duplicated at once; if another thread has closed it the kernel says so, and if it
        // is another file now, the look at the copy does.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        // Only memory knows seals; others may have to be asked, which may wait.
        fcntl_get_seals(file).ok()?;
        let file = rustix::io::fcntl_dupfd_cloexec(file, 3).ok()?;
        fcntl_get_seals(&file).ok()?;
        let mode = fcntl_getfl(&file).ok()? & OFlags::ACCMODE;
        let fits = FileId::of(&fstat(&file).ok()?) == id
            && (mode == OFlags::RDWR || mode == OFlags::RDONLY && !writable);
        fits.then_some(file)
    })
}

/// A file of `length` zeroes that neither side can shrink under the other's feet.
pub(crate) fn sealed_memory(name: &CStr, length: u64) -> Result<OwnedFd, Errno> {
    let memory = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, length)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&memory, seals)?;
    Ok(memory)
}

impl Moved {
    /// Moves pages into a memfd.
    ///
    /// # Safety
    /// They are private memory, and nobody writes them now.
    unsafe fn new(range: Range<usize>) -> Result<Self, Errno> {
        let file = sealed_memory(c"farlane-shared", range.len() as u64)?;
        let id = FileId::of(&fstat(&file)?);
        let copy = Mmap::shared(&file, 0, range.len(), Mmap::READ_WRITE)?;
        // SAFETY: as promised.
        unsafe { replace_by(&range, copy) }?;
        Ok(Self {
            id,
            file,
            range,
            users: 0,
        })
    }

    fn lease(&mut self, offset: u64) -> Result<SharedMemory, Errno> {
        let file = rustix::io::fcntl_dupfd_cloexec(&self.file, 3)?;
        self.users += 1;
        Ok(SharedMemory {
            file,
            offset,
            lease: Some(Lease {
                file: self.id,
                origin: Origin::here(),
            }),
        })
    }

    /// Moves the pages back, where the program still has them there. What fails leaves them shared.
    fn undo(&self) -> Result<(), Errno> {
        let maps = std::fs::read("/proc/self/maps").map_err(|_| Errno::NOENT)?;
        let found = behind(&String::from_utf8_lossy(&maps), &self.range);
        let (file, offset, writable) = (self.id, 0, true);
        if found
            != Some(Behind::File {
                file,
                offset,
                writable,
            })
        {
            return Ok(());
        }
        let copy = Mmap::anonymous(self.range.len())?;
        // SAFETY: mapped, as the kernel says; nobody writes it now, by the contract of who moved
        // it.
        unsafe { replace_by(&self.range, copy) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        let mut moved = lock(&MOVED);
        let Some(index) = moved.iter().position(|moved| moved.id == self.file) else {
            return;
        };
        moved[index].users -= 1;
        if moved[index].users == 0 {
            // Whatever fails: it stays shared.
            let _ = moved.swap_remove(index).undo();
        }
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
    use farlane_sys::Mmap;

    const BYTES: usize = 2 * FEWEST_BYTES;

    /// Bytes of the program, all `with`.
    fn filled(memory: &Mmap, with: u8) {
        // SAFETY: this test's own mapping.
        unsafe { memory.base().as_ptr().write_bytes(with, memory.len()) };
    }

    fn byte(memory: &Mmap, at: usize) -> u8 {
        // SAFETY: inside of this test's own mapping.
        unsafe { memory.base().as_ptr().add(at).read_volatile() }
    }

    fn find(memory: &Mmap, skip: usize, writable: bool, may_move: bool) -> Option<SharedMemory> {
        let address = memory.base().as_ptr().expose_provenance() + skip;
        // SAFETY: mapped, and this thread alone has it.
        unsafe { shared_memory(address, memory.len() - skip, writable, may_move) }
    }

    fn first_byte(shared: &SharedMemory) -> u8 {
        let mut byte = [0];
        rustix::io::pread(&shared.file, &mut byte, shared.offset).unwrap();
        byte[0]
    }

    #[test]
    fn a_mapping_of_a_memfd_is_found_by_its_descriptor() {
        let file = sealed_memory(c"t", 4 * BYTES as u64).unwrap();
        let memory = Mmap::shared(&file, BYTES as u64, BYTES, Mmap::READ_WRITE).unwrap();
        filled(&memory, 7);
        let found = find(&memory, 100, true, false).unwrap();
        assert_eq!(found.offset, BYTES as u64 + 100);
        assert_eq!(first_byte(&found), 7);
        drop((file, found));
        // Nobody can have it whose descriptors are closed.
        assert!(find(&memory, 100, true, true).is_none());
    }

    #[test]
    fn memory_that_may_not_be_written_is_not_given_to_be_written() {
        let file = sealed_memory(c"t", BYTES as u64).unwrap();
        let memory = Mmap::shared(&file, 0, BYTES, rustix::mm::ProtFlags::READ).unwrap();
        assert!(find(&memory, 0, true, true).is_none());
        assert!(find(&memory, 0, false, false).is_some());
    }

    #[test]
    fn private_memory_is_shared_until_its_last_user_ends() {
        let memory = Mmap::anonymous(BYTES).unwrap();
        filled(&memory, 1);
        assert!(find(&memory, 0, true, false).is_none(), "only if it may");
        assert!(find(&memory, 8, true, true).is_none(), "whole pages");
        let first = find(&memory, 0, true, true).unwrap();
        assert_eq!(first_byte(&first), 1);
        rustix::io::pwrite(&first.file, &[2], 5000).unwrap();
        assert_eq!((byte(&memory, 5000), byte(&memory, 5001)), (2, 1));

        let second = find(&memory, 4096, true, true).unwrap();
        assert_eq!(second.offset, 4096);
        drop(first);
        filled(&memory, 3);
        assert_eq!(first_byte(&second), 3);
        let file = second.file.try_clone().unwrap();
        drop(second);
        filled(&memory, 4);
        let mut byte_of_file = [0];
        rustix::io::pread(&file, &mut byte_of_file, 0).unwrap();
        assert_eq!((byte_of_file, byte(&memory, 0)), ([3], 4));
    }

    #[test]
    fn what_the_program_has_replaced_is_not_touched() {
        let memory = Mmap::anonymous(BYTES).unwrap();
        let shared = find(&memory, 0, true, true).unwrap();
        let other = Mmap::anonymous(BYTES).unwrap();
        filled(&other, 9);
        // SAFETY: this test's own addresses; `memory` unmaps what is there when it ends.
        unsafe { other.move_to(memory.base().as_ptr().expose_provenance()) }.unwrap();
        drop(shared);
        assert_eq!(byte(&memory, 0), 9);
    }
}
