//! The workers of each NUMA node: where contexts' memory lies, and what was moved where.

use farlane_daemon::locality::Locality;
use farlane_daemon::metrics::Metrics;
use farlane_daemon::per_node::WorkerNodes;
use farlane_rdma_remoting::nodes::{TransferObserver, WorkerNode};
use farlane_rdma_remoting::{Port, Server, ServerConfig, ServerError};
use farlane_zero_copy::Region;
use farlane_zero_copy::placement::Given;
use farlane_zero_copy::topology::{Node, Topology};
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often memory is looked at again: the kernel moves pages.
const INTERVAL: Duration = Duration::from_secs(1);
/// How much longer than a look takes is waited at least before the next one.
const SHARE: u32 = 100;

/// The NUMA nodes of a machine with several.
#[derive(Debug)]
pub struct Nodes {
    topology: Topology,
    /// Nodes of memory that VMMs bind to none.
    given: Vec<Given>,
    locality: Arc<Transfers>,
}

/// What was moved, by the node of the memory and that of the worker.
#[derive(Debug)]
struct Transfers(Locality);

impl TransferObserver for Transfers {
    fn transferred(&self, data: Node, worker: Node, bytes: u64) {
        self.0.add(data, worker, 0, bytes);
    }
}

impl Nodes {
    /// A server, with `workers` threads on each node of the machine, and what there is to know of
    /// its nodes; none where it has one, and then the server is as if there were no nodes.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn serve(
        topology: &Topology,
        given: Vec<Given>,
        workers: usize,
    ) -> Result<(Arc<Server>, Option<Arc<Self>>), ServerError> {
        let config = ServerConfig { workers };
        let nodes = topology.nodes();
        if nodes.len() < 2 {
            return Ok((Server::new(config)?, None));
        }
        let places = WorkerNodes::new(topology.clone());
        let worker_nodes = places.all().iter().cloned().map(|place| WorkerNode {
            node: place.node(),
            enter: Arc::new(move || place.enter()),
        });
        let locality = Locality::new(nodes, vec!["memory".to_owned()]);
        let locality = Arc::new(Transfers(locality));
        let server =
            Server::with_nodes(config, worker_nodes.collect(), Arc::clone(&locality) as _)?;
        let this = Self {
            topology: topology.clone(),
            given,
            locality,
        };
        Ok((server, Some(Arc::new(this))))
    }

    /// Has a region know on which node it lies.
    pub fn locate(&self, region: &Region) {
        region.locate(&self.topology, &self.given);
    }

    /// Adds what was moved where.
    pub fn add_to(&self, metrics: &mut Metrics) {
        self.locality.0.add_to(metrics, "farlane_rdma", &[]);
    }

    /// Looks at the memory of ports' contexts again, and has them served where it lies now.
    pub fn look(&self, ports: &[Weak<Port>]) {
        for port in ports.iter().filter_map(Weak::upgrade) {
            for id in port.ids() {
                // It may have been closed since.
                let Ok(context) = port.context(id) else {
                    continue;
                };
                for region in context.attached() {
                    self.locate(&region);
                }
                drop(context);
                let _ = port.settle(id);
            }
        }
    }

    /// Does so from a thread of its own, from now on and as long as there are ports.
    ///
    /// # Errors
    /// There are no more threads.
    pub fn follow(self: Arc<Self>, ports: Vec<Weak<Port>>) -> io::Result<()> {
        let thread = std::thread::Builder::new().name("placement".to_owned());
        thread.spawn(move || {
            let mut pause = INTERVAL;
            while ports.iter().any(|port| port.strong_count() > 0) {
                std::thread::sleep(pause);
                let begun = Instant::now();
                self.look(&ports);
                pause = INTERVAL.max(begun.elapsed().saturating_mul(SHARE));
            }
        })?;
        Ok(())
    }
}
