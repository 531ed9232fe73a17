//! A file on a disk and device memory as a host has it: a shared mapping of a memfd.

#![allow(dead_code, reason = "each test uses a part of it")]

use farlane_io_core::route::{Call, serve};
use farlane_io_core::{Direction, Errno, Position, sys};
use farlane_sys::Mmap;
use std::ffi::c_void;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::fs::FileExt as _;

/// Bytes that differ from sector to sector and from page to page.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..length.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    });
    words.take(length).collect()
}

/// `pread` or `pwrite` as a program makes it: the library's where it serves the call.
///
/// # Safety
/// As [`sys::transfer`].
pub unsafe fn transfer(
    direction: Direction,
    fd: RawFd,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
) -> Result<usize, Errno> {
    let call = Call {
        name: "transfer",
        fd,
        address: buffer.expose_provenance(),
        length,
        position: Position::At(offset),
    };
    // SAFETY: as promised by the caller.
    serve(&call, direction)
        .unwrap_or_else(|| unsafe { sys::transfer(direction, fd, buffer, length, offset) })
}

/// A file in the target folder.
pub struct Disk {
    folder: tempfile::TempDir,
    pub file: File,
}

impl Disk {
    pub fn new(content: &[u8]) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(folder.path().join("file"))
            .unwrap();
        file.write_all(content).unwrap();
        file.sync_all().unwrap();
        Self { folder, file }
    }

    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("file")
    }

    /// Takes the file out of the page cache.
    pub fn drop_cache(&self) {
        self.file.sync_all().unwrap();
        farlane_io_core::sys::advise(self.fd(), 0, 0, libc::POSIX_FADV_DONTNEED).unwrap();
    }

    /// Brings a part into the page cache, and nothing around it.
    pub fn cache(&self, offset: u64, length: usize) {
        farlane_io_core::sys::advise(self.fd(), 0, 0, libc::POSIX_FADV_RANDOM).unwrap();
        self.file
            .read_exact_at(&mut vec![0; length], offset)
            .unwrap();
    }

    /// Pages in the page cache.
    pub fn cached_pages(&self) -> u64 {
        let length = self.file.metadata().unwrap().len();
        farlane_io_core::sys::cachestat(self.fd(), 0, length)
            .unwrap()
            .cached
    }

    pub fn content(&self) -> Vec<u8> {
        let mut content = Vec::new();
        File::open(self.path())
            .unwrap()
            .read_to_end(&mut content)
            .unwrap();
        content
    }
}

/// Device memory.
pub struct Memory(pub Mmap);

impl Memory {
    pub fn new(length: usize) -> Self {
        let fd = rustix::fs::memfd_create("device", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, length as u64).unwrap();
        Self(Mmap::shared(&fd, 0, length, Mmap::READ_WRITE).unwrap())
    }

    /// Device memory that is registered.
    pub fn registered(length: usize) -> Self {
        let memory = Self::new(length);
        farlane_io_core::register(memory.address(), length, "soft").unwrap();
        memory
    }

    pub fn address(&self) -> usize {
        self.at(0).addr()
    }

    pub fn at(&self, offset: usize) -> *mut u8 {
        self.0.get(offset, 0).unwrap().as_ptr()
    }

    pub fn get(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= self.0.len());
        // SAFETY: inside the mapping; nobody writes there now.
        unsafe { std::slice::from_raw_parts(self.at(offset), length) }.to_vec()
    }

    pub fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.0.len());
        // SAFETY: inside the mapping; nobody uses those bytes now.
        unsafe {
            self.at(offset)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }

    pub fn read(&self, disk: &Disk, at: usize, length: usize, offset: u64) -> usize {
        // SAFETY: memory of the test.
        unsafe {
            transfer(
                Direction::Read,
                disk.fd(),
                self.at(at).cast(),
                length,
                offset,
            )
        }
        .unwrap()
    }

    pub fn write(&self, disk: &Disk, at: usize, length: usize, offset: u64) -> usize {
        // SAFETY: memory of the test.
        unsafe {
            transfer(
                Direction::Write,
                disk.fd(),
                self.at(at).cast(),
                length,
                offset,
            )
        }
        .unwrap()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = farlane_io_core::unregister(self.address());
    }
}
