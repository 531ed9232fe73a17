//! Keeping others away from a disk's file, QEMU and its tools among them.
//!
//! QEMU has two bytes of an image for each permission (block/file-posix.c, `raw_apply_lock_bytes`,
//! `raw_check_lock_bytes`): who has a permission holds a shared lock of the one, and who lets
//! nobody else have it holds a shared lock of the other. Then each asks whether anybody has what it
//! does not share, or does not share what it has. All are locks of open files (fcntl(2),
//! `F_OFD_SETLK`): they are let go of with the last descriptor of the open file, and with its last
//! transfer.

use rustix::io::Errno;
use std::os::fd::{AsRawFd as _, OwnedFd};

/// Locks of who has a permission: this, and the permission's number.
const HAS: libc::off_t = 100;
/// Locks of who does not share one.
const KEEPS: libc::off_t = 200;

/// `BLK_PERM_CONSISTENT_READ`, `BLK_PERM_WRITE` and `BLK_PERM_RESIZE`, as the numbers of their
/// bits.
const READ: libc::off_t = 0;
const WRITE: libc::off_t = 1;
const RESIZE: libc::off_t = 3;

/// Locks of who moves bytes between the file and the memory of a user: this, and a number below
/// `USERS`. They are far behind all files.
const USES: libc::off_t = 1 << 61;
const USERS: u64 = 1 << 61;

/// Nobody else writes a disk or changes its size, whoever reads it.
const KEPT: [libc::off_t; 2] = [WRITE, RESIZE];

/// Locks a file that is going to be read, or also written.
///
/// # Errors
/// `EAGAIN` when somebody else has it in a way that does not fit.
pub fn lock(file: &OwnedFd, read_only: bool) -> Result<(), Errno> {
    let has: &[libc::off_t] = if read_only { &[READ] } else { &[READ, WRITE] };
    let result = take(file, has);
    if result.is_err() {
        // Who tries at the same time must not find what has not become ours.
        for byte in has.iter().map(|n| HAS + n).chain(KEPT.map(|n| KEEPS + n)) {
            let _ = change(file, byte, libc::F_UNLCK);
        }
    }
    result
}

/// Says that bytes are going to be moved between a file and the memory of `user`, which is a number
/// that others do not have.
///
/// A backend that was killed lets go of a file when its last transfer has ended. Until then the
/// memory must not be given to anybody, and a file that is only read can be had by many.
///
/// # Errors
/// `EAGAIN` when somebody else has said so.
pub fn enter(file: &OwnedFd, user: u64) -> Result<(), Errno> {
    let byte = use_of(user);
    change(file, byte, libc::F_RDLCK)?;
    // Somebody else's lock of a whole file is none of these.
    if others(file, byte)?.is_some_and(|lock| (lock.l_start, lock.l_len) == (byte, 1)) {
        leave(file, user);
        return Err(Errno::AGAIN);
    }
    Ok(())
}

/// The memory of `user` is not touched any more.
pub fn leave(file: &OwnedFd, user: u64) {
    let _ = change(file, use_of(user), libc::F_UNLCK);
}

fn use_of(user: u64) -> libc::off_t {
    USES + (user % USERS).cast_signed()
}

fn take(file: &OwnedFd, has: &[libc::off_t]) -> Result<(), Errno> {
    for byte in has.iter().map(|n| HAS + n).chain(KEPT.map(|n| KEEPS + n)) {
        change(file, byte, libc::F_RDLCK)?;
    }
    for byte in has.iter().map(|n| KEEPS + n).chain(KEPT.map(|n| HAS + n)) {
        if is_locked_by_others(file, byte)? {
            return Err(Errno::AGAIN);
        }
    }
    Ok(())
}

fn request(byte: libc::off_t, kind: libc::c_int) -> Result<libc::flock, Errno> {
    let short = |n: libc::c_int| libc::c_short::try_from(n).map_err(|_| Errno::INVAL);
    Ok(libc::flock {
        l_type: short(kind)?,
        l_whence: short(libc::SEEK_SET)?,
        l_start: byte,
        l_len: 1,
        // To be zero for locks of open files.
        l_pid: 0,
    })
}

fn change(file: &OwnedFd, byte: libc::off_t, kind: libc::c_int) -> Result<(), Errno> {
    let request = request(byte, kind)?;
    // SAFETY: the kernel reads the structure.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) };
    if rc == 0 { Ok(()) } else { Err(last_error()) }
}

/// Whether another open file has a lock of a byte.
fn is_locked_by_others(file: &OwnedFd, byte: libc::off_t) -> Result<bool, Errno> {
    others(file, byte).map(|lock| lock.is_some())
}

/// A lock of a byte that another open file has.
fn others(file: &OwnedFd, byte: libc::off_t) -> Result<Option<libc::flock>, Errno> {
    let mut answer = request(byte, libc::F_WRLCK)?;
    // SAFETY: the kernel reads and writes the structure.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut answer) };
    if rc != 0 {
        return Err(last_error());
    }
    Ok((libc::c_int::from(answer.l_type) != libc::F_UNLCK).then_some(answer))
}

fn last_error() -> Errno {
    let error = std::io::Error::last_os_error();
    match Errno::from_io_error(&error) {
        // What fcntl(2) says on some systems.
        Some(Errno::ACCESS) | None => Errno::AGAIN,
        Some(error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::path::Path;

    fn open(path: &Path) -> OwnedFd {
        File::options()
            .read(true)
            .write(true)
            .open(path)
            .unwrap()
            .into()
    }

    /// Somebody who has and keeps permissions as QEMU does. Returns whether there is nobody whom
    /// that does not suit.
    fn qemu(file: &OwnedFd, has: &[libc::off_t], keeps: &[libc::off_t]) -> bool {
        for byte in has
            .iter()
            .map(|n| 100 + n)
            .chain(keeps.iter().map(|n| 200 + n))
        {
            change(file, byte, libc::F_RDLCK).unwrap();
        }
        let mut asked = has
            .iter()
            .map(|n| 200 + n)
            .chain(keeps.iter().map(|n| 100 + n));
        asked.all(|byte| !is_locked_by_others(file, byte).unwrap())
    }

    #[test]
    fn a_file_is_not_qemus_while_it_is_ours_and_not_ours_while_it_is_qemus() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // What a virtio disk of QEMU has and does not share, `qemu-img resize`, and a disk that is
        // only read.
        let disk: (&[_], &[_]) = (&[0, 1], &[1, 3]);
        let resize: (&[_], &[_]) = (&[0, 1, 3], &[]);
        let reader: (&[_], &[_]) = (&[0], &[1, 3]);
        for (theirs, beside_writer, beside_reader) in [
            (disk, false, false),
            (resize, false, false),
            (reader, false, true),
        ] {
            for (read_only, fits) in [(false, beside_writer), (true, beside_reader)] {
                let ours = open(file.path());
                lock(&ours, read_only).unwrap();
                assert_eq!(qemu(&open(file.path()), theirs.0, theirs.1), fits);
                drop(ours);
                let qemus = open(file.path());
                assert!(qemu(&qemus, theirs.0, theirs.1));
                let ours = open(file.path());
                assert_eq!(lock(&ours, read_only).is_ok(), fits);
                if !fits {
                    assert_eq!(lock(&ours, read_only), Err(Errno::AGAIN));
                    // Nothing of ours is left in the way.
                    assert!(qemu(&open(file.path()), &[0, 2], &[]));
                    drop(qemus);
                    lock(&ours, read_only).unwrap();
                }
            }
        }
    }

    #[test]
    fn whose_memory_is_used_is_known_until_the_open_file_is_gone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [first, next, other] = [0; 3].map(|_| open(file.path()));
        for ours in [&first, &next, &other] {
            lock(ours, true).unwrap();
        }
        let user = u64::MAX;
        enter(&first, user).unwrap();
        enter(&first, user).unwrap();
        enter(&other, user - 1).unwrap();
        assert_eq!(enter(&next, user), Err(Errno::AGAIN));
        // As a transfer under way keeps it.
        let kept = first.try_clone().unwrap();
        drop(first);
        assert_eq!(enter(&next, user), Err(Errno::AGAIN));
        drop(kept);
        enter(&next, user).unwrap();
        leave(&next, user);
        enter(&other, user).unwrap();
        leave(&other, user);
        // As Cloud Hypervisor locks a disk that it only reads.
        let reader = open(file.path());
        let whole = libc::flock {
            l_len: 0,
            ..request(0, libc::F_RDLCK).unwrap()
        };
        // SAFETY: the kernel reads the structure.
        let rc = unsafe { libc::fcntl(reader.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) };
        assert_eq!(rc, 0);
        enter(&next, user).unwrap();
        // Of two locks of a byte the kernel tells the one of whoever has had one of the file for
        // longer. A lock of the whole file that was there before us would have kept us away.
        assert_eq!(enter(&other, user), Err(Errno::AGAIN));
        assert_eq!(lock(&open(file.path()), true), Err(Errno::AGAIN));
    }

    #[test]
    fn another_ones_lock_of_any_of_the_bytes_is_noticed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // Whoever keeps what we have, and whoever has what we keep, among locks that are in
        // nobody's way.
        for (byte, read_only) in [
            (200, true),
            (101, true),
            (103, true),
            (201, false),
            (103, false),
        ] {
            let (harmless, other, ours) = (open(file.path()), open(file.path()), open(file.path()));
            for byte in [100, 102, 202, 203] {
                change(&harmless, byte, libc::F_RDLCK).unwrap();
            }
            change(&other, byte, libc::F_RDLCK).unwrap();
            assert_eq!(lock(&ours, read_only), Err(Errno::AGAIN), "{byte}");
            drop(other);
            lock(&ours, read_only).unwrap();
        }
    }

    #[test]
    fn a_lock_of_the_whole_file_counts_too() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (other, ours) = (open(file.path()), open(file.path()));
        // As Cloud Hypervisor locks its disks.
        let whole = libc::flock {
            l_len: 0,
            ..request(0, libc::F_WRLCK).unwrap()
        };
        // SAFETY: the kernel reads the structure.
        let rc = unsafe { libc::fcntl(other.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) };
        assert_eq!(rc, 0);
        assert_eq!(lock(&ours, true), Err(Errno::AGAIN));
        drop(other);
        lock(&ours, true).unwrap();
    }
}
