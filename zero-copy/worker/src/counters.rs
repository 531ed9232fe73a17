//! Numbers that workers add to, and others read.

use std::sync::atomic::{AtomicU64, Ordering};

/// One number, as it is told (in Prometheus's text format, with a prefix).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample<'a> {
    /// Its name, after the prefix.
    pub name: &'a str,
    /// What it counts, in a sentence.
    pub help: &'a str,
    /// The value.
    pub value: u64,
}

/// Adds to a number.
pub fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// Adds to a number that no other thread adds to: without a locked instruction, which waits for
/// all stores before it, such as those into a ring whose cache lines the driver's processor has.
pub fn count_alone(counter: &AtomicU64, by: u64) {
    let value = counter.load(Ordering::Relaxed).wrapping_add(by);
    counter.store(value, Ordering::Relaxed);
}

/// Defines `Counters`: a field for each name, and `samples`, which lists them; their names begin
/// with `prefix`, if there is one.
///
/// ```
/// farlane_worker::counters! {
///     /// Counters of one disk.
///     prefix "disk_";
///     reads: "Reads that succeeded.",
/// }
/// let counters = Counters::default();
/// farlane_worker::counters::count(&counters.reads, 2);
/// let sample = counters.samples()[0];
/// assert_eq!((sample.name, sample.value), ("disk_reads", 2));
/// ```
#[macro_export]
macro_rules! counters {
    ($(#[$meta:meta])* prefix $prefix:literal; $($name:ident: $help:literal,)*) => {
        $(#[$meta])*
        #[derive(Debug, Default)]
        pub struct Counters {
            $(#[doc = $help] pub $name: std::sync::atomic::AtomicU64,)*
        }

        impl Counters {
            /// All of them, as they are now.
            #[must_use]
            pub fn samples(&self) -> Vec<$crate::counters::Sample<'static>> {
                vec![$($crate::counters::Sample {
                    name: concat!($prefix, stringify!($name)),
                    help: $help,
                    value: self.$name.load(std::sync::atomic::Ordering::Relaxed),
                }),*]
            }
        }
    };
    ($(#[$meta:meta])* $($name:ident: $help:literal,)*) => {
        $crate::counters! { $(#[$meta])* prefix ""; $($name: $help,)* }
    };
}
