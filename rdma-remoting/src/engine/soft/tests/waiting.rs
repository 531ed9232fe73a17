//! Targets of extended reliable connections in the lists of shared receive queues.

use super::*;
use crate::engine::soft::target::Target;
use crate::request::{SrqNumber, Target as RequestTarget};
use crate::schedule::Schedule;
use crate::shared_receive_queue::SharedReceives;
use crate::xrc::XrcDomain;
use farlane_abi::rdma::{QP_STATE, QPS_RESET, QPT_XRC_RECV};

struct Queue {
    recvs: LocalQueue<RecvWqe>,
    shared: Arc<SharedReceives>,
    number: SrqNumber,
}

struct Rig {
    domain: Arc<XrcDomain>,
    qp: SoftQp,
    target: Arc<Target>,
}

fn rig() -> Rig {
    let (fabric, domain) = (Arc::<Fabric>::default(), Arc::<XrcDomain>::default());
    let owner = Owner {
        spec: ContextSpec::default(),
        memory: Arc::new(MemoryTable::new(1)),
    };
    let spec = QpSpec {
        kind: QPT_XRC_RECV,
        pd: PdHandle::NONE,
        depths: QpDepths::default(),
        sends: Box::new(LocalQueue::<SendWqe>::default()),
        recvs: Receives::Domain(Arc::clone(&domain) as _),
        send_cq: None,
        recv_cq: None,
        signal_all: true,
        schedule: Arc::new(|| ()),
        events: Box::new(|_| ()),
    };
    let qp = SoftQp::new(&owner, spec, Transport::XrcTarget, &fabric, 1).unwrap();
    let target = fabric.find(QpName {
        destination: Destination::Gid(RawGid::default()),
        number: qp.number(),
    });
    Rig {
        domain,
        qp,
        target: target.unwrap(),
    }
}

impl Rig {
    fn queue(&self) -> Queue {
        let recvs = LocalQueue::default();
        let events = Box::new(|_| ());
        let shared = SharedReceives::new(Box::new(recvs.clone()), PdHandle(1), events);
        Queue {
            number: self.domain.add(
                &shared,
                &self.target.common.memory,
                LocalCompletionQueue::new(1),
            ),
            recvs,
            shared,
        }
    }

    /// A message has come for a queue that had no request; before the target waits, that happens.
    fn wait_after(&self, number: SrqNumber, happens: impl FnOnce()) {
        let qp = &self.target.common;
        let mut responder = self.target.responder();
        let named = RequestTarget::SharedReceive(number);
        responder.address(qp, named).unwrap();
        happens();
        responder.await_receive(qp);
    }

    fn wait(&self, number: SrqNumber) {
        self.wait_after(number, || ());
    }
}

#[test]
fn a_queue_that_is_destroyed_before_it_is_waited_for_keeps_nobody_from_waiting_for_another() {
    let r = rig();
    let (first, second) = (r.queue(), r.queue());
    let number = first.number;
    r.wait_after(number, || {
        r.domain.remove(number);
        drop(first);
    });
    r.wait(second.number);
    second.recvs.post(RecvWqe::default());
    assert!(second.shared.is_awaited());
}

#[test]
fn a_target_that_is_reset_waits_for_nothing() {
    let r = rig();
    let queue = r.queue();
    r.wait(queue.number);
    queue.recvs.post(RecvWqe::default());
    assert!(queue.shared.is_awaited());
    let reset = QpAttr {
        qp_state: QPS_RESET,
        ..QpAttr::default()
    };
    r.qp.modify(QP_STATE, &reset).unwrap();
    assert!(!queue.shared.is_awaited());
    r.wait(queue.number);
    assert!(queue.shared.is_awaited());
    r.qp.destroy();
    assert!(!queue.shared.is_awaited());
}

#[test]
fn who_is_told_late_of_one_queue_is_in_the_list_of_the_next_once() {
    let r = Arc::new(rig());
    let (first, second) = (r.queue(), r.queue());
    // Told before the target, when both have been taken from the list.
    let other: Arc<dyn Schedule> = Arc::new({
        let (r, number) = (Arc::clone(&r), second.number);
        move || r.wait(number)
    });
    first.shared.wait(Arc::downgrade(&other));
    r.wait(first.number);
    (0..2).for_each(|_| first.recvs.post(RecvWqe::default()));
    assert!(first.shared.pass_on());
    r.wait(second.number);
    second.recvs.post(RecvWqe::default());
    assert!(second.shared.pass_on());
    second.recvs.post(RecvWqe::default());
    assert!(!second.shared.is_awaited(), "it is there twice");
    r.qp.destroy();
}
