//! Counters of what was moved where: by the node of the data, the node of the limb that moved it, and the path.

use farlane_zero_copy::topology::Node;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// Requests and bytes of one combination.
#[derive(Debug, Default)]
struct Cell {
    requests: AtomicU64,
    bytes: AtomicU64,
}

impl Cell {
    fn get(&self, kind: &str) -> u64 {
        let counter = match kind {
            "requests" => &self.requests,
            _ => &self.bytes,
        };
        counter.load(Ordering::Relaxed)
    }
}

/// The counters of a device.
#[derive(Debug)]
pub struct Locality {
    nodes: Vec<Node>,
    paths: Vec<String>,
    /// By data, limb, path.
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

    /// Counts a request, or a part of one, of `bytes` that lie on node `data`, moved by the limb of node `limb` over path
    /// number `path`.
    pub fn add(&self, data: Node, limb: Node, path: usize, bytes: u64) {
        let index = |node| self.nodes.iter().position(|n| *n == node);
        let (Some(data), Some(limb)) = (index(data), index(limb)) else {
            return;
        };
        let at = (data * self.nodes.len() + limb) * self.paths.len() + path;
        if path < self.paths.len()
            && let Some(cell) = self.cells.get(at)
        {
            cell.requests.fetch_add(1, Ordering::Relaxed);
            cell.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Writes them as Prometheus text: `PREFIX_locality_requests{LABELS,data="N",limb="N",path="P"}`, the same with `_bytes`.
    /// `labels` are further ones, such as `disk="a",`.
    pub fn write(&self, out: &mut String, prefix: &str, labels: &str) {
        for kind in ["requests", "bytes"] {
            let mut cells = self.cells.iter();
            for data in &self.nodes {
                for limb in &self.nodes {
                    for path in &self.paths {
                        let value = cells.next().map_or(0, |cell| cell.get(kind));
                        let _ = writeln!(
                            out,
                            "{prefix}_locality_{kind}{{{labels}data=\"{data}\",limb=\"{limb}\",path=\"{path}\"}} {value}"
                        );
                    }
                }
            }
        }
    }
}
