//! What the user must know, on standard error, once.

use crate::lock::Lock;
use std::collections::BTreeSet;
use std::io::Write as _;

/// Most different lines.
const MOST: usize = 64;

static SAID: Lock<BTreeSet<String>> = Lock::new(BTreeSet::new());

/// Says a line, unless it was said before.
pub(crate) fn once(line: &str) {
    let mut said = SAID.lock();
    if said.len() < MOST && said.insert(line.to_owned()) {
        drop(said);
        // In one write, past the program's own buffers.
        let _ = std::io::stderr().write_all(format!("farlane-io: {line}\n").as_bytes());
    }
}

/// Before a fork.
pub(crate) fn hold() {
    SAID.take();
}

/// After a fork.
///
/// # Safety
/// This thread has called [`hold`].
pub(crate) unsafe fn release() {
    // SAFETY: as promised by the caller.
    unsafe { SAID.give() };
}
