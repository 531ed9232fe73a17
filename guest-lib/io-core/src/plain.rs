//! Through the page cache: the kernel copies to and from the mapping; where there is none, or it
//! cannot, to and from a buffer.

use crate::bounce::Bounce;
use crate::files::OpenFile;
use crate::provider::Provider;
use crate::staging;
use crate::sys::{self, Direction};
use rustix::fs::OFlags;
use rustix::io::Errno;

/// Bytes that are copied at a time to memory that the kernel maps and cannot use.
const COPIED: usize = 1 << 20;

/// Moves `length` bytes between `offset` of the file and `address` in memory of `provider`; a read
/// ends at the end of the file.
///
/// # Errors
/// What `pread` or `pwrite` says, when nothing was moved.
pub(crate) fn transfer(
    opened: &OpenFile,
    provider: &dyn Provider,
    direction: Direction,
    (address, length): (usize, usize),
    offset: u64,
) -> Result<usize, Errno> {
    if !provider.is_mapped() {
        return staging::transfer(opened.fd, provider, direction, (address, length), offset);
    }
    in_parts(length, |done| {
        let (address, left) = (address + done, length - done);
        let offset = offset + done as u64;
        let memory = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: registered memory, which the program gave for this.
        let result = unsafe { sys::transfer(direction, opened.fd, memory, left, offset) };
        if !wants_bounce(opened, address, result) {
            return result.map(|moved| (moved, moved < left));
        }
        // Direct I/O of the program itself into memory without pages.
        let length = left.min(COPIED);
        let mut bounce = Bounce::take(length)?;
        let buffer = bounce.bytes(0..length);
        if direction == Direction::Write {
            check(provider, address, buffer.len())?;
            // SAFETY: registered memory.
            unsafe { provider.copy_out(buffer, address) }?;
        }
        let base = buffer.as_mut_ptr().cast();
        // SAFETY: a buffer of our own.
        let moved = unsafe { sys::transfer(direction, opened.fd, base, buffer.len(), offset) }?;
        if direction == Direction::Read {
            check(provider, address, moved)?;
            let filled = buffer.get(..moved).unwrap_or_default();
            // SAFETY: registered memory.
            unsafe { provider.copy_in(address, filled) }?;
        }
        Ok((moved, moved < buffer.len()))
    })
}

/// Whether an error can say that disk and memory do not reach each other.
pub(crate) fn is_refusal(error: Errno) -> bool {
    is_of_memory(error) || is_of_file(error)
}

/// Whether an error says that this disk does not reach this memory, whatever is asked for: the
/// kernel has no pages for it (`EFAULT`), or peer-to-peer has no path (`EREMOTEIO`: mm/gup.c,
/// drivers/pci/p2pdma.c).
pub(crate) fn is_of_memory(error: Errno) -> bool {
    matches!(error, Errno::FAULT | Errno::REMOTEIO)
}

/// Whether an error may be one of this request, or of this file.
pub(crate) fn is_of_file(error: Errno) -> bool {
    matches!(error, Errno::INVAL | Errno::OPNOTSUPP | Errno::PERM)
}

/// Whether the kernel could not use the memory itself: where the program's own descriptor is for
/// direct I/O, and the memory has no pages or is not reached by the disk. What it would refuse with
/// any memory stays refused.
fn wants_bounce(opened: &OpenFile, address: usize, result: Result<usize, Errno>) -> bool {
    let aligned = address.is_multiple_of(opened.file.memory_align);
    let is_direct = opened.flags.contains(OFlags::DIRECT);
    is_direct && aligned && result.is_err_and(is_refusal)
}

/// A mapping may have been taken away under a registration: a copy by the processor must not be the
/// one to find out.
pub(crate) fn check(provider: &dyn Provider, address: usize, length: usize) -> Result<(), Errno> {
    if !provider.is_mapped() {
        return Ok(());
    }
    let page = sys::page_bytes();
    let start = address / page * page;
    let pages = (address + length - start).div_ceil(page);
    let mut answer = vec![0; pages];
    match sys::mincore(start, pages * page, &mut answer) {
        Err(Errno::NOMEM) => Err(Errno::FAULT),
        _ => Ok(()),
    }
}

/// Calls `part` with what is done until all is, or it says that it was short. An error counts only
/// when nothing is done.
fn in_parts(
    length: usize,
    mut part: impl FnMut(usize) -> Result<(usize, bool), Errno>,
) -> Result<usize, Errno> {
    let mut done = 0;
    while done < length {
        match part(done) {
            Ok((moved, short)) => {
                done += moved;
                if short || moved == 0 {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
