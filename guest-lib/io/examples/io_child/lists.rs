//! Lists of buffers: those that are nowhere, and long ones.

use crate::{LENGTH, bytes, errno, memory, set_errno, vector};
use anyhow::{Result, ensure};
use libc::iovec;
use std::ffi::c_int;
use std::fs::File;
use std::os::fd::AsRawFd as _;

const PAGE: usize = 4096;
/// Bytes of each buffer of a long list.
const PART: usize = 100;

/// The results of every call that has a list.
///
/// # Safety
/// What the list says that can be read is memory of this program.
unsafe fn all(fd: c_int, list: *const iovec, count: c_int) -> [isize; 6] {
    // SAFETY: as promised by the caller.
    unsafe {
        [
            libc::readv(fd, list, count),
            libc::preadv(fd, list, count, 0),
            libc::preadv2(fd, list, count, 0, 0),
            libc::writev(fd, list, count),
            libc::pwritev(fd, list, count, 0),
            libc::pwritev2(fd, list, count, 0, 0),
        ]
    }
}

/// A list that the kernel cannot read is refused with `EFAULT`, and nothing is moved.
pub fn lists(file: &File, content: &[u8]) -> Result<()> {
    let fd = file.as_raw_fd();
    let base = memory(LENGTH)?;
    // SAFETY: memory of this program, and calls that are refused.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let pages = libc::mmap(std::ptr::null_mut(), 3 * PAGE, access, flags, -1, 0);
        ensure!(pages != libc::MAP_FAILED);
        let (hidden, unmapped) = (pages.byte_add(PAGE), pages.byte_add(2 * PAGE));
        ensure!(libc::mprotect(hidden, PAGE, libc::PROT_NONE) == 0);
        ensure!(libc::munmap(unmapped, PAGE) == 0);
        // It begins where it can be read.
        let half = hidden.cast::<iovec>().sub(1);
        half.write(vector(base, 0, PART));
        let nowhere: *const iovec = std::ptr::null();
        for list in [
            hidden.cast(),
            unmapped.cast(),
            half,
            nowhere.wrapping_add(1),
            nowhere,
        ] {
            for count in [2, 40, 1024] {
                set_errno(0);
                let moved = all(fd, list, count);
                ensure!(
                    moved == [-1; 6] && errno() == libc::EFAULT,
                    "{count} at {list:?}: {moved:?}, errno {}",
                    errno()
                );
            }
        }
        ensure!(libc::lseek(fd, 0, libc::SEEK_CUR) == 0, "The position");

        // Only the last buffer of many is device memory.
        let mut host = vec![0_u8; 39 * PART];
        let mut list: Vec<_> = (0..39)
            .map(|at| vector(host.as_mut_ptr(), at * PART, PART))
            .collect();
        list.push(vector(base, 0, PART));
        let moved = libc::preadv(fd, list.as_ptr(), 40, 3);
        ensure!(moved == 4000, "{moved} of a long list");
        ensure!(host == content[3..3 + 39 * PART], "Other bytes");
        ensure!(bytes(base, 0, PART) == &content[3 + 39 * PART..3 + 40 * PART]);
    }
    Ok(())
}
