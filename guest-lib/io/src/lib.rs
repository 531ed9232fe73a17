//! `libfarlane_io.so`: plain read and write calls with device memory.
//!
//! Preloaded, it stands in front of the C library's functions of the same names. A call whose buffer is not registered device
//! memory goes on to them after two comparisons. Everything else is in [`farlane_io_core`].

mod descriptors;
mod next;
mod original;
mod transfer;

pub use descriptors::*;
pub use transfer::*;

use farlane_io_core::{Totals, config, registry_errno, totals};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

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
static REPORT: AtomicI32 = AtomicI32::new(-1);
/// Which file that is: a program may close numbers that it does not know, and get them again.
static REPORT_FILE: OnceLock<(u64, u64)> = OnceLock::new();

fn file_of(fd: c_int) -> Option<(u64, u64)> {
    // SAFETY: the structure is written by the call.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(fd, &raw mut stat) == 0).then_some((stat.st_dev, stat.st_ino))
    }
}

/// Runs when the library is loaded, before the program's own code.
extern "C" fn begin() {
    next::resolve_all();
    let _ = config::mode();
    if config::wants_stats() {
        // SAFETY: copies a descriptor.
        let report = unsafe { libc::fcntl(libc::STDERR_FILENO, libc::F_DUPFD_CLOEXEC, 3) };
        REPORT.store(report, Ordering::Relaxed);
        if let Some(file) = file_of(report) {
            let _ = REPORT_FILE.set(file);
        }
        // SAFETY: the function is there for as long as the program.
        unsafe { libc::atexit(end) };
    }
}

extern "C" fn end() {
    let line = format!("{}\n", totals().line());
    let report = REPORT.load(Ordering::Relaxed);
    if file_of(report).is_none() || file_of(report) != REPORT_FILE.get().copied() {
        return;
    }
    // SAFETY: a string of our own.
    let _ = unsafe { next::write(report, line.as_ptr().cast(), line.len()) };
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;
