//! Counters of what was moved where: by the node of the data, the node of the worker that moved it,
//! and the path.
//!
//! The share that is served locally is what per-node workers are for: bytes that a worker of their
//! own node has moved, of all bytes (ioctopus-asplos20, section 5).

use crate::metrics::{Metrics, Sample};
use farlane_zero_copy::topology::Node;
use std::sync::atomic::{AtomicU64, Ordering};

/// Requests and bytes of one combination. In cache lines of its own: workers do not write each
/// other's.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Cell {
    requests: AtomicU64,
    bytes: AtomicU64,
}

const REQUESTS: &str = "Requests, or parts of them, by the node of the memory, the node of the \
                        worker that moved them, and the path.";
const BYTES: &str = "Bytes, by the node of the memory, the node of the worker that moved them, and \
                     the path.";
const LOCAL_BYTES: &str = "Bytes that a worker of their own node has moved.";
const ALL_BYTES: &str =
    "Bytes that were moved; the local ones' share is how well the device is steered.";

/// Bytes of a device, and how many of them were moved by a worker of their own node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Moved by a worker of the node on which they lie.
    pub local_bytes: u64,
    /// All.
    pub all_bytes: u64,
}

/// The counters of a device.
#[derive(Debug)]
pub struct Locality {
    nodes: Vec<Node>,
    paths: Vec<String>,
    /// By worker, data, path.
    cells: Vec<Cell>,
}

impl Locality {
    /// All zero, for a machine with these nodes and a device with these paths.
    #[must_use]
    pub fn new(nodes: Vec<Node>, paths: Vec<String>) -> Self {
        let count = nodes.len() * nodes.len() * paths.len();
        let cells = (0..count).map(|_| Cell::default()).collect();
        Self {
            nodes,
            paths,
            cells,
        }
    }

    /// The cell of these indices.
    fn cell(&self, data: usize, worker: usize, path: usize) -> Option<&Cell> {
        let at = (worker * self.nodes.len() + data) * self.paths.len() + path;
        self.cells.get(at).filter(|_| path < self.paths.len())
    }

    /// Counts a request, or a part of one, of `bytes` that lie on node `data`, moved by the worker
    /// of node `worker` over path number `path`. What is on a node that the machine has not, or
    /// over a path that the device has not, is not counted.
    pub fn add(&self, data: Node, worker: Node, path: usize, bytes: u64) {
        self.add_all(data, worker, path, 1, bytes);
    }

    /// Counts several of them at once.
    pub fn add_all(&self, data: Node, worker: Node, path: usize, requests: u64, bytes: u64) {
        let index = |node| self.nodes.iter().position(|n| *n == node);
        let (Some(data), Some(worker)) = (index(data), index(worker)) else {
            return;
        };
        if let Some(cell) = self.cell(data, worker, path) {
            cell.requests.fetch_add(requests, Ordering::Relaxed);
            cell.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Calls `each(data, worker, path, cell)` in this order.
    fn each(&self, mut each: impl FnMut(Node, Node, &str, &Cell)) {
        for (data, data_node) in self.nodes.iter().enumerate() {
            for (worker, worker_node) in self.nodes.iter().enumerate() {
                for (path, name) in self.paths.iter().enumerate() {
                    if let Some(cell) = self.cell(data, worker, path) {
                        each(*data_node, *worker_node, name, cell);
                    }
                }
            }
        }
    }

    /// What was served locally so far.
    #[must_use]
    pub fn share(&self) -> Share {
        let mut share = Share::default();
        self.each(|data, worker, _, cell| {
            let bytes = cell.bytes.load(Ordering::Relaxed);
            share.all_bytes += bytes;
            if data == worker {
                share.local_bytes += bytes;
            }
        });
        share
    }

    /// Adds its counters: `PREFIX_locality_bytes{LABELS,data="N",worker="N",path="P"}`, the same
    /// with `_requests`, and `PREFIX_locality_local_bytes{LABELS}` beside
    /// `PREFIX_locality_all_bytes{LABELS}`, the share that is served locally. The labels of several
    /// devices differ.
    pub fn add_to(&self, metrics: &mut Metrics, prefix: &str, labels: &[(&str, &str)]) {
        self.each(|data, worker, path, cell| {
            let (data, worker) = (data.to_string(), worker.to_string());
            let where_to = [("data", &*data), ("worker", &*worker), ("path", path)];
            let labels: Vec<_> = labels.iter().copied().chain(where_to).collect();
            let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let moved = [
                Sample::counter("locality_requests", REQUESTS, value(&cell.requests)),
                Sample::counter("locality_bytes", BYTES, value(&cell.bytes)),
            ];
            metrics.add(prefix, &labels, moved);
        });
        let share = self.share();
        let sums = [
            Sample::counter("locality_local_bytes", LOCAL_BYTES, share.local_bytes),
            Sample::counter("locality_all_bytes", ALL_BYTES, share.all_bytes),
        ];
        metrics.add(prefix, labels, sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Locality {
        Locality::new(vec![Node(0), Node(4)], vec!["a".to_owned(), "b".to_owned()])
    }

    #[test]
    fn what_is_moved_is_counted_where_it_belongs() {
        let device = two();
        device.add(Node(0), Node(4), 1, 100);
        device.add(Node(0), Node(4), 1, 20);
        device.add_all(Node(4), Node(4), 0, 3, 60);
        let mut metrics = Metrics::default();
        device.add_to(&mut metrics, "farlane_blk", &[("disk", "d")]);
        let text = metrics.open_metrics();
        let mut values: Vec<_> = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.ends_with(" 0"))
            .collect();
        values.sort_unstable();
        let moved = |what: &str, data: u8, path: &str, value: u64| {
            format!(
                "farlane_blk_locality_{what}_total{{disk=\"d\",data=\"{data}\",worker=\"4\",\
                 path=\"{path}\"}} {value}"
            )
        };
        assert_eq!(
            values,
            [
                "farlane_blk_locality_all_bytes_total{disk=\"d\"} 180",
                &moved("bytes", 0, "b", 120),
                &moved("bytes", 4, "a", 60),
                "farlane_blk_locality_local_bytes_total{disk=\"d\"} 60",
                &moved("requests", 0, "b", 2),
                &moved("requests", 4, "a", 3),
            ]
        );
    }

    #[test]
    fn nodes_and_paths_that_are_not_there_disturb_nothing() {
        let device = two();
        for (data, worker, path) in [(1, 0, 0), (0, 1, 0), (0, 0, 2), (4, 4, 2), (4, 4, 1 << 40)] {
            device.add(Node(data), Node(worker), path, 1);
        }
        assert_eq!(device.share(), Share::default());
        Locality::new(Vec::new(), Vec::new()).add(Node(0), Node(0), 0, 1);
    }

    #[test]
    fn several_devices_are_told_with_one_explanation_each() {
        let devices = [two(), two()];
        devices[1].add(Node(0), Node(0), 0, 7);
        let mut metrics = Metrics::default();
        for (name, device) in ["x", "y"].iter().zip(&devices) {
            device.add_to(&mut metrics, "farlane_net", &[("net", name)]);
        }
        let text = metrics.open_metrics();
        let explanations = text.lines().filter(|line| line.starts_with("# HELP"));
        assert_eq!(explanations.count(), 4);
        assert!(text.contains("farlane_net_locality_local_bytes_total{net=\"y\"} 7\n"));
        assert!(text.contains("farlane_net_locality_all_bytes_total{net=\"x\"} 0\n"));
        let mut metrics = Metrics::default();
        devices[1].add_to(&mut metrics, "p", &[]);
        let text = metrics.open_metrics();
        assert!(text.contains("\np_locality_all_bytes_total 7\n"), "{text}");
    }

    #[test]
    fn workers_share_no_cache_line() {
        let device = two();
        let at = |data, worker, path| std::ptr::from_ref(device.cell(data, worker, path).unwrap());
        let lines: std::collections::BTreeSet<_> = (0..8)
            .map(|n| at(n & 1, n >> 1 & 1, n >> 2).addr() / 128)
            .collect();
        assert_eq!(lines.len(), 8);
    }
}
