//! A machine that takes its time to say where memory lies.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
#[path = "common/feed.rs"]
mod feed;

use common::PATIENCE;
use farlane_vm_front_end::net::feature;
use farlane_zero_copy::topology::{Described, Machine, Node, Topology};
use feed::Feed;
use std::sync::{Arc, Condvar, Mutex};

/// Pages by which one address is looked at.
const FEW: usize = 4;

/// Two nodes. Says nothing of many pages before it is let.
#[derive(Clone, Debug)]
struct Slow {
    machine: Described,
    lets: Arc<(Mutex<bool>, Condvar)>,
}

impl Slow {
    fn let_go(&self) {
        *self.lets.0.lock().unwrap() = true;
        self.lets.1.notify_all();
    }
}

impl Machine for Slow {
    fn nodes(&self) -> Vec<Node> {
        self.machine.nodes()
    }

    fn cpus(&self, node: Node) -> Vec<u32> {
        self.machine.cpus(node)
    }

    fn memory_bytes(&self, node: Node) -> u64 {
        self.machine.memory_bytes(node)
    }

    fn distance(&self, from: Node, to: Node) -> Option<u32> {
        self.machine.distance(from, to)
    }

    fn node_of_function(&self, function: &str) -> Option<Node> {
        self.machine.node_of_function(function)
    }

    fn node_of_thread(&self, process: u32, thread: u32) -> Option<Node> {
        self.machine.node_of_thread(process, thread)
    }

    fn nodes_of_pages(&self, pages: &[*const u8]) -> Vec<Option<Node>> {
        let lets = self.lets.0.lock().unwrap();
        let waits = |lets: &mut bool| pages.len() > FEW && !*lets;
        drop(self.lets.1.wait_while(lets, waits).unwrap());
        self.machine.nodes_of_pages(pages)
    }

    fn binding(&self, address: *const u8) -> Option<Node> {
        self.machine.binding(address)
    }
}

#[test]
fn a_vmm_does_not_wait_until_its_memory_was_looked_at() {
    let slow = Slow {
        machine: Described::pair(),
        lets: Arc::default(),
    };
    let feed = Feed::start_on(2, Topology::of(slow.clone()));
    let (connected, wait) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut nic = feed.connect(feature::PLAIN);
            nic.send(0, &[0xff; 60]).unwrap();
            nic.drain().unwrap();
            connected.send(()).unwrap();
        });
        let came = wait.recv_timeout(PATIENCE);
        // Whoever waits goes on, also where it should not have waited.
        slow.let_go();
        came.expect("it waits");
    });
}
