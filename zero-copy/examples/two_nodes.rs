//! Checks on a kernel that has two NUMA nodes, a processor each, that memory is found where it lies
//! and followed when it moves. Run by `cargo xtask scenario topology`; ends with a panic where
//! something is not so.
#![allow(clippy::unwrap_used)]

use farlane_zero_copy::placement::Placement;
use farlane_zero_copy::topology::{Node, Topology};
use farlane_zero_copy::{AddressSpace, Mapping};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

const HALF: u64 = 32 << 20;
const PAGE: usize = 4096;
/// `MPOL_BIND` and `MPOL_MF_MOVE_ALL`.
const BIND: i32 = 2;
const MOVE_ALL: i32 = 4;

fn done(rc: libc::c_long) {
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

/// A VM's memory as its monitor has it, and as its backend does.
struct Memory {
    file: OwnedFd,
    monitor: Mapping,
    space: Arc<AddressSpace>,
}

fn memory() -> Memory {
    let file = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 2 * HALF).unwrap();
    let monitor = Mapping::new(file.as_fd(), 0, 2 * HALF, true).unwrap();
    let space = AddressSpace::new();
    space.map(0, 2 * HALF, file.as_fd(), 0, true).unwrap();
    Memory {
        file,
        monitor,
        space,
    }
}

/// What the calling thread allocates from now on comes from this node.
fn allocate_on(node: u32) {
    let mask = 1_u64 << node;
    // SAFETY: the mask has 64 bits and is only read.
    done(unsafe { libc::syscall(libc::SYS_set_mempolicy, BIND, &raw const mask, 65_usize) });
}

/// The node of each half; none where one lies in pieces.
fn nodes(placement: &Placement) -> Option<[u32; 2]> {
    let map = placement.map();
    let node = |half| {
        let mut parts = Vec::new();
        map.cut(half, HALF, |node, _, _| parts.push(node.0));
        (parts.len() == 1).then(|| parts[0])
    };
    Some([node(0)?, node(HALF)?])
}

/// Moves half of the memory as the kernel's balancing does.
fn move_half(memory: &Memory, half: usize, node: i32) {
    let length = usize::try_from(HALF).unwrap();
    let base = memory.monitor.base().wrapping_add(half * length);
    let pages: Vec<_> = (0..length / PAGE)
        .map(|n| base.wrapping_add(n * PAGE))
        .collect();
    let nodes = vec![node; pages.len()];
    let mut status = vec![-1_i32; pages.len()];
    // SAFETY: all three have as many elements as is said; pages keep their contents.
    done(unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            nodes.as_ptr(),
            status.as_mut_ptr(),
            MOVE_ALL,
        )
    });
    assert!(status.iter().all(|s| *s == node), "{status:?}");
}

fn main() {
    let topology = Topology::default();
    assert_eq!(topology.nodes(), [Node(0), Node(1)]);
    for node in [0, 1] {
        assert_eq!(topology.cpus(Node(node)), [node]);
        assert!(topology.memory_bytes(Node(node)) > 0);
    }
    println!(
        "two nodes, distance {:?}",
        topology.distance(Node(0), Node(1))
    );

    // The monitor touches; the backend only looks.
    let vm = memory();
    let placement = Placement::new(Arc::clone(&vm.space), topology.clone(), Vec::new());
    assert_eq!(nodes(&placement), Some([0, 0]));
    assert_eq!(rustix::fs::fstat(&vm.file).unwrap().st_blocks, 0);
    let zeroes = vec![0_u8; usize::try_from(HALF).unwrap()];
    for (half, node) in [(0, 1), (HALF, 0)] {
        allocate_on(node);
        let written = rustix::io::pwrite(&vm.file, &zeroes, half).unwrap();
        assert_eq!(written, zeroes.len());
    }
    placement.refresh();
    assert_eq!(nodes(&placement), Some([1, 0]));
    println!("touched memory is found on nodes 1 and 0");

    let watch = placement.watch(Duration::from_millis(10)).unwrap();
    assert!(watch.is_some());
    for (half, node, expected) in [(0, 0, [0, 0]), (1, 1, [0, 1]), (0, 1, [1, 1])] {
        // Pages are moved where they are mapped.
        for page in (0..zeroes.len()).step_by(PAGE) {
            let at = half * zeroes.len() + page;
            // SAFETY: inside of the mapping, which nobody changes meanwhile.
            unsafe { vm.monitor.base().wrapping_add(at).read_volatile() };
        }
        move_half(&vm, half, node);
        while nodes(&placement) != Some(expected) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    drop(watch);
    println!("moved memory is followed");

    let vm = memory();
    let mask = 2_u64;
    // SAFETY: the mapping is this program's own; the mask has 64 bits.
    done(unsafe {
        libc::syscall(
            libc::SYS_mbind,
            vm.monitor.base(),
            vm.monitor.len(),
            BIND,
            &raw const mask,
            65_usize,
            0,
        )
    });
    let placement = Placement::new(Arc::clone(&vm.space), topology.clone(), Vec::new());
    assert_eq!(nodes(&placement), Some([1, 1]));
    assert_eq!(rustix::fs::fstat(&vm.file).unwrap().st_blocks, 0);
    println!("bound memory is known before it is touched");

    for cpu in [0, 1] {
        let topology = topology.clone();
        let thread = std::thread::spawn(move || {
            let mut set = rustix::thread::CpuSet::new();
            set.set(cpu);
            rustix::thread::sched_setaffinity(None, &set).unwrap();
            let thread = rustix::thread::gettid()
                .as_raw_nonzero()
                .get()
                .unsigned_abs();
            topology.node_of_thread(std::process::id(), thread)
        });
        let node = u32::try_from(cpu).unwrap();
        assert_eq!(thread.join().unwrap(), Some(Node(node)));
    }
    println!("threads are found on their nodes");
}
