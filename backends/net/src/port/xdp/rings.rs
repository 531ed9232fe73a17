//! The rings of an AF_XDP socket, which it shares with the kernel (Linux:
//! Documentation/networking/af_xdp.rst).
//!
//! Each has one producer and one consumer, and a power of two of entries. The side that is ours is
//! used by one thread.

use crate::bits::index;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Memory that is mapped as long as this lives.
#[derive(Debug)]
pub struct Mapping {
    begin: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is memory of the process, which any thread may use.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps so many zeroes.
    pub fn anonymous(bytes: usize) -> io::Result<Self> {
        Self::new(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// Maps what a socket has at this offset.
    pub fn of(socket: BorrowedFd<'_>, offset: libc::off_t, bytes: usize) -> io::Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        Self::new(bytes, flags, socket.as_raw_fd(), offset)
    }

    fn new(bytes: usize, flags: i32, fd: i32, offset: libc::off_t) -> io::Result<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let begin = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, flags, fd, offset) };
        if begin == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let begin = NonNull::new(begin.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { begin, bytes })
    }

    pub fn begin(&self) -> NonNull<u8> {
        self.begin
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of so many bytes at an offset; `None`: they are not all in it.
    pub fn at(&self, offset: usize, bytes: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(bytes)?;
        if end > self.bytes {
            return None;
        }
        // SAFETY: the offset is within the mapping.
        Some(unsafe { self.begin.add(offset) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped so, and nobody has its address any more: what uses it owns this.
        unsafe { libc::munmap(self.begin.as_ptr().cast(), self.bytes) };
    }
}

/// A ring of entries of `T`.
#[derive(Debug)]
pub struct Ring<T> {
    map: Mapping,
    producer: usize,
    consumer: usize,
    flags: usize,
    entries: usize,
    size: u32,
    own: u32,
    kind: PhantomData<T>,
}

impl<T: Copy> Ring<T> {
    /// Maps a ring of `size` entries, a power of two, where the kernel says.
    ///
    /// # Errors
    /// What the system says, or that what it says makes no sense.
    pub fn new(
        socket: BorrowedFd<'_>,
        page: libc::off_t,
        at: &libc::xdp_ring_offset,
        size: u32,
    ) -> io::Result<Self> {
        let strange = || io::Error::from(io::ErrorKind::InvalidData);
        let offset = |at: u64| usize::try_from(at).map_err(|_| strange());
        let (producer, consumer) = (offset(at.producer)?, offset(at.consumer)?);
        let (flags, entries) = (offset(at.flags)?, offset(at.desc)?);
        let count = usize::try_from(size).map_err(|_| strange())?;
        let bytes = entries + count * size_of::<T>();
        let map = Mapping::of(socket, page, bytes)?;
        let aligned = [producer, consumer, flags]
            .into_iter()
            .all(|at| at % 4 == 0 && at + 4 <= bytes)
            && entries % align_of::<T>() == 0
            && size.is_power_of_two();
        if !aligned {
            return Err(strange());
        }
        Ok(Self {
            map,
            producer,
            consumer,
            flags,
            entries,
            size,
            own: 0,
            kind: PhantomData,
        })
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `new` has checked that the word is in the mapping and aligned; both sides use it
        // as an atomic.
        unsafe { self.map.begin().add(at).cast().as_ref() }
    }

    fn entry(&self, number: u32) -> NonNull<T> {
        let index = index(number & (self.size - 1));
        // SAFETY: the index is below the size, and `new` has mapped so many entries.
        unsafe { self.map.begin().add(self.entries).cast::<T>().add(index) }
    }

    /// Entries that we may produce.
    pub fn room(&self) -> u32 {
        let used = self
            .own
            .wrapping_sub(self.word(self.consumer).load(Ordering::Acquire));
        self.size.saturating_sub(used)
    }

    /// Produces an entry, if there is room; the kernel sees it after [`publish`](Self::publish).
    pub fn push(&mut self, entry: T) -> bool {
        if self.room() == 0 {
            return false;
        }
        // SAFETY: the kernel does not read an entry that is not published.
        unsafe { self.entry(self.own).write(entry) };
        self.own = self.own.wrapping_add(1);
        true
    }

    /// Shows the kernel what was produced.
    pub fn publish(&self) {
        self.word(self.producer).store(self.own, Ordering::Release);
    }

    /// Takes an entry that the kernel has produced.
    pub fn take(&mut self) -> Option<T> {
        if self.word(self.producer).load(Ordering::Acquire) == self.own {
            return None;
        }
        // SAFETY: the kernel has published it, and does not write it before it is given back.
        let entry = unsafe { self.entry(self.own).read() };
        self.own = self.own.wrapping_add(1);
        self.word(self.consumer).store(self.own, Ordering::Release);
        Some(entry)
    }

    /// Entries that we have published and the kernel has not taken.
    pub fn waiting(&self) -> u32 {
        self.own
            .wrapping_sub(self.word(self.consumer).load(Ordering::Acquire))
    }

    /// Whether the kernel wants to be called (`XDP_RING_NEED_WAKEUP`).
    pub fn needs_wakeup(&self) -> bool {
        self.word(self.flags).load(Ordering::Acquire) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}
