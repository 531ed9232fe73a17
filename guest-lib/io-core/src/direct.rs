//! Direct I/O with the addresses of device memory themselves: PCI P2PDMA, and mappings of files on
//! a host.

use crate::files::OpenFile;
use crate::plain::{is_of_file, is_of_memory};
use crate::region::{Buffer, Region};
use crate::sys::{self, Direction};
use rustix::io::Errno;

/// Moves as much as it can of `length` bytes at `offset`, all aligned. Where the file system goes
/// through the page cache after all, it copies from or to the device memory: what is moved is right
/// in any case.
///
/// # Errors
/// When nothing was moved: the caller goes another way.
pub(crate) fn transfer(
    opened: &OpenFile,
    buffer: &Buffer<'_>,
    direction: Direction,
    offset: u64,
) -> Result<usize, Errno> {
    let direct = opened.direct()?;
    let length = buffer.length;
    repeat(opened, buffer.region, length, |done| {
        let memory = std::ptr::with_exposed_provenance_mut(buffer.address + done);
        let (left, offset) = (length - done, offset + done as u64);
        // SAFETY: registered memory, which the program gave for this.
        unsafe { sys::transfer(direction, direct.number(), memory, left, offset) }
    })
}

fn repeat(
    opened: &OpenFile,
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
