//! Device memory that the program moves.

use crate::{LENGTH, bytes, errno, memory, totals};
use anyhow::{Result, ensure};
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::AsRawFd as _;

const PART: usize = LENGTH / 4;

/// Reads a part of the file; tells whether the library took the memory for device memory.
fn is_ours(file: &File, content: &[u8], at: *mut u8, length: usize) -> Result<bool> {
    let before = totals()?.requests;
    // SAFETY: memory of this program, as far as it is mapped.
    let moved = unsafe { libc::pread(file.as_raw_fd(), at.cast(), length, 4096) };
    ensure!(
        moved == isize::try_from(length)?,
        "pread returns {moved}, errno {}",
        errno()
    );
    ensure!(
        bytes(at, 0, length) == &content[4096..4096 + length],
        "Other bytes"
    );
    Ok(totals()?.requests > before)
}

/// Ordinary memory, at an address if there is one.
fn ordinary(at: Option<*mut u8>, length: usize) -> Result<*mut u8> {
    let fixed = at.map_or(0, |_| libc::MAP_FIXED_NOREPLACE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let wanted = at.unwrap_or_default().cast::<c_void>();
    // SAFETY: replaces nothing.
    let found = unsafe { libc::mmap(wanted, length, protection, flags, -1, 0) };
    ensure!(at.is_none() || found == wanted, "There is something else");
    ensure!(found != libc::MAP_FAILED, "No memory");
    Ok(found.cast())
}

fn remap(old: *mut u8, old_length: usize, length: usize, to: *mut u8) -> Result<*mut u8> {
    let flags: c_int = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: memory of this program; what is at `to` is not used any more.
    let moved = unsafe { libc::mremap(old.cast(), old_length, length, flags, to.cast::<c_void>()) };
    ensure!(moved.cast() == to, "mremap: errno {}", errno());
    Ok(moved.cast())
}

pub fn moves(file: &File, content: &[u8]) -> Result<()> {
    let first = memory(LENGTH)?;
    let is_ours = |at: *mut u8, length| is_ours(file, content, at, length);
    ensure!(is_ours(first, LENGTH)?);
    // All of it, and something else is where it was.
    let base = remap(first, LENGTH, LENGTH, ordinary(None, LENGTH)?)?;
    ordinary(Some(first), LENGTH)?;
    ensure!(
        is_ours(base, LENGTH)?,
        "What was moved is not device memory any more"
    );
    ensure!(!is_ours(first, LENGTH)?, "What was device memory still is");
    // A part from the middle.
    let second = base.wrapping_add(PART);
    let part = remap(second, PART, PART, ordinary(None, PART)?)?;
    ordinary(Some(second), PART)?;
    ensure!(is_ours(base, PART)? && is_ours(part, PART)?);
    ensure!(is_ours(base.wrapping_add(2 * PART), 2 * PART)?);
    ensure!(!is_ours(second, PART)?);
    // Less of it, where it is; and what cannot be moved stays.
    let half = PART / 2;
    // SAFETY: memory of this program.
    let shorter = unsafe { libc::mremap(part.cast(), PART, half, 0) };
    ensure!(shorter.cast() == part);
    ordinary(Some(part.wrapping_add(half)), half)?;
    ensure!(is_ours(part, half)? && !is_ours(part.wrapping_add(half), half)?);
    // SAFETY: fails.
    let longer = unsafe { libc::mremap(part.cast(), half, PART, 0) };
    ensure!(longer == libc::MAP_FAILED && errno() == libc::ENOMEM);
    ensure!(is_ours(part, half)?);
    // Once more, at another address.
    // SAFETY: a shared mapping of this program.
    let again = unsafe { libc::mremap(part.cast(), 0, half, libc::MREMAP_MAYMOVE) };
    ensure!(again != libc::MAP_FAILED && is_ours(again.cast(), half)? && is_ours(part, half)?);
    // Something else takes its place.
    remap(ordinary(None, half)?, half, half, part)?;
    ensure!(!is_ours(part, half)?);
    Ok(())
}

/// Ranges of device memory below and above all that the allocator of the test maps, each time in
/// another order.
pub fn allocated(file: &File, content: &[u8]) -> Result<()> {
    // SAFETY: a timer of this process, which ends it where it hangs; the addresses are free.
    unsafe {
        libc::alarm(60);
        let stack = std::ptr::from_ref(&file).addr() / LENGTH * LENGTH;
        let above = std::ptr::with_exposed_provenance_mut(stack - (64 << 20));
        let below = std::ptr::with_exposed_provenance_mut(0x1000_0000);
        for at in [above, below] {
            crate::register(ordinary(Some(at), LENGTH)?, LENGTH)?;
        }
        for _ in 0..3 {
            let all: Vec<_> = (0..40).map(|_| memory(PART)).collect::<Result<_>>()?;
            let is_last_ours = is_ours(file, content, all[39], PART)?;
            ensure!(is_last_ours, "What was registered is not known");
            for at in &all {
                ensure!(libc::munmap(at.cast(), PART) == 0);
            }
            let again = ordinary(Some(all[20]), PART)?;
            ensure!(!is_ours(file, content, again, PART)?);
            ensure!(libc::munmap(again.cast(), PART) == 0);
        }
    }
    Ok(())
}
