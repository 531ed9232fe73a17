//! The functions that this library stands in front of.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of the next library that has it: the C library, or another preloaded one.
pub(crate) struct Original {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Original {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            address: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Looks it up. Not from a signal handler.
    pub(crate) fn resolve(&self) -> *mut c_void {
        // SAFETY: a name that ends with zero.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        found
    }

    /// Its address, null when it has not been looked up yet: another library's constructor runs
    /// before ours.
    #[inline]
    pub(crate) fn address(&self) -> *mut c_void {
        self.address.load(Ordering::Relaxed)
    }
}

/// Declares originals: a Rust name, the C name, the type. Each becomes a function that calls the
/// original, or, before it has been looked up, what is given for that.
macro_rules! originals {
    ($($(#[$doc:meta])* $rust:ident = $name:literal:
       fn($($argument:ident: $type:ty),*) -> $ret:ty, or $fallback:expr;)*) => {
        $(
            $(#[$doc])*
            #[inline]
            pub(crate) unsafe fn $rust($($argument: $type),*) -> $ret {
                let address = self::table::$rust.address();
                if address.is_null() {
                    // SAFETY: the same arguments for the same call.
                    return unsafe { $fallback };
                }
                type Function = unsafe extern "C" fn($($type),*) -> $ret;
                // SAFETY: the C library's function of that name has this type.
                let function = unsafe { std::mem::transmute::<*mut c_void, Function>(address) };
                // SAFETY: as promised by the caller.
                unsafe { function($($argument),*) }
            }
        )*

        #[allow(non_upper_case_globals, reason = "named as the functions")]
        mod table {
            use super::Original;
            $(pub(super) static $rust: Original = Original::new($name);)*
        }

        /// Looks all of them up.
        pub(crate) fn resolve_all() {
            $(self::table::$rust.resolve();)*
        }
    };
}
pub(crate) use originals;
