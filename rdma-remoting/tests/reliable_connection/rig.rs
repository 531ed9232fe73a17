//! Two ends of a connection, reliable or not, in one thread, and what tests do with them.

use farlane_abi::queue::WC_STATUS_RETRY_EXC_ERR;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::Traffic;
use farlane_rdma_remoting::engine::soft::{SoftCq, SoftEngine};
use farlane_rdma_remoting::engine::{
    ContextSpec, EngineContext as _, EngineQp, PortAddress, QpDepths, QpSpec, Receives,
};
use farlane_rdma_remoting::local::{LocalCompletionQueue, LocalQueue};
use farlane_rdma_remoting::memory::{Access, MemoryRegion, MemoryTable, PdHandle};
use farlane_rdma_remoting::request::{Element, MemoryKey, Opcode, RecvWqe, SendWqe};
use farlane_zero_copy::{Pool, Region, WordLocks, copy_from_slice, copy_to_slice};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub const IOVA: u64 = 0x7000_0000;
pub const BYTES: u64 = 4 << 20;

pub struct End {
    pub qp: Arc<dyn EngineQp>,
    pub sends: LocalQueue<SendWqe>,
    pub recvs: LocalQueue<RecvWqe>,
    pub cq: Arc<LocalCompletionQueue>,
    pub table: Arc<MemoryTable>,
    pub region: Region,
    pub key: MemoryKey,
    pub events: Arc<Mutex<Vec<u32>>>,
    /// How often it was scheduled.
    pub scheduled: Arc<AtomicUsize>,
    /// What its port has carried out and received.
    pub traffic: Arc<Traffic>,
}

impl Drop for End {
    /// As whoever makes a queue pair does: the two of a connection know each other until then.
    fn drop(&mut self) {
        self.qp.destroy();
    }
}

pub struct Pair {
    pub a: End,
    pub b: End,
    pub now: Instant,
}

#[derive(Clone, Copy)]
pub struct Setup {
    /// Transport service type.
    pub kind: u32,
    pub access: u32,
    pub qp_access: u32,
    pub rnr_retry: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub cq_entries: u32,
    pub psn: [u32; 2],
}

pub const ALL: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
pub const NORMAL: Setup = Setup {
    kind: QPT_RC,
    access: ALL,
    qp_access: ALL,
    rnr_retry: 7,
    timeout: 14,
    retry_cnt: 2,
    cq_entries: 4096,
    psn: [100, 200],
};

/// Longer than time-out 14: 4.096 us * 2^14.
pub const ANSWER_TIMEOUT: Duration = Duration::from_millis(68);

/// LID of the port whose GID consists of such bytes.
pub fn lid(gid: u8) -> u16 {
    0x100 + u16::from(gid)
}

pub fn end(engine: &SoftEngine, gid: u8, setup: &Setup) -> End {
    end_with(
        engine,
        gid,
        setup,
        LocalCompletionQueue::new(setup.cq_entries),
    )
}

/// One of the same context as another.
pub fn end_in(engine: &SoftEngine, gid: u8, setup: &Setup, of: &End) -> End {
    let cq = LocalCompletionQueue::new(setup.cq_entries);
    let recvs = LocalQueue::default();
    let receives = Receives::Own(Box::new(recvs.clone()));
    let memory = (Arc::clone(&of.table), of.region.clone(), of.key);
    end_over(engine, gid, setup, cq, (recvs, receives), memory)
}

pub fn end_with(engine: &SoftEngine, gid: u8, setup: &Setup, cq: Arc<LocalCompletionQueue>) -> End {
    let recvs = LocalQueue::default();
    let receives = Receives::Own(Box::new(recvs.clone()));
    end_receiving(engine, gid, setup, cq, recvs, receives)
}

/// The same, which takes receive requests from there; they are posted to `recvs`.
pub fn end_receiving(
    engine: &SoftEngine,
    gid: u8,
    setup: &Setup,
    cq: Arc<LocalCompletionQueue>,
    recvs: LocalQueue<RecvWqe>,
    receives: Receives,
) -> End {
    let memory = memory(setup, Arc::default());
    end_over(engine, gid, setup, cq, (recvs, receives), memory)
}

/// Memory of its own, in a table with such locks.
pub fn memory(setup: &Setup, locks: Arc<WordLocks>) -> (Arc<MemoryTable>, Region, MemoryKey) {
    let buffer = Pool::separate_files(BYTES).allocate(BYTES).unwrap();
    let region = Region::from_buffer(&buffer);
    let table = Arc::new(MemoryTable::with_locks(16, locks));
    let key = table
        .insert(MemoryRegion {
            pd: PdHandle(1),
            iova: IOVA,
            offset: 0,
            length: BYTES,
            access: Access::from_wire(setup.access).unwrap(),
            region: region.clone(),
            owner: None,
        })
        .unwrap();
    (table, region, key)
}

pub fn end_over(
    engine: &SoftEngine,
    gid: u8,
    setup: &Setup,
    cq: Arc<LocalCompletionQueue>,
    (recvs, receives): (LocalQueue<RecvWqe>, Receives),
    (table, region, key): (Arc<MemoryTable>, Region, MemoryKey),
) -> End {
    let sends = LocalQueue::default();
    let events = Arc::new(Mutex::new(Vec::new()));
    let scheduled = Arc::<AtomicUsize>::default();
    let traffic = Arc::<Traffic>::default();
    let context = ContextSpec {
        traffic: Arc::clone(&traffic),
        address: PortAddress {
            gid: [gid; 16],
            lid: lid(gid),
        },
        ..ContextSpec::default()
    };
    let context = engine.open_over(context, Arc::clone(&table));
    let qp = context
        .create_qp(QpSpec {
            kind: setup.kind,
            pd: PdHandle(1),
            depths: QpDepths::default(),
            sends: Box::new(LocalQueue::clone(&sends)),
            recvs: receives,
            send_cq: Some(SoftCq::new(cq.clone())),
            recv_cq: Some(SoftCq::new(cq.clone())),
            signal_all: false,
            schedule: {
                let scheduled = Arc::clone(&scheduled);
                Arc::new(move || {
                    scheduled.fetch_add(1, Ordering::SeqCst);
                })
            },
            events: {
                let events = Arc::clone(&events);
                Box::new(move |kind| events.lock().unwrap().push(kind))
            },
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
        scheduled,
        traffic,
    }
}

pub fn init(setup: &Setup) -> QpAttr {
    QpAttr {
        qp_state: QPS_INIT,
        port_num: 1,
        qp_access_flags: setup.qp_access.into(),
        ..Default::default()
    }
}

pub fn receive_from(peer: &End, gid: u8, psn: u32) -> QpAttr {
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

pub fn connect(end: &End, to: &End, gid: u8, psn: [u32; 2], setup: &Setup) {
    connect_by(end, to, gid, psn, setup, |_| ());
}

/// The same, with another address.
pub fn connect_by(
    end: &End,
    to: &End,
    gid: u8,
    psn: [u32; 2],
    setup: &Setup,
    address: impl Fn(&mut QpAttr),
) {
    let (to_rtr, to_rts) = match setup.kind {
        QPT_UC => (UC_TO_RTR, UC_TO_RTS),
        QPT_XRC_SEND => (UC_TO_RTR, QP_TO_RTS),
        QPT_XRC_RECV => (QP_TO_RTR, XRC_TARGET_TO_RTS),
        _ => (QP_TO_RTR, QP_TO_RTS),
    };
    end.qp.modify(QP_TO_INIT, &init(setup)).unwrap();
    let mut attr = receive_from(to, gid, psn[1]);
    address(&mut attr);
    end.qp.modify(to_rtr, &attr).unwrap();
    let attr = QpAttr {
        qp_state: QPS_RTS,
        timeout: setup.timeout,
        retry_cnt: setup.retry_cnt,
        rnr_retry: setup.rnr_retry,
        sq_psn: psn[0].into(),
        max_rd_atomic: 1,
        ..Default::default()
    };
    end.qp.modify(to_rts, &attr).unwrap();
}

pub fn pair(setup: Setup) -> Pair {
    pair_with_locks(setup, &Arc::default())
}

/// The same, whose words have these locks.
pub fn pair_with_locks(setup: Setup, locks: &Arc<WordLocks>) -> Pair {
    let engine = SoftEngine::new();
    let [a, b] = [1, 2].map(|gid| {
        let cq = LocalCompletionQueue::new(setup.cq_entries);
        let recvs = LocalQueue::default();
        let receives = Receives::Own(Box::new(recvs.clone()));
        let memory = memory(&setup, Arc::clone(locks));
        end_over(&engine, gid, &setup, cq, (recvs, receives), memory)
    });
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
    pub fn run(&mut self) {
        for _ in 0..10_000 {
            let worked = self.a.qp.progress(self.now.into()).worked
                | self.b.qp.progress(self.now.into()).worked;
            if !worked {
                return;
            }
        }
        panic!("the engine does not come to rest");
    }

    /// Request `wr_id` of the first end is given up after two retries: the peer does not answer.
    pub fn give_up(&mut self, wr_id: u64) {
        self.run();
        for _ in 0..2 {
            self.pass(ANSWER_TIMEOUT);
            assert_eq!(self.a.next(), None);
        }
        self.pass(ANSWER_TIMEOUT);
        assert_eq!(self.a.next(), Some((wr_id, WC_STATUS_RETRY_EXC_ERR)));
    }

    pub fn pass(&mut self, time: Duration) {
        self.now += time;
        self.run();
    }
}

impl End {
    pub fn element(&self, offset: u64, length: u32) -> Element {
        Element {
            address: IOVA + offset,
            length,
            lkey: self.key,
        }
    }

    pub fn request(&self, opcode: Opcode, wr_id: u64, elements: &[Element]) -> SendWqe {
        let mut request = SendWqe::default();
        (request.wr_id, request.opcode, request.signalled) = (wr_id, opcode, true);
        request.elements.set(elements).unwrap();
        request
    }

    pub fn post_send(&self, wr_id: u64, elements: &[Element]) {
        self.sends.post(self.request(Opcode::Send, wr_id, elements));
    }

    pub fn post_recv(&self, wr_id: u64, elements: &[Element]) {
        let mut request = RecvWqe {
            wr_id,
            ..Default::default()
        };
        request.elements.set(elements).unwrap();
        self.recvs.post(request);
    }

    /// (wr_id, status) of the next completion.
    pub fn next(&self) -> Option<(u64, u8)> {
        self.cq.poll().map(|c| (c.wr_id.get(), c.status))
    }

    /// Whether it was scheduled since it was last asked.
    pub fn was_scheduled(&self) -> bool {
        self.scheduled.swap(0, Ordering::SeqCst) > 0
    }

    /// What of these its port has counted.
    pub fn counted<const N: usize>(&self, names: [&str; N]) -> [u64; N] {
        let samples = self.traffic.samples();
        names.map(|name| samples.iter().find(|of| of.name == name).unwrap().value)
    }

    pub fn state(&self) -> u8 {
        self.qp.query().qp_state
    }

    pub fn fill(&self, seed: u64) -> Vec<u8> {
        let bytes: Vec<u8> = (0..BYTES)
            .map(|i| u8::try_from((i * 31 + i / 251 + seed) % 256).unwrap())
            .collect();
        copy_from_slice(&self.region, 0, &bytes).unwrap();
        bytes
    }

    pub fn contents(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        copy_to_slice(&self.region, offset, &mut bytes).unwrap();
        bytes
    }
}

pub fn remote(mut request: SendWqe, to: &End, offset: u64) -> SendWqe {
    request.remote_address = IOVA + offset;
    request.rkey = to.key;
    request
}
