//! Direct I/O with the addresses of device memory themselves: PCI P2PDMA, and mappings of files on a host.

use crate::files::Opened;
use crate::region::Region;
use crate::sys;
use rustix::io::Errno;

/// Whether an error says that disk and memory do not reach each other.
pub(crate) fn is_refusal(error: Errno) -> bool {
    matches!(
        error,
        Errno::FAULT | Errno::INVAL | Errno::REMOTEIO | Errno::OPNOTSUPP | Errno::PERM
    )
}

/// Reads as much as it can of `length` bytes at `offset`, all aligned.
///
/// # Errors
/// When nothing was read: the caller goes another way.
pub fn read(
    opened: &Opened,
    region: &Region,
    address: usize,
    length: usize,
    offset: u64,
) -> Result<usize, Errno> {
    let direct = opened.direct()?;
    repeat(opened, region, length, |done| {
        let to = std::ptr::with_exposed_provenance_mut(address + done);
        // SAFETY: registered memory, which the program gave for this.
        unsafe { sys::pread(direct.fd, to, length - done, offset + done as u64) }
    })
}

/// Writes as much as it can of `length` bytes to `offset`, all aligned. Where the file system goes through the page cache after
/// all, it copies from the device memory: what is written is right in any case.
///
/// # Errors
/// When nothing was written: the caller goes another way.
pub fn write(
    opened: &Opened,
    region: &Region,
    address: usize,
    length: usize,
    offset: u64,
) -> Result<usize, Errno> {
    let direct = opened.direct()?;
    repeat(opened, region, length, |done| {
        let from = std::ptr::with_exposed_provenance(address + done);
        // SAFETY: registered memory, which the program gave for this.
        unsafe { sys::pwrite(direct.fd, from, length - done, offset + done as u64) }
    })
}

fn repeat(
    opened: &Opened,
    region: &Region,
    length: usize,
    mut transfer: impl FnMut(usize) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    let align = opened.file.offset_align.unwrap_or(1);
    let mut done = 0;
    while done < length {
        match transfer(done) {
            Ok(0) => break,
            Ok(moved) => {
                done += moved;
                if !(moved as u64).is_multiple_of(align) {
                    break;
                }
            }
            Err(error) if done == 0 => {
                if is_refusal(error) {
                    region.refuse(opened.file.id.device);
                }
                return Err(error);
            }
            Err(_) => break,
        }
    }
    Ok(done)
}
