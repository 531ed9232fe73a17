//! Through the page cache: the kernel copies to and from the mapping, or to and from a buffer where
//! there is no mapping.

use crate::direct;
use crate::files::Opened;
use crate::region::Region;
use crate::sys;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::ops::Range;

/// Bytes of a bounce buffer.
const BOUNCE: usize = 1 << 20;

/// Memory for a copy, aligned to pages: descriptors of the program may be for direct I/O.
pub(crate) struct Bounce {
    memory: Vec<u8>,
    start: usize,
}

impl Bounce {
    pub(crate) fn new(length: usize) -> Self {
        let page = sys::page_bytes();
        let memory = vec![0; length + page];
        let start = memory.as_ptr().align_offset(page).min(page);
        Self { memory, start }
    }

    pub(crate) fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        let range = self.start + range.start..self.start + range.end;
        self.memory.get_mut(range).unwrap_or_default()
    }
}

/// Reads `length` bytes at `offset` of the file to `address` in `region`; less at the end of the
/// file.
///
/// # Errors
/// What `pread` says, when nothing was read.
pub fn read(
    opened: &Opened,
    region: &Region,
    address: usize,
    length: usize,
    offset: u64,
) -> Result<usize, Errno> {
    in_parts(length, |done| {
        let left = length - done;
        let at = offset + done as u64;
        if region.provider.is_mapped() {
            let to = std::ptr::with_exposed_provenance_mut(address + done);
            // SAFETY: registered memory, which the program gave for this.
            let result = unsafe { sys::pread(opened.fd, to, left, at) };
            if !wants_bounce(opened, address + done, result) {
                return result.map(|moved| (moved, moved < left));
            }
        }
        // Direct I/O of the program itself into memory without pages, or no mapping at all.
        let length = left.min(BOUNCE);
        let mut bounce = Bounce::new(length);
        let buffer = bounce.bytes(0..length);
        // SAFETY: a buffer of our own.
        let moved = unsafe { sys::pread(opened.fd, buffer.as_mut_ptr().cast(), buffer.len(), at) }?;
        let short = moved < buffer.len();
        let filled = buffer.get(..moved).unwrap_or_default();
        check(region, address + done, moved)?;
        // SAFETY: registered memory.
        unsafe { region.provider.copy_in(address + done, filled) }?;
        Ok((moved, short))
    })
}

/// Writes `length` bytes at `address` in `region` to `offset` of the file.
///
/// # Errors
/// What `pwrite` says, when nothing was written.
pub fn write(
    opened: &Opened,
    region: &Region,
    address: usize,
    length: usize,
    offset: u64,
) -> Result<usize, Errno> {
    in_parts(length, |done| {
        let left = length - done;
        let at = offset + done as u64;
        if region.provider.is_mapped() {
            let from = std::ptr::with_exposed_provenance(address + done);
            // SAFETY: registered memory, which the program gave for this.
            let result = unsafe { sys::pwrite(opened.fd, from, left, at) };
            if !wants_bounce(opened, address + done, result) {
                return result.map(|moved| (moved, moved < left));
            }
        }
        let length = left.min(BOUNCE);
        let mut bounce = Bounce::new(length);
        let buffer = bounce.bytes(0..length);
        check(region, address + done, buffer.len())?;
        // SAFETY: registered memory.
        unsafe { region.provider.copy_out(buffer, address + done) }?;
        // SAFETY: a buffer of our own.
        let moved = unsafe { sys::pwrite(opened.fd, buffer.as_ptr().cast(), buffer.len(), at) }?;
        Ok((moved, moved < buffer.len()))
    })
}

/// Whether the kernel could not use the memory itself: where the program's own descriptor is for
/// direct I/O, and the memory has no pages or is not reached by the disk. What it would refuse with
/// any memory stays refused.
fn wants_bounce(opened: &Opened, address: usize, result: Result<usize, Errno>) -> bool {
    let aligned = address.is_multiple_of(opened.file.memory_align);
    let is_direct = opened.flags.contains(OFlags::DIRECT);
    is_direct && aligned && result.is_err_and(direct::is_refusal)
}

/// A mapping may have been taken away under a registration: a copy by the processor must not be the
/// one to find out.
pub(crate) fn check(region: &Region, address: usize, length: usize) -> Result<(), Errno> {
    if !region.provider.is_mapped() {
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

/// The part of a request at an address, for what must be sent again another way.
pub(crate) fn part(address: usize, offset: u64, range: &Range<usize>) -> (usize, usize, u64) {
    (
        address + range.start,
        range.end - range.start,
        offset + range.start as u64,
    )
}
