//! Mappings that were not granted, and what becomes of those that were.

use super::objects::{Cq, Qp, Ring, domain};
use super::pair::{Pair, decent_write};
use super::uverbs::{Device, number};
use crate::Failure;
use crate::raw::{last, mmap};
use crate::table::{Table, errno_name};
use crate::witness::Known;
use farlane_abi::Errno;
use farlane_abi::rxe::{RING_OFF_LOG2_STRIDE, RING_OFF_PRODUCED};
use std::os::fd::AsRawFd as _;

const GROUP: &str = "mmap";
const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
const PAGE: usize = 4096;

/// Attacks what the driver maps.
pub fn attack(witness: &Known, table: &mut Table) -> Result<(), Failure> {
    offsets(witness, table)?;
    changed(table)?;
    after_the_end(table)?;
    children(table)
}

fn offsets(witness: &Known, table: &mut Table) -> Result<(), Failure> {
    let device = Device::open()?;
    let pd = domain(&device)?;
    let cq = Cq::create(&device)?;
    let qp = Qp::reliable(&device, pd, cq.handle)?;
    let (at, length) = (qp.send.token, qp.send.map.len());
    let bad = &[Errno::EINVAL];
    for (what, offset, length) in [
        ("a queue, short", at, length - PAGE),
        ("a queue, long", at, length + PAGE),
        ("a queue, far too long", at, 1 << 30),
        ("a queue from its second page", at + 4096, length - PAGE),
        ("the last offset there is", (1 << 62) - 4096, PAGE),
    ] {
        let outcome = device.map(offset, length).map(drop);
        table.refused(GROUP, what, outcome, bad);
    }
    // Tokens are each context's own: nothing is behind those of others, at any length.
    let mine = [at, cq.ring.token, qp.recv.as_ref().map_or(0, |r| r.token)];
    let mut granted = 0;
    let mut tried = 0;
    for page in 0..512 {
        let offset = page * 4096;
        for length in [PAGE, 2 * PAGE, 4 * PAGE, length] {
            if !mine.contains(&offset) {
                tried += 1;
                granted += u64::from(device.map(offset, length).is_ok());
            }
        }
    }
    let fresh = Device::open()?;
    for length in [PAGE, 2 * PAGE, 4 * PAGE, length] {
        tried += 1;
        granted += u64::from(fresh.map(witness.buffer_offset, length).is_ok());
    }
    table.many(
        GROUP,
        "offsets of nothing, and the witness's",
        tried,
        &format!("{granted} granted"),
        granted == 0,
    );
    let fd = device.fd().as_raw_fd();
    let outcome = mmap(fd, at, length, READ_WRITE, libc::MAP_PRIVATE).map(drop);
    table.refused(GROUP, "a private copy", outcome, &[Errno::EINVAL]);
    let executable = libc::PROT_READ | libc::PROT_EXEC;
    let outcome = mmap(fd, at, length, executable, libc::MAP_SHARED).map(drop);
    table.refused(GROUP, "executable", outcome, &[Errno::EACCES]);
    let file = Device::file()?;
    let outcome = file.map(at, length).map(drop);
    table.refused(GROUP, "of a file without a context", outcome, bad);
    Ok(())
}

/// Mappings moved, grown, cut.
fn changed(table: &mut Table) -> Result<(), Failure> {
    let pair = Pair::connected()?;
    let length = pair.cq.ring.map.len();
    let mapped = pair.device.map(pair.cq.ring.token, length)?;
    let base: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(mapped.address);
    let executable = libc::PROT_READ | libc::PROT_EXEC;
    let outcome = |good: bool| if good { Ok(()) } else { Err(last()) };
    // SAFETY: nothing refers to this mapping, which stays as long or becomes shorter.
    let (grown, executed, halved) = unsafe {
        let grown = libc::mremap(base, length, 2 * length, libc::MREMAP_MAYMOVE);
        let grown = outcome(grown != libc::MAP_FAILED);
        let executed = outcome(libc::mprotect(base, length, executable) == 0);
        let halved = outcome(libc::munmap(base, PAGE) == 0);
        (grown, executed, halved)
    };
    let bad = &[Errno::EFAULT, Errno::EINVAL];
    table.refused(GROUP, "grown", grown, bad);
    table.refused(GROUP, "made executable", executed, &[Errno::EACCES]);
    let said = halved.map_or_else(errno_name, |()| "one page less".into());
    table.note(GROUP, "unmapped by half", &said, halved.is_ok());
    let status = pair.write(4096);
    let said = status.map_or_else(errno_name, |status| format!("status {status}"));
    table.note(GROUP, "a write after that", &said, status == Ok(0));
    Ok(())
}

/// What was mapped stays memory of the process, which the backend does not look at any more.
fn after_the_end(table: &mut Table) -> Result<(), Failure> {
    let device = Device::open()?;
    let pd = domain(&device)?;
    let cq = Cq::create(&device)?;
    let qp = Qp::reliable(&device, pd, cq.handle)?;
    let Qp { handle, send, .. } = qp;
    device.destroy(number::DESTROY_QP, handle)?;
    let outcome = device.map(send.token, send.map.len()).map(drop);
    table.refused(
        GROUP,
        "of a queue pair that is gone",
        outcome,
        &[Errno::EINVAL],
    );
    let outcome = device.ring(handle);
    table.refused(GROUP, "ringing for it", outcome, &[Errno::ENOENT]);
    let is_memory = |ring: &Ring| {
        ring.store(RING_OFF_PRODUCED, 0x5555_5555);
        ring.load(RING_OFF_PRODUCED) == 0x5555_5555 && ring.load(RING_OFF_LOG2_STRIDE) < 12
    };
    let kept = is_memory(&send);
    let said = if kept {
        "still memory"
    } else {
        "something else"
    };
    table.note(GROUP, "its mapping", said, kept);
    drop(device);
    let kept = is_memory(&cq.ring);
    let said = if kept {
        "still memory"
    } else {
        "something else"
    };
    table.note(GROUP, "a mapping whose context is closed", said, kept);
    Ok(())
}

/// A child that has the file and the mappings, too: it is the parent's harm alone.
fn children(table: &mut Table) -> Result<(), Failure> {
    let mut pair = Pair::connected()?;
    let inherited = pair.device.map(pair.a.send.token, pair.a.send.map.len())?;
    // SAFETY: this process has one thread; the child ends without returning.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let good = in_child(&pair, inherited.address) == Ok(());
        // SAFETY: ends this process and nothing else of it is run.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut how = 0;
    // SAFETY: the child is ours, and nobody else waits for it.
    let waited = unsafe { libc::waitpid(child, &mut how, 0) };
    let good = child > 0 && waited == child && libc::WIFEXITED(how);
    let said = format!("ended with {}", libc::WEXITSTATUS(how));
    let what = "a child that writes into the queue, makes others, and may not ring";
    table.note(GROUP, what, &said, good && libc::WEXITSTATUS(how) == 0);
    pair.renew()?;
    let status = pair.write(4096);
    let said = status.map_or_else(errno_name, |status| format!("status {status}"));
    table.note(GROUP, "a write of the parent", &said, status == Ok(0));
    drop(pair);
    let works = decent_write()?;
    let said = if works { "works" } else { "broken" };
    table.note(GROUP, "a new context", said, works);
    Ok(())
}

fn in_child(pair: &Pair, queue: usize) -> Result<(), Errno> {
    let words: *mut u32 = std::ptr::with_exposed_provenance_mut(queue);
    // SAFETY: inside the mapping, which the child has from its parent.
    unsafe { words.add(RING_OFF_PRODUCED / 4).write_volatile(9) };
    // The RDMA subsystem takes commands from whoever has opened the file alone.
    if pair.device.ring(pair.a.handle) != Err(Errno::EACCES) {
        return Err(Errno::EPROTO);
    }
    for _ in 0..4 {
        Cq::create(&pair.device).map_err(|_| Errno::EIO)?;
    }
    Ok(())
}
