//! An engine that completes by itself, and tells a worker that sleeps.

mod hardware;

use crate::context::Context;
use crate::counters::Counters;
use crate::engine::{EventSource, QpDepths};
use crate::ledger::Ledger;
use crate::server::ServerConfig;
use crate::testing::{Header, memory, open, port, region};
use crate::verbs::CallHost;
use crate::worker::Worker;
use crate::{Port, Server};
use farlane_abi::PAGE_BYTES;
use farlane_abi::queue::{
    CQ_OFF_ENTRIES, CQ_OFF_PRODUCED, Completion, OP_SEND, QP_OFF_ENTRIES, QP_OFF_RECV_PRODUCED,
    QP_OFF_SEND_PRODUCED, QpLayout, RecvEntry, SEND_SIGNALED, SEND_TAIL, SendEntry, SendTail,
    WC_OPCODE_RECV, WC_OPCODE_SEND,
};
use farlane_abi::rdma::{
    CreateAh, CreateCq, CreateQp, CreateQpEx, CreateSrq, Handle, QPT_RC, QPT_UD, Qp, Srq,
    Verbs as _, VersionRange,
};
use farlane_sys::sync::lock;
use farlane_zero_copy::SharedMemory;
use hardware::{Driver, Hardware, Schedules};
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn sleeps(counters: &Counters) -> u64 {
    counters.sleeps.load(Ordering::Relaxed)
}

/// Waits until a worker has gone to sleep more often than that; a minute is for ever.
fn wait_asleep(counters: &Counters, before: u64) {
    let end = Instant::now() + Duration::from_secs(60);
    while sleeps(counters) == before {
        assert!(Instant::now() < end, "the worker does not sleep");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_an_adapter_has_carried_out_wakes_the_worker() {
    let hardware = Hardware::new();
    let schedules = Schedules::default();
    let engine = Driver {
        hardware: Arc::clone(&hardware),
        schedules: Arc::clone(&schedules),
    };
    let server = Server::with_engine(ServerConfig::default(), Arc::new(engine)).unwrap();
    let port = port(&server, 1);
    let context = open(&port, 0);
    let _header = Header::attach(&context);
    let (queues, completions) = (memory("queues", PAGE_BYTES), memory("cq", PAGE_BYTES));
    context.attach_segment(region(1), queues.clone()).unwrap();
    context
        .attach_segment(region(2), completions.clone())
        .unwrap();
    let mut host = CallHost::new(&context);
    let pd = host.alloc_pd(()).unwrap();
    let cq = host.create_cq(CreateCq {
        entries: 16.into(),
        region: 2.into(),
        ..Default::default()
    });
    let cq = cq.unwrap();
    let qp = host.create_qp(CreateQp {
        pd,
        send_cq: cq,
        recv_cq: cq,
        qp_type: QPT_RC.into(),
        send_wr: 4.into(),
        send_sge: 1.into(),
        recv_wr: 4.into(),
        recv_sge: 1.into(),
        region: 1.into(),
        ..Default::default()
    });
    let _qp = qp.unwrap();
    let (queues, completions) = (queues.stitch().unwrap(), completions.stitch().unwrap());
    let schedule = Arc::clone(&lock(&schedules)[0]);
    let layout = QpLayout::new(4, 1, 0, 4, 1).unwrap();
    for round in 0..3_u32 {
        let entry = SendEntry {
            wr_id: (7 + u64::from(round)).into(),
            opcode: OP_SEND,
            flags: SEND_SIGNALED,
            ..Default::default()
        };
        let at = usize::try_from(round).unwrap() * layout.send_stride;
        queues.write(QP_OFF_ENTRIES + at, &entry).unwrap();
        let produced = queues.word(QP_OFF_SEND_PRODUCED).unwrap();
        produced.store(round + 1, Ordering::SeqCst);
        let before = sleeps(server.counters());
        schedule.schedule();
        hardware.wait(|work| work.is_posted());
        // Nothing but its event wakes the worker then.
        wait_asleep(server.counters(), before);
        hardware.carry_out();
        hardware.wait(|work| work.found > round);
        let produced = completions.word(CQ_OFF_PRODUCED).unwrap();
        assert_eq!(produced.load(Ordering::SeqCst), round + 1);
        let at = usize::try_from(round).unwrap() * size_of::<Completion>();
        let completion: Completion = completions.read(CQ_OFF_ENTRIES + at).unwrap();
        assert_eq!(completion.wr_id.get(), 7 + u64::from(round));
    }
}

/// A source whose descriptor cannot be watched.
struct Unwatchable(File);

impl EventSource for Unwatchable {
    fn take(&self) -> bool {
        false
    }

    fn arm(&self) {}

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[test]
fn workers_end_where_one_cannot_start() {
    let hardware = Hardware::new();
    let file = File::open("/proc/self/exe").unwrap();
    let sources: [Arc<dyn EventSource>; 2] =
        [Arc::clone(&hardware) as _, Arc::new(Unwatchable(file))];
    let started = [0, 1].map(|index| {
        let source = Arc::clone(&sources[index]);
        Worker::start(index, None, vec![source], Arc::default())
    });
    assert!(started[0].is_ok() && started[1].is_err());
    drop((started, sources));
    assert_eq!(Arc::strong_count(&hardware), 1, "its thread goes on");
}

/// A program of an engine over an adapter, in whose place the test gives turns: a queue pair for
/// datagrams with a shared receive queue.
struct Program {
    hardware: Arc<Hardware>,
    schedules: Schedules,
    _port: Arc<Port>,
    context: Arc<Context>,
    _header: Header,
    /// Pages of the completion queue, the queue pair, and the shared receive queue.
    pages: [SharedMemory; 3],
    pd: Handle,
    cq: Handle,
    srq: Srq,
    qp: Qp,
    sent: u32,
}

impl Program {
    fn start() -> Self {
        let (hardware, schedules) = (Hardware::new(), Schedules::default());
        let engine = Driver {
            hardware: Arc::clone(&hardware),
            schedules: Arc::clone(&schedules),
        };
        let ledger = Ledger::new(|_| 200);
        let server = Server::of(Arc::new(engine), Arc::default(), Vec::new(), ledger);
        let port = port(&server, 1);
        let context = open(&port, 0);
        let header = Header::attach(&context);
        let pages = [1, 2, 3].map(|id| {
            let page = memory("queues", PAGE_BYTES);
            context.attach_segment(region(id), page.clone()).unwrap();
            page.stitch().unwrap()
        });
        let mut host = CallHost::new(&context);
        host.negotiate(VersionRange::ours()).unwrap();
        let pd = host.alloc_pd(()).unwrap();
        let cq = host.create_cq(CreateCq {
            entries: 16.into(),
            region: 1.into(),
            ..Default::default()
        });
        let cq = cq.unwrap();
        let srq = host.create_srq(CreateSrq {
            pd,
            region: 3.into(),
            requests: 4.into(),
            elements: 1.into(),
            ..Default::default()
        });
        let srq = srq.unwrap();
        let qp = host.create_qp_ex(CreateQpEx {
            base: CreateQp {
                pd,
                send_cq: cq,
                recv_cq: cq,
                qp_type: QPT_UD.into(),
                send_wr: 4.into(),
                send_sge: 1.into(),
                region: 2.into(),
                ..Default::default()
            },
            srq: srq.handle,
            ..Default::default()
        });
        let qp = qp.unwrap();
        Self {
            hardware,
            schedules,
            _port: port,
            context,
            _header: header,
            pages,
            pd,
            cq,
            srq,
            qp,
            sent: 0,
        }
    }

    fn host(&self) -> CallHost<'_> {
        CallHost::new(&self.context)
    }

    fn address(&self) -> Handle {
        let args = CreateAh {
            pd: self.pd,
            port_num: 1,
            is_global: 1,
            dgid: self.context.gid(),
            ..Default::default()
        };
        self.host().create_ah(args).unwrap()
    }

    /// Everything has a turn.
    fn turn(&self) {
        for schedule in lock(&self.schedules).iter() {
            schedule.schedule();
        }
        self.context.turn_now(Instant::now());
    }

    /// Posts a receive request, which the adapter has then.
    fn receive(&self, wr_id: u64) {
        let entry = RecvEntry {
            wr_id: wr_id.into(),
            ..Default::default()
        };
        self.pages[2].write(QP_OFF_ENTRIES, &entry).unwrap();
        let produced = self.pages[2].word(QP_OFF_RECV_PRODUCED).unwrap();
        produced.store(1, Ordering::SeqCst);
        self.turn();
        assert_eq!(self.hardware.with(|work| work.received_into()), 1);
    }

    /// Has the adapter send a datagram to the same queue pair, and carry that out.
    fn send(&mut self, wr_id: u64, ah: Handle) {
        let layout = QpLayout::with_tail(4, 1, 0, 0, 0).unwrap();
        let at = QP_OFF_ENTRIES + usize::try_from(self.sent).unwrap() * layout.send_stride;
        let entry = SendEntry {
            wr_id: wr_id.into(),
            opcode: OP_SEND,
            flags: SEND_SIGNALED | SEND_TAIL,
            ..Default::default()
        };
        let number = u64::from(self.qp.qp_num.get());
        let tail = SendTail {
            a: (number << 32 | u64::from(ah.get())).into(),
            b: 0.into(),
        };
        let queue = &self.pages[1];
        queue.write(at, &entry).unwrap();
        queue.write(at + size_of::<SendEntry>(), &tail).unwrap();
        self.sent += 1;
        let produced = queue.word(QP_OFF_SEND_PRODUCED).unwrap();
        produced.store(self.sent, Ordering::SeqCst);
        self.turn();
        assert!(self.hardware.with(|work| work.is_posted()));
        self.hardware.carry_out();
    }

    /// What has completed so far.
    fn completed(&self) -> Vec<(u64, u8)> {
        let produced = self.pages[0].word(CQ_OFF_PRODUCED).unwrap();
        let entry = |at: u32| {
            let at = usize::try_from(at).unwrap() * size_of::<Completion>();
            let completion: Completion = self.pages[0].read(CQ_OFF_ENTRIES + at).unwrap();
            (completion.wr_id.get(), completion.opcode)
        };
        (0..produced.load(Ordering::SeqCst)).map(entry).collect()
    }
}

#[test]
fn an_engine_knows_how_large_the_queues_of_a_queue_pair_are() {
    let p = Program::start();
    let shared = QpDepths {
        sends: 4,
        send_elements: 1,
        ..QpDepths::default()
    };
    assert_eq!(p.hardware.with(|work| work.depths()), [shared]);
    let mut host = p.host();
    host.destroy_qp(p.qp.handle).unwrap();
    let own = CreateQp {
        pd: p.pd,
        send_cq: p.cq,
        recv_cq: p.cq,
        qp_type: QPT_UD.into(),
        send_wr: 8.into(),
        send_sge: 2.into(),
        inline_bytes: 32.into(),
        recv_wr: 16.into(),
        recv_sge: 3.into(),
        region: 2.into(),
        ..Default::default()
    };
    host.create_qp(own).unwrap();
    let all = QpDepths {
        sends: 8,
        send_elements: 2,
        inline_bytes: 32,
        recvs: 16,
        recv_elements: 3,
    };
    assert_eq!(p.hardware.with(|work| work.depths()), [all]);
}

#[test]
fn an_engine_brings_all_kinds_of_objects_of_its_own() {
    let mut p = Program::start();
    let ah = p.address();
    p.receive(7);
    p.send(8, ah);
    assert!(p.hardware.take());
    let both = [(8, WC_OPCODE_SEND), (7, WC_OPCODE_RECV)];
    assert_eq!(p.completed(), both);
    let xrcd = p.host().open_xrcd(()).unwrap();
    let named = p.host().create_srq(CreateSrq {
        pd: p.pd,
        region: 3.into(),
        offset: 1024.into(),
        requests: 1.into(),
        elements: 1.into(),
        xrcd,
        cq: p.cq,
    });
    let named = named.unwrap();
    assert_ne!(named.number.get(), 0);
    assert_eq!(p.hardware.with(|work| work.objects()), [1, 2, 1, 1, 0]);
    let mut host = p.host();
    host.destroy_ah(ah).unwrap();
    host.destroy_srq(named.handle).unwrap();
    host.close_xrcd(xrcd).unwrap();
    host.destroy_qp(p.qp.handle).unwrap();
    host.destroy_srq(p.srq.handle).unwrap();
    host.destroy_cq(p.cq).unwrap();
    host.dealloc_pd(p.pd).unwrap();
    assert_eq!(p.hardware.with(|work| work.objects()), [0; 5]);
}

#[test]
fn what_a_program_leaves_its_engine_ends() {
    let p = Program::start();
    let _ah = p.address();
    assert_eq!(p.hardware.with(|work| work.objects()), [1, 1, 1, 1, 0]);
    p._port.close_all();
    assert_eq!(p.hardware.with(|work| work.objects()), [0; 5]);
}

#[test]
fn what_was_carried_out_for_a_queue_pair_that_is_paused_completes_when_it_goes_on() {
    let mut p = Program::start();
    let ah = p.address();
    p.send(8, ah);
    p.context.pause(true);
    assert!(!p.hardware.take());
    assert_eq!(p.completed(), []);
    p.context.pause(false);
    assert!(p.hardware.take());
    assert_eq!(p.completed(), [(8, WC_OPCODE_SEND)]);
}

#[test]
fn a_queue_pair_that_is_destroyed_leaves_its_engine_nothing_to_complete() {
    let mut p = Program::start();
    let ah = p.address();
    p.send(8, ah);
    assert!(p.hardware.with(|work| work.is_done()));
    let (qp, cq) = (p.qp.handle, p.cq);
    p.host().destroy_qp(qp).unwrap();
    p.host().destroy_cq(cq).unwrap();
    assert!(!p.hardware.take());
    assert_eq!(p.completed(), []);
}
