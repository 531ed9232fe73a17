//! What each borrowed device counts.

use farlane_daemon::metrics::{Sample, write_labelled};
use farlane_vfio_remote::borrower::{BorrowCounters, PeerPath};
use farlane_vfio_user::Counters;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a device reaches memory of others: each path, and how many areas by it.
pub type PeerPaths = Box<dyn Fn() -> Vec<(PeerPath, u64)> + Send + Sync>;

/// The counters of one device.
pub struct DeviceMetrics {
    /// The lender's name of it.
    pub name: String,
    /// Messages of its VMM.
    pub messages: Counters,
    /// Its leases.
    pub borrowed: Arc<BorrowCounters>,
    /// Its peers.
    pub paths: PeerPaths,
}

/// The counters, as Prometheus text.
#[must_use]
pub fn metrics_text(devices: &[DeviceMetrics]) -> String {
    let samples = |device: &DeviceMetrics| (device.name.clone(), device.samples());
    let things: Vec<_> = devices.iter().map(samples).collect();
    let mut text = String::new();
    write_labelled(&mut text, "farlane_borrow", "device", &things);
    text
}

impl DeviceMetrics {
    fn samples(&self) -> Vec<Sample<'static>> {
        let messages = self.messages.values();
        let borrowed = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let paths = (self.paths)();
        let by = |path| {
            let found = paths.iter().find(|(other, _)| *other == path);
            found.map_or(0, |&(_, count)| count)
        };
        let sample = |name, value, help| Sample { name, help, value };
        vec![
            sample(
                "reads",
                messages.reads,
                "Register reads trapped by the VMM.",
            ),
            sample(
                "writes",
                messages.writes,
                "Register writes trapped by the VMM.",
            ),
            sample(
                "other_messages",
                messages.other,
                "Other messages of the VMM.",
            ),
            sample("refused", messages.refused, "Messages rejected as invalid."),
            sample(
                "dma_reads",
                messages.dma_reads,
                "VFIO_USER_DMA_READ messages sent.",
            ),
            sample(
                "dma_writes",
                messages.dma_writes,
                "VFIO_USER_DMA_WRITE messages sent.",
            ),
            sample(
                "connections",
                messages.connections,
                "VMMs that have connected.",
            ),
            sample(
                "forwarded",
                borrowed(&self.borrowed.forwarded),
                "Register accesses forwarded to the lender.",
            ),
            sample("leases", borrowed(&self.borrowed.leases), "Leases taken."),
            sample(
                "lost",
                borrowed(&self.borrowed.lost),
                "Leases that ended though the VMM still had the device.",
            ),
            sample(
                "held",
                borrowed(&self.borrowed.held),
                "Whether the device is held now: 0 or 1.",
            ),
            sample(
                "peers_same_lender",
                by(PeerPath::SameLender),
                "Areas of other devices that the lender maps itself.",
            ),
            sample(
                "peers_local",
                by(PeerPath::Local),
                "Areas of other devices that are mapped as memory of this host.",
            ),
            sample(
                "peers_window",
                by(PeerPath::Window),
                "Areas of other devices behind a memory window of the lender.",
            ),
            sample(
                "peers_messages",
                by(PeerPath::Messages),
                "Areas of other devices that are reached by messages.",
            ),
        ]
    }
}
