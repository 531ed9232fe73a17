//! The optional hook: whoever wants to know of buffers, in this process.

use std::ffi::{CStr, c_char, c_int, c_void};

type Register = unsafe extern "C" fn(*mut c_void, usize, *const c_char) -> c_int;
type Unregister = unsafe extern "C" fn(*mut c_void) -> c_int;

/// Who provides the memory.
const PROVIDER: &CStr = c"soft";

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a string; nothing is called by looking it up.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Makes a buffer known. Whether somebody wanted to know of it.
pub fn register(pointer: *mut u8, bytes: usize) -> bool {
    let Some(function) = symbol(c"farlane_io_register") else {
        return false;
    };
    // SAFETY: the name is that of a function of this type: the crate's documentation says so to
    // whoever defines it.
    let function: Register = unsafe { std::mem::transmute::<*mut c_void, Register>(function) };
    // SAFETY: the buffer can be read and written until `unregister`.
    let code = unsafe { function(pointer.cast(), bytes, PROVIDER.as_ptr()) };
    if code != 0 {
        log::warn!("A buffer of {bytes:#x} bytes was not registered: {code}");
    }
    code == 0
}

/// Unregisters a buffer that was registered.
pub fn unregister(pointer: *mut u8) {
    if let Some(function) = symbol(c"farlane_io_unregister") {
        // SAFETY: as in `register`.
        let function: Unregister =
            unsafe { std::mem::transmute::<*mut c_void, Unregister>(function) };
        // SAFETY: the buffer was registered, and still lives.
        let code = unsafe { function(pointer.cast()) };
        if code != 0 {
            log::warn!("A buffer was not unregistered: {code}");
        }
    }
}
