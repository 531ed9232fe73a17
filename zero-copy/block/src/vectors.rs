//! Transfers between memory and files that are over when the call returns.

use crate::ring::Durable;
use farlane_zero_copy::slices::GuestSlices;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

/// Most vectors of one system call (`IOV_MAX`).
pub const MAX_VECTORS: usize = 1024;

/// Reads or writes all of the guest's memory at `offset` of a file. It is used up.
///
/// # Errors
/// What the system says; the file ends before the memory does.
pub fn transfer_now<V>(
    file: &OwnedFd,
    write: Option<Durable>,
    slices: &mut GuestSlices<V>,
    offset: u64,
) -> io::Result<()> {
    let mut at = offset;
    while !slices.is_empty() {
        let vectors = slices.vectors();
        let vectors = vectors.get(..MAX_VECTORS).unwrap_or(vectors);
        // SAFETY: the slices keep the memory mapped.
        let moved = match unsafe { transfer_some(file, write, vectors, at) } {
            Ok(moved) => moved,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        if moved == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at += u64::try_from(moved).map_err(io::Error::other)?;
        slices.skip(moved);
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
pub(crate) unsafe fn transfer_some(
    file: &OwnedFd,
    write: Option<Durable>,
    vectors: &[libc::iovec],
    offset: u64,
) -> io::Result<usize> {
    let at = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    let count = libc::c_int::try_from(vectors.len()).map_err(io::Error::other)?;
    // SAFETY: as the caller promises; the array of vectors lives throughout the call.
    let moved = unsafe {
        if write.is_some() {
            libc::pwritev(file.as_raw_fd(), vectors.as_ptr(), count, at)
        } else {
            libc::preadv(file.as_raw_fd(), vectors.as_ptr(), count, at)
        }
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}
