//! Workers that belong to NUMA nodes.
//!
//! Where a server is told of several nodes it has workers on each, and a context is served by one
//! of the node on which most of its queues lie
//! ([`Region::locate`](farlane_zero_copy::Region::locate) finds it).

use farlane_zero_copy::topology::Node;
use std::sync::Arc;

/// A NUMA node that has workers.
#[derive(Clone)]
pub struct WorkerNode {
    /// The NUMA node.
    pub node: Node,
    /// Binds the calling thread to it.
    pub enter: Arc<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for WorkerNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerNode")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

/// Is told of the bytes that workers move, by node.
pub trait TransferObserver: std::fmt::Debug + Send + Sync {
    /// A request of `bytes` of the requester's memory, which lies on node `data`, was carried out
    /// by a worker of node `worker`.
    fn transferred(&self, data: Node, worker: Node, bytes: u64);
}
