//! Another process's device file, inherited.

use crate::Failure;
use crate::raw::Device;
use crate::table::Table;
use farlane_abi::Errno;
use farlane_abi::ioctl::{IOC_DOORBELL, IOC_INFO, Info};
use farlane_abi::zerocopy::FromZeros as _;
use rustix::io::{FdFlags, fcntl_setfd};
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::process::Command;

const GROUP: &str = "inherited file";

/// Gives a device file to a child, which tries what it is good for.
pub fn attack(path: &Path, table: &mut Table) -> Result<(), Failure> {
    let device = Device::open(path)?;
    device.header()?;
    // SAFETY: the device outlives the use.
    let fd = unsafe { BorrowedFd::borrow_raw(device.number()) };
    fcntl_setfd(fd, FdFlags::empty())?;
    let child = Command::new(std::env::current_exe()?)
        .args(["stranger", &device.number().to_string()])
        .status()?;
    table.note(
        GROUP,
        "used by a child",
        &child.to_string(),
        child.success(),
    );
    Ok(())
}

/// What the child does; true when everything was refused.
pub fn run(fd: &str) -> Result<bool, Failure> {
    // SAFETY: the parent has left this descriptor to this process, and nothing else uses it.
    let device = Device::over(unsafe { OwnedFd::from_raw_fd(fd.parse()?) });
    let own = vec![0_u8; 4096];
    let address = own.as_ptr().expose_provenance() as u64;
    let mut info = Info::new_zeroed();
    let mut table = Table::default();
    let mine = &[Errno::EPERM];
    for (what, outcome) in [
        ("asked about", device.ioctl(IOC_INFO, &mut info)),
        ("a segment", device.segment(1 << 16).map(drop)),
        ("a pin", device.pin(address, 4096, 0).map(drop)),
        ("detaching the header", device.detach(0)),
        ("an event", device.bind(1, -1)),
        ("the doorbell", device.ioctl_at(IOC_DOORBELL, 0)),
        ("mapping the header", device.map(0, 0x8000).map(drop)),
    ] {
        table.refused(GROUP, what, outcome, mine);
    }
    Ok(table.close())
}
