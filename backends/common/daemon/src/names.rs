//! Users and groups of this system, by their names or numbers.

use rustix::io::Errno;
use std::ffi::{CString, c_char, c_int};
use std::mem::MaybeUninit;

/// Most bytes of an entry that are looked at: a group's members are among them.
const MAX_ENTRY_BYTES: usize = 1 << 20;

/// The number of a user, by that or by the name.
#[must_use]
pub fn user(text: &str) -> Option<u32> {
    number(text, |name, buffer| {
        let mut entry = MaybeUninit::<libc::passwd>::uninit();
        let mut found = std::ptr::null_mut();
        // SAFETY: the name ends in a zero; entry and buffer are writable, the buffer as long as is
        // said, and outlive the use of what is found, which lies in the entry.
        unsafe {
            let error = libc::getpwnam_r(
                name,
                entry.as_mut_ptr(),
                buffer.as_mut_ptr(),
                buffer.len(),
                &raw mut found,
            );
            (error, found.as_ref().map(|user| user.pw_uid))
        }
    })
}

/// The number of a group, by that or by the name.
#[must_use]
pub fn group(text: &str) -> Option<u32> {
    number(text, |name, buffer| {
        let mut entry = MaybeUninit::<libc::group>::uninit();
        let mut found = std::ptr::null_mut();
        // SAFETY: as in `user`.
        unsafe {
            let error = libc::getgrnam_r(
                name,
                entry.as_mut_ptr(),
                buffer.as_mut_ptr(),
                buffer.len(),
                &raw mut found,
            );
            (error, found.as_ref().map(|group| group.gr_gid))
        }
    })
}

/// What the text says itself, or else what `find` finds by a name and a buffer: an error, or the
/// number.
fn number(
    text: &str,
    find: impl Fn(*const c_char, &mut [c_char]) -> (c_int, Option<u32>),
) -> Option<u32> {
    if let Ok(number) = text.parse() {
        // The greatest means none to the kernel.
        return Some(number).filter(|number| *number != u32::MAX);
    }
    let name = CString::new(text).ok()?;
    let mut buffer = vec![0; 1 << 10];
    loop {
        match find(name.as_ptr(), &mut buffer) {
            (_, Some(number)) => return Some(number),
            (error, None)
                if error == Errno::RANGE.raw_os_error() && buffer.len() < MAX_ENTRY_BYTES =>
            {
                buffer.resize(2 * buffer.len(), 0);
            }
            (_, None) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_have_names_and_numbers() {
        for of in [user, group] {
            assert_eq!(of("root"), Some(0));
            assert_eq!(of("107"), Some(107));
            for none in ["", "no such name", "4294967295", "4294967296", "-1", "a\0b"] {
                assert_eq!(of(none), None, "{none:?}");
            }
        }
    }
}
