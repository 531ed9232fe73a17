//! Ranges of addresses.

use std::fmt::{Display, Formatter};

/// A range of addresses as a function sees them (guest-physical).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AddressRange {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub length: u64,
}

impl AddressRange {
    /// `length` bytes at `address`.
    #[must_use]
    pub const fn new(address: u64, length: u64) -> Self {
        Self { address, length }
    }

    /// The address after its last one; the highest address where it wraps around.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.address.saturating_add(self.length)
    }

    /// Whether it is empty, or wraps around.
    #[must_use]
    pub const fn is_invalid(self) -> bool {
        self.length == 0 || self.address.checked_add(self.length).is_none()
    }

    /// Whether the two have an address in common.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.address < other.end() && other.address < self.end()
    }
}

impl Display for AddressRange {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x} bytes at {:#x}", self.length, self.address)
    }
}
