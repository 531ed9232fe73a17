//! The bridge that lender and borrower of one host have between them.

use farlane_ntb::{LinkState, Ntb, NtbError, ShmNtb, WindowLimits};
use farlane_sys::socket;
use rustix::event::{PollFd, PollFlags};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the other end, which is there already, may take to say so.
const PATIENCE: Duration = Duration::from_secs(2);

/// Windows of one session. Each shows a whole file of the VM's memory, of which a VM has a handful,
/// and one for each DIMM that is plugged: QEMU has 256 slots at most.
const WINDOWS: u32 = 256;
/// Whole pages, and no more than processors address.
const LIMITS: WindowLimits = WindowLimits {
    address_alignment: 4096,
    size_alignment: 4096,
    max_size: 1 << 47,
};

/// One end of it, over a socket that leads to the other.
pub(crate) fn shm(socket: OwnedFd) -> Result<Arc<dyn Ntb>, NtbError> {
    Ok(ShmNtb::new(socket, WINDOWS, LIMITS)?)
}

/// Waits until the other end is heard of, for a bounded time: before that nothing can be shown to
/// it.
pub(crate) fn wait_up(ntb: &dyn Ntb) {
    let until = Instant::now() + PATIENCE;
    while ntb.clear_link_event() == LinkState::Down {
        if Instant::now() >= until {
            return;
        }
        let mut event = [PollFd::from_borrowed_fd(ntb.link_event(), PollFlags::IN)];
        let _ = socket::wait(&mut event, Some(until));
    }
}
