//! A network interface: its port on the host, what guests see of it, and what it counts.

use crate::bits::{Config, DUPLEX_UNKNOWN, SPEED_UNKNOWN, feature, status};
use crate::counters::{Counters, FrameTimes};
use crate::flow::FlowTable;
use crate::pairs::PairCount;
use crate::port::Port;
use farlane_daemon::locality::Locality;
use farlane_daemon::log_limit::LogLimit;
use farlane_daemon::metrics::Sample;
use farlane_daemon::per_node::WorkerNodes;
use farlane_sys::sync::lock;
use farlane_vhost_user::bits::feature as common;
use farlane_zero_copy::placement::Given;
use std::hash::{Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Weak};
use std::time::Instant;

/// Whoever is to be told of a change.
pub trait Watcher: Send + Sync {
    /// The configuration space is another: the link is up, or down.
    fn changed(&self, up: bool);
}

/// What moved where, by direction.
#[derive(Debug)]
pub struct Directions {
    /// To the guest.
    pub receive: Locality,
    /// From the guest.
    pub transmit: Locality,
}

/// A network interface.
pub struct Interface {
    /// What it is called in messages and counters.
    pub name: String,
    /// Where its frames come from and go to.
    pub port: Box<dyn Port>,
    /// What it counts.
    pub counters: Counters,
    /// How long its frames take.
    pub times: FrameTimes,
    /// What moved where.
    pub locality: Directions,
    /// Its log lines that a guest can cause.
    pub limit: LogLimit,
    /// The machine.
    pub nodes: WorkerNodes,
    /// Nodes of a VM's memory that are known beforehand.
    pub given: Vec<Given>,
    mac: [u8; 6],
    link: AtomicBool,
    watcher: Mutex<Option<Weak<dyn Watcher>>>,
    /// The flow table of the VM that is there now.
    table: Mutex<Option<Weak<FlowTable>>>,
    begun: Instant,
}

impl std::fmt::Debug for Interface {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interface")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Interface {
    /// An interface over a port.
    #[must_use]
    pub fn new(
        name: String,
        port: Box<dyn Port>,
        mac: Option<[u8; 6]>,
        nodes: WorkerNodes,
        given: Vec<Given>,
    ) -> Self {
        let locality = || Locality::new(nodes.numbers(), vec![port.name()]);
        Self {
            locality: Directions {
                receive: locality(),
                transmit: locality(),
            },
            counters: Counters::default(),
            times: FrameTimes::default(),
            limit: LogLimit::new(),
            mac: mac.unwrap_or_else(|| address_for(&*port)),
            link: AtomicBool::new(port.link_is_up()),
            watcher: Mutex::new(None),
            table: Mutex::new(None),
            begun: Instant::now(),
            name,
            port,
            nodes,
            given,
        }
    }

    /// Queue pairs.
    #[must_use]
    pub fn pairs(&self) -> PairCount {
        self.port.queues()
    }

    /// Its address, as long as no driver sets another.
    #[must_use]
    pub fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// What the flow table of the VM that is there has done.
    #[must_use]
    pub fn flow_samples(&self) -> Option<Vec<Sample<'static>>> {
        let counts = self.table().as_ref().and_then(Weak::upgrade)?.counts();
        let samples = [
            Sample::gauge("flows", "Flows in the flow table.", counts.flows),
            Sample::gauge(
                "flows_established",
                "Flows in the flow table that are established.",
                counts.established,
            ),
            Sample::counter(
                "flow_moves",
                "Flow moves to another queue pair that were begun.",
                counts.moves,
            ),
            Sample::counter(
                "flows_forgotten",
                "Flows that were evicted from the flow table, or expired.",
                counts.forgotten,
            ),
            Sample::counter(
                "flows_refused",
                "Flows that the flow table had no room for.",
                counts.refused,
            ),
        ];
        Some(samples.into())
    }

    /// The features that it offers.
    #[must_use]
    pub fn features(&self) -> u64 {
        let offloads = self.port.offloads();
        let mut features = common::INDIRECT_DESC
            | common::EVENT_IDX
            | common::PROTOCOL_FEATURES
            | common::VERSION_1
            | feature::MRG_RXBUF
            | feature::MAC
            | feature::STATUS
            | feature::MTU
            | feature::SPEED_DUPLEX
            | feature::CTRL_VQ
            | feature::CTRL_RX
            | feature::CTRL_RX_EXTRA
            | feature::CTRL_VLAN
            | feature::CTRL_MAC_ADDR
            | feature::GUEST_ANNOUNCE;
        let both = [
            (
                offloads.checksum,
                feature::CSUM | feature::GUEST_CSUM | feature::CTRL_GUEST_OFFLOADS,
            ),
            (offloads.tso4, feature::HOST_TSO4 | feature::GUEST_TSO4),
            (offloads.tso6, feature::HOST_TSO6 | feature::GUEST_TSO6),
            (offloads.ecn, feature::HOST_ECN | feature::GUEST_ECN),
            (self.pairs() > PairCount::ONE, feature::MQ),
        ];
        for (there, bits) in both {
            if there {
                features |= bits;
            }
        }
        features
    }

    /// Its configuration space.
    #[must_use]
    pub fn config(&self) -> Config {
        let link = self.link.load(Ordering::Relaxed);
        let status = if link { status::LINK_UP } else { 0 };
        Config {
            mac: self.mac,
            status: status.into(),
            pairs: self.pairs().0.into(),
            mtu: self.port.mtu().into(),
            speed: SPEED_UNKNOWN.into(),
            duplex: DUPLEX_UNKNOWN,
            ..Config::default()
        }
    }

    /// From now on this one is told of changes.
    pub fn watch(&self, watcher: Weak<dyn Watcher>) {
        *lock(&self.watcher) = Some(watcher);
    }

    /// The flow table of the VM that is there now.
    pub fn table(&self) -> MutexGuard<'_, Option<Weak<FlowTable>>> {
        lock(&self.table)
    }

    /// Microseconds since it was made.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        let elapsed = self.begun.elapsed();
        elapsed.as_secs() * 1_000_000 + u64::from(elapsed.subsec_micros())
    }

    /// Looks whether there is a link.
    pub fn look(&self) {
        let up = self.port.link_is_up();
        if self.link.swap(up, Ordering::Relaxed) != up {
            let state = if up { "up" } else { "down" };
            log::info!("Interface {}: the link is {state}", self.name);
            let watcher = lock(&self.watcher);
            if let Some(watcher) = watcher.as_ref().and_then(Weak::upgrade) {
                watcher.changed(up);
            }
        }
    }

    /// Its locality counters, of each direction.
    #[must_use]
    pub fn localities(&self) -> [(&'static str, &Locality); 2] {
        [
            ("rx", &self.locality.receive),
            ("tx", &self.locality.transmit),
        ]
    }
}

/// An address for an interface that was given none: the same whenever it is over the same port.
/// Locally administered.
fn address_for(port: &dyn Port) -> [u8; 6] {
    // Not keyed: the same in each process.
    #[allow(deprecated)]
    let mut hasher = std::hash::SipHasher::new();
    port.name().hash(&mut hasher);
    port.hardware_address().hash(&mut hasher);
    let [a, b, c, d, e, ..] = hasher.finish().to_le_bytes();
    [0x52, a, b, c, d, e]
}
