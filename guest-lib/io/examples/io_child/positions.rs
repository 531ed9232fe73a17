//! The file position, which other processes share.

use crate::{LENGTH, bytes, memory, vector};
use anyhow::{Result, ensure};
use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a process takes or adds at a time.
const RECORD: usize = 16 << 10;
const PROCESSES: usize = 3;

/// Words that children share.
fn shared(words: usize) -> Result<&'static [AtomicU64]> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let null = std::ptr::null_mut();
    // SAFETY: a new mapping, which stays.
    unsafe {
        let base = libc::mmap(null, words * 8, protection, flags, -1, 0);
        ensure!(base != libc::MAP_FAILED, "No memory");
        Ok(std::slice::from_raw_parts(base.cast(), words))
    }
}

/// Runs `work` in a child.
fn child(work: impl FnOnce() -> Result<()>) -> Result<libc::pid_t> {
    // SAFETY: this program has one thread.
    let child = unsafe { libc::fork() };
    ensure!(child >= 0, "No child");
    if child == 0 {
        let code = match work() {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("In the child: {error:#}");
                1
            }
        };
        // SAFETY: ends the child.
        unsafe { libc::_exit(code) };
    }
    Ok(child)
}

/// How a child has ended.
fn wait(child: libc::pid_t) -> Result<i32> {
    let mut status = 0;
    // SAFETY: waits for the child.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    ensure!(ended == child, "No child");
    Ok(status)
}

fn position(fd: RawFd) -> Result<u64> {
    // SAFETY: no memory is involved.
    Ok(u64::try_from(unsafe {
        libc::lseek(fd, 0, libc::SEEK_CUR)
    })?)
}

fn seek(fd: RawFd, to: usize) -> Result<()> {
    // SAFETY: no memory is involved.
    let at = unsafe { libc::lseek(fd, i64::try_from(to)?, libc::SEEK_SET) };
    ensure!(usize::try_from(at) == Ok(to), "lseek");
    Ok(())
}

/// Everybody who shares a position finds it where bytes have been read and written, at every
/// moment.
pub fn positions(file: &File, content: &[u8]) -> Result<()> {
    seen_by_another(file, content)?;
    every_byte_once(file, content)?;
    added_whole(file, content.len())
}

/// A read that ends with the file never leaves the position behind it.
fn seen_by_another(file: &File, content: &[u8]) -> Result<()> {
    const LEFT: usize = 200_000;
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    let start = content.len() - LEFT;
    let [looks, most, done] = shared(3)? else {
        unreachable!()
    };
    seek(fd, start)?;
    // SAFETY: a descriptor of the same open file.
    let same = unsafe { libc::dup(fd) };
    let looker = child(|| {
        while done.load(Ordering::Relaxed) == 0 {
            most.fetch_max(position(same)?, Ordering::Relaxed);
            looks.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    })?;
    let mut rounds = 0;
    while rounds < 200 || looks.load(Ordering::Relaxed) < 20_000 {
        seek(fd, start)?;
        // SAFETY: memory of this program.
        let moved = unsafe { libc::read(fd, base.cast(), LENGTH) };
        ensure!(moved == isize::try_from(LEFT)?, "read returns {moved}");
        ensure!(bytes(base, 0, LEFT) == &content[start..], "Other bytes");
        ensure!(position(same)? == content.len() as u64);
        rounds += 1;
        ensure!(rounds < 1_000_000, "Nobody looks");
    }
    done.store(1, Ordering::Relaxed);
    ensure!(wait(looker)? == 0, "The child fails");
    let most = most.load(Ordering::Relaxed);
    ensure!(
        most <= content.len() as u64,
        "The position was {most}, behind the file's end"
    );
    Ok(())
}

/// Processes that read on where another one has ended get each byte once.
fn every_byte_once(file: &File, content: &[u8]) -> Result<()> {
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    let records = content.len() / RECORD;
    let counts = shared(records)?;
    seek(fd, 0)?;
    let readers: Vec<_> = (0..PROCESSES)
        .map(|number| {
            child(|| {
                let base = base.wrapping_add(number * RECORD);
                loop {
                    // SAFETY: memory of this program, this part of which is the child's.
                    let moved = unsafe { libc::read(fd, base.cast(), RECORD) };
                    if moved == 0 {
                        return Ok(());
                    }
                    ensure!(moved == isize::try_from(RECORD)?, "read returns {moved}");
                    let found = bytes(base, 0, RECORD);
                    let mut all = content.chunks(RECORD);
                    let number = all.position(|record| record[..64] == found[..64]);
                    let count = number.and_then(|number| counts.get(number));
                    ensure!(count.is_some(), "That is no record");
                    count.map(|count| count.fetch_add(1, Ordering::Relaxed));
                }
            })
        })
        .collect::<Result<_>>()?;
    for reader in readers {
        ensure!(wait(reader)? == 0, "A child fails");
    }
    let once = |count: &AtomicU64| count.load(Ordering::Relaxed) == 1;
    ensure!(counts.iter().all(once), "Records twice, or not at all");
    ensure!(position(fd)? == content.len() as u64);
    Ok(())
}

/// What several processes add lies there in whole records.
fn added_whole(file: &File, length: usize) -> Result<()> {
    const ROUNDS: usize = 40;
    let fd = file.as_raw_fd();
    let path = format!("/proc/self/fd/{fd}");
    let at_end = File::options().append(true).open(path)?;
    seek(fd, length)?;
    let all = ROUNDS * PROCESSES * RECORD;
    for (fd, appends) in [(fd, false), (at_end.as_raw_fd(), true)] {
        let writers: Vec<_> = (0..PROCESSES)
            .map(|number| {
                child(|| {
                    let base = memory(RECORD)?;
                    // SAFETY: memory of this process.
                    unsafe { base.write_bytes(u8::try_from(number + 1)?, RECORD) };
                    let half = RECORD / 2;
                    let parts = [vector(base, 0, half), vector(base, half, half)];
                    for round in 0..ROUNDS {
                        // SAFETY: memory of this process.
                        let moved = unsafe {
                            match round % 2 {
                                0 => libc::write(fd, base.cast(), RECORD),
                                _ => libc::writev(fd, parts.as_ptr(), 2),
                            }
                        };
                        ensure!(moved == isize::try_from(RECORD)?, "{moved} bytes");
                    }
                    Ok(())
                })
            })
            .collect::<Result<_>>()?;
        for writer in writers {
            ensure!(wait(writer)? == 0, "A child fails");
        }
        let start = if appends { length + all } else { length };
        let mut added = vec![0; all];
        file.read_exact_at(&mut added, start as u64)?;
        ensure!(file.metadata()?.len() == (start + all) as u64);
        let mut counts = [0; PROCESSES + 1];
        for record in added.chunks(RECORD) {
            ensure!(
                record.iter().all(|byte| *byte == record[0]),
                "A record in pieces"
            );
            counts[usize::from(record[0])] += 1;
        }
        ensure!(counts[1..] == [ROUNDS; PROCESSES], "{counts:?}");
    }
    Ok(())
}

/// A process that is killed in the middle of a write leaves the position where the file ends that
/// it has written.
pub fn killed(file: &File) -> Result<()> {
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    // SAFETY: memory of this program.
    unsafe { base.write_bytes(7, LENGTH) };
    for round in 0..20 {
        file.set_len(0)?;
        seek(fd, 0)?;
        let writer = child(|| {
            for _ in 0..64 {
                // SAFETY: memory of this program.
                unsafe { libc::write(fd, base.cast(), LENGTH) };
            }
            Ok(())
        })?;
        let enough = (round % 5) << 20;
        while file.metadata()?.len() <= enough && position(fd)? == 0 {
            std::hint::spin_loop();
        }
        // SAFETY: the child.
        unsafe { libc::kill(writer, libc::SIGKILL) };
        wait(writer)?;
        let (at, length) = (position(fd)?, file.metadata()?.len());
        ensure!(
            at == length,
            "The position is {at}, the file has {length} bytes"
        );
        let mut written = vec![0; usize::try_from(length)?];
        file.read_exact_at(&mut written, 0)?;
        ensure!(written.iter().all(|byte| *byte == 7), "Other bytes");
    }
    Ok(())
}
