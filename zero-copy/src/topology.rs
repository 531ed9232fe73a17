//! On which NUMA node memory lies.

use std::path::{Path, PathBuf};

/// A NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node(pub u32);

/// The machine as sysfs describes it.
#[derive(Clone, Debug)]
pub struct Topology {
    sysfs: PathBuf,
}

impl Default for Topology {
    fn default() -> Self {
        Self::new(Path::new("/sys"))
    }
}

impl Topology {
    /// Reads below `sysfs`, `/sys` on a real machine.
    #[must_use]
    pub fn new(sysfs: &Path) -> Self {
        Self {
            sysfs: sysfs.to_owned(),
        }
    }

    /// The nodes that are online, in order. A machine that says nothing has node 0.
    #[must_use]
    pub fn nodes(&self) -> Vec<Node> {
        std::fs::read_to_string(self.sysfs.join("devices/system/node/online"))
            .ok()
            .and_then(|text| parse_list(text.trim()))
            .unwrap_or_else(|| vec![Node(0)])
    }

    /// The node that most of up to 16 sampled pages of `[address, address + length)` of this
    /// process lie on; `None` where no sampled page has memory behind it, or the kernel does not
    /// say.
    #[must_use]
    pub fn node_of_range(&self, address: *const u8, length: usize) -> Option<Node> {
        const SAMPLES: usize = 16;
        let pages = length.div_ceil(4096);
        let count = pages.min(SAMPLES);
        if count == 0 {
            return None;
        }
        let mut addresses: Vec<*mut libc::c_void> = (0..count)
            .map(|i| {
                address
                    .wrapping_add(i * (pages / count) * 4096)
                    .cast_mut()
                    .cast()
            })
            .collect();
        let mut status = vec![-1i32; count];
        // SAFETY: without target nodes move_pages moves nothing; it reads `count` addresses, which
        // it checks itself, and writes `count` words of `status`.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                count,
                addresses.as_mut_ptr(),
                std::ptr::null::<i32>(),
                status.as_mut_ptr(),
                0,
            )
        };
        if rc != 0 {
            return None;
        }
        let mut votes = std::collections::BTreeMap::new();
        for node in status.into_iter().filter_map(|s| u32::try_from(s).ok()) {
            *votes.entry(node).or_insert(0u32) += 1;
        }
        votes
            .into_iter()
            .max_by_key(|&(_, count)| count)
            .map(|(node, _)| Node(node))
    }
}

/// Parses the kernel's list format, such as `0-1,4`.
fn parse_list(text: &str) -> Option<Vec<Node>> {
    let mut nodes = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || last - first > 1024 {
            return None;
        }
        nodes.extend((first..=last).map(Node));
    }
    Some(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_machine_can_be_described() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Topology::new(root.path()).nodes(), [Node(0)]);
        let dir = root.path().join("devices/system/node");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("online"), "0-1,4\n").unwrap();
        assert_eq!(
            Topology::new(root.path()).nodes(),
            [Node(0), Node(1), Node(4)]
        );
        std::fs::write(dir.join("online"), "3-1\n").unwrap();
        assert_eq!(Topology::new(root.path()).nodes(), [Node(0)]);
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
