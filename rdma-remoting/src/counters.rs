//! What the backend counts.

use crate::nodes::TransferObserver;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

macro_rules! counters {
    ($($doc:literal $name:ident,)*) => {
        /// Counters of the whole server, free-running.
        #[derive(Debug, Default)]
        pub struct Live {
            $(#[doc = $doc] pub $name: AtomicU64,)*
            /// Set where there are several nodes.
            pub transfers: OnceLock<Arc<dyn TransferObserver>>,
        }

        /// Values of the counters at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $(#[doc = $doc] pub $name: u64,)*
        }

        impl Live {
            /// The present values.
            #[must_use]
            pub fn read(&self) -> Counters {
                Counters { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl Counters {
            /// Name, help text and value of each.
            #[must_use]
            pub fn entries(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($name), $doc, self.$name),)*]
            }
        }
    };
}

counters! {
    "Calls answered."
    calls,
    "Send requests that ended in success."
    requests,
    "Send requests that ended in an error."
    failures,
    "Requests of either kind that were flushed."
    flushed,
    "Payload bytes written to a peer by sends and RDMA writes."
    bytes_out,
    "Payload bytes read from a peer by RDMA reads."
    bytes_in,
    "Completion events raised."
    events,
    "Times a worker went to sleep."
    sleeps,
    "Contexts open now."
    contexts,
    "Contexts cut off because of what they wrote."
    refused,
    "Queue pairs there are now."
    queue_pairs,
    "Memory regions there are now."
    memory_regions,
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Takes from a counter of things there are now.
pub(crate) fn sub(counter: &AtomicU64, n: u64) {
    counter.fetch_sub(n, Ordering::Relaxed);
}
