//! Numbers that guests and processes choose, once they are known to be within their limits.

use crate::control::{MAX_CONTEXTS, MAX_REGIONS};
use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident, below $limit:ident;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
            pub struct $name(u32);

            impl $name {
                /// Where it is within its limit.
                #[must_use]
                pub const fn new(number: u32) -> Option<Self> {
                    if number < $limit { Some(Self(number)) } else { None }
                }

                /// As the interface has it.
                #[must_use]
                pub const fn get(self) -> u32 {
                    self.0
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

ids! {
    /// A context of a VM or of the processes of a host: an open `/dev/farlaneN`, or a connection.
    ContextId, below MAX_CONTEXTS;
    /// A region of a context.
    RegionId, below MAX_REGIONS;
}
