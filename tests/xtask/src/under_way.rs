//! Requests that farlane-blk has taken and not completed: what stands in the memory by which a VMM
//! has them tracked (vhost-user, "Inflight I/O tracking", split virtqueues), looked at from outside
//! while the daemon's workers stand still.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result};

/// What the kernel calls the daemon's mappings of that memory.
const NAME: &str = "/memfd:inflight";

/// Bytes before a queue's entries, offsets in them of the layout's version and the number of
/// entries, and bytes of an entry, whose first is 1 while its request is under way.
const HEADER: usize = 16;
const VERSION_AT: usize = 8;
const ENTRIES_AT: usize = 10;
const ENTRY: usize = 16;
/// Alignment of a queue's part.
const ALIGNMENT: usize = 64;

/// How many requests of all its disks a daemon has under way.
pub fn count(process: u32) -> Result<usize> {
    let folder = format!("/proc/{process}");
    let maps =
        fs::read_to_string(format!("{folder}/maps")).context("Cannot see a daemon's maps")?;
    let memory = File::open(format!("{folder}/mem")).context("Cannot see a daemon's memory")?;
    let mut total = 0;
    for line in maps.lines().filter(|line| line.contains(NAME)) {
        let range = line
            .split_whitespace()
            .next()
            .and_then(|range| range.split_once('-'));
        let (start, end) = range.with_context(|| format!("No range in {line:?}"))?;
        let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16));
        let (start, end) = (start?, end?);
        let mut bytes = vec![0; usize::try_from(end - start)?];
        memory.read_exact_at(&mut bytes, start)?;
        total += in_region(&bytes);
    }
    Ok(total)
}

/// How many are in the parts of all queues of one device, which are all of one size.
fn in_region(bytes: &[u8]) -> usize {
    let word = |at: usize| {
        let word = bytes.get(at..at + 2)?;
        Some(u16::from_le_bytes(word.try_into().ok()?))
    };
    let (mut at, mut total) = (0, 0);
    let Some(entries) = word(ENTRIES_AT)
        .map(usize::from)
        .filter(|&entries| entries > 0)
    else {
        return 0;
    };
    // A queue that was never started has no version.
    while let Some(version) = word(at + VERSION_AT) {
        let end = at + HEADER + ENTRY * entries;
        if version == 1
            && let Some(part) = bytes.get(at + HEADER..end)
        {
            total += part.chunks(ENTRY).filter(|entry| entry[0] != 0).count();
        }
        at = end.next_multiple_of(ALIGNMENT);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_all_queues_are_counted() {
        let mut bytes = vec![0; 4096];
        assert_eq!(in_region(&bytes), 0);
        // Two queues of three entries: 64 bytes each.
        for queue in [0, 64] {
            bytes[queue + VERSION_AT] = 1;
            bytes[queue + ENTRIES_AT] = 3;
        }
        for under_way in [16, 48, 64 + 32] {
            bytes[under_way] = 1;
        }
        assert_eq!(in_region(&bytes), 3);
        // What stands in a queue that is not used is not counted.
        bytes[64 + VERSION_AT] = 0;
        assert_eq!(in_region(&bytes), 2);
    }
}
