//! The example of verbs in Python, that the package `farlane-guest` has.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use crate::conditions::wait_until;
use crate::place::Place;
use crate::run::Run;
use crate::tools::TOOL_TIMEOUT;

/// The example, in the checkout.
const EXAMPLE: &str = "guest-lib/verbs/examples/verbs.py";

/// Bytes that are written and read.
const SIZE: u32 = 100_000;

pub fn path(run: &Run<'_>) -> PathBuf {
    run.context.workspace().root().join(EXAMPLE)
}

/// Runs its two ends in one place, started by a line of the shell.
pub fn run(place: &dyn Place, line: &str) -> Result<()> {
    let port = place.free_port()?;
    let mut server = place.spawn(&format!("{line} serve {port} {SIZE}"))?;
    wait_until("the example's server listens", || {
        let has_ended = server.wait_briefly()?;
        ensure!(!has_ended, "It has ended: {}", server.so_far());
        place.is_listening(port)
    })?;
    let client = place.spawn(&format!("{line} 127.0.0.1 {port} {SIZE}"))?;
    for (end, program) in [("client", client), ("server", server)] {
        let output = program.wait(TOOL_TIMEOUT)?;
        output.check(format!("the {end} of the example in Python"))?;
        let said = output.all();
        ensure!(
            said.contains(&format!("{end}: {SIZE} bytes right")),
            "The {end} says: {said}"
        );
    }
    Ok(())
}
