//! Queue pairs that take receive requests from a queue which they share (IBTA 10.2.9).

#![allow(clippy::unwrap_used)]

#[path = "reliable_connection/rig.rs"]
#[allow(dead_code, reason = "reliable connections have more to them")]
mod rig;

use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::engine::Receives;
use farlane_rdma_remoting::engine::soft::{SoftEngine, SoftSrq};
use farlane_rdma_remoting::local::{LocalCompletionQueue, LocalQueue};
use farlane_rdma_remoting::memory::{Access, MemoryRegion, PdHandle};
use farlane_rdma_remoting::request::{Element, MemoryKey, Opcode, RecvWqe};
use farlane_rdma_remoting::shared_receive_queue::SharedReceives;
use farlane_rdma_remoting::work_queue::{QueueError, SharedSource, WorkSource};
use rig::*;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Two connections of a program whose ends share receive requests.
struct Rig {
    /// Its peers.
    senders: [End; 2],
    receivers: [End; 2],
    shared: Arc<SharedReceives>,
    /// Events of the queue.
    told: Arc<Mutex<Vec<u32>>>,
    now: Instant,
}

fn rig(setup: Setup) -> Rig {
    let queue = LocalQueue::default();
    rig_over(setup, queue.clone(), queue, PdHandle(1))
}

fn rig_over(
    setup: Setup,
    recvs: LocalQueue<RecvWqe>,
    source: impl SharedSource + 'static,
    pd: PdHandle,
) -> Rig {
    let engine = SoftEngine::new();
    let told = Arc::<Mutex<Vec<u32>>>::default();
    let events = {
        let told = Arc::clone(&told);
        Box::new(move |kind| told.lock().unwrap().push(kind))
    };
    let shared = SharedReceives::new(Box::new(source), pd, events);
    let receiver = |gid| {
        let cq = LocalCompletionQueue::new(setup.cq_entries);
        let receives = Receives::Shared(SoftSrq::of(&shared));
        end_receiving(&engine, gid, &setup, cq, recvs.clone(), receives)
    };
    let receivers = [2, 4].map(receiver);
    let senders = [1, 3].map(|gid| end(&engine, gid, &setup));
    for (at, gid) in [(0, 1), (1, 3)] {
        connect(&senders[at], &receivers[at], gid + 1, [100, 200], &setup);
        connect(&receivers[at], &senders[at], gid, [200, 100], &setup);
    }
    Rig {
        senders,
        receivers,
        shared,
        told,
        now: Instant::now(),
    }
}

impl Rig {
    /// Turns of all, but not of the queue, until nobody has anything to do.
    fn run(&self) {
        let ends = || self.senders.iter().chain(&self.receivers);
        for _ in 0..10_000 {
            // Each has one.
            let worked = ends().filter(|end| end.qp.progress(self.now.into()).worked);
            if worked.count() == 0 {
                return;
            }
        }
        panic!("the engine does not come to rest");
    }

    fn post(&self, wr_id: u64, length: u32) {
        let end = &self.receivers[0];
        end.post_recv(wr_id, &[end.element(0, length)]);
    }

    fn scheduled(&self) -> [bool; 2] {
        self.senders.each_ref().map(End::was_scheduled)
    }

    fn events(&self, at: usize) -> Vec<u32> {
        std::mem::take(&mut *self.receivers[at].events.lock().unwrap())
    }
}

#[test]
fn each_message_takes_the_oldest_request_whichever_connection_it_comes_by() {
    let r = rig(NORMAL);
    for wr_id in 0..4 {
        r.receivers[0].post_recv(wr_id, &[]);
    }
    for (wr_id, at) in [(10, 0), (11, 1), (12, 1), (13, 0)] {
        r.senders[at].post_send(wr_id, &[]);
        r.run();
        assert_eq!(r.senders[at].next(), Some((wr_id, WC_STATUS_SUCCESS)));
        let completion = r.receivers[at].cq.poll().unwrap();
        assert_eq!(completion.wr_id.get(), wr_id - 10);
        let numbers = (completion.qp_num.get(), completion.src_qp.get());
        let expected = (r.receivers[at].qp.number(), r.senders[at].qp.number());
        assert_eq!(numbers, (expected.0.get(), expected.1.get()));
    }
    assert!(r.receivers[0].recvs.is_empty());
}

#[test]
fn a_request_wakes_one_of_those_whose_peers_wait() {
    let r = rig(Setup {
        timeout: 0,
        ..NORMAL
    });
    for (at, sender) in r.senders.iter().enumerate() {
        sender.post_send(at as u64, &[]);
        r.run();
    }
    // Neither is looked at again and again.
    r.scheduled();
    r.run();
    assert!(r.senders.iter().all(|sender| !sender.qp.is_ready()));
    assert!(!r.shared.pass_on());
    assert_eq!(r.scheduled(), [false, false]);
    for (at, told) in [(0, [true, false]), (1, [false, true])] {
        r.post(7, 0);
        assert!(r.shared.is_awaited(), "its turn is due");
        assert!(r.shared.pass_on());
        assert_eq!(r.scheduled(), told);
        let progress = r.senders[at].qp.progress(r.now.into());
        assert!(progress.worked);
        assert_eq!(r.senders[at].next(), Some((at as u64, WC_STATUS_SUCCESS)));
        assert!(!r.shared.is_awaited() && !r.shared.pass_on());
    }
}

/// What one of them does not take the other one has.
#[test]
fn a_queue_pair_that_is_gone_leaves_the_request_to_those_that_wait() {
    let r = rig(NORMAL);
    for sender in &r.senders {
        sender.post_send(1, &[]);
        r.run();
    }
    r.receivers[0].qp.destroy();
    r.scheduled();
    r.post(7, 0);
    assert!(r.shared.pass_on());
    assert_eq!(r.scheduled(), [false, true]);
    r.run();
    assert_eq!(r.senders[1].next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(r.senders[0].next(), None);
    assert!(!r.shared.is_awaited());
}

/// A peer that has been told and then does not come, because it has stopped.
#[test]
fn a_peer_that_has_stopped_holds_nobody_up() {
    let r = rig(NORMAL);
    for sender in &r.senders {
        sender.post_send(1, &[]);
        r.run();
    }
    r.scheduled();
    r.post(7, 0);
    r.senders[0].qp.pause(true);
    r.scheduled();
    while r.shared.pass_on() {}
    assert_eq!(r.scheduled(), [true, true]);
    r.run();
    assert_eq!(r.senders[1].next(), Some((1, WC_STATUS_SUCCESS)));
}

#[test]
fn a_sender_gives_up_after_its_retries() {
    let mut r = rig(Setup {
        rnr_retry: 2,
        ..NORMAL
    });
    r.senders[0].post_send(1, &[]);
    for _ in 0..2 {
        r.run();
        assert_eq!(r.senders[0].next(), None);
        r.now += Duration::from_millis(1);
    }
    r.run();
    let failed = Some((1, WC_STATUS_RNR_RETRY_EXC_ERR));
    assert_eq!(r.senders[0].next(), failed);
    // It waits no more; the other one does.
    r.senders[1].post_send(2, &[]);
    r.run();
    r.post(7, 0);
    while r.shared.pass_on() {}
    r.run();
    assert_eq!(r.senders[1].next(), Some((2, WC_STATUS_SUCCESS)));
}

#[test]
fn a_queue_pair_in_error_flushes_what_it_has_taken_and_nothing_of_the_others() {
    let r = rig(NORMAL);
    let error = QpAttr {
        qp_state: QPS_ERR,
        ..Default::default()
    };
    // Longer than a turn.
    r.receivers[0].post_recv(1, &[r.receivers[0].element(0, 3 << 20)]);
    r.post(2, 8);
    r.senders[0].post_send(5, &[r.senders[0].element(0, 3 << 20)]);
    assert!(r.senders[0].qp.progress(r.now.into()).worked);
    assert_eq!(r.receivers[0].recvs.len(), 1);
    r.receivers[0].qp.modify(QP_STATE, &error).unwrap();
    assert!(r.events(0).is_empty(), "a request is with it");
    assert!(r.receivers[0].qp.is_ready());
    r.receivers[0].qp.progress(r.now.into());
    assert_eq!(r.receivers[0].next(), Some((1, WC_STATUS_WR_FLUSH_ERR)));
    assert_eq!(r.events(0), [EVENT_QP_LAST_WQE_REACHED]);
    assert!(!r.receivers[0].qp.is_ready());
    r.run();
    assert_eq!(r.receivers[0].next(), None);
    assert!(r.events(0).is_empty());
    // One that has none says so, too.
    r.receivers[1].qp.modify(QP_STATE, &error).unwrap();
    r.run();
    assert_eq!(r.events(1), [EVENT_QP_LAST_WQE_REACHED]);
    assert_eq!(r.receivers[0].recvs.len(), 1);
    // A reset drops nothing either, and the next error is another one.
    let reset = QpAttr::default();
    r.receivers[1].qp.modify(QP_STATE, &reset).unwrap();
    assert_eq!(r.receivers[0].recvs.len(), 1);
    r.receivers[1].qp.modify(QP_STATE, &error).unwrap();
    r.run();
    assert_eq!(r.events(1), [EVENT_QP_LAST_WQE_REACHED]);
}

/// A key of the first receiver's memory in protection domain 2.
fn key_of_other_domain(end: &End) -> MemoryKey {
    let region = MemoryRegion {
        pd: PdHandle(2),
        iova: IOVA,
        offset: 0,
        length: BYTES,
        access: Access::from_wire(ACCESS_LOCAL_WRITE).unwrap(),
        region: end.region.clone(),
        owner: None,
    };
    end.table.insert(region).unwrap()
}

#[test]
fn requests_name_memory_of_the_domain_of_the_queue() {
    let queue = LocalQueue::default();
    let r = rig_over(NORMAL, queue.clone(), queue, PdHandle(2));
    let lkey = key_of_other_domain(&r.receivers[0]);
    let sent = r.senders[0].fill(7);
    let element = |lkey| Element {
        lkey,
        ..r.receivers[0].element(64, 8)
    };
    r.receivers[0].post_recv(1, &[element(lkey)]);
    r.senders[0].post_send(1, &[r.senders[0].element(0, 8)]);
    r.run();
    assert_eq!(r.receivers[0].next(), Some((1, WC_STATUS_SUCCESS)));
    assert_eq!(r.receivers[0].contents(64, 8), sent[..8]);
    // A key of the queue pair's own domain is none here.
    r.receivers[0].post_recv(2, &[element(r.receivers[0].key)]);
    r.senders[0].post_send(2, &[r.senders[0].element(0, 8)]);
    r.run();
    assert_eq!(r.receivers[0].next(), Some((2, WC_STATUS_LOC_PROT_ERR)));
    // What the peer names is memory of the queue pair's.
    let offset = remote(
        r.senders[1].request(Opcode::Write, 3, &[r.senders[1].element(0, 8)]),
        &r.receivers[1],
        128,
    );
    r.senders[1].sends.post(offset);
    r.run();
    let last = std::iter::from_fn(|| r.senders[1].next()).last();
    assert_eq!(last, Some((3, WC_STATUS_SUCCESS)));
}

/// A dropped message leaves a request of one's own to the next message; what others could have had
/// is complete (IBTA 9.9.3, class E).
#[test]
fn an_unreliable_message_that_is_dropped_completes_the_request_that_it_took() {
    let r = rig(Setup {
        kind: QPT_UC,
        ..NORMAL
    });
    let (sender, receiver) = (&r.senders[0], &r.receivers[0]);
    sender.post_send(1, &[sender.element(0, 8)]);
    r.run();
    assert_eq!(sender.next(), Some((1, WC_STATUS_SUCCESS)), "lost");
    r.post(11, 4);
    sender.post_send(2, &[sender.element(0, 8)]);
    r.run();
    assert_eq!(sender.next(), Some((2, WC_STATUS_SUCCESS)));
    assert_eq!(receiver.next(), Some((11, WC_STATUS_LOC_LEN_ERR)));
    r.post(12, 0);
    let mut write = sender.request(Opcode::WriteImm, 3, &[sender.element(0, 8)]);
    (write.remote_address, write.rkey) = (IOVA, MemoryKey(receiver.key.0 ^ 1));
    sender.sends.post(write);
    r.run();
    assert_eq!(sender.next(), Some((3, WC_STATUS_SUCCESS)));
    assert_eq!(receiver.next(), Some((12, WC_STATUS_REM_ACCESS_ERR)));
    r.post(13, 8);
    let none = Opcode::SendInvalidate(MemoryKey(receiver.key.0 ^ 1));
    let invalidate = sender.request(none, 4, &[sender.element(0, 8)]);
    sender.sends.post(invalidate);
    r.run();
    assert_eq!(sender.next(), Some((4, WC_STATUS_SUCCESS)));
    assert_eq!(receiver.next(), Some((13, WC_STATUS_REM_INV_REQ_ERR)));
    r.post(14, 8);
    sender.post_send(5, &[sender.element(0, 8)]);
    r.run();
    assert_eq!(receiver.next(), Some((14, WC_STATUS_SUCCESS)));
    assert_eq!(receiver.state(), QPS_RTS);
    assert!(r.events(0).is_empty());
}

struct Nonsense;

impl WorkSource<RecvWqe> for Nonsense {
    fn take(&mut self, _: &mut RecvWqe) -> Result<bool, QueueError> {
        Err(QueueError::Index {
            produced: 9,
            consumed: 0,
            entries: 8,
        })
    }

    fn retire(&mut self) {}

    fn queued(&self) -> u32 {
        1
    }

    fn discard(&mut self) {}
}

impl SharedSource for Nonsense {
    fn want_rings(&self, _: bool) {}
}

#[test]
fn a_queue_that_makes_no_sense_breaks_each_connection_that_needs_it() {
    let r = rig_over(NORMAL, LocalQueue::default(), Nonsense, PdHandle(1));
    r.senders[0].post_send(1, &[]);
    r.run();
    assert_eq!(r.senders[0].next(), Some((1, WC_STATUS_REM_OP_ERR)));
    let events = r.events(0);
    assert_eq!(events, [EVENT_QP_FATAL, EVENT_QP_LAST_WQE_REACHED]);
    assert_eq!(r.receivers[1].state(), QPS_RTS, "nobody has sent to it");
    r.senders[1].post_send(2, &[]);
    r.run();
    assert_eq!(r.senders[1].next(), Some((2, WC_STATUS_REM_OP_ERR)));
    assert_eq!(*r.told.lock().unwrap(), [EVENT_SRQ_ERR]);
}

#[test]
fn a_limit_is_told_of_while_messages_arrive() {
    let r = rig(NORMAL);
    (0..5).for_each(|wr_id| r.post(wr_id, 0));
    r.shared.set_limit(3);
    let count = |sent: u64| {
        for wr_id in 0..sent {
            r.senders[0].post_send(wr_id, &[]);
        }
        r.run();
        r.told.lock().unwrap().len()
    };
    assert_eq!(count(2), 0);
    assert_eq!(count(1), 1);
    assert_eq!(count(2), 1);
    assert_eq!(*r.told.lock().unwrap(), [EVENT_SRQ_LIMIT_REACHED]);
}
