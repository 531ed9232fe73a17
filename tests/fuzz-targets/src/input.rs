//! The input of a fuzz target as a stream of numbers.

/// What is left of an input. When nothing is left, it goes on with zeroes.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(&'a [u8]);

macro_rules! number {
    ($($name:ident)*) => {
        $(
            /// The next number, little-endian.
            pub fn $name(&mut self) -> $name {
                $name::from_le_bytes(self.array())
            }
        )*
    };
}

impl<'a> Input<'a> {
    /// All of an input.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether nothing is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    number! { u8 u16 u32 u64 }

    /// Exactly so many bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    /// At most so many bytes.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// A number of bytes, and at most so many.
    pub fn counted(&mut self) -> &'a [u8] {
        let count = self.u8();
        self.bytes(count.into())
    }

    /// One of several.
    pub fn pick<'b, T>(&mut self, from: &'b [T]) -> &'b T {
        &from[usize::from(self.u8()) % from.len()]
    }

    /// Two to the power of the next number: lengths and times of every magnitude.
    pub fn magnitude(&mut self) -> u64 {
        1 << (self.u8() % 64)
    }
}
