//! What the allocator keeps of what was freed.

/// Bytes at the end of the heap that are kept, and above which an allocation is a mapping of its
/// own: the GNU C library's first values, which it raises by itself where nobody has set them.
const KEPT_BYTES: libc::c_int = 128 << 10;

/// Has memory that is freed go back to the system, or to whichever thread needs some next: one heap
/// for all threads, and no more than 128 KiB kept at its end. What somebody has had the daemon
/// allocate is then not held once for each thread that has freed a part of it.
///
/// For a daemon whose threads allocate where objects come and go, and not while they move data.
/// Call it while there is one thread.
pub fn keep_little() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        (libc::M_TRIM_THRESHOLD, KEPT_BYTES),
        (libc::M_MMAP_THRESHOLD, KEPT_BYTES),
    ] {
        // SAFETY: sets parameters of the allocator, with values that it allows.
        if unsafe { libc::mallopt(parameter, value) } == 0 {
            log::warn!("The allocator does not take parameter {parameter}");
        }
    }
}
