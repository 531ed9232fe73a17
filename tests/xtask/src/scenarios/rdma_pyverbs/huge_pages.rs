//! Huge pages that the kernel keeps for programs, where it lets us have some.

use std::fs;

/// Where their number is.
const NUMBER: &str = "/proc/sys/vm/nr_hugepages";

/// How many the tests need at once, and a few more.
const WANTED: u64 = 8;

/// Some huge pages, until this is dropped: then there are as many as before.
#[derive(Debug)]
pub struct HugePages {
    before: u64,
}

impl HugePages {
    /// `None` where there are enough, or this machine gives none: tests say so then.
    pub fn of_machine() -> Option<Self> {
        let before = fs::read_to_string(NUMBER).ok()?.trim().parse().ok()?;
        if before >= WANTED {
            return None;
        }
        fs::write(NUMBER, WANTED.to_string()).ok()?;
        Some(Self { before })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(error) = fs::write(NUMBER, self.before.to_string()) {
            eprintln!("Cannot write {} to {NUMBER}: {error}", self.before);
        }
    }
}
