//! Extended reliable connections of a program.

use super::*;
use crate::FileId;
use crate::memory::Binder;
use crate::request::{Binding, MemoryKey};
use crate::xrc_target::MAX_OPENERS;
use farlane_abi::queue::{
    OP_LOCAL_INVALIDATE, QpLayout, SEND_TAIL, SendTail, WC_STATUS_REM_INV_REQ_ERR,
    WC_STATUS_SUCCESS,
};

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
        self.post_next(initiator, 0, entry, tail);
        Program::settle(&[self]);
    }

    /// Posts a request behind so many others.
    fn post_next(&self, initiator: &Qp, behind: u32, entry: &SendEntry, tail: &SendTail) {
        let layout = QpLayout::of(VerbsVersion::V2, 4, 1, 0, 0, 0).unwrap();
        let at = usize::try_from(behind % 4).unwrap() * layout.send_stride;
        let at = page(INITIATOR) + QP_OFF_ENTRIES + at;
        self.pages.write(at, entry).unwrap();
        let at = at + size_of::<SendEntry>();
        self.pages.write(at, tail).unwrap();
        self.set(INITIATOR, QP_OFF_SEND_PRODUCED, behind + 1);
        ring(self, slot_of(initiator.handle.get()).unwrap());
    }

    /// Opens the domain of file 7, which is shown as region 6.
    fn open_domain(&self, flags: u32) -> Result<Handle, Errno> {
        let shown = self.context.attach_file(region(6), FileId(0, 7));
        assert!(matches!(shown, Ok(()) | Err(Errno::EEXIST)));
        self.host().open_xrcd_of(OpenXrcd {
            region: 6.into(),
            flags: flags.into(),
        })
    }

    /// A shared receive queue of a domain, in page 1.
    fn srq_of(&self, xrcd: Handle) -> Srq {
        let create = CreateSrq {
            xrcd,
            cq: self.cq,
            ..self.create_srq(1)
        };
        self.host().create_srq(create).unwrap()
    }
}

/// A message without bytes, and whom it is for.
fn message(number: u64, to: &Srq) -> (SendEntry, SendTail) {
    let entry = SendEntry {
        wr_id: number.into(),
        opcode: OP_SEND,
        flags: SEND_SIGNALED | SEND_TAIL,
        ..Default::default()
    };
    let tail = SendTail {
        a: u64::from(to.number.get()).into(),
        ..Default::default()
    };
    (entry, tail)
}

#[test]
fn contexts_of_a_tenant_have_the_domain_of_a_file_together() {
    let server = Server::without_workers();
    let (one, other) = (port(&server, 1), port(&server, 2));
    let (p, q) = (Program::start_as(&one, 0), Program::start_as(&one, 1));
    let stranger = Program::start(&other);
    assert_eq!(p.open_domain(0), Err(Errno::EAGAIN));
    assert_eq!(p.open_domain(4), Err(Errno::EINVAL));
    let xrcd = p.open_domain(XRCD_CREATE | XRCD_EXCLUSIVE).unwrap();
    assert_eq!(
        q.open_domain(XRCD_CREATE | XRCD_EXCLUSIVE),
        Err(Errno::EINVAL)
    );
    let opened = q.open_domain(0).unwrap();
    // A number of a file says nothing in another VM.
    assert_eq!(stranger.open_domain(0), Err(Errno::EAGAIN));
    // The file is what it is while a domain is open by it.
    assert_eq!(p.context.detach(region(6)), Err(Errno::EBUSY));
    for bad in [QUEUES, 0, 5, u32::MAX] {
        let refused = p.host().open_xrcd_of(OpenXrcd {
            region: bad.into(),
            flags: XRCD_CREATE.into(),
        });
        assert_eq!(refused, Err(Errno::EINVAL), "{bad}");
    }
    // Each is busy by what its own context has there.
    let srq = q.srq_of(opened);
    assert_eq!(q.host().close_xrcd(opened), Err(Errno::EBUSY));
    p.host().close_xrcd(xrcd).unwrap();
    p.context.detach(region(6)).unwrap();
    let xrcd = p.open_domain(0).unwrap();
    q.host().destroy_srq(srq.handle).unwrap();
    q.host().close_xrcd(opened).unwrap();
    p.host().close_xrcd(xrcd).unwrap();
    assert_eq!(p.open_domain(0), Err(Errno::EAGAIN));
}

/// An initiator at another port, a target that the first program has made and the second one has
/// opened, and a queue of the second one.
struct Shared {
    sender: Program,
    initiator: Qp,
    made: (Program, Qp),
    opened: (Program, Qp),
    srq: Srq,
}

impl Shared {
    fn new(server: &Arc<Server>) -> Self {
        let (one, other) = (port(server, 1), port(server, 2));
        let (p, q) = (Program::start_as(&one, 0), Program::start_as(&one, 1));
        let sender = Program::start(&other);
        let initiator = sender.extended(QPT_XRC_SEND, INITIATOR, 0.into());
        let xrcd = p.open_domain(XRCD_CREATE).unwrap();
        let target = p.extended(QPT_XRC_RECV, TARGET, xrcd);
        let (send, receive) = ([UC_TO_RTR, QP_TO_RTS], [QP_TO_RTR, XRC_TARGET_TO_RTS]);
        sender.connect_by(initiator.handle, &p, target.qp_num, send);
        p.connect_by(target.handle, &sender, initiator.qp_num, receive);
        let xrcd = q.open_domain(0).unwrap();
        let srq = q.srq_of(xrcd);
        let open = |qp_num: U32| q.host().open_qp(OpenQp { xrcd, qp_num });
        for bad in [0, initiator.qp_num.get(), u32::MAX] {
            assert_eq!(open(bad.into()), Err(Errno::EINVAL), "{bad}");
        }
        let opened = open(target.qp_num).unwrap();
        assert_eq!(opened.qp_num, target.qp_num);
        Self {
            sender,
            initiator,
            made: (p, target),
            opened: (q, opened),
            srq,
        }
    }

    /// Sends the next message to the queue, which has a request for it. Returns how it completes
    /// at the sender.
    fn send(&self, behind: u32) -> Option<u8> {
        let q = &self.opened.0;
        q.set(1, QP_OFF_RECV_PRODUCED, behind + 1);
        let (entry, tail) = message(behind.into(), &self.srq);
        self.sender
            .post_next(&self.initiator, behind, &entry, &tail);
        Program::settle(&[&self.sender, &self.made.0, q]);
        let completions = self.sender.completions();
        let of_this = completions.get(usize::try_from(behind).unwrap());
        of_this.map(|(_, status)| *status)
    }
}

#[test]
fn a_message_reaches_a_queue_of_another_context_of_the_domain() {
    let server = Server::without_workers();
    let shared = Shared::new(&server);
    assert_eq!(shared.send(0), Some(WC_STATUS_SUCCESS));
    assert_eq!(shared.opened.0.completions(), [(0, 0)]);
    assert_eq!(shared.made.0.completions(), []);
}

#[test]
fn a_target_outlives_who_has_made_it_and_ends_with_the_last_who_has_it_open() {
    let server = Server::without_workers();
    for closes_context in [false, true] {
        let shared = Shared::new(&server);
        let (p, target) = &shared.made;
        let (q, opened) = &shared.opened;
        assert_eq!(shared.send(0), Some(WC_STATUS_SUCCESS));
        if closes_context {
            p._port.close(ContextId::new(0).unwrap()).unwrap();
        } else {
            p.host().destroy_qp(target.handle).unwrap();
        }
        assert_eq!(shared.send(1), Some(WC_STATUS_SUCCESS), "{closes_context}");
        assert_eq!(q.completions().len(), 2);
        let state = q.host().query_qp(opened.handle).unwrap().qp_state;
        assert_eq!(state, QPS_RTS);
        q.host().destroy_qp(opened.handle).unwrap();
        let counters = server.counters();
        assert_eq!(counters.queue_pairs.load(Ordering::Relaxed), 1);
        // Nobody answers.
        assert_eq!(shared.send(2), None);
        drop(shared);
    }
}

/// Each is told, by whoever has something to tell: a peer's message, too.
#[test]
fn a_target_is_open_to_so_many_at_once() {
    let server = Server::without_workers();
    let shared = Shared::new(&server);
    let (q, opened) = &shared.opened;
    let xrcd = q.open_domain(0).unwrap();
    let qp_num = opened.qp_num;
    let open = || q.host().open_qp(OpenQp { xrcd, qp_num });
    // Who has made it and who has opened it have it open.
    let others: Vec<_> = (2..MAX_OPENERS).map(|_| open().unwrap()).collect();
    assert_eq!(open(), Err(Errno::ENOMEM));
    q.host().destroy_qp(others[0].handle).unwrap();
    open().unwrap();
    assert_eq!(open(), Err(Errno::ENOMEM));
    assert_eq!(shared.send(0), Some(WC_STATUS_SUCCESS));
}

#[test]
fn each_who_has_a_target_open_is_told_of_its_events() {
    let server = Server::without_workers();
    let shared = Shared::new(&server);
    let (p, target) = &shared.made;
    let (q, opened) = &shared.opened;
    let (entry, mut tail) = message(0, &shared.srq);
    tail.a = 0.into();
    shared.sender.post_next(&shared.initiator, 0, &entry, &tail);
    Program::settle(&[&shared.sender, q]);
    assert_eq!(
        shared.sender.completions(),
        [(0, WC_STATUS_REM_INV_REQ_ERR)]
    );
    assert_eq!(p.events(), [(EVENT_QP_REQ_ERR, target.handle.get())]);
    assert_eq!(q.events(), [(EVENT_QP_REQ_ERR, opened.handle.get())]);
    // What one has changed the other one sees.
    p.host()
        .modify_qp(ModifyQp {
            qp: target.handle,
            mask: QP_STATE.into(),
            attr: QpAttr {
                qp_state: QPS_RESET,
                ..Default::default()
            },
        })
        .unwrap();
    let state = q.host().query_qp(opened.handle).unwrap().qp_state;
    assert_eq!(state, QPS_RESET);
}

#[test]
fn a_context_that_ends_takes_its_queues_out_of_the_domain() {
    const NAME: &str = "queue of a context that ends";
    let server = Server::without_workers();
    let shared = Shared::new(&server);
    let (q, _) = &shared.opened;
    let (theirs, requests) = shared_memory(NAME);
    q.context.attach_segment(region(5), theirs).unwrap();
    let xrcd = q.open_domain(0).unwrap();
    let create = CreateSrq {
        xrcd,
        cq: q.cq,
        region: 5.into(),
        ..q.create_srq(0)
    };
    let srq = q.host().create_srq(create).unwrap();
    requests
        .word(QP_OFF_RECV_PRODUCED)
        .unwrap()
        .store(1, Ordering::SeqCst);
    drop(requests);
    let (entry, tail) = message(0, &srq);
    shared.sender.post_next(&shared.initiator, 0, &entry, &tail);
    Program::settle(&[&shared.sender, &shared.made.0, q]);
    assert_eq!(shared.sender.completions(), [(0, WC_STATUS_SUCCESS)]);
    assert_eq!(mapped(NAME), 1);
    q._port.close(ContextId::new(1).unwrap()).unwrap();
    assert_eq!(mapped(NAME), 0);
    let (entry, tail) = message(1, &srq);
    shared.sender.post_next(&shared.initiator, 1, &entry, &tail);
    Program::settle(&[&shared.sender, &shared.made.0]);
    let failed = (1, WC_STATUS_REM_INV_REQ_ERR);
    assert_eq!(
        shared.sender.completions(),
        [(0, WC_STATUS_SUCCESS), failed]
    );
}

fn shared_memory(name: &str) -> (farlane_zero_copy::Region, SharedMemory) {
    shared(name, PAGE_BYTES)
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
    all_who_wait_learn_the_end(true, false);
}

/// The queue's context ends, and those who wait are of another one.
#[test]
fn all_who_wait_learn_that_the_context_of_a_queue_of_a_domain_has_ended() {
    all_who_wait_learn_the_end(false, true);
    all_who_wait_learn_the_end(true, true);
}

/// Of a queue that is destroyed, or whose context is closed.
fn all_who_wait_learn_the_end(is_destroyed: bool, is_closed: bool) {
    const PAIRS: u32 = 150;
    const MORE: u32 = 2;
    let server = Server::without_workers();
    let vm = port(&server, 1);
    let (p, q) = (Program::start_as(&vm, 0), Program::start_as(&vm, 1));
    let (theirs, more) = shared("more", u64::from(2 * PAIRS) * PAGE_BYTES);
    p.context.attach_segment(region(MORE), theirs).unwrap();
    let xrcd = p.open_domain(XRCD_CREATE).unwrap();
    let srq = q.srq_of(q.open_domain(0).unwrap());
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
    Program::settle(&[&p, &q]);
    let failed = || {
        let state = |qp: &&Handle| p.host().query_qp(**qp).unwrap().qp_state;
        initiators.iter().filter(|qp| state(qp) == QPS_ERR).count()
    };
    assert_eq!(failed(), 0);
    if is_destroyed {
        q.host().destroy_srq(srq.handle).unwrap();
    }
    if is_closed {
        vm.close(ContextId::new(1).unwrap()).unwrap();
    }
    Program::settle(&[&p, &q]);
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
