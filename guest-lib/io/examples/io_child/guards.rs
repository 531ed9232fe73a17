//! A program that closes and replaces numbers that it does not know.

use crate::locks::lock_around_the_library;
use crate::{LENGTH, errno, is_locked, links_to, memory};
use anyhow::{Context as _, Result, ensure};
use std::fs::File;
use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _, RawFd};

/// The library's descriptor of a file, of which the program has one.
pub fn theirs(path: &str, own: RawFd) -> Result<RawFd> {
    let numbers = std::fs::read_dir("/proc/self/fd")?;
    let mut numbers = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_it = |number: &RawFd| {
        let link = std::fs::read_link(format!("/proc/self/fd/{number}"));
        *number != own && link.is_ok_and(|link| link.to_str() == Some(path))
    };
    numbers.find(is_it).context("There is no other descriptor")
}

/// Reads by P2P.
fn read(fd: RawFd, base: *mut u8) -> Result<()> {
    // SAFETY: memory of this program.
    let moved = unsafe { libc::pread(fd, base.cast(), LENGTH, 0) };
    ensure!(moved == isize::try_from(LENGTH)?, "pread returns {moved}");
    Ok(())
}

fn close_range(first: RawFd, last: u32) -> Result<()> {
    // SAFETY: none of these is used by this program.
    let closed = unsafe { libc::close_range(u32::try_from(first)?, last, 0) };
    ensure!(closed == 0, "close_range: errno {}", errno());
    Ok(())
}

/// Whether a number is that of the null device.
fn is_null(number: RawFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{number}"));
    link.is_ok_and(|link| link.to_str() == Some("/dev/null"))
}

pub fn guards(file: File, path: &str) -> Result<()> {
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    read(fd, base)?;
    // The library does not know of it, and keeps its descriptor: the lock tells whether that is
    // ever closed.
    lock_around_the_library(fd)?;
    let ours = theirs(path, fd)?;
    ensure!(ours > fd);
    // SAFETY: a number that this program does not know.
    let closed = unsafe { libc::close(ours) };
    ensure!(closed == -1 && errno() == libc::EBADF, "close");
    for close in [
        |first| close_range(first, u32::MAX),
        |first| {
            // SAFETY: as above.
            unsafe { closefrom(first) };
            Ok(())
        },
        |first| close_range(first, 300),
    ] {
        close(fd + 1)?;
        ensure!(is_locked(path)?, "The lock is gone");
        ensure!(theirs(path, fd)? == ours, "The descriptor is another one");
        read(fd, base)?;
    }
    replaced(fd, path, base, ours)?;
    inherited(path)?;
    drop(file);
    ensure!(links_to(path)? == 0, "A descriptor is left open");
    // The last one of a file, among others.
    let file = File::open(path)?.into_raw_fd();
    read(file, base)?;
    ensure!(links_to(path)? == 2);
    close_range(file, u32::MAX)?;
    ensure!(links_to(path)? == 0, "A descriptor is left open");
    reopened(path, base)
}

/// A stream that is opened anew takes the library's descriptor of its file with it.
fn reopened(path: &str, base: *mut u8) -> Result<()> {
    let name = std::ffi::CString::new(path)?;
    // SAFETY: strings that end with zero, and a stream of this program.
    unsafe {
        let stream = libc::fopen(name.as_ptr(), c"r".as_ptr());
        ensure!(!stream.is_null(), "fopen: errno {}", errno());
        read(libc::fileno(stream), base)?;
        ensure!(links_to(path)? == 2);
        let stream = libc::freopen(c"/dev/null".as_ptr(), c"r".as_ptr(), stream);
        ensure!(!stream.is_null(), "freopen: errno {}", errno());
        ensure!(links_to(path)? == 0, "A descriptor is left open");
        ensure!(libc::fclose(stream) == 0, "fclose");
    }
    Ok(())
}

unsafe extern "C" {
    fn closefrom(first: libc::c_int);
}

/// The program puts something else at the library's number.
fn replaced(fd: RawFd, path: &str, base: *mut u8, ours: RawFd) -> Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    // SAFETY: numbers that this program does not know.
    let refused = unsafe { [libc::dup2(ours, 200), libc::dup2(-1, ours)] };
    ensure!(refused == [-1, -1] && errno() == libc::EBADF, "{refused:?}");
    ensure!(theirs(path, fd)? == ours);
    // SAFETY: as above.
    let at = unsafe { libc::dup2(null.as_raw_fd(), ours) };
    ensure!(at == ours && is_null(ours), "dup2 returns {at}");
    read(fd, base)?;
    let next = theirs(path, fd)?;
    // SAFETY: as above.
    let at = unsafe { libc::dup3(null.as_raw_fd(), next, libc::O_CLOEXEC) };
    ensure!(at == next && is_null(next), "dup3 returns {at}");
    read(fd, base)?;
    let last = theirs(path, fd)?;
    ensure!(![ours, next].contains(&last) && links_to(path)? == 2);
    for number in [ours, next] {
        // SAFETY: this program's now.
        drop(unsafe { File::from_raw_fd(number) });
    }
    Ok(())
}

/// A program that is started has none of the library's descriptors.
fn inherited(path: &str) -> Result<()> {
    let output = std::process::Command::new("ls")
        .args(["-l", "/proc/self/fd"])
        .env_remove("LD_PRELOAD")
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.success() && !text.contains(path), "{text}");
    // Its streams, and the folder that it looks at.
    ensure!(
        text.lines().filter(|line| line.contains("->")).count() == 4,
        "{text}"
    );
    Ok(())
}
