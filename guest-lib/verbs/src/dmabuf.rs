//! Registration of memory by its file (`ibv_reg_dmabuf_mr`): a memfd, or a DMA-BUF whose pages are
//! memory, such as udmabuf's.
//!
//! The file is mapped here and registered as any memory of the program, so the backend and the
//! driver need not know of it. Memory of devices, which no system call copies and no driver pins,
//! is refused (`EOPNOTSUPP`).

use crate::errno::{EINVAL, EOPNOTSUPP, fail_null};
use crate::memory::{domain, publish_mapped, rights};
use crate::sys::*;
use farlane_abi::PAGE_BYTES;
use farlane_abi::rdma::ACCESS_LOCAL_WRITE;
use farlane_abi::width::{halves, to_u64};
use farlane_rdma_client::Mr;
use farlane_sys::Mmap;
use rustix::io::Errno;
use rustix::mm::{Advice, ProtFlags};
use std::ffi::c_int;
use std::os::fd::BorrowedFd;

/// `linux/magic.h`: "DMAB".
const DMA_BUF_MAGIC: u32 = 0x444d_4142;
/// `linux/magic.h`.
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

/// Whether a descriptor is of memory: only that knows seals; or of a DMA-BUF, which may be.
fn is_memory(file: BorrowedFd<'_>) -> bool {
    let is_dma_buf = || {
        let [system, _] = halves(rustix::fs::fstatfs(file)?.f_type.cast_unsigned());
        Ok::<_, Errno>(system == DMA_BUF_MAGIC)
    };
    rustix::fs::fcntl_get_seals(file).is_ok() || is_dma_buf().unwrap_or(false)
}

/// Bytes of a page of a file's memory, as the system maps and unmaps it.
fn page_bytes(file: BorrowedFd<'_>) -> u64 {
    let huge = rustix::fs::fstatfs(file).ok().and_then(|system| {
        let [kind, _] = halves(system.f_type.cast_unsigned());
        let bytes = u64::try_from(system.f_bsize).ok()?;
        (kind == HUGETLBFS_MAGIC).then_some(bytes)
    });
    huge.unwrap_or(PAGE_BYTES)
}

/// The pages that `length` bytes at `offset` lie in: where the first one begins, and how many bytes
/// they are. None where they end beyond all numbers.
fn whole_pages(offset: u64, length: u64, page: u64) -> Option<(u64, u64)> {
    let begin = offset - offset % page;
    let end = offset.checked_add(length)?;
    let end = end.checked_next_multiple_of(page)?;
    Some((begin, end - begin))
}

/// Maps `length` bytes at `offset`, with all their pages. Returns the address of the first one,
/// too.
fn map(
    file: BorrowedFd<'_>,
    offset: u64,
    length: usize,
    is_written: bool,
) -> Result<(Mmap, usize), c_int> {
    // The kernel has nothing before it either that could be asked: a number that is none.
    rustix::io::fcntl_getfd(file).map_err(Errno::raw_os_error)?;
    if !is_memory(file) {
        return Err(EINVAL);
    }
    let pages = whole_pages(offset, to_u64(length), page_bytes(file));
    let (begin, span) = pages.ok_or(EINVAL)?;
    let span = usize::try_from(span).map_err(|_| EINVAL)?;
    let (access, populate) = match is_written {
        true => (Mmap::READ_WRITE, Advice::LinuxPopulateWrite),
        false => (ProtFlags::READ, Advice::LinuxPopulateRead),
    };
    let mapping = Mmap::shared(file, begin, span, access);
    let mapping = mapping.map_err(|error| match error {
        // It cannot be mapped.
        Errno::NODEV | Errno::OPNOTSUPP => EOPNOTSUPP,
        error => error.raw_os_error(),
    })?;
    let all = mapping.base().as_ptr();
    // SAFETY: this mapping's own pages, which come to be there and stay as they are.
    let populated = unsafe { rustix::mm::madvise(all.cast(), mapping.len(), populate) };
    populated.map_err(|error| match error {
        // There are no pages of memory behind it.
        Errno::INVAL => EOPNOTSUPP,
        // It ends before.
        Errno::FAULT => EINVAL,
        error => error.raw_os_error(),
    })?;
    let into_page = usize::try_from(offset - begin).map_err(|_| EINVAL)?;
    let first = all.expose_provenance() + into_page;
    Ok((mapping, first))
}

/// `ibv_reg_dmabuf_mr`: `offset` and `iova` lie equally in their pages, as the kernel wants it.
/// Without a descriptor (-1) `EOPNOTSUPP`: by that programs ask whether a device's memory can be
/// registered.
pub unsafe fn register(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    let asked = access.cast_unsigned();
    let access = rights(asked).filter(|_| asked & IBV_ACCESS_ON_DEMAND == 0);
    let Some(access) = access.filter(|_| fd >= 0) else {
        return fail_null(EOPNOTSUPP);
    };
    if length == 0 || offset % PAGE_BYTES != iova % PAGE_BYTES {
        return fail_null(EINVAL);
    }
    // SAFETY: a number that is no descriptor is an error of the call that it is used in.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let (mapping, first) = match map(file, offset, length, access & ACCESS_LOCAL_WRITE != 0) {
        Ok(mapped) => mapped,
        Err(errno) => return fail_null(errno),
    };
    // SAFETY: by the caller's contract.
    let domain = unsafe { domain(pd) };
    // SAFETY: it stays mapped until the registration is gone, and nobody has a reference to it.
    match unsafe { Mr::register(&domain.pd, first, length, iova, access) } {
        // SAFETY: by the caller's contract. What the structure says of the place is the offset.
        Ok(mr) => unsafe {
            let address = std::ptr::without_provenance_mut(usize::try_from(offset).unwrap_or(0));
            publish_mapped(pd, address, length, mr, Some(mapping))
        },
        Err(error) => match error.errno().raw_os_error() {
            // A driver pins no such pages.
            libc::EFAULT => fail_null(EOPNOTSUPP),
            errno => fail_null(errno),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd as _;

    const NAME: &str = "huge pages by their file";
    const HUGE: u64 = 2 << 20;

    fn mapped() -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains(NAME)).count()
    }

    /// A part of one cannot be mapped, nor unmapped.
    #[test]
    fn huge_pages_are_mapped_and_unmapped_whole() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = memfd_create(NAME, flags).unwrap();
        ftruncate(&file, 2 * HUGE).unwrap();
        assert_eq!(page_bytes(file.as_fd()), HUGE);
        for (offset, length, pages) in [
            (0, 4096, (0, HUGE)),
            (HUGE - 8, 16, (0, 2 * HUGE)),
            (HUGE + 4096, 4096, (HUGE, HUGE)),
        ] {
            let span = whole_pages(offset, length, HUGE).unwrap();
            assert_eq!(span, pages, "{offset:#x} {length:#x}");
            match map(file.as_fd(), offset, usize::try_from(length).unwrap(), true) {
                Ok((mapping, first)) => {
                    assert_eq!(mapping.len() as u64, pages.1);
                    let base = mapping.base().as_ptr().addr();
                    assert_eq!((first - base) as u64, offset - pages.0);
                    assert_eq!(mapped(), 1);
                }
                Err(errno) => {
                    assert_eq!(errno, libc::ENOMEM);
                    eprintln!("there are no huge pages to map (vm.nr_hugepages)");
                }
            }
            assert_eq!(mapped(), 0);
        }
        assert_eq!(whole_pages(u64::MAX - 8, 4, HUGE), None);
        assert_eq!(whole_pages(0, u64::MAX, 4096), None);
    }
}
