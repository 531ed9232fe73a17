//! The machine with two nodes: the real one, or one that is described.

use anyhow::Result;
use farlane_vm_front_end::net::Range;
use farlane_zero_copy::topology::{Node, Topology};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Nodes that are steered between.
pub const NODES: u32 = 2;

/// Where the backends read what machine it is.
#[derive(Debug)]
pub struct Machine {
    /// For `--sysfs`.
    pub sysfs: PathBuf,
    /// The nodes are real: memory is bound to them.
    pub is_real: bool,
}

impl Machine {
    /// This machine, if it has two nodes with memory and processors of their own. Otherwise one
    /// that has this machine's processors in turns, described in `folder`.
    pub fn find(folder: &Path) -> Result<Self> {
        let this = Topology::default();
        let nodes = [Node(0), Node(1)];
        if this.nodes().starts_with(&nodes) && nodes.iter().all(|n| !this.cpus(*n).is_empty()) {
            return Ok(Self {
                sysfs: "/sys".into(),
                is_real: true,
            });
        }
        farlane_kit::numa::describe_this(folder, NODES)?;
        Ok(Self {
            sysfs: folder.to_owned(),
            is_real: false,
        })
    }

    /// The words that tell a backend of the machine, and on which node each range of the VM's
    /// memory is.
    pub fn words(&self, ranges: &[Range; 2]) -> Vec<OsString> {
        let mut words = vec!["--sysfs".into(), self.sysfs.clone().into_os_string()];
        for (node, Range { start, length }) in ranges.iter().enumerate() {
            words.push("--memory-node".into());
            words.push(format!("node={node},start={start:#x},length={length:#x}").into());
        }
        words
    }

    /// What memory is bound to.
    pub fn binding(&self) -> Option<[u32; 2]> {
        self.is_real.then_some([0, 1])
    }

    /// What is to be said of the figures.
    pub fn note(&self) -> &'static str {
        if self.is_real {
            "Two NUMA nodes: memory is bound to them, figures show steering and the memory's \
             distance."
        } else {
            "One NUMA node, two are described to the backends: figures show steering and what it \
             costs, not the memory's \
             distance. The same command shows both on a machine with two sockets."
        }
    }
}
