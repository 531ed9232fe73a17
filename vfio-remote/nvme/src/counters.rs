//! What a controller counts, over all its users.

use std::sync::atomic::{AtomicU64, Ordering};

farlane_pci::counters! {
    reads "nvme_reads" "Read commands completed."
    read_bytes "nvme_read_bytes" "Bytes read by completed commands."
    writes "nvme_writes" "Write commands completed."
    written_bytes "nvme_written_bytes" "Bytes written by completed commands."
    flushes "nvme_flushes" "Flush commands completed."
    others "nvme_other_commands" "Other I/O commands completed."
    admin "nvme_admin_commands" "Admin commands completed."
    errors "nvme_errors" "Commands completed with an error."
    media_errors "nvme_media_errors" "Reads, writes and flushes that what holds a namespace has failed."
    logged_errors "nvme_logged_errors" "Errors that the error log has told of."
    interrupts "nvme_interrupts" "Interrupts raised."
    kicks "nvme_kicks" "Doorbell writes that arrived as messages."
    wakes "nvme_wakes" "Times that the worker was woken."
    peer_bytes "nvme_peer_bytes" "Bytes moved straight between blocks and memory of other devices."
    bounced_bytes "nvme_bounced_bytes" "Bytes copied because the memory is not mapped, or not aligned for direct I/O."
}

/// Adds to a number.
pub fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
