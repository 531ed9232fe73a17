//! Direct I/O with the addresses of device memory themselves: PCI P2PDMA, and mappings of files on
//! a host.

use crate::files::Opened;
use crate::region::Region;
use crate::sys;
use rustix::io::Errno;

/// Whether an error can say that disk and memory do not reach each other.
pub(crate) fn is_refusal(error: Errno) -> bool {
    is_of_memory(error) || is_of_file(error)
}

/// Whether an error says that this disk does not reach this memory, whatever is asked for: the
/// kernel has no pages for it (`EFAULT`), or peer-to-peer has no path (`EREMOTEIO`: mm/gup.c,
/// drivers/pci/p2pdma.c).
fn is_of_memory(error: Errno) -> bool {
    matches!(error, Errno::FAULT | Errno::REMOTEIO)
}

/// Whether an error may be one of this request, or of this file.
fn is_of_file(error: Errno) -> bool {
    matches!(error, Errno::INVAL | Errno::OPNOTSUPP | Errno::PERM)
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
        unsafe { sys::pread(direct.number(), to, length - done, offset + done as u64) }
    })
}

/// Writes as much as it can of `length` bytes to `offset`, all aligned. Where the file system goes
/// through the page cache after all, it copies from the device memory: what is written is right in
/// any case.
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
        unsafe { sys::pwrite(direct.number(), from, length - done, offset + done as u64) }
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
                opened.file.direct_works();
                done += moved;
                if !(moved as u64).is_multiple_of(align) {
                    break;
                }
            }
            Err(error) if done == 0 => {
                if is_of_memory(error) {
                    region.refuse(opened.file.id.device);
                } else if is_of_file(error) {
                    opened.file.direct_fails();
                }
                return Err(error);
            }
            Err(_) => break,
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files;
    use crate::provider::Soft;
    use std::os::fd::AsRawFd as _;
    use std::sync::Arc;

    #[test]
    fn what_a_file_refuses_says_nothing_of_the_memory() {
        let [file, other] = [0, 1].map(|_| tempfile::tempfile().unwrap());
        let [opened, other] = [&file, &other].map(|f| files::open(f.as_raw_fd()).unwrap());
        let region = Region::new(0x1000, Arc::new(Soft), None);
        let device = opened.file.id.device;
        let ends = |result| repeat(&opened, &region, 4096, |_| result);
        for error in [Errno::INVAL, Errno::OPNOTSUPP, Errno::PERM] {
            assert_eq!(ends(Err(error)), Err(error));
            assert!(!region.is_refused(device) && !opened.file.is_direct_off());
        }
        // Nor of the file, if others work between them.
        for _ in 0..100 {
            assert_eq!(ends(Err(Errno::INVAL)), Err(Errno::INVAL));
            assert_eq!(ends(Ok(4096)), Ok(4096));
        }
        assert!(!opened.file.is_direct_off());
        // One that takes none is not asked again and again.
        for _ in 0..100 {
            assert_eq!(ends(Err(Errno::INVAL)), Err(Errno::INVAL));
        }
        assert!(opened.file.is_direct_off());
        assert!(!other.file.is_direct_off() && !region.is_refused(device));
        for error in [Errno::NOSPC, Errno::IO] {
            assert_eq!(ends(Err(error)), Err(error));
            assert!(!region.is_refused(device));
        }
        assert_eq!(ends(Err(Errno::REMOTEIO)), Err(Errno::REMOTEIO));
        assert!(region.is_refused(device));
    }
}
