//! Extended reliable connections (IBTA annex A14): each message names the shared receive queue that
//! it goes to.

#![allow(clippy::unwrap_used)]

#[path = "reliable_connection/rig.rs"]
#[allow(dead_code, reason = "reliable connections have more to them")]
mod rig;

use farlane_abi::queue::*;
use farlane_abi::rdma::*;
use farlane_rdma_remoting::engine::Receives;
use farlane_rdma_remoting::engine::soft::SoftEngine;
use farlane_rdma_remoting::local::{LocalCompletionQueue, LocalQueue};
use farlane_rdma_remoting::memory::{Access, MemoryRegion, MemoryTable, PdHandle};
use farlane_rdma_remoting::request::{
    Element, Flush, MemoryKey, Opcode, RecvWqe, SendWqe, SrqNumber, Target,
};
use farlane_rdma_remoting::shared_receive_queue::SharedReceives;
use farlane_rdma_remoting::xrc::XrcDomain;
use farlane_zero_copy::{Region, copy_from_slice, copy_to_slice};
use rig::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

const EXTENDED: Setup = Setup {
    kind: QPT_XRC_SEND,
    timeout: 0,
    qp_access: ALL | ACCESS_FLUSH_GLOBAL,
    ..NORMAL
};

/// A shared receive queue of the domain: one of protection domain 10 of the target's context, and
/// one of protection domain 11 of another.
struct Queue {
    recvs: LocalQueue<RecvWqe>,
    shared: Arc<SharedReceives>,
    cq: Arc<LocalCompletionQueue>,
    number: SrqNumber,
    key: MemoryKey,
    region: Region,
    table: Arc<MemoryTable>,
}

struct Rig {
    initiator: End,
    target: End,
    domain: Arc<XrcDomain>,
    queues: [Queue; 2],
    now: Instant,
}

fn rig() -> Rig {
    let engine = SoftEngine::new();
    let domain = Arc::<XrcDomain>::default();
    let initiator = end(&engine, 1, &EXTENDED);
    let setup = Setup {
        kind: QPT_XRC_RECV,
        ..EXTENDED
    };
    let target = end_receiving(
        &engine,
        2,
        &setup,
        LocalCompletionQueue::new(8),
        LocalQueue::default(),
        Receives::Domain(Arc::clone(&domain) as _),
    );
    let own = (Arc::clone(&target.table), target.region.clone());
    let (table, region, _) = memory(&setup, Arc::default());
    let queues = [(10, own), (11, (table, region))].map(|(pd, (table, region))| {
        let recvs = LocalQueue::default();
        let pd = PdHandle(pd);
        let shared = SharedReceives::new(Box::new(recvs.clone()), pd, Box::new(|_| ()));
        let cq = LocalCompletionQueue::new(8);
        let registered = MemoryRegion {
            pd,
            iova: IOVA,
            offset: 0,
            length: BYTES,
            access: Access::from_wire(ALL | ACCESS_FLUSH_GLOBAL).unwrap(),
            region: region.clone(),
            owner: None,
        };
        Queue {
            number: domain.add(&shared, &table, cq.clone()),
            key: table.insert(registered).unwrap(),
            region,
            table,
            recvs,
            shared,
            cq,
        }
    });
    connect(&initiator, &target, 2, [100, 200], &EXTENDED);
    connect(&target, &initiator, 1, [200, 100], &setup);
    Rig {
        initiator,
        target,
        domain,
        queues,
        now: Instant::now(),
    }
}

impl Rig {
    fn run(&self) {
        for _ in 0..1000 {
            let worked = self.initiator.qp.progress(self.now.into()).worked
                | self.target.qp.progress(self.now.into()).worked;
            if !worked {
                return;
            }
        }
        panic!("the engine does not come to rest");
    }

    /// A message of the first `length` bytes to a shared receive queue.
    fn send(&self, wr_id: u64, to: SrqNumber, length: u32) {
        let mut request = self.request(Opcode::Send, wr_id, to, length);
        request.signalled = true;
        self.initiator.sends.post(request);
    }

    fn request(&self, opcode: Opcode, wr_id: u64, to: SrqNumber, length: u32) -> SendWqe {
        let element = self.initiator.element(0, length);
        let mut request = self.initiator.request(opcode, wr_id, &[element]);
        request.target = Target::SharedReceive(to);
        request
    }

    /// A receive request of a queue, for so many bytes at an offset.
    fn post(&self, at: usize, wr_id: u64, offset: u64, length: u32) {
        let queue = &self.queues[at];
        let element = Element {
            address: IOVA + offset,
            length,
            lkey: queue.key,
        };
        let mut request = RecvWqe {
            wr_id,
            ..Default::default()
        };
        request.elements.set(&[element]).unwrap();
        queue.recvs.post(request);
    }

    /// Bytes of the memory of a queue's context.
    fn contents(&self, at: usize, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        copy_to_slice(&self.queues[at].region, offset, &mut bytes).unwrap();
        bytes
    }

    fn received(&self, at: usize) -> Option<(u64, u8)> {
        let completion = self.queues[at].cq.poll()?;
        assert_eq!(completion.qp_num.get(), self.target.qp.number().get());
        Some((completion.wr_id.get(), completion.status))
    }
}

#[test]
fn each_message_goes_to_the_queue_that_it_names_and_completes_there() {
    let r = rig();
    let sent = r.initiator.fill(3);
    for (at, wr_id, offset) in [(1, 7, 64), (0, 8, 128), (1, 9, 192)] {
        r.post(at, wr_id, offset, 16);
    }
    for (at, wr_id, offset) in [(0, 8, 128), (1, 7, 64), (1, 9, 192)] {
        r.send(1, r.queues[at].number, 16);
        r.run();
        assert_eq!(r.initiator.next(), Some((1, WC_STATUS_SUCCESS)));
        assert_eq!(r.received(at), Some((wr_id, WC_STATUS_SUCCESS)));
        assert_eq!(r.received(1 - at), None);
        assert_eq!(r.contents(at, offset, 16), sent[..16]);
        assert_eq!(r.contents(1 - at, offset, 16), [0; 16]);
    }
    assert_eq!(
        r.target.next(),
        None,
        "it has no completion queue of its own"
    );
}

#[test]
fn keys_are_those_of_the_context_and_domain_of_the_named_queue() {
    for (to, of) in [(0, 0), (1, 1), (0, 1), (1, 0)] {
        let r = rig();
        let sent = r.initiator.fill(5);
        let mut write = r.request(Opcode::Write, 2, r.queues[to].number, 32);
        (write.remote_address, write.rkey) = (IOVA + 512, r.queues[of].key);
        r.initiator.sends.post(write);
        r.run();
        let (status, written) = match to == of {
            true => (WC_STATUS_SUCCESS, &sent[..32]),
            false => (WC_STATUS_REM_ACCESS_ERR, &[0; 32][..]),
        };
        assert_eq!(r.initiator.next(), Some((2, status)), "{to} {of}");
        assert_eq!(r.contents(to, 512, 32), written);
        assert_eq!(r.contents(1 - to, 512, 32), [0; 32]);
        assert_eq!(r.target.state() == QPS_ERR, to != of);

        let r = rig();
        let length = Some(32);
        let flush = Opcode::Flush(Flush {
            length,
            is_persistent: false,
        });
        let mut flush = r.request(flush, 3, r.queues[to].number, 0);
        flush.elements.set(&[]).unwrap();
        (flush.remote_address, flush.rkey) = (IOVA, r.queues[of].key);
        r.initiator.sends.post(flush);
        r.run();
        assert_eq!(r.initiator.next(), Some((3, status)), "{to} {of}");
    }
}

#[test]
fn a_number_that_the_domain_does_not_have_breaks_the_connection() {
    let of_another = XrcDomain::default();
    let queue = LocalQueue::<RecvWqe>::default();
    let shared = SharedReceives::new(Box::new(queue), PdHandle(10), Box::new(|_| ()));
    let foreign = loop {
        let table = Arc::new(MemoryTable::new(1));
        let number = of_another.add(&shared, &table, LocalCompletionQueue::new(1));
        if rig().queues.iter().all(|queue| queue.number != number) {
            break number;
        }
    };
    for number in [foreign, SrqNumber::of(0)] {
        let r = rig();
        r.send(1, number, 8);
        r.run();
        let failed = Some((1, WC_STATUS_REM_INV_REQ_ERR));
        assert_eq!(r.initiator.next(), failed);
        assert_eq!(*r.target.events.lock().unwrap(), [EVENT_QP_REQ_ERR]);
    }
    // One that names nothing at all.
    let r = rig();
    r.initiator.post_send(1, &[]);
    r.run();
    assert_eq!(r.initiator.next(), Some((1, WC_STATUS_REM_INV_REQ_ERR)));
}

#[test]
fn who_waits_for_one_queue_and_then_for_another_is_woken_by_that() {
    let mut r = rig();
    let [first, second] = [0, 1].map(|at| r.queues[at].number);
    r.send(1, first, 8);
    r.send(2, second, 8);
    r.run();
    assert!(!r.queues[0].shared.is_awaited() && !r.initiator.qp.is_ready());
    // It finds the request by itself, and is in the list still.
    r.post(0, 7, 0, 8);
    r.now += Duration::from_secs(1);
    r.run();
    assert_eq!(r.initiator.next(), Some((1, WC_STATUS_SUCCESS)));
    r.initiator.was_scheduled();
    r.post(1, 8, 0, 8);
    assert!(r.queues[1].shared.pass_on(), "it waits for the second one");
    assert!(r.initiator.was_scheduled());
    r.run();
    assert_eq!(r.initiator.next(), Some((2, WC_STATUS_SUCCESS)));
    r.post(0, 9, 0, 8);
    assert!(
        !r.queues[0].shared.is_awaited(),
        "nobody waits for the first"
    );
}

#[test]
fn who_waits_for_a_queue_that_is_destroyed_is_told() {
    let r = rig();
    r.send(1, r.queues[0].number, 8);
    r.run();
    assert_eq!(r.initiator.next(), None);
    r.initiator.was_scheduled();
    r.domain.remove(r.queues[0].number);
    assert!(r.initiator.was_scheduled());
    r.run();
    let failed = Some((1, WC_STATUS_REM_INV_REQ_ERR));
    assert_eq!(r.initiator.next(), failed);
}

#[test]
fn a_queue_that_is_destroyed_ends_the_message_under_way_and_completes_nothing() {
    // Longer than a turn.
    const LENGTH: u32 = 3 << 20;
    for opcode in [Opcode::Send, Opcode::WriteImm, Opcode::Write] {
        let r = rig();
        r.initiator.fill(3);
        r.post(0, 7, 0, LENGTH);
        r.post(0, 8, 0, 8);
        let taken = usize::from(opcode != Opcode::Write);
        let mut request = r.request(opcode, 1, r.queues[0].number, LENGTH);
        (request.remote_address, request.rkey) = (IOVA, r.queues[0].key);
        r.initiator.sends.post(request);
        assert!(r.initiator.qp.progress(r.now.into()).worked);
        assert_eq!(r.queues[0].recvs.len(), 2 - taken);
        let so_far = r.target.contents(0, LENGTH.try_into().unwrap());
        let sent = r.initiator.contents(0, 1);
        assert_eq!((so_far[0], so_far.last()), (sent[0], Some(&0)));
        r.domain.remove(r.queues[0].number);
        r.run();
        let failed = Some((1, WC_STATUS_REM_INV_REQ_ERR));
        assert_eq!(r.initiator.next(), failed, "{opcode:?}");
        assert_eq!(*r.target.events.lock().unwrap(), [EVENT_QP_REQ_ERR]);
        assert!(r.target.contents(0, LENGTH.try_into().unwrap()) == so_far);
        assert_eq!(r.received(0), None);
        assert_eq!(r.queues[0].recvs.len(), 2 - taken, "nothing is taken");
    }
}

/// Whatever a turn on another thread has in hand then.
#[test]
fn nothing_is_written_for_a_queue_once_it_is_destroyed() {
    const LENGTH: usize = 2 << 20;
    for round in 0..16 {
        let r = rig();
        let length = u32::try_from(LENGTH).unwrap();
        copy_from_slice(&r.initiator.region, 0, &vec![7; LENGTH]).unwrap();
        r.post(0, 7, 0, length);
        r.send(1, r.queues[0].number, length);
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                loop {
                    r.initiator.qp.progress(r.now.into());
                    if let Some(completion) = r.initiator.next() {
                        break completion;
                    }
                }
            });
            while !r.queues[0].recvs.is_empty() {
                std::thread::yield_now();
            }
            // Early and late in the message.
            for _ in 0..round {
                std::thread::yield_now();
            }
            r.domain.remove(r.queues[0].number);
            let so_far = r.target.contents(0, LENGTH);
            let completed = r.received(0);
            let (_, status) = sender.join().unwrap();
            assert!(r.target.contents(0, LENGTH) == so_far);
            assert_eq!(r.received(0), None);
            match status {
                WC_STATUS_SUCCESS => assert!(so_far.iter().all(|byte| *byte == 7)),
                failed => assert_eq!((failed, completed), (WC_STATUS_REM_INV_REQ_ERR, None)),
            }
        });
    }
}

#[test]
fn who_has_received_into_a_queue_does_not_keep_it() {
    let r = rig();
    for opcode in [Opcode::Send, Opcode::Write] {
        let recvs = LocalQueue::<RecvWqe>::default();
        let pd = PdHandle(10);
        let shared = SharedReceives::new(Box::new(recvs.clone()), pd, Box::new(|_| ()));
        let number = r
            .domain
            .add(&shared, &r.queues[1].table, LocalCompletionQueue::new(1));
        recvs.post(RecvWqe::default());
        let mut request = r.request(opcode, 1, number, 0);
        request.elements.set(&[]).unwrap();
        r.initiator.sends.post(request);
        r.run();
        assert_eq!(r.initiator.next(), Some((1, WC_STATUS_SUCCESS)));
        let known = Arc::downgrade(&shared);
        drop(shared);
        r.domain.remove(number);
        assert!(known.upgrade().is_none(), "{opcode:?}");
    }
}

#[test]
fn a_target_sends_nothing_and_answers_nobody_but_an_initiator() {
    let r = rig();
    let mut request = r.request(Opcode::Send, 1, r.queues[0].number, 0);
    request.elements.set(&[]).unwrap();
    r.target.sends.post(request);
    r.run();
    assert_eq!(r.target.next(), Some((1, WC_STATUS_LOC_QP_OP_ERR)));
    let engine = SoftEngine::new();
    let reliable = end(&engine, 1, &NORMAL);
    let setup = Setup {
        kind: QPT_XRC_RECV,
        ..NORMAL
    };
    let target = end_receiving(
        &engine,
        2,
        &setup,
        LocalCompletionQueue::new(8),
        LocalQueue::default(),
        Receives::Domain(Arc::clone(&r.domain) as _),
    );
    connect(&reliable, &target, 2, [100, 200], &NORMAL);
    connect(&target, &reliable, 1, [200, 100], &setup);
    reliable.post_send(1, &[]);
    for _ in 0..10 {
        reliable.qp.progress(Instant::now().into());
    }
    assert_eq!(reliable.next(), None);
    assert!(!reliable.qp.is_ready());
}
