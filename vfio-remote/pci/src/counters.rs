//! What functions modelled in software count.

/// A structure `Counters` of atomic numbers, each with its name and what it counts.
#[macro_export]
macro_rules! counters {
    ($($field:ident $name:literal $help:literal)*) => {
        /// Counters over all users.
        #[derive(Debug, Default)]
        pub struct Counters {
            $(#[doc = $help] pub $field: ::std::sync::atomic::AtomicU64,)*
        }

        impl Counters {
            /// All of them.
            pub fn list(&self) -> Vec<$crate::Counter> {
                vec![$($crate::Counter {
                    name: $name,
                    help: $help,
                    value: self.$field.load(::std::sync::atomic::Ordering::Relaxed),
                },)*]
            }
        }
    };
}
