//! Moving bytes between regions: once.

use crate::registration::{Access, MappedRuns, Runs};
use crate::{Process, Region, RegionError};
use farlane_abi::width::to_usize;
use std::cell::RefCell;
use std::sync::atomic::{Ordering, fence};
use thiserror::Error;

/// What there is where no memory is.
static ZEROES: [u8; 4096] = [0; 4096];

/// Bytes of the buffer through which two processes' memories meet: small enough to stay in a
/// core's second-level cache.
const BOUNCE_BYTES: usize = 128 << 10;
/// Local vectors of one system call.
const MAX_VECTORS: usize = 64;

/// Which side of a copy failed.
#[derive(Debug, Error)]
pub enum CopyError {
    /// The source.
    #[error("Cannot read the source")]
    Source(#[source] RegionError),
    /// The destination.
    #[error("Cannot write the destination")]
    Destination(#[source] RegionError),
}

impl From<SideError> for CopyError {
    fn from(e: SideError) -> Self {
        match e {
            SideError::Source(e) => Self::Source(RegionError::Io(e)),
            SideError::Destination(e) => Self::Destination(RegionError::Io(e)),
        }
    }
}

enum SideError {
    Source(std::io::Error),
    Destination(std::io::Error),
}

/// How bytes were copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyWay {
    /// Once, between memory that is mapped here.
    Mapped,
    /// Once, by system calls: one side is a process's memory.
    SystemCall,
    /// Twice, through a buffer: both sides are processes' memory.
    Buffer,
}

thread_local! {
    static BOUNCE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Copies `length` bytes from `source` at `source_offset` to `destination` at
/// `destination_offset`.
///
/// Memory that is mapped here is copied once; between mapped memory and a process it is one
/// system call for each run; between two processes the bytes pass through a buffer in the cache.
/// The last byte of the destination becomes visible last, so that a program may poll on it. Returns
/// which of these ways it took.
///
/// # Errors
/// Which side, and why: bounds, rights, a revocation, or memory that a process does not have. Part
/// of the bytes may have been copied then.
pub fn copy(
    destination: &Region,
    destination_offset: u64,
    source: &Region,
    source_offset: u64,
    length: u64,
) -> Result<CopyWay, CopyError> {
    let from = source
        .access(source_offset, length, false)
        .map_err(CopyError::Source)?;
    let to = destination
        .access(destination_offset, length, true)
        .map_err(CopyError::Destination)?;
    if length == 0 {
        return Ok(CopyWay::Mapped);
    }
    let total = to_usize(length);
    Ok(match (to.runs(), from.runs()) {
        (Runs::Mapped(to), Runs::Mapped(from)) => {
            copy_mapped(to, from, total);
            CopyWay::Mapped
        }
        (Runs::Process(process, address), Runs::Mapped(from)) => {
            move_runs(process, address, from, total, true).map_err(SideError::Destination)?;
            CopyWay::SystemCall
        }
        (Runs::Mapped(to), Runs::Process(process, address)) => {
            move_runs(process, address, to, total, false).map_err(SideError::Source)?;
            CopyWay::SystemCall
        }
        (Runs::Process(to, to_address), Runs::Process(from, from_address)) => {
            bounce(to, to_address, from, from_address, total)?;
            CopyWay::Buffer
        }
        (Runs::Null, _) => CopyWay::Mapped,
        (Runs::Mapped(to), Runs::Null) => {
            clear_mapped(to, total);
            CopyWay::Mapped
        }
        (Runs::Process(process, address), Runs::Null) => {
            clear_process(process, address, total).map_err(SideError::Destination)?;
            CopyWay::SystemCall
        }
    })
}

/// Copies `bytes` to `destination` at `offset`.
///
/// # Errors
/// As [`copy`].
pub fn copy_from_slice(destination: &Region, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
    let to = destination.access(offset, bytes.len() as u64, true)?;
    transfer_slice(&to, bytes.as_ptr().cast_mut(), bytes.len(), true)
}

/// Copies from `source` at `offset` to `bytes`.
///
/// # Errors
/// As [`copy`].
pub fn copy_to_slice(source: &Region, offset: u64, bytes: &mut [u8]) -> Result<(), RegionError> {
    let from = source.access(offset, bytes.len() as u64, false)?;
    transfer_slice(&from, bytes.as_mut_ptr(), bytes.len(), false)
}

/// Moves `length` bytes between `access` and our own memory at `bytes`, which is only read when
/// `write`.
fn transfer_slice(
    access: &Access<'_>,
    bytes: *mut u8,
    length: usize,
    write: bool,
) -> Result<(), RegionError> {
    match access.runs() {
        Runs::Mapped(mut runs) => {
            let mut done = 0;
            while let Some((run, n)) = runs.next(length - done) {
                let ours = bytes.wrapping_add(done);
                done += n;
                let (to, from) = if write { (run, ours) } else { (ours, run) };
                // SAFETY: the run is `n` bytes of a mapping that the access keeps; ours are `n`
                // bytes of a slice of `length`, `done` of which are used up.
                unsafe { move_bytes(to, from, n, done == length) };
            }
        }
        Runs::Process(process, address) => {
            if length > 0 {
                let local = [vector(bytes, length)];
                exact(process, &local, address, length, write)?;
            }
        }
        Runs::Null if write => {}
        // SAFETY: ours are `length` bytes, which are written where it is not `write`.
        Runs::Null => unsafe { bytes.write_bytes(0, length) },
    }
    Ok(())
}

/// Writes zeroes, as [`copy_mapped`] would copy them.
fn clear_mapped(mut to: MappedRuns<'_>, total: usize) {
    let mut done = 0;
    while let Some((run, n)) = to.next((total - done).min(ZEROES.len())) {
        done += n;
        // SAFETY: the run is `n` bytes of a mapping that the access keeps, and no more than there
        // are zeroes.
        unsafe { move_bytes(run, ZEROES.as_ptr(), n, done == total) };
    }
}

/// Writes zeroes to a process at `address`.
fn clear_process(process: &Process, address: u64, total: usize) -> std::io::Result<()> {
    let zeroes = |length| vector(ZEROES.as_ptr().cast_mut(), length);
    let mut done = 0;
    while done < total {
        let bytes = (total - done).min(MAX_VECTORS * ZEROES.len());
        let mut local = [zeroes(ZEROES.len()); MAX_VECTORS];
        let count = bytes.div_ceil(ZEROES.len());
        local[count - 1] = zeroes(bytes - (count - 1) * ZEROES.len());
        // The kernel only reads them.
        exact(process, &local[..count], address + done as u64, bytes, true)?;
        done += bytes;
    }
    Ok(())
}

fn copy_mapped(mut to: MappedRuns<'_>, mut from: MappedRuns<'_>, total: usize) {
    let mut done = 0;
    let mut target = None;
    let mut origin = None;
    while done < total {
        let (Some((t, t_len)), Some((f, f_len))) = (
            target.take().or_else(|| to.next(usize::MAX)),
            origin.take().or_else(|| from.next(usize::MAX)),
        ) else {
            // Both sides were checked to have `total` bytes.
            return;
        };
        let n = t_len.min(f_len);
        done += n;
        // SAFETY: both runs have at least `n` bytes, in mappings that the accesses keep.
        unsafe { move_bytes(t, f, n, done == total) };
        if n < t_len {
            target = Some((t.wrapping_add(n), t_len - n));
        }
        if n < f_len {
            origin = Some((f.wrapping_add(n), f_len - n));
        }
    }
}

/// Copies `n` bytes that may overlap. With `last`, the final bytes are stored after all others.
///
/// # Safety
/// Both pointers are valid for `n` bytes. Others may write them concurrently; torn data is then
/// theirs, nothing is derived from it here.
unsafe fn move_bytes(to: *mut u8, from: *const u8, n: usize, last: bool) {
    const TAIL: usize = 8;
    if !last || n <= 1 {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy(from, to, n) };
        return;
    }
    let tail = if n > TAIL { TAIL } else { n.min(1) };
    let body = n - tail;
    if n == TAIL || n == 4 {
        // One store: nothing comes after anything.
        // SAFETY: the caller's promise; unaligned access is asked for.
        unsafe {
            if n == TAIL {
                let word = from.cast::<u64>().read_unaligned();
                to.cast::<u64>().write_unaligned(word);
            } else {
                let word = from.cast::<u32>().read_unaligned();
                to.cast::<u32>().write_unaligned(word);
            }
        }
        return;
    }
    // The source's tail is read first: the body may overwrite it where the two overlap.
    // SAFETY: the caller's promise; `body + tail == n`.
    unsafe {
        if tail == TAIL {
            let word = from.add(body).cast::<u64>().read_unaligned();
            std::ptr::copy(from, to, body);
            fence(Ordering::Release);
            to.add(body).cast::<u64>().write_unaligned(word);
        } else {
            let byte = from.add(body).read();
            std::ptr::copy(from, to, body);
            fence(Ordering::Release);
            to.add(body).write_volatile(byte);
        }
    }
}

fn vector(base: *mut u8, length: usize) -> libc::iovec {
    libc::iovec {
        iov_base: base.cast(),
        iov_len: length,
    }
}

/// Moves exactly `total` bytes between `local` and `process` at `address`.
fn exact(
    process: &Process,
    local: &[libc::iovec],
    address: u64,
    total: usize,
    write: bool,
) -> std::io::Result<()> {
    let base =
        usize::try_from(address).map_err(|_| std::io::Error::from_raw_os_error(libc::EFAULT))?;
    let at = |offset: usize| std::ptr::without_provenance_mut::<u8>(base + offset);
    // The kernel takes remote vectors in order: the last byte is a vector of its own, so that it
    // is written last.
    let split = [vector(at(0), total - 1), vector(at(total - 1), 1)];
    let whole = [vector(at(0), total)];
    let ordered = write && total > 1 && total != 8 && total != 4;
    let remote: &[libc::iovec] = if ordered { &split } else { &whole };
    let n = process.transfer(local, remote, write)?;
    if n == total {
        Ok(())
    } else {
        Err(std::io::Error::from_raw_os_error(libc::EFAULT))
    }
}

/// Moves `total` bytes between mapped runs and a process.
fn move_runs(
    process: &Process,
    address: u64,
    mut runs: MappedRuns<'_>,
    total: usize,
    write: bool,
) -> std::io::Result<()> {
    let mut done = 0;
    while done < total {
        let mut local = [vector(std::ptr::null_mut(), 0); MAX_VECTORS];
        let mut count = 0;
        let mut bytes = 0;
        while count < MAX_VECTORS
            && let Some((base, n)) = runs.next(total - done - bytes)
        {
            local[count] = vector(base, n);
            count += 1;
            bytes += n;
        }
        if bytes == 0 {
            // The runs were checked to have `total` bytes.
            return Err(std::io::Error::from_raw_os_error(libc::EFAULT));
        }
        exact(
            process,
            &local[..count],
            address + done as u64,
            bytes,
            write,
        )?;
        done += bytes;
    }
    Ok(())
}

/// Copies between two processes through a buffer in the cache.
fn bounce(
    to: &Process,
    to_address: u64,
    from: &Process,
    from_address: u64,
    total: usize,
) -> Result<(), SideError> {
    BOUNCE.with_borrow_mut(|buffer| {
        if buffer.is_empty() {
            buffer.resize(BOUNCE_BYTES, 0);
        }
        let mut done = 0;
        while done < total {
            let n = (total - done).min(BOUNCE_BYTES);
            let local = [vector(buffer.as_mut_ptr(), n)];
            exact(from, &local, from_address + done as u64, n, false).map_err(SideError::Source)?;
            exact(to, &local, to_address + done as u64, n, true).map_err(SideError::Destination)?;
            done += n;
        }
        Ok(())
    })
}
