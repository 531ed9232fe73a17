//! What a disk counts.

use std::sync::atomic::{AtomicU64, Ordering};

farlane_daemon::counters! {
    /// Counters of one disk.
    connections: "Connections of VMMs.",
    reads: "Reads that succeeded.",
    writes: "Writes that succeeded.",
    bytes_read: "Bytes read.",
    bytes_written: "Bytes written.",
    bytes_tunnelled_in: "Bytes of reads that went into device memory.",
    bytes_tunnelled_out: "Bytes of writes that came from device memory.",
    tokens_refused: "Requests of phony buffers that were refused.",
    flushes: "Flushes that succeeded.",
    discards: "Discards that succeeded.",
    write_zeroes: "Requests to write zeroes that succeeded.",
    errors: "Requests that were answered with an error.",
    copied: "Requests whose data was copied because memory was not aligned for direct I/O.",
    resubmitted: "Requests taken over from a backend that had ended.",
    handed: "Requests and parts that were handed to another limb.",
    split: "Requests that were split because their data lies on several nodes.",
    rehomed: "Times that a queue's worker followed its data to another node.",
    redone: "Requests and parts that were done again over another path.",
    waited: "Requests and parts that waited for a path.",
    awaited: "Times that the last reads of a backend that had ended were waited for.",
    kicks: "Notifications of drivers.",
    interrupts: "Notifications to drivers.",
}

/// Adds to a counter.
pub fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
