//! Shared receive queues of a program: what it may ask for.

use super::*;
use crate::objects::MAX_PDS;
use crate::{Limits, PortConfig};
use farlane_abi::arena::{
    HEADER_SEGMENT_BYTES, OFF_ASYNC_PRODUCED, OFF_ASYNC_RING, OFF_RUNG, OFF_RUNG_SUMMARY,
};
use farlane_abi::queue::{
    CQ_OFF_ENTRIES, CQ_OFF_PRODUCED, Completion, MAX_SGE, MAX_WQ_ENTRIES, OP_SEND, QP_OFF_ENTRIES,
    QP_OFF_RECV_PRODUCED, QP_OFF_SEND_PRODUCED, SEND_SIGNALED, SendEntry,
};
use farlane_abi::rdma::*;
use farlane_zero_copy::SharedMemory;
use std::sync::atomic::Ordering;
use std::time::Duration;

mod extended_connections;
mod resizing;
mod waiting;

/// A program of version 2: its segments are the pages of one file.
struct Program {
    _port: Arc<Port>,
    context: Arc<Context>,
    header: SharedMemory,
    pages: SharedMemory,
    pd: Handle,
    cq: Handle,
}

/// Region of its queues.
const QUEUES: u32 = 1;
/// Page of its completion queue.
const CQ_PAGE: u32 = 0;

fn page(at: u32) -> usize {
    usize::try_from(u64::from(at) * PAGE_BYTES).unwrap()
}

impl Program {
    fn start(port: &Arc<Port>) -> Self {
        Self::start_as(port, 0)
    }

    /// As the context of this id.
    fn start_as(port: &Arc<Port>, id: u32) -> Self {
        let context = open(port, id);
        let (theirs, header) = shared("header", HEADER_SEGMENT_BYTES);
        context.attach_segment(region(0), theirs).unwrap();
        let (theirs, pages) = shared("queues", 8 * PAGE_BYTES);
        context.attach_segment(region(QUEUES), theirs).unwrap();
        let mut host = CallHost::new(&context);
        host.negotiate(VersionRange::ours()).unwrap();
        let pd = host.alloc_pd(()).unwrap();
        let cq = host.create_cq(CreateCq {
            entries: 16.into(),
            region: QUEUES.into(),
            ..Default::default()
        });
        let cq = cq.unwrap();
        Self {
            _port: Arc::clone(port),
            context,
            header,
            pages,
            pd,
            cq,
        }
    }

    fn host(&self) -> CallHost<'_> {
        CallHost::new(&self.context)
    }

    fn create_srq(&self, at: u32) -> CreateSrq {
        CreateSrq {
            pd: self.pd,
            region: QUEUES.into(),
            offset: u32::try_from(page(at)).unwrap().into(),
            requests: 8.into(),
            elements: 1.into(),
            ..Default::default()
        }
    }

    fn srq(&self, at: u32) -> Handle {
        self.host().create_srq(self.create_srq(at)).unwrap().handle
    }

    fn qp(&self, at: u32, srq: Handle) -> Result<Qp, Errno> {
        self.host().create_qp_ex(CreateQpEx {
            base: CreateQp {
                pd: self.pd,
                send_cq: self.cq,
                recv_cq: self.cq,
                qp_type: QPT_RC.into(),
                send_wr: 4.into(),
                send_sge: 1.into(),
                region: QUEUES.into(),
                offset: u32::try_from(page(at)).unwrap().into(),
                ..Default::default()
            },
            srq,
            ..Default::default()
        })
    }

    fn word(&self, at: u32, offset: usize) -> u32 {
        let word = self.pages.word(page(at) + offset).unwrap();
        word.load(Ordering::SeqCst)
    }

    fn set(&self, at: u32, offset: usize, value: u32) {
        let word = self.pages.word(page(at) + offset).unwrap();
        word.store(value, Ordering::SeqCst);
    }

    fn events(&self) -> Vec<(u32, u32)> {
        let produced = self.header.word(OFF_ASYNC_PRODUCED).unwrap();
        let event = |at: u32| {
            let at = OFF_ASYNC_RING + usize::try_from(at).unwrap() * 16;
            let word = |at| self.header.word(at).unwrap().load(Ordering::SeqCst);
            (word(at), word(at + 4))
        };
        (0..produced.load(Ordering::SeqCst)).map(event).collect()
    }

    /// A turn as a worker gives it.
    fn turn(&self) -> bool {
        let look = Look::at(Instant::now());
        self.context.poll(&look, &Budget::new(QUANTUM)).worked
    }

    /// Turns until none has anything to do, and all rest: also where this thread has not run for a
    /// while, each has turns after the time in which it would be looked at.
    fn settle(programs: &[&Self]) {
        let began = Instant::now();
        let (mut last, mut after) = (began, 0);
        while after < 4 {
            assert!(began.elapsed() < Duration::from_secs(60));
            let worked = programs.iter().filter(|program| program.turn()).count();
            if worked > 0 {
                (last, after) = (Instant::now(), 0);
            } else if last.elapsed() > 2 * crate::round::BUSY {
                after += 1;
            }
        }
    }

    fn connect(&self, qp: Handle, to: &Self, number: U32) {
        self.connect_by(qp, to, number, [QP_TO_RTR, QP_TO_RTS]);
    }

    /// The same, with the attributes that these name.
    fn connect_by(&self, qp: Handle, to: &Self, number: U32, [to_rtr, to_rts]: [u32; 2]) {
        let address = to.context.gid();
        for (mask, qp_state) in [(QP_TO_INIT, QPS_INIT), (to_rtr, QPS_RTR), (to_rts, QPS_RTS)] {
            let attr = QpAttr {
                qp_state,
                port_num: 1,
                path_mtu: 3,
                dest_qp_num: number,
                is_global: 1,
                dgid: address,
                ah_port: 1,
                rnr_retry: 7,
                ..Default::default()
            };
            let mask = mask.into();
            self.host().modify_qp(ModifyQp { qp, mask, attr }).unwrap();
        }
    }

    /// Completions so far, as (number, status).
    fn completions(&self) -> Vec<(u64, u8)> {
        let completion = |at: u32| {
            let at = CQ_OFF_ENTRIES + usize::try_from(at).unwrap() * size_of::<Completion>();
            let mut bytes = [0; 9];
            self.pages
                .read_bytes(page(CQ_PAGE) + at, &mut bytes)
                .unwrap();
            let (number, status) = bytes.split_at(8);
            (u64::from_le_bytes(number.try_into().unwrap()), status[0])
        };
        (0..self.word(CQ_PAGE, CQ_OFF_PRODUCED))
            .map(completion)
            .collect()
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let server = Server::without_workers();
    let p = Program::start(&port(&server, 1));
    let good = p.create_srq(1);
    for (bad, error) in [
        (
            CreateSrq {
                requests: 0.into(),
                ..good
            },
            Errno::EINVAL,
        ),
        (
            CreateSrq {
                requests: (MAX_WQ_ENTRIES + 1).into(),
                ..good
            },
            Errno::EINVAL,
        ),
        (
            CreateSrq {
                requests: u32::MAX.into(),
                ..good
            },
            Errno::EINVAL,
        ),
        (
            CreateSrq {
                elements: (MAX_SGE + 1).into(),
                ..good
            },
            Errno::EINVAL,
        ),
        (
            CreateSrq {
                pd: 0.into(),
                ..good
            },
            Errno::EBADF,
        ),
        (
            CreateSrq {
                pd: MAX_PDS.into(),
                ..good
            },
            Errno::EBADF,
        ),
        (
            CreateSrq {
                region: 0.into(),
                ..good
            },
            Errno::EBUSY,
        ),
        (
            CreateSrq {
                region: 9.into(),
                ..good
            },
            Errno::EINVAL,
        ),
        // The completion queue's, one that is not aligned, one that ends behind the segment.
        (
            CreateSrq {
                offset: 0.into(),
                ..good
            },
            Errno::EBUSY,
        ),
        (
            CreateSrq {
                offset: (good.offset.get() + 1).into(),
                ..good
            },
            Errno::EINVAL,
        ),
        (
            CreateSrq {
                requests: MAX_WQ_ENTRIES.into(),
                ..good
            },
            Errno::EINVAL,
        ),
        (CreateSrq { cq: p.cq, ..good }, Errno::EINVAL),
        (
            CreateSrq {
                xrcd: 1.into(),
                cq: p.cq,
                ..good
            },
            Errno::EBADF,
        ),
    ] {
        assert_eq!(p.host().create_srq(bad), Err(error), "{bad:?}");
    }
    let srq = p.host().create_srq(good).unwrap();
    assert_eq!(srq.number.get(), 0);
    let modify = |srq, mask: u32, limit: u32| {
        p.host().modify_srq(ModifySrq {
            srq,
            mask: mask.into(),
            requests: 16.into(),
            limit: limit.into(),
        })
    };
    assert_eq!(modify(srq.handle, SRQ_MAX_WR, 0), Err(Errno::EOPNOTSUPP));
    assert_eq!(
        modify(srq.handle, SRQ_LIMIT | SRQ_MAX_WR, 0),
        Err(Errno::EOPNOTSUPP)
    );
    assert_eq!(modify(srq.handle, SRQ_LIMIT, 9), Err(Errno::EINVAL));
    assert_eq!(modify(srq.handle, 4, 0), Err(Errno::EINVAL));
    assert_eq!(modify(p.cq, SRQ_LIMIT, 1).is_err(), p.cq != srq.handle);
    p.host().destroy_srq(srq.handle).unwrap();
    for stale in [srq.handle, 0.into(), u32::MAX.into()] {
        assert_eq!(modify(stale, SRQ_LIMIT, 1), Err(Errno::EBADF));
        assert_eq!(p.host().query_srq(stale), Err(Errno::EBADF));
        assert_eq!(p.host().destroy_srq(stale), Err(Errno::EBADF));
        if stale.get() != 0 {
            assert_eq!(p.qp(2, stale), Err(Errno::EBADF));
        }
    }
}

#[test]
fn version_1_has_none() {
    let server = Server::without_workers();
    let context = open(&port(&server, 1), 0);
    let _program = Header::attach(&context);
    let refused = CallHost::new(&context).create_srq(CreateSrq::default());
    assert_eq!(refused, Err(Errno::EOPNOTSUPP));
}

#[test]
fn a_queue_is_busy_as_long_as_a_queue_pair_takes_from_it() {
    let server = Server::without_workers();
    let p = Program::start(&port(&server, 1));
    let srq = p.srq(1);
    let qp = p.qp(2, srq).unwrap();
    assert_eq!(p.host().destroy_srq(srq), Err(Errno::EBUSY));
    p.host().destroy_qp(qp.handle).unwrap();
    assert_eq!(p.host().dealloc_pd(p.pd), Err(Errno::EBUSY));
    p.host().destroy_srq(srq).unwrap();
    p.host().dealloc_pd(p.pd).unwrap();
    // Its memory can be another queue's.
    let pd = p.host().alloc_pd(()).unwrap();
    let again = CreateSrq {
        pd,
        ..p.create_srq(1)
    };
    p.host().create_srq(again).unwrap();
}

#[test]
fn queues_end_at_the_limit_and_are_given_back() {
    let server = Server::without_workers();
    let config = PortConfig {
        limits: Limits::default().with(Resource::SharedReceiveQueues, Some(2)),
        ..Default::default()
    };
    let vm = server.port_with([1; 16], "vm".into(), config).unwrap();
    let p = Program::start(&vm);
    let count = || {
        let counted = &p.context.counters.shared_receive_queues;
        counted.load(Ordering::SeqCst)
    };
    assert_eq!(p.host().device_limits(()).unwrap().max_srq.get(), 2);
    for _ in 0..3 {
        let queues = [1, 2].map(|at| p.srq(at));
        assert_eq!(p.host().create_srq(p.create_srq(3)), Err(Errno::ENOMEM));
        assert_eq!(count(), 2);
        for srq in queues {
            p.host().destroy_srq(srq).unwrap();
        }
    }
    p.srq(1);
    let context = Arc::clone(&p.context);
    vm.close_all();
    assert_eq!(
        context
            .counters
            .shared_receive_queues
            .load(Ordering::SeqCst),
        0
    );
    let free = Program::start(&port(&server, 2));
    let limits = free.host().device_limits(()).unwrap();
    assert_eq!(limits.max_srq.get(), MAX_SRQS);
    assert_eq!(limits.max_srq_wr.get(), MAX_WQ_ENTRIES);
}

/// As a process does that reads that the backend does not look.
fn ring(program: &Program, bit: u32) {
    let set = |base: usize, bit: u32| {
        let at = base + usize::try_from(bit / 32).unwrap() * 4;
        let word = program.header.word(at).unwrap();
        word.fetch_or(1 << (bit % 32), Ordering::SeqCst);
    };
    set(OFF_RUNG, bit);
    set(OFF_RUNG_SUMMARY, bit / 32);
}

#[test]
fn a_domain_is_busy_as_long_as_something_is_in_it() {
    let server = Server::without_workers();
    let p = Program::start(&port(&server, 1));
    let xrcd = p.host().open_xrcd(()).unwrap();
    let create = CreateSrq {
        xrcd,
        cq: p.cq,
        ..p.create_srq(1)
    };
    let srq = p.host().create_srq(create).unwrap();
    assert_ne!(srq.number.get(), 0);
    assert_eq!(p.host().close_xrcd(xrcd), Err(Errno::EBUSY));
    assert_eq!(p.host().destroy_cq(p.cq), Err(Errno::EBUSY));
    let qp = |qp_type: u32, pd: Handle, cq: Handle, srq: u32, xrcd: u32| {
        p.host().create_qp_ex(CreateQpEx {
            base: CreateQp {
                pd,
                send_cq: cq,
                recv_cq: cq,
                qp_type: qp_type.into(),
                send_wr: 1.into(),
                send_sge: 1.into(),
                region: QUEUES.into(),
                offset: u32::try_from(page(2)).unwrap().into(),
                ..Default::default()
            },
            srq: srq.into(),
            xrcd: xrcd.into(),
        })
    };
    let (none, ours) = (U32::default(), xrcd.get());
    for (kind, pd, cq, srq, xrcd, error) in [
        // A target without a domain, one of a domain that is none, and one with a queue.
        (QPT_XRC_RECV, none, none, 0, 0, Errno::EBADF),
        (QPT_XRC_RECV, none, none, 0, ours ^ 1, Errno::EBADF),
        (
            QPT_XRC_RECV,
            none,
            none,
            srq.handle.get(),
            ours,
            Errno::EINVAL,
        ),
        // An initiator in a domain, one without what it completes into, or its memory.
        (QPT_XRC_SEND, p.pd, p.cq, 0, ours, Errno::EINVAL),
        (QPT_XRC_SEND, p.pd, none, 0, 0, Errno::EBADF),
        (QPT_XRC_SEND, none, p.cq, 0, 0, Errno::EBADF),
        // Others with what is for targets alone.
        (QPT_RC, p.pd, p.cq, srq.handle.get(), 0, Errno::EINVAL),
        (QPT_RC, p.pd, p.cq, 0, ours, Errno::EINVAL),
    ] {
        assert_eq!(
            qp(kind, pd, cq, srq, xrcd),
            Err(error),
            "{kind} {srq} {xrcd}"
        );
    }
    let initiator = qp(QPT_XRC_SEND, p.pd, p.cq, 0, 0).unwrap();
    p.host().destroy_qp(initiator.handle).unwrap();
    let target = qp(QPT_XRC_RECV, none, none, 0, ours).unwrap();
    p.host().destroy_srq(srq.handle).unwrap();
    p.host().destroy_cq(p.cq).unwrap();
    assert_eq!(p.host().close_xrcd(xrcd), Err(Errno::EBUSY));
    p.host().destroy_qp(target.handle).unwrap();
    p.host().close_xrcd(xrcd).unwrap();
    for stale in [xrcd, 0.into(), u32::MAX.into()] {
        assert_eq!(p.host().close_xrcd(stale), Err(Errno::EBADF));
    }
}
