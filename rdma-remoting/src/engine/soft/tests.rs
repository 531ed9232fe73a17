//! Queue pairs whose numbers come again.

use super::*;
use crate::engine::{PortAddress, QpNumber};
use crate::local::{LocalCompletionQueue, LocalQueue};
use crate::memory::{MemoryTable, PdHandle};
use crate::request::{Opcode, RecvWqe, SendWqe};
use farlane_abi::queue::{WC_STATUS_RETRY_EXC_ERR, WC_STATUS_SUCCESS};
use farlane_abi::rdma::{QP_TO_INIT, QP_TO_RTR, QP_TO_RTS, QPS_INIT, QPS_RTR, QPS_RTS, QpAttr};
use std::collections::HashSet;
use std::time::{Duration, Instant};

struct End {
    qp: SoftQp,
    sends: LocalQueue<SendWqe>,
    recvs: LocalQueue<RecvWqe>,
    cq: Arc<LocalCompletionQueue>,
}

/// A queue pair, in place of one that is gone where a number is given.
fn end(fabric: &Arc<Fabric>, number: Option<QpNumber>) -> End {
    let (sends, recvs) = (LocalQueue::default(), LocalQueue::default());
    let cq = LocalCompletionQueue::new(8);
    let spec = QpSpec {
        kind: QPT_RC,
        pd: PdHandle(1),
        address: PortAddress::default(),
        memory: Arc::new(MemoryTable::new(1)),
        sends: Box::new(LocalQueue::clone(&sends)),
        recvs: Box::new(LocalQueue::clone(&recvs)),
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        signal_all: true,
        schedule: Arc::new(|| ()),
        events: Box::new(|_| ()),
        counters: Arc::default(),
        limit: Arc::default(),
    };
    if let Some(number) = number {
        fabric.give_again(number);
    }
    let qp = SoftQp::new(spec, fabric, MAX_QUEUE_PAIRS).unwrap();
    End {
        qp,
        sends,
        recvs,
        cq,
    }
}

fn connect(end: &End, to: &End) {
    let state = |qp_state| QpAttr {
        qp_state,
        port_num: 1,
        path_mtu: 3,
        dest_qp_num: to.qp.number().into(),
        is_global: 1,
        ah_port: 1,
        timeout: 14,
        rnr_retry: 7,
        ..Default::default()
    };
    for (mask, to) in [
        (QP_TO_INIT, QPS_INIT),
        (QP_TO_RTR, QPS_RTR),
        (QP_TO_RTS, QPS_RTS),
    ] {
        end.qp.modify(mask, &state(to)).unwrap();
    }
}

/// How a message from one to the other ends, and how many arrive.
fn send(from: &End, to: &End) -> (u8, usize) {
    to.recvs.post(RecvWqe::default());
    let mut request = SendWqe::default();
    request.opcode = Opcode::Send;
    from.sends.post(request);
    let mut now = Instant::now();
    let status = loop {
        from.qp.progress(now.into());
        if let Some(completion) = from.cq.poll() {
            break completion.status;
        }
        now += Duration::from_millis(100);
    };
    (status, std::iter::from_fn(|| to.cq.poll()).count())
}

#[test]
fn a_successor_with_the_same_number_is_not_taken_for_the_peer() {
    for successor_sends in [false, true] {
        let fabric = Arc::new(Fabric::default());
        let (victim, peer) = (end(&fabric, None), end(&fabric, None));
        connect(&victim, &peer);
        connect(&peer, &victim);
        assert_eq!(send(&victim, &peer), (WC_STATUS_SUCCESS, 1));
        assert_eq!(send(&peer, &victim), (WC_STATUS_SUCCESS, 1));
        peer.qp.destroy();
        let successor = end(&fabric, Some(peer.qp.number()));
        connect(&successor, &victim);
        let (from, to) = if successor_sends {
            (&successor, &victim)
        } else {
            (&victim, &successor)
        };
        assert_eq!(send(from, to), (WC_STATUS_RETRY_EXC_ERR, 0));
    }
}

#[test]
fn nobody_can_tell_the_next_number() {
    let fabric = Arc::new(Fabric::default());
    let ends: Vec<_> = (0..64).map(|_| end(&fabric, None)).collect();
    let numbers: Vec<_> = ends.iter().map(|end| end.qp.number().get()).collect();
    let all: HashSet<_> = numbers.iter().collect();
    assert_eq!(all.len(), numbers.len());
    assert!(numbers.iter().all(|n| (16..1 << 24).contains(n)));
    // Of 64 draws among 16 million there are two such pairs once in some billions of runs.
    let near = numbers.windows(2).filter(|n| n[0].abs_diff(n[1]) == 1);
    assert!(near.count() < 2);
}
