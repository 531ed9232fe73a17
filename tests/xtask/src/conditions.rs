//! What scenarios wait for, and what no guest may say.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use farlane_vmkit::guest::Guest;

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
    "blocked for more than",
];

/// Waits until something is so.
pub fn wait_until(what: &str, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !is()? {
        if Instant::now() > deadline {
            bail!("{what}: not so after {} s", PATIENCE.as_secs());
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// The guest's kernel has found nothing wrong with itself.
pub fn no_complaint(guest: &Guest) -> Result<()> {
    let log = guest.run("dmesg")?;
    let bad = log
        .lines()
        .find(|line| COMPLAINTS.iter().any(|complaint| line.contains(complaint)));
    ensure!(
        bad.is_none(),
        "The kernel of guest {} complains:\n{log}",
        guest.name()
    );
    Ok(())
}
