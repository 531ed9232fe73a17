//! Counters of what was moved where: by the node of the data, the node of the worker that moved it,
//! and the path.
//!
//! The share that is served locally is what per-node workers are for: bytes that a worker of their
//! own node has moved, of all bytes (ioctopus-asplos20, section 5).

use crate::metrics::label;
use farlane_zero_copy::topology::Node;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// Requests and bytes of one combination. In cache lines of its own: workers do not write each
/// other's.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Cell {
    requests: AtomicU64,
    bytes: AtomicU64,
}

type CounterOf = fn(&Cell) -> &AtomicU64;
type SumOf = fn(&Share) -> u64;

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

    /// As [`write()`], of one device; `labels` are further ones, such as `disk="a",`.
    pub fn write(&self, out: &mut String, prefix: &str, labels: &str) {
        write(out, prefix, &[(labels.to_owned(), self)]);
    }
}

/// Writes the counters of devices as Prometheus text:
/// `PREFIX_locality_bytes{LABELS,data="N",worker="N",path="P"}`, the same with `_requests`, and
/// `PREFIX_locality_local_bytes{LABELS}` beside `PREFIX_locality_all_bytes{LABELS}`, the share that
/// is served locally. A device's labels are such as `disk="a",`, made with [`label`]; those of
/// several devices differ.
pub fn write(out: &mut String, prefix: &str, devices: &[(String, &Locality)]) {
    let kinds: [(&str, &str, CounterOf); 2] = [
        ("requests", "Requests, or parts of them", |cell| {
            &cell.requests
        }),
        ("bytes", "Bytes", |cell| &cell.bytes),
    ];
    for (kind, what, counter) in kinds {
        let _ = writeln!(
            out,
            "# HELP {prefix}_locality_{kind} {what}, by the node of the memory, the node of the \
             worker that moved them, and the path."
        );
        for (labels, device) in devices {
            device.each(|data, worker, path, cell| {
                let (value, path) = (counter(cell).load(Ordering::Relaxed), label("path", path));
                let nodes = format!("data=\"{data}\",worker=\"{worker}\"");
                let _ = writeln!(
                    out,
                    "{prefix}_locality_{kind}{{{labels}{nodes},{path}}} {value}"
                );
            });
        }
    }
    let sums: [(&str, &str, SumOf); 2] = [
        (
            "local_bytes",
            "Bytes that a worker of their own node has moved.",
            |share| share.local_bytes,
        ),
        (
            "all_bytes",
            "Bytes that were moved; the local ones' share is how well the device is steered.",
            |share| share.all_bytes,
        ),
    ];
    for (name, help, sum) in sums {
        let _ = writeln!(out, "# HELP {prefix}_locality_{name} {help}");
        for (labels, device) in devices {
            let labels = match labels.trim_end_matches(',') {
                "" => String::new(),
                labels => format!("{{{labels}}}"),
            };
            let value = sum(&device.share());
            let _ = writeln!(out, "{prefix}_locality_{name}{labels} {value}");
        }
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
        let mut text = String::new();
        device.write(&mut text, "farlane_blk", "disk=\"d\",");
        let values: Vec<_> = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.ends_with(" 0"))
            .collect();
        assert_eq!(
            values,
            [
                "farlane_blk_locality_requests{disk=\"d\",data=\"0\",worker=\"4\",path=\"b\"} 2",
                "farlane_blk_locality_requests{disk=\"d\",data=\"4\",worker=\"4\",path=\"a\"} 3",
                "farlane_blk_locality_bytes{disk=\"d\",data=\"0\",worker=\"4\",path=\"b\"} 120",
                "farlane_blk_locality_bytes{disk=\"d\",data=\"4\",worker=\"4\",path=\"a\"} 60",
                "farlane_blk_locality_local_bytes{disk=\"d\"} 60",
                "farlane_blk_locality_all_bytes{disk=\"d\"} 180",
            ]
        );
        assert_eq!(text.lines().count(), 4 + 2 * 8 + 2);
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
        let named: Vec<_> = ["x", "y"]
            .iter()
            .zip(&devices)
            .map(|(name, device)| (format!("net=\"{name}\","), device))
            .collect();
        let mut text = String::new();
        write(&mut text, "farlane_net", &named);
        let explanations = text.lines().filter(|line| line.starts_with("# HELP"));
        assert_eq!(explanations.count(), 4);
        assert!(text.contains("farlane_net_locality_local_bytes{net=\"y\"} 7\n"));
        assert!(text.contains("farlane_net_locality_all_bytes{net=\"x\"} 0\n"));
        let mut text = String::new();
        devices[1].write(&mut text, "p", "");
        assert!(text.contains("\np_locality_all_bytes 7\n"));
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
