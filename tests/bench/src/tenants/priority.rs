//! Who has the processors.

use anyhow::{Context as _, Result, ensure};
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use std::fs;

/// Whether threads can be given processors of their own: there are two.
pub fn can_pin() -> bool {
    std::thread::available_parallelism().is_ok_and(|count| count.get() > 1)
}

/// Has a thread, this one where none is named, and those that it starts, run on one processor.
pub fn pin(thread: Option<Pid>, cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(thread, &set)?)
}

/// Has the workers of a daemon, which have served somebody, run on one processor, before all others
/// there.
pub fn pin_workers(daemon: u32, cpu: usize) -> Result<()> {
    let mut count = 0;
    for task in fs::read_dir(format!("/proc/{daemon}/task"))? {
        let task = task?;
        let name = fs::read_to_string(task.path().join("comm"))?;
        if name.starts_with("worker") {
            let id = task.file_name().into_string().ok();
            let id: i32 = id.and_then(|id| id.parse().ok()).context("Not a thread")?;
            pin(Pid::from_raw(id), cpu)?;
            schedule(id, libc::SCHED_FIFO, 1)?;
            count += 1;
        }
    }
    ensure!(count > 0, "the daemon has no workers");
    Ok(())
}

/// Does something in this thread, which the kernel runs before all others meanwhile.
pub fn first<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    schedule(THIS, libc::SCHED_FIFO, 1)?;
    let outcome = work();
    schedule(THIS, libc::SCHED_OTHER, 0)?;
    outcome
}

/// This thread.
const THIS: i32 = 0;

fn schedule(thread: i32, policy: libc::c_int, priority: libc::c_int) -> Result<()> {
    // SAFETY: an all-zero `sched_param` is valid.
    let mut param: libc::sched_param = unsafe { std::mem::zeroed() };
    param.sched_priority = priority;
    // SAFETY: reads `param` only.
    let outcome = unsafe { libc::sched_setscheduler(thread, policy, &raw const param) };
    if outcome != 0 {
        let e = std::io::Error::last_os_error();
        return Err(e).context("Cannot have a thread run before others (root can)");
    }
    Ok(())
}
