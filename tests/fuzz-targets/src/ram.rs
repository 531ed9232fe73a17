//! The memory of a VM, and the guest's way of writing it.

use farlane_abi::PAGE_BYTES;
use farlane_abi::width::to_usize;
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

/// A page.
pub const PAGE: u64 = PAGE_BYTES;

/// Guest-physical memory.
#[derive(Debug)]
pub struct Ram {
    file: File,
    bytes: u64,
}

impl Ram {
    /// So many pages of zeroes.
    #[must_use]
    pub fn new(pages: u64) -> Self {
        let file =
            File::from(rustix::fs::memfd_create("ram", MemfdFlags::CLOEXEC).expect("a memfd"));
        let bytes = pages * PAGE;
        file.set_len(bytes).expect("a memfd that can grow");
        Self { file, bytes }
    }

    /// The file behind it.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The memory as a vhost-user front-end tells of it: parts as (guest address, offset in the
    /// file, bytes), in order of the addresses.
    #[must_use]
    pub fn parts(&self, parts: &[(u64, u64, u64)]) -> GuestMemoryMmap {
        let ranges = parts.iter().map(|&(address, offset, bytes)| {
            let file = self.file.try_clone().expect("a descriptor");
            let bytes = usize::try_from(bytes).expect("64 bits");
            (
                GuestAddress(address),
                bytes,
                Some(FileOffset::new(file, offset)),
            )
        });
        GuestMemoryMmap::from_ranges_with_files(ranges).expect("parts of the memory")
    }

    /// All of it, from address zero on.
    #[must_use]
    pub fn whole(&self) -> GuestMemoryMmap {
        self.parts(&[(0, 0, self.bytes)])
    }

    /// Zeroes all of it.
    pub fn clear(&self) {
        static ZEROES: [u8; 1 << 16] = [0; 1 << 16];
        let mut at = 0;
        while at < self.bytes {
            let n = usize::try_from(self.bytes - at)
                .map_or(ZEROES.len(), |left| left.min(ZEROES.len()));
            self.poke(at, &ZEROES[..n]);
            at += n as u64;
        }
    }

    /// Writes bytes; what lies beyond its end is left out.
    pub fn poke(&self, at: u64, bytes: &[u8]) {
        let room = to_usize(self.bytes.saturating_sub(at));
        let bytes = &bytes[..bytes.len().min(room)];
        self.file.write_all_at(bytes, at).expect("room in a memfd");
    }

    /// Writes a word.
    pub fn poke_word(&self, at: u64, word: u32) {
        self.poke(at, &word.to_le_bytes());
    }

    /// Reads bytes.
    #[must_use]
    pub fn peek<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.file
            .read_exact_at(&mut bytes, at)
            .expect("inside of a memfd");
        bytes
    }

    /// Reads a word.
    #[must_use]
    pub fn peek_word(&self, at: u64) -> u32 {
        u32::from_le_bytes(self.peek(at))
    }

    /// Whether a page holds nothing but zeroes.
    #[must_use]
    pub fn is_zero(&self, page: u64) -> bool {
        self.peek::<4096>(page * PAGE) == [0; 4096]
    }
}
