//! VMs and host processes at a running, confined backend, over the client library.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, connect, connect_to, context, pattern, until};
use farlane_abi::config::FEATURE_VERBS;
use farlane_abi::queue::{
    OP_RDMA_READ, OP_RDMA_WRITE, OP_SEND, SEND_SIGNALED, WC_STATUS_REM_ACCESS_ERR,
    WC_STATUS_RETRY_EXC_ERR, WC_STATUS_SUCCESS,
};
use farlane_abi::rdma::{QP_STATE, QPS_RESET};
use farlane_rdma_client::{
    Buffer, Payload, Placement, Qp, QpAttr, QpCaps, QpInit, RecvRequest, SendRequest, Sge,
};
use farlane_vm_front_end::guest_device::Vm;
use std::sync::Arc;

fn sge(end: &End, length: usize) -> Sge {
    Sge {
        addr: (end.mr.address() as u64).into(),
        length: u32::try_from(length).unwrap().into(),
        lkey: end.mr.lkey().into(),
    }
}

fn transfer(from: &End, to: &End, opcode: u8, length: usize) -> u8 {
    from.qp
        .post_send(&SendRequest {
            wr_id: 1,
            opcode,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: to.mr.address() as u64,
            rkey: to.mr.rkey(),
            payload: Payload::Gather(&[sge(from, length)]),
        })
        .unwrap();
    from.completion().status
}

/// A further queue pair, of the smallest size.
fn small_qp(end: &End) -> Qp {
    let caps = QpCaps {
        send_wr: 1,
        send_sge: 1,
        inline_bytes: 0,
        recv_wr: 1,
        recv_sge: 1,
    };
    Qp::create(&end.pd, &QpInit::reliable(&end.cq, caps)).unwrap()
}

#[test]
fn two_vms_write_and_read_each_other_over_scattered_memory() {
    let backend = Backend::start();
    let (one, two) = (backend.vm(0), backend.vm(1));
    assert_eq!(one.config().gid[12..], [10, 0, 0, 1]);
    // 2048 pages: more extents than one request holds.
    const LENGTH: usize = 8 << 20;
    let mut source = one.allocate_scattered(LENGTH as u64).unwrap();
    let mut target = two.allocate_scattered(LENGTH as u64).unwrap();
    // SAFETY: nothing is registered yet.
    let bytes = unsafe { source.bytes_mut() };
    bytes.iter_mut().zip(pattern(1)).for_each(|(b, p)| *b = p);
    // SAFETY: as above.
    unsafe { target.bytes_mut() }.fill(0);

    let a = End::in_vm(&one, &source);
    let b = End::in_vm(&two, &target);
    connect(&a, &b);
    assert_eq!(transfer(&a, &b, OP_RDMA_WRITE, LENGTH), WC_STATUS_SUCCESS);
    // SAFETY: the transfer has ended.
    let got = unsafe { target.bytes() };
    assert!(got.iter().copied().eq(pattern(1).take(LENGTH)));
    assert_eq!(transfer(&b, &a, OP_RDMA_READ, LENGTH), WC_STATUS_SUCCESS);

    drop((a, b));
    until("all contexts to be closed", || {
        backend.counter("contexts") == 0
    });
    assert_eq!(backend.counter("control_refusals"), 0);
}

#[test]
fn a_host_process_and_a_vm_exchange_messages_with_events() {
    let backend = Backend::start();
    let vm = backend.vm(0);
    let buffer = vm.allocate(1 << 20).unwrap();
    let mut local = vec![0u8; 1 << 20];
    local.iter_mut().zip(pattern(9)).for_each(|(b, p)| *b = p);
    let guest = End::in_vm(&vm, &buffer);
    let host = context(backend.host_link());
    // SAFETY: `local` outlives the end and is not touched meanwhile.
    let host = unsafe { End::new(&host, local.as_ptr().expose_provenance(), local.len()) };
    connect(&guest, &host);

    for round in 0..20 {
        guest.cq.arm(false).unwrap();
        guest
            .qp
            .post_recv(&RecvRequest {
                wr_id: round,
                scatter: &[sge(&guest, 1 << 20)],
            })
            .unwrap();
        // The backend has to be woken.
        until("the backend to sleep", || backend.process.sleeps());
        assert_eq!(transfer(&host, &guest, OP_SEND, 1 << 20), WC_STATUS_SUCCESS);
        let cq = guest.channel.wait().unwrap();
        assert_eq!(cq.handle(), guest.cq.handle());
        let done = guest.completion();
        assert_eq!((done.status, done.wr_id.get()), (WC_STATUS_SUCCESS, round));
    }
    // SAFETY: the transfers have ended.
    let got = unsafe { buffer.bytes() };
    assert!(got.iter().copied().eq(pattern(9).take(1 << 20)));
    drop((guest, host));
    drop(local);
}

/// So many that a worker does not look at all of them in one turn.
#[test]
fn a_backend_of_many_idle_queue_pairs_sleeps_and_is_woken() {
    const QUEUE_PAIRS: usize = 4000;
    let backend = Backend::start();
    let mut local = vec![7_u8; 4096];
    let host = context(backend.host_link());
    let (address, length) = (local.as_mut_ptr().expose_provenance(), local.len());
    // SAFETY: `local` outlives the ends and is not touched meanwhile.
    let [one, other] = [(); 2].map(|()| unsafe { End::new(&host, address, length) });
    let gid = host.gid(1, 0).unwrap().raw;
    let idle: Vec<_> = std::iter::repeat_with(|| {
        let qp = small_qp(&one);
        connect_to(&qp, 1, gid);
        qp
    })
    .take(QUEUE_PAIRS)
    .collect();
    connect(&one, &other);
    until("the backend to sleep", || backend.process.sleeps());
    // The queue pairs that were made first and last.
    assert_eq!(transfer(&one, &other, OP_RDMA_WRITE, 8), WC_STATUS_SUCCESS);
    until("the backend to sleep", || backend.process.sleeps());
    drop(idle);
}

/// Queue pairs of a peer that end at once: enough for a worker to fall asleep before the last of
/// them is gone.
const MANY: usize = 3000;

/// A sender waits for a receive request of a peer whose VM is killed. Nothing is posted any more:
/// it is the end that has to wake.
#[test]
fn a_sender_that_waits_for_a_receiver_is_told_of_its_end() {
    let backend = Backend::start();
    let (one, two) = (backend.vm(0), backend.vm(1));
    let (source, target) = (one.allocate(4096).unwrap(), two.allocate(4096).unwrap());
    let (a, b) = (End::in_vm(&one, &source), End::in_vm(&two, &target));
    let idle: Vec<_> = std::iter::repeat_with(|| small_qp(&b)).take(MANY).collect();
    // The last one to end.
    let last = small_qp(&b);
    connect_to(&a.qp, last.number(), b.context.gid(1, 0).unwrap().raw);
    connect_to(&last, a.qp.number(), a.context.gid(1, 0).unwrap().raw);
    a.qp.post_send(&SendRequest {
        wr_id: 1,
        opcode: OP_SEND,
        flags: SEND_SIGNALED,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        payload: Payload::Gather(&[]),
    })
    .unwrap();
    until("the backend to sleep", || backend.process.sleeps());
    drop(two);
    assert_eq!(a.completion().status, WC_STATUS_RETRY_EXC_ERR);
    drop((idle, last));
}

#[test]
fn a_reset_queue_pair_completes_nothing_of_what_it_was() {
    let backend = Backend::start();
    let vm = backend.vm(0);
    let buffer = vm.allocate(4096).unwrap();
    let (a, b) = (End::in_vm(&vm, &buffer), End::in_vm(&vm, &buffer));
    let gid = a.context.gid(1, 0).unwrap().raw;
    // Two queue pairs with one completion queue.
    let (second, its_peer) = (small_qp(&a), small_qp(&b));
    connect(&a, &b);
    connect_to(&second, its_peer.number(), gid);
    connect_to(&its_peer, second.number(), gid);
    let write = |qp: &Qp, wr_id| {
        let request = SendRequest {
            wr_id,
            opcode: OP_RDMA_WRITE,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            payload: Payload::Gather(&[]),
        };
        qp.post_send(&request).unwrap();
    };
    write(&a.qp, 1);
    write(&second, 2);
    until("both to be carried out", || {
        backend.counter("requests") == 2
    });
    let reset = QpAttr {
        qp_state: QPS_RESET,
        ..QpAttr::default()
    };
    a.qp.modify(&reset, QP_STATE).unwrap();
    assert_eq!(a.completion().wr_id.get(), 2);
    connect_to(&a.qp, b.qp.number(), gid);
    write(&a.qp, 3);
    assert_eq!(a.completion().wr_id.get(), 3);
}

#[test]
fn a_buffer_of_the_window_is_mapped_and_written_by_a_peer() {
    let backend = Backend::start();
    let (one, two) = (backend.vm(0), backend.vm(1));
    assert_eq!(
        (
            one.config().window_bytes.get(),
            two.config().window_bytes.get()
        ),
        (16 << 20, 0)
    );
    let here = context(one.open().unwrap());
    for _ in 0..3 {
        let buffer = Buffer::allocate(&here, 1 << 20).unwrap();
        assert_eq!(buffer.placement(), Placement::Host);
        let mut source = two.allocate(1 << 20).unwrap();
        // SAFETY: nothing is registered yet.
        let bytes = unsafe { source.bytes_mut() };
        bytes.iter_mut().zip(pattern(3)).for_each(|(b, p)| *b = p);
        // SAFETY: the buffer outlives the end.
        let a = unsafe { End::new(&here, buffer.address(), buffer.length()) };
        let b = End::in_vm(&two, &source);
        connect(&a, &b);
        assert_eq!(transfer(&b, &a, OP_RDMA_WRITE, 1 << 20), WC_STATUS_SUCCESS);
        let mut got = vec![0; 1 << 20];
        // SAFETY: the transfer has ended.
        unsafe { buffer.map().read_bytes(0, &mut got) };
        assert!(got.into_iter().eq(pattern(3).take(1 << 20)));
    }
    // All of the window again and again: each time it has to be cleared first.
    for _ in 0..3 {
        let buffer = Buffer::allocate(&here, 16 << 20).unwrap();
        assert_eq!(buffer.placement(), Placement::Host);
        let mut last = [1; 8];
        // SAFETY: nobody else has the buffer.
        unsafe {
            buffer.map().read_bytes(buffer.length() - 8, &mut last);
            buffer.map().write_bytes(buffer.length() - 8, &[7; 8]);
        }
        assert_eq!(last, [0; 8]);
    }
    assert_eq!(backend.counter("control_refusals"), 0);
}

#[test]
fn a_vmm_without_shared_memory_regions_has_no_window() {
    let backend = Backend::start();
    let vm = Vm::connect_without_window(&backend.path("vm0"), 16 << 20).unwrap();
    assert_eq!(vm.config().window_bytes.get(), 0);
    assert_eq!(vm.config().features.get(), FEATURE_VERBS);
}

#[test]
fn a_reset_releases_all_and_the_next_life_starts_afresh() {
    let backend = Backend::start();
    let (one, two) = (backend.vm(0), backend.vm(1));
    let (source, target) = (
        one.allocate(1 << 20).unwrap(),
        two.allocate(1 << 20).unwrap(),
    );
    for _ in 0..5 {
        let a = End::in_vm(&one, &source);
        let b = End::in_vm(&two, &target);
        connect(&a, &b);
        assert_eq!(transfer(&a, &b, OP_RDMA_WRITE, 1 << 20), WC_STATUS_SUCCESS);
        one.reset().unwrap();
        assert!(a.context.is_dead());
        assert_eq!(backend.counter("contexts"), 1);
        // The peer learns it as of a peer that does not answer any more.
        assert_eq!(transfer(&b, &a, OP_RDMA_WRITE, 8), WC_STATUS_RETRY_EXC_ERR);
    }
}

#[test]
fn a_vm_that_pauses_does_not_answer_and_then_goes_on() {
    let backend = Backend::start();
    let (one, two) = (backend.vm(0), backend.vm(1));
    let (source, target) = (
        one.allocate(1 << 20).unwrap(),
        two.allocate(1 << 20).unwrap(),
    );
    let (a, b) = (End::in_vm(&one, &source), End::in_vm(&two, &target));
    let lost = End::in_vm(&two, &target);
    let peer = End::in_vm(&one, &source);
    connect(&a, &b);
    connect(&lost, &peer);
    assert_eq!(transfer(&a, &b, OP_RDMA_WRITE, 1 << 20), WC_STATUS_SUCCESS);
    for _ in 0..3 {
        let bases = one.pause().unwrap();
        one.resume(&bases).unwrap();
        assert_eq!(transfer(&a, &b, OP_RDMA_WRITE, 1 << 20), WC_STATUS_SUCCESS);
        assert_eq!(transfer(&b, &a, OP_RDMA_READ, 4096), WC_STATUS_SUCCESS);
    }
    let bases = one.pause().unwrap();
    assert_eq!(
        transfer(&lost, &peer, OP_RDMA_WRITE, 8),
        WC_STATUS_RETRY_EXC_ERR
    );
    one.resume(&bases).unwrap();
    assert_eq!(transfer(&b, &a, OP_RDMA_READ, 4096), WC_STATUS_SUCCESS);
    assert!(!a.context.is_dead());
    assert_eq!(backend.counter("contexts"), 4);
}

#[test]
fn vms_that_come_and_go_cost_nothing() {
    let mut backend = Backend::start();
    let other = backend.vm(1);
    let files = || backend.open_files();
    // The least that there were before a VM came: of one that has gone a thread may still be there.
    let mut threads = usize::MAX;
    let mut after_first = None;
    for round in 0..30 {
        if (1..5).contains(&round) {
            threads = threads.min(backend.process.thread_names().len());
        }
        let vm = backend.vm(0);
        let buffer = vm.allocate(4096).unwrap();
        let end = End::in_vm(&vm, &buffer);
        // A VM that is killed says no goodbye.
        drop(vm);
        drop(end);
        until("the VM's context to be closed", || {
            backend.counter("contexts") == 0
        });
        if round == 5 {
            until("the thread that served it to end", || {
                backend.process.thread_names().len() <= threads
            });
            after_first = files();
        }
    }
    until("files to be closed", || files() <= after_first);
    let _works = context(other.open().unwrap());
    backend.assert_alive();
}

#[test]
fn when_the_backend_dies_everybody_gets_to_know() {
    let mut backend = Backend::start();
    let vm = backend.vm(0);
    let buffer = vm.allocate(4096).unwrap();
    let guest = End::in_vm(&vm, &buffer);
    let host = context(backend.host_link());
    backend.process.kill_and_wait();
    until("the guest to know", || guest.context.is_dead());
    until("the process to know", || host.is_dead());
    assert!(guest.context.next_async_event().is_ok());
}

#[test]
fn a_key_of_another_vm_opens_nothing() {
    let backend = Backend::start();
    let (one, two) = (backend.vm(0), backend.vm(1));
    let (source, target) = (one.allocate(8192).unwrap(), two.allocate(8192).unwrap());
    let (a, b) = (End::in_vm(&one, &source), End::in_vm(&two, &target));
    connect(&a, &b);
    let status = |rkey: u32, address: usize| {
        a.qp.post_send(&SendRequest {
            wr_id: 1,
            opcode: OP_RDMA_WRITE,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: address as u64,
            rkey,
            payload: Payload::Gather(&[sge(&a, 8)]),
        })
        .unwrap();
        a.completion().status
    };
    assert_eq!(
        status(b.mr.rkey(), b.mr.address() + 8192 - 8),
        WC_STATUS_SUCCESS
    );
    assert_eq!(
        status(b.mr.rkey(), b.mr.address() + 8192 - 4),
        WC_STATUS_REM_ACCESS_ERR
    );
}

#[test]
fn memory_that_is_not_the_guests_cannot_be_registered() {
    let backend = Backend::start();
    let vm = backend.vm(0);
    let transport: Arc<dyn farlane_transport::Transport> = vm.open().unwrap();
    let outside = [0u8; 64];
    // SAFETY: it is refused.
    let refused = unsafe {
        transport.attach_pin(
            farlane_transport::PinKind::Memory,
            outside.as_ptr().expose_provenance(),
            64,
            true,
        )
    };
    assert_eq!(refused.unwrap_err().errno(), farlane_abi::Errno::EFAULT);
}
