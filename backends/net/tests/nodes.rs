//! A VM whose memory is on two nodes, which this machine is described to have.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Backend, TAP, datagram, echo, host_socket, next_datagram, wait_until};
use farlane_support::process::metric;
use farlane_vm_front_end::net::{Nic, Options, feature};
use std::path::Path;

/// Describes a machine with two nodes of a processor each, as sysfs has it.
fn describe(root: &Path) {
    let nodes = root.join("devices/system/node");
    for (node, distances) in [(0, "10 21"), (1, "21 10")] {
        let folder = nodes.join(format!("node{node}"));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("cpulist"), format!("{node}\n")).unwrap();
        std::fs::write(folder.join("distance"), format!("{distances}\n")).unwrap();
    }
    std::fs::write(nodes.join("online"), "0-1\n").unwrap();
}

/// Bytes by node of data and worker.
fn bytes(backend: &Backend, direction: &str, data: u32, worker: u32) -> u64 {
    let [data, worker] = [data, worker].map(|node| node.to_string());
    let labels = [
        ("net", TAP),
        ("path", TAP),
        ("direction", direction),
        ("data", &data),
        ("worker", &worker),
    ];
    let name = "farlane_net_locality_bytes{";
    metric(&backend.metrics(), name, &labels)
}

#[test]
fn every_byte_is_moved_by_the_worker_of_its_node_and_flows_follow_their_senders() {
    let options = Options {
        pairs: 2,
        features: feature::PLAIN,
        ..Options::default()
    };
    let sysfs = tempfile::tempdir().unwrap();
    describe(sysfs.path());
    let ranges = Nic::ranges_of(options.memory_bytes).unwrap();
    let node = |node: usize| {
        let range = &ranges[node];
        format!(
            "node={node},start={:#x},length={}",
            range.start, range.length
        )
    };
    let sysfs = sysfs.path().display().to_string();
    let (first, second) = (node(0), node(1));
    let words = [
        "--sysfs",
        &sysfs,
        "--memory-node",
        &first,
        "--memory-node",
        &second,
    ];
    let backend = Backend::start(2, &words);
    let socket = host_socket();
    let mut nic = Nic::connect(&backend.socket(), &options).unwrap();
    for queue in [0, 1] {
        echo(&mut nic, &socket, queue, &[1; 1000]);
    }
    // They are counted when the answer may have come already.
    wait_until(|| bytes(&backend, "tx", 0, 0) > 1000 && bytes(&backend, "tx", 1, 1) > 1000);
    // The sender stays on the second node: so does what it receives, in the end.
    let mut got = [0; 2000];
    wait_until(|| {
        nic.send(1, &datagram(&[2; 1000])).unwrap();
        let (_, from) = socket.recv_from(&mut got).unwrap();
        socket.send_to(&[3; 1000], from).unwrap();
        next_datagram(&mut nic).0 == 1
    });
    wait_until(|| bytes(&backend, "rx", 1, 1) > 1000);
    for direction in ["rx", "tx"] {
        for (data, worker) in [(0, 1), (1, 0)] {
            assert_eq!(
                bytes(&backend, direction, data, worker),
                0,
                "{direction} {data} {worker}"
            );
        }
    }
}
