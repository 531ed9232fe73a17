//! An interface as its front-end sees it.

use crate::bits::{HEADER_BYTES, feature};
use crate::counters::count;
use crate::flow::{self, FlowTable};
use crate::interface::{Interface, Watcher};
use crate::port::Offloads;
use crate::worker::{Pair, Side, Terms, Worker};
use farlane_vhost::bits::feature as common;
use farlane_vhost::channel::Channel;
use farlane_vhost::session::{Device, Setup};
use farlane_zero_copy::placement::{Placement, Watch};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use vhost::vhost_user::{Error, Result};
use zerocopy::IntoBytes as _;

/// Bytes of the header of a legacy device without mergeable buffers: `buffers` is not there (virtio 1.2, 5.1.6.1).
const LEGACY_HEADER_BYTES: usize = HEADER_BYTES - 2;

/// How often it is looked where the VM's memory lies.
const LOOK_AT_MEMORY: Duration = Duration::from_secs(1);

/// The front-end is told of a change.
struct Changed(Arc<Channel>);

impl Watcher for Changed {
    fn changed(&self) {
        self.0.config_changed();
    }
}

/// How a queue pair is used.
#[derive(Debug, Default)]
struct Used {
    worker: Option<Worker>,
    /// Whether its receive and its transmit queue are served.
    serves: [bool; 2],
}

/// A queue that is served.
#[derive(Debug)]
pub struct Served(u16);

/// An interface in the hands of a VMM.
pub struct NetDevice {
    interface: Arc<Interface>,
    features: u64,
    pairs: Arc<[Arc<Pair>]>,
    used: Vec<Used>,
    /// None where there is one pair only.
    table: Option<Arc<FlowTable>>,
    placement: Option<(Arc<Placement>, Option<Watch>)>,
    /// Kept for as long as it is to be told.
    _watcher: Arc<dyn Watcher>,
}

impl std::fmt::Debug for NetDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NetDevice")
            .field("interface", &self.interface)
            .finish_non_exhaustive()
    }
}

fn side_of(index: u16) -> Side {
    if index.is_multiple_of(2) {
        Side::Receive
    } else {
        Side::Transmit
    }
}

impl NetDevice {
    /// A VMM has just connected.
    ///
    /// # Errors
    /// Too many open files.
    pub fn new(interface: Arc<Interface>, channel: &Arc<Channel>) -> io::Result<Self> {
        interface.look();
        let watcher: Arc<dyn Watcher> = Arc::new(Changed(Arc::clone(channel)));
        interface.watch(Arc::downgrade(&watcher));
        count(&interface.counters.connections, 1);
        let count = interface.pairs();
        let pairs = (0..count).map(|index| Pair::new(index).map(Arc::new));
        let table = (count > 1).then(|| {
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
        *interface.table() = table.as_ref().map(Arc::downgrade);
        Ok(Self {
            pairs: pairs.collect::<io::Result<_>>()?,
            used: (0..count).map(|_| Used::default()).collect(),
            table,
            features: 0,
            placement: None,
            _watcher: watcher,
            interface,
        })
    }

    fn has(&self, bit: u64) -> bool {
        self.features & bit != 0
    }

    /// Tells whoever spreads frames how many pairs there are.
    fn pairs_changed(&self) {
        let served = self.used.iter().take_while(|used| used.serves[0]).count();
        let served = u16::try_from(served).unwrap_or(u16::MAX);
        if let Some(table) = &self.table {
            table.set_queues(served);
            self.interface.port.spread(served.max(1));
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

    fn terms(&self) -> Terms {
        let mergeable = self.has(feature::MRG_RXBUF);
        let long = mergeable || self.has(common::VERSION_1);
        Terms {
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
            takes: self.takes(),
        }
    }

    fn takes(&self) -> Offloads {
        self.offloads(
            feature::GUEST_CSUM,
            feature::GUEST_TSO4,
            feature::GUEST_TSO6,
            feature::GUEST_ECN,
        )
    }
}

impl Device for NetDevice {
    type Worker = Served;

    fn name(&self) -> String {
        format!("Interface {}", self.interface.name)
    }

    fn queues(&self) -> u16 {
        2 * self.interface.pairs()
    }

    fn features(&self) -> u64 {
        self.interface.features()
    }

    fn negotiated(&mut self, features: u64) {
        self.features = features;
        if let Err(e) = self.interface.port.set_guest_offloads(self.takes()) {
            log::warn!(
                "Interface {}: offloads are not set: {e}",
                self.interface.name
            );
        }
    }

    fn config(&self) -> Vec<u8> {
        self.interface.config().as_bytes().to_vec()
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8]) -> Result<()> {
        Err(Error::InvalidParam)
    }

    fn start(&mut self, queue: Setup) -> io::Result<Served> {
        let (index, side) = (queue.index, side_of(queue.index));
        let terms = self.terms();
        let interface = Arc::clone(&self.interface);
        if self.placement.is_none() {
            let placement = interface.place(&queue.space);
            let watch = placement.watch(LOOK_AT_MEMORY)?;
            self.placement = Some((placement, watch));
        }
        let (placement, _) = self.placement.as_ref().ok_or(io::ErrorKind::NotFound)?;
        // A queue starts after memory has come.
        placement.refresh();
        let at = usize::from(index / 2);
        let pair = self.pairs.get(at).ok_or(io::ErrorKind::NotFound)?;
        let used = self.used.get_mut(at).ok_or(io::ErrorKind::NotFound)?;
        let worker = match &used.worker {
            Some(worker) => worker,
            None => {
                let node = placement.map().node_of(queue.layout.available);
                let limbs = &interface.limbs;
                let limb = limbs.all().get(limbs.index_of(node));
                let limb = limb.ok_or(io::ErrorKind::NotFound)?;
                let table = self.table.as_ref();
                let worker = Worker::start(&interface, &self.pairs, pair, limb, placement, table)?;
                used.worker.insert(worker)
            }
        };
        worker.begin(side, queue, terms);
        used.serves[usize::from(index % 2)] = true;
        self.pairs_changed();
        Ok(Served(index))
    }

    fn stop(&mut self, served: Served) -> u16 {
        let index = served.0;
        let Some(used) = self.used.get_mut(usize::from(index / 2)) else {
            return 0;
        };
        let next = used
            .worker
            .as_ref()
            .map_or(0, |worker| worker.end(side_of(index)));
        used.serves[usize::from(index % 2)] = false;
        if used.serves == [false; 2]
            && let Some(worker) = used.worker.take()
        {
            worker.leave();
        }
        self.pairs_changed();
        next
    }
}
