//! Lengths and numbers of the wire as those of this process, and back. Every target has addresses
//! of 64 bits; for others this does not compile.

/// A length, offset or index in this process.
#[must_use]
pub const fn to_usize(value: u64) -> usize {
    usize::from_ne_bytes(value.to_ne_bytes())
}

/// A length, offset or index on the wire.
#[must_use]
pub const fn to_u64(value: usize) -> u64 {
    u64::from_ne_bytes(value.to_ne_bytes())
}
