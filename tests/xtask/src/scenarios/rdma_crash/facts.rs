//! What can be counted from outside: objects of the backend, pinned pages of guests, memory of the
//! daemon.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use farlane_kit::guest::Guest;

use crate::conditions::wait_until;
use crate::metrics::Metrics;
use crate::run::Run;

/// What an allocator may take for its own purposes.
const SLACK_KIB: u64 = 512;
const SLACK_MAPPINGS: usize = 4;

/// The backend's counters.
pub fn counters(run: &Run<'_>) -> Result<Metrics> {
    Metrics::read(&run.metrics(), "farlane_rdma_")
}

/// What there is now, and must be there again afterwards.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    contexts: u64,
    queue_pairs: u64,
    memory_regions: u64,
    /// Pinned pages of each guest.
    pinned: Vec<i64>,
}

impl Facts {
    /// As things are now.
    pub fn of<const N: usize>(run: &Run<'_>, guests: [&Guest; N]) -> Result<Self> {
        let counters = counters(run)?;
        Ok(Self {
            contexts: counters.get("contexts")?,
            queue_pairs: counters.get("queue_pairs")?,
            memory_regions: counters.get("memory_regions")?,
            pinned: guests.into_iter().map(pinned).collect::<Result<_>>()?,
        })
    }

    /// The same backend, with this many pages pinned in the guests.
    pub fn and_pinned<const N: usize>(&self, pinned: [i64; N]) -> Self {
        let pinned = pinned.to_vec();
        Self {
            pinned,
            ..self.clone()
        }
    }

    /// Waits until things are again as they were, or as they were in another case.
    pub fn wait<const N: usize>(
        &self,
        or: &Facts,
        run: &Run<'_>,
        guests: [&Guest; N],
    ) -> Result<()> {
        let mut now = None;
        let same = || {
            let facts = now.insert(Facts::of(run, guests)?);
            Ok(&*facts == self || &*facts == or)
        };
        wait_until("everything is released", same)
            .with_context(|| format!("There was {self:?} or {or:?}, and now there is {now:?}"))
    }
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
    pub fn wait_shrunk(pid: u32, before: &Self) -> Result<()> {
        let mut now = None;
        wait_until("the backend holds no more than before", || {
            let now = now.insert(Self::of(pid)?);
            Ok(now.memory_kib <= before.memory_kib + SLACK_KIB
                && now.files <= before.files
                && now.mappings <= before.mappings + SLACK_MAPPINGS)
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
