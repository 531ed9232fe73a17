//! Programs of two ports, and what comes of their calls.

mod ends;
mod forged;
mod shares;

use super::ids::MAX_IDS;
use super::*;
use crate::async_ring::EventSink;
use crate::context::Context;
use crate::engine::QpNumber;
use crate::verbs::CallHost;
use crate::{Limits, Peers, Port, PortConfig, Resource, Server};
use farlane_abi::Errno;
use farlane_abi::control::EVENT_FIRST_CHANNEL;
use farlane_abi::ids::ContextId;
use farlane_abi::rdma::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// The service that most of these listen for: port 7471 of connections.
const SERVICE: u64 = CM_IP_SERVICES | 6 << 16 | 7471;
/// The same port of datagrams.
const DATAGRAMS: u64 = CM_IP_SERVICES | 17 << 16 | 7471;
/// Event index of a program.
const EVENT: u32 = EVENT_FIRST_CHANNEL;

/// Counts events.
#[derive(Default)]
struct Counted(AtomicUsize);

impl EventSink for Counted {
    fn raise(&self, _: u32) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A program.
struct Program {
    port: Arc<Port>,
    context: Arc<Context>,
    events: Arc<Counted>,
    /// The queue pair that it has connected last.
    last: AtomicU32,
    /// Its queue pairs, where they are none of an engine.
    queue_pairs: Mutex<Vec<NamedQueuePair>>,
}

impl Program {
    fn start(port: &Arc<Port>, id: u32) -> Self {
        let events = Arc::<Counted>::default();
        let sink = Arc::clone(&events) as Arc<dyn EventSink>;
        let context = port.open(ContextId::new(id).unwrap(), sink, None).unwrap();
        Self::of(port, context, events)
    }

    fn of(port: &Arc<Port>, context: Arc<Context>, events: Arc<Counted>) -> Self {
        let program = Self {
            port: Arc::clone(port),
            context,
            events,
            last: AtomicU32::new(0x10),
            queue_pairs: Mutex::default(),
        };
        program.add_queue_pair(0x22);
        program
    }

    fn add_queue_pair(&self, number: u32) {
        let (port, account) = (&self.context.connections, &self.context.account);
        let named = NamedQueuePair::new(port, account, QpNumber::of(number));
        lock(&self.queue_pairs).push(named);
    }

    fn call(&self) -> CallHost<'_> {
        CallHost::new(&self.context)
    }

    /// Has all messages brought, and all timers that have ended by then.
    fn turn(&self, now: Instant) {
        self.context.connections.turn(now);
    }

    fn next(&self) -> Result<CmEvent, Errno> {
        self.turn(Instant::now());
        self.call().cm_next_event(EVENT.into())
    }

    #[track_caller]
    fn expect(&self, kind: u32) -> CmEvent {
        let event = self.next().unwrap();
        assert_eq!(event.kind.get(), kind);
        event
    }

    fn bind(&self, service: u64) -> Result<CmBound, Errno> {
        self.call().cm_bind(CmBind {
            service: service.into(),
            event: EVENT.into(),
            ..Default::default()
        })
    }

    fn listen(&self, service: u64) -> u32 {
        let id = self.bind(service).unwrap().id;
        let backlog = 128.into();
        self.call().cm_listen(CmListen { id, backlog }).unwrap();
        id.get()
    }

    fn connect(&self, to: u8, service: u64, data: &[u8]) -> Result<u32, Errno> {
        let qp_num = self.last.fetch_add(1, Ordering::SeqCst) + 1;
        self.add_queue_pair(qp_num);
        self.connect_by(qp_num, to, service, data)
    }

    fn connect_by(&self, qp_num: u32, to: u8, service: u64, data: &[u8]) -> Result<u32, Errno> {
        let mut connect = CmConnect {
            local_gid: self.port.gid(),
            remote_gid: [to; 16],
            service: service.into(),
            event: EVENT.into(),
            qp_num: qp_num.into(),
            source_port: 40_000.into(),
            data_bytes: u16::try_from(data.len()).unwrap().into(),
            qp_type: if service == DATAGRAMS { 4 } else { 2 },
            responder_resources: 3,
            initiator_depth: 2,
            retry_count: 7,
            rnr_retry_count: 6,
            ack_timeout: 17,
            ..Default::default()
        };
        for (to, from) in connect.data.0.iter_mut().zip(data) {
            *to = *from;
        }
        self.call().cm_connect(connect).map(U32::get)
    }

    fn accept(&self, id: u32) -> Result<(), Errno> {
        self.accept_by(0x22, id)
    }

    fn accept_by(&self, qp_num: u32, id: u32) -> Result<(), Errno> {
        let mut accept = CmAccept {
            id: id.into(),
            qp_num: qp_num.into(),
            qkey: 0x0123_4567.into(),
            data_bytes: 3.into(),
            responder_resources: 2,
            initiator_depth: 3,
            ..Default::default()
        };
        accept.data.0[..3].copy_from_slice(b"yes");
        self.call().cm_accept(accept)
    }

    fn reject(&self, id: u32) -> Result<(), Errno> {
        self.call().cm_reject(CmReject {
            id: id.into(),
            ..Default::default()
        })
    }

    fn attributes(&self, id: u32, state: u8) -> Result<CmQpAttr, Errno> {
        self.call().cm_qp_attr(CmQpState {
            id: id.into(),
            state: u32::from(state).into(),
        })
    }

    fn destroy(&self, id: u32) -> Result<(), Errno> {
        self.call().cm_destroy(id.into()).map(drop)
    }

    /// What there is of its port: of the manager, ids that others know, and places that are bound.
    fn counts(&self) -> (farlane_rdma_cm::Counts, usize, usize) {
        self.context.connections.counts()
    }
}

use farlane_abi::zerocopy::little_endian::U32;

fn port(server: &Arc<Server>, gid: u8, config: PortConfig) -> Arc<Port> {
    let port = server.port_with([gid; 16], format!("vm {gid}"), config);
    port.unwrap()
}

/// A server, a program that connects, and one that listens.
fn two(config: PortConfig) -> (Arc<Server>, Program, Program) {
    let server = Server::without_workers();
    let [one, other] = [1, 2].map(|gid| port(&server, gid, config.clone()));
    let client = Program::start(&one, 1);
    let listener = Program::start(&other, 1);
    (server, client, listener)
}

/// Programs of two users of a port.
fn of_two_users(port: &Arc<Port>) -> [Program; 2] {
    users(port, 2..4).try_into().ok().unwrap()
}

/// A program of another user each, by the numbers of their contexts.
fn users(port: &Arc<Port>, contexts: std::ops::Range<u32>) -> Vec<Program> {
    let program = |number| {
        let events = Arc::<Counted>::default();
        let sink = Arc::clone(&events) as Arc<dyn EventSink>;
        let party = port.another_party();
        let number = ContextId::new(number).unwrap();
        let context = port.open_for(&party, number, sink, None);
        Program::of(port, context.unwrap(), events)
    };
    contexts.map(program).collect()
}

/// A connection of both, by their ids.
fn connected(client: &Program, server: &Program) -> (u32, u32) {
    connected_by(client, server, 0x22)
}

/// The same with this queue pair of the listener's.
fn connected_by(client: &Program, server: &Program, qp_num: u32) -> (u32, u32) {
    let id = client.connect(2, SERVICE, b"hello").unwrap();
    let request = server.expect(CM_CONNECT_REQUEST);
    server.accept_by(qp_num, request.id.get()).unwrap();
    client.expect(CM_CONNECT_RESPONSE);
    client.call().cm_establish(id.into()).unwrap();
    let established = server.expect(CM_ESTABLISHED);
    assert_eq!(established.id, request.id);
    assert_eq!(established.data_bytes.get(), 0);
    (id, request.id.get())
}

#[test]
fn two_programs_connect_and_know_each_others_queue_pairs() {
    let (_server, client, server) = two(PortConfig::default());
    let listener = server.listen(SERVICE);
    let id = client.connect(2, SERVICE, b"hello").unwrap();

    let request = server.expect(CM_CONNECT_REQUEST);
    assert_eq!(server.events.0.load(Ordering::SeqCst), 1);
    assert_eq!(request.listener.get(), listener);
    assert_eq!((request.local_gid, request.remote_gid), ([2; 16], [1; 16]));
    assert_eq!(
        (request.service.get(), request.source_port.get()),
        (SERVICE, 40_000)
    );
    assert_eq!((request.qp_num.get(), request.qp_type), (0x11, 2));
    assert_eq!(
        (request.responder_resources, request.initiator_depth),
        (2, 3)
    );
    assert_eq!((request.retry_count, request.rnr_retry_count), (7, 6));
    assert_eq!(request.data_bytes.get(), 56);
    assert!(request.data.0.starts_with(b"hello\0"));
    let theirs = request.id.get();
    assert_eq!(client.attributes(id, QPS_RTR).map(drop), Err(Errno::EINVAL));
    let receiving = server.attributes(theirs, QPS_RTR).unwrap();
    let sending = server.attributes(theirs, QPS_RTS).unwrap();
    server.accept(theirs).unwrap();
    assert_eq!(server.accept(theirs), Err(Errno::EINVAL));

    let reply = client.expect(CM_CONNECT_RESPONSE);
    assert_eq!((reply.id.get(), reply.qp_num.get()), (id, 0x22));
    assert!(reply.data.0.starts_with(b"yes\0"));
    let init = client.attributes(id, QPS_INIT).unwrap();
    assert_eq!(init.mask.get(), QP_TO_INIT);
    let back = client.attributes(id, QPS_RTR).unwrap();
    assert_eq!(back.mask.get(), QP_TO_RTR);
    assert_eq!(
        (back.attr.dest_qp_num.get(), back.attr.dgid),
        (0x22, [2; 16])
    );
    assert_eq!(
        (receiving.attr.dest_qp_num.get(), receiving.attr.dgid),
        (0x11, [1; 16])
    );
    let ready = client.attributes(id, QPS_RTS).unwrap();
    assert_eq!(ready.mask.get(), QP_TO_RTS);
    // Each receives from where the other begins to send.
    assert_eq!(ready.attr.sq_psn, receiving.attr.rq_psn);
    assert_eq!(back.attr.rq_psn, sending.attr.sq_psn);
    client.call().cm_establish(id.into()).unwrap();
    assert_eq!(server.expect(CM_ESTABLISHED).id.get(), theirs);

    client.call().cm_disconnect(id.into()).unwrap();
    assert_eq!(server.expect(CM_DISCONNECTED).id.get(), theirs);
    server.call().cm_disconnect(theirs.into()).unwrap();
    assert_eq!(client.expect(CM_DISCONNECTED).id.get(), id);
    // Each comes out of the time in which something may be under way.
    let later = Instant::now() + Duration::from_secs(100);
    for (program, id) in [(&client, id), (&server, theirs)] {
        program.turn(later);
        assert_eq!(program.expect(CM_TIMEWAIT_EXIT).id.get(), id);
        program.destroy(id).unwrap();
        assert_eq!(program.destroy(id), Err(Errno::EBADF));
    }
    server.destroy(listener).unwrap();
    for program in [&client, &server] {
        assert_eq!(program.counts(), Default::default());
    }
}

#[test]
fn a_service_of_datagrams_has_its_queue_pair_told() {
    let (_server, client, server) = two(PortConfig::default());
    server.listen(DATAGRAMS);
    let [id, other] = [(); 2].map(|()| client.connect(2, DATAGRAMS, &[7; 180]).unwrap());
    let too_long = client.connect(2, DATAGRAMS, &[7; 181]);
    assert_eq!(too_long, Err(Errno::EINVAL));
    let request = server.expect(CM_CONNECT_REQUEST);
    assert_eq!((request.qp_type, request.data_bytes.get()), (4, 180));
    server.accept(request.id.get()).unwrap();
    let reply = client.expect(CM_ESTABLISHED);
    assert_eq!(
        (reply.id.get(), reply.qp_num.get(), reply.qkey.get()),
        (id, 0x22, 0x0123_4567)
    );
    let request = server.expect(CM_CONNECT_REQUEST);
    server.reject(request.id.get()).unwrap();
    let reply = client.expect(CM_UNREACHABLE);
    assert_eq!((reply.id.get(), reply.status.get()), (other, 2));
}

#[test]
fn who_is_not_there_is_told_of_at_once() {
    let (_server, client, server) = two(PortConfig::default());
    assert_eq!(client.connect(3, SERVICE, b""), Err(Errno::EHOSTUNREACH));
    let id = client.connect(2, SERVICE, b"").unwrap();
    let rejected = client.expect(CM_REJECTED);
    // Nobody listens (IBTA table 109).
    assert_eq!((rejected.id.get(), rejected.status.get()), (id, 8));
    let listener = server.listen(SERVICE);
    let id = client.connect(2, SERVICE, b"").unwrap();
    client.turn(Instant::now());
    // One that nobody has taken goes with its listener, and so does its event.
    server.destroy(listener).unwrap();
    assert_eq!(server.next().map(drop), Err(Errno::EAGAIN));
    assert_eq!(client.expect(CM_REJECTED).id.get(), id);
    // The same of one that has a listener who rejects it, or ends.
    let listener = server.listen(SERVICE);
    for ends in [false, true] {
        let id = client.connect(2, SERVICE, b"").unwrap();
        let request = server.expect(CM_CONNECT_REQUEST);
        assert_eq!(request.listener.get(), listener);
        if ends {
            server.port.close(ContextId::new(1).unwrap()).unwrap();
        } else {
            server.reject(request.id.get()).unwrap();
        }
        let rejected = client.expect(CM_REJECTED);
        assert_eq!((rejected.id.get(), rejected.status.get()), (id, 28));
    }
    assert_eq!(server.counts().1, 0);
}

#[test]
fn ids_are_those_of_one_context() {
    let (_server, client, server) = two(PortConfig::default());
    let listener = server.listen(SERVICE);
    let (id, theirs) = connected(&client, &server);
    let beside = Program::start(&server.port, 2);
    for id in [listener, theirs, 0, u32::MAX] {
        assert_eq!(beside.destroy(id), Err(Errno::EBADF));
        assert_eq!(beside.accept(id), Err(Errno::EBADF));
        assert_eq!(beside.attributes(id, QPS_INIT).map(drop), Err(Errno::EBADF));
        assert_eq!(beside.call().cm_disconnect(id.into()), Err(Errno::EBADF));
    }
    assert_eq!(beside.next().map(drop), Err(Errno::EAGAIN));
    // A listener is no connection, and what is bound no listener twice.
    assert_eq!(server.accept(listener), Err(Errno::EINVAL));
    let again = CmListen {
        id: listener.into(),
        backlog: 1.into(),
    };
    assert_eq!(server.call().cm_listen(again), Err(Errno::EINVAL));
    // Nor does anybody connect from a GID that is not its port's.
    let forged = CmConnect {
        local_gid: [9; 16],
        remote_gid: [2; 16],
        service: SERVICE.into(),
        event: EVENT.into(),
        qp_type: 2,
        ..Default::default()
    };
    assert_eq!(client.call().cm_connect(forged), Err(Errno::EADDRNOTAVAIL));
    client.call().cm_disconnect(id.into()).unwrap();
    server.expect(CM_DISCONNECTED);
}

#[test]
fn an_operator_says_who_connects_to_whom() {
    let config = PortConfig {
        peers: Peers::Only(BTreeSet::from([[3; 16]])),
        ..Default::default()
    };
    let (server, client, listener) = two(config);
    listener.listen(SERVICE);
    assert_eq!(client.connect(2, SERVICE, b""), Err(Errno::EACCES));
    // Its own port is always one of them.
    client.listen(SERVICE);
    client.connect(1, SERVICE, b"").unwrap();
    client.expect(CM_CONNECT_REQUEST);
    // One that lets everybody connect is one that another does not let.
    let open = Program::start(&port(&server, 4, PortConfig::default()), 1);
    open.connect(2, SERVICE, b"").unwrap();
    assert_eq!(listener.next().map(drop), Err(Errno::EAGAIN));
}

#[test]
fn a_port_of_a_protocol_is_bound_once_or_by_those_who_share_it() {
    let (_server, _, program) = two(PortConfig::default());
    let bind = |gid: [u8; 16], service: u64, flags: u32| {
        program.call().cm_bind(CmBind {
            gid,
            service: service.into(),
            event: EVENT.into(),
            flags: flags.into(),
        })
    };
    let first = bind([0; 16], SERVICE, 0).unwrap();
    for gid in [[0; 16], [2; 16]] {
        assert_eq!(bind(gid, SERVICE, 0), Err(Errno::EADDRINUSE));
        assert_eq!(bind(gid, SERVICE, CM_BIND_REUSE), Err(Errno::EADDRINUSE));
    }
    bind([0; 16], DATAGRAMS, 0).unwrap();
    assert_eq!(bind([3; 16], SERVICE + 1, 0), Err(Errno::EADDRNOTAVAIL));
    program.destroy(first.id.get()).unwrap();
    let shared = [(); 2].map(|()| bind([2; 16], SERVICE, CM_BIND_REUSE).unwrap());
    let listen = |bound: &CmBound| {
        let backlog = 1.into();
        program.call().cm_listen(CmListen {
            id: bound.id,
            backlog,
        })
    };
    assert_eq!(listen(&shared[0]), Ok(()));
    assert_eq!(listen(&shared[1]), Err(Errno::EADDRINUSE));
    let mut chosen = BTreeSet::new();
    for _ in 0..100 {
        let bound = bind([0; 16], SERVICE & !0xffff, 0).unwrap();
        assert_eq!(bound.service.get() & !0xffff, SERVICE & !0xffff);
        assert!(bound.service.get() & 0xffff >= 32_768);
        chosen.insert(bound.service.get());
    }
    assert_eq!(chosen.len(), 100);
}

#[test]
fn events_go_where_their_id_goes() {
    let (_server, client, server) = two(PortConfig::default());
    let listener = server.listen(SERVICE);
    let ids = [(); 3].map(|()| client.connect(2, SERVICE, b"").unwrap());
    client.turn(Instant::now());
    let migrate = CmMigrate {
        id: listener.into(),
        event: (EVENT + 1).into(),
    };
    assert_eq!(server.call().cm_migrate(migrate), Ok(3.into()));
    assert_eq!(server.events.0.load(Ordering::SeqCst), 6);
    assert_eq!(server.next().map(drop), Err(Errno::EAGAIN));
    for _ in ids {
        let event = server.call().cm_next_event((EVENT + 1).into()).unwrap();
        assert_eq!(event.kind.get(), CM_CONNECT_REQUEST);
    }
    let nowhere = CmMigrate {
        id: listener.into(),
        event: 0.into(),
    };
    assert_eq!(server.call().cm_migrate(nowhere), Err(Errno::EINVAL));
    // Those that nobody takes go with their ids, and whoever destroys these is told how many.
    for _ in 0..2 {
        client.connect(2, SERVICE, b"").unwrap();
    }
    client.turn(Instant::now());
    assert_eq!(server.call().cm_destroy(listener.into()), Ok(2.into()));
    client.turn(Instant::now());
    let events = ids.map(|id| client.call().cm_destroy(id.into()).unwrap().get());
    assert_eq!(events, [0; 3]);
}

#[test]
fn what_is_made_and_dropped_leaves_nothing() {
    let (_server, client, server) = two(PortConfig::default());
    let listener = server.listen(SERVICE);
    let mut orphans = 0;
    for round in 0..10_000 {
        let (id, theirs) = connected(&client, &server);
        // Either end, or both at once.
        if round % 3 != 1 {
            client.destroy(id).unwrap();
        }
        if round % 3 != 2 {
            server.destroy(theirs).unwrap();
        }
        client.turn(Instant::now());
        for (program, id) in [(&client, id), (&server, theirs)] {
            if let Ok(event) = program.next() {
                assert_eq!(event.kind.get(), CM_DISCONNECTED);
                program.destroy(id).unwrap();
            }
        }
        for program in [&client, &server] {
            let (counts, ids, _) = program.counts();
            orphans = orphans.max(counts.orphans);
            assert!(counts.connections == 0 && ids <= 1, "{round}: {counts:?}");
        }
    }
    // And the last one, whose end is being answered.
    assert!(orphans <= 4096 + 1, "{orphans}");
    server.destroy(listener).unwrap();
    client.turn(Instant::now() + Duration::from_secs(200));
    for program in [&client, &server] {
        assert_eq!(program.counts(), Default::default());
    }
}

#[test]
fn a_program_has_so_many_ids_and_its_tenant_what_an_operator_says() {
    let (_server, client, _) = two(PortConfig::default());
    let mut count = 0;
    let protocols = [SERVICE, DATAGRAMS].map(|service| service & !0xffff);
    while client.bind(protocols[count % 2]).is_ok() {
        count += 1;
    }
    assert_eq!(count, MAX_IDS);
    let config = PortConfig {
        limits: Limits::default().with(Resource::ConnectionIds, Some(3)),
        ..Default::default()
    };
    let (_server, client, server) = two(config);
    server.listen(SERVICE);
    let ids = [(); 3].map(|()| client.connect(2, SERVICE, b"").unwrap());
    assert_eq!(client.connect(2, SERVICE, b""), Err(Errno::ENOMEM));
    // The listener is one of its three: a third request has no room, and is asked again.
    let requests = [(); 2].map(|()| server.expect(CM_CONNECT_REQUEST).id.get());
    assert_eq!(server.next().map(drop), Err(Errno::EAGAIN));
    assert_eq!(client.next().map(drop), Err(Errno::EAGAIN));
    server.reject(requests[0]).unwrap();
    server.destroy(requests[0]).unwrap();
    assert_eq!(client.expect(CM_REJECTED).id.get(), ids[0]);
    client.turn(Instant::now() + Duration::from_secs(10));
    server.expect(CM_CONNECT_REQUEST);
}

#[test]
fn a_port_that_is_paused_does_not_answer_and_goes_on() {
    let (_server, client, server) = two(PortConfig::default());
    server.listen(SERVICE);
    server.port.pause();
    let id = client.connect(2, SERVICE, b"").unwrap();
    client.turn(Instant::now());
    server.port.resume();
    assert_eq!(server.next().map(drop), Err(Errno::EAGAIN));
    // It is asked again.
    client.turn(Instant::now() + Duration::from_secs(10));
    let request = server.expect(CM_CONNECT_REQUEST);
    server.accept(request.id.get()).unwrap();
    assert_eq!(client.expect(CM_CONNECT_RESPONSE).id.get(), id);
}

#[test]
fn timers_end_some_at_a_time() {
    let (_server, client, server) = two(PortConfig::default());
    server.port.pause();
    for _ in 0..1000 {
        client.connect(2, SERVICE, b"").unwrap();
    }
    client.turn(Instant::now());
    let later = Instant::now() + Duration::from_secs(10);
    let connections = &client.context.connections;
    connections.advance(later);
    let (again, _) = connections.take_messages(usize::MAX);
    assert!((1..=64).contains(&again.len()), "{}", again.len());
    // The others come by themselves.
    client.turn(later);
    let waits = |program: &Program| program.counts().0.timers;
    assert_eq!((waits(&client), waits(&server)), (1000, 0));
    connections.advance(later);
    assert!(connections.take_messages(usize::MAX).0.is_empty());
}
