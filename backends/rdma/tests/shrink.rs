//! A VMM that takes back memory which it has shared: it has lost it, and nobody else notices.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, Partner, connect_to, say, told, until};
use farlane_abi::config::{QUEUE_CONTROL, QUEUE_EVENT};
use farlane_abi::queue::{OP_RDMA_READ, OP_RDMA_WRITE, SEND_SIGNALED};
use farlane_rdma_client::{Payload, SendRequest, Sge};
use farlane_vm_front_end::guest_device::Vm;

/// Tells a child of this test, which may end by what it does, at which socket to be a VM.
const SOCKET: &str = "FARLANE_SHRINK_SOCKET";
const NAME: &str = "a_vmm_that_shrinks_its_memory_harms_itself_alone";
const LENGTH: usize = 1 << 20;

/// What the child does. It touches none of its memory once it is gone.
fn vm(socket: &str) {
    let vm = Vm::connect(socket.as_ref(), 64 << 20).unwrap();
    let buffer = vm.allocate(LENGTH as u64).unwrap();
    let end = End::in_vm(&vm, &buffer);
    let (number, gid) = (end.qp.number(), end.context.gid(1, 0).unwrap().raw);
    let (address, key) = (end.mr.address(), end.mr.rkey());
    let gid = u128::from_be_bytes(gid);
    say(format!("{number} {address} {key} {gid}"));
    let peer: Vec<String> = told().split(' ').map(str::to_owned).collect();
    let gid: u128 = peer[1].parse().unwrap();
    connect_to(&end.qp, peer[0].parse().unwrap(), gid.to_be_bytes());
    say("connected");
    told();
    vm.halt();
    rustix::fs::ftruncate(vm.memory().file(), 0).unwrap();
    say("shrunk");
    told();
    vm.kick(QUEUE_CONTROL);
    vm.kick(QUEUE_EVENT);
    say("kicked");
    told();
    let bases = vm.pause().unwrap();
    vm.resume(&bases).unwrap();
    say("restarted");
    told();
    std::process::exit(0);
}

#[test]
fn a_vmm_that_shrinks_its_memory_harms_itself_alone() {
    if let Ok(socket) = std::env::var(SOCKET) {
        return vm(&socket);
    }
    let mut backend = Backend::start_with_log();
    let mut vmm = Partner::start(NAME, SOCKET, &backend.path("vm0"));
    let other = backend.vm(1);
    let buffer = other.allocate(LENGTH as u64).unwrap();
    let ends = [(); 3].map(|()| End::in_vm(&other, &buffer));
    common::connect(&ends[0], &ends[1]);
    let of_vm: Vec<u128> = vmm.hear().split(' ').map(|n| n.parse().unwrap()).collect();
    connect_to(
        &ends[2].qp,
        of_vm[0].try_into().unwrap(),
        of_vm[3].to_be_bytes(),
    );
    let gid = u128::from_be_bytes(ends[2].context.gid(1, 0).unwrap().raw);
    vmm.tell(&format!("{} {gid}", ends[2].qp.number()));
    assert_eq!(vmm.hear(), "connected");

    let move_bytes = |end: &End, opcode, address: u64, rkey| {
        let all = Sge {
            addr: (end.mr.address() as u64).into(),
            length: u32::try_from(LENGTH).unwrap().into(),
            lkey: end.mr.lkey().into(),
        };
        let request = SendRequest {
            wr_id: 1,
            opcode,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: address,
            rkey,
            payload: Payload::Gather(&[all]),
        };
        end.qp.post_send(&request).unwrap();
        end.completion().status
    };
    let into_vm = |opcode| {
        let (address, key) = (of_vm[1].try_into().unwrap(), of_vm[2].try_into().unwrap());
        move_bytes(&ends[2], opcode, address, key)
    };
    let still_serves = || {
        let to = &ends[1].mr;
        let status = move_bytes(&ends[0], OP_RDMA_WRITE, to.address() as u64, to.rkey());
        assert_eq!(status, 0);
    };
    assert_eq!(into_vm(OP_RDMA_WRITE), 0);
    vmm.tell("shrink");
    assert_eq!(vmm.hear(), "shrunk");
    // Registered memory. Each may succeed, as far as anybody can tell.
    into_vm(OP_RDMA_WRITE);
    // Rings and work queues: the worker looks at those of all that it serves.
    still_serves();
    until("the context to be cut off", || {
        backend.counter("refused") == 1
    });
    // Its queues.
    vmm.tell("kick");
    assert_eq!(vmm.hear(), "kicked");
    until("the backend to find nonsense in its queue", || {
        backend.assert_alive();
        backend.log().contains("a broken control queue")
    });
    vmm.tell("restart");
    assert_eq!(vmm.hear(), "restarted");
    still_serves();
    drop(vmm);
    until("its context to be closed", || {
        backend.counter("contexts") == 3
    });
    into_vm(OP_RDMA_READ);
    still_serves();
    backend.assert_alive();
}
