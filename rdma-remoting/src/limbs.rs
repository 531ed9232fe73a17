//! Workers that belong to NUMA nodes.
//!
//! Where a server is told of several nodes it has workers on each, and a context is served by one
//! of the node on which most of its queues lie
//! ([`Region::locate`](farlane_zero_copy::Region::locate) tells). What is moved is told by the node
//! of the requester's memory and the node of the worker.

use farlane_zero_copy::topology::Node;
use std::cell::Cell;
use std::sync::Arc;

/// A place for workers.
#[derive(Clone)]
pub struct Place {
    /// Its node.
    pub node: Node,
    /// Makes the thread that calls it one of this node.
    pub enter: Arc<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Place")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

/// Is told of what workers have moved.
pub trait Moved: std::fmt::Debug + Send + Sync {
    /// A request of `bytes` of the requester's memory, which lies on node `data`, was carried out
    /// by a worker of node `limb`.
    fn moved(&self, data: Node, limb: Node, bytes: u64);
}

thread_local! {
    static HERE: Cell<Option<Node>> = const { Cell::new(None) };
}

/// The calling thread is one of `node`.
pub(crate) fn set_here(node: Node) {
    HERE.set(Some(node));
}

/// The node of the worker that calls; none in other threads, and where workers have none.
pub(crate) fn here() -> Option<Node> {
    HERE.get()
}
