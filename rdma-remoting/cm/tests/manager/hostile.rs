//! A port that sends whatever it likes, beside two that do what they should.

use crate::wire::{Numbers, Wire, accept, answer, connect, gid, ports, resolve};
use farlane_rdma_cm::{
    CallError, CommId, Event, Limits, MAD_BYTES, Mad, Message, PrivateData, Transmit, attribute,
};
use proptest::prelude::*;
use std::time::Duration;

/// The hostile one; those that it sends to are 0 and 1.
const HOSTILE: usize = 2;

const FEW: Limits = Limits {
    connections: 200,
    requests: 64,
    orphans: 64,
    listeners: 4,
    backlog: 32,
    answers: 1024,
};

/// Attributes of all messages, and of some that there are not.
const ATTRIBUTES: [u16; 11] = [
    attribute::REQ,
    attribute::MRA,
    attribute::REJ,
    attribute::REP,
    attribute::RTU,
    attribute::DREQ,
    attribute::DREP,
    attribute::SIDR_REQ,
    attribute::SIDR_REP,
    0x19,
    0x01,
];

/// What a hostile port knows.
struct Attacker {
    numbers: Numbers,
    /// Names of connections that it has been told, and some that are others'.
    names: Vec<u32>,
    /// What it has seen, or sent.
    seen: Vec<Vec<u8>>,
}

impl Attacker {
    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        let count = u64::try_from(from.len().max(1)).unwrap();
        from.get(usize::try_from(self.numbers.below(count)).unwrap())
            .copied()
    }

    fn name(&mut self) -> [u8; 4] {
        let names = self.names.clone();
        let name = self.pick(&names).unwrap_or_default();
        name.to_be_bytes()
    }

    fn request(&mut self, to: usize) -> Vec<u8> {
        let qpn = u32::try_from(self.numbers.below(8)).unwrap();
        let mut other = Wire::new(HOSTILE + 1, self.numbers.next());
        let now = other.now;
        let manager = &mut other.managers[HOSTILE];
        if self.numbers.below(4) == 0 {
            manager.resolve(now, &resolve(HOSTILE, to, 1)).unwrap();
        } else {
            manager.connect(now, connect(HOSTILE, to, qpn, 1)).unwrap();
        }
        let mut datagram = manager.poll_transmit().unwrap().datagram.to_vec();
        if self.numbers.below(2) == 0 {
            datagram[24..28].copy_from_slice(&self.name());
        }
        datagram
    }

    /// A datagram: of all sorts.
    fn datagram(&mut self, to: usize) -> Vec<u8> {
        let mut datagram = match self.numbers.below(8) {
            0 => {
                let length = usize::try_from(self.numbers.below(300)).unwrap();
                return (0..length)
                    .map(|_| self.numbers.next().to_le_bytes()[0])
                    .collect();
            }
            1..=3 => self.request(to),
            4 if !self.seen.is_empty() => {
                let which = self.numbers.below(u64::try_from(self.seen.len()).unwrap());
                self.seen[usize::try_from(which).unwrap()].clone()
            }
            _ => {
                let mut datagram = vec![0; MAD_BYTES];
                let attribute = self.pick(&ATTRIBUTES).unwrap();
                datagram[..4].copy_from_slice(&[1, 7, 2, 3]);
                datagram[16..18].copy_from_slice(&attribute.to_be_bytes());
                datagram[24..28].copy_from_slice(&self.name());
                datagram[28..32].copy_from_slice(&self.name());
                // The message that it is about, the reason, a time.
                let about = self.numbers.next().to_le_bytes();
                datagram[32..36].copy_from_slice(&about[..4]);
                datagram
            }
        };
        if self.numbers.below(4) == 0 {
            let at = usize::try_from(self.numbers.below(256)).unwrap();
            datagram[at] = self.numbers.next().to_le_bytes()[0];
        }
        self.seen.push(datagram.clone());
        datagram
    }

    /// Looks at what it was sent.
    fn look(&mut self, transmit: &Transmit) {
        let bytes = &transmit.datagram;
        for at in [24, 28] {
            self.names
                .push(u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()));
        }
        self.seen.push(bytes.to_vec());
    }
}

/// Puts what managers say on the wire, but what they say to the hostile port. Says how much that
/// was.
fn collect(wire: &mut Wire, attacker: &mut Attacker) -> usize {
    let mut to_attacker = 0;
    for node in [0, 1] {
        while let Some(transmit) = wire.managers[node].poll_transmit() {
            if transmit.ports.remote == gid(HOSTILE) {
                to_attacker += 1;
                attacker.look(&transmit);
            } else {
                wire.put(transmit);
            }
        }
    }
    to_attacker
}

/// A user does what it should with its events, of the hostile port's connections some more.
fn serve(wire: &mut Wire, attacker: &mut Attacker, node: usize, honest: &[CommId]) -> Vec<Event> {
    let mut of_honest = Vec::new();
    let now = wire.now;
    for event in wire.take(node) {
        let id = event.id();
        if honest.contains(&id) {
            of_honest.push(event);
            continue;
        }
        let manager = &mut wire.managers[node];
        let result = match (event, attacker.numbers.below(4)) {
            (_, 0) => manager.destroy(now, id),
            (Event::ConnectRequest { request, .. }, _) => {
                assert_eq!(request.ports.remote, gid(HOSTILE));
                manager.accept(now, id, &accept(999, 0))
            }
            (Event::ServiceRequest { .. }, _) => manager.answer(now, id, &answer(998, 0)),
            (Event::Reply { .. }, _) => panic!("nobody has asked the hostile port"),
            (Event::Established { .. }, 1) => manager.disconnect(now, id),
            (Event::Established { .. }, _) => Ok(()),
            (_, _) => manager.destroy(now, id),
        };
        // It may have ended by itself since, or with an event before this one.
        if let Err(error) = result {
            assert!([CallError::WrongState, CallError::NoSuchId].contains(&error));
        }
    }
    of_honest
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_hostile_port_affects_its_own_connections_alone(seed: u64, count in 1..300usize) {
        let mut wire = Wire::limited(2, seed, FEW);
        let (client, server) = wire.connected(0, 1);
        let now = wire.now;
        let asking = wire.managers[0].connect(now, connect(0, 1, 300, 3)).unwrap();
        wire.run(Duration::from_millis(1));
        let asked = wire.take(1)[0].id();
        let honest = [client, server, asking, asked];
        let mut attacker = Attacker {
            numbers: Numbers(seed ^ 0x5555),
            // The worst: it knows the names of others' connections.
            names: honest.iter().map(|id| id.0).chain([0, 1, u32::MAX]).collect(),
            seen: Vec::new(),
        };
        for _ in 0..count {
            let to = usize::try_from(attacker.numbers.below(2)).unwrap();
            let datagram = attacker.datagram(to);
            let (now, at) = (wire.now, ports(to, HOSTILE));
            let _malformed = wire.managers[to].receive(now, at, &datagram);
            // It has no more sent than it sends, but for what ends a connection that it takes away
            // from itself.
            prop_assert!(collect(&mut wire, &mut attacker) <= 2);
            if attacker.numbers.below(3) == 0 {
                for node in [0, 1] {
                    let events = serve(&mut wire, &mut attacker, node, &honest);
                    prop_assert_eq!(events, []);
                    collect(&mut wire, &mut attacker);
                }
            }
            wire.now += Duration::from_millis(attacker.numbers.below(50));
            for node in [0, 1] {
                let now = wire.now;
                wire.managers[node].advance(now);
                let counts = wire.managers[node].counts();
                prop_assert!(counts.connections <= FEW.connections);
                // Its share at each listener, and one that is asked by another port.
                prop_assert!(counts.requests <= 2 * 16 + 1, "{:?}", counts);
                let all = counts.connections + counts.orphans;
                prop_assert!(all <= FEW.connections + FEW.orphans, "{:?}", counts);
            }
            collect(&mut wire, &mut attacker);
        }
        // All that was there goes on as if nothing had been.
        let now = wire.now;
        wire.managers[1].accept(now, asked, &accept(400, 4)).unwrap();
        wire.managers[0].disconnect(now, client).unwrap();
        let mut seen = [Vec::new(), Vec::new()];
        for _ in 0..400 {
            collect(&mut wire, &mut attacker);
            wire.run(Duration::from_millis(500));
            for (node, seen) in seen.iter_mut().enumerate() {
                for event in serve(&mut wire, &mut attacker, node, &honest) {
                    let now = wire.now;
                    match event {
                        Event::Reply { id, .. } => {
                            let private_data = PrivateData::default();
                            wire.managers[node].establish(id, private_data).unwrap();
                        }
                        Event::Disconnected { id } if id == server => {
                            wire.managers[node].disconnect(now, id).unwrap();
                        }
                        _ => {}
                    }
                    seen.push(event);
                }
            }
        }
        let [of_client, of_server] = seen;
        let is_reply = |event: &Event| matches!(event, Event::Reply { id, .. } if *id == asking);
        prop_assert_eq!(of_client.iter().filter(|event| is_reply(event)).count(), 1);
        let ends = |id| [Event::Disconnected { id }, Event::TimewaitExit { id }];
        let rest: Vec<Event> = of_client.into_iter().filter(|event| !is_reply(event)).collect();
        prop_assert_eq!(rest, ends(client));
        let private_data = Box::default();
        let [disconnected, exit] = ends(server);
        let id = asked;
        let established = Event::Established { id, private_data };
        prop_assert_eq!(of_server.len(), 3);
        for event in [disconnected, exit, established] {
            prop_assert!(of_server.contains(&event), "{:?}", of_server);
        }
    }
}

#[test]
fn a_name_that_is_guessed_right_is_not_enough() {
    let mut wire = Wire::new(3, 1);
    let (client, server) = wire.connected(0, 1);
    let (local_comm_id, remote_comm_id) = (client, server);
    let dreq = Mad {
        transaction: farlane_rdma_cm::TransactionId(1),
        message: Message::Dreq(farlane_rdma_cm::Dreq {
            local_comm_id,
            remote_comm_id,
            remote_qpn: farlane_rdma_cm::Qpn::of(200),
            private_data: PrivateData::default(),
        }),
    };
    let now = wire.now;
    for (from, is_peer) in [(HOSTILE, false), (0, true)] {
        let at = ports(1, from);
        wire.managers[1].receive(now, at, &dreq.write()).unwrap();
        let event = wire.managers[1].poll_event();
        let disconnected = Event::Disconnected { id: server };
        assert_eq!(event, is_peer.then_some(disconnected));
    }
}
