//! What each borrowed device counts.

use farlane_daemon::metrics::{Metrics, Sample};
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

/// The counters.
#[must_use]
pub fn metrics(devices: &[DeviceMetrics]) -> Metrics {
    let mut metrics = Metrics::default();
    for device in devices {
        let labels = [("device", &*device.name)];
        metrics.add("farlane_borrow", &labels, device.samples());
        metrics.add_times(
            "farlane_borrow_register_read_seconds",
            "Time of a register read that goes to the lender and back.",
            &labels,
            &device.borrowed.register_reads,
        );
    }
    metrics
}

fn counter(name: &'static str, value: u64, help: &'static str) -> Sample<'static> {
    Sample::counter(name, help, value)
}

fn gauge(name: &'static str, value: u64, help: &'static str) -> Sample<'static> {
    Sample::gauge(name, help, value)
}

impl DeviceMetrics {
    fn samples(&self) -> Vec<Sample<'static>> {
        let parts = [self.messages(), self.leases(), self.peers()];
        parts.into_iter().flatten().collect()
    }

    fn messages(&self) -> Vec<Sample<'static>> {
        let values = self.messages.values();
        vec![
            counter("reads", values.reads, "Register reads trapped by the VMM."),
            counter(
                "writes",
                values.writes,
                "Register writes trapped by the VMM.",
            ),
            counter("other_messages", values.other, "Other messages of the VMM."),
            counter("refused", values.refused, "Messages rejected as invalid."),
            counter(
                "dma_reads",
                values.dma_reads,
                "VFIO_USER_DMA_READ messages sent.",
            ),
            counter(
                "dma_writes",
                values.dma_writes,
                "VFIO_USER_DMA_WRITE messages sent.",
            ),
            counter(
                "connections",
                values.connections,
                "VMMs that have connected.",
            ),
            gauge(
                "connected",
                values.connected,
                "VMMs that are connected now.",
            ),
        ]
    }

    fn leases(&self) -> Vec<Sample<'static>> {
        let counters = &self.borrowed;
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            counter(
                "forwarded",
                value(&counters.forwarded),
                "Register accesses forwarded to the lender.",
            ),
            counter("leases", value(&counters.leases), "Leases taken."),
            counter(
                "lost",
                value(&counters.lost),
                "Leases that ended while the VMM still had the device.",
            ),
            gauge(
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
            gauge(
                "peers_same_lender",
                by(PeerPath::SameLender),
                "Areas of other devices that the lender maps itself.",
            ),
            gauge(
                "peers_local",
                by(PeerPath::Local),
                "Areas of other devices that are mapped as memory of this host.",
            ),
            gauge(
                "peers_window",
                by(PeerPath::Window),
                "Areas of other devices behind a memory window of the lender.",
            ),
            gauge(
                "peers_messages",
                by(PeerPath::Messages),
                "Areas of other devices that are reached by messages.",
            ),
        ]
    }
}
