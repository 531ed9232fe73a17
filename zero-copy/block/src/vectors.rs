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
    let mut at = offset;
    while !iovecs.is_empty() {
        // SAFETY: as the caller promises.
        let moved = match unsafe { transfer_some(file, write, iovecs, at) } {
            Ok(moved) => moved,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        if moved == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at += u64::try_from(moved).map_err(io::Error::other)?;
        skip(iovecs, moved);
    }
    Ok(())
}

/// Reads or writes bytes of the vectors at `offset` of a file, by one system call. Returns how many
/// there were: fewer than all where the file ends, and where there are very many.
///
/// # Errors
/// What the system says.
///
/// # Safety
/// The memory that the vectors name is valid, and others may write it meanwhile.
pub unsafe fn transfer_some(
    file: &OwnedFd,
    write: Option<Durable>,
    iovecs: &[libc::iovec],
    offset: u64,
) -> io::Result<usize> {
    let at = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    let count = libc::c_int::try_from(iovecs.len()).map_err(io::Error::other)?;
    // SAFETY: as the caller promises; the array of vectors lives throughout the call.
    let moved = unsafe {
        if write.is_some() {
            libc::pwritev(file.as_raw_fd(), iovecs.as_ptr(), count, at)
        } else {
            libc::preadv(file.as_raw_fd(), iovecs.as_ptr(), count, at)
        }
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

/// Takes the first `bytes` of what the vectors name away from them, and returns them.
#[must_use]
pub fn take_front(iovecs: &mut Vec<libc::iovec>, bytes: usize) -> Vec<libc::iovec> {
    let mut front = Vec::new();
    let mut left = bytes;
    for iovec in iovecs.iter() {
        if left == 0 {
            break;
        }
        let length = iovec.iov_len.min(left);
        front.push(libc::iovec {
            iov_base: iovec.iov_base,
            iov_len: length,
        });
        left -= length;
    }
    skip(iovecs, bytes - left);
    front
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
        let mut rest = whole.clone();
        skip(&mut rest, 30);
        assert!(rest.is_empty());
        let mut rest = whole;
        let front = take_front(&mut rest, 12);
        let ends = |vectors: &[libc::iovec]| -> Vec<_> {
            let end = |v: &libc::iovec| (v.iov_base.addr() - bytes.as_ptr().addr(), v.iov_len);
            vectors.iter().map(end).collect()
        };
        assert_eq!(ends(&front), [(0, 10), (10, 2)]);
        assert_eq!(ends(&rest), [(12, 8), (20, 10)]);
        assert_eq!(take_front(&mut rest, 40).len(), 2);
        assert!(rest.is_empty());
    }
}
