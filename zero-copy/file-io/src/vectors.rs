//! Transfers between memory and files that are over when the call returns, and vectors of memory.

use crate::ring::Durable;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

/// Drops the first `bytes` of what the vectors name.
pub fn skip(iovecs: &mut Vec<libc::iovec>, bytes: usize) {
    let mut rest = bytes;
    let mut whole = 0;
    for iovec in iovecs.iter_mut() {
        if rest < iovec.iov_len {
            iovec.iov_base = iovec.iov_base.wrapping_byte_add(rest);
            iovec.iov_len -= rest;
            break;
        }
        rest -= iovec.iov_len;
        whole += 1;
    }
    iovecs.drain(..whole);
}

/// Reads or writes all bytes of the vectors at `offset` of a file. The vectors are used up.
///
/// # Errors
/// What the system says; the file ends before the vectors do.
///
/// # Safety
/// The memory that the vectors name is valid, and others may write it meanwhile.
pub unsafe fn transfer_now(
    file: &OwnedFd,
    write: Option<Durable>,
    iovecs: &mut Vec<libc::iovec>,
    offset: u64,
) -> io::Result<()> {
    let mut at = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    while !iovecs.is_empty() {
        let count = libc::c_int::try_from(iovecs.len()).map_err(io::Error::other)?;
        // SAFETY: as the caller promises; the array of vectors lives throughout the call.
        let moved = unsafe {
            if write.is_some() {
                libc::pwritev(file.as_raw_fd(), iovecs.as_ptr(), count, at)
            } else {
                libc::preadv(file.as_raw_fd(), iovecs.as_ptr(), count, at)
            }
        };
        let Ok(moved) = usize::try_from(moved) else {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        };
        if moved == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at += libc::off_t::try_from(moved).map_err(io::Error::other)?;
        skip(iovecs, moved);
    }
    Ok(())
}

/// Fills the memory that the vectors name with zeroes.
///
/// # Safety
/// It is valid and writable, and others may write it meanwhile.
pub unsafe fn fill_with_zeroes(iovecs: &[libc::iovec]) {
    for iovec in iovecs {
        // SAFETY: as the caller promises.
        unsafe { std::ptr::write_bytes(iovec.iov_base.cast::<u8>(), 0, iovec.iov_len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_transfer_goes_on_where_it_ended() {
        let mut bytes = [0_u8; 30];
        let vectors = |bytes: &mut [u8]| -> Vec<libc::iovec> {
            bytes
                .chunks_mut(10)
                .map(|c| libc::iovec {
                    iov_base: c.as_mut_ptr().cast(),
                    iov_len: c.len(),
                })
                .collect()
        };
        let whole = vectors(&mut bytes);
        for (skipped, left, first) in [(0, 3, 10), (9, 3, 1), (10, 2, 10), (25, 1, 5)] {
            let mut rest = whole.clone();
            skip(&mut rest, skipped);
            assert_eq!((rest.len(), rest[0].iov_len), (left, first));
        }
        let mut rest = whole;
        skip(&mut rest, 30);
        assert!(rest.is_empty());
    }
}
