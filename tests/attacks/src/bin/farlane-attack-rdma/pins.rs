//! Memory that is not the process's own to register, and segments and events beyond the limits.

use crate::raw::{Device, mmap};
use crate::table::Table;
use crate::witness::Known;
use crate::{Failure, table};
use farlane_abi::Errno;
use farlane_abi::control::{FLAG_WRITABLE, MAX_REGION_BYTES, MAX_SEGMENT_BYTES};
use farlane_abi::ioctl::{Detach, IOC_DETACH, IOC_PIN, IOC_SEGMENT, Segment};
use std::path::Path;

const GROUP: &str = "pin";

/// Bytes that this process may lock while it tries the limit.
const LOCK_LIMIT: u64 = 8 << 20;

/// Attacks what the driver does with memory.
pub fn attack(path: &Path, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let device = Device::open(path)?;
    addresses(&device, witness, table)?;
    arguments(&device, table)?;
    segments(&device, table)?;
    limits(path, table)
}

fn addresses(device: &Device, witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let map = |protection| mmap(-1, 0, 16384, protection, private);
    let read_only = map(libc::PROT_READ)?;
    let nothing = map(libc::PROT_NONE)?;
    let unmapped = {
        let gone = map(libc::PROT_READ | libc::PROT_WRITE)?;
        gone.address as u64
    };
    let fault = &[Errno::EFAULT][..];
    let bad = &[Errno::EFAULT, Errno::EINVAL, Errno::ENOMEM][..];
    let top = u64::MAX - 4095;
    for (what, address, length, wanted) in [
        ("unmapped memory", unmapped, 4096, fault),
        (
            "memory of another process",
            witness.address,
            witness.length,
            fault,
        ),
        (
            "mapped memory and what follows it",
            read_only.address as u64,
            1 << 30,
            bad,
        ),
        ("memory without rights", nothing.address as u64, 4096, fault),
        (
            "a read-only mapping as writable",
            read_only.address as u64,
            16384,
            fault,
        ),
        ("the null page", 0, 4096, fault),
        (
            "the kernel's direct mapping",
            0xffff_8880_0000_0000,
            4096,
            bad,
        ),
        ("the kernel's text", 0xffff_ffff_8100_0000, 4096, bad),
        ("the vsyscall page", 0xffff_ffff_ff60_0000, 4096, bad),
        ("an address that is none", 0x8000_0000_0000_0000, 4096, bad),
        ("the end of user addresses", 0x7fff_ffff_e000, 1 << 20, bad),
        ("the last page there is", top, 4096, bad),
        ("a range that wraps around", top, 8192, bad),
        ("a range that wraps to itself", 4096, u64::MAX, bad),
        ("no bytes", read_only.address as u64, 0, bad),
        (
            "the longest region",
            read_only.address as u64,
            MAX_REGION_BYTES,
            bad,
        ),
        (
            "more than the longest region",
            read_only.address as u64,
            MAX_REGION_BYTES + 1,
            bad,
        ),
        ("half of all addresses", 0, 1 << 63, bad),
    ] {
        let outcome = device.pin(address, length, FLAG_WRITABLE).map(drop);
        table.refused(GROUP, what, outcome, wanted);
    }
    Ok(())
}

fn arguments(device: &Device, table: &mut Table) -> Result<(), Failure> {
    let own = vec![0_u8; 8192];
    let address = own.as_ptr().expose_provenance() as u64;
    let invalid = &[Errno::EINVAL][..];
    for flags in [2, 1 << 31, u32::MAX] {
        let outcome = device.pin(address, 8192, flags).map(drop);
        table.refused(GROUP, &format!("flags {flags:#x}"), outcome, invalid);
    }
    // The driver reads the request there, but cannot write the answer.
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let page = mmap(-1, 0, 4096, libc::PROT_READ, private)?;
    for (what, argument) in [
        ("an argument of a null pointer", 0),
        ("an argument in the kernel", 0xffff_8880_0000_0000),
        ("an argument that cannot be written", page.address),
    ] {
        let wanted = &[Errno::EFAULT, Errno::EINVAL];
        for number in [IOC_PIN, IOC_SEGMENT] {
            table.refused(GROUP, what, device.ioctl_at(number, argument), wanted);
        }
    }
    let unknown = table::errno_name;
    for number in [
        0,
        0xfa07,
        IOC_PIN ^ (8 << 16),
        IOC_PIN ^ (1 << 30),
        u64::from(u32::MAX),
    ] {
        let outcome = device.ioctl_at(number, 0);
        let said = outcome.map_or_else(unknown, |()| "done".into());
        table.note(
            GROUP,
            &format!("ioctl {number:#x}"),
            &said,
            said == "ENOTTY",
        );
    }
    for (what, index, fd) in [
        ("a negative descriptor as event", 1, -5),
        ("a descriptor that is none as event", 1, 9999),
        ("the device itself as event", 1, device.number()),
        ("event index zero", 0, -1),
        ("an event index beyond all", u32::MAX, -1),
    ] {
        let wanted = &[Errno::EINVAL, Errno::EBADF];
        table.refused(GROUP, what, device.bind(index, fd), wanted);
    }
    Ok(())
}

fn segments(device: &Device, table: &mut Table) -> Result<(), Failure> {
    const GROUP: &str = "segment";
    let invalid = &[Errno::EINVAL][..];
    for (what, length) in [
        ("a first one too short for the header", 4096),
        ("no bytes", 0),
        ("more than the longest", MAX_SEGMENT_BYTES + 1),
        ("all there is", u64::MAX),
    ] {
        table.refused(GROUP, what, device.segment(length).map(drop), invalid);
    }
    let mut reserved = Segment {
        length: 1 << 16,
        reserved: 1,
        ..Segment::default()
    };
    table.refused(
        GROUP,
        "a reserved field",
        device.ioctl(IOC_SEGMENT, &mut reserved),
        invalid,
    );
    let header = device.header()?;
    let busy = &[Errno::EBUSY][..];
    table.refused(
        GROUP,
        "detaching the header",
        device.detach(header.region),
        busy,
    );
    let second = device.segment(8192)?;
    let mapped = device.map(second.mmap_offset, 8192)?;
    table.refused(
        GROUP,
        "detaching what is mapped",
        device.detach(second.region),
        busy,
    );
    drop(mapped);
    device.detach(second.region)?;
    let missing = &[Errno::ENOENT][..];
    table.refused(
        GROUP,
        "detaching twice",
        device.detach(second.region),
        missing,
    );
    for region in [7, 65535, u32::MAX] {
        let what = format!("detaching region {region}");
        table.refused(GROUP, &what, device.detach(region), missing);
    }
    let mut reserved = Detach {
        region: header.region,
        reserved: 1,
    };
    let outcome = device.ioctl(IOC_DETACH, &mut reserved);
    table.refused(GROUP, "detaching with a reserved field", outcome, invalid);
    Ok(())
}

/// What a process without privileges may lock is a limit for pins and segments together.
fn limits(path: &Path, table: &mut Table) -> Result<(), Failure> {
    let limit = |bytes| libc::rlimit {
        rlim_cur: bytes,
        rlim_max: libc::RLIM_INFINITY,
    };
    let set = |bytes| {
        // SAFETY: the structure is valid for the call.
        unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit(bytes)) }
    };
    if set(LOCK_LIMIT) != 0 {
        return Err("Cannot set a limit of locked memory".into());
    }
    let device = Device::open(path)?;
    device.header()?;
    let own = vec![0_u8; 16 << 20];
    let address = own.as_ptr().expose_provenance() as u64;
    let outcome = device.pin(address, 16 << 20, FLAG_WRITABLE).map(drop);
    let full = &[Errno::ENOMEM][..];
    table.refused(GROUP, "more than the limit of locked memory", outcome, full);
    let mut taken = 0_u64;
    let outcome = loop {
        match device.segment(1 << 20) {
            Ok(_) if taken < 64 => taken += 1,
            other => break other.map(drop),
        }
    };
    let what = format!("segments without end: the one after {taken} MiB");
    table.refused("segment", &what, outcome, full);
    set(libc::RLIM_INFINITY);
    Ok(())
}
