//! Disks of a virtual machine over vhost-user.
//!
//! * [`daemon`]: the daemon; [`options`]: the command line.
//! * [`surroundings`]: the machine, and how requests are steered on it.
//! * [`disk`]: a file or block device as a disk; [`paths`]: one or several ways to its blocks.
//! * [`session`]: the disk as a VMM's front-end sees it.
//! * [`request`], [`bits`]: what a guest asks for.
//! * [`worker`]: the thread of a queue, which has `io_uring` move bytes between file and guest.
//! * [`per_node`]: workers of other nodes, which move the data that lies there.
//! * [`tunnel`]: requests whose data is in device memory.

pub mod bits;
pub mod counters;
pub mod daemon;
pub mod disk;
pub mod options;
pub mod paths;
pub mod per_node;
pub mod request;
pub mod session;
pub mod surroundings;
pub mod tunnel;
pub mod worker;

use disk::Disk;
use farlane_daemon::metrics::{Metrics, Sample};
use farlane_guest_device::control::RequestCounters;
use paths::DiskPath;
use paths::health::Health;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Type of this backend, and what of QEMU's conventions for it is there.
pub const CAPABILITIES: farlane_daemon::options::Capabilities =
    farlane_daemon::options::Capabilities {
        kind: "block",
        features: &["blk-file", "read-only"],
    };

const REQUEST_SECONDS: &str =
    "Time from when a request is taken from its queue until its driver can see that it has ended.";

/// The counters of all disks and of the tunnel's requests.
#[must_use]
pub fn metrics(disks: &[Arc<Disk>], requests: &RequestCounters) -> Metrics {
    let mut metrics = Metrics::default();
    for disk in disks {
        let labels = [("disk", disk.serial())];
        metrics.add("farlane_blk", &labels, disk.counters().samples());
        for (operation, times) in disk.times().all() {
            let labels = [labels[0], ("operation", operation)];
            metrics.add_times(
                "farlane_blk_request_seconds",
                REQUEST_SECONDS,
                &labels,
                times,
            );
        }
        disk.locality().add_to(&mut metrics, "farlane_blk", &labels);
        for path in disk.paths().all() {
            let node = path.node().to_string();
            let labels = [labels[0], ("path", path.name()), ("node", &node)];
            metrics.add("farlane_blk_path", &labels, path_samples(path));
        }
    }
    metrics.add("farlane_blk", &[], requests.samples());
    metrics
}

/// The state of a path.
fn path_samples(path: &DiskPath) -> [Sample<'static>; 3] {
    let counters = path.counters();
    let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let is_up = u64::from(path.health() == Health::Up);
    [
        Sample::gauge("up", "Whether the path can be used: 0 or 1.", is_up),
        Sample::counter(
            "failures",
            "Times that the path has failed.",
            value(&counters.failures),
        ),
        Sample::counter(
            "returns",
            "Times that the path has come back.",
            value(&counters.returns),
        ),
    ]
}
