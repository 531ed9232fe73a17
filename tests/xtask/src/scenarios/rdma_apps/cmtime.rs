//! cmtime: ten thousand connections that are made and dropped, with queue pairs and without. What
//! the two ends and the daemon have of them goes.

use anyhow::{Context as _, Result};
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;

use super::Connecting;
use crate::conditions::{PATIENCE, wait_within};
use crate::tools::{Program, TOOL_TIMEOUT};

/// Connections of a run, which makes them once with queue pairs and once without.
const AT_ONCE: u32 = 1000;
/// Runs that have all caches grow, to what so many connections need whichever end is ahead.
const WARM: u32 = 2;
/// Runs after them.
const RUNS: u32 = 5;

/// What memory may grow by meanwhile, in KiB: 100 bytes a connection.
const GROWTH_KIB: u64 = 1000;

/// What each end has, in KiB.
pub type Memory<'a> = &'a dyn Fn() -> Result<Vec<u64>>;

/// Runs it: `cmtime` is what a shell is told to begin it.
pub fn run(
    with: &Connecting<'_>,
    cmtime: &str,
    memory: Memory<'_>,
    report: &mut Report,
) -> Result<()> {
    let line = format!("cmtime -c {AT_ONCE}");
    // Without queue pairs both ends make numbers up, which must be different ones where they are of
    // one port.
    let program = Program {
        name: &line,
        serve: &|port| format!("{cmtime} -c {AT_ONCE} -p {port}"),
        ask: &|address, port| format!("{cmtime} -c {AT_ONCE} -p {port} -s {address} -q 1000000"),
    };
    for _ in 0..WARM {
        with.run(&program)?;
    }
    let before = memory()?;
    for _ in 0..RUNS {
        with.run(&program)?;
    }
    let mut now = Vec::new();
    let is_flat = wait_within("memory is as before", PATIENCE + TOOL_TIMEOUT, || {
        now = memory()?;
        let grown = before.iter().zip(&now);
        Ok(grown
            .into_iter()
            .all(|(before, now)| *now <= before + GROWTH_KIB))
    });
    is_flat.with_context(|| format!("There were {before:?} KiB, and now there are {now:?}"))?;
    let growth = before.iter().zip(&now).map(|(before, now)| {
        i64::try_from(*now).unwrap_or(i64::MAX) - i64::try_from(*before).unwrap_or(0)
    });
    let all = 2 * AT_ONCE * RUNS;
    let says = format!(
        "{all} connections, KiB more: {:?}",
        growth.collect::<Vec<_>>()
    );
    report.tell(with.ends.name, line, says);
    Ok(())
}

/// What the kernel of a guest has allocated of what it does not give back when memory is short.
pub fn of_kernel(guest: &Guest) -> Result<u64> {
    let text = guest.read_file("/proc/meminfo")?;
    let of = |name: &str| -> Result<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|rest| rest.trim().strip_suffix("kB"));
        let kib = kib.with_context(|| format!("The guest's kernel does not say {name}"))?;
        Ok(kib.trim().parse()?)
    };
    Ok(of("SUnreclaim:")? + of("VmallocUsed:")? + of("Percpu:")?)
}
