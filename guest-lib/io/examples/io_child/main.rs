//! A program that the tests of the library run with it preloaded: it calls the C library's
//! functions and knows nothing else of the library than its registration. Each story ends with what
//! the totals say.

mod cuda;
mod forks;
mod guards;
mod lists;
mod locks;
mod moves;
mod positions;

use anyhow::{Context as _, Result, bail, ensure};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

const LENGTH: usize = 1 << 20;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    cache: u64,
    read_ahead: u64,
    p2p: u64,
    requests: u64,
}

fn symbol(name: &CStr) -> Result<*mut c_void> {
    // SAFETY: a string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    ensure!(
        !found.is_null(),
        "{name:?} is not there: the library is not preloaded"
    );
    Ok(found)
}

fn register(address: *mut u8, length: usize) -> Result<()> {
    // SAFETY: the type that farlane_io.h declares.
    let register = unsafe {
        std::mem::transmute::<
            *mut c_void,
            unsafe extern "C" fn(*mut c_void, usize, *const c_char) -> c_int,
        >(symbol(c"farlane_io_register")?)
    };
    // SAFETY: memory of this program.
    let result = unsafe { register(address.cast(), length, c"soft".as_ptr()) };
    ensure!(result == 0, "farlane_io_register returns {result}");
    Ok(())
}

fn totals() -> Result<Totals> {
    // SAFETY: the type that farlane_io.h declares.
    let stats = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut Totals)>(symbol(
            c"farlane_io_stats",
        )?)
    };
    let mut totals = Totals::default();
    // SAFETY: writes the structure.
    unsafe { stats(&raw mut totals) };
    Ok(totals)
}

/// Registered memory, a shared mapping of a memfd.
fn memory(length: usize) -> Result<*mut u8> {
    // SAFETY: a new mapping.
    let base = unsafe {
        let fd = libc::memfd_create(c"device".as_ptr(), 0);
        ensure!(
            fd >= 0 && libc::ftruncate(fd, i64::try_from(length)?) == 0,
            "No memfd"
        );
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let base = libc::mmap(
            std::ptr::null_mut(),
            length,
            protection,
            libc::MAP_SHARED,
            fd,
            0,
        );
        libc::close(fd);
        base
    };
    ensure!(base != libc::MAP_FAILED, "No memory");
    register(base.cast(), length)?;
    Ok(base.cast())
}

fn bytes<'a>(base: *const u8, offset: usize, length: usize) -> &'a [u8] {
    // SAFETY: callers stay inside their memory.
    unsafe { std::slice::from_raw_parts(base.add(offset), length) }
}

fn vector(base: *mut u8, offset: usize, length: usize) -> libc::iovec {
    libc::iovec {
        iov_base: base.wrapping_add(offset).cast(),
        iov_len: length,
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn set_errno(value: i32) {
    // SAFETY: this thread's own.
    unsafe { *libc::__errno_location() = value };
}

/// Every name that reads and writes.
fn calls(file: &File, content: &[u8]) -> Result<()> {
    let fd = file.as_raw_fd();
    let base = memory(LENGTH)?;
    let mut host = vec![0_u8; LENGTH];
    set_errno(123);
    // SAFETY: all of it is memory of this program.
    unsafe {
        let at = |offset: usize| base.add(offset).cast::<c_void>();
        ensure!(libc::pread(fd, at(5), 100_000, 4096) == 100_000, "pread");
        ensure!(
            bytes(base, 5, 100_000) == &content[4096..104_096],
            "pread: other bytes"
        );
        ensure!(
            libc::pread(fd, host.as_mut_ptr().cast(), 100_000, 1) == 100_000,
            "pread to host memory"
        );
        ensure!(
            host[..100_000] == content[1..100_001],
            "pread to host memory: other bytes"
        );
        ensure!(libc::lseek(fd, 10, libc::SEEK_SET) == 10);
        ensure!(libc::read(fd, at(0), 50_000) == 50_000, "read");
        ensure!(
            bytes(base, 0, 50_000) == &content[10..50_010],
            "read: other bytes"
        );
        ensure!(
            libc::lseek(fd, 0, libc::SEEK_CUR) == 50_010,
            "read has not moved the position"
        );

        let parts = [
            vector(base, 0, 70_000),
            vector(host.as_mut_ptr(), 0, 10_000),
            vector(base, 200_000, 40_960),
        ];
        let whole = 120_960;
        let same = |offset: usize| {
            bytes(base, 0, 70_000) == &content[offset..offset + 70_000]
                && bytes(host.as_ptr(), 0, 10_000) == &content[offset + 70_000..offset + 80_000]
                && bytes(base, 200_000, 40_960) == &content[offset + 80_000..offset + whole]
        };
        let moved = [
            libc::readv(fd, parts.as_ptr(), 3),
            libc::preadv(fd, parts.as_ptr(), 3, 777),
            libc::preadv2(fd, parts.as_ptr(), 3, 4096, 0),
        ];
        ensure!(moved == [isize::try_from(whole)?; 3], "Vectors: {moved:?}");
        ensure!(same(4096), "preadv2: other bytes");
        ensure!(
            libc::preadv2(fd, parts.as_ptr(), 3, -1, 0) == 120_960,
            "preadv2 at the position"
        );
        ensure!(same(50_010 + whole), "preadv2 at the position: other bytes");

        std::slice::from_raw_parts_mut(base, LENGTH).fill(7);
        ensure!(libc::pwrite(fd, at(0), 20_000, 8192) == 20_000, "pwrite");
        ensure!(
            libc::pwritev(fd, parts.as_ptr(), 1, 100_000) == 70_000,
            "pwritev"
        );
        ensure!(
            libc::pwritev2(fd, parts.as_ptr(), 1, 300_000, 0) == 70_000,
            "pwritev2"
        );
        ensure!(libc::lseek(fd, 500_000, libc::SEEK_SET) == 500_000);
        ensure!(libc::write(fd, at(0), 10_000) == 10_000, "write");
        ensure!(libc::writev(fd, parts.as_ptr(), 1) == 70_000, "writev");
        ensure!(
            errno() == 123,
            "A call that succeeds has set errno to {}",
            errno()
        );

        ensure!(
            libc::pread(fd, at(0), 10, -1) == -1 && errno() == libc::EINVAL,
            "pread at -1"
        );
        ensure!(
            libc::pread(-1, at(0), 10, 0) == -1 && errno() == libc::EBADF,
            "pread of nothing"
        );
        ensure!(
            libc::readv(fd, parts.as_ptr(), -1) == -1 && errno() == libc::EINVAL,
            "readv of -1"
        );
        ensure!(libc::munmap(base.cast(), LENGTH) == 0);
        ensure!(
            libc::pread(fd, at(0), 8192, 0) == -1 && errno() == libc::EFAULT,
            "pread to unmapped memory"
        );
    }
    let mut expected = content.to_vec();
    for (start, length) in [
        (8192, 20_000),
        (100_000, 70_000),
        (300_000, 70_000),
        (500_000, 80_000),
    ] {
        expected[start..start + length].fill(7);
    }
    ensure!(
        std::fs::read(format!("/proc/self/fd/{fd}"))? == expected,
        "The file has other bytes"
    );
    Ok(())
}

fn lock(fd: RawFd, kind: c_int) -> Result<()> {
    // SAFETY: a structure of numbers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind.try_into()?;
    // SAFETY: reads the structure.
    let result = unsafe { libc::fcntl(fd, libc::F_SETLK, &raw const lock) };
    ensure!(result == 0, "No lock");
    Ok(())
}

/// Whether another process is kept out of the file.
fn is_locked(path: &str) -> Result<bool> {
    // SAFETY: the child only makes system calls.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let path = std::ffi::CString::new(path)?;
            let fd = libc::open(path.as_ptr(), libc::O_RDWR);
            libc::_exit(i32::from(lock(fd, libc::F_WRLCK).is_err()));
        }
        let mut status = 0;
        ensure!(libc::waitpid(child, &raw mut status, 0) == child && libc::WIFEXITED(status));
        Ok(libc::WEXITSTATUS(status) == 1)
    }
}

fn links_to(path: &str) -> Result<usize> {
    let links = std::fs::read_dir("/proc/self/fd")?;
    let links = links.filter_map(|link| std::fs::read_link(link.ok()?.path()).ok());
    Ok(links.filter(|link| link.to_str() == Some(path)).count())
}

/// Locks of the process stay, and no descriptor is left behind.
fn closes(file: File, path: &str) -> Result<()> {
    let base = memory(LENGTH)?;
    let fd = file.as_raw_fd();
    let read = |fd| -> Result<()> {
        // SAFETY: memory of this program.
        let moved = unsafe { libc::pread(fd, base.cast(), LENGTH, 0) };
        ensure!(moved == isize::try_from(LENGTH)?, "pread returns {moved}");
        Ok(())
    };
    read(fd)?;
    ensure!(
        links_to(path)? == 2,
        "There is no descriptor for direct I/O"
    );
    // The library does not know of this lock, and keeps its descriptor.
    locks::lock_around_the_library(fd)?;
    ensure!(is_locked(path)?, "The lock keeps nobody out");
    read(fd)?;
    ensure!(is_locked(path)?, "Direct I/O has dropped the lock");
    // What a daemon does with all that it does not know.
    // SAFETY: closes nothing that this program uses.
    let closed = unsafe {
        (3..1024)
            .filter(|other| *other != fd && libc::close(*other) == 0)
            .count()
    };
    read(fd)?;
    ensure!(
        is_locked(path)?,
        "Closing {closed} unknown numbers has dropped the lock"
    );
    // SAFETY: a descriptor of this program's own.
    let second = unsafe { libc::fcntl(fd, libc::F_DUPFD, 3) };
    read(second)?;
    drop(file);
    ensure!(
        !is_locked(path)?,
        "The lock stays when a descriptor is closed"
    );
    read(second)?;
    // SAFETY: a descriptor of this program's own.
    ensure!(unsafe { libc::close(second) } == 0);
    ensure!(links_to(path)? == 0, "A descriptor is left open");
    Ok(())
}

/// Parent and child both go on.
fn forks(file: &File, content: &[u8]) -> Result<()> {
    let base = memory(LENGTH)?.expose_provenance();
    let fd = file.as_raw_fd();
    let check = |part: usize| -> Result<()> {
        for round in 0..20 {
            let (offset, length) = (round * 4096, LENGTH / 2 - 100_000);
            let at = std::ptr::with_exposed_provenance_mut::<u8>(base + part * LENGTH / 2);
            // SAFETY: this half of the memory is this process's.
            let moved = unsafe { libc::pread(fd, at.cast(), length, i64::try_from(offset)?) };
            ensure!(moved == isize::try_from(length)?, "pread returns {moved}");
            ensure!(
                bytes(at, 0, length) == &content[offset..offset + length],
                "Other bytes"
            );
        }
        Ok(())
    };
    check(0)?;
    std::thread::scope(|scope| -> Result<()> {
        // Others are at it while this thread forks.
        let busy = scope.spawn(|| check(0));
        for _ in 0..10 {
            // SAFETY: the child reads and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let code = match check(1) {
                    Ok(()) => 0,
                    Err(error) => {
                        eprintln!("In the child: {error:#}");
                        1
                    }
                };
                // SAFETY: ends the child.
                unsafe { libc::_exit(code) };
            }
            let mut status = 0;
            // SAFETY: waits for the child.
            let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
            ensure!(ended == child && status == 0, "The child fails");
        }
        busy.join().ok().context("A thread panicked")?
    })?;
    check(0)
}

static HANDLER_FD: AtomicU64 = AtomicU64::new(0);
static HANDLER_BUFFER: AtomicU64 = AtomicU64::new(0);
static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_alarm(_: c_int) {
    let before = errno();
    let fd = i32::try_from(HANDLER_FD.load(Ordering::Relaxed)).unwrap_or(-1);
    let address = usize::try_from(HANDLER_BUFFER.load(Ordering::Relaxed)).unwrap_or(0);
    let device = std::ptr::with_exposed_provenance_mut::<c_void>(address);
    let mut host = [0_u8; 512];
    // SAFETY: memory of this program.
    unsafe {
        let moved = [
            libc::pread(fd, device, 8192, 4096),
            libc::pread(fd, host.as_mut_ptr().cast(), 512, 0),
        ];
        if moved == [8192, 512] {
            HANDLED.fetch_add(1, Ordering::Relaxed);
        }
    }
    set_errno(before);
}

/// Calls a handler every so many microseconds; no more if that is none.
fn every(micros: i64, handler: extern "C" fn(c_int)) -> Result<()> {
    let time = libc::timeval {
        tv_sec: 0,
        tv_usec: micros,
    };
    let timer = libc::itimerval {
        it_interval: time,
        it_value: time,
    };
    // SAFETY: the handler makes calls that handlers may make; the kernel reads the structure.
    let set = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut());
        libc::syscall(libc::SYS_setitimer, libc::ITIMER_REAL, &raw const timer, 0)
    };
    ensure!(set == 0, "No timer");
    Ok(())
}

/// Handlers read while the program reads.
fn signals(file: &File, content: &[u8]) -> Result<()> {
    let base = memory(LENGTH + 8192)?;
    let fd = file.as_raw_fd();
    HANDLER_FD.store(fd.try_into()?, Ordering::Relaxed);
    HANDLER_BUFFER.store(
        base.wrapping_add(LENGTH).expose_provenance() as u64,
        Ordering::Relaxed,
    );
    every(300, on_alarm)?;
    let mut rounds = 0_u64;
    while HANDLED.load(Ordering::Relaxed) < 200 {
        rounds += 1;
        if rounds > 10_000_000 {
            bail!("Handlers do not get their bytes");
        }
        // SAFETY: memory of this program. Nothing else is done here, so that no handler interrupts
        // an allocation.
        let moved = unsafe { libc::pread(fd, base.cast(), LENGTH, 0) };
        if moved != isize::try_from(LENGTH)? {
            bail!("pread returns {moved}, errno {}", errno());
        }
    }
    every(0, on_alarm)?;
    ensure!(bytes(base, 0, LENGTH) == &content[..LENGTH], "Other bytes");
    ensure!(
        bytes(base, LENGTH, 8192) == &content[4096..12_288],
        "Other bytes in the handler"
    );
    Ok(())
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let [_, story, path] = words.as_slice() else {
        bail!("io_child STORY FILE");
    };
    // Reading the file by its name would end its locks.
    match story.as_str() {
        "locks_after_exec" => return locks::after_exec(path, true),
        "locks_after_exec_again" => return locks::after_exec(path, false),
        _ => (),
    }
    let content = std::fs::read(path)?;
    let file = File::options().read(true).write(true).open(path)?;
    match story.as_str() {
        "calls" => calls(&file, &content)?,
        "closes" => closes(file, path)?,
        "read_lock_exec" => locks::over_exec(file, &content, path, true)?,
        "lock_read_exec" => locks::over_exec(file, &content, path, false)?,
        "locks" => locks::ways(file, &content, path)?,
        "locks_forks" => forks::handled(&file, &content)?,
        "forks_unmap" => forks::unmapped(&file, &content)?,
        "allocators_unmap" => moves::allocated(&file, &content)?,
        "forks_in_forks" => forks::nested(&file, &content)?,
        "locks_children" => locks::children(&file, &content, path)?,
        "locks_threads" => locks::threads(file, &content, path)?,
        "locks_waits" => locks::waits(&file, &content, path)?,
        "locks_cancelled" => locks::cancelled(&file, &content, path)?,
        "locks_handlers" => locks::handlers(&file, &content, path)?,
        "locks_replaced" => locks::replaced(&file, &content, path)?,
        "locks_names" => locks::names()?,
        "forks" => forks(&file, &content)?,
        "signals" => signals(&file, &content)?,
        "cuda" => cuda::cuda(&file, &content)?,
        "cuda_mappings" => cuda::mapped(&file, &content)?,
        "cuda_pinned" => cuda::pinned(&file, &content)?,
        "cuda_shared" => cuda::shared(&file, &content)?,
        "cuda_troubled" => cuda::troubled(&file, &content)?,
        "cuda_contexts" => cuda::of_no_context(&file, &content)?,
        "guards" => guards::guards(file, path)?,
        "lists" => lists::lists(&file, &content)?,
        "moves" => moves::moves(&file, &content)?,
        "positions" => positions::positions(&file, &content)?,
        "killed" => positions::killed(&file)?,
        _ => bail!("There is no story {story}"),
    }
    let totals = totals()?;
    println!(
        "{} {} {} {}",
        totals.cache, totals.read_ahead, totals.p2p, totals.requests
    );
    Ok(())
}
