//! The machine as the kernel describes it.

use super::{Machine, Node};
use std::path::{Path, PathBuf};

/// `get_mempolicy`: the policy of the memory at an address (`MPOL_F_ADDR`).
const OF_ADDRESS: libc::c_ulong = 2;
/// `MPOL_BIND`.
const BIND: i32 = 2;
/// Nodes of a mask that is asked for.
const MASK_BITS: usize = 1024;

/// What sysfs and procfs tell, below any folder: `/sys` on a real machine.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self::new(Path::new("/sys"))
    }
}

impl Sysfs {
    /// Reads below `root`.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        std::fs::read_to_string(self.root.join(path)).ok()
    }

    fn node_of_cpu(&self, cpu: u32) -> Option<Node> {
        let mut nodes = self.nodes().into_iter();
        nodes.find(|node| self.cpus(*node).contains(&cpu))
    }
}

impl Machine for Sysfs {
    fn nodes(&self) -> Vec<Node> {
        let online = self.read("devices/system/node/online");
        online
            .and_then(|text| parse_list(text.trim()))
            .filter(|nodes| !nodes.is_empty())
            .unwrap_or_else(|| vec![0])
            .into_iter()
            .map(Node)
            .collect()
    }

    fn cpus(&self, node: Node) -> Vec<u32> {
        let list = self
            .read(format!("devices/system/node/node{node}/cpulist"))
            .or_else(|| self.read("devices/system/cpu/online"));
        list.and_then(|text| parse_list(text.trim()))
            .unwrap_or_default()
    }

    fn distance(&self, from: Node, to: Node) -> Option<u32> {
        let at = self.nodes().iter().position(|node| *node == to)?;
        let text = self.read(format!("devices/system/node/node{from}/distance"))?;
        text.split_whitespace().nth(at)?.parse().ok()
    }

    fn node_of_function(&self, function: &str) -> Option<Node> {
        let text = self.read(format!("bus/pci/devices/{function}/numa_node"))?;
        text.trim().parse().ok().map(Node)
    }

    fn node_of_thread(&self, process: u32, thread: u32) -> Option<Node> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/stat")).ok()?;
        // After the name, which is in brackets and may have any character; the processor is field 39 (proc(5)).
        let after = stat.rsplit_once(')')?.1;
        let cpu = after.split_whitespace().nth(36)?.parse().ok()?;
        self.node_of_cpu(cpu)
    }

    fn nodes_of_pages(&self, pages: &[*const u8]) -> Vec<Option<Node>> {
        let mut addresses: Vec<*mut libc::c_void> =
            pages.iter().map(|page| page.cast_mut().cast()).collect();
        let mut status = vec![-1_i32; pages.len()];
        // SAFETY: without target nodes move_pages moves nothing; it reads as many addresses, which it checks itself, and
        // writes as many words of `status`.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                pages.len(),
                addresses.as_mut_ptr(),
                std::ptr::null::<i32>(),
                status.as_mut_ptr(),
                0,
            )
        };
        let node = |status: i32| u32::try_from(status).ok().filter(|_| rc == 0).map(Node);
        status.into_iter().map(node).collect()
    }

    fn binding(&self, address: *const u8) -> Option<Node> {
        let mut mode = 0_i32;
        let mut mask = [0_u64; MASK_BITS / 64];
        // SAFETY: `mode` and `mask` are written, and have the sizes that are said; the address is only looked up.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                mask.as_mut_ptr(),
                MASK_BITS,
                address.addr(),
                OF_ADDRESS,
            )
        };
        if rc != 0 || mode & 0xff != BIND {
            return None;
        }
        let mut nodes = mask.iter().zip(0_u32..).flat_map(|(word, index)| {
            (0..64_u32)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| index * 64 + bit)
        });
        match (nodes.next(), nodes.next()) {
            (Some(node), None) => Some(Node(node)),
            _ => None,
        }
    }
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

    #[test]
    fn any_machine_can_be_described() {
        let root = tempfile::tempdir().unwrap();
        let nodes = |root: &Path| Sysfs::new(root).nodes();
        assert_eq!(nodes(root.path()), [Node(0)]);
        let dir = root.path().join("devices/system/node");
        std::fs::create_dir_all(dir.join("node4")).unwrap();
        std::fs::write(dir.join("online"), "0-1,4\n").unwrap();
        assert_eq!(nodes(root.path()), [Node(0), Node(1), Node(4)]);
        std::fs::write(dir.join("node4/cpulist"), "3,8-9\n").unwrap();
        std::fs::write(dir.join("node4/distance"), "21 31 10\n").unwrap();
        let machine = Sysfs::new(root.path());
        assert_eq!(machine.cpus(Node(4)), [3, 8, 9]);
        assert_eq!(machine.distance(Node(4), Node(1)), Some(31));
        assert_eq!(machine.distance(Node(1), Node(4)), None);
        std::fs::write(dir.join("online"), "3-1\n").unwrap();
        assert_eq!(nodes(root.path()), [Node(0)]);
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
}
