//! POSIX locks of files that are read by P2P: they belong to the process, and any close of the file
//! drops them.

use crate::{LENGTH, bytes, errno, is_locked, links_to, lock, memory, totals};
use anyhow::{Context as _, Result, bail, ensure};
use std::ffi::{CString, c_int, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The variable that has the number of the locked descriptor after `execve`.
const LOCKED: &str = "IO_CHILD_LOCKED";

/// A part of the file is read to memory that is registered, with the right bytes; how many of them
/// by P2P.
fn read(fd: RawFd, base: *mut u8, content: &[u8]) -> Result<u64> {
    let before = totals()?;
    // SAFETY: memory of this program.
    let moved = unsafe {
        base.write_bytes(0xee, LENGTH);
        libc::pread(fd, base.cast(), LENGTH, 4096)
    };
    ensure!(
        moved == isize::try_from(LENGTH)?,
        "pread returns {moved}, errno {}",
        errno()
    );
    ensure!(
        bytes(base, 0, LENGTH) == &content[4096..4096 + LENGTH],
        "Other bytes"
    );
    let after = totals()?;
    let p2p = after.p2p - before.p2p;
    let plain = after.cache + after.read_ahead - before.cache - before.read_ahead;
    ensure!(p2p + plain >= LENGTH as u64, "{p2p} and {plain} bytes");
    Ok(p2p)
}

/// Reads by P2P.
pub fn read_p2p(fd: RawFd, base: *mut u8, content: &[u8]) -> Result<()> {
    let p2p = read(fd, base, content)?;
    ensure!(p2p == LENGTH as u64, "{p2p} bytes by P2P");
    Ok(())
}

/// Reads the plain way.
pub fn read_plain(fd: RawFd, base: *mut u8, content: &[u8]) -> Result<()> {
    let p2p = read(fd, base, content)?;
    ensure!(p2p == 0, "{p2p} bytes by P2P");
    Ok(())
}

/// Reads until another thread is at a lock of the file: then there is no direct I/O.
fn until_plain(fd: RawFd, base: *mut u8, content: &[u8]) -> Result<()> {
    for _ in 0..2000 {
        if read(fd, base, content)? == 0 {
            return Ok(());
        }
        std::thread::yield_now();
    }
    bail!("Direct I/O goes on while a lock is waited for")
}

/// Locks the whole file by a command of `fcntl`, or changes the lock; by a system call of its own
/// if `raw`.
fn locked_by(fd: RawFd, command: c_int, kind: c_int, raw: bool) -> Result<()> {
    // SAFETY: a structure of numbers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind.try_into()?;
    let lock = &raw const lock;
    // SAFETY: reads the structure.
    let result = unsafe {
        if raw {
            libc::syscall(libc::SYS_fcntl, fd, command, lock)
        } else {
            libc::fcntl(fd, command, lock).into()
        }
    };
    ensure!(result == 0, "No lock: errno {}", errno());
    Ok(())
}

/// Goes on as another image of this program, which has the descriptor.
fn exec(fd: RawFd, path: &str, story: &str) -> Result<()> {
    // SAFETY: a descriptor of this program's own.
    ensure!(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } == 0);
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    Err(command
        .args([story, path])
        .env(LOCKED, fd.to_string())
        .exec()
        .into())
}

/// Reads by P2P and locks, or the reverse, and goes on as another image.
pub fn over_exec(file: File, content: &[u8], path: &str, reads_first: bool) -> Result<()> {
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    if reads_first {
        read_p2p(fd, base, content)?;
    }
    lock(fd, libc::F_WRLCK)?;
    if !reads_first {
        read_plain(fd, base, content)?;
    }
    ensure!(is_locked(path)?, "The lock keeps nobody out");
    exec(fd, path, "locks_after_exec")
}

/// After the first `execve` and after the second: the lock is still there, and what this image
/// reads does not end it either.
pub fn after_exec(path: &str, reads: bool) -> Result<()> {
    ensure!(is_locked(path)?, "The lock is gone with execve");
    let fd: RawFd = std::env::var(LOCKED)?.parse()?;
    if !reads {
        return Ok(());
    }
    let base = memory(LENGTH)?;
    let mut content = vec![0; 4096 + LENGTH];
    // SAFETY: memory of this program.
    let moved = unsafe { libc::pread(fd, content.as_mut_ptr().cast(), content.len(), 0) };
    ensure!(
        moved == isize::try_from(content.len())?,
        "pread returns {moved}"
    );
    read_plain(fd, base, &content)?;
    read_plain(fd, base, &content)?;
    ensure!(links_to(path)? == 1, "There is another descriptor");
    exec(fd, path, "locks_after_exec_again")
}

/// Which way a file goes before, with and after locks of each kind.
pub fn ways(file: File, content: &[u8], path: &str) -> Result<()> {
    use libc::{F_OFD_SETLK, F_RDLCK, F_SETLK, F_SETLKW, F_UNLCK, F_WRLCK};
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    let p2p = |fd| read_p2p(fd, base, content);
    let plain = |fd| -> Result<()> {
        read_plain(fd, base, content)?;
        ensure!(links_to(path)? == 1, "There is a descriptor for direct I/O");
        Ok(())
    };
    p2p(fd)?;
    for (command, kind) in [(F_SETLK, F_WRLCK), (F_SETLKW, F_WRLCK), (F_SETLK, F_RDLCK)] {
        locked_by(fd, command, kind, false)?;
        // More often than what ends direct I/O with a file.
        for _ in 0..20 {
            plain(fd)?;
        }
        ensure!(is_locked(path)?, "The lock is gone");
        locked_by(fd, command, F_UNLCK, false)?;
        p2p(fd)?;
    }
    // Of two parts one stays locked.
    // SAFETY: this program's own descriptor.
    unsafe {
        ensure!(libc::lseek(fd, 0, libc::SEEK_SET) == 0);
        ensure!(libc::lockf(fd, libc::F_TLOCK, 100) == 0, "lockf");
        ensure!(libc::lseek(fd, 200, libc::SEEK_SET) == 200);
        ensure!(libc::lockf(fd, libc::F_LOCK, 100) == 0, "lockf");
        plain(fd)?;
        ensure!(libc::lockf(fd, libc::F_ULOCK, 100) == 0, "lockf");
        plain(fd)?;
        ensure!(is_locked(path)?, "The lock is gone");
        ensure!(libc::lseek(fd, 0, libc::SEEK_SET) == 0);
        ensure!(libc::lockf(fd, libc::F_ULOCK, 0) == 0, "lockf");
    }
    p2p(fd)?;
    // Those of the open file are not dropped when others are closed.
    locked_by(fd, F_OFD_SETLK, F_WRLCK, false)?;
    p2p(fd)?;
    ensure!(is_locked(path)?, "The lock of the open file is gone");
    locked_by(fd, F_OFD_SETLK, F_UNLCK, false)?;
    // SAFETY: this program's own descriptor.
    ensure!(unsafe { libc::flock(fd, libc::LOCK_EX) } == 0, "flock");
    p2p(fd)?;
    // A lock that there is not to be: what the kernel says of it is said, and that is all.
    // SAFETY: the kernel finds that there is no structure.
    let refused = unsafe { libc::fcntl(fd, F_SETLK, std::ptr::without_provenance::<c_void>(8)) };
    ensure!(refused == -1 && errno() == libc::EFAULT, "fcntl: {refused}");
    // SAFETY: there is no such descriptor.
    let refused = unsafe { libc::fcntl(-1, F_SETLK, std::ptr::null::<c_void>()) };
    ensure!(refused == -1 && errno() == libc::EBADF, "fcntl: {refused}");
    p2p(fd)?;
    // Taken around the C library, while there is a descriptor for direct I/O, and before.
    locked_by(fd, F_SETLK, F_WRLCK, true)?;
    p2p(fd)?;
    locked_by(fd, F_SETLK, F_RDLCK, false)?;
    read(fd, base, content)?;
    ensure!(is_locked(path)?, "The lock is gone");
    drop(file);
    let file = File::options().read(true).write(true).open(path)?;
    let fd = file.as_raw_fd();
    locked_by(fd, F_SETLK, F_WRLCK, true)?;
    plain(fd)?;
    ensure!(is_locked(path)?, "The lock is gone");
    // Closing any descriptor of the file ends its locks.
    drop(File::open(path)?);
    p2p(fd)?;
    lock(fd, F_WRLCK)?;
    plain(fd)?;
    // SAFETY: a descriptor of this program's own.
    let second = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 100) };
    ensure!(second >= 100, "fcntl returns {second}");
    // SAFETY: as above.
    ensure!(unsafe { libc::close_range(100, 200, 0) } == 0);
    ensure!(!is_locked(path)?);
    p2p(fd)?;
    drop(file);
    ensure!(links_to(path)? == 0, "A descriptor is left open");
    Ok(())
}

/// A child has no locks of its parent's, and its own are its own.
pub fn children(file: &File, content: &[u8], path: &str) -> Result<()> {
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    read_p2p(fd, base, content)?;
    lock(fd, libc::F_WRLCK)?;
    let in_child = |check: &dyn Fn() -> Result<()>| -> Result<()> {
        // SAFETY: the child reads and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let result = check();
            if let Err(error) = &result {
                eprintln!("In the child: {error:#}");
            }
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(result.is_err())) };
        }
        let mut status = 0;
        // SAFETY: waits for the child.
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        ensure!(ended == child && status == 0, "The child fails");
        Ok(())
    };
    in_child(&|| read_p2p(fd, base, content))?;
    ensure!(is_locked(path)?, "The lock is gone with the child");
    lock(fd, libc::F_UNLCK)?;
    in_child(&|| {
        read_p2p(fd, base, content)?;
        lock(fd, libc::F_WRLCK)?;
        read_plain(fd, base, content)?;
        ensure!(is_locked(path)?, "The lock is gone");
        Ok(())
    })?;
    read_p2p(fd, base, content)
}

/// Others read while this thread takes the lock: whoever has it has no descriptor of the library's.
pub fn threads(file: File, content: &[u8], path: &str) -> Result<()> {
    const READERS: usize = 2;
    let fd = file.as_raw_fd();
    let bases: Vec<_> = (0..READERS)
        .map(|_| Ok(memory(LENGTH)?.expose_provenance()))
        .collect::<Result<_>>()?;
    let reader = |fd: RawFd, base: usize| -> Result<()> {
        let base = std::ptr::with_exposed_provenance_mut::<u8>(base);
        // SAFETY: this thread's own memory.
        let moved = unsafe { libc::pread(fd, base.cast(), LENGTH, 4096) };
        ensure!(moved == isize::try_from(LENGTH)?, "pread returns {moved}");
        ensure!(
            bytes(base, 0, LENGTH) == &content[4096..4096 + LENGTH],
            "Other bytes"
        );
        Ok(())
    };
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let (reader, ends) = (&reader, &ends);
        let threads: Vec<_> = bases
            .iter()
            .map(|base| {
                scope.spawn(move || -> Result<()> {
                    while !ends.load(Ordering::Relaxed) {
                        reader(fd, *base)?;
                    }
                    Ok(())
                })
            })
            .collect();
        let result = (0..100).try_for_each(|_| {
            lock(fd, libc::F_WRLCK)?;
            ensure!(links_to(path)? == 1, "There is a descriptor for direct I/O");
            lock(fd, libc::F_UNLCK)?;
            let before = totals()?;
            let mut now = before;
            while now.p2p == before.p2p && now.requests < before.requests + 1000 {
                std::thread::yield_now();
                now = totals()?;
                ensure!(
                    !threads.iter().any(|thread| thread.is_finished()),
                    "A reader fails"
                );
            }
            ensure!(now.p2p > before.p2p, "There is no direct I/O any more");
            Ok(())
        });
        ends.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().ok().context("A thread panicked")??;
        }
        result
    })?;
    // One that the library has not seen yet.
    for round in 0..60 {
        let other = format!("{path}.{round}");
        std::fs::write(&other, content)?;
        let file = File::options().read(true).write(true).open(&other)?;
        let fd = file.as_raw_fd();
        let begin = Barrier::new(READERS + 1);
        std::thread::scope(|scope| -> Result<()> {
            let threads = bases.iter().map(|base| {
                let (reader, begin) = (&reader, &begin);
                scope.spawn(move || {
                    begin.wait();
                    reader(fd, *base)
                })
            });
            let threads: Vec<_> = threads.collect();
            begin.wait();
            lock(fd, libc::F_WRLCK)?;
            ensure!(
                links_to(&other)? == 1,
                "There is a descriptor for direct I/O"
            );
            for thread in threads {
                thread.join().ok().context("A thread panicked")??;
            }
            ensure!(
                links_to(&other)? == 1,
                "There is a descriptor for direct I/O"
            );
            Ok(())
        })?;
        std::fs::remove_file(other)?;
    }
    // And the image ends while they are at it.
    for base in bases {
        let content = content.to_vec();
        std::thread::spawn(move || {
            let base = std::ptr::with_exposed_provenance_mut::<u8>(base);
            // SAFETY: this thread's own memory.
            while unsafe { libc::pread(fd, base.cast(), LENGTH, 4096) } > 0
                && bytes(base, 0, LENGTH) == &content[4096..4096 + LENGTH]
            {}
        });
    }
    lock(fd, libc::F_WRLCK)?;
    exec(file.into_raw_fd(), path, "locks_after_exec")
}

/// A lock is waited for that another process has, while this one reads.
pub fn waits(file: &File, content: &[u8], path: &str) -> Result<()> {
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    read_p2p(fd, base, content)?;
    let mut ends = [0; 2];
    // SAFETY: makes two descriptors.
    ensure!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } == 0);
    // SAFETY: the child only makes system calls.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let held = lock(fd, libc::F_WRLCK).is_ok();
        let mut byte = 0_u8;
        // SAFETY: this process's own; it ends here.
        unsafe {
            libc::kill(
                libc::getpid(),
                if held { libc::SIGSTOP } else { libc::SIGKILL },
            );
            libc::close(ends[1]);
            libc::read(ends[0], (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
    let mut status = 0;
    // SAFETY: waits until the child has the lock, and has it go on.
    unsafe {
        ensure!(libc::waitpid(child, &raw mut status, libc::WUNTRACED) == child);
        ensure!(libc::WIFSTOPPED(status), "The child has no lock");
        ensure!(libc::kill(child, libc::SIGCONT) == 0);
        libc::close(ends[0]);
    }
    std::thread::scope(|scope| -> Result<()> {
        let waiting = scope.spawn(|| locked_by(fd, libc::F_SETLKW, libc::F_WRLCK, false));
        let begun = until_plain(fd, base, content);
        let waits = !waiting.is_finished();
        // SAFETY: the child's end of its wait.
        ensure!(unsafe { libc::close(ends[1]) } == 0);
        waiting.join().ok().context("A thread panicked")??;
        begun?;
        ensure!(waits, "There is no other lock");
        read_plain(fd, base, content)?;
        ensure!(links_to(path)? == 1, "There is a descriptor for direct I/O");
        Ok(())
    })?;
    // SAFETY: waits for the child.
    ensure!(unsafe { libc::waitpid(child, &raw mut status, 0) } == child);
    ensure!(is_locked(path)?);
    lock(fd, libc::F_UNLCK)?;
    read_p2p(fd, base, content)
}

/// A lock, and the descriptor of the file that is to be locked.
struct Wanted {
    fd: RawFd,
    lock: libc::flock,
}

/// Nothing is dropped here: the C library unwinds it.
extern "C" fn wait_for_ever(wanted: *mut c_void) -> *mut c_void {
    let wanted = wanted.cast::<Wanted>();
    // SAFETY: it lives as long as the thread.
    unsafe { libc::fcntl((*wanted).fd, libc::F_SETLKW, &raw const (*wanted).lock) };
    std::ptr::null_mut()
}

/// A thread that waits for a lock is cancelled.
pub fn cancelled(file: &File, content: &[u8], path: &str) -> Result<()> {
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    read_p2p(fd, base, content)?;
    // A lock of another open file keeps this process out, too.
    let other = File::options()
        .read(true)
        .write(true)
        .open(path)?
        .into_raw_fd();
    locked_by(other, libc::F_OFD_SETLK, libc::F_WRLCK, false)?;
    // SAFETY: the thread is waited for.
    unsafe {
        let mut thread = 0;
        let mut wanted = Wanted {
            fd,
            lock: std::mem::zeroed(),
        };
        wanted.lock.l_type = libc::F_WRLCK.try_into()?;
        let argument = (&raw mut wanted).cast();
        let made = libc::pthread_create(&raw mut thread, std::ptr::null(), wait_for_ever, argument);
        ensure!(made == 0, "No thread");
        until_plain(fd, base, content)?;
        ensure!(libc::pthread_cancel(thread) == 0);
        let mut result = std::ptr::null_mut();
        ensure!(libc::pthread_join(thread, &raw mut result) == 0);
        ensure!(
            result.addr() == usize::MAX,
            "The thread has not been cancelled"
        );
    }
    // The process goes on, and reads.
    read(fd, base, content)?;
    Ok(())
}

static HANDLER_FDS: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
static HANDLED: AtomicU32 = AtomicU32::new(0);

extern "C" fn on_alarm(_: c_int) {
    let before = errno();
    let done = HANDLER_FDS.iter().all(|fd| {
        let fd = RawFd::try_from(fd.load(Ordering::Relaxed)).unwrap_or(-1);
        lock(fd, libc::F_WRLCK).is_ok() && lock(fd, libc::F_UNLCK).is_ok()
    });
    HANDLED.fetch_add(u32::from(done), Ordering::Relaxed);
    crate::set_errno(before);
}

/// Handlers lock the file that their thread reads, and another one.
pub fn handlers(file: &File, content: &[u8], path: &str) -> Result<()> {
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    let other = format!("{path}.other");
    std::fs::write(&other, content)?;
    let other = File::options().read(true).write(true).open(&other)?;
    for (place, fd) in HANDLER_FDS.iter().zip([fd, other.as_raw_fd()]) {
        place.store(fd.try_into()?, Ordering::Relaxed);
    }
    crate::every(300, on_alarm)?;
    let mut rounds = 0_u64;
    while HANDLED.load(Ordering::Relaxed) < 200 {
        rounds += 1;
        if rounds > 10_000_000 {
            bail!("Handlers get no locks");
        }
        for fd in [fd, other.as_raw_fd()] {
            // SAFETY: memory of this program. Nothing else is done here, so that no handler
            // interrupts an allocation.
            let moved = unsafe { libc::pread(fd, base.cast(), LENGTH, 4096) };
            if moved != isize::try_from(LENGTH)? {
                bail!("pread returns {moved}, errno {}", errno());
            }
        }
    }
    crate::every(0, on_alarm)?;
    read_p2p(fd, base, content)?;
    lock(fd, libc::F_WRLCK)?;
    read_plain(fd, base, content)?;
    ensure!(links_to(path)? == 1, "There is a descriptor for direct I/O");
    Ok(())
}

/// Keeps the lock of a file that is opened by a name, whatever else becomes of its descriptors: for
/// what closes them.
pub fn lock_around_the_library(fd: RawFd) -> Result<()> {
    locked_by(fd, libc::F_SETLK, libc::F_WRLCK, true)
}

/// What sits at a number is put away by the program while another thread locks the file: the lock
/// stays.
pub fn replaced(file: &File, content: &[u8], path: &str) -> Result<()> {
    let (fd, base) = (file.as_raw_fd(), memory(LENGTH)?);
    let null = File::open("/dev/null")?;
    for _ in 0..200 {
        read_p2p(fd, base, content)?;
        let ours = crate::guards::theirs(path, fd)?;
        let begin = Barrier::new(2);
        std::thread::scope(|scope| -> Result<()> {
            let locking = scope.spawn(|| {
                begin.wait();
                lock(fd, libc::F_WRLCK)
            });
            begin.wait();
            // SAFETY: a number that this program does not know.
            let at = unsafe { libc::dup2(null.as_raw_fd(), ours) };
            ensure!(at == ours, "dup2 returns {at}");
            locking.join().ok().context("A thread panicked")??;
            Ok(())
        })?;
        ensure!(is_locked(path)?, "The lock is gone with what was replaced");
        lock(fd, libc::F_UNLCK)?;
        // SAFETY: this program's own.
        drop(unsafe { File::from_raw_fd(ours) });
    }
    Ok(())
}

/// Names of the C library that lock.
pub fn names() -> Result<()> {
    for name in ["fcntl", "fcntl64", "__fcntl", "lockf", "lockf64"] {
        let name = CString::new(name)?;
        // SAFETY: asks which library has a name.
        let found = unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            let symbol = crate::symbol(&name)?;
            ensure!(libc::dladdr(symbol, &raw mut info) != 0);
            std::ffi::CStr::from_ptr(info.dli_fname).to_string_lossy()
        };
        ensure!(found.ends_with("libfarlane_io.so"), "{name:?} is {found}'s");
    }
    Ok(())
}
