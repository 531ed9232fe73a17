//! Handlers of forks, which run while the library has all its locks.

use crate::locks::{read_p2p, read_plain};
use crate::{LENGTH, lock, memory};
use anyhow::{Result, ensure};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

/// The file of the handlers of [`handled`].
static FORKED: AtomicI32 = AtomicI32::new(-1);

/// A program's handler of forks, which locks, unlocks and closes.
unsafe extern "C" fn handle_fork() {
    let fd = FORKED.load(Ordering::Relaxed);
    let done = lock(fd, libc::F_WRLCK).and_then(|()| lock(fd, libc::F_UNLCK));
    // SAFETY: a number of its own; it ends the process where it cannot go on.
    unsafe {
        if done.is_err() || libc::close(libc::dup(fd)) != 0 {
            libc::abort();
        }
    }
}

/// Handlers of the program run between those of the library, which has all its locks then.
pub fn handled(file: &File, content: &[u8]) -> Result<()> {
    let fd = file.as_raw_fd();
    FORKED.store(fd, Ordering::Relaxed);
    // Before the library sees to forks: with the first memory.
    // SAFETY: the handlers are made for it.
    unsafe { libc::pthread_atfork(Some(handle_fork), Some(handle_fork), Some(handle_fork)) };
    let base = memory(LENGTH)?;
    read_p2p(fd, base, content)?;
    ended_if_it_hangs();
    // SAFETY: the child ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        end("child", &Ok(()));
    }
    wait(child)?;
    // The library is not inside any more.
    read_p2p(fd, base, content)
}

/// What the handlers of [`unmapped`] unmap: before the fork, in the parent, in the child.
static MEMORY: [AtomicPtr<u8>; 3] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 3];

fn unmap(which: usize) {
    ended_if_it_hangs();
    let base = MEMORY[which].load(Ordering::Relaxed);
    // SAFETY: memory of its own, which nothing uses any more; it ends the process where it cannot
    // go on.
    unsafe {
        if libc::munmap(base.cast(), LENGTH) != 0 || memory(LENGTH).is_err() {
            libc::abort();
        }
    }
}

unsafe extern "C" fn unmap_before() {
    unmap(0);
}

unsafe extern "C" fn unmap_in_parent() {
    unmap(1);
}

unsafe extern "C" fn unmap_in_child() {
    unmap(2);
}

/// Handlers of the program unmap device memory, and map other, while other threads read to some.
pub fn unmapped(file: &File, content: &[u8]) -> Result<()> {
    let fd = file.as_raw_fd();
    // Before the library sees to forks: with the first memory.
    // SAFETY: the handlers are made for it.
    unsafe {
        libc::pthread_atfork(
            Some(unmap_before),
            Some(unmap_in_parent),
            Some(unmap_in_child),
        );
    }
    let base = memory(LENGTH)?;
    for place in &MEMORY {
        place.store(memory(LENGTH)?, Ordering::Relaxed);
    }
    read_p2p(fd, base, content)?;
    let kept = MEMORY[2].load(Ordering::Relaxed).expose_provenance();
    let is_over = AtomicBool::new(false);
    let child = std::thread::scope(|scope| {
        scope.spawn(|| {
            let at = std::ptr::with_exposed_provenance_mut::<u8>(kept);
            while !is_over.load(Ordering::Relaxed) {
                // SAFETY: memory of this process, which no handler of it unmaps.
                unsafe { libc::pread(fd, at.cast(), LENGTH, 0) };
            }
        });
        // SAFETY: the child ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            end("child", &read_p2p(fd, base, content));
        }
        is_over.store(true, Ordering::Relaxed);
        child
    });
    wait(child)?;
    read_p2p(fd, base, content)
}

/// Whether a handler has forked.
static HAS_FORKED: AtomicBool = AtomicBool::new(false);
/// The child that it made; none in that child.
static NESTED: AtomicI32 = AtomicI32::new(0);

/// A program's handler that forks, once. The child goes on with the fork that this is a handler of,
/// as its parent does.
unsafe extern "C" fn fork_once_more() {
    if !HAS_FORKED.swap(true, Ordering::Relaxed) {
        // SAFETY: either process is one that the program is made for.
        let child = unsafe { libc::fork() };
        NESTED.store(child, Ordering::Relaxed);
        ended_if_it_hangs();
    }
}

/// Whoever hangs is ended by a signal.
fn ended_if_it_hangs() {
    // SAFETY: a timer of this process; its children have none.
    unsafe { libc::alarm(60) };
}

/// Waits for a child that is to have found nothing wrong.
fn wait(child: libc::pid_t) -> Result<()> {
    let mut status = 0;
    // SAFETY: waits for the child.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    ensure!(ended == child && status == 0, "The child fails: {status}");
    Ok(())
}

/// Ends a child with what it has found.
fn end(name: &str, found: &Result<()>) -> ! {
    if let Err(error) = found {
        eprintln!("In the {name}: {error:#}");
    }
    // SAFETY: ends the child.
    unsafe { libc::_exit(i32::from(found.is_err())) }
}

/// A handler of a fork forks: all four processes read and lock, and children have nothing of what
/// their parents have.
pub fn nested(file: &File, content: &[u8]) -> Result<()> {
    let fd = file.as_raw_fd();
    // Before the library sees to forks: the handler runs when it has taken its locks.
    // SAFETY: the handler is made for it.
    unsafe { libc::pthread_atfork(Some(fork_once_more), None, None) };
    let base = memory(LENGTH)?;
    read_p2p(fd, base, content)?;
    // The library gets to know that this process has a lock.
    lock(fd, libc::F_WRLCK)?;
    read_plain(fd, base, content)?;
    ended_if_it_hangs();
    // SAFETY: the children read, lock and end.
    let child = unsafe { libc::fork() };
    ended_if_it_hangs();
    let nested = NESTED.load(Ordering::Relaxed);
    ensure!(child >= 0 && nested >= 0, "No child: {child} {nested}");
    // Of memory of their own: the other is shared.
    let reads = || read_p2p(fd, memory(LENGTH)?, content);
    match (child, nested) {
        (0, 0) => end("child of the handler's child", &reads()),
        (0, _) => end("child", &reads()),
        (_, 0) => end("handler's child", &reads().and_then(|()| wait(child))),
        _ => (),
    }
    wait(child)?;
    wait(nested)?;
    read_plain(fd, base, content)?;
    lock(fd, libc::F_UNLCK)?;
    read_p2p(fd, base, content)
}
