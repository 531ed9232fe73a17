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

/// A signed result, as C's `ssize_t` has it.
#[must_use]
pub const fn to_isize(value: i64) -> isize {
    isize::from_ne_bytes(value.to_ne_bytes())
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

/// A number, or `limit` where it is larger: of what there is too much, as much as can be said or
/// done at once.
#[must_use]
pub fn at_most<N: Copy + Ord + TryFrom<u128>>(value: impl Into<u128>, limit: N) -> N {
    N::try_from(value.into()).map_or(limit, |value| value.min(limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_limited_whatever_width_it_has() {
        assert_eq!(at_most(7_u64, 9_u8), 7);
        assert_eq!(at_most(300_u64, 9_u8), 9);
        assert_eq!(at_most(300_u64, u8::MAX), u8::MAX);
        assert_eq!(at_most(u64::MAX, i32::MAX), i32::MAX);
        assert_eq!(at_most(u128::MAX, usize::MAX), usize::MAX);
        assert_eq!(at_most(9_u8, u64::MAX), 9);
    }
}
