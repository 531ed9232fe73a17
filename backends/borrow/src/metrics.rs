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

fn sample(name: &'static str, value: u64, help: &'static str) -> Sample<'static> {
    Sample { name, help, value }
}

impl DeviceMetrics {
    fn samples(&self) -> Vec<Sample<'static>> {
        let parts = [self.messages(), self.leases(), self.peers()];
        parts.into_iter().flatten().collect()
    }

    fn messages(&self) -> Vec<Sample<'static>> {
        let values = self.messages.values();
        vec![
            sample("reads", values.reads, "Register reads trapped by the VMM."),
            sample(
                "writes",
                values.writes,
                "Register writes trapped by the VMM.",
            ),
            sample("other_messages", values.other, "Other messages of the VMM."),
            sample("refused", values.refused, "Messages rejected as invalid."),
            sample(
                "dma_reads",
                values.dma_reads,
                "VFIO_USER_DMA_READ messages sent.",
            ),
            sample(
                "dma_writes",
                values.dma_writes,
                "VFIO_USER_DMA_WRITE messages sent.",
            ),
            sample(
                "connections",
                values.connections,
                "VMMs that have connected.",
            ),
        ]
    }

    fn leases(&self) -> Vec<Sample<'static>> {
        let counters = &self.borrowed;
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            sample(
                "forwarded",
                value(&counters.forwarded),
                "Register accesses forwarded to the lender.",
            ),
            sample("leases", value(&counters.leases), "Leases taken."),
            sample(
                "lost",
                value(&counters.lost),
                "Leases that ended while the VMM still had the device.",
            ),
            sample(
                "held",
                value(&counters.held),
                "Whether the device is held now: 0 or 1.",
            ),
        ]
    }

    fn peers(&self) -> Vec<Sample<'static>> {
        let paths = (self.paths)();
        let by = |path| {
            let found = paths.iter().find(|(other, _)| *other == path);
            found.map_or(0, |&(_, count)| count)
        };
        vec![
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
