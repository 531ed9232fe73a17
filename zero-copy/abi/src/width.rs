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

/// Bytes of a `T`, as a field of 32 bits of the wire has them.
#[must_use]
pub const fn size_u32<T>() -> u32 {
    let [size, high] = halves(to_u64(size_of::<T>()));
    assert!(high == 0, "types of the wire are small");
    size
}

/// The low and the high half of a number.
#[must_use]
pub const fn halves(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [
        u32::from_le_bytes([a, b, c, d]),
        u32::from_le_bytes([e, f, g, h]),
    ]
}
