//! Extended reliable connections of a program.

use super::*;
use crate::memory::Binder;
use crate::request::{Binding, MemoryKey};
use farlane_abi::queue::{OP_LOCAL_INVALIDATE, SEND_TAIL, SendTail};

/// Page of the initiator's queue, and of the target, which has none.
const INITIATOR: u32 = 2;
const TARGET: u32 = 3;

impl Program {
    /// An initiator's queue pair, or a target's, by its type.
    fn extended(&self, qp_type: u32, at: u32, xrcd: Handle) -> Qp {
        self.extended_in((QUEUES, at), qp_type, xrcd)
    }

    /// The same, whose queue is at a page of that region.
    fn extended_in(&self, (region, at): (u32, u32), qp_type: u32, xrcd: Handle) -> Qp {
        let (pd, cq) = match qp_type {
            QPT_XRC_RECV => (0.into(), 0.into()),
            _ => (self.pd, self.cq),
        };
        let made = self.host().create_qp_ex(CreateQpEx {
            base: CreateQp {
                pd,
                send_cq: cq,
                recv_cq: cq,
                qp_type: qp_type.into(),
                send_wr: 4.into(),
                send_sge: 1.into(),
                region: region.into(),
                offset: u32::try_from(page(at)).unwrap().into(),
                ..Default::default()
            },
            xrcd,
            ..Default::default()
        });
        made.unwrap()
    }

    /// An initiator that is connected to a target of the domain.
    fn extended_pair(&self, xrcd: Handle) -> Qp {
        let initiator = self.extended(QPT_XRC_SEND, INITIATOR, 0.into());
        let target = self.extended(QPT_XRC_RECV, TARGET, xrcd);
        self.connect_pair(initiator, target)
    }

    fn connect_pair(&self, initiator: Qp, target: Qp) -> Qp {
        let (send, receive) = ([UC_TO_RTR, QP_TO_RTS], [QP_TO_RTR, XRC_TARGET_TO_RTS]);
        self.connect_by(initiator.handle, self, target.qp_num, send);
        self.connect_by(target.handle, self, initiator.qp_num, receive);
        initiator
    }

    /// Has the initiator carry out a request, its first one.
    fn post(&self, initiator: &Qp, entry: &SendEntry, tail: &SendTail) {
        let at = page(INITIATOR) + QP_OFF_ENTRIES;
        self.pages.write(at, entry).unwrap();
        let at = at + size_of::<SendEntry>();
        self.pages.write(at, tail).unwrap();
        self.set(INITIATOR, QP_OFF_SEND_PRODUCED, 1);
        ring(self, slot_of(initiator.handle.get()).unwrap());
        Program::settle(&[self]);
    }
}

#[test]
fn an_initiator_invalidates_a_key_of_its_own() {
    let server = Server::without_workers();
    let p = Program::start(&port(&server, 1));
    let xrcd = p.host().open_xrcd(()).unwrap();
    let initiator = p.extended_pair(xrcd);
    let pin = memory("behind a window", PAGE_BYTES);
    p.context.attach_pin(region(5), pin).unwrap();
    let made = p.host().reg_mr(RegMr {
        pd: p.pd,
        access: (ACCESS_LOCAL_WRITE | ACCESS_MW_BIND).into(),
        source: MR_SOURCE_PIN.into(),
        object: 5.into(),
        length: PAGE_BYTES.into(),
        ..Default::default()
    });
    let behind = made.unwrap();
    let window = p.host().alloc_mw(AllocMw {
        pd: p.pd,
        mw_type: MW_TYPE_2.into(),
    });
    let key = MemoryKey(window.unwrap().rkey.get());
    let binding = Binding {
        window: key,
        key,
        region: MemoryKey(behind.lkey.get()),
        address: 0,
        length: PAGE_BYTES,
        access: ACCESS_REMOTE_WRITE,
    };
    let binder = (domain(&p.context, p.pd), Binder::new_one());
    p.context
        .engine_context
        .memory()
        .bind(binder, &binding)
        .unwrap();
    assert_eq!(p.host().dereg_mr(behind.handle), Err(Errno::EBUSY));
    let entry = SendEntry {
        wr_id: 7.into(),
        opcode: OP_LOCAL_INVALIDATE,
        flags: SEND_SIGNALED,
        imm: key.0.into(),
        ..Default::default()
    };
    p.post(&initiator, &entry, &SendTail::default());
    assert_eq!(p.completions(), [(7, 0)]);
    p.host().dereg_mr(behind.handle).unwrap();
}

/// Many wait for one queue of a domain, and its end is told to some of them in a turn.
#[test]
fn all_who_wait_learn_that_a_queue_of_a_domain_was_destroyed() {
    const PAIRS: u32 = 150;
    const MORE: u32 = 2;
    let server = Server::without_workers();
    let p = Program::start(&port(&server, 1));
    let (theirs, more) = shared("more", u64::from(2 * PAIRS) * PAGE_BYTES);
    p.context.attach_segment(region(MORE), theirs).unwrap();
    let xrcd = p.host().open_xrcd(()).unwrap();
    let create = CreateSrq {
        xrcd,
        cq: p.cq,
        ..p.create_srq(1)
    };
    let srq = p.host().create_srq(create).unwrap();
    let initiators = (0..PAIRS).map(|at| {
        let initiator = p.extended_in((MORE, 2 * at), QPT_XRC_SEND, 0.into());
        let target = p.extended_in((MORE, 2 * at + 1), QPT_XRC_RECV, xrcd);
        p.connect_pair(initiator, target);
        let entry = SendEntry {
            opcode: OP_SEND,
            flags: SEND_TAIL,
            ..Default::default()
        };
        let tail = SendTail {
            a: u64::from(srq.number.get()).into(),
            ..Default::default()
        };
        let entries = page(2 * at) + QP_OFF_ENTRIES;
        more.write(entries, &entry).unwrap();
        more.write(entries + size_of::<SendEntry>(), &tail).unwrap();
        let produced = more.word(page(2 * at) + QP_OFF_SEND_PRODUCED).unwrap();
        produced.store(1, Ordering::SeqCst);
        ring(&p, slot_of(initiator.handle.get()).unwrap());
        initiator.handle
    });
    let initiators: Vec<_> = initiators.collect();
    Program::settle(&[&p]);
    let failed = || {
        let state = |qp: &&Handle| p.host().query_qp(**qp).unwrap().qp_state;
        initiators.iter().filter(|qp| state(qp) == QPS_ERR).count()
    };
    assert_eq!(failed(), 0);
    p.host().destroy_srq(srq.handle).unwrap();
    Program::settle(&[&p]);
    assert_eq!(failed(), initiators.len());
}

#[test]
fn a_queue_that_is_destroyed_is_mapped_no_more_whoever_has_received_into_it() {
    const NAME: &str = "queue of a domain";
    let server = Server::without_workers();
    let p = Program::start(&port(&server, 1));
    let xrcd = p.host().open_xrcd(()).unwrap();
    let initiator = p.extended_pair(xrcd);
    let (theirs, requests) = shared(NAME, PAGE_BYTES);
    p.context.attach_segment(region(5), theirs).unwrap();
    let create = CreateSrq {
        xrcd,
        cq: p.cq,
        region: 5.into(),
        ..p.create_srq(0)
    };
    let srq = p.host().create_srq(create).unwrap();
    // A request without elements, and a message without bytes.
    let produced = requests.word(QP_OFF_RECV_PRODUCED).unwrap();
    produced.store(1, Ordering::SeqCst);
    let entry = SendEntry {
        wr_id: 7.into(),
        opcode: OP_SEND,
        flags: SEND_SIGNALED | SEND_TAIL,
        ..Default::default()
    };
    let tail = SendTail {
        a: u64::from(srq.number.get()).into(),
        ..Default::default()
    };
    p.post(&initiator, &entry, &tail);
    assert_eq!(p.completions(), [(7, 0), (0, 0)]);
    drop(requests);
    assert_eq!(mapped(NAME), 1);
    p.host().destroy_srq(srq.handle).unwrap();
    p.context.detach(region(5)).unwrap();
    assert_eq!(mapped(NAME), 0);
}
