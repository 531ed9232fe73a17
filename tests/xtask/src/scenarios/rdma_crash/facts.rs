//! What can be counted from outside: objects of the backend, pinned pages of guests, memory of the
//! daemon.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use farlane_kit::guest::Guest;

use super::super::rdma_stock::DEVICE;
use super::Stage;
use crate::conditions::wait_until;
use crate::metrics::Metrics;
use crate::run::Run;
use crate::way::Way;

/// What an allocator may take for its own purposes.
const SLACK_KIB: u64 = 512;
const SLACK_MAPPINGS: usize = 4;

/// Mappings of the queues that the kernel of a guest has for itself, at most: their pages lie
/// elsewhere each time that it boots, next to each other or not.
pub const KERNEL_MAPPINGS: usize = 100;

/// The backend's counters.
pub fn counters(run: &Run<'_>) -> Result<Metrics> {
    Metrics::read(&run.metrics(), "farlane_rdma_")
}

/// What there is now, and must be there again afterwards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    contexts: u64,
    queue_pairs: u64,
    memory_regions: u64,
    guests: Vec<Held>,
}

/// What a guest's kernel holds.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    /// Pinned pages.
    pinned: i64,
    /// References to the modules of the kernel's RDMA device; none to one that is not loaded.
    references: Vec<Option<String>>,
    /// Objects of its RDMA device, as `rdma` counts them.
    objects: String,
}

impl Facts {
    /// As things are now.
    pub fn of<const N: usize>(stage: &Stage<'_>, guests: [&Guest; N]) -> Result<Self> {
        let counters = counters(stage.run)?;
        let held = guests.into_iter().map(|guest| Held::of(stage.way, guest));
        Ok(Self {
            contexts: counters.get("contexts")?,
            queue_pairs: counters.get("queue_pairs")?,
            memory_regions: counters.get("memory_regions")?,
            guests: held.collect::<Result<_>>()?,
        })
    }

    /// Waits until things are again as they were, or as they were in another case.
    pub fn wait<const N: usize>(
        &self,
        or: &Facts,
        stage: &Stage<'_>,
        guests: [&Guest; N],
    ) -> Result<()> {
        let mut now = None;
        let same = || {
            let facts = now.insert(Facts::of(stage, guests)?);
            Ok(&*facts == self || &*facts == or)
        };
        wait_until("everything is released", same)
            .with_context(|| format!("There was {self:?} or {or:?}, and now there is {now:?}"))
    }
}

impl Held {
    fn of(way: Way, guest: &Guest) -> Result<Self> {
        let pinned = pinned(guest)?;
        // A program that keeps the file of our own driver keeps that, whatever became of the
        // device.
        let (modules, objects) = match way {
            Way::Library => (&[][..], String::new()),
            Way::Kernel => (way.modules(), objects(guest)?),
        };
        let references = modules.iter().map(|module| {
            let count = guest.read_file(&format!("/sys/module/{module}/refcnt"));
            count.ok()
        });
        Ok(Self {
            pinned,
            references: references.collect(),
            objects,
        })
    }
}

/// Behind the number of the device, which is another one each time that it comes.
fn objects(guest: &Guest) -> Result<String> {
    let line = guest.exec(&format!("rdma res show {DEVICE}"))?.all();
    let counts = line.split_once(DEVICE).map(|(_, counts)| counts.trim());
    Ok(counts.unwrap_or(&line).to_owned())
}

/// Pages that the guest's kernel has pinned and not let go.
fn pinned(guest: &Guest) -> Result<i64> {
    // Has the kernel add up what its processors have counted for themselves.
    guest.read_file("/proc/sys/vm/stat_refresh")?;
    let text = guest.read_file("/proc/vmstat")?;
    let value = |name: &str| -> Result<i64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let line = line.with_context(|| format!("The guest's kernel does not count {name}"))?;
        Ok(line.trim().parse()?)
    };
    Ok(value("nr_foll_pin_acquired ")? - value("nr_foll_pin_released ")?)
}

/// What a daemon holds of this machine.
#[derive(Debug, Clone, Copy)]
pub struct Holdings {
    /// Memory of its own, not what it shares with guests.
    pub memory_kib: u64,
    files: usize,
    mappings: usize,
}

impl Holdings {
    /// Of this process.
    pub fn of(pid: u32) -> Result<Self> {
        let process = Path::new("/proc").join(pid.to_string());
        let status = fs::read_to_string(process.join("status"))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let memory = line.and_then(|line| line.trim().strip_suffix(" kB"));
        Ok(Self {
            memory_kib: memory.context("No RssAnon")?.trim().parse()?,
            files: fs::read_dir(process.join("fd"))?.count(),
            mappings: fs::read_to_string(process.join("maps"))?.lines().count(),
        })
    }

    /// Waits until a process holds no more than before, apart from what an allocator takes for its
    /// own purposes. What is meant is that nothing stays, not how soon it goes: some of it is
    /// released behind the workers' backs, which takes as long as the machine lets it. What stays
    /// is what it still has after [`PATIENCE`](crate::conditions::PATIENCE).
    ///
    /// So many mappings it may have more.
    pub fn wait_shrunk(pid: u32, before: &Self, more: usize) -> Result<()> {
        let mut now = None;
        wait_until("the backend holds no more than before", || {
            let now = now.insert(Self::of(pid)?);
            Ok(now.memory_kib <= before.memory_kib + SLACK_KIB
                && now.files <= before.files
                && now.mappings <= before.mappings + SLACK_MAPPINGS + more)
        })
        .with_context(|| format!("The backend keeps something: {before:?}, then {now:?}"))
    }
}

/// The guest's clock, in seconds.
pub fn clock(guest: &Guest) -> Result<f64> {
    let uptime = guest.read_file("/proc/uptime")?;
    let seconds = uptime.split_whitespace().next();
    Ok(seconds.context("An empty /proc/uptime")?.parse()?)
}
