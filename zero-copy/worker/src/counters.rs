//! Numbers that workers add to, and others read.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a number is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// How often something has happened, or how much of it: it only grows.
    Counter,
    /// How much there is now.
    Gauge,
}

/// One number, as it is told (as OpenMetrics text, with a prefix).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample<'a> {
    /// Its name, after the prefix.
    pub name: &'a str,
    /// What it counts, in a sentence.
    pub help: &'a str,
    /// What it is.
    pub kind: Kind,
    /// The value.
    pub value: u64,
}

impl<'a> Sample<'a> {
    /// How often something has happened, or how much of it.
    #[must_use]
    pub fn counter(name: &'a str, help: &'a str, value: u64) -> Self {
        Self {
            name,
            help,
            kind: Kind::Counter,
            value,
        }
    }

    /// How much there is now.
    #[must_use]
    pub fn gauge(name: &'a str, help: &'a str, value: u64) -> Self {
        Self {
            name,
            help,
            kind: Kind::Gauge,
            value,
        }
    }
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
/// with `prefix`, if there is one. They are counters, but those that are called `gauge`.
///
/// ```
/// farlane_worker::counters! {
///     /// Counters of one disk.
///     prefix "disk_";
///     reads: "Reads that succeeded.",
///     links: gauge "Links that there are now.",
/// }
/// let counters = Counters::default();
/// farlane_worker::counters::count(&counters.reads, 2);
/// let sample = counters.samples()[0];
/// assert_eq!((sample.name, sample.value), ("disk_reads", 2));
/// ```
#[macro_export]
macro_rules! counters {
    ($(#[$meta:meta])* prefix $prefix:literal; $($name:ident: $($kind:ident)? $help:literal,)*) => {
        $(#[$meta])*
        #[derive(Debug, Default)]
        pub struct Counters {
            $(#[doc = $help] pub $name: std::sync::atomic::AtomicU64,)*
        }

        impl Counters {
            /// All of them, as they are now.
            #[must_use]
            pub fn samples(&self) -> Vec<$crate::counters::Sample<'static>> {
                vec![$($crate::sample!($($kind)?)(
                    concat!($prefix, stringify!($name)),
                    $help,
                    self.$name.load(std::sync::atomic::Ordering::Relaxed),
                )),*]
            }
        }
    };
    ($(#[$meta:meta])* $($name:ident: $($kind:ident)? $help:literal,)*) => {
        $crate::counters! { $(#[$meta])* prefix ""; $($name: $($kind)? $help,)* }
    };
}

/// What makes a sample of this kind.
#[doc(hidden)]
#[macro_export]
macro_rules! sample {
    () => {
        $crate::counters::Sample::counter
    };
    (gauge) => {
        $crate::counters::Sample::gauge
    };
}
