//! `libfarlane_io.so`: plain read and write calls with device memory.
//!
//! Preloaded, it stands in front of the C library's functions of the same names. A call whose
//! buffer is not registered device memory goes on to them after two comparisons. Everything else is
//! in [`farlane_io_core`].

/// Exports functions under the C library's names, one or more for the same code, which knows its
/// own as `NAME`; what they do with their arguments is as safe as there.
macro_rules! exports {
    (@one $doc:meta, $name:ident ($($argument:ident: $type:ty),*) $ret:ty, $body:expr) => {
        #[$doc]
        ///
        /// # Safety
        /// As the C library's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $ret {
            #[allow(dead_code, reason = "not all look at it")]
            const NAME: &str = stringify!($name);
            // SAFETY: as promised by the caller.
            unsafe { $body }
        }
    };
    ($(#[$doc:meta] fn [$($name:ident)+] $arguments:tt -> $ret:ty = $body:expr;)*) => {
        $($(exports! { @one $doc, $name $arguments $ret, $body })+)*
    };
}

mod buffers;
mod descriptors;
mod locks;
mod next;
mod original;
mod transfer;

pub use descriptors::*;
pub use locks::*;
pub use transfer::*;

use farlane_io_core::guard::{Guarded, Kind};
use farlane_io_core::{Totals, config, registry_errno, totals};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::AsFd as _;
use std::sync::OnceLock;

/// Registers device memory: see `include/farlane_io.h`.
///
/// # Safety
/// `provider` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farlane_io_register(
    address: *mut c_void,
    length: usize,
    provider: *const c_char,
) -> c_int {
    let provider = if provider.is_null() {
        c"soft"
    } else {
        // SAFETY: as promised by the caller.
        unsafe { CStr::from_ptr(provider) }
    };
    let provider = provider.to_string_lossy();
    registry_errno(farlane_io_core::register(
        address.expose_provenance(),
        length,
        &provider,
    ))
}

/// Unregisters device memory: see `include/farlane_io.h`.
#[unsafe(no_mangle)]
pub extern "C" fn farlane_io_unregister(address: *mut c_void) -> c_int {
    registry_errno(farlane_io_core::unregister(address.addr()))
}

/// Tells the totals: see `include/farlane_io.h`.
///
/// # Safety
/// `to` is null or points to room for them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farlane_io_stats(to: *mut Totals) {
    if !to.is_null() {
        // SAFETY: as promised by the caller.
        unsafe { to.write(totals()) };
    }
}

/// Where totals go: a copy of standard error, which programs close before they end.
static REPORT: OnceLock<Guarded> = OnceLock::new();

/// Runs when the library is loaded, before the program's own code.
extern "C" fn begin() {
    next::resolve_all();
    let _ = config::mode();
    if config::wants_stats() {
        if let Ok(copy) = std::io::stderr().as_fd().try_clone_to_owned() {
            let _ = REPORT.set(Guarded::new(copy, Kind::Inherited));
        }
        // SAFETY: the function is there for as long as the program.
        unsafe { libc::atexit(end) };
    }
}

extern "C" fn end() {
    let line = format!("{}\n", totals().line());
    let report = REPORT.get().filter(|report| report.is_intact());
    if let Some(report) = report.and_then(Guarded::enter) {
        // SAFETY: a string of our own.
        let _ = unsafe { next::write(report.number(), line.as_ptr().cast(), line.len()) };
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;
