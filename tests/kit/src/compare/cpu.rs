//! CPU time of processes.

use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// CPU time that the threads of a process have used so far, in nanoseconds' resolution. Threads
/// that have ended are not in it.
///
/// # Errors
/// When the process is gone.
pub fn of_process(process: u32) -> Result<Duration> {
    of_threads(&format!("/proc/{process}"), USED, |_| true)
}

/// How long the threads of a process could have run so far, and others had the CPUs.
///
/// # Errors
/// When the process is gone.
pub fn kept_from(process: u32) -> Result<Duration> {
    of_threads(&format!("/proc/{process}"), WAITED, |_| true)
}

/// CPU time of the threads of this process that have a name.
///
/// # Errors
/// When it cannot be read.
pub fn of_own_threads(name: &str) -> Result<Duration> {
    of_threads("/proc/self", USED, |comm| comm == name)
}

/// Where `schedstat` has a thread's CPU time, and its time on a run queue, in nanoseconds
/// (Documentation/scheduler/sched-stats.rst).
const USED: usize = 0;
const WAITED: usize = 1;

fn of_threads(process: &str, field: usize, is_wanted: impl Fn(&str) -> bool) -> Result<Duration> {
    let mut total = Duration::ZERO;
    for task in fs::read_dir(Path::new(process).join("task"))? {
        let task = task?.path();
        // A thread may end at any time.
        let Ok(comm) = fs::read_to_string(task.join("comm")) else {
            continue;
        };
        let Ok(text) = fs::read_to_string(task.join("schedstat")) else {
            continue;
        };
        if is_wanted(comm.trim()) {
            let time = text.split_whitespace().nth(field);
            total += Duration::from_nanos(time.context("Empty schedstat")?.parse()?);
        }
    }
    Ok(total)
}

/// CPU time of this process, of its descendants, and of those of them that have ended and were
/// waited for, in clock ticks (`utime`, `stime`, `cutime` and `cstime` of proc_pid_stat(5)).
pub(crate) fn own_tree_ticks() -> u64 {
    let mut all = BTreeMap::new();
    let Ok(folder) = fs::read_dir("/proc") else {
        return 0;
    };
    for process in folder.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        if let Some(found) = fs::read_to_string(process.path().join("stat"))
            .ok()
            .and_then(|text| parse_stat(&text))
        {
            all.insert(pid, found);
        }
    }
    let own = std::process::id();
    let is_own = |mut pid: u32| {
        while pid != own {
            match all.get(&pid) {
                Some((parent, _)) if *parent != 0 => pid = *parent,
                _ => return false,
            }
        }
        true
    };
    let ticks = all.iter().filter(|(pid, _)| is_own(**pid));
    ticks.map(|(_, (_, ticks))| ticks).sum()
}

/// CPU time of a process that has ended and was not waited for yet, and of its descendants that
/// were, in the resolution of clock ticks. None, where the process is not there.
pub(crate) fn of_ended(process: i32) -> Option<Duration> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let (_, ticks) = parse_stat(&text)?;
    let per_second = rustix::param::clock_ticks_per_second();
    Some(Duration::from_nanos(ticks * 1_000_000_000 / per_second))
}

/// The parent of a process, and its CPU time with that of its children in ticks.
fn parse_stat(text: &str) -> Option<(u32, u64)> {
    // The name is in parentheses and may hold anything.
    let (_, rest) = text.rsplit_once(") ")?;
    let words: Vec<&str> = rest.split(' ').collect();
    let ticks: Option<u64> = words
        .get(11..15)?
        .iter()
        .map(|w| w.parse::<u64>().ok())
        .sum();
    Some((words.get(1)?.parse().ok()?, ticks?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_line_of_stat_is_read_with_any_name() {
        let line = "17 (a) b) (c) S 4 17 17 0 -1 4194560 1 2 3 4 100 20 3 1 20 0 1 0 5 0 0";
        assert_eq!(parse_stat(line), Some((4, 124)));
        assert_eq!(parse_stat("nonsense"), None);
    }

    /// How long a thread may take to use a few ticks of CPU time, where others have the processors.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Uses CPU time until something is the case.
    fn work_until(mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut sum = 0_u64;
        while !is_so() {
            assert!(Instant::now() < deadline, "this work is in no clock");
            for i in 0..100_000_u64 {
                sum = std::hint::black_box(sum.wrapping_add(i));
            }
        }
    }

    #[test]
    fn cpu_time_of_this_process_grows_with_work() {
        const NAME: &str = "at work";
        // Another test may end a thread at any time, and what that has used is in no sum then: the
        // sums are compared while this one lives.
        let work = || {
            work_until(|| of_own_threads(NAME).unwrap() >= Duration::from_millis(30));
            let own = of_own_threads(NAME).unwrap();
            let all = of_process(std::process::id()).unwrap();
            assert!(all >= own, "{all:?} of all threads, {own:?} of one");
        };
        let thread = std::thread::Builder::new().name(NAME.to_owned());
        thread.spawn(work).unwrap().join().unwrap();
    }

    #[test]
    fn ticks_of_this_process_and_its_descendants_grow_with_work() {
        let ticks = own_tree_ticks();
        work_until(|| own_tree_ticks() > ticks);
    }
}
