//! Datagrams of any kind from hostile ports, and users that call a manager at any time.

use crate::{Input, format_all_logs};
use farlane_rdma_cm::{
    Accept, Answer, CommId, Connect, Counts, Event, FlowLabel, Gid, Guid, IpHeader, IpService,
    Limits, ListenerId, MAD_BYTES, Mad, Manager, PacketRate, PathMtu, Ports, PrivateData, Qpn,
    RejectReason, Resolve, RetryCount, Route, ServiceId, ServiceLevel, SidrStatus, TimeExponent,
    Transport,
};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

const LIMITS: Limits = Limits {
    connections: 24,
    requests: 16,
    orphans: 8,
    listeners: 3,
    backlog: 8,
    answers: 64,
};
/// Requests of one peer that nobody has claimed, of 16 places; the next ones have half each.
const SHARE: usize = 8;
/// The manager's port is the first one.
const PORTS: [Gid; 3] = [Gid([1; 16]), Gid([2; 16]), Gid([3; 16])];
/// Messages that a datagram may have been answered with, and what they began.
const ANSWERS: usize = 2;
/// Datagrams and messages that are known.
const KEPT: usize = 32;

fn services() -> [ServiceId; 3] {
    let ip = |protocol| IpService { protocol, port: 5 }.id();
    [ip(IpService::TCP), ip(IpService::UDP), ServiceId(7)]
}

struct Machine {
    manager: Manager,
    now: Instant,
    /// What its users have.
    ids: BTreeSet<CommId>,
    listeners: Vec<ListenerId>,
    /// Datagrams from and to it, which the next begin like.
    seen: Vec<Vec<u8>>,
}

impl Machine {
    fn new() -> Self {
        let mut drawn = 0_u64;
        let draw = move || {
            drawn += 1;
            drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        };
        Self {
            manager: Manager::new(Guid(1), LIMITS, Box::new(draw)),
            now: Instant::now(),
            ids: BTreeSet::new(),
            listeners: Vec::new(),
            seen: Vec::new(),
        }
    }

    fn keep(&mut self, datagram: &[u8]) {
        if self.seen.len() < KEPT {
            self.seen.push(datagram.to_vec());
        }
    }

    /// A datagram: one that was seen, with other bytes here and there.
    fn datagram(&self, input: &mut Input<'_>) -> Vec<u8> {
        let mut datagram = match self.seen.get(usize::from(input.u8()) % KEPT) {
            Some(seen) => seen.clone(),
            None => {
                let mut datagram = vec![0; MAD_BYTES];
                datagram[..4].copy_from_slice(&[1, 7, 2, 3]);
                datagram[17] = input.u8();
                datagram
            }
        };
        for _ in 0..input.u8() % 8 {
            let at = usize::from(input.u8());
            let bytes = input.counted();
            let end = datagram.len().min(at + bytes.len());
            if let Some(room) = datagram.get_mut(at..end) {
                room.copy_from_slice(&bytes[..room.len()]);
            }
        }
        // The names of one message in another.
        if let Some(seen) = self.seen.get(usize::from(input.u8()))
            && let (Some(names), Some(room)) = (seen.get(24..32), datagram.get_mut(24..32))
        {
            room.copy_from_slice(names);
            if input.u8().is_multiple_of(2) {
                room.rotate_left(4);
            }
        }
        datagram
    }

    /// Looks at all that the manager says; counts what it sends.
    fn look(&mut self) -> usize {
        let mut sent = 0;
        while let Some(transmit) = self.manager.poll_transmit() {
            sent += 1;
            assert_eq!(transmit.ports.local, PORTS[0]);
            assert!(Mad::parse(&transmit.datagram[..]).is_ok());
            self.keep(&transmit.datagram[..]);
        }
        while let Some(ended) = self.manager.poll_ended() {
            assert!(!self.manager.is_ending(ended) && !self.ids.contains(&ended));
        }
        while let Some(event) = self.manager.poll_event() {
            let id = event.id();
            match event {
                Event::ConnectRequest { listener, .. } | Event::ServiceRequest { listener, .. } => {
                    assert!(self.listeners.contains(&listener));
                    assert!(self.ids.insert(id));
                }
                _ => assert!(self.ids.contains(&id)),
            }
        }
        let counts = self.manager.counts();
        assert_eq!(counts.connections, self.ids.len());
        assert!(counts.connections <= LIMITS.connections);
        assert!(counts.requests <= SHARE + SHARE / 2 + SHARE / 4);
        // Those whose peers have not answered that they end, and those that may be under way.
        assert!(counts.orphans <= LIMITS.connections / 4 + LIMITS.orphans);
        let all = counts.connections + counts.orphans;
        assert!(all <= LIMITS.connections + LIMITS.orphans);
        assert!(counts.timers <= counts.connections + counts.orphans);
        sent
    }

    fn receive(&mut self, input: &mut Input<'_>) {
        let datagram = self.datagram(input);
        // Now and then from the manager's own port: two of its programs may be peers.
        let from = usize::from(input.u8());
        let remote = match from % 8 {
            7 => PORTS[0],
            _ => PORTS[1 + from % 2],
        };
        let ports = Ports {
            local: PORTS[0],
            remote,
        };
        match Mad::parse(&datagram) {
            Ok(mad) => assert_eq!(Mad::parse(&mad.write()), Ok(mad)),
            Err(error) => drop(error.to_string()),
        }
        if let Err(malformed) = self.manager.receive(self.now, ports, &datagram) {
            drop(malformed.to_string());
        }
        self.keep(&datagram);
        assert!(self.look() <= ANSWERS);
    }

    fn one(&self, input: &mut Input<'_>) -> CommId {
        let which = usize::from(input.u8()) % self.ids.len().max(1);
        self.ids.iter().nth(which).copied().unwrap_or_default()
    }

    fn connect(&mut self, input: &mut Input<'_>) {
        let ports = Ports {
            local: PORTS[0],
            remote: *input.pick(&PORTS),
        };
        let service_id = *input.pick(&services());
        let transports = [
            Transport::Reliable,
            Transport::Unreliable,
            Transport::ExtendedReliable,
        ];
        let made = if input.u8().is_multiple_of(3) {
            self.manager.resolve(
                self.now,
                &Resolve {
                    ports,
                    service_id,
                    partition_key: 0xffff,
                    private_data: PrivateData::default(),
                },
            )
        } else {
            let connect = Connect {
                ports,
                service_id,
                transport: *input.pick(&transports),
                qpn: Qpn::of(input.u32()),
                responder_resources: input.u8(),
                initiator_depth: input.u8(),
                retry_count: RetryCount::of(input.u8()),
                rnr_retry_count: RetryCount::of(input.u8()),
                srq: false,
                route: Route {
                    flow_label: FlowLabel::default(),
                    traffic_class: 0,
                    hop_limit: 64,
                    service_level: ServiceLevel::default(),
                    packet_rate: PacketRate::default(),
                    path_mtu: PathMtu::Bytes1024,
                    partition_key: 0xffff,
                    ack_timeout: TimeExponent::of(input.u8()),
                },
                private_data: PrivateData::default(),
            };
            self.manager.connect(self.now, connect)
        };
        if let Ok(id) = made {
            assert!(self.ids.insert(id));
        }
    }

    /// A call of a user. Whatever it answers, nothing breaks.
    fn call(&mut self, input: &mut Input<'_>) {
        let id = self.one(input);
        let (manager, now) = (&mut self.manager, self.now);
        let result = match input.u8() % 9 {
            0 => manager.claim(id),
            1 | 2 => {
                let accept = Accept {
                    qpn: Qpn::of(input.u32()),
                    responder_resources: input.u8(),
                    initiator_depth: input.u8(),
                    rnr_retry_count: RetryCount::of(input.u8()),
                    srq: false,
                    private_data: PrivateData::default(),
                };
                manager.accept(now, id, &accept)
            }
            3 => {
                let answer = Answer {
                    status: SidrStatus(input.u8()),
                    qpn: Qpn::of(input.u32()),
                    q_key: input.u32(),
                    private_data: PrivateData::default(),
                };
                manager.answer(now, id, &answer)
            }
            4 => {
                let reason = RejectReason(input.u16());
                manager.reject(now, id, reason, PrivateData::default())
            }
            5 => manager.establish(id, PrivateData::default()),
            6 => manager.disconnect(now, id),
            7 => manager.communication_established(id),
            _ => {
                self.ids.remove(&id);
                manager.destroy(now, id)
            }
        };
        drop(result.map_err(|error| error.to_string()));
        // Where one is true, so are those before.
        let (manager, states) = (&self.manager, 3);
        let has = [
            manager.qp_init(id).is_ok(),
            manager.qp_ready_to_receive(id).is_ok(),
            manager.qp_ready_to_send(id).is_ok(),
        ];
        assert!(has.is_sorted_by(|before, after| before >= after) && has.len() == states);
        assert!(self.look() <= 1);
    }

    fn listen(&mut self, input: &mut Input<'_>) {
        let which = usize::from(input.u8());
        if which.is_multiple_of(4) && !self.listeners.is_empty() {
            let listener = self.listeners.remove(which % self.listeners.len());
            assert_eq!(self.manager.unlisten(self.now, listener), Ok(()));
            // Whatever nobody has claimed has gone with it.
            let manager = &self.manager;
            self.ids.retain(|id| is_there(manager, *id));
            self.look();
            return;
        }
        let address = input.u8().is_multiple_of(2).then_some(PORTS[0]);
        let service_id = *input.pick(&services());
        let backlog = usize::from(input.u8());
        if let Ok(listener) = self.manager.listen(service_id, address, backlog) {
            self.listeners.push(listener);
        }
    }

    fn end(mut self) {
        for id in std::mem::take(&mut self.ids) {
            assert_eq!(self.manager.destroy(self.now, id), Ok(()));
        }
        for listener in std::mem::take(&mut self.listeners) {
            assert_eq!(self.manager.unlisten(self.now, listener), Ok(()));
        }
        // What has a last word goes when that is sent.
        self.look();
        while let Some(at) = self.manager.next_timer() {
            assert!(at >= self.now && at < self.now + Duration::from_secs(3600));
            self.now = at;
            self.manager.advance(at);
            self.look();
        }
        assert_eq!(self.manager.counts(), Counts::default());
    }
}

/// Whether a user has it still: of what has gone every call says so.
fn is_there(manager: &Manager, id: CommId) -> bool {
    !matches!(
        manager.qp_init(id),
        Err(farlane_rdma_cm::CallError::NoSuchId)
    )
}

fn parse_header(input: &mut Input<'_>) {
    let data = input.counted();
    match IpHeader::parse(data) {
        Ok((header, rest)) => {
            let Some(again) = header.private_data::<256>(rest) else {
                return;
            };
            assert_eq!(
                IpHeader::parse(&again.0).map(|(header, _)| header),
                Ok(header)
            );
        }
        Err(error) => drop(error.to_string()),
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    format_all_logs();
    let mut input = Input::new(data);
    let mut machine = Machine::new();
    while !input.is_empty() {
        match input.u8() % 8 {
            0..=2 => machine.receive(&mut input),
            3 | 4 => machine.call(&mut input),
            5 => {
                machine.connect(&mut input);
                assert!(machine.look() <= 1);
            }
            6 => {
                machine.now += Duration::from_micros(1 << (input.u8() % 32));
                machine.manager.advance(machine.now);
                machine.look();
            }
            _ if input.u8().is_multiple_of(4) => parse_header(&mut input),
            _ => machine.listen(&mut input),
        }
    }
    machine.end();
}
