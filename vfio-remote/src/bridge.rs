//! The bridge that lender and borrower of one host have between them.

use farlane_ntb::{Ntb, NtbError, ShmNtb, WindowLimits};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Windows of one link: a VM has a handful of memory ranges.
const WINDOWS: u32 = 64;
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
