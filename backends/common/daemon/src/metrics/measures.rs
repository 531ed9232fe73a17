//! Which metrics say what.

use serde::Serialize;

/// What is shown of a device, or of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// VMMs, processes and borrowers that are connected now.
    Connected,
    /// Bytes moved for its users so far, in either direction.
    Bytes,
    /// Requests carried out so far.
    Requests,
    /// Devices that are held under a lease now.
    Leases,
    /// Times that a path to it has failed so far.
    Failovers,
    /// Of the bytes whose nodes are known, those that a worker of their own node has moved.
    LocalBytes,
    /// All bytes whose nodes are known.
    AllBytes,
}

use Measure::{AllBytes, Bytes, Connected, Failovers, Leases, LocalBytes, Requests};

/// Names of families, without the `_total` of counters, and what they add to.
pub(super) const MEASURES: &[(&str, Measure)] = &[
    ("farlane_blk_bytes_read", Bytes),
    ("farlane_blk_bytes_written", Bytes),
    ("farlane_blk_connected", Connected),
    ("farlane_blk_discards", Requests),
    ("farlane_blk_flushes", Requests),
    ("farlane_blk_locality_all_bytes", AllBytes),
    ("farlane_blk_locality_local_bytes", LocalBytes),
    ("farlane_blk_path_failures", Failovers),
    ("farlane_blk_reads", Requests),
    ("farlane_blk_write_zeroes", Requests),
    ("farlane_blk_writes", Requests),
    ("farlane_borrow_connected", Connected),
    ("farlane_borrow_held", Leases),
    ("farlane_borrow_reads", Requests),
    ("farlane_borrow_writes", Requests),
    ("farlane_lend_device_gpu_commands", Requests),
    ("farlane_lend_device_gpu_copied_in_bytes", Bytes),
    ("farlane_lend_device_gpu_copied_out_bytes", Bytes),
    ("farlane_lend_device_nvme_flushes", Requests),
    ("farlane_lend_device_nvme_other_commands", Requests),
    ("farlane_lend_device_nvme_read_bytes", Bytes),
    ("farlane_lend_device_nvme_reads", Requests),
    ("farlane_lend_device_nvme_writes", Requests),
    ("farlane_lend_device_nvme_written_bytes", Bytes),
    ("farlane_lend_held", Leases),
    ("farlane_lend_links", Connected),
    ("farlane_net_connected", Connected),
    ("farlane_net_locality_all_bytes", AllBytes),
    ("farlane_net_locality_local_bytes", LocalBytes),
    ("farlane_net_rx_bytes", Bytes),
    ("farlane_net_rx_frames", Requests),
    ("farlane_net_tx_bytes", Bytes),
    ("farlane_net_tx_frames", Requests),
    ("farlane_rdma_contexts", Connected),
    ("farlane_rdma_locality_all_bytes", AllBytes),
    ("farlane_rdma_locality_local_bytes", LocalBytes),
    ("farlane_rdma_vm_bytes", Bytes),
    ("farlane_rdma_vm_operations", Requests),
];

/// Labels that name a device: a disk, an interface, a VM's port, a PCI function.
pub(super) const DEVICES: &[&str] = &["disk", "net", "vm", "device"];

/// Histograms that say nothing of how long requests take, but something else: calls of processes
/// that set things up.
pub(super) const ASIDE: &[&str] = &["farlane_rdma_vm_call_seconds"];

/// Whether a family is a histogram of how long a device's requests take.
#[must_use]
pub fn is_of_requests(family: &str) -> bool {
    family.ends_with("_seconds") && !ASIDE.contains(&family)
}

/// What a family adds to.
#[must_use]
pub fn measure(family: &str) -> Option<Measure> {
    let found = MEASURES.binary_search_by(|(name, _)| (*name).cmp(family));
    let found = found.ok().and_then(|at| MEASURES.get(at));
    found.map(|(_, measure)| *measure)
}

/// Whether a label names a device.
#[must_use]
pub fn is_device(label: &str) -> bool {
    DEVICES.contains(&label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_in_order_and_found() {
        assert!(MEASURES.is_sorted_by(|(a, _), (b, _)| a < b));
        for (name, what) in MEASURES {
            assert_eq!(measure(name), Some(*what));
        }
        assert_eq!(measure("farlane_blk_kicks"), None);
    }

    #[test]
    fn calls_are_no_requests() {
        let [requests, calls, bytes] = ["request_seconds", "call_seconds", "bytes"]
            .map(|name| is_of_requests(&format!("farlane_rdma_vm_{name}")));
        assert_eq!((requests, calls, bytes), (true, false, false));
    }
}
