//! NUMA nodes as scenarios use them: fio whose thread and buffers are on nodes of choice, the
//! machine that backends are told of, and what they count of where data lay and what moved it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::numa::{Numa, describe_this};

use crate::fio::{Figures, Fio, VERIFY};
use crate::metrics::Metrics;
use crate::run::Run;

/// The nodes of the guests and machines here.
pub const NODES: [u32; 2] = [0, 1];

/// Bytes of [`Memory::Striped`] buffers that lie on one node before those on the next.
const STRIPE: u64 = 128 << 10;
/// The file of a guest that has them.
const STRIPED_FILE: &str = "/dev/shm/striped";

/// Where a job's buffers lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// On one node.
    On(u32),
    /// Page by page on one node and the other.
    Interleaved,
    /// By 256 KiB on one node and the other.
    Striped,
}

/// A job of fio: the node of its thread, and that of its buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// On whose processors it runs.
    pub cpu: u32,
    /// Its buffers.
    pub memory: Memory,
}

/// How a backend is told of two nodes on a machine that may have one: `--sysfs` and
/// `--memory-node`.
pub fn backend_words(run: &Run<'_>, numa: &Numa) -> Result<Vec<OsString>> {
    let folder = described(run)?;
    let mut words = vec!["--sysfs".into(), folder.into_os_string()];
    words.extend(numa.backend_words().into_iter().map(OsString::from));
    Ok(words)
}

/// This machine, described to have two nodes: the folder to be given as `--sysfs`.
pub fn described(run: &Run<'_>) -> Result<PathBuf> {
    let folder = run.path("sysfs");
    describe_this(&folder, u32::try_from(NODES.len())?)?;
    Ok(folder)
}

impl Placed {
    /// A job whose thread and buffers are on nodes.
    pub const fn new(cpu: u32, memory: Memory) -> Self {
        Self { cpu, memory }
    }

    /// What it is called in reports.
    pub fn name(self) -> String {
        let cpu = self.cpu;
        match self.memory {
            Memory::On(node) if node == cpu => format!("thread and buffers on node {node}"),
            Memory::On(node) => format!("thread on node {cpu}, buffers on node {node}"),
            Memory::Interleaved => format!("thread on node {cpu}, buffers on both by the page"),
            Memory::Striped => format!("thread on node {cpu}, buffers on both by 128 KiB"),
        }
    }

    /// The words of fio's command line for requests of at most `most` bytes, `depth` at a time.
    pub fn words(self, guest: &Guest, most: u64, depth: u64) -> Result<String> {
        let policy = match self.memory {
            Memory::On(node) => format!("--numa_mem_policy=bind:{node}"),
            Memory::Interleaved => "--numa_mem_policy=interleave:0-1".to_owned(),
            Memory::Striped => {
                // The policy is the file's: whoever maps it gets pages of those nodes.
                let bytes = (most * depth + STRIPE).next_multiple_of(STRIPE);
                guest.run(&format!(
                    "rm -f {STRIPED_FILE}; truncate -s {bytes} {STRIPED_FILE}; n=0; at=0; while [ \
                     $at -lt {bytes} ]; do \
                     numactl --offset=$at --length={STRIPE} --file={STRIPED_FILE} --membind=$n || \
                     exit 1; \
                     at=$((at + {STRIPE})); n=$((1 - n)); done"
                ))?;
                format!("--iomem=mmapshared:{STRIPED_FILE}")
            }
        };
        Ok(format!("--numa_cpu_nodes={} {policy}", self.cpu))
    }

    /// Has fio write at random, read everything back and check it.
    pub fn verify(self, guest: &Guest, file: &str, mib: u32) -> Result<Figures> {
        const DEPTH: u64 = 8;
        // A request is one request of the disk also where each of its pages is a segment. Of
        // striped buffers each piece is at least 64 KiB; of interleaved ones there are no more than
        // the backend splits a request into.
        let (sizes, most) = match self.memory {
            Memory::On(_) => ("4k-384k", 384 << 10),
            Memory::Interleaved => ("4k-256k", 256 << 10),
            Memory::Striped => ("64k-384k", 384 << 10),
        };
        let words = format!(
            "{VERIFY} --iodepth={DEPTH} --bsrange={sizes} --size={mib}m {}",
            self.words(guest, most, DEPTH)?
        );
        Ok(Fio::new(file, &words).verify(guest)?.0)
    }
}

/// What a backend counts: by the node of the data, the node of the worker, and the path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Locality(BTreeMap<(u32, u32, String), u64>);

impl Locality {
    /// Bytes, as in `locality_bytes`, of the device whose `label` has this value.
    pub fn bytes(metrics: &Metrics, label: &str, device: &str) -> Result<Self> {
        Self::bytes_where(metrics, &[(label, device)])
    }

    /// Those of which each label has its value.
    pub fn bytes_where(metrics: &Metrics, wanted: &[(&str, &str)]) -> Result<Self> {
        let mut cells = BTreeMap::new();
        for (labels, value) in metrics.labelled("locality_bytes") {
            let get = |name: &str| {
                let value = labels.get(name).map(String::as_str);
                value.with_context(|| format!("locality_bytes has no label {name}: {labels:?}"))
            };
            let mut is_wanted = true;
            for (name, value) in wanted {
                is_wanted &= get(name)? == *value;
            }
            if !is_wanted {
                continue;
            }
            let key = (
                get("data")?.parse()?,
                get("worker")?.parse()?,
                get("path")?.to_owned(),
            );
            *cells.entry(key).or_insert(0) += value;
        }
        ensure!(!cells.is_empty(), "No locality_bytes of {wanted:?}");
        Ok(Self(cells))
    }

    /// What has come since then.
    pub fn since(&self, before: &Self) -> Self {
        let cells = self.0.iter().map(|(key, value)| {
            let earlier = before.0.get(key).copied().unwrap_or(0);
            (key.clone(), value.saturating_sub(earlier))
        });
        Self(cells.collect())
    }

    /// All.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// What lay on a node.
    pub fn on(&self, node: u32) -> u64 {
        self.sum(|(data, _, _)| *data == node)
    }

    /// What was moved by the worker of the node on which it lay.
    pub fn local(&self) -> u64 {
        self.sum(|(data, worker, _)| data == worker)
    }

    /// What went over a path.
    pub fn over(&self, path: &str) -> u64 {
        self.sum(|(_, _, over)| over == path)
    }

    fn sum(&self, is: impl Fn(&(u32, u32, String)) -> bool) -> u64 {
        let cells = self.0.iter().filter(|(key, _)| is(key));
        cells.map(|(_, value)| value).sum()
    }
}

/// A part of a whole in per cent, rounded down: 100 means all.
///
/// # Errors
/// The whole is nothing.
pub fn per_cent(part: u64, whole: u64) -> Result<u64> {
    let share = (part * 100).checked_div(whole);
    share.context("A share of nothing")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_moved_where_is_summed() {
        let text = "x_locality_bytes{disk=\"d\",data=\"0\",worker=\"0\",path=\"a\"} 10\n\
            x_locality_bytes{disk=\"d\",data=\"1\",worker=\"0\",path=\"a\"} 3\n\
            x_locality_bytes{disk=\"d\",data=\"1\",worker=\"1\",path=\"b\"} 7\n\
            x_locality_bytes{disk=\"e\",data=\"1\",worker=\"1\",path=\"b\"} 100\n";
        let metrics = Metrics::parse(text, "x_");
        let all = Locality::bytes(&metrics, "disk", "d").unwrap();
        assert_eq!(
            (all.total(), all.local(), all.on(1), all.over("a")),
            (20, 17, 10, 13)
        );
        assert_eq!(all.since(&all).total(), 0);
        assert!(Locality::bytes(&metrics, "disk", "f").is_err());
    }

    #[test]
    fn all_but_a_byte_is_not_all() {
        assert_eq!(per_cent(999_999, 1_000_000).unwrap(), 99);
        assert_eq!(per_cent(5, 5).unwrap(), 100);
        assert!(per_cent(0, 0).is_err());
    }
}
