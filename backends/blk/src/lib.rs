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
use farlane_daemon::locality;
use farlane_daemon::metrics::{label, write_labelled, write_samples};
use farlane_guest_device::control::RequestCounters;
use paths::DiskPath;
use paths::health::Health;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

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
    write_paths(&mut text, disks);
    let labels = |disk: &Arc<Disk>| format!("{},", label("disk", disk.serial()));
    let devices: Vec<_> = disks.iter().map(|d| (labels(d), d.locality())).collect();
    locality::write(&mut text, "farlane_blk", &devices);
    text
}

/// The state of all paths.
fn write_paths(text: &mut String, disks: &[Arc<Disk>]) {
    type Value = fn(&DiskPath) -> u64;
    let kinds: [(&str, &str, Value); 3] = [
        ("up", "Whether the path can be used.", |path| {
            u64::from(path.health() == Health::Up)
        }),
        ("failures", "Times that the path has failed.", |path| {
            path.counters().failures.load(Ordering::Relaxed)
        }),
        ("returns", "Times that the path has come back.", |path| {
            path.counters().returns.load(Ordering::Relaxed)
        }),
    ];
    for (name, help, value) in kinds {
        let _ = writeln!(text, "# HELP farlane_blk_path_{name} {help}");
        for disk in disks {
            for path in disk.paths().all() {
                let (disk, value) = (label("disk", disk.serial()), value(path));
                let (path, node) = (label("path", path.name()), path.node());
                let _ = writeln!(
                    text,
                    "farlane_blk_path_{name}{{{disk},{path},node=\"{node}\"}} {value}"
                );
            }
        }
    }
}
