//! `ibv_advise_mr`: the pages of registered memory that requests will need.

use crate::errno::{EINVAL, EOPNOTSUPP, fail};
use crate::memory::domain;
use crate::sys::*;
use farlane_abi::width::to_usize;
use farlane_rdma_client::Mr;
use std::ffi::c_int;
use std::sync::Arc;

/// The memory of an element: address and length, within the program's registration of its key.
fn memory(mr: &Mr, element: &ibv_sge) -> Option<(usize, usize)> {
    let (address, length) = (to_usize(element.addr), to_usize(element.length.into()));
    let skip = address.checked_sub(mr.address())?;
    let end = skip.checked_add(length)?;
    (end <= mr.length()).then_some((address, length))
}

/// Has the kernel bring pages in, and has it make private copies of them where they are to be
/// written.
fn populate(address: usize, length: usize, advice: c_int) -> Result<(), c_int> {
    let page = rustix::param::page_size();
    let first = address & !(page - 1);
    let end = address
        .checked_add(length)
        .and_then(|end| end.checked_next_multiple_of(page))
        .ok_or(EINVAL)?;
    let first_page = std::ptr::with_exposed_provenance_mut(first);
    // SAFETY: both advices change no byte of memory, whosever it is.
    match unsafe { libc::madvise(first_page, end - first, advice) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(EINVAL)),
    }
}

/// `ibv_advise_mr`. It returns when the pages are there, also without `IBV_ADVISE_MR_FLAG_FLUSH`.
/// `EINVAL` of a key that is none of the domain's, or of memory outside of its registration;
/// `EFAULT` where nothing is mapped.
pub unsafe extern "C" fn advise(
    pd: *mut ibv_pd,
    advice: ibv_advise_mr_advice,
    flags: u32,
    list: *mut ibv_sge,
    count: u32,
) -> c_int {
    let advice = match advice {
        IBV_ADVISE_MR_ADVICE_PREFETCH => Some(libc::MADV_POPULATE_READ),
        IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE => Some(libc::MADV_POPULATE_WRITE),
        // Nothing is kept of pages that are there: they need no telling.
        IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => None,
        _ => return fail(EOPNOTSUPP),
    };
    if flags & !IBV_ADVISE_MR_FLAG_FLUSH != 0 || count == 0 {
        return fail(EINVAL);
    }
    // SAFETY: by the caller's contract.
    let (domain, elements) = unsafe {
        let elements = std::slice::from_raw_parts(list, to_usize(count.into()));
        (domain(pd), elements)
    };
    for element in elements {
        let Some(mr) = domain.shared.importable.registration_of_key(element.lkey) else {
            return fail(EINVAL);
        };
        let is_here = Arc::ptr_eq(&mr.pd(), &domain.pd);
        let Some((address, length)) = memory(&mr, element).filter(|_| is_here) else {
            return fail(EINVAL);
        };
        if let Some(advice) = advice.filter(|_| length != 0)
            && let Err(errno) = populate(address, length, advice)
        {
            return fail(errno);
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_there_after_an_advice() {
        let page = rustix::param::page_size();
        // SAFETY: a new private mapping.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4 * page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(memory, libc::MAP_FAILED);
        let address = memory.expose_provenance();
        let resident = || {
            let mut pages = [0; 4];
            // SAFETY: the mapping has four pages.
            let result = unsafe { libc::mincore(memory, 4 * page, pages.as_mut_ptr()) };
            assert_eq!(result, 0);
            pages.map(|page| page & 1)
        };
        assert_eq!(resident(), [0; 4]);
        // A byte on either side of a page's end.
        populate(address + 2 * page - 1, 2, libc::MADV_POPULATE_WRITE).unwrap();
        assert_eq!(resident(), [0, 1, 1, 0]);
        // SAFETY: the mapping is not used any more.
        assert_eq!(unsafe { libc::munmap(memory, 4 * page) }, 0);
        assert!(populate(address, page, libc::MADV_POPULATE_READ).is_err());
        assert_eq!(
            populate(usize::MAX - 1, 1, libc::MADV_POPULATE_READ),
            Err(EINVAL)
        );
    }
}
