//! Guests with NUMA nodes, devices on their nodes, and machines that are described to have nodes.
//!
//! The guest's kernel really has nodes: its allocator, its scheduler and its drivers act on them,
//! and each node's memory is a file of its own. The machine beneath may have one node. A backend is
//! then told of a *described machine* ([`describe`]) and of the guest's memory
//! ([`Numa::memory_nodes`]): what it steers is real, the cost of distance is not.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::attachments::option_value;

/// Memory that is certain to lie in one piece below the PCI hole of QEMU's q35.
const MOST_MEMORY_MIB: u32 = 2048;

/// How far a node is from itself, as firmware has it.
const NEAR: u32 = 10;

/// The first bus number of a node's host bridge, and how many it has.
const FIRST_BUS: usize = 0x40;
const BUSES: usize = 0x20;

/// The nodes of a guest. Its processors are numbered through, and its memory lies in the nodes'
/// order from address 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numa {
    nodes: Vec<Node>,
    distance: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Node {
    cpus: u32,
    memory_mib: u32,
}

/// Guest-physical memory that lies on one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNode {
    /// The node.
    pub node: u32,
    /// Its first address.
    pub start: u64,
    /// Its length in bytes.
    pub length: u64,
}

/// One NVMe subsystem with a controller on each of some nodes, and one namespace behind all of
/// them: a dual-ported disk. Controller N is called `<id>-cN` in QEMU, its port `<id>-cN-port`; all
/// of them, and the namespace, have the serial number `<id>`.
#[derive(Debug, Clone)]
pub struct NvmeSubsystem {
    /// Its id in QEMU.
    pub id: String,
    /// Where its blocks are.
    pub file: PathBuf,
    /// The node of each controller.
    pub nodes: Vec<u32>,
}

impl Numa {
    /// Two nodes with a processor each.
    #[must_use]
    pub fn pair(memory_mib_each: u32) -> Self {
        Self::new([(1, memory_mib_each); 2], 21)
    }

    /// Nodes, each with so many processors and MiB of memory; each is as far from each other as
    /// firmware has it (10 is near).
    #[must_use]
    pub fn new(nodes: impl IntoIterator<Item = (u32, u32)>, distance: u32) -> Self {
        let nodes = nodes.into_iter();
        let nodes = nodes.map(|(cpus, memory_mib)| Node { cpus, memory_mib });
        Self {
            nodes: nodes.collect(),
            distance,
        }
    }

    /// All processors.
    #[must_use]
    pub fn cpus(&self) -> u32 {
        self.nodes.iter().map(|node| node.cpus).sum()
    }

    /// All memory.
    #[must_use]
    pub fn memory_mib(&self) -> u32 {
        self.nodes.iter().map(|node| node.memory_mib).sum()
    }

    /// The node of each processor.
    #[must_use]
    pub fn nodes_of_cpus(&self) -> Vec<u32> {
        let nodes = (0..).zip(&self.nodes);
        nodes
            .flat_map(|(number, node)| (0..node.cpus).map(move |_| number))
            .collect()
    }

    /// Where each node's memory lies.
    #[must_use]
    pub fn memory_nodes(&self) -> Vec<MemoryNode> {
        let mut start = 0;
        let place = |(number, node): (u32, &Node)| {
            let length = u64::from(node.memory_mib) << 20;
            let place = MemoryNode {
                node: number,
                start,
                length,
            };
            start += length;
            place
        };
        (0..).zip(&self.nodes).map(place).collect()
    }

    /// The words that tell a backend the same.
    #[must_use]
    pub fn backend_words(&self) -> Vec<String> {
        let words = self.memory_nodes().into_iter().flat_map(|place| {
            let MemoryNode {
                node,
                start,
                length,
            } = place;
            let value = format!("node={node},start={start:#x},length={length:#x}");
            ["--memory-node".to_owned(), value]
        });
        words.collect()
    }

    /// The words for QEMU's command line, apart from `-smp` and `-m`.
    pub(crate) fn words(&self) -> Result<Vec<String>> {
        let total = self.memory_mib();
        ensure!(
            total <= MOST_MEMORY_MIB,
            "{total} MiB in all nodes: above {MOST_MEMORY_MIB} MiB a node's memory is not in one \
             piece"
        );
        let mut words = Vec::new();
        let mut cpu = 0;
        for (number, node) in (0_u32..).zip(&self.nodes) {
            let Node { cpus, memory_mib } = *node;
            words.push("-object".into());
            words.push(format!(
                "memory-backend-memfd,id=node{number},size={memory_mib}M,share=on"
            ));
            let range = match cpus {
                0 => String::new(),
                _ => format!("cpus={cpu}-{},", cpu + cpus - 1),
            };
            words.push("-numa".into());
            words.push(format!("node,nodeid={number},{range}memdev=node{number}"));
            cpu += cpus;
        }
        for (from, to) in self.pairs() {
            let distance = if from == to { NEAR } else { self.distance };
            words.push("-numa".into());
            words.push(format!("dist,src={from},dst={to},val={distance}"));
        }
        Ok(words)
    }

    /// Host bridges, one a node, for the devices that are on it.
    pub(crate) fn bridges(&self) -> Vec<String> {
        let words = (0..self.nodes.len()).flat_map(|number| {
            let bus = FIRST_BUS + number * BUSES;
            let bridge = format!(
                "pxb-pcie,id={},bus=pcie.0,bus_nr={bus},numa_node={number}",
                bridge(number)
            );
            ["-device".to_owned(), bridge]
        });
        words.collect()
    }

    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        let count = self.nodes.len();
        (0..count).flat_map(move |from| (0..count).map(move |to| (from, to)))
    }
}

fn bridge(node: impl std::fmt::Display) -> String {
    format!("node{node}-bridge")
}

/// The words for an empty PCIe port on a node.
pub(crate) fn node_port(id: &str, node: u32, number: u32) -> Vec<String> {
    let port = format!(
        "pcie-root-port,id={id},bus={},chassis={number},slot={number}",
        bridge(node)
    );
    vec!["-device".into(), port]
}

impl NvmeSubsystem {
    /// The words for QEMU's command line; its ports have numbers from `numbers`.
    pub(crate) fn words(&self, numbers: &mut impl Iterator<Item = u32>) -> Result<Vec<String>> {
        let Self { id, file, nodes } = self;
        let file = option_value(file)?;
        let mut words = vec![
            "-drive".into(),
            format!("if=none,id={id}-drive,format=raw,file={file}"),
            "-device".into(),
            format!("nvme-subsys,id={id}"),
        ];
        for ((index, node), number) in nodes.iter().enumerate().zip(numbers) {
            words.extend(node_port(&self.port(index), *node, number));
            // Not in JSON: QEMU makes those devices after all others, and the namespace needs this
            // one.
            let controller = self.controller_id(index);
            words.push("-device".into());
            words.push(format!(
                "nvme,id={controller},serial={id},subsys={id},bus={}",
                self.port(index)
            ));
        }
        words.push("-device".into());
        words.push(format!(
            "nvme-ns,id={id}-ns,drive={id}-drive,bus={},nsid=1,shared=on",
            self.controller_id(0)
        ));
        Ok(words)
    }

    /// What a controller is called in QEMU.
    #[must_use]
    pub fn controller_id(&self, index: usize) -> String {
        format!("{}-c{index}", self.id)
    }

    fn port(&self, index: usize) -> String {
        format!("{}-port", self.controller_id(index))
    }

    /// A controller for `device_add`.
    pub(crate) fn controller(&self, index: usize) -> Value {
        json!({
            "driver": "nvme",
            "id": self.controller_id(index),
            "serial": self.id,
            "subsys": self.id,
            "bus": self.port(index),
        })
    }
}

/// Describes a machine as sysfs does, below `root`: a node for each list of processors, `distance`
/// from each other, and PCI functions with the node that each is on.
///
/// # Errors
/// When the files cannot be written.
pub fn describe(
    root: &Path,
    nodes: &[Vec<u32>],
    distance: u32,
    functions: &[(&str, u32)],
) -> Result<()> {
    if nodes.is_empty() {
        bail!("A machine has at least one node");
    }
    let write = |path: String, text: String| {
        let path = root.join(path);
        let folder = path.parent().unwrap_or(root);
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&path, text + "\n"))
            .with_context(|| format!("Cannot write {}", path.display()))
    };
    let list = |numbers: &[u32]| {
        let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
        numbers.join(",")
    };
    let count = u32::try_from(nodes.len()).context("Too many nodes")?;
    let all: Vec<u32> = (0..count).collect();
    for name in ["online", "possible", "has_cpu", "has_memory"] {
        write(format!("devices/system/node/{name}"), list(&all))?;
    }
    for (number, cpus) in (0..).zip(nodes) {
        let folder = format!("devices/system/node/node{number}");
        let distances = all
            .iter()
            .map(|to| if *to == number { NEAR } else { distance });
        let distances: Vec<String> = distances.map(|distance| distance.to_string()).collect();
        write(format!("{folder}/cpulist"), list(cpus))?;
        write(format!("{folder}/distance"), distances.join(" "))?;
    }
    let mut cpus: Vec<u32> = nodes.concat();
    cpus.sort_unstable();
    cpus.dedup();
    write("devices/system/cpu/online".into(), list(&cpus))?;
    for (function, node) in functions {
        write(
            format!("bus/pci/devices/{function}/numa_node"),
            node.to_string(),
        )?;
    }
    Ok(())
}

/// This machine, described to have so many nodes: its processors are dealt out to them.
///
/// # Errors
/// When the files cannot be written.
pub fn describe_this(root: &Path, nodes: u32) -> Result<()> {
    let cpus = processors()?;
    let mut lists = vec![Vec::new(); usize::try_from(nodes)?];
    let count = lists.len();
    for (index, list) in lists.iter_mut().enumerate() {
        let own = cpus.iter().skip(index).step_by(count);
        list.extend(own);
        if list.is_empty() {
            // Fewer processors than nodes: they share.
            list.push(cpus[index % cpus.len()]);
        }
    }
    describe(root, &lists, 21, &[])
}

/// The processors that this process may use.
///
/// # Errors
/// When the kernel does not say.
pub fn processors() -> Result<Vec<u32>> {
    let set = rustix::thread::sched_getaffinity(None).context("Cannot see the processors")?;
    let all = 0..rustix::thread::CpuSet::MAX_CPU;
    let cpus = all.filter(|cpu| set.is_set(*cpu)).map(u32::try_from);
    let cpus: Vec<u32> = cpus.collect::<Result<_, _>>()?;
    ensure!(!cpus.is_empty(), "This process may use no processor");
    Ok(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_lies_in_the_order_of_the_nodes() {
        let numa = Numa::new([(2, 512), (0, 256), (1, 128)], 21);
        assert_eq!((numa.cpus(), numa.memory_mib()), (3, 896));
        assert_eq!(numa.nodes_of_cpus(), [0, 0, 2]);
        assert_eq!(
            numa.backend_words()[4..],
            ["--memory-node", "node=2,start=0x30000000,length=0x8000000"]
        );
        let words = numa.words().unwrap().join(" ");
        assert!(words.contains("-numa node,nodeid=0,cpus=0-1,memdev=node0"));
        assert!(words.contains("-numa node,nodeid=1,memdev=node1"));
        assert!(words.contains("-numa node,nodeid=2,cpus=2-2,memdev=node2"));
        assert!(words.contains("dist,src=0,dst=2,val=21") && words.contains("src=1,dst=1,val=10"));
    }

    #[test]
    fn memory_that_would_be_cut_is_refused() {
        assert!(Numa::pair(1024).words().is_ok());
        assert!(Numa::pair(1025).words().is_err());
    }

    #[test]
    fn a_namespace_comes_after_its_controllers() {
        let subsystem = NvmeSubsystem {
            id: "ss".into(),
            file: "/blocks".into(),
            nodes: vec![0, 1],
        };
        let words = subsystem.words(&mut (7..)).unwrap();
        let devices: Vec<&str> = words.chunks(2).map(|pair| pair[1].as_str()).collect();
        assert_eq!(
            devices,
            [
                "if=none,id=ss-drive,format=raw,file=/blocks",
                "nvme-subsys,id=ss",
                "pcie-root-port,id=ss-c0-port,bus=node0-bridge,chassis=7,slot=7",
                "nvme,id=ss-c0,serial=ss,subsys=ss,bus=ss-c0-port",
                "pcie-root-port,id=ss-c1-port,bus=node1-bridge,chassis=8,slot=8",
                "nvme,id=ss-c1,serial=ss,subsys=ss,bus=ss-c1-port",
                "nvme-ns,id=ss-ns,drive=ss-drive,bus=ss-c0,nsid=1,shared=on",
            ]
        );
    }

    #[test]
    fn a_machine_is_described_as_sysfs_does() {
        let root = tempfile::tempdir().unwrap();
        describe(root.path(), &[vec![0], vec![1]], 21, &[("0000:01:00.0", 1)]).unwrap();
        let read = |path: &str| fs::read_to_string(root.path().join(path)).unwrap();
        assert_eq!(read("devices/system/node/online"), "0,1\n");
        assert_eq!(read("devices/system/node/node1/distance"), "21 10\n");
        assert_eq!(read("devices/system/node/node1/cpulist"), "1\n");
        assert_eq!(read("bus/pci/devices/0000:01:00.0/numa_node"), "1\n");
    }

    #[test]
    fn each_node_has_a_processor() {
        let root = tempfile::tempdir().unwrap();
        describe_this(root.path(), 3).unwrap();
        for node in 0..3 {
            let path = format!("devices/system/node/node{node}/cpulist");
            let list = fs::read_to_string(root.path().join(path)).unwrap();
            assert!(!list.trim().is_empty());
        }
    }
}
