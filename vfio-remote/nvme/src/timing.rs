//! How the kernel treats a thread that naps often and runs briefly.

use std::io;

/// How much later than asked for naps may end.
const TIMER_SLACK_NS: libc::c_ulong = 1_000;
/// The shortest slice that Linux gives (6.12).
const SLICE_NS: u64 = 100_000;

/// Naps of the calling thread end on time; by default they end up to 50 us late.
pub fn set_timer_slack() -> io::Result<()> {
    // SAFETY: the call takes numbers only.
    let rc = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, TIMER_SLACK_NS) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The kernel's `struct sched_attr` (`sched_setattr(2)`), first version.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Keeps the policy and the nice value as they are: only the slice is meant.
const KEEP_POLICY: u64 = 0x08;

/// Asks for a short time slice for the calling thread (Linux 6.12 and later): woken, it takes the
/// CPU from threads with longer ones at once. It gives no larger share and needs no privilege.
pub fn request_short_slice() -> io::Result<()> {
    let attr = SchedAttr {
        size: u32::try_from(size_of::<SchedAttr>()).map_err(io::Error::other)?,
        flags: KEEP_POLICY,
        runtime: SLICE_NS,
        ..Default::default()
    };
    // SAFETY: the kernel reads `size` bytes of the structure, which lives throughout the call.
    let rc = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
