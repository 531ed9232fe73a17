//! Address handles and multicast groups of programs, and between whom datagrams go.

use super::*;
use crate::engine::Usage;
use crate::traffic::Count;
use crate::{Limits, Peers, PortConfig};
use farlane_abi::queue::{
    OP_SEND, QP_OFF_ENTRIES, QP_OFF_RECV_CONSUMED, QP_OFF_RECV_PRODUCED, QP_OFF_SEND_CONSUMED,
    QP_OFF_SEND_PRODUCED, QpLayout, RecvEntry, SEND_TAIL, SendEntry, SendTail, Sge,
};
use farlane_abi::rdma::{
    MULTICAST_QPN, QPS_INIT, QPS_RTR, QPS_RTS, QPT_UD, UD_TO_INIT, UD_TO_RTR, UD_TO_RTS,
};
use farlane_zero_copy::SharedMemory;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

/// Requests of each queue.
const REQUESTS: u32 = 8;
const QKEY: u32 = 0x1111;

/// A multicast group.
const GROUP: [u8; 16] = [0xff, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1];

/// A program with a queue pair for datagrams, ready to send and to receive.
struct Program {
    _port: Arc<Port>,
    context: Arc<Context>,
    _header: Header,
    pd: Handle,
    qp: Qp,
    lkey: U32,
    layout: QpLayout,
    queues: SharedMemory,
}

impl Program {
    fn start(port: &Arc<Port>, id: u32) -> Self {
        let context = open(port, id);
        let header = Header::attach(&context);
        let layout = QpLayout::with_tail(REQUESTS, 1, 0, REQUESTS, 1).unwrap();
        let cq = memory("completions", PAGE_BYTES);
        let queues = memory("datagrams", PAGE_BYTES);
        context.attach_segment(region(1), cq).unwrap();
        context.attach_segment(region(2), queues.clone()).unwrap();
        let data = memory("data", PAGE_BYTES);
        context.attach_pin(region(3), data).unwrap();
        let mut host = CallHost::new(&context);
        host.negotiate(VersionRange::ours()).unwrap();
        let pd = host.alloc_pd(()).unwrap();
        let lkey = register(&context, pd, 3).unwrap().lkey;
        let cq = host.create_cq(CreateCq {
            entries: 16.into(),
            region: 1.into(),
            ..Default::default()
        });
        let cq = cq.unwrap();
        let base = CreateQp {
            pd,
            send_cq: cq,
            recv_cq: cq,
            qp_type: QPT_UD.into(),
            send_wr: REQUESTS.into(),
            send_sge: 1.into(),
            recv_wr: REQUESTS.into(),
            recv_sge: 1.into(),
            region: 2.into(),
            signal_all: 1.into(),
            ..Default::default()
        };
        let qp = host.create_qp_ex(CreateQpEx {
            base,
            ..Default::default()
        });
        let qp = qp.unwrap();
        for (qp_state, mask) in [
            (QPS_INIT, UD_TO_INIT),
            (QPS_RTR, UD_TO_RTR),
            (QPS_RTS, UD_TO_RTS),
        ] {
            let attr = QpAttr {
                qp_state,
                port_num: 1,
                qkey: QKEY.into(),
                ..Default::default()
            };
            host.modify_qp(ModifyQp {
                qp: qp.handle,
                mask: mask.into(),
                attr,
            })
            .unwrap();
        }
        Self {
            _port: Arc::clone(port),
            context,
            _header: header,
            pd,
            qp,
            lkey,
            layout,
            queues: queues.stitch().unwrap(),
        }
    }

    fn host(&self) -> CallHost<'_> {
        CallHost::new(&self.context)
    }

    fn word(&self, at: usize) -> u32 {
        self.queues.word(at).unwrap().load(Ordering::Acquire)
    }

    /// Says that one more entry is there; where it lies.
    fn index(&self, word: usize) -> usize {
        let word = self.queues.word(word).unwrap();
        let index = word.fetch_add(1, Ordering::AcqRel) % REQUESTS;
        usize::try_from(index).unwrap()
    }

    fn element(&self, length: u32) -> Sge {
        Sge {
            addr: 0.into(),
            length: length.into(),
            lkey: self.lkey,
        }
    }

    fn post_receive(&self) {
        let index = self.index(QP_OFF_RECV_PRODUCED);
        let at = self.layout.recv_offset() + index * self.layout.recv_stride;
        let head = RecvEntry {
            num_sge: 1.into(),
            ..Default::default()
        };
        self.queues.write(at, &head).unwrap();
        let element = self.element(1000);
        self.queues
            .write(at + size_of::<RecvEntry>(), &element)
            .unwrap();
    }

    /// Receive requests that are complete.
    fn received(&self) -> u32 {
        self.word(QP_OFF_RECV_CONSUMED)
    }

    /// Sends 8 bytes; whether that has ended well.
    fn send(&self, ah: Handle, number: U32) -> bool {
        self.send_for(ah, number).is_some()
    }

    /// The same; what it has cost, where it has ended well.
    fn send_for(&self, ah: Handle, number: U32) -> Option<Usage> {
        let index = self.index(QP_OFF_SEND_PRODUCED);
        let at = QP_OFF_ENTRIES + index * self.layout.send_stride;
        let head = SendEntry {
            opcode: OP_SEND,
            flags: SEND_TAIL,
            num_sge: 1.into(),
            ..Default::default()
        };
        let tail = SendTail::datagram(ah.get(), number.get(), QKEY);
        self.queues.write(at, &head).unwrap();
        let at = at + size_of::<SendEntry>();
        self.queues.write(at, &tail).unwrap();
        let at = at + size_of::<SendTail>();
        self.queues.write(at, &self.element(8)).unwrap();
        let object = self.host().qp(self.qp.handle).unwrap();
        let mut used = Usage::default();
        loop {
            let came = object.engine.progress(Instant::now().into());
            used = used.and(came.used);
            if !came.worked {
                break;
            }
        }
        let done = self.word(QP_OFF_SEND_CONSUMED) == self.word(QP_OFF_SEND_PRODUCED);
        (done && object.engine.query().qp_state == QPS_RTS).then_some(used)
    }

    fn ah(&self, gid: [u8; 16]) -> Result<Handle, Errno> {
        self.host().create_ah(to(self.pd, gid))
    }

    fn group(&self) -> McastGroup {
        McastGroup {
            qp: self.qp.handle,
            gid: GROUP,
            ..Default::default()
        }
    }
}

fn to(pd: Handle, dgid: [u8; 16]) -> CreateAh {
    CreateAh {
        pd,
        dgid,
        is_global: 1,
        port_num: 1,
        ..Default::default()
    }
}

#[test]
fn an_address_is_looked_at_when_its_handle_is_made() {
    let server = Server::without_workers();
    let program = Program::start(&port(&server, 1), 0);
    let good = to(program.pd, [2; 16]);
    let local = CreateAh {
        is_global: 0,
        dlid: 1.into(),
        ..good
    };
    let mut host = program.host();
    for bad in [
        CreateAh {
            port_num: 0,
            ..good
        },
        CreateAh {
            port_num: 2,
            ..good
        },
        CreateAh { sl: 16, ..good },
        CreateAh {
            sgid_index: 1,
            ..good
        },
        CreateAh {
            dlid: 0.into(),
            ..local
        },
        CreateAh {
            dlid: 0xc000.into(),
            ..local
        },
        CreateAh {
            dlid: u16::MAX.into(),
            ..local
        },
    ] {
        assert_eq!(host.create_ah(bad), Err(Errno::EINVAL), "{bad:?}");
    }
    for pd in [0, program.pd.get() + 1, u32::MAX] {
        let pd = pd.into();
        assert_eq!(host.create_ah(CreateAh { pd, ..good }), Err(Errno::EBADF));
    }
    let any_flow = CreateAh {
        flow_label: u32::MAX.into(),
        ..good
    };
    let handles =
        [good, any_flow, local, to(program.pd, GROUP)].map(|ah| host.create_ah(ah).unwrap());
    for handle in handles {
        host.destroy_ah(handle).unwrap();
        assert_eq!(host.destroy_ah(handle), Err(Errno::EBADF));
    }
}

#[test]
fn a_domain_is_busy_as_long_as_an_address_is_in_it() {
    let server = Server::without_workers();
    let program = Program::start(&port(&server, 1), 0);
    let mut host = program.host();
    let pd = host.alloc_pd(()).unwrap();
    let ah = host.create_ah(to(pd, [2; 16])).unwrap();
    assert_eq!(host.dealloc_pd(pd), Err(Errno::EBUSY));
    host.destroy_ah(ah).unwrap();
    host.dealloc_pd(pd).unwrap();
}

#[test]
fn addresses_end_at_the_limit_and_are_given_back() {
    let server = Server::without_workers();
    let config = PortConfig {
        limits: Limits::default().with(Resource::AddressHandles, Some(3)),
        ..Default::default()
    };
    let vm = server.port_with([1; 16], "vm 1".into(), config).unwrap();
    let programs = [Program::start(&vm, 0), Program::start(&vm, 1)];
    let [one, two] = &programs;
    assert_eq!(one.host().device_limits(()).unwrap().max_ah.get(), 3);
    let first = one.ah([2; 16]).unwrap();
    for _ in 0..2 {
        two.ah([2; 16]).unwrap();
    }
    assert_eq!(one.ah([2; 16]), Err(Errno::ENOMEM));
    one.host().destroy_ah(first).unwrap();
    one.ah([2; 16]).unwrap();
    drop(programs);
    vm.close_all();
    let program = Program::start(&vm, 0);
    for _ in 0..3 {
        program.ah([2; 16]).unwrap();
    }
    // Without a limit a program's own table ends.
    let free = Program::start(&port(&server, 2), 0);
    let most = free.host().device_limits(()).unwrap().max_ah.get();
    for _ in 0..most {
        free.ah([2; 16]).unwrap();
    }
    assert_eq!(free.ah([2; 16]), Err(Errno::ENOMEM));
}

#[test]
fn a_handle_is_of_a_domain_and_of_a_program() {
    let server = Server::without_workers();
    let (one, two) = (port(&server, 1), port(&server, 2));
    let receiver = Program::start(&two, 0);
    receiver.post_receive();
    let number = receiver.qp.qp_num;
    // Of another domain, of none, one that is gone, of another program.
    for choice in 0..4 {
        let sender = Program::start(&one, choice);
        let pd = sender.host().alloc_pd(()).unwrap();
        let ah = match choice {
            0 => sender.host().create_ah(to(pd, [2; 16])).unwrap(),
            1 => Handle::new(0),
            2 => {
                let ah = sender.ah([2; 16]).unwrap();
                sender.host().destroy_ah(ah).unwrap();
                ah
            }
            _ => receiver.ah([2; 16]).unwrap(),
        };
        assert!(!sender.send(ah, number), "{choice}");
        assert_eq!(receiver.received(), 0, "{choice}");
    }
    let sender = Program::start(&one, 9);
    let ah = sender.ah([2; 16]).unwrap();
    assert!(sender.send(ah, number));
    assert_eq!(receiver.received(), 1);
}

/// A port that its operator lets have to do with those of these GIDs.
fn with_peers(server: &Arc<Server>, gid: u8, peers: &[u8]) -> Arc<Port> {
    let peers: BTreeSet<_> = peers.iter().map(|gid| [*gid; 16]).collect();
    let config = PortConfig {
        peers: Peers::Only(peers),
        ..Default::default()
    };
    let label = format!("vm {gid}");
    server.port_with([gid; 16], label, config).unwrap()
}

#[test]
fn datagrams_go_between_ports_whose_operators_both_let_them() {
    let server = Server::without_workers();
    let vm = with_peers(&server, 1, &[2]);
    let programs = [
        Program::start(&vm, 0),
        Program::start(&port(&server, 2), 0),
        Program::start(&port(&server, 3), 0),
    ];
    let [program, friend, stranger] = &programs;
    for program in &programs {
        program.post_receive();
    }
    assert_eq!(program.ah([3; 16]), Err(Errno::EACCES));
    let lid = CreateAh {
        is_global: 0,
        dlid: 0x0303.into(),
        ..to(program.pd, [0; 16])
    };
    assert_eq!(program.host().create_ah(lid), Err(Errno::EACCES));
    // The stranger can name it, and gets nothing there.
    let ah = stranger.ah([1; 16]).unwrap();
    assert!(stranger.send(ah, program.qp.qp_num));
    assert_eq!(program.received(), 0);
    let ah = friend.ah([1; 16]).unwrap();
    assert!(friend.send(ah, program.qp.qp_num));
    assert_eq!(program.received(), 1);
    let ah = program.ah([2; 16]).unwrap();
    assert!(program.send(ah, friend.qp.qp_num));
    assert_eq!(friend.received(), 1);
}

#[test]
fn a_group_is_one_of_those_who_may_have_to_do_with_each_other() {
    let server = Server::without_workers();
    let vm = with_peers(&server, 1, &[2]);
    let programs = [
        Program::start(&vm, 0),
        Program::start(&port(&server, 2), 0),
        Program::start(&port(&server, 3), 0),
    ];
    for program in &programs {
        program.host().attach_mcast(program.group()).unwrap();
    }
    for (from, got) in [(0, [1, 1, 0]), (1, [1, 1, 1]), (2, [0, 1, 1])] {
        let before = programs.each_ref().map(Program::received);
        for program in &programs {
            program.post_receive();
        }
        let sender = &programs[from];
        let ah = sender.ah(GROUP).unwrap();
        assert!(sender.send(ah, MULTICAST_QPN.into()));
        let after = programs.each_ref().map(Program::received);
        let grown: Vec<_> = std::iter::zip(after, before).map(|(a, b)| a - b).collect();
        assert_eq!(grown, got, "from {from}");
    }
}

/// The groups with these numbers, as a queue pair joins them.
fn groups(program: &Program, numbers: std::ops::Range<u8>) -> Vec<McastGroup> {
    let numbered = |number| {
        let mut group = program.group();
        group.gid[15] = number;
        group
    };
    numbers.map(numbered).collect()
}

#[test]
fn memberships_end_at_the_limit_and_are_given_back() {
    let server = Server::without_workers();
    let config = PortConfig {
        limits: Limits::default().with(Resource::GroupMemberships, Some(3)),
        ..Default::default()
    };
    let vm = server.port_with([1; 16], "vm 1".into(), config).unwrap();
    let programs = [Program::start(&vm, 0), Program::start(&vm, 1)];
    let [one, two] = &programs;
    let limits = one.host().device_limits(()).unwrap();
    assert_eq!(limits.max_total_mcast_qp_attach.get(), 3);
    let join = |program: &Program, group| program.host().attach_mcast(group);
    let [of_one, of_two] = [one, two].map(|program| groups(program, 0..3));
    join(one, of_one[0]).unwrap();
    join(one, of_one[1]).unwrap();
    join(two, of_two[0]).unwrap();
    // Where it is in one already it has that.
    join(one, of_one[0]).unwrap();
    assert_eq!(join(one, of_one[2]), Err(Errno::ENOMEM));
    assert_eq!(join(two, of_two[1]), Err(Errno::ENOMEM));
    one.host().detach_mcast(of_one[1]).unwrap();
    join(two, of_two[1]).unwrap();
    // What a program leaves another one has.
    vm.close_all();
    let program = Program::start(&vm, 2);
    for group in groups(&program, 0..3) {
        join(&program, group).unwrap();
    }
}

#[test]
fn memberships_of_one_vm_leave_others_their_share() {
    let server = sharing(100);
    let programs = [1, 2].map(|gid| Program::start(&port(&server, gid), 0));
    let had = programs.each_ref().map(|program| {
        let groups = groups(program, 0..255).into_iter();
        let outcomes = groups.map(|group| program.host().attach_mcast(group));
        outcomes.take_while(Result::is_ok).count()
    });
    assert_eq!(had, [50, 25]);
}

#[test]
fn strangers_in_a_group_use_up_none_of_what_a_sender_may_do() {
    let server = Server::without_workers();
    let vm = with_peers(&server, 1, &[2]);
    let sender = Program::start(&vm, 0);
    let strangers = (0..9).map(|id| Program::start(&port(&server, 3 + id), 0));
    let mut members: Vec<_> = strangers.collect();
    let friend = port(&server, 2);
    members.extend((0..2).map(|id| Program::start(&friend, id)));
    for member in &members {
        member.post_receive();
        member.host().attach_mcast(member.group()).unwrap();
    }
    let dropped = || sender.context.traffic.get(Count::Dropped);
    let ah = sender.ah(GROUP).unwrap();
    let used = sender.send_for(ah, MULTICAST_QPN.into()).unwrap();
    assert_eq!((used.operations, used.bytes, dropped()), (2, 16, 0));
    let got: Vec<_> = members.iter().map(Program::received).collect();
    assert_eq!(got, [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
    // One that is meant and takes nothing is paid, and is a loss.
    let used = sender.send_for(ah, MULTICAST_QPN.into()).unwrap();
    assert_eq!((used.operations, used.bytes, dropped()), (2, 16, 2));
}

#[test]
fn a_queue_pair_in_a_group_is_busy_until_it_has_left() {
    let server = Server::without_workers();
    let vm = port(&server, 1);
    let program = Program::start(&vm, 0);
    let mut host = program.host();
    let group = program.group();
    assert_eq!(host.detach_mcast(group), Err(Errno::EINVAL));
    host.attach_mcast(group).unwrap();
    assert_eq!(host.destroy_qp(group.qp), Err(Errno::EBUSY));
    for gid in [[0xfe; 16], [0; 16], [1; 16]] {
        let none = McastGroup { gid, ..group };
        assert_eq!(host.attach_mcast(none), Err(Errno::EINVAL));
    }
    let qp = (group.qp.get() + 1).into();
    assert_eq!(
        host.attach_mcast(McastGroup { qp, ..group }),
        Err(Errno::EBADF)
    );
    host.detach_mcast(group).unwrap();
    host.attach_mcast(group).unwrap();
    // A program that ends has its place in a group no more.
    for _ in 0..100 {
        vm.close_all();
        let program = Program::start(&vm, 0);
        program.host().attach_mcast(program.group()).unwrap();
    }
}

#[test]
fn a_port_counts_what_its_own_programs_send_and_receive() {
    let server = Server::without_workers();
    let [one, other, stranger] = [1, 2, 3].map(|gid| Program::start(&port(&server, gid), 0));
    let ah = one.ah([2; 16]).unwrap();
    let counted = |program: &Program| {
        let of = program.host().port_counters(1.into()).unwrap();
        [of.send_wrs, of.send_bytes, of.tx_drops]
            .map(|n| n.get())
            .into_iter()
            .chain([of.recv_wrs, of.recv_bytes, of.out_of_buffer].map(|n| n.get()))
            .collect::<Vec<_>>()
    };
    other.post_receive();
    for _ in 0..2 {
        one.send_for(ah, other.qp.qp_num).unwrap();
    }
    assert_eq!(counted(&one), [2, 8, 1, 0, 0, 0]);
    assert_eq!(counted(&other), [0, 0, 0, 1, 8, 1]);
    assert_eq!(counted(&stranger), [0; 6]);
    let of_another_port = one.host().port_counters(2.into());
    assert_eq!(of_another_port.unwrap_err(), Errno::EINVAL);
}
