//! What scenarios wait for, and what no guest may say.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use farlane_kit::guest::Guest;

/// How long anything here may take: a busy machine runs several guests.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Pause between two looks at a condition.
const PAUSE: Duration = Duration::from_millis(10);

/// What kernels say when something is wrong with them.
const COMPLAINTS: &[&str] = &[
    "WARNING:",
    "BUG:",
    "Oops",
    "Call Trace:",
    "general protection",
    "refcount_t",
    "blocked for more than",
    "possible circular locking",
    "possible recursive locking",
    "inconsistent lock state",
    "suspicious RCU usage",
];

/// Looks for lost memory, where the kernel can: kmemleak reports what has been lost for 5 s.
const LEAKS: &str = "[ -d /sys/kernel/debug/tracing ] || mount -t debugfs debugfs \
                     /sys/kernel/debug 2>/dev/null; \
    f=/sys/kernel/debug/kmemleak; [ ! -e $f ] || { echo scan >$f; sleep 6; echo scan >$f; cat $f; \
    }";

/// Waits until something is so.
pub fn wait_until(what: &str, is: impl FnMut() -> Result<bool>) -> Result<()> {
    wait_within(what, PATIENCE, is)
}

/// The same, of what takes longer by its nature.
pub fn wait_within(
    what: &str,
    patience: Duration,
    mut is: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + patience;
    while !is()? {
        if Instant::now() > deadline {
            bail!("{what}: not so after {} s", patience.as_secs());
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// The first line of a kernel's log that says that something is wrong with it.
pub fn complaint(log: &str) -> Option<&str> {
    log.lines()
        .find(|line| COMPLAINTS.iter().any(|complaint| line.contains(complaint)))
}

/// The guest's kernel has found nothing wrong with itself.
pub fn no_complaint(guest: &Guest) -> Result<()> {
    let log = guest.run("dmesg")?;
    ensure!(
        complaint(&log).is_none(),
        "The kernel of guest {} complains:\n{log}",
        guest.name()
    );
    // A kernel that looks for memory that nothing points to. What is new is only reported when it
    // is seen a second time.
    let leaks = guest.run(LEAKS)?;
    ensure!(
        !leaks.contains("[farlane]"),
        "The driver in guest {} has lost memory:\n{leaks}",
        guest.name()
    );
    Ok(())
}
