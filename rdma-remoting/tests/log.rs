//! What a tenant can have logged.

#![allow(clippy::unwrap_used)]

use farlane_abi::rdma::{self, *};
use farlane_rdma_remoting::engine::soft::{SoftCq, SoftEngine};
use farlane_rdma_remoting::engine::{
    ContextSpec, EngineContext as _, PortAddress, QpDepths, QpSpec, Receives,
};
use farlane_rdma_remoting::local::LocalCompletionQueue;
use farlane_rdma_remoting::memory::{MemoryTable, PdHandle};
use farlane_rdma_remoting::work_queue::{QueueError, WorkSource};
use farlane_sys::log_limit::LogLimit;
use log::{LevelFilter, Log, Metadata, Record};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Counts lines.
struct Lines(AtomicUsize);

impl Log for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn log(&self, _: &Record<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn flush(&self) {}
}

static LINES: Lines = Lines(AtomicUsize::new(0));

/// A queue whose producer word makes no sense.
struct Nonsense;

const ABSURD: QueueError = QueueError::Index {
    produced: 9,
    consumed: 0,
    entries: 4,
};

impl<W> WorkSource<W> for Nonsense {
    fn take(&mut self, _: &mut W) -> Result<bool, QueueError> {
        Err(ABSURD)
    }
    fn retire(&mut self) {}
    fn queued(&self) -> u32 {
        1
    }
    fn discard(&mut self) {}
}

/// Both queues of a queue pair of this tenant are given up, in one state or the other.
fn give_up(engine: &SoftEngine, tenant: &Arc<LogLimit>, state: u8) {
    let cq = LocalCompletionQueue::new(4);
    let context = ContextSpec {
        address: PortAddress {
            gid: [1; 16],
            lid: 1,
        },
        limit: Arc::clone(tenant),
        ..ContextSpec::default()
    };
    let context = engine.open_over(context, Arc::new(MemoryTable::new(1)));
    let qp = context
        .create_qp(QpSpec {
            kind: QPT_RC,
            pd: PdHandle(1),
            depths: QpDepths::default(),
            sends: Box::new(Nonsense),
            recvs: Receives::Own(Box::new(Nonsense)),
            send_cq: Some(SoftCq::new(cq.clone())),
            recv_cq: Some(SoftCq::new(cq)),
            signal_all: false,
            schedule: Arc::new(|| ()),
            events: Box::new(|_| ()),
        })
        .unwrap();
    let attr = |qp_state| QpAttr {
        qp_state,
        port_num: 1,
        path_mtu: 3,
        dest_qp_num: qp.number().into(),
        dlid: 1.into(),
        ..Default::default()
    };
    let steps = [
        (QPS_INIT, QP_TO_INIT),
        (QPS_RTR, QP_TO_RTR),
        (QPS_RTS, QP_TO_RTS),
    ];
    for (to, mask) in steps {
        qp.modify(mask, &attr(to)).unwrap();
    }
    if state == QPS_ERR {
        qp.modify(rdma::QP_STATE, &attr(QPS_ERR)).unwrap();
    }
    while qp.progress(Instant::now().into()).worked {}
    qp.destroy();
}

/// The only test of this program: the log is the process's.
#[test]
fn a_tenant_fills_no_log_and_silences_no_other() {
    log::set_logger(&LINES).unwrap();
    log::set_max_level(LevelFilter::Info);
    let lines = || LINES.0.swap(0, Ordering::Relaxed);
    let engine = SoftEngine::new();
    let [one, other]: [Arc<LogLimit>; 2] = Default::default();
    for state in [QPS_RTS, QPS_ERR].repeat(500) {
        give_up(&engine, &one, state);
    }
    let told = lines();
    assert!((1..100).contains(&told), "{told} lines");
    give_up(&engine, &other, QPS_ERR);
    assert_eq!(lines(), 2, "one for each queue");
}
