//! Workers of several NUMA nodes, on a machine that is described.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Backend, End, connect};
use farlane_abi::queue::{OP_RDMA_READ, OP_RDMA_WRITE, SEND_SIGNALED, WC_STATUS_SUCCESS};
use farlane_rdma_client::{Payload, SendRequest, Sge};
use farlane_support::process::metric;
use farlane_vm_front_end::guest_device::Vm;
use std::path::Path;
use std::sync::Arc;

const BYTES: u64 = 1 << 20;

/// Two nodes that share this machine's processors; of each VM's memory the lower half is on node 0,
/// the upper one on node 1.
fn two_nodes(folder: &Path) -> Vec<String> {
    let root = folder.join("sys");
    let nodes = root.join("devices/system/node");
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    for node in ["node0", "node1"] {
        std::fs::create_dir_all(nodes.join(node)).unwrap();
        std::fs::write(nodes.join(node).join("cpulist"), &online).unwrap();
    }
    std::fs::write(nodes.join("online"), "0-1").unwrap();
    vec![
        format!("--sysfs={}", root.display()),
        "--memory-node=node=0,start=0,length=1G".to_owned(),
        "--memory-node=node=1,start=4G,length=1G".to_owned(),
    ]
}

/// Whatever the VM takes from now on comes from the upper half of its memory.
fn fill_lower_half(vm: &Vm) {
    for length in [1 << 20, 1 << 12] {
        while vm.memory().take_in(0, length).is_ok() {}
    }
}

fn transfer(from: &End, to: &End, opcode: u8) {
    from.qp
        .post_send(&SendRequest {
            wr_id: 1,
            opcode,
            flags: SEND_SIGNALED,
            imm: 0,
            remote_addr: to.mr.address() as u64,
            rkey: to.mr.rkey(),
            payload: Payload::Gather(&[Sge {
                addr: (from.mr.address() as u64).into(),
                length: u32::try_from(BYTES).unwrap().into(),
                lkey: from.mr.lkey().into(),
            }]),
        })
        .unwrap();
    assert_eq!(from.completion().status, WC_STATUS_SUCCESS);
}

/// Bytes by node of the memory and node of the worker.
fn moved(backend: &Backend) -> [u64; 4] {
    let text = backend.metrics();
    [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")].map(|(data, worker)| {
        let labels = [("path", "memory"), ("data", data), ("worker", worker)];
        metric(&text, "farlane_rdma_locality_bytes{", &labels)
    })
}

#[test]
fn a_context_is_served_on_the_node_of_its_memory() {
    let backend = Backend::start_with(two_nodes);
    let (one, two) = (backend.vm(0), backend.vm(1));
    fill_lower_half(&two);
    let end = |vm: &Arc<Vm>| {
        let buffer = vm.allocate(BYTES).unwrap();
        let end = End::in_vm(vm, &buffer);
        (buffer, end)
    };
    let ((_here, a), (_there, b)) = (end(&one), end(&two));
    connect(&a, &b);
    assert_eq!(moved(&backend), [0; 4]);
    for _ in 0..3 {
        transfer(&a, &b, OP_RDMA_WRITE);
    }
    assert_eq!(moved(&backend), [3 * BYTES, 0, 0, 0]);
    transfer(&b, &a, OP_RDMA_WRITE);
    transfer(&b, &a, OP_RDMA_READ);
    assert_eq!(moved(&backend), [3 * BYTES, 0, 0, 2 * BYTES]);
    assert_eq!(backend.counter("locality_local_bytes"), 5 * BYTES);
    assert_eq!(backend.counter("locality_all_bytes"), 5 * BYTES);
}

#[test]
fn memory_on_another_node_than_its_queues_is_told_as_such() {
    let backend = Backend::start_with(two_nodes);
    let (one, two) = (backend.vm(0), backend.vm(1));
    let mut buffers = Vec::new();
    let mut ends = Vec::new();
    for vm in [&one, &two] {
        // The buffer from below, the queues from above.
        let buffer = vm.allocate(BYTES).unwrap();
        fill_lower_half(vm);
        ends.push(End::in_vm(vm, &buffer));
        buffers.push(buffer);
    }
    connect(&ends[0], &ends[1]);
    transfer(&ends[0], &ends[1], OP_RDMA_WRITE);
    assert_eq!(moved(&backend), [0, BYTES, 0, 0]);
}

#[test]
fn a_paused_vm_goes_on_where_its_memory_lies() {
    let backend = Backend::start_with(two_nodes);
    let (one, two) = (backend.vm(0), backend.vm(1));
    fill_lower_half(&one);
    let buffers = [one.allocate(BYTES).unwrap(), two.allocate(BYTES).unwrap()];
    let a = End::in_vm(&one, &buffers[0]);
    let b = End::in_vm(&two, &buffers[1]);
    connect(&a, &b);
    let bases = one.pause().unwrap();
    one.resume(&bases).unwrap();
    transfer(&a, &b, OP_RDMA_WRITE);
    assert_eq!(moved(&backend), [0, 0, 0, BYTES]);
}
