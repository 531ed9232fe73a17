//! How punctually a thread's naps end.

use std::io;

/// How much later than asked for naps may end.
const TIMER_SLACK_NS: libc::c_ulong = 1_000;

/// Naps of the calling thread end on time; by default they end up to 50 us late.
///
/// # Errors
/// What the system says.
pub fn set_timer_slack() -> io::Result<()> {
    // SAFETY: the call takes numbers only.
    let rc = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, TIMER_SLACK_NS) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
