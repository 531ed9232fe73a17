//! Disks of a virtual machine over vhost-user.
//!
//! * [`options`]: the command line.
//! * [`disk`]: a file or block device as a disk.
//! * [`session`]: the disk as a VMM's front-end sees it; [`sizes`]: files that grow and shrink.
//! * [`request`], [`bits`]: what a guest asks for.
//! * [`worker`]: the thread of a queue, which has `io_uring` move bytes between file and guest.
//! * [`tunnel`]: requests whose data is in device memory.

pub mod bits;
pub mod counters;
pub mod disk;
pub mod options;
pub mod request;
pub mod session;
pub mod sizes;
pub mod tunnel;
pub mod worker;

use disk::Disk;
use farlane_daemon::metrics::{write_labelled, write_samples};
use farlane_guest_device::control::RequestCounters;
use std::sync::Arc;

/// Type of this backend, and what of QEMU's conventions for it is there.
pub const CAPABILITIES: farlane_daemon::options::Capabilities =
    farlane_daemon::options::Capabilities {
        kind: "block",
        features: &["blk-file", "read-only"],
    };

/// The counters of all disks and of the tunnel's requests, as Prometheus text.
#[must_use]
pub fn metrics_text(disks: &[Arc<Disk>], requests: &RequestCounters) -> String {
    let counted: Vec<_> = disks
        .iter()
        .map(|disk| (disk.serial().to_owned(), disk.counters().samples()))
        .collect();
    let mut text = String::new();
    write_labelled(&mut text, "farlane_blk", "disk", &counted);
    write_samples(&mut text, "farlane_blk", requests.samples());
    text
}
