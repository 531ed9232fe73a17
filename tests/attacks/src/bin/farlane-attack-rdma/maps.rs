//! Mappings that were not granted.

use crate::Failure;
use crate::raw::{Device, mmap};
use crate::session::Session;
use crate::table::Table;
use crate::witness::Known;
use farlane_abi::Errno;
use farlane_abi::ioctl::{WINDOW_MMAP_BASE, segment_mmap_offset, window_mmap_offset};
use farlane_abi::rdma::{AllocBuffer, VerbsStubs};
use farlane_abi::width::to_usize;
use farlane_transport::{Address, DeviceInfo, PinKind};
use std::path::Path;

const GROUP: &str = "mmap";
const SHARED: i32 = libc::MAP_SHARED;
const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Attacks what the driver maps.
pub fn attack(path: &Path, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let device = Device::open(path)?;
    device.header()?;
    segments(&device, witness, table)?;
    window(&device, witness, table);
    own_buffer(path, table)
}

fn segments(device: &Device, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let mine = device.segment(16384)?;
    let at = mine.mmap_offset;
    let bad = &[Errno::EINVAL, Errno::ENOENT][..];
    for (what, offset, length) in [
        ("a segment, short", at, 4096),
        ("a segment, long", at, 20480),
        ("a segment, far too long", at, 1 << 30),
        ("a segment from its middle", at + 4096, 12288),
        ("behind a segment", at + 16384, 16384),
        (
            "a region that does not exist",
            segment_mmap_offset(60_000),
            16384,
        ),
        ("a region beyond all", segment_mmap_offset(u32::MAX), 16384),
        ("just below the window", WINDOW_MMAP_BASE - 4096, 4096),
    ] {
        table.refused(GROUP, what, device.map(offset, length).map(drop), bad);
    }
    // Region ids are each context's own: the witness's name nothing here.
    let theirs = mine.region + 1..=witness.last_region;
    let got = theirs
        .clone()
        .filter(|region| device.map(segment_mmap_offset(*region), 4096).is_ok());
    let got = got.count();
    let count = theirs.count() as u64;
    table.many(
        GROUP,
        "the witness's regions",
        count,
        &format!("{got} granted"),
        got == 0,
    );
    let pinned = vec![0_u8; 8192];
    let address = pinned.as_ptr().expose_provenance() as u64;
    let pin = device.pin(address, 8192, 0)?;
    let outcome = device.map(segment_mmap_offset(pin), 8192).map(drop);
    table.refused(GROUP, "a pin", outcome, bad);
    let fd = device.number();
    let outcome = mmap(fd, at, 16384, READ_WRITE, libc::MAP_PRIVATE).map(drop);
    table.refused(GROUP, "a private copy", outcome, &[Errno::EINVAL]);
    let executable = libc::PROT_READ | libc::PROT_EXEC;
    let outcome = mmap(fd, at, 16384, executable, SHARED).map(drop);
    table.refused(GROUP, "executable", outcome, &[Errno::EACCES]);

    let mapped = device.map(at, 16384)?;
    let base: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(mapped.address);
    let refused = |result: bool| if result { Err(Errno::EIO) } else { Ok(()) };
    // SAFETY: the mapping stays, or loses a page that nothing refers to.
    let (executed, halved, grown) = unsafe {
        (
            libc::mprotect(base, 16384, executable) != 0,
            libc::munmap(base, 4096) != 0,
            libc::mremap(base, 16384, 1 << 20, libc::MREMAP_MAYMOVE) == libc::MAP_FAILED,
        )
    };
    let any = &[Errno::EIO];
    table.refused(GROUP, "made executable afterwards", refused(executed), any);
    table.refused(GROUP, "unmapped by half", refused(halved), any);
    table.refused(GROUP, "grown afterwards", refused(grown), any);
    Ok(())
}

fn window(device: &Device, witness: &Known, table: &mut Table) {
    let bad = &[Errno::EACCES, Errno::EINVAL, Errno::ENOENT, Errno::ERANGE][..];
    let length = to_usize(witness.length);
    for (what, offset, length) in [
        ("the whole window", 0, 256 << 20),
        ("the witness's buffer", witness.buffer_offset, length),
        ("the end of the window", (256 << 20) - 4096, 4096),
        ("behind the window", 256 << 20, 4096),
        ("far behind the window", 1 << 50, 4096),
        (
            "the last offset there is",
            i64::MAX as u64 - WINDOW_MMAP_BASE - 8191,
            8192,
        ),
    ] {
        let outcome = device.map(window_mmap_offset(offset), length).map(drop);
        table.refused(GROUP, what, outcome, bad);
    }
    let mut got = 0;
    let mut tried = 0;
    for length in [4096, length, 1 << 20] {
        for offset in (0..256_u64 << 20).step_by(1 << 20) {
            tried += 1;
            got += u64::from(device.map(window_mmap_offset(offset), length).is_ok());
        }
    }
    let said = format!("{got} granted");
    table.many(
        GROUP,
        "each MiB of the window, three lengths",
        tried,
        &said,
        got == 0,
    );
}

/// A buffer of its own is mapped whole or not at all, and not once it is freed.
fn own_buffer(path: &Path, table: &mut Table) -> Result<(), Failure> {
    let session = Session::open(&DeviceInfo {
        number: 0,
        address: Address::Device(path.into()),
    })?;
    let verbs = VerbsStubs(&session);
    let buffer = verbs.alloc_buffer(&AllocBuffer {
        length: 16384.into(),
        ..AllocBuffer::default()
    })?;
    let (offset, handle) = (buffer.offset.get(), buffer.handle);
    let denied = &[Errno::EACCES];
    for (what, offset, length) in [
        ("a buffer, short", offset, 4096),
        ("a buffer, long", offset, 20480),
        ("a buffer from its middle", offset + 4096, 12288),
    ] {
        let outcome = session.transport().map_buffer(0, offset, length);
        let outcome = outcome.map(drop).map_err(|error| error.errno());
        table.refused(GROUP, what, outcome, denied);
    }
    let map = session.transport().map_buffer(0, offset, 16384)?;
    let address = map.base().addr().get();
    // SAFETY: the memory stays mapped, and nothing refers to it.
    let pinned = unsafe {
        session
            .transport()
            .attach_pin(PinKind::Memory, address, 16384, true)
    };
    let outcome = pinned.map(drop).map_err(|error| error.errno());
    table.refused("pin", "the host's memory", outcome, &[Errno::EFAULT]);
    verbs.free_buffer(&handle)?;
    let outcome = session.transport().map_buffer(0, offset, 16384);
    let outcome = outcome.map(drop).map_err(|error| error.errno());
    // The first mapping keeps the memory, and the driver knows it.
    let said = outcome.map_or_else(crate::table::errno_name, |()| {
        "the same memory again".into()
    });
    table.note(GROUP, "a freed buffer that is still mapped", &said, true);
    drop(map);
    let outcome = session.transport().map_buffer(0, offset, 16384);
    let outcome = outcome.map(drop).map_err(|error| error.errno());
    table.refused(GROUP, "a freed buffer", outcome, denied);
    Ok(())
}
