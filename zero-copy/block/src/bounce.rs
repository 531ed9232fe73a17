//! Copies of guest memory, aligned for direct I/O.

use std::ops::{Deref, DerefMut};
use zerocopy::{FromBytes, Immutable, IntoBytes};

#[repr(C, align(4096))]
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable)]
struct Page([u8; 4096]);

/// Bytes that begin at a page.
#[derive(Debug, Default)]
pub struct Bounce {
    pages: Vec<Page>,
    length: usize,
}

impl Bounce {
    /// So many zeroes.
    pub fn new(length: usize) -> Self {
        Self {
            pages: vec![Page([0; 4096]); length.div_ceil(4096)],
            length,
        }
    }
}

impl From<&[u8]> for Bounce {
    fn from(bytes: &[u8]) -> Self {
        let mut bounce = Self::new(bytes.len());
        bounce.copy_from_slice(bytes);
        bounce
    }
}

impl Deref for Bounce {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let bytes = self.pages.as_slice().as_bytes();
        bytes.get(..self.length).unwrap_or(bytes)
    }
}

impl DerefMut for Bounce {
    fn deref_mut(&mut self) -> &mut [u8] {
        let bytes = self.pages.as_mut_slice().as_mut_bytes();
        let length = self.length.min(bytes.len());
        &mut bytes[..length]
    }
}
