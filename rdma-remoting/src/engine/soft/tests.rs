//! Queue pairs whose numbers come again.

use super::context::Owner;
use super::fabric::QpName;
use super::qp::SoftQp;
use super::transport::Transport;
use super::*;
use crate::engine::{
    ContextSpec, Destination, EngineQp as _, Management, ManagementDatagram, PortAddress, QpDepths,
    QpNumber, QpSpec, RawGid, Receives,
};
use crate::local::{LocalCompletionQueue, LocalQueue};
use crate::memory::{MemoryTable, PdHandle};
use crate::request::{Opcode, RecvWqe, SendWqe};
use farlane_abi::queue::{WC_STATUS_RETRY_EXC_ERR, WC_STATUS_SUCCESS};
use farlane_abi::rdma::{
    QP_TO_INIT, QP_TO_RTR, QP_TO_RTS, QPS_INIT, QPS_RTR, QPS_RTS, QPT_RC, QpAttr,
};
use std::collections::HashSet;
use std::time::{Duration, Instant};

mod carriers;
mod in_flight;
mod waiting;

struct End {
    qp: SoftQp,
    address: PortAddress,
    sends: LocalQueue<SendWqe>,
    recvs: LocalQueue<RecvWqe>,
    cq: Arc<LocalCompletionQueue>,
}

/// A queue pair, in place of one that is gone where a number is given.
fn end(fabric: &Arc<Fabric>, number: Option<QpNumber>) -> End {
    end_at(fabric, PortAddress::default(), number)
}

/// The same, at this port.
fn end_at(fabric: &Arc<Fabric>, address: PortAddress, number: Option<QpNumber>) -> End {
    let (sends, recvs) = (LocalQueue::default(), LocalQueue::default());
    let cq = LocalCompletionQueue::new(8);
    let owner = Owner {
        spec: ContextSpec {
            address,
            ..ContextSpec::default()
        },
        memory: Arc::new(MemoryTable::new(1)),
    };
    let spec = QpSpec {
        kind: QPT_RC,
        pd: PdHandle(1),
        depths: QpDepths::default(),
        sends: Box::new(LocalQueue::clone(&sends)),
        recvs: Receives::Own(Box::new(LocalQueue::clone(&recvs))),
        send_cq: Some(SoftCq::new(cq.clone())),
        recv_cq: Some(SoftCq::new(cq.clone())),
        signal_all: true,
        schedule: Arc::new(|| ()),
        events: Box::new(|_| ()),
    };
    if let Some(number) = number {
        fabric.give_again(number);
    }
    let qp = SoftQp::new(&owner, spec, Transport::Reliable, fabric, MAX_QUEUE_PAIRS).unwrap();
    End {
        qp,
        address,
        sends,
        recvs,
        cq,
    }
}

fn connect(end: &End, to: &End) {
    connect_by(end, to, Destination::Gid(to.address.gid));
}

/// The same, by one address or the other.
fn connect_by(end: &End, to: &End, destination: Destination) {
    let (is_global, dgid, dlid) = match destination {
        Destination::Gid(gid) => (1, gid, 0),
        Destination::Lid(lid) => (0, RawGid::default(), lid),
    };
    let state = |qp_state| QpAttr {
        qp_state,
        port_num: 1,
        path_mtu: 3,
        dest_qp_num: to.qp.number().into(),
        is_global,
        dgid,
        dlid: dlid.into(),
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

/// A port of this GID and LID.
fn port(number: u8) -> PortAddress {
    PortAddress {
        gid: [number; 16],
        lid: number.into(),
    }
}

/// The queue pairs of two ports that have the same number.
fn namesakes(fabric: &Arc<Fabric>) -> [End; 2] {
    let one = end_at(fabric, port(1), None);
    let number = one.qp.number();
    [one, end_at(fabric, port(2), Some(number))]
}

#[test]
fn the_same_number_at_two_ports_is_two_queue_pairs() {
    for by_lid in [false, true] {
        let fabric = Arc::new(Fabric::default());
        let namesakes = namesakes(&fabric);
        let peers = [3, 3].map(|at| end_at(&fabric, port(at), None));
        for (end, peer) in namesakes.iter().zip(&peers) {
            for (from, to) in [(end, peer), (peer, end)] {
                let PortAddress { gid, lid } = to.address;
                let name = if by_lid {
                    Destination::Lid(lid)
                } else {
                    Destination::Gid(gid)
                };
                connect_by(from, to, name);
            }
        }
        let [one, other] = &namesakes;
        for (from, to, not) in [(&peers[0], one, other), (&peers[1], other, one)] {
            assert_eq!(send(from, to), (WC_STATUS_SUCCESS, 1));
            assert!(not.cq.poll().is_none(), "the other one has got it");
            assert_eq!(send(to, from), (WC_STATUS_SUCCESS, 1));
        }
        // The end of one is not that of the other.
        one.qp.destroy();
        assert_eq!(send(&peers[1], other), (WC_STATUS_SUCCESS, 1));
        assert_eq!(send(&peers[0], one), (WC_STATUS_RETRY_EXC_ERR, 0));
    }
}

#[test]
fn two_queue_pairs_of_the_same_number_are_connected_to_each_other() {
    let fabric = Arc::new(Fabric::default());
    let [one, other] = namesakes(&fabric);
    connect(&one, &other);
    connect(&other, &one);
    assert_eq!(send(&one, &other), (WC_STATUS_SUCCESS, 1));
    assert_eq!(send(&other, &one), (WC_STATUS_SUCCESS, 1));
}

#[test]
fn a_queue_pair_of_the_peers_number_at_another_port_is_not_the_peer() {
    let fabric = Arc::new(Fabric::default());
    let [peer, stranger] = namesakes(&fabric);
    let victim = end_at(&fabric, port(3), None);
    connect(&victim, &peer);
    connect(&stranger, &victim);
    assert_eq!(send(&stranger, &victim), (WC_STATUS_RETRY_EXC_ERR, 0));
    connect(&peer, &victim);
    assert_eq!(send(&peer, &victim), (WC_STATUS_SUCCESS, 1));
    assert_eq!(send(&victim, &peer), (WC_STATUS_SUCCESS, 1));
    assert!(stranger.cq.poll().is_none());
}

#[test]
fn a_lid_is_that_of_the_port_that_has_it_now() {
    let fabric = Arc::new(Fabric::default());
    let find = |destination, end: &End| {
        let number = end.qp.number();
        let name = QpName {
            destination,
            number,
        };
        let found = fabric.find(name);
        found.is_some_and(|target| target.common.address == end.address)
    };
    let (gone, other) = (
        end_at(&fabric, port(1), None),
        end_at(&fabric, port(2), None),
    );
    assert!(find(Destination::Lid(1), &gone) && !find(Destination::Lid(2), &gone));
    let number = gone.qp.number();
    gone.qp.destroy();
    assert!(!find(Destination::Lid(1), &gone) && find(Destination::Lid(2), &other));
    let next = PortAddress {
        gid: [9; 16],
        lid: 1,
    };
    let next = end_at(&fabric, next, Some(number));
    assert!(find(Destination::Lid(1), &next) && find(Destination::Gid([9; 16]), &next));
    assert!(!find(Destination::Gid([1; 16]), &next));
}

#[test]
fn the_limit_of_queue_pairs_is_that_of_all_ports() {
    let fabric = Arc::new(Fabric::default());
    let ends: Vec<_> = (1..4).map(|at| end_at(&fabric, port(at), None)).collect();
    let room = |limit| {
        let none = |_| panic!("There is no room");
        fabric.add(port(9), None, limit, none).is_ok()
    };
    assert!(!room(3));
    ends[0].qp.destroy();
    assert!(!room(2));
    let added = end_at(&fabric, port(9), None);
    assert!(!room(3));
    drop(added);
}

/// Every other number is named.
struct OddNamed;

impl Management for OddNamed {
    fn take(&self, _: &ManagementDatagram<'_>) {}

    fn is_named(&self, _: &RawGid, number: QpNumber) -> bool {
        number.get() % 2 == 1
    }
}

#[test]
fn a_number_that_a_connection_names_is_given_to_no_queue_pair() {
    let fabric = Arc::new(Fabric::default());
    assert!(fabric.management.set(Arc::new(OddNamed)).is_ok());
    for _ in 0..32 {
        assert_eq!(end(&fabric, None).qp.number().get() % 2, 0);
    }
}
