//! Semantics of a reliable connection in the software engine (IBTA chapters 9 to 11), driven
//! directly, with time that the test makes.

#![allow(clippy::unwrap_used)]

use farlane_abi::queue::*;
use farlane_abi::rdma::{self, *};
use farlane_rdma_remoting::counters::Live;
use farlane_rdma_remoting::engine::soft::SoftEngine;
use farlane_rdma_remoting::engine::{Engine, EngineQp, Progress, QpSpec};
use farlane_rdma_remoting::local::{LocalCompletionQueue, LocalQueue};
use farlane_rdma_remoting::memory::{Access, MemoryRegion, MemoryTable};
use farlane_rdma_remoting::request::{Element, Opcode, RecvRequest, SendRequest};
use farlane_zero_copy::{Pool, Region, copy_from_slice, copy_to_slice};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const IOVA: u64 = 0x7000_0000;
const BYTES: u64 = 4 << 20;

struct End {
    qp: Arc<dyn EngineQp>,
    sends: LocalQueue<SendRequest>,
    recvs: LocalQueue<RecvRequest>,
    cq: Arc<LocalCompletionQueue>,
    table: Arc<MemoryTable>,
    region: Region,
    key: u32,
    events: Arc<Mutex<Vec<u32>>>,
}

impl Drop for End {
    /// As whoever makes a queue pair does: the two of a connection know each other until then.
    fn drop(&mut self) {
        self.qp.destroy();
    }
}

struct Pair {
    a: End,
    b: End,
    now: Instant,
}

#[derive(Clone, Copy)]
struct Setup {
    access: u32,
    qp_access: u32,
    rnr_retry: u8,
    timeout: u8,
    retry_cnt: u8,
    cq_entries: u32,
    psn: [u32; 2],
}

const ALL: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
const NORMAL: Setup = Setup {
    access: ALL,
    qp_access: ALL,
    rnr_retry: 7,
    timeout: 14,
    retry_cnt: 2,
    cq_entries: 4096,
    psn: [100, 200],
};

fn end(engine: &SoftEngine, gid: u8, setup: &Setup) -> End {
    end_with(
        engine,
        gid,
        setup,
        LocalCompletionQueue::new(setup.cq_entries),
    )
}

fn end_with(engine: &SoftEngine, gid: u8, setup: &Setup, cq: Arc<LocalCompletionQueue>) -> End {
    let buffer = Pool::separate_files(BYTES).allocate(BYTES).unwrap();
    let region = Region::from_buffer(&buffer);
    let table = Arc::new(MemoryTable::new(16));
    let key = table
        .insert(MemoryRegion {
            pd: 1,
            iova: IOVA,
            offset: 0,
            length: BYTES,
            access: Access::from_wire(setup.access).unwrap(),
            region: region.clone(),
            owner: None,
        })
        .unwrap();
    let (sends, recvs) = (LocalQueue::default(), LocalQueue::default());
    let events = Arc::new(Mutex::new(Vec::new()));
    let qp = engine
        .create_qp(QpSpec {
            kind: QPT_RC,
            pd: 1,
            gid: [gid; 16],
            memory: Arc::clone(&table),
            sends: Box::new(LocalQueue::clone(&sends)),
            recvs: Box::new(LocalQueue::clone(&recvs)),
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            signal_all: false,
            events: {
                let events = Arc::clone(&events);
                Box::new(move |kind| events.lock().unwrap().push(kind))
            },
            counters: Arc::new(Live::default()),
            limit: Arc::default(),
        })
        .unwrap();
    End {
        qp,
        sends,
        recvs,
        cq,
        table,
        region,
        key,
        events,
    }
}

const INIT_MASK: u32 = rdma::QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS;
const RTR_MASK: u32 = rdma::QP_STATE
    | QP_AV
    | QP_PATH_MTU
    | QP_DEST_QPN
    | QP_RQ_PSN
    | QP_MAX_DEST_RD_ATOMIC
    | QP_MIN_RNR_TIMER;

fn init(setup: &Setup) -> QpAttr {
    QpAttr {
        qp_state: QPS_INIT,
        port_num: 1,
        qp_access_flags: setup.qp_access.into(),
        ..Default::default()
    }
}

fn receive_from(peer: &End, gid: u8, psn: u32) -> QpAttr {
    QpAttr {
        qp_state: QPS_RTR,
        path_mtu: 3,
        dest_qp_num: peer.qp.number().into(),
        rq_psn: psn.into(),
        max_dest_rd_atomic: 1,
        min_rnr_timer: 12,
        is_global: 1,
        dgid: [gid; 16],
        ah_port: 1,
        ..Default::default()
    }
}

fn connect(end: &End, to: &End, gid: u8, psn: [u32; 2], setup: &Setup) {
    end.qp.modify(INIT_MASK, &init(setup)).unwrap();
    end.qp
        .modify(RTR_MASK, &receive_from(to, gid, psn[1]))
        .unwrap();
    let attr = QpAttr {
        qp_state: QPS_RTS,
        timeout: setup.timeout,
        retry_cnt: setup.retry_cnt,
        rnr_retry: setup.rnr_retry,
        sq_psn: psn[0].into(),
        max_rd_atomic: 1,
        ..Default::default()
    };
    let mask =
        rdma::QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC;
    end.qp.modify(mask, &attr).unwrap();
}

fn pair(setup: Setup) -> Pair {
    let engine = SoftEngine::new();
    let (a, b) = (end(&engine, 1, &setup), end(&engine, 2, &setup));
    let [pa, pb] = setup.psn;
    connect(&a, &b, 2, [pa, 200], &setup);
    connect(&b, &a, 1, [pb, 100], &setup);
    Pair {
        a,
        b,
        now: Instant::now(),
    }
}

impl Pair {
    /// Turns of both ends until neither has anything to do.
    fn run(&mut self) {
        for _ in 0..10_000 {
            let worked = self.a.qp.progress(self.now).worked | self.b.qp.progress(self.now).worked;
            if !worked {
                return;
            }
        }
        panic!("the engine does not come to rest");
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.run();
    }
}

impl End {
    fn element(&self, offset: u64, length: u32) -> Element {
        Element {
            address: IOVA + offset,
            length,
            lkey: self.key,
        }
    }

    fn request(&self, opcode: Opcode, wr_id: u64, elements: &[Element]) -> SendRequest {
        let mut request = SendRequest::default();
        (request.wr_id, request.opcode, request.signalled) = (wr_id, opcode, true);
        request.elements.set(elements).unwrap();
        request
    }

    fn post_recv(&self, wr_id: u64, elements: &[Element]) {
        let mut request = RecvRequest {
            wr_id,
            ..Default::default()
        };
        request.elements.set(elements).unwrap();
        self.recvs.post(request);
    }

    /// (wr_id, status) of the next completion.
    fn next(&self) -> Option<(u64, u8)> {
        self.cq.poll().map(|c| (c.wr_id.get(), c.status))
    }

    fn state(&self) -> u8 {
        self.qp.query().qp_state
    }

    fn fill(&self, seed: u64) -> Vec<u8> {
        let bytes: Vec<u8> = (0..BYTES)
            .map(|i| u8::try_from((i * 31 + i / 251 + seed) % 256).unwrap())
            .collect();
        copy_from_slice(&self.region, 0, &bytes).unwrap();
        bytes
    }

    fn contents(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        copy_to_slice(&self.region, offset, &mut bytes).unwrap();
        bytes
    }
}

fn remote(mut request: SendRequest, to: &End, offset: u64) -> SendRequest {
    request.remote_address = IOVA + offset;
    request.rkey = to.key;
    request
}

#[test]
fn a_write_longer_than_a_turn_arrives_whole() {
    let mut p = pair(NORMAL);
    let bytes = p.a.fill(1);
    let length = 3 * (1 << 20) + 17;
    let request = p.a.request(Opcode::Write, 9, &[p.a.element(5, length)]);
    p.a.sends.post(remote(request, &p.b, 11));
    p.run();
    assert_eq!(p.a.next(), Some((9, WC_STATUS_SUCCESS)));
    let length = length as usize;
    assert!(p.b.contents(11, length) == bytes[5..5 + length]);
    assert_eq!(p.b.contents(0, 11), [0; 11]);
    assert_eq!(p.b.contents(11 + length as u64, 8), [0; 8]);
    assert_eq!(p.b.next(), None, "a plain write is not seen by the peer");
}

#[test]
fn a_read_brings_the_peers_bytes() {
    let mut p = pair(NORMAL);
    let bytes = p.b.fill(2);
    let elements = [
        p.a.element(0, 100),
        p.a.element(1000, 0),
        p.a.element(500, 300),
    ];
    let request = p.a.request(Opcode::Read, 1, &elements);
    p.a.sends.post(remote(request, &p.b, 64));
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    assert!(p.a.contents(0, 100) == bytes[64..164]);
    assert!(p.a.contents(500, 300) == bytes[164..464]);
}

#[test]
fn a_send_fills_the_receive_request_and_says_so() {
    let mut p = pair(NORMAL);
    let bytes = p.a.fill(3);
    p.b.post_recv(70, &[p.b.element(0, 10), p.b.element(100, 1000)]);
    let mut request = p.a.request(Opcode::SendImm, 8, &[p.a.element(0, 300)]);
    request.immediate = 0xdead_beef;
    p.a.sends.post(request);
    p.run();
    let c = p.b.cq.poll().unwrap();
    assert_eq!((c.wr_id.get(), c.status, c.opcode), (70, 0, WC_OPCODE_RECV));
    assert_eq!((c.byte_len.get(), c.imm.get()), (300, 0xdead_beef));
    assert_eq!(c.flags.get(), WC_FLAG_IMM);
    assert_eq!(
        (c.qp_num.get(), c.src_qp.get()),
        (p.b.qp.number(), p.a.qp.number())
    );
    assert!(p.b.contents(0, 10) == bytes[..10] && p.b.contents(100, 290) == bytes[10..300]);
    assert_eq!(p.a.next(), Some((8, WC_STATUS_SUCCESS)));
}

/// So the completion of a request is there before any answer to it.
#[test]
fn a_sender_is_told_before_its_receiver() {
    let engine = SoftEngine::new();
    let cq = LocalCompletionQueue::new(8);
    let [a, b] = [1, 2].map(|gid| end_with(&engine, gid, &NORMAL, Arc::clone(&cq)));
    connect(&a, &b, 2, [100, 200], &NORMAL);
    connect(&b, &a, 1, [200, 100], &NORMAL);
    b.post_recv(1, &[b.element(0, 4)]);
    a.sends.post(a.request(Opcode::Send, 2, &[a.element(0, 4)]));
    a.qp.progress(Instant::now());
    let opcodes = std::iter::from_fn(|| cq.poll()).map(|completion| completion.opcode);
    assert_eq!(
        opcodes.collect::<Vec<_>>(),
        [WC_OPCODE_SEND, WC_OPCODE_RECV]
    );
}

#[test]
fn a_write_with_immediate_consumes_a_receive_request() {
    let mut p = pair(NORMAL);
    let bytes = p.a.fill(4);
    let mut request = p.a.request(Opcode::WriteImm, 1, &[p.a.element(0, 64)]);
    request.immediate = 5;
    p.a.sends.post(remote(request, &p.b, 0));
    p.run();
    assert_eq!(p.a.next(), None, "no receive request yet");
    p.b.post_recv(2, &[]);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    let c = p.b.cq.poll().unwrap();
    assert_eq!(
        (c.opcode, c.byte_len.get(), c.imm.get()),
        (WC_OPCODE_RECV_RDMA_WITH_IMM, 64, 5)
    );
    assert!(p.b.contents(0, 64) == bytes[..64]);
}

#[test]
fn inline_data_needs_no_memory_and_unsignalled_requests_are_silent() {
    let mut p = pair(NORMAL);
    let mut request = p.a.request(Opcode::Write, 1, &[]);
    request.signalled = false;
    request.set_inline(b"inline!").unwrap();
    p.a.sends.post(remote(request, &p.b, 3));
    p.run();
    assert_eq!(p.b.contents(3, 7), b"inline!");
    assert_eq!(p.a.next(), None);
}

#[test]
fn without_receive_requests_a_sender_waits_and_then_gives_up() {
    let mut p = pair(Setup {
        rnr_retry: 2,
        ..NORMAL
    });
    p.a.sends
        .post(p.a.request(Opcode::Send, 1, &[p.a.element(0, 4)]));
    p.run();
    let first = p.a.qp.progress(p.now).deadline.unwrap() - p.now;
    assert_eq!(
        first,
        Duration::from_micros(640),
        "the peer's timer, index 12"
    );
    p.pass(Duration::from_micros(641));
    assert_eq!(p.a.next(), None);
    // The second retry is the last one: there is nothing to wait for after it.
    p.pass(Duration::from_micros(641));
    assert_eq!(p.a.next(), Some((1, WC_STATUS_RNR_RETRY_EXC_ERR)));
    assert_eq!(p.a.state(), QPS_ERR);
    assert_eq!(p.b.state(), QPS_RTS, "the receiver has done nothing wrong");
}

#[test]
fn without_retries_a_sender_gives_up_at_once() {
    let mut p = pair(Setup {
        rnr_retry: 0,
        ..NORMAL
    });
    p.a.sends
        .post(p.a.request(Opcode::Send, 1, &[p.a.element(0, 4)]));
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_RNR_RETRY_EXC_ERR)));
}

#[test]
fn a_receiver_is_told_of_the_first_message_before_it_is_ready_to_send() {
    let engine = SoftEngine::new();
    let (a, b) = (end(&engine, 1, &NORMAL), end(&engine, 2, &NORMAL));
    connect(&a, &b, 2, [100, 200], &NORMAL);
    b.qp.modify(INIT_MASK, &init(&NORMAL)).unwrap();
    b.qp.modify(RTR_MASK, &receive_from(&a, 1, 100)).unwrap();
    for wr_id in [1, 2] {
        b.post_recv(wr_id, &[b.element(0, 4)]);
        a.sends
            .post(a.request(Opcode::Send, wr_id, &[a.element(0, 4)]));
    }
    a.qp.progress(Instant::now());
    assert_eq!([a.next(), a.next()], [Some((1, 0)), Some((2, 0))]);
    assert_eq!(*b.events.lock().unwrap(), [EVENT_COMM_EST]);
}

#[test]
fn rnr_retry_seven_is_for_ever_and_a_receive_request_ends_it_at_once() {
    let mut p = pair(NORMAL);
    p.a.sends
        .post(p.a.request(Opcode::Send, 1, &[p.a.element(0, 4)]));
    p.pass(Duration::from_secs(3600));
    assert_eq!(p.a.next(), None);
    assert!(!p.a.qp.is_ready());
    p.b.post_recv(2, &[p.b.element(0, 4)]);
    assert!(p.a.qp.is_ready());
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
}

#[test]
fn a_peer_that_is_gone_exhausts_the_retries_and_the_rest_is_flushed() {
    let mut p = pair(NORMAL);
    p.b.qp.destroy();
    for wr_id in 1..=3 {
        p.a.sends
            .post(p.a.request(Opcode::Send, wr_id, &[p.a.element(0, 4)]));
    }
    p.a.post_recv(10, &[]);
    p.run();
    for _ in 0..2 {
        p.pass(Duration::from_millis(68));
        assert_eq!(p.a.next(), None);
    }
    p.pass(Duration::from_millis(68));
    assert_eq!(p.a.next(), Some((1, WC_STATUS_RETRY_EXC_ERR)));
    assert_eq!(p.a.next(), Some((2, WC_STATUS_WR_FLUSH_ERR)));
    assert_eq!(p.a.next(), Some((3, WC_STATUS_WR_FLUSH_ERR)));
    assert_eq!(p.a.next(), Some((10, WC_STATUS_WR_FLUSH_ERR)));
    p.a.post_recv(11, &[]);
    p.run();
    assert_eq!(
        p.a.next(),
        Some((11, WC_STATUS_WR_FLUSH_ERR)),
        "also what is posted later"
    );
}

#[test]
fn packets_out_of_sequence_are_not_answered() {
    let mut p = pair(Setup {
        psn: [101, 200],
        ..NORMAL
    });
    p.a.sends
        .post(p.a.request(Opcode::Send, 1, &[p.a.element(0, 4)]));
    p.b.post_recv(2, &[p.b.element(0, 4)]);
    p.run();
    for _ in 0..3 {
        p.pass(Duration::from_millis(68));
    }
    assert_eq!(p.a.next(), Some((1, WC_STATUS_RETRY_EXC_ERR)));
    assert_eq!(p.b.next(), None);
}

/// A worker sleeps only when no queue pair of its is ready.
#[test]
fn a_sequence_that_never_matches_lets_the_worker_sleep() {
    let mut p = pair(Setup {
        psn: [101, 200],
        timeout: 0,
        ..NORMAL
    });
    p.a.sends
        .post(p.a.request(Opcode::Send, 1, &[p.a.element(0, 4)]));
    p.pass(Duration::from_secs(3600));
    assert!(!p.a.qp.is_ready());
}

#[test]
fn a_message_too_long_for_its_receive_request_breaks_the_connection() {
    let mut p = pair(NORMAL);
    p.b.post_recv(7, &[p.b.element(0, 9)]);
    p.b.post_recv(8, &[p.b.element(0, 9)]);
    p.a.sends
        .post(p.a.request(Opcode::Send, 1, &[p.a.element(0, 10)]));
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_REM_INV_REQ_ERR)));
    assert_eq!(p.b.next(), Some((7, WC_STATUS_LOC_LEN_ERR)));
    assert_eq!(p.b.next(), Some((8, WC_STATUS_WR_FLUSH_ERR)));
    assert_eq!((p.a.state(), p.b.state()), (QPS_ERR, QPS_ERR));
    assert_eq!(*p.b.events.lock().unwrap(), [EVENT_QP_REQ_ERR]);
}

/// What forging a key, an address or a right gets, and that no byte moves.
#[test]
fn every_key_is_checked() {
    type Forge = fn(&mut SendRequest, &End);
    let forgeries: [(&str, Setup, Opcode, Forge, u8); 9] = [
        (
            "unknown rkey",
            NORMAL,
            Opcode::Write,
            |r, _| r.rkey ^= 0x40,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "before",
            NORMAL,
            Opcode::Write,
            |r, _| r.remote_address = IOVA - 1,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "beyond",
            NORMAL,
            Opcode::Read,
            |r, _| r.remote_address = IOVA + BYTES - 7,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "wraps",
            NORMAL,
            Opcode::Write,
            |r, _| r.remote_address = u64::MAX - 3,
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "no right to write",
            Setup {
                access: ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ,
                ..NORMAL
            },
            Opcode::Write,
            |_, _| (),
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "no right to read",
            Setup {
                access: ACCESS_LOCAL_WRITE,
                ..NORMAL
            },
            Opcode::Read,
            |_, _| (),
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "queue pair without rights",
            Setup {
                qp_access: 0,
                ..NORMAL
            },
            Opcode::Write,
            |_, _| (),
            WC_STATUS_REM_ACCESS_ERR,
        ),
        (
            "unknown lkey",
            NORMAL,
            Opcode::Write,
            |r, _| {
                r.elements
                    .set(&[Element {
                        address: IOVA,
                        length: 8,
                        lkey: 0,
                    }])
                    .unwrap()
            },
            WC_STATUS_LOC_PROT_ERR,
        ),
        (
            "read into read-only memory",
            Setup {
                access: 0,
                ..NORMAL
            },
            Opcode::Read,
            |_, _| (),
            WC_STATUS_LOC_PROT_ERR,
        ),
    ];
    for (what, setup, opcode, forge, status) in forgeries {
        let mut p = pair(setup);
        p.a.fill(5);
        let before = p.b.contents(0, 64);
        let request = p.a.request(opcode, 3, &[p.a.element(0, 8)]);
        let mut request = remote(request, &p.b, 0);
        forge(&mut request, &p.b);
        p.a.sends.post(request);
        p.run();
        assert_eq!(p.a.next(), Some((3, status)), "{what}");
        assert_eq!(p.a.state(), QPS_ERR, "{what}");
        let remote_fault = status == WC_STATUS_REM_ACCESS_ERR;
        assert_eq!(p.b.state() == QPS_ERR, remote_fault, "{what}");
        assert_eq!(p.b.contents(0, 64), before, "{what}");
    }
}

#[test]
fn memory_revoked_in_flight_is_an_error_and_is_not_touched_again() {
    let mut p = pair(NORMAL);
    p.a.fill(6);
    let request = p.a.request(Opcode::Write, 1, &[p.a.element(0, 3 << 20)]);
    p.a.sends.post(remote(request, &p.b, 0));
    assert!(p.a.qp.progress(p.now).worked, "the first turn moves a part");
    p.b.region.revoke();
    p.b.table.remove(p.b.key).unwrap();
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_REM_ACCESS_ERR)));
}

/// What a request in progress has opened is not what its owner has since given back, and somebody else may have: the window of a pool
/// stays mapped.
#[test]
fn a_key_that_is_gone_ends_what_uses_it() {
    // A sender that waits for a receive request.
    let mut p = pair(NORMAL);
    p.a.fill(1);
    p.a.sends
        .post(p.a.request(Opcode::Send, 1, &[p.a.element(0, 64)]));
    p.run();
    assert_eq!(p.a.next(), None, "no receive request yet");
    p.a.table.remove(p.a.key).unwrap();
    p.b.post_recv(2, &[p.b.element(0, 64)]);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_LOC_PROT_ERR)));
    assert_eq!(p.b.contents(0, 64), [0; 64]);

    // A reader whose peer is not there yet.
    let engine = SoftEngine::new();
    let (a, b) = (end(&engine, 1, &NORMAL), end(&engine, 2, &NORMAL));
    connect(&a, &b, 2, [100, 200], &NORMAL);
    let mut p = Pair {
        a,
        b,
        now: Instant::now(),
    };
    p.b.fill(2);
    let read = p.a.request(Opcode::Read, 3, &[p.a.element(0, 64)]);
    p.a.sends.post(remote(read, &p.b, 0));
    p.run();
    p.a.table.remove(p.a.key).unwrap();
    connect(&p.b, &p.a, 1, [200, 100], &NORMAL);
    p.pass(Duration::from_millis(100));
    assert_eq!(p.a.next(), Some((3, WC_STATUS_LOC_PROT_ERR)));
    assert_eq!(p.a.contents(0, 64), [0; 64]);

    // A receiver in the middle of a message.
    let mut p = pair(NORMAL);
    p.a.fill(3);
    p.b.post_recv(4, &[p.b.element(0, 4 << 20)]);
    p.a.sends
        .post(p.a.request(Opcode::Send, 5, &[p.a.element(0, 4 << 20)]));
    assert!(p.a.qp.progress(p.now).worked);
    let so_far = p.b.contents(0, 4 << 20);
    assert_eq!(so_far.last(), Some(&0), "it has arrived whole in one turn");
    p.b.table.remove(p.b.key).unwrap();
    p.run();
    assert!(p.b.contents(0, 4 << 20) == so_far);
    assert_eq!(p.b.next(), Some((4, WC_STATUS_LOC_PROT_ERR)));
}

/// Where two threads give the two ends their turns: whoever finds what the other end waits for has it woken, once.
#[test]
fn who_waits_for_what_another_thread_finds_is_woken() {
    let wakes = Arc::new(AtomicUsize::new(0));
    let engine = SoftEngine::new();
    engine.set_waker({
        let wakes = Arc::clone(&wakes);
        Box::new(move || {
            wakes.fetch_add(1, Ordering::SeqCst);
        })
    });
    let woken = || wakes.swap(0, Ordering::SeqCst) > 0;
    // There is no time-out, and receivers are waited for for ever.
    let setup = Setup {
        timeout: 0,
        ..NORMAL
    };
    let (a, b) = (end(&engine, 1, &setup), end(&engine, 2, &setup));
    let now = Instant::now();
    connect(&a, &b, 2, [100, 200], &setup);
    a.sends.post(a.request(Opcode::Send, 1, &[a.element(0, 8)]));
    a.qp.progress(now);
    assert_eq!(a.qp.progress(now), Progress::default(), "it waits");
    assert!(!a.qp.is_ready());
    woken();

    // The peer comes to answer.
    connect(&b, &a, 1, [200, 100], &setup);
    assert!(woken());
    a.qp.progress(now);
    assert_eq!(a.qp.progress(now), Progress::default(), "it waits again");
    b.qp.progress(now);
    assert!(!woken() && !b.qp.is_ready(), "nothing has been posted");

    // It posts a receive request, which its own thread finds.
    b.post_recv(2, &[b.element(0, 8)]);
    assert!(b.qp.is_ready(), "its thread sleeps without telling");
    b.qp.progress(now);
    assert!(woken());
    b.qp.progress(now);
    assert!(!woken(), "told twice");
    a.qp.progress(now);
    assert_eq!(a.next(), Some((1, WC_STATUS_SUCCESS)));

    // The receiver's end is one, too, and the flush of its requests is its own thread's.
    a.sends.post(a.request(Opcode::Send, 3, &[a.element(0, 8)]));
    a.qp.progress(now);
    b.post_recv(4, &[b.element(0, 4)]);
    b.qp.progress(now);
    woken();
    a.qp.progress(now);
    assert!(woken(), "the receive request is too short");
    assert!(b.qp.is_ready() || b.next().is_some());
    b.qp.destroy();
    assert!(!a.qp.is_ready() || a.next().is_some());
}

#[test]
fn an_overrun_completion_queue_ends_the_queue_pair() {
    let mut p = pair(Setup {
        cq_entries: 1,
        ..NORMAL
    });
    for wr_id in 0..3 {
        let request = p.a.request(Opcode::Write, wr_id, &[]);
        p.a.sends.post(remote(request, &p.b, 0));
    }
    p.run();
    assert_eq!(p.a.next(), Some((0, WC_STATUS_SUCCESS)));
    assert_eq!(p.a.state(), QPS_ERR);
    assert_eq!(*p.a.events.lock().unwrap(), [EVENT_QP_FATAL]);
}

#[test]
fn reset_forgets_and_the_pair_connects_anew() {
    let mut p = pair(NORMAL);
    p.b.post_recv(1, &[p.b.element(0, 4)]);
    for end in [&p.a, &p.b] {
        let attr = QpAttr {
            qp_state: QPS_RESET,
            ..Default::default()
        };
        end.qp.modify(rdma::QP_STATE, &attr).unwrap();
        assert!(end.sends.is_empty() && end.recvs.is_empty());
    }
    connect(&p.a, &p.b, 2, [100, 200], &NORMAL);
    connect(&p.b, &p.a, 1, [200, 100], &NORMAL);
    p.b.post_recv(2, &[p.b.element(0, 4)]);
    p.a.sends
        .post(p.a.request(Opcode::Send, 3, &[p.a.element(0, 4)]));
    p.run();
    assert_eq!(p.b.next(), Some((2, WC_STATUS_SUCCESS)));
    assert_eq!(p.a.next(), Some((3, WC_STATUS_SUCCESS)));
}

#[test]
fn a_draining_send_queue_says_when_it_is_empty() {
    let mut p = pair(NORMAL);
    p.a.sends
        .post(p.a.request(Opcode::Send, 1, &[p.a.element(0, 4)]));
    p.run();
    let attr = QpAttr {
        qp_state: QPS_SQD,
        en_sqd_async_notify: 1,
        ..Default::default()
    };
    p.a.qp
        .modify(rdma::QP_STATE | QP_EN_SQD_ASYNC_NOTIFY, &attr)
        .unwrap();
    p.a.sends
        .post(p.a.request(Opcode::Send, 2, &[p.a.element(0, 4)]));
    p.run();
    assert_eq!(p.a.qp.query().sq_draining, 1);
    p.b.post_recv(5, &[p.b.element(0, 4)]);
    p.b.post_recv(6, &[p.b.element(0, 4)]);
    p.run();
    assert_eq!(p.a.next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(*p.a.events.lock().unwrap(), [EVENT_SQ_DRAINED]);
    assert_eq!(p.a.next(), None, "nothing new is begun");
    assert!(!p.a.qp.is_ready(), "and nobody polls for it");
    let attr = QpAttr {
        qp_state: QPS_RTS,
        ..Default::default()
    };
    p.a.qp.modify(rdma::QP_STATE, &attr).unwrap();
    p.run();
    assert_eq!(p.a.next(), Some((2, WC_STATUS_SUCCESS)));
}

#[test]
fn a_peer_that_connects_anew_in_the_middle_of_a_message_does_not_get_its_rest() {
    let mut p = pair(NORMAL);
    p.b.post_recv(7, &[p.b.element(0, 3 << 20)]);
    p.a.sends
        .post(p.a.request(Opcode::Send, 1, &[p.a.element(0, 3 << 20)]));
    assert!(p.a.qp.progress(p.now).worked, "the first turn moves a part");
    let attr = QpAttr {
        qp_state: QPS_RESET,
        ..Default::default()
    };
    p.b.qp.modify(rdma::QP_STATE, &attr).unwrap();
    connect(&p.b, &p.a, 1, [200, 100], &NORMAL);
    p.b.post_recv(8, &[p.b.element(0, 3 << 20)]);
    p.run();
    for _ in 0..3 {
        p.pass(Duration::from_millis(68));
    }
    assert_eq!(p.a.next(), Some((1, WC_STATUS_RETRY_EXC_ERR)));
    assert_eq!(p.b.next(), None);
}

#[test]
fn a_destroyed_queue_pair_is_released_though_its_peer_goes_on() {
    let mut p = pair(NORMAL);
    let request = p.a.request(Opcode::Write, 1, &[p.a.element(0, 4)]);
    p.a.sends.post(remote(request, &p.b, 0));
    p.run();
    let table = Arc::clone(&p.b.table);
    // This destroys its queue pair.
    drop(p.b);
    assert_eq!(Arc::strong_count(&table), 1);
    assert_eq!(p.a.state(), QPS_RTS);
}
