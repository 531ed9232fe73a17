//! Identifiers that the driver chooses: each kind is a type of its own.

use std::fmt;

macro_rules! queue_ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
            pub struct $name(u16);

            impl $name {
                /// That of the admin queue (NVMe 1.4, 1.6.1).
                pub const ADMIN: Self = Self(0);

                /// As the driver names it; whether there is such a queue is another matter.
                pub const fn new(number: u16) -> Self {
                    Self(number)
                }

                /// As entries of queues have it.
                pub const fn get(self) -> u16 {
                    self.0
                }

                /// Whether it is the admin queue.
                pub const fn is_admin(self) -> bool {
                    self.0 == Self::ADMIN.0
                }

                /// Its place among queues that are counted from the admin queue on.
                pub fn index(self) -> usize {
                    self.0.into()
                }
            }

            impl fmt::Display for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    self.0.fmt(f)
                }
            }
        )*
    };
}

queue_ids! {
    /// A Submission Queue Identifier (NVMe 1.4, 4.1.4).
    SqId;
    /// A Completion Queue Identifier (NVMe 1.4, 4.1.4).
    CqId;
}

/// A Namespace Identifier (NVMe 1.4, 6.1.2), whether or not there is such a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId(u32);

impl NamespaceId {
    /// Of a command that is not about a namespace.
    pub const UNUSED: Self = Self(0);
    /// All namespaces.
    pub const ALL: Self = Self(0xffff_ffff);

    /// As the driver names it.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// As entries of queues and data structures have it.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Its place among the namespaces of a controller, which are numbered from 1.
    pub fn index(self) -> Option<u32> {
        self.0.checked_sub(1)
    }
}
