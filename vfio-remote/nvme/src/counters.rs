//! What a controller counts, over all its users.

pub use farlane_worker::counters::{count, count_alone};

farlane_worker::counters! {
    /// Counters of one controller, over all its users.
    prefix "nvme_";
    reads: "Read commands completed.",
    read_bytes: "Bytes read by completed commands.",
    writes: "Write commands completed.",
    written_bytes: "Bytes written by completed commands.",
    flushes: "Flush commands completed.",
    other_commands: "Other I/O commands completed.",
    admin_commands: "Admin commands completed.",
    errors: "Commands completed with an error.",
    media_errors: "Reads, writes and flushes that what holds a namespace has failed.",
    logged_errors: "Errors that the error log has told of.",
    interrupts: "Interrupts raised.",
    kicks: "Doorbell writes that arrived as messages.",
    wakes: "Times that the worker was woken.",
    peer_bytes: "Bytes moved straight between blocks and memory of other devices.",
    bounced_bytes: "Bytes copied because the memory is not mapped, or not aligned for direct I/O.",
}
