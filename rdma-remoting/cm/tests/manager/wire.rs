//! A wire between managers: it may lose, double and delay, and has a clock of its own.

use farlane_rdma_cm::{
    Accept, Answer, Connect, Event, FlowLabel, Gid, Guid, IpHeader, IpService, Limits, Manager,
    PacketRate, PathMtu, Ports, PrivateData, Qpn, Resolve, RetryCount, Route, ServiceId,
    ServiceLevel, SidrStatus, TimeExponent, Transmit, Transport,
};
use farlane_rdma_cm::{Addresses, CommId, ListenerId};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

/// Numbers that are the same in each run (Steele et al., Fast Splittable Pseudorandom Number
/// Generators, 2014).
#[derive(Clone, Copy, Debug)]
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// How long a datagram takes at most.
pub const LONGEST_WAY: Duration = Duration::from_millis(1000);
/// Local ACK timeout: more than there and back.
pub const ACK_TIMEOUT: TimeExponent = TimeExponent::of(19);

pub const PORT: u16 = 7174;

fn service_of(protocol: u8) -> ServiceId {
    IpService {
        protocol,
        port: PORT,
    }
    .id()
}

/// Of connections.
pub fn service() -> ServiceId {
    service_of(IpService::TCP)
}

/// Of datagrams.
pub fn datagram_service() -> ServiceId {
    service_of(IpService::UDP)
}

pub fn address(node: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, u8::try_from(node).unwrap() + 1)
}

pub fn gid(node: usize) -> Gid {
    Gid(address(node).to_ipv6_mapped().octets())
}

pub fn ports(from: usize, to: usize) -> Ports {
    Ports {
        local: gid(from),
        remote: gid(to),
    }
}

pub fn route() -> Route {
    Route {
        flow_label: FlowLabel::of(5),
        traffic_class: 6,
        hop_limit: 64,
        service_level: ServiceLevel::of(3),
        packet_rate: PacketRate::of(2),
        path_mtu: PathMtu::Bytes1024,
        partition_key: 0xffff,
        ack_timeout: ACK_TIMEOUT,
    }
}

pub fn header(from: usize, to: usize) -> IpHeader {
    IpHeader {
        source_port: 40_000,
        addresses: Addresses::V4 {
            source: address(from),
            destination: address(to),
        },
    }
}

/// A request whose private data is the number.
pub fn connect(from: usize, to: usize, qpn: u32, number: u64) -> Connect {
    Connect {
        ports: ports(from, to),
        service_id: service(),
        transport: Transport::Reliable,
        qpn: Qpn::of(qpn),
        responder_resources: 4,
        initiator_depth: 8,
        retry_count: RetryCount::of(6),
        rnr_retry_count: RetryCount::of(7),
        srq: false,
        route: route(),
        private_data: header(from, to)
            .private_data(&number.to_le_bytes())
            .unwrap(),
    }
}

pub fn accept(qpn: u32, number: u64) -> Accept {
    Accept {
        qpn: Qpn::of(qpn),
        responder_resources: 5,
        initiator_depth: 16,
        rnr_retry_count: RetryCount::of(3),
        srq: true,
        private_data: PrivateData::new(&number.to_le_bytes()).unwrap(),
    }
}

pub fn resolve(from: usize, to: usize, number: u64) -> Resolve {
    Resolve {
        ports: ports(from, to),
        service_id: datagram_service(),
        partition_key: 0xffff,
        private_data: header(from, to)
            .private_data(&number.to_le_bytes())
            .unwrap(),
    }
}

pub fn answer(qpn: u32, number: u64) -> Answer {
    Answer {
        status: SidrStatus::SUCCESS,
        qpn: Qpn::of(qpn),
        q_key: 0x1234_5678,
        private_data: PrivateData::new(&number.to_le_bytes()).unwrap(),
    }
}

/// The number that private data begins with.
pub fn number(data: &[u8]) -> u64 {
    u64::from_le_bytes(data[..8].try_into().unwrap())
}

/// What a wire does to datagrams.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub lost_in_100: u64,
    pub doubled_in_100: u64,
    pub delayed: bool,
}

impl Faults {
    pub const NONE: Self = Self {
        lost_in_100: 0,
        doubled_in_100: 0,
        delayed: false,
    };
}

pub struct Wire {
    pub managers: Vec<Manager>,
    /// Events that nobody has looked at.
    pub events: Vec<Vec<Event>>,
    /// Of connections.
    pub listeners: Vec<ListenerId>,
    pub datagram_listeners: Vec<ListenerId>,
    pub now: Instant,
    pub faults: Faults,
    pub sent: usize,
    numbers: Numbers,
    /// Datagrams under way, by when they are there.
    under_way: BTreeMap<(Instant, usize), Transmit>,
    /// Losses in a row, from port to port.
    lost: BTreeMap<Ports, u32>,
}

impl Wire {
    /// Managers of nodes, each of which listens for both.
    pub fn new(nodes: usize, seed: u64) -> Self {
        Self::limited(nodes, seed, Limits::default())
    }

    pub fn limited(nodes: usize, seed: u64, limits: Limits) -> Self {
        let mut numbers = Numbers(seed);
        let mut manager = || {
            let mut numbers = Numbers(numbers.next());
            Manager::new(Guid(1), limits, Box::new(move || numbers.next()))
        };
        let mut managers: Vec<Manager> = (0..nodes).map(|_| manager()).collect();
        let mut listen = |service| -> Vec<ListenerId> {
            let managers = managers.iter_mut();
            let listeners = managers.map(|one| one.listen(service, None, usize::MAX).unwrap());
            listeners.collect()
        };
        let listeners = listen(service());
        let datagram_listeners = listen(datagram_service());
        Self {
            managers,
            events: (0..nodes).map(|_| Vec::new()).collect(),
            listeners,
            datagram_listeners,
            now: Instant::now(),
            faults: Faults::NONE,
            sent: 0,
            numbers,
            under_way: BTreeMap::new(),
            lost: BTreeMap::new(),
        }
    }

    fn node(gid: Gid) -> usize {
        usize::from(gid.0[15]) - 1
    }

    /// Puts what managers have to say on the wire.
    pub fn collect(&mut self) {
        for node in 0..self.managers.len() {
            while let Some(transmit) = self.managers[node].poll_transmit() {
                assert_eq!(transmit.ports.local, gid(node));
                self.put(transmit);
            }
            let manager = &mut self.managers[node];
            self.events[node].extend(std::iter::from_fn(|| manager.poll_event()));
        }
    }

    /// Puts a datagram on the wire.
    pub fn put(&mut self, transmit: Transmit) {
        let faults = self.faults;
        let lost = self.lost.entry(transmit.ports).or_default();
        // Fewer in a row than a message is sent again.
        if *lost < 4 && self.numbers.below(100) < faults.lost_in_100 {
            *lost += 1;
            return;
        }
        *lost = 0;
        let copies = 1 + usize::from(self.numbers.below(100) < faults.doubled_in_100);
        for _ in 0..copies {
            let longest = u64::try_from(LONGEST_WAY.as_micros()).unwrap();
            let way = if faults.delayed {
                Duration::from_micros(self.numbers.below(longest))
            } else {
                Duration::from_micros(10)
            };
            self.sent += 1;
            self.under_way
                .insert((self.now + way, self.sent), transmit.clone());
        }
    }

    /// The next thing happens, if it does until then.
    fn step(&mut self, until: Instant) -> bool {
        self.collect();
        let arrival = self.under_way.first_key_value().map(|((at, _), _)| *at);
        let timers = self.managers.iter().filter_map(Manager::next_timer);
        let Some(next) = timers.chain(arrival).min().filter(|at| *at <= until) else {
            return false;
        };
        self.now = next.max(self.now);
        if arrival.is_some_and(|at| at <= self.now)
            && let Some((_, transmit)) = self.under_way.pop_first()
        {
            let to = Ports {
                local: transmit.ports.remote,
                remote: transmit.ports.local,
            };
            let node = Self::node(to.local);
            if let Some(manager) = self.managers.get_mut(node) {
                manager
                    .receive(self.now, to, &transmit.datagram[..])
                    .unwrap();
            }
        } else {
            let now = self.now;
            self.managers.iter_mut().for_each(|one| one.advance(now));
        }
        true
    }

    /// Lets time pass.
    pub fn run(&mut self, time: Duration) {
        let until = self.now + time;
        while self.step(until) {}
        self.now = until;
    }

    /// Lets time pass for as long as something is under way, and a day at most.
    pub fn rest(&mut self) {
        let until = self.now + Duration::from_secs(86_400);
        while self.step(until) {}
    }

    /// What has happened at a node.
    pub fn take(&mut self, node: usize) -> Vec<Event> {
        self.collect();
        std::mem::take(&mut self.events[node])
    }

    /// A connection of queue pairs 100 and 200.
    pub fn connected(&mut self, from: usize, to: usize) -> (CommId, CommId) {
        self.connected_by(from, to, [100, 200])
    }

    /// A connection of these queue pairs.
    pub fn connected_by(
        &mut self,
        from: usize,
        to: usize,
        [own, theirs]: [u32; 2],
    ) -> (CommId, CommId) {
        let now = self.now;
        let request = connect(from, to, own, 1);
        let client = self.managers[from].connect(now, request).unwrap();
        self.run(Duration::from_millis(1));
        let server = match &self.take(to)[..] {
            [Event::ConnectRequest { id, .. }] => *id,
            other => panic!("{other:?}"),
        };
        let now = self.now;
        self.managers[to]
            .accept(now, server, &accept(theirs, 2))
            .unwrap();
        self.run(Duration::from_millis(1));
        assert!(matches!(&self.take(from)[..], [Event::Reply { id, .. }] if *id == client));
        self.managers[from]
            .establish(client, PrivateData::default())
            .unwrap();
        self.run(Duration::from_millis(1));
        assert!(matches!(&self.take(to)[..], [Event::Established { id, .. }] if *id == server));
        (client, server)
    }
}

/// More than what is sent at once takes.
pub const SOON: Duration = Duration::from_millis(1);

fn attribute_of(transmit: &Transmit) -> u16 {
    u16::from_be_bytes([transmit.datagram[16], transmit.datagram[17]])
}

/// What a manager sends, which goes nowhere.
pub fn sent(wire: &mut Wire, node: usize) -> Vec<Transmit> {
    std::iter::from_fn(|| wire.managers[node].poll_transmit()).collect()
}

pub fn sent_attributes(wire: &mut Wire, node: usize) -> Vec<u16> {
    sent(wire, node).iter().map(attribute_of).collect()
}
