//! What the backend counts.

pub(crate) use farlane_worker::counters::count;
use std::sync::atomic::{AtomicU64, Ordering};

farlane_worker::counters! {
    /// Counters of the whole server, free-running, and numbers of what there is now. What goes
    /// through a port is counted there: [`Traffic`](crate::traffic::Traffic).
    calls: "Calls answered.",
    bytes_by_system_call: "Payload bytes copied once, by system calls: between memory of a host \
        process that is not mapped here and memory that is.",
    bytes_copied_twice: "Payload bytes copied twice, through a buffer: between host processes \
        neither of whose memory is mapped here.",
    events: "Completion events raised.",
    sleeps: "Times a worker went to sleep.",
    contexts: gauge "Contexts open now.",
    refused: "Contexts cut off because of what they wrote.",
    queue_pairs: gauge "Queue pairs there are now.",
    shared_receive_queues: gauge "Shared receive queues there are now.",
    memory_regions: gauge "Memory regions there are now.",
}

/// Takes from a number of things there are now.
pub(crate) fn uncount(counter: &AtomicU64, by: u64) {
    counter.fetch_sub(by, Ordering::Relaxed);
}
