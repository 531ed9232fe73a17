//! `ibv_advise_mr`: the pages of registered memory that requests will need.

use crate::errno::{EINVAL, ENOMEM, EOPNOTSUPP, fail};
use crate::memory::{Domain, domain};
use crate::sys::*;
use farlane_abi::rdma::ACCESS_LOCAL_WRITE;
use farlane_abi::width::to_usize;
use libc::EFAULT;
use std::ffi::c_int;
use std::sync::Arc;

/// Whether an advice can be given of a registration in the domain of the call: `EPERM` in another
/// one, and where memory that is to be written has no right to be.
fn check(is_here: bool, access: u32, advice: ibv_advise_mr_advice) -> Result<(), c_int> {
    let is_write = advice == IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
    if !is_here || is_write && access & ACCESS_LOCAL_WRITE == 0 {
        return Err(libc::EPERM);
    }
    Ok(())
}

/// Where the memory of an element is, address and length, in the registration of its key.
fn memory(
    domain: &Domain,
    element: &ibv_sge,
    advice: ibv_advise_mr_advice,
) -> Result<(usize, usize), c_int> {
    let registration = domain.shared.importable.registration_of_key(element.lkey);
    let mr = registration.ok_or(EFAULT)?;
    check(Arc::ptr_eq(&mr.pd(), &domain.pd), mr.access(), advice)?;
    let length = to_usize(element.length.into());
    let address = mr.find(element.addr, length).ok_or(EFAULT)?;
    Ok((address, length))
}

/// Has the kernel bring pages in, and has it make private copies of them where they are to be
/// written.
fn populate(address: usize, length: usize, advice: c_int) -> Result<(), c_int> {
    let page = rustix::param::page_size();
    let first = address & !(page - 1);
    let end = address
        .checked_add(length)
        .and_then(|end| end.checked_next_multiple_of(page))
        .ok_or(EFAULT)?;
    let (first_page, length) = (std::ptr::with_exposed_provenance_mut(first), end - first);
    // SAFETY: both advices change no byte of memory, whosever it is.
    if unsafe { libc::madvise(first_page, length, advice) } == 0 {
        return Ok(());
    }
    let errno = std::io::Error::last_os_error().raw_os_error();
    // It says so of memory that there is none of, and that there is none left.
    // SAFETY: it does nothing but look whether something is mapped everywhere (msync(2)).
    let is_mapped = || unsafe { libc::msync(first_page, length, libc::MS_ASYNC) } == 0;
    match errno {
        Some(ENOMEM) if !is_mapped() => Err(EFAULT),
        errno => Err(errno.unwrap_or(EINVAL)),
    }
}

/// `ibv_advise_mr`. It returns when the pages are there, also without `IBV_ADVISE_MR_FLAG_FLUSH`.
/// Elements name memory as work requests do. Errors are those of ibv_advise_mr(3), which for some
/// has several: `EFAULT` of a key that is none, of memory outside of its registration, and where
/// nothing is mapped; `EPERM` of a key of another domain, and of
/// `IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE` without the right of local writing.
pub unsafe extern "C" fn advise(
    pd: *mut ibv_pd,
    advice: ibv_advise_mr_advice,
    flags: u32,
    list: *mut ibv_sge,
    count: u32,
) -> c_int {
    let populating = match advice {
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
        let (address, length) = match memory(domain, element, advice) {
            Ok(found) => found,
            Err(errno) => return fail(errno),
        };
        if let Some(how) = populating.filter(|_| length != 0)
            && let Err(errno) = populate(address, length, how)
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
        for nowhere in [address, usize::MAX - 1] {
            let refused = populate(nowhere, 1, libc::MADV_POPULATE_READ);
            assert_eq!(refused, Err(EFAULT));
        }
    }

    #[test]
    fn advice_is_given_of_ones_own_memory_and_by_its_rights() {
        let (read, write) = (
            IBV_ADVISE_MR_ADVICE_PREFETCH,
            IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        );
        assert_eq!(check(true, 0, read), Ok(()));
        assert_eq!(check(true, ACCESS_LOCAL_WRITE, write), Ok(()));
        assert_eq!(check(true, 0, write), Err(libc::EPERM));
        assert_eq!(check(false, ACCESS_LOCAL_WRITE, read), Err(libc::EPERM));
    }
}
