//! What a disk counts.

use farlane_daemon::metrics::Sample;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($name:ident: $help:literal,)*) => {
        /// Counters of one disk.
        #[derive(Debug, Default)]
        pub struct Counters {
            $(#[doc = $help] pub $name: AtomicU64,)*
        }

        impl Counters {
            /// All of them, as they are now.
            #[must_use]
            pub fn samples(&self) -> Vec<Sample<'static>> {
                vec![$(Sample {
                    name: stringify!($name),
                    help: $help,
                    value: self.$name.load(Ordering::Relaxed),
                }),*]
            }
        }
    };
}

counters! {
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
    kicks: "Notifications of drivers.",
    interrupts: "Notifications to drivers.",
}

/// Adds to a counter.
pub fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
