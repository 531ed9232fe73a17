//! What an operator lets a VM have, and whom it may connect to.

use super::*;
use crate::{Limits, Peers, PortConfig};
use farlane_abi::rdma::{QP_TO_INIT, QP_TO_RTR, QPS_INIT, QPS_RTR};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

/// A port of so much of each of these resources.
fn limited(server: &Arc<Server>, gid: u8, limits: &[(Resource, u64)]) -> Arc<Port> {
    let none = Limits::default();
    let limits = limits
        .iter()
        .fold(none, |limits, &(of, most)| limits.with(of, Some(most)));
    let config = PortConfig {
        limits,
        ..Default::default()
    };
    let label = format!("vm {gid}");
    server.port_with([gid; 16], label, config).unwrap()
}

/// A program: its context, a domain, memory, and segments 2 to 11.
struct Program {
    _port: Arc<Port>,
    context: Arc<Context>,
    pd: Handle,
    _header: Header,
}

/// Pages of a program's memory.
const PAGES: u64 = 8;

impl Program {
    fn start(port: &Arc<Port>, id: u32) -> Self {
        let context = open(port, id);
        let header = Header::attach(&context);
        let pd = CallHost::new(&context).alloc_pd(()).unwrap();
        let pages = memory("limited", PAGES * PAGE_BYTES);
        context.attach_pin(region(1), pages).unwrap();
        for id in 2..12 {
            let segment = memory("limited", PAGE_BYTES);
            context.attach_segment(region(id), segment).unwrap();
        }
        Self {
            _port: Arc::clone(port),
            context,
            pd,
            _header: header,
        }
    }

    fn host(&self) -> CallHost<'_> {
        CallHost::new(&self.context)
    }

    fn cq(&self, region: u32) -> Result<Handle, Errno> {
        self.host().create_cq(CreateCq {
            entries: 4.into(),
            region: region.into(),
            ..Default::default()
        })
    }

    fn qp(&self, cq: Handle, region: u32) -> Result<Handle, Errno> {
        let qp = self.host().create_qp(CreateQp {
            pd: self.pd,
            send_cq: cq,
            recv_cq: cq,
            qp_type: QPT_RC.into(),
            send_wr: 1.into(),
            send_sge: 1.into(),
            recv_wr: 1.into(),
            recv_sge: 1.into(),
            region: region.into(),
            ..Default::default()
        });
        qp.map(|qp| qp.handle)
    }

    fn mr(&self, bytes: u64) -> Result<Handle, Errno> {
        let mr = self.host().reg_mr(RegMr {
            pd: self.pd,
            access: ACCESS_LOCAL_WRITE.into(),
            source: MR_SOURCE_PIN.into(),
            object: 1.into(),
            length: bytes.into(),
            ..Default::default()
        });
        mr.map(|mr| mr.handle)
    }
}

/// What metrics show of a port.
fn shown(port: &Port, name: &str) -> Option<u64> {
    let samples = port.samples();
    samples.iter().find(|s| s.name == name).map(|s| s.value)
}

#[test]
fn objects_end_at_the_limit_and_are_given_back() {
    let server = Server::without_workers();
    let vm = limited(
        &server,
        1,
        &[
            (Resource::QueuePairs, 2),
            (Resource::CompletionQueues, 3),
            (Resource::MemoryRegions, 3),
        ],
    );
    // The limit is of both of its programs together.
    let (one, two) = (Program::start(&vm, 0), Program::start(&vm, 1));
    let other = Program::start(&port(&server, 2), 0);
    for _ in 0..3 {
        let cqs = [one.cq(2).unwrap(), one.cq(3).unwrap(), two.cq(2).unwrap()];
        assert_eq!(one.cq(4), Err(Errno::ENOMEM));
        assert_eq!(two.cq(4), Err(Errno::ENOMEM));
        let qps = [one.qp(cqs[0], 5).unwrap(), two.qp(cqs[2], 5).unwrap()];
        assert_eq!(one.qp(cqs[0], 6), Err(Errno::ENOMEM));
        assert_eq!(two.qp(cqs[2], 6), Err(Errno::ENOMEM));
        let mrs = [one.mr(1).unwrap(), one.mr(1).unwrap(), two.mr(1).unwrap()];
        assert_eq!(one.mr(1), Err(Errno::ENOMEM));
        assert_eq!(two.mr(1), Err(Errno::ENOMEM));
        for (name, has) in [
            ("queue_pairs", 2),
            ("completion_queues", 3),
            ("memory_regions", 3),
            ("memory_region_bytes", 3),
        ] {
            assert_eq!(shown(&vm, name), Some(has), "{name}");
        }
        // Nobody else notices.
        let cq = other.cq(2).unwrap();
        other.host().destroy_qp(other.qp(cq, 3).unwrap()).unwrap();
        other.host().destroy_cq(cq).unwrap();
        other.host().dereg_mr(other.mr(1).unwrap()).unwrap();
        // What one program gives back another one can have.
        one.host().dereg_mr(mrs[0]).unwrap();
        two.host().dereg_mr(two.mr(1).unwrap()).unwrap();
        one.host().destroy_qp(qps[0]).unwrap();
        two.host().destroy_qp(two.qp(cqs[2], 6).unwrap()).unwrap();
        one.host().destroy_cq(cqs[0]).unwrap();
        two.host().destroy_cq(two.cq(4).unwrap()).unwrap();
        one.host().dereg_mr(mrs[1]).unwrap();
        two.host().dereg_mr(mrs[2]).unwrap();
        two.host().destroy_qp(qps[1]).unwrap();
        one.host().destroy_cq(cqs[1]).unwrap();
        two.host().destroy_cq(cqs[2]).unwrap();
        assert_eq!(shown(&vm, "queue_pairs"), Some(0));
    }
    // So is what a program leaves.
    let cq = one.cq(2).unwrap();
    one.qp(cq, 3).unwrap();
    one.mr(1).unwrap();
    vm.close_all();
    for name in [
        "queue_pairs",
        "completion_queues",
        "memory_regions",
        "memory_region_bytes",
        "memory_keys",
        "extents",
        "mappings",
    ] {
        assert_eq!(shown(&vm, name), Some(0), "{name}");
    }
}

#[test]
fn what_is_refused_for_another_reason_is_not_counted() {
    let server = Server::without_workers();
    let one_each = [
        (Resource::QueuePairs, 1),
        (Resource::CompletionQueues, 1),
        (Resource::MemoryRegions, 1),
    ];
    let program = Program::start(&limited(&server, 1, &one_each), 0);
    for _ in 0..3 {
        let beyond = PAGES * PAGE_BYTES + 1;
        assert_eq!(program.mr(beyond), Err(Errno::EINVAL));
        // No such segment, no such completion queue.
        assert_eq!(program.cq(99), Err(Errno::EINVAL));
        assert_eq!(program.qp(Handle::new(77), 2), Err(Errno::EBADF));
    }
    let cq = program.cq(2).unwrap();
    program.qp(cq, 3).unwrap();
    program.mr(1).unwrap();
}

#[test]
fn bytes_of_memory_regions_end_at_the_limit() {
    let server = Server::without_workers();
    let most = 4 * PAGE_BYTES;
    let vm = limited(&server, 1, &[(Resource::MemoryRegionBytes, most)]);
    let program = Program::start(&vm, 0);
    assert_eq!(program.mr(most + 1), Err(Errno::ENOMEM));
    program.host().dereg_mr(program.mr(most).unwrap()).unwrap();
    // The same memory counts each time that it is registered.
    let most_of_it = program.mr(most - 1).unwrap();
    let last = program.mr(1).unwrap();
    assert_eq!(program.mr(1), Err(Errno::ENOMEM));
    program.host().dereg_mr(last).unwrap();
    assert_eq!(program.mr(2), Err(Errno::ENOMEM));
    program.host().dereg_mr(most_of_it).unwrap();
    program.mr(most).unwrap();
    vm.close_all();
    Program::start(&vm, 0).mr(most).unwrap();
}

#[test]
fn attributes_say_what_one_gets() {
    let server = Server::without_workers();
    let attributes = |port: &Arc<Port>| {
        let context = open(port, 0);
        CallHost::new(&context).query_device(()).unwrap()
    };
    let free = attributes(&port(&server, 1));
    let all = |most| {
        [
            Resource::QueuePairs,
            Resource::CompletionQueues,
            Resource::MemoryRegions,
            Resource::MemoryRegionBytes,
        ]
        .map(|of| (of, most))
    };
    let few = attributes(&limited(&server, 2, &all(7)));
    assert_eq!(few.max_qp.get(), 7);
    assert_eq!(few.max_cq.get(), 7);
    assert_eq!(few.max_mr.get(), 7);
    assert_eq!(few.max_mr_size.get(), 7);
    // A limit beyond what the engine and a context's tables hold is none.
    assert_eq!(free.max_qp.get(), MAX_QPS);
    let many = attributes(&limited(&server, 3, &all(u64::MAX)));
    assert_eq!(many.max_qp, free.max_qp);
    assert_eq!(many.max_cq, free.max_cq);
    assert_eq!(many.max_mr, free.max_mr);
    assert_eq!(many.max_mr_size, free.max_mr_size);
}

#[test]
fn programs_that_create_at_once_get_no_more_than_the_limit() {
    const LIMIT: u64 = 3;
    let server = Server::without_workers();
    let limits = [
        (Resource::QueuePairs, LIMIT),
        (Resource::CompletionQueues, 2 * LIMIT),
        (Resource::MemoryRegions, LIMIT),
    ];
    let vm = limited(&server, 1, &limits);
    let (qps, mrs) = (AtomicU64::new(0), AtomicU64::new(0));
    let begin = |has: &AtomicU64| assert!(has.fetch_add(1, Ordering::SeqCst) < LIMIT);
    let end = |has: &AtomicU64| has.fetch_sub(1, Ordering::SeqCst);
    let attack = |id: u32| {
        let program = Program::start(&vm, id);
        // So that not all of them can have a completion queue.
        let Ok(cq) = program.cq(2) else {
            return;
        };
        for _ in 0..300 {
            let made: Vec<_> = (3..7)
                .filter_map(|region| program.qp(cq, region).ok())
                .inspect(|_| begin(&qps))
                .collect();
            let keys: Vec<_> = (0..4)
                .filter_map(|_| program.mr(1).ok())
                .inspect(|_| begin(&mrs))
                .collect();
            for qp in made {
                end(&qps);
                program.host().destroy_qp(qp).unwrap();
            }
            for key in keys {
                end(&mrs);
                program.host().dereg_mr(key).unwrap();
            }
        }
    };
    let other = Program::start(&port(&server, 2), 0);
    std::thread::scope(|scope| {
        for id in 0..4 {
            scope.spawn(move || attack(id));
        }
        for _ in 0..300 {
            let cq = other.cq(2).unwrap();
            let qp = other.qp(cq, 3).unwrap();
            let mr = other.mr(1).unwrap();
            other.host().dereg_mr(mr).unwrap();
            other.host().destroy_qp(qp).unwrap();
            other.host().destroy_cq(cq).unwrap();
        }
    });
    assert_eq!(shown(&vm, "queue_pairs"), Some(0));
    assert_eq!(shown(&vm, "memory_regions"), Some(0));
}

/// Peer with this GID, or the LID that is made of it.
fn named(gid: u8, is_global: bool) -> QpAttr {
    QpAttr {
        qp_state: QPS_RTR,
        path_mtu: 5,
        is_global: is_global.into(),
        dgid: if is_global { [gid; 16] } else { [0; 16] },
        dlid: u16::from_be_bytes([gid; 2]).into(),
        ah_port: 1,
        ..Default::default()
    }
}

#[test]
fn only_peers_that_are_allowed_are_connected_to() {
    let server = Server::without_workers();
    let config = PortConfig {
        peers: Peers::Only(BTreeSet::from([[2; 16], [4; 16]])),
        ..Default::default()
    };
    let vm = server.port_with([1; 16], "vm 1".into(), config).unwrap();
    let (friend, stranger) = (port(&server, 2), port(&server, 3));
    let program = Program::start(&vm, 0);
    let ready_to_receive = |program: &Program, region, attr: QpAttr| {
        let cq = program.cq(region)?;
        let qp = program.qp(cq, region + 1)?;
        let init = QpAttr {
            qp_state: QPS_INIT,
            port_num: 1,
            ..Default::default()
        };
        let modify = |mask, attr| {
            let mask = U32::new(mask);
            program.host().modify_qp(ModifyQp { qp, mask, attr })
        };
        modify(QP_TO_INIT, init)?;
        let outcome = modify(QP_TO_RTR, attr);
        let state = program.host().query_qp(qp)?.qp_state;
        assert_eq!(state == QPS_RTR, outcome.is_ok());
        if outcome.is_err() {
            // It can still connect to somebody else.
            modify(QP_TO_RTR, named(2, true))?;
        }
        program.host().destroy_qp(qp)?;
        program.host().destroy_cq(cq)?;
        outcome
    };
    for is_global in [true, false] {
        let to = |gid| ready_to_receive(&program, 2, named(gid, is_global));
        assert_eq!(to(2), Ok(()));
        assert_eq!(to(3), Err(Errno::EACCES));
        // Its own programs, and nobody at all.
        assert_eq!(to(1), Ok(()));
        assert_eq!(to(5), Err(Errno::EACCES));
    }
    // Whoever is not there yet has a GID, but no LID.
    assert_eq!(ready_to_receive(&program, 2, named(4, true)), Ok(()));
    assert_eq!(
        ready_to_receive(&program, 2, named(4, false)),
        Err(Errno::EACCES)
    );
    // The others may do as they like.
    for port in [&friend, &stranger] {
        let program = Program::start(port, 0);
        assert_eq!(ready_to_receive(&program, 2, named(1, true)), Ok(()));
        assert_eq!(ready_to_receive(&program, 2, named(9, false)), Ok(()));
    }
}
