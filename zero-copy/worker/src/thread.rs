//! What a thread that serves queues does first.

use crate::policy::{TIME_SLICE, TIMER_SLACK};
use std::io;
use std::time::Duration;

/// The calling thread's naps end on time, and once woken it does not wait for the end of others'
/// time slices. What works without is slower, no more.
pub fn prepare() {
    if let Err(e) = set_timer_slack(TIMER_SLACK) {
        log::debug!("Naps end up to 50 us late: {e}");
    }
    if let Err(e) = request_time_slice(TIME_SLICE) {
        log::debug!("No short time slices: {e}");
    }
}

/// How much later than asked for naps of the calling thread may end.
fn set_timer_slack(slack: Duration) -> io::Result<()> {
    let slack = libc::c_ulong::try_from(slack.as_nanos()).map_err(io::Error::other)?;
    // SAFETY: the call takes numbers only.
    let rc = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, slack) };
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

/// Asks for a time slice of `slice` for the calling thread (Linux 6.12 and later, 100 us to
/// 100 ms): a woken thread with a shorter slice than the running one's takes the CPU at once
/// rather than at the end of that one's slice. Needs no privilege, and gives no larger share.
/// Kernels without the feature ignore the request.
fn request_time_slice(slice: Duration) -> io::Result<()> {
    let attr = SchedAttr {
        size: u32::try_from(size_of::<SchedAttr>()).map_err(io::Error::other)?,
        flags: KEEP_POLICY,
        runtime: u64::try_from(slice.as_nanos()).map_err(io::Error::other)?,
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
