//! Cloud Hypervisor (v53): it names the available index wherever a queue starts, and connects again
//! when a backend has gone.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, connect, until};
use farlane_abi::Errno;
use farlane_abi::config::QUEUE_DOORBELL;
use farlane_abi::control::{OP_CLOSE, Reply, Request};
use farlane_abi::queue::{OP_SEND, SEND_SIGNALED, WC_STATUS_RETRY_EXC_ERR};
use farlane_abi::zerocopy::{FromBytes as _, IntoBytes as _};
use farlane_rdma_client::{Completion, Payload, RecvRequest, SendRequest};
use farlane_vm_front_end::guest_device::Vm;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::Arc;

/// More events than the event queue has buffers.
const EVENTS: u64 = 200;

fn boot(backend: &Backend) -> Arc<Vm> {
    Vm::connect_under_cloud_hypervisor(&backend.path("vm1"), 64 << 20).unwrap()
}

/// Programs in the VM open the device, and send each other messages of which they are told by
/// events.
fn exchange_with_events(vm: &Vm) {
    let buffer = vm.allocate(4096).unwrap();
    let contexts = [(); 2].map(|()| common::context(vm.open().unwrap()));
    // SAFETY: the buffer outlives the ends.
    let [a, b] = contexts.map(|context| unsafe { End::new(&context, buffer.address(), 4096) });
    connect(&a, &b);
    for wr_id in 0..EVENTS {
        b.cq.arm(false).unwrap();
        let scatter = &[];
        b.qp.post_recv(&RecvRequest { wr_id, scatter }).unwrap();
        let send = SendRequest {
            wr_id,
            opcode: OP_SEND,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            payload: Payload::Gather(&[]),
        };
        a.qp.post_send(&send).unwrap();
        until("an event", || {
            let mut fds = [PollFd::from_borrowed_fd(b.channel.fd(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())) == Ok(1)
        });
        assert_eq!(b.channel.wait().unwrap().handle(), b.cq.handle());
        for end in [&a, &b] {
            let done = end.completion();
            assert_eq!((done.status, done.wr_id.get()), (0, wr_id));
        }
    }
}

#[test]
fn events_are_delivered_from_the_first_one_on_and_after_a_reset() {
    let backend = Backend::start();
    let vm = boot(&backend);
    for _ in 0..3 {
        exchange_with_events(&vm);
        vm.reset().unwrap();
        assert_eq!(backend.counter("contexts"), 0);
    }
    assert_eq!(backend.counter("control_refusals"), 0);
}

/// Cloud Hypervisor pauses a VM by disabling its queues, which are not stopped.
#[test]
fn a_vm_whose_queues_are_disabled_is_left_alone_and_then_goes_on() {
    let backend = Backend::start();
    let vm = boot(&backend);
    let here = [0_u8; 8];
    let buffer = vm.allocate(4096).unwrap();
    let contexts = [(); 3].map(|()| common::context(vm.open().unwrap()));
    // SAFETY: the buffer outlives the ends.
    let [a, b, peer] =
        contexts.map(|context| unsafe { End::new(&context, buffer.address(), 4096) });
    let host = common::context(backend.host_link());
    // SAFETY: as above.
    let outside = unsafe { End::new(&host, here.as_ptr().addr(), here.len()) };
    connect(&a, &b);
    connect(&outside, &peer);
    let send = |wr_id| SendRequest {
        wr_id,
        opcode: OP_SEND,
        flags: SEND_SIGNALED,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        payload: Payload::Gather(&[]),
    };
    for wr_id in 0..3 {
        let scatter = &[];
        let (served, bases) = (backend.counter("control_requests"), vm.pause().unwrap());
        b.qp.post_recv(&RecvRequest { wr_id, scatter }).unwrap();
        a.qp.post_send(&send(wr_id)).unwrap();
        vm.kick(QUEUE_DOORBELL);
        let opens = std::thread::spawn({
            let vm = Arc::clone(&vm);
            move || vm.open().unwrap()
        });
        if wr_id == 0 {
            // The worker has had many turns when a peer has given up.
            outside.qp.post_send(&send(wr_id)).unwrap();
            assert_eq!(outside.completion().status, WC_STATUS_RETRY_EXC_ERR);
        }
        assert_eq!(a.cq.poll(&mut [Completion::default()]).unwrap(), 0);
        assert_eq!(backend.counter("control_requests"), served);

        vm.resume(&bases).unwrap();
        for end in [&a, &b] {
            let done = end.completion();
            assert_eq!((done.status, done.wr_id.get()), (0, wr_id));
        }
        drop(opens.join().unwrap());
    }
    assert!(!a.context.is_dead());
}

#[test]
fn a_device_goes_on_with_the_next_backend() {
    let mut backend = Backend::start();
    let vm = boot(&backend);
    for _ in 0..3 {
        exchange_with_events(&vm);
        backend.kill_and_start();
        vm.reconnect(&backend.path("vm1")).unwrap();
    }
    exchange_with_events(&vm);
}

/// The driver asks once a second whether its backend lives: the next one lives, too, and has no
/// context of its programs.
#[test]
fn a_backend_that_is_another_one_says_so_in_each_answer() {
    let mut backend = Backend::start();
    let vm = boot(&backend);
    let _open = vm.open().unwrap();
    let mut lives = vec![vm.config().generation.get()];
    for _ in 0..3 {
        assert_eq!(vm.ping().unwrap(), *lives.last().unwrap());
        backend.kill_and_start();
        vm.reconnect(&backend.path("vm1")).unwrap();
        let now = vm.ping().unwrap();
        assert!(now != 0 && !lives.contains(&now));
        lives.push(now);
        // Also an answer that refuses.
        let close = Request {
            op: OP_CLOSE.into(),
            ..Request::default()
        };
        let size = u32::try_from(size_of::<Reply>()).unwrap();
        let answer = vm.control_raw(close.as_bytes(), size).unwrap().unwrap();
        let reply = Reply::read_from_bytes(&answer.bytes).unwrap();
        let refusal = Errno::ENOENT.to_wire();
        assert_eq!((reply.status.get(), reply.value.get()), (refusal, now));
    }
    // Whoever boots at the same backend has a device of its own.
    drop(vm);
    let next = boot(&backend);
    assert!(!lives.contains(&next.config().generation.get()));
    assert_eq!(next.ping().unwrap(), next.config().generation.get());
}
