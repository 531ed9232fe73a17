//! Domains of extended reliable connections that processes have together.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, Partner, context, say, told, until};
use farlane_abi::Errno;
use farlane_abi::queue::{
    OP_SEND, SEND_SIGNALED, SendTail, WC_STATUS_REM_INV_REQ_ERR, WC_STATUS_RETRY_EXC_ERR,
    WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::*;
use farlane_rdma_client::{
    Completion, Context, Cq, Mr, Payload, Pd, Qp, QpCaps, QpInit, RecvRequest, SendRequest, Sge,
    Srq, Xrcd,
};
use farlane_transport::Transport;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;

const LENGTH: usize = 4096;

/// A process's use of a domain: a queue there, and memory that it receives into.
struct Member {
    context: Arc<Context>,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    xrcd: Arc<Xrcd>,
    srq: Arc<Srq>,
    mr: Mr,
    memory: Box<[u8; LENGTH]>,
}

fn open_context(transport: Arc<dyn Transport>) -> Arc<Context> {
    let context = context(transport);
    context.negotiate().unwrap();
    context
}

impl Member {
    fn new(transport: Arc<dyn Transport>, file: &Path, flags: u32) -> Self {
        let context = open_context(transport);
        let pd = Pd::allocate(&context).unwrap();
        let cq = Cq::create(&context, 16, None).unwrap();
        let file = File::open(file).unwrap();
        let xrcd = Xrcd::open_by_file(&context, file.as_fd(), flags).unwrap();
        let srq = Srq::create_in(&xrcd, &cq, &pd, 16, 1).unwrap();
        let memory = Box::new([0; LENGTH]);
        let address = memory.as_ptr().expose_provenance();
        // SAFETY: the memory is kept as long as the registration.
        let mr = unsafe {
            Mr::register(&pd, address, LENGTH, address as u64, ACCESS_LOCAL_WRITE).unwrap()
        };
        Self {
            context,
            pd,
            cq,
            xrcd,
            srq,
            mr,
            memory,
        }
    }

    /// Posts a receive request for all its memory.
    fn post(&self) {
        let all = [self.all()];
        let request = RecvRequest {
            wr_id: 5,
            scatter: &all,
        };
        self.srq.post_recv(&request).unwrap();
    }

    fn all(&self) -> Sge {
        Sge {
            addr: (self.mr.address() as u64).into(),
            length: u32::try_from(LENGTH).unwrap().into(),
            lkey: self.mr.lkey().into(),
        }
    }

    fn completion(&self) -> Completion {
        let mut taken = [Completion::default(); 1];
        until("a completion", || self.cq.poll(&mut taken).unwrap() == 1);
        taken[0]
    }

    /// An initiator, which is not connected.
    fn initiator(&self) -> Qp {
        let caps = QpCaps {
            send_wr: 16,
            send_sge: 1,
            ..QpCaps::default()
        };
        let init = QpInit {
            qp_type: QPT_XRC_SEND,
            ..QpInit::reliable(&self.cq, caps)
        };
        Qp::create(&self.pd, &init).unwrap()
    }

    /// Sends all its memory to a queue. Returns the status of that.
    fn send(&self, initiator: &Qp, to: u32) -> u8 {
        let all = [self.all()];
        let request = SendRequest {
            wr_id: 1,
            opcode: OP_SEND,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            payload: Payload::Gather(&all),
        };
        let tail = SendTail {
            a: u64::from(to).into(),
            ..SendTail::default()
        };
        let mut queue = initiator.send_queue().unwrap();
        queue.push_with(&request, &tail).unwrap();
        drop(queue);
        self.completion().status
    }
}

/// Connects both ends of an extended reliable connection of one port.
fn connect(initiator: &Qp, target: &Qp) {
    let gid = initiator.context().gid(1, 0).unwrap().raw;
    let (send, receive) = ([UC_TO_RTR, QP_TO_RTS], [QP_TO_RTR, XRC_TARGET_TO_RTS]);
    for (qp, peer, [to_rtr, to_rts]) in [(initiator, target, send), (target, initiator, receive)] {
        let steps = [(QP_TO_INIT, QPS_INIT), (to_rtr, QPS_RTR), (to_rts, QPS_RTS)];
        for (mask, qp_state) in steps {
            let attr = QpAttr {
                qp_state,
                port_num: 1,
                path_mtu: 3,
                dest_qp_num: peer.number().into(),
                is_global: 1,
                dgid: gid,
                ah_port: 1,
                timeout: 8,
                retry_cnt: 2,
                rnr_retry: 7,
                min_rnr_timer: 12,
                ..QpAttr::default()
            };
            qp.modify(&attr, mask).unwrap();
        }
    }
}

/// Tells a partner where the backend's files are.
const FOLDER: &str = "FARLANE_TEST_DOMAIN_FOLDER";

/// The other process: it has a queue in the domain, and opens the first one's target.
fn partner(folder: &Path) {
    let socket = farlane_transport::socket::SocketTransport::open(&folder.join("host"));
    let member = Member::new(Arc::new(socket.unwrap()), &folder.join("domain"), 0);
    say(member.srq.number());
    let target: u32 = told().parse().unwrap();
    let absent = Qp::open_target(&member.xrcd, target ^ 1).unwrap_err();
    assert_eq!(absent.errno(), Errno::EINVAL);
    let opened = Qp::open_target(&member.xrcd, target).unwrap();
    assert_eq!((opened.number(), opened.qp_type()), (target, QPT_XRC_RECV));
    loop {
        member.post();
        say("ready");
        let received = member.completion();
        let status = received.status;
        say(format!(
            "{status} {} {}",
            received.qp_num,
            member.memory[LENGTH - 1]
        ));
    }
}

#[test]
fn processes_that_open_one_file_have_one_domain_which_outlives_each_of_them() {
    const NAME: &str = "processes_that_open_one_file_have_one_domain_which_outlives_each_of_them";
    if let Ok(folder) = std::env::var(FOLDER) {
        return partner(folder.as_ref());
    }
    let mut backend = Backend::start();
    let file = backend.path("domain");
    File::create(&file).unwrap();
    let mut sender = Member::new(backend.host_link(), &file, XRCD_CREATE | XRCD_EXCLUSIVE);
    *sender.memory = [7; LENGTH];
    let maker = Member::new(backend.host_link(), &file, XRCD_CREATE);
    let target = Qp::create_target(&maker.xrcd).unwrap();
    let initiator = sender.initiator();
    connect(&initiator, &target);

    let folder = file.parent().unwrap();
    let mut other = Partner::start(NAME, FOLDER, folder);
    let [queue] = other.hear_numbers();
    let queue = u32::try_from(queue).unwrap();
    let number = target.number();
    other.tell(&number.to_string());
    let mut arrives = |sender: &Member| {
        assert_eq!(other.hear(), "ready");
        assert_eq!(sender.send(&initiator, queue), WC_STATUS_SUCCESS);
        let expected = [WC_STATUS_SUCCESS.into(), number.into(), 7];
        assert_eq!(other.hear_numbers(), expected);
    };
    arrives(&sender);
    // Its maker goes, with all that it has: the other one has the target open.
    drop(target);
    drop(maker);
    until("the maker to be gone", || backend.counter("contexts") == 2);
    arrives(&sender);
    // The last one that has it open goes, however.
    assert_eq!(other.hear(), "ready");
    other.kill();
    until("the other to be gone", || backend.counter("contexts") == 1);
    assert_eq!(sender.send(&initiator, queue), WC_STATUS_RETRY_EXC_ERR);
    let gone = Qp::open_target(&sender.xrcd, number).unwrap_err();
    assert_eq!(gone.errno(), Errno::EINVAL);
    // Only the sender has the domain open: when it closes it there is none.
    let again = File::open(&file).unwrap();
    let open = |flags| Xrcd::open_by_file(&sender.context, again.as_fd(), flags);
    let shut = open(XRCD_CREATE | XRCD_EXCLUSIVE).unwrap_err();
    assert_eq!(shut.errno(), Errno::EINVAL);
    sender.srq.destroy().unwrap();
    sender.xrcd.destroy().unwrap();
    assert_eq!(open(0).unwrap_err().errno(), Errno::EAGAIN);
    open(XRCD_CREATE | XRCD_EXCLUSIVE).unwrap();
    backend.assert_alive();
}

#[test]
fn a_queue_goes_with_its_process_and_the_connection_of_others_breaks() {
    let mut backend = Backend::start();
    let file = backend.path("domain");
    File::create(&file).unwrap();
    let [sender, maker, third] =
        [(); 3].map(|()| Member::new(backend.host_link(), &file, XRCD_CREATE));
    let target = Qp::create_target(&maker.xrcd).unwrap();
    let initiator = sender.initiator();
    connect(&initiator, &target);
    third.post();
    let number = third.srq.number();
    assert_eq!(sender.send(&initiator, number), WC_STATUS_SUCCESS);
    assert_eq!(third.completion().status, WC_STATUS_SUCCESS);
    drop(third);
    assert_eq!(sender.send(&initiator, number), WC_STATUS_REM_INV_REQ_ERR);
    backend.assert_alive();
}

#[test]
fn domains_of_two_tenants_have_nothing_to_do_with_each_other() {
    let backend = Backend::start();
    let file = backend.path("domain");
    File::create(&file).unwrap();
    let (vm, other) = (backend.vm(0), backend.vm(1));
    let shown = File::open(&file).unwrap();
    let open = |transport, flags| {
        let context = open_context(transport);
        Xrcd::open_by_file(&context, shown.as_fd(), flags).unwrap()
    };
    let alone = XRCD_CREATE | XRCD_EXCLUSIVE;
    let domains = [
        open(backend.host_link(), alone),
        open(vm.open().unwrap(), alone),
        open(other.open().unwrap(), alone),
    ];
    let targets = domains
        .each_ref()
        .map(|xrcd| Qp::create_target(xrcd).unwrap());
    for (xrcd, its) in domains.iter().zip(&targets) {
        for target in &targets {
            // Numbers are those of a port, so another one may have it.
            let number = target.number();
            let is_known = Qp::open_target(xrcd, number).is_ok();
            assert_eq!(is_known, its.number() == number);
        }
    }
    // Two processes of one VM.
    let second = open(vm.open().unwrap(), 0);
    Qp::open_target(&second, targets[1].number()).unwrap();
}
