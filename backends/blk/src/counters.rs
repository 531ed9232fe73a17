//! Counters of a disk.

pub use farlane_worker::counters::count;

farlane_worker::counters! {
    /// Counters of one disk.
    connections: "Connections of VMMs.",
    reads: "Successful reads.",
    writes: "Successful writes.",
    bytes_read: "Bytes read.",
    bytes_written: "Bytes written.",
    bytes_tunnelled_in: "Bytes read into device memory.",
    bytes_tunnelled_out: "Bytes written from device memory.",
    tokens_refused: "Requests with rejected device-memory tokens.",
    flushes: "Successful flushes.",
    discards: "Successful discards.",
    write_zeroes: "Successful write-zeroes requests.",
    errors: "Requests completed with an error.",
    copied: "Requests copied because their memory is not aligned for direct I/O.",
    resubmitted: "In-flight requests resubmitted after a crash of the backend.",
    handed: "Requests and parts executed by another node's worker.",
    split: "Requests split because their data spans NUMA nodes.",
    rehomed: "Migrations of a queue's worker to the node of its data.",
    redone: "Requests and parts retried over another path.",
    waited: "Requests and parts that had to wait for a path.",
    awaited: "Waits for the last reads of a crashed backend.",
    kicks: "Driver notifications received.",
    interrupts: "Interrupts sent to the driver.",
}
