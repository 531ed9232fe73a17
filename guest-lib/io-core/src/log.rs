//! What the user must know, on standard error, once.

use crate::fork::{self, ParentState};
use crate::lock::Lock;
use std::collections::BTreeSet;
use std::io::Write as _;

/// Most distinct lines that are printed.
const MOST: usize = 64;

pub(crate) static SAID: Lock<LoggedLines> = Lock::new(LoggedLines(BTreeSet::new()));

/// Lines that were said.
#[derive(Debug)]
pub(crate) struct LoggedLines(BTreeSet<String>);

impl ParentState for LoggedLines {
    /// Said in the parent is said.
    fn forget(&mut self) {}
}

/// Says a line, unless it was said before. Handlers of forks say nothing.
pub(crate) fn once(line: &str) {
    if fork::has_locks() {
        return;
    }
    let mut said = SAID.lock();
    if said.0.len() < MOST && said.0.insert(line.to_owned()) {
        drop(said);
        // In one write, past the program's own buffers.
        let _ = std::io::stderr().write_all(format!("farlane-io: {line}\n").as_bytes());
    }
}
