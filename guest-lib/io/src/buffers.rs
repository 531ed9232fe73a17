//! Lists of buffers (`struct iovec`). The kernel refuses one that it cannot read with `EFAULT`, and
//! so a program may name one that is not mapped: none is looked at where it is.

use farlane_io_core::Errno;
use farlane_io_core::sys::SavedErrno;
use libc::iovec;
use std::ffi::{c_int, c_void};

/// Most buffers of a call (`IOV_MAX`).
const MOST: usize = 1024;
/// So many are copied at a time, to the stack: signal handlers may read and write, and do not
/// allocate.
const AT_A_TIME: usize = 16;
const NONE: iovec = iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// A list as a call of the program names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferList {
    first: *const iovec,
    count: c_int,
}

impl BufferList {
    pub(crate) fn new(first: *const iovec, count: c_int) -> Self {
        Self { first, count }
    }

    /// What `work` makes of a copy of the list, if one of its buffers `is_wanted`. None where the
    /// kernel refuses the list, too.
    ///
    /// # Safety
    /// Where the kernel may not be asked to copy it (seccomp), the list is `count` buffers.
    pub(crate) unsafe fn copied<T>(
        self,
        is_wanted: impl Fn(&iovec) -> bool,
        work: impl FnOnce(&[iovec]) -> Option<T>,
    ) -> Option<T> {
        let count = usize::try_from(self.count).ok();
        let count = count.filter(|count| (1..=MOST).contains(count))?;
        let mut room = [NONE; AT_A_TIME];
        if count <= AT_A_TIME {
            // SAFETY: as promised by the caller.
            let list = unsafe { copy_of(self.first, &mut room[..count]) }?;
            return list.iter().any(is_wanted).then(|| work(list)).flatten();
        }
        let is_in = |start: usize| {
            let room = &mut room[..AT_A_TIME.min(count - start)];
            // SAFETY: as promised by the caller.
            let part = unsafe { copy_of(self.first.wrapping_add(start), room) };
            part.map(|part| part.iter().any(&is_wanted))
        };
        let mut found = (0..count).step_by(AT_A_TIME).map(is_in);
        // What cannot be read is not looked at further.
        found.find(|is_wanted| *is_wanted != Some(false))??;
        let mut room = vec![NONE; count];
        // SAFETY: as promised by the caller.
        work(unsafe { copy_of(self.first, &mut room) }?)
    }
}

/// As many buffers at `from` as there is room for, unless not all of that is mapped.
///
/// # Safety
/// Where the kernel may not be asked to copy them, they are there.
unsafe fn copy_of(from: *const iovec, room: &mut [iovec]) -> Option<&[iovec]> {
    let bytes = size_of_val(room);
    let part = |base: *mut c_void| iovec {
        iov_base: base,
        iov_len: bytes,
    };
    let to = part(room.as_mut_ptr().cast());
    let at = part(from.cast_mut().cast());
    let saved = SavedErrno::new();
    // This thread's number: a process whose first thread has ended is not found by its own.
    // SAFETY: the kernel writes the room, which is so long, and checks what it reads.
    let moved =
        unsafe { libc::process_vm_readv(libc::gettid(), &raw const to, 1, &raw const at, 1, 0) };
    let error = std::io::Error::last_os_error().raw_os_error();
    drop(saved);
    let is_refused = moved < 0 && error != Some(Errno::FAULT.raw_os_error());
    if is_refused && !from.is_null() {
        // SAFETY: as promised by the caller; the room is this function's own.
        unsafe {
            std::ptr::copy_nonoverlapping(at.iov_base.cast::<u8>(), to.iov_base.cast(), bytes)
        };
    } else if usize::try_from(moved) != Ok(bytes) {
        return None;
    }
    Some(room)
}
