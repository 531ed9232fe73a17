//! An interface as its front-end sees it.

use crate::bits::{HEADER_BYTES, feature};
use crate::counters::count;
use crate::flow::{self, FlowTable};
use crate::guest::Guest;
use crate::interface::{Interface, Watcher};
use crate::pairs::{NetQueue, PairCount, PairId, Side};
use crate::port::Offloads;
use crate::worker::{ControlWorker, Framing, Pair, Worker};
use farlane_daemon::placement::VmPlacement;
use farlane_vhost_user::bits::feature as common;
use farlane_vhost_user::channel::Channel;
use farlane_vhost_user::session::{Device, Setup};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vhost::vhost_user::{Error, Result};
use zerocopy::IntoBytes as _;

/// Bytes of the header of a legacy device without mergeable buffers: `buffers` is not there (virtio
/// 1.2, 5.1.6.1).
const LEGACY_HEADER_BYTES: usize = HEADER_BYTES - 2;

/// The front-end is told of a change.
struct LinkWatcher {
    channel: Arc<Channel>,
    guest: Arc<Guest>,
}

impl Watcher for LinkWatcher {
    fn changed(&self, up: bool) {
        if up {
            self.guest.announce();
        }
        self.channel.config_changed();
    }
}

/// How a queue pair is used.
#[derive(Debug, Default)]
struct PairUse {
    worker: Option<Worker>,
    /// Whether its receive queue and its transmit queue are served.
    receives: bool,
    transmits: bool,
}

impl PairUse {
    /// Neither is served.
    fn is_idle(&self) -> bool {
        !self.receives && !self.transmits
    }

    /// One of the two is served, or no longer.
    fn set_served(&mut self, side: Side, served: bool) {
        match side {
            Side::Receive => self.receives = served,
            Side::Transmit => self.transmits = served,
        }
    }
}

/// A queue that is served.
#[derive(Debug)]
pub enum ServedQueue {
    /// One of a pair's.
    Frames(PairId, Side),
    /// The control queue.
    Control(ControlWorker),
}

/// An interface in the hands of a VMM.
pub struct NetDevice {
    interface: Arc<Interface>,
    features: u64,
    pairs: Arc<[Arc<Pair>]>,
    used: Vec<PairUse>,
    /// None where there is one pair only.
    table: Option<Arc<FlowTable>>,
    guest: Arc<Guest>,
    placement: VmPlacement,
    /// Kept for as long as it is to be told.
    _watcher: Arc<dyn Watcher>,
}

/// Throws away what waits at the port, and counts it.
fn discard(interface: &Interface) {
    let pairs = interface.pairs().ids();
    let dropped = pairs.map(|pair| interface.port.discard(pair));
    count(&interface.counters.rx_dropped, dropped.sum());
}

impl NetDevice {
    /// A VMM has just connected.
    pub fn new(interface: Arc<Interface>, channel: &Arc<Channel>) -> io::Result<Self> {
        interface.look();
        if interface
            .counters
            .connections
            .fetch_add(1, Ordering::Relaxed)
            > 0
        {
            // What waits came for the VM before. What came for that of a backend that was killed is
            // still there.
            discard(&interface);
        }
        let count = interface.pairs();
        let pairs = count.ids().map(|id| Pair::new(id).map(Arc::new));
        let table = (count > PairCount::ONE).then(|| {
            let spread = interface.port.receive_queues();
            let placement = if spread < count {
                flow::Placement::Hash
            } else {
                flow::Placement::Arrival
            };
            let table = FlowTable::new(flow::Settings::usual(count, placement));
            table.port_steers(spread);
            Arc::new(table)
        });
        let guest = Arc::new(Guest::new(Arc::clone(&interface), table.clone()));
        let watcher: Arc<dyn Watcher> = Arc::new(LinkWatcher {
            channel: Arc::clone(channel),
            guest: Arc::clone(&guest),
        });
        interface.watch(Arc::downgrade(&watcher));
        *interface.table() = table.as_ref().map(Arc::downgrade);
        let pairs = pairs.collect::<io::Result<_>>()?;
        // Until it is dropped.
        crate::counters::count(&interface.counters.connected, 1);
        Ok(Self {
            pairs,
            used: count.ids().map(|_| PairUse::default()).collect(),
            table,
            guest,
            features: 0,
            placement: VmPlacement::default(),
            _watcher: watcher,
            interface,
        })
    }

    fn has(&self, bit: u64) -> bool {
        self.features & bit != 0
    }

    /// Tells whoever spreads frames how many pairs there are.
    fn pairs_changed(&self) {
        let all = self.interface.pairs();
        let mut pairs = all.ids().zip(&self.used);
        let first_stopped = pairs.find(|(_, used)| !used.receives);
        let served = first_stopped.map_or(all, |(id, _)| PairCount::before(id));
        self.guest.set_served(served);
    }

    /// No queue is served: whatever was learned of flows is forgotten, by the port, too.
    fn forget_flows(&self) {
        if let Some(table) = &self.table {
            table.reset();
            self.interface.port.forget_flows();
        }
    }

    fn offloads(&self, checksum: u64, tso4: u64, tso6: u64, ecn: u64) -> Offloads {
        Offloads {
            checksum: self.has(checksum),
            tso4: self.has(tso4),
            tso6: self.has(tso6),
            ecn: self.has(ecn),
        }
    }

    fn framing(&self) -> Framing {
        let mergeable = self.has(feature::MRG_RXBUF);
        let long = mergeable || self.has(common::VERSION_1);
        Framing {
            header_bytes: if long {
                HEADER_BYTES
            } else {
                LEGACY_HEADER_BYTES
            },
            mergeable,
            sends: self.offloads(
                feature::CSUM,
                feature::HOST_TSO4,
                feature::HOST_TSO6,
                feature::HOST_ECN,
            ),
        }
    }
}

impl Drop for NetDevice {
    /// What is the VMM's goes with it: the next one begins with a port that steers nothing.
    fn drop(&mut self) {
        for worker in self.used.iter_mut().filter_map(|used| used.worker.take()) {
            worker.leave();
        }
        self.forget_flows();
        let connected = &self.interface.counters.connected;
        connected.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Device for NetDevice {
    type Worker = ServedQueue;

    fn name(&self) -> String {
        format!("Interface {}", self.interface.name)
    }

    fn queues(&self) -> u16 {
        NetQueue::count(self.interface.pairs())
    }

    fn features(&self) -> u64 {
        self.interface.features()
    }

    fn negotiated(&mut self, features: u64) {
        self.features = features;
        self.guest.negotiated(features);
    }

    fn reset(&mut self) {
        self.forget_flows();
    }

    fn config(&self) -> Vec<u8> {
        let mut config = self.interface.config();
        config.mac = self.guest.mac();
        config.status = (config.status.get() | self.guest.status()).into();
        config.as_bytes().to_vec()
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8]) -> Result<()> {
        Err(Error::InvalidParam)
    }

    fn start(&mut self, queue: Setup) -> io::Result<ServedQueue> {
        let (id, side) = match NetQueue::at(queue.index, self.interface.pairs()) {
            Some(NetQueue::Frames(id, side)) => (id, side),
            Some(NetQueue::Control) => {
                let (guest, interface) = (Arc::clone(&self.guest), Arc::clone(&self.interface));
                return ControlWorker::start(queue, guest, interface).map(ServedQueue::Control);
            }
            None => return Err(io::ErrorKind::NotFound.into()),
        };
        let (framing, guest) = (self.framing(), Arc::clone(&self.guest));
        let interface = Arc::clone(&self.interface);
        let (topology, given) = (interface.nodes.topology(), &interface.given);
        let placement = self.placement.look(&queue.space, topology, given)?;
        let is_first = self.used.iter().all(PairUse::is_idle);
        let pair = self.pairs.get(id.index()).ok_or(io::ErrorKind::NotFound)?;
        let used = self
            .used
            .get_mut(id.index())
            .ok_or(io::ErrorKind::NotFound)?;
        let worker = match &used.worker {
            Some(worker) => worker,
            None => {
                let node = placement.look_at(queue.layout.available);
                let nodes = &interface.nodes;
                let worker_node = nodes.all().get(nodes.index_of(node));
                let worker_node = worker_node.ok_or(io::ErrorKind::NotFound)?;
                let table = self.table.as_ref();
                let parts = (guest, table.cloned());
                let worker = Worker::start(
                    &interface,
                    &self.pairs,
                    pair,
                    worker_node,
                    &placement,
                    parts,
                )?;
                used.worker.insert(worker)
            }
        };
        if is_first && side == Side::Receive && queue.next_available == 0 {
            // It begins anew, and has sent nothing yet: what waits came for another driver. One
            // that was paused, or whose backend was killed, gets it.
            discard(&interface);
        }
        worker.begin(side, queue, framing);
        used.set_served(side, true);
        self.pairs_changed();
        Ok(ServedQueue::Frames(id, side))
    }

    fn stop(&mut self, served: ServedQueue) -> u16 {
        let (id, side) = match served {
            ServedQueue::Frames(id, side) => (id, side),
            ServedQueue::Control(worker) => return worker.stop(),
        };
        let Some(used) = self.used.get_mut(id.index()) else {
            return 0;
        };
        let next = used.worker.as_ref().map_or(0, |worker| worker.end(side));
        used.set_served(side, false);
        if used.is_idle()
            && let Some(worker) = used.worker.take()
        {
            worker.leave();
        }
        self.pairs_changed();
        // The driver uses fewer pairs. Where the first stops as well, the VM may only pause.
        let is_given_up = self.used.first().is_some_and(|first| first.receives);
        if side == Side::Receive && is_given_up {
            let port = &self.interface.port;
            count(&self.interface.counters.rx_dropped, port.discard(id));
        }
        next
    }
}
