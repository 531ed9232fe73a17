//! A machine that is described with two nodes, and a disk with a path at each.

use super::Daemon;
use super::vmm::RAM;
use std::fs::{create_dir_all, write};
use std::path::{Path, PathBuf};

/// Where the memory of node 1 begins; the queue is on node 0.
pub const BORDER: u64 = RAM / 2;
pub const FAR: u64 = BORDER + (1 << 20);

/// Describes two nodes; all processors of this machine are of both.
fn describe_machine(folder: &Path) -> String {
    let root = folder.join("sysfs");
    let nodes = root.join("devices/system/node");
    let cpus = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    for (node, distances) in [("node0", "10 20"), ("node1", "20 10")] {
        create_dir_all(nodes.join(node)).unwrap();
        write(nodes.join(node).join("cpulist"), &cpus).unwrap();
        write(nodes.join(node).join("distance"), distances).unwrap();
    }
    write(nodes.join("online"), "0-1\n").unwrap();
    root.display().to_string()
}

/// A daemon whose disk has two paths, which are the same file.
pub fn start(folder: &Path, words: &[&str]) -> Daemon {
    let [disk, link] = ["disk", "link"].map(|name| folder.join(name));
    let _ = std::fs::hard_link(&disk, &link);
    start_over(folder, &[disk, link], words)
}

/// A daemon whose disk has these paths, one a node.
pub fn start_over(folder: &Path, paths: &[PathBuf; 2], words: &[&str]) -> Daemon {
    let mut all = vec![
        "--socket-path".to_owned(),
        folder.join("socket").display().to_string(),
        "--sysfs".to_owned(),
        describe_machine(folder),
    ];
    for (node, path) in paths.iter().enumerate() {
        all.push("--path".to_owned());
        all.push(format!("node={node},dev={}", path.display()));
        all.push("--memory-node".to_owned());
        let start = node as u64 * BORDER;
        all.push(format!("node={node},start={start},length={BORDER}"));
    }
    let words = all.iter().map(String::as_str).chain(words.iter().copied());
    Daemon::with(folder, &words.collect::<Vec<_>>())
}
