//! What a GPU counts, over all its users.

use farlane_abi::width::to_u64;
use std::sync::atomic::{AtomicU64, Ordering};

farlane_pci::counters! {
    commands "gpu_commands" "Commands completed without an error."
    errors "gpu_errors" "Commands completed with an error."
    faults "gpu_faults" "Queue setups rejected as invalid."
    copied_in_bytes "gpu_copied_in_bytes" "Bytes copied from system memory to video memory."
    copied_out_bytes "gpu_copied_out_bytes" "Bytes copied from video memory to system memory."
    searched_bytes "gpu_searched_bytes" "Bytes of video memory that were searched."
    interrupts "gpu_interrupts" "Interrupts raised."
    wakes "gpu_wakes" "Times that the worker was woken."
    message_bytes "gpu_message_bytes" "Bytes of video memory read or written by messages."
}

/// Adds to a number.
pub fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(to_u64(by), Ordering::Relaxed);
}
