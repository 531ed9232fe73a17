//! The machine as the kernel describes it.

use super::{Machine, Node};
use std::path::{Path, PathBuf};

/// What there is to know of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    node: Node,
    /// Empty for a node that is only memory.
    cpus: Vec<u32>,
    /// To each node that is online, in order.
    distances: Vec<u32>,
    /// Zero for a node that is only processors.
    memory_bytes: u64,
}

/// What sysfs and procfs tell, below any folder: `/sys` on a real machine.
///
/// Nodes, processors and distances are read once: a backend that has confined itself opens no files
/// any more. Nodes that come later are not seen.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
    nodes: Vec<Known>,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self::new(Path::new("/sys"))
    }
}

impl Sysfs {
    /// Reads below `root`. Where nothing is said of nodes there is one, with all processors.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        let mut sysfs = Self {
            root: root.to_owned(),
            nodes: Vec::new(),
        };
        sysfs.nodes = sysfs.known();
        sysfs
    }

    /// The folder.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether the folder says anything of nodes.
    #[must_use]
    pub fn describes_nodes(&self) -> bool {
        self.root.join("devices/system/node/online").exists()
    }

    pub(super) fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        std::fs::read_to_string(self.root.join(path)).ok()
    }

    fn list(&self, path: impl AsRef<Path>) -> Option<Vec<u32>> {
        parse_list(self.read(path)?.trim())
    }

    fn known(&self) -> Vec<Known> {
        let online = self.list("devices/system/node/online").unwrap_or_default();
        let known = |number: u32| {
            let folder = format!("devices/system/node/node{number}");
            let distances = self.read(format!("{folder}/distance")).unwrap_or_default();
            let numbers = distances.split_whitespace().map_while(|n| n.parse().ok());
            Known {
                node: Node(number),
                cpus: self.list(format!("{folder}/cpulist")).unwrap_or_default(),
                distances: numbers.collect(),
                memory_bytes: self
                    .read(format!("{folder}/meminfo"))
                    .and_then(|text| parse_meminfo(&text))
                    .unwrap_or_default(),
            }
        };
        if !online.is_empty() {
            return online.into_iter().map(known).collect();
        }
        vec![Known {
            node: Node(0),
            cpus: self.list("devices/system/cpu/online").unwrap_or_default(),
            distances: vec![10],
            memory_bytes: 0,
        }]
    }

    fn get(&self, node: Node) -> Option<&Known> {
        self.nodes.iter().find(|known| known.node == node)
    }

    fn is_node(&self, node: Node) -> bool {
        self.get(node).is_some()
    }

    fn node_of_cpu(&self, cpu: u32) -> Option<Node> {
        let mut nodes = self.nodes.iter();
        nodes
            .find(|known| known.cpus.contains(&cpu))
            .map(|known| known.node)
    }

    /// The node of all processors on which a thread may run, where it is one.
    fn node_of_affinity(&self, thread: u32) -> Option<Node> {
        let thread = rustix::process::Pid::from_raw(i32::try_from(thread).ok()?)?;
        let set = rustix::thread::sched_getaffinity(Some(thread)).ok()?;
        let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu));
        let mut nodes = cpus.map(|cpu| u32::try_from(cpu).ok().and_then(|c| self.node_of_cpu(c)));
        let first = nodes.next()??;
        nodes.all(|node| node == Some(first)).then_some(first)
    }
}

impl Machine for Sysfs {
    fn nodes(&self) -> Vec<Node> {
        self.nodes.iter().map(|known| known.node).collect()
    }

    fn cpus(&self, node: Node) -> Vec<u32> {
        self.get(node)
            .map(|known| known.cpus.clone())
            .unwrap_or_default()
    }

    fn memory_bytes(&self, node: Node) -> u64 {
        self.get(node).map_or(0, |known| known.memory_bytes)
    }

    fn distance(&self, from: Node, to: Node) -> Option<u32> {
        let at = self.nodes.iter().position(|known| known.node == to)?;
        self.get(from)?.distances.get(at).copied()
    }

    fn node_of_function(&self, function: &str) -> Option<Node> {
        // A name of one folder, whoever it is from.
        if function.contains('/') || function.starts_with('.') {
            return None;
        }
        let text = self.read(format!("bus/pci/devices/{function}/numa_node"))?;
        // -1: the firmware does not say.
        let node = Node(text.trim().parse().ok()?);
        self.is_node(node).then_some(node)
    }

    fn node_of_thread(&self, process: u32, thread: u32) -> Option<Node> {
        if let Some(node) = self.node_of_affinity(thread) {
            return Some(node);
        }
        let stat = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/stat")).ok()?;
        self.node_of_cpu(cpu_of_stat(&stat)?)
    }

    fn nodes_of_pages(&self, pages: &[*const u8]) -> Vec<Option<Node>> {
        let mut nodes = super::memory::nodes(pages);
        for node in &mut nodes {
            *node = node.filter(|node| self.is_node(*node));
        }
        nodes
    }

    fn binding(&self, address: *const u8) -> Option<Node> {
        super::memory::binding(address).filter(|node| self.is_node(*node))
    }

    fn preference(&self, address: *const u8) -> Option<Node> {
        super::memory::preference(address).filter(|node| self.is_node(*node))
    }
}

/// The processor of `/proc/PID/stat`, field 39 (proc(5)); the name, in brackets, may have any
/// character.
fn cpu_of_stat(stat: &str) -> Option<u32> {
    let after = stat.rsplit_once(')')?.1;
    after.split_whitespace().nth(36)?.parse().ok()
}

/// The bytes of a node's `meminfo`: `Node 0 MemTotal:  16316000 kB`.
fn parse_meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains(" MemTotal:"))?;
    let number: u64 = line.split_whitespace().nth(3)?.parse().ok()?;
    number.checked_mul(1024)
}

/// Parses the kernel's list format, such as `0-1,4`.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    if text.is_empty() {
        return Some(Vec::new());
    }
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || last - first > 8192 {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Topology;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn any_machine_can_be_described() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let nodes = || Sysfs::new(root).nodes();
        assert_eq!(nodes(), [Node(0)]);
        write(root, "devices/system/cpu/online", "0-3\n");
        assert_eq!(Sysfs::new(root).cpus(Node(0)), [0, 1, 2, 3]);
        write(root, "devices/system/node/online", "0-1,4\n");
        assert_eq!(nodes(), [Node(0), Node(1), Node(4)]);
        write(root, "devices/system/node/node4/cpulist", "3,8-9\n");
        write(root, "devices/system/node/node4/distance", "21 31 10\n");
        let total = "Node 4 MemTotal:       16316000 kB\nNode 4 MemFree: 1 kB\n";
        write(root, "devices/system/node/node4/meminfo", total);
        write(root, "devices/system/node/node1/cpulist", "\n");
        let machine = Sysfs::new(root);
        assert_eq!(machine.cpus(Node(4)), [3, 8, 9]);
        assert_eq!(machine.memory_bytes(Node(4)), 16_316_000 << 10);
        assert_eq!(machine.distance(Node(4), Node(1)), Some(31));
        assert_eq!(machine.distance(Node(1), Node(4)), None);
        // A node without processors has none, not all.
        assert!(machine.cpus(Node(1)).is_empty());
        assert_eq!(machine.node_of_cpu(9), Some(Node(4)));
        assert_eq!(machine.node_of_cpu(1), None);
        write(root, "devices/system/node/online", "3-1\n");
        assert_eq!(nodes(), [Node(0)]);
    }

    #[test]
    fn what_is_known_stays_known_when_files_cannot_be_read_any_more() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "devices/system/node/online", "0-1\n");
        let machine = Sysfs::new(folder.path());
        drop(folder);
        assert_eq!(machine.nodes(), [Node(0), Node(1)]);
    }

    #[test]
    fn a_function_that_is_on_no_node_is_on_none() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        write(root, "devices/system/node/online", "0-1\n");
        for (name, node) in [("0000:01:00.0", "1"), ("a", "-1"), ("b", "7"), ("c", "x")] {
            write(root, &format!("bus/pci/devices/{name}/numa_node"), node);
        }
        let machine = Sysfs::new(root);
        assert_eq!(machine.node_of_function("0000:01:00.0"), Some(Node(1)));
        for name in ["a", "b", "c", "d", "../devices/0000:01:00.0", ".."] {
            assert_eq!(machine.node_of_function(name), None, "{name}");
        }
    }

    #[test]
    fn a_thread_is_where_it_is_pinned_or_last_ran() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let set = rustix::thread::sched_getaffinity(None).unwrap();
        let mut cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu));
        let cpu = cpus.next().unwrap();
        write(root, "devices/system/node/online", "3,6\n");
        write(
            root,
            "devices/system/node/node6/cpulist",
            &format!("{cpu}\n"),
        );
        let machine = Sysfs::new(root);
        let pinned = std::thread::spawn(move || {
            let mut one = rustix::thread::CpuSet::new();
            one.set(cpu);
            rustix::thread::sched_setaffinity(None, &one).unwrap();
            let thread = rustix::thread::gettid().as_raw_nonzero().get();
            machine.node_of_thread(std::process::id(), u32::try_from(thread).unwrap())
        });
        assert_eq!(pinned.join().unwrap(), Some(Node(6)));
        let fields = (3..60).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        let stat = format!("7 (a) b) 1) {fields}");
        assert_eq!(cpu_of_stat(&stat), Some(39));
        assert_eq!(cpu_of_stat("7 (a"), None);
    }

    #[test]
    fn touched_memory_is_on_a_node_that_is_online() {
        let memory = vec![1u8; 1 << 20];
        let topology = Topology::default();
        // The kernel may have been built without the call; then nothing is claimed.
        if let Some(node) = topology.node_of_range(memory.as_ptr(), memory.len()) {
            assert!(topology.nodes().contains(&node));
        }
    }

    proptest::proptest! {
        #[test]
        fn lists_are_understood_or_refused(text in "[0-9,\\- x]{0,12}") {
            if let Some(list) = parse_list(&text) {
                proptest::prop_assert!(list.len() <= 8193 * 7);
            }
        }

        #[test]
        fn lists_come_back_as_they_were(
            ranges in proptest::collection::vec((0_u32..5000, 0_u32..50), 1..6)
        ) {
            let words: Vec<_> = ranges
                .iter()
                .map(|&(first, more)| match more {
                    0 => first.to_string(),
                    more => format!("{first}-{}", first + more),
                })
                .collect();
            let numbers: Vec<_> = ranges
                .iter()
                .flat_map(|&(first, more)| first..=first + more)
                .collect();
            proptest::prop_assert_eq!(parse_list(&words.join(",")), Some(numbers));
        }
    }
}
