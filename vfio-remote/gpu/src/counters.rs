//! What a GPU counts, over all its users.

use farlane_abi::width::to_u64;
use std::sync::atomic::AtomicU64;

farlane_worker::counters! {
    /// Counters of one GPU, over all its users.
    prefix "gpu_";
    commands: "Commands completed without an error.",
    errors: "Commands completed with an error.",
    faults: "Queue setups rejected as invalid.",
    copied_in_bytes: "Bytes copied from system memory to video memory.",
    copied_out_bytes: "Bytes copied from video memory to system memory.",
    searched_bytes: "Bytes of video memory that were searched.",
    interrupts: "Interrupts raised.",
    wakes: "Times that the worker was woken.",
    message_bytes: "Bytes of video memory read or written by messages.",
}

/// Adds to a number.
pub fn count(counter: &AtomicU64, by: usize) {
    farlane_worker::counters::count(counter, to_u64(by));
}
