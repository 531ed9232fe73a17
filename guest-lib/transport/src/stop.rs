//! Has all threads of this process stand still while something is done of which none of them may
//! see a half.
//!
//! A process of its own, which shares the memory (`CLONE_VM`), traces them for that moment
//! (ptrace(2), `PTRACE_SEIZE`), as sanitizers do that look for leaks. Unlike a signal that leaves
//! the program alone: no handler runs, nothing is restarted that would not go on, and threads stop
//! that block all signals. What a system call was about to write is written before its thread
//! stands. Calls that a stop ends with `EINTR` in any program (`epoll_wait` and others, signal(7))
//! it ends here, too.
//!
//! It cannot be where the process may not be traced: somebody does already (a debugger), it is not
//! dumpable (prctl(2)), or the system forbids it (`kernel.yama.ptrace_scope` of 2 and more, a
//! filter of system calls).

use crate::{PerProcess, with_signals_blocked};
use farlane_sys::Mmap;
use farlane_sys::sync::lock;
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom, openat, seek};
use rustix::io::Errno;
use rustix::process::{PTracer, Pid, set_ptracer};
use rustix::thread::futex;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Threads that can be stopped.
const MAX_THREADS: usize = 4096;
/// Stack of the process that does it.
const STACK_BYTES: usize = 128 << 10;
/// How long a thread is waited for: one that waits for a disk, or for a child of its `vfork`, does
/// not stop before that.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long another one that traces threads may take before it is taken for a debugger.
const OTHERS_TIME: Duration = Duration::from_millis(20);
/// How often is looked without a pause whether a thread has stopped: mostly it has at once.
const EAGER_LOOKS: u32 = 200;
/// `linux/ptrace.h`: a thread stands because it was told to, and not before a signal.
const PTRACE_EVENT_STOP: c_int = 128;

/// Values of [`Control::go`].
const WAIT: u32 = 0;
const GO: u32 = 1;

/// Values of [`Control::outcome`]: an error's number is this much more.
const NOTHING: u32 = 0;
const DONE: u32 = 1;

/// What this thread and the process that stops all of them have together, in memory that is
/// nothing else's.
struct Control<'a> {
    /// Whether it may begin: it is allowed to trace.
    go: AtomicU32,
    /// Its id, which the kernel takes away when it has ended.
    id: AtomicU32,
    outcome: AtomicU32,
    /// `/proc/self/task`, as this process sees it.
    tasks: BorrowedFd<'a>,
    threads: *mut Thread,
    work: &'a dyn Fn() -> Result<(), Errno>,
}

/// A thread that is traced; none where all bytes are zero.
struct Thread {
    id: c_int,
    /// The signal that it was about to get.
    signal: c_int,
}

/// Does `work` while no thread of this process runs: neither the one that calls this. `work` must
/// use no lock and no allocator, which one of them may be using, and tells its outcome by what it
/// returns alone.
///
/// # Errors
/// Those of `work`; `EPERM` or `ENOSYS` where threads cannot be stopped, `EBUSY` where one does not
/// come to it, `E2BIG` for too many; what the system says.
pub(crate) fn with_threads_stopped(work: &dyn Fn() -> Result<(), Errno>) -> Result<(), Errno> {
    /// A thread has one that traces it.
    static ONE: PerProcess<Mutex<()>> = PerProcess::new();
    let _one = lock(ONE.get());
    let begin = Instant::now();
    loop {
        match stop_once(work) {
            // It may be another library of the program that does the same.
            Err(Errno::PERM) if begin.elapsed() < OTHERS_TIME => std::thread::yield_now(),
            result => return result,
        }
    }
}

/// The same, where nobody else does it.
fn stop_once(work: &dyn Fn() -> Result<(), Errno>) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let tasks: OwnedFd = rustix::fs::open("/proc/self/task", flags, Mode::empty())?;
    let (control_bytes, list_bytes) = (4096, MAX_THREADS * size_of::<Thread>());
    let memory = Mmap::anonymous(control_bytes + list_bytes + STACK_BYTES)?;
    let base = memory.base().as_ptr();
    let control = base.cast::<Control<'_>>();
    // SAFETY: inside of the mapping, which is aligned to pages, and this function's own; all zero
    // bytes are threads.
    let (control, stack) = unsafe {
        control.write(Control {
            go: AtomicU32::new(WAIT),
            id: AtomicU32::new(0),
            outcome: AtomicU32::new(NOTHING),
            tasks: tasks.as_fd(),
            threads: base.add(control_bytes).cast(),
            work,
        });
        (&*control, base.add(memory.len()))
    };
    // It inherits that: signals for this process's group, of a terminal, are no business of its.
    with_signals_blocked(|| run(control, stack))?;
    match control.outcome.load(Ordering::Acquire) {
        DONE => Ok(()),
        // It was killed.
        NOTHING => Err(Errno::FAULT),
        outcome => {
            let number = c_int::try_from(outcome - DONE).unwrap_or(libc::EINVAL);
            Err(Errno::from_raw_os_error(number))
        }
    }
}

/// Starts the process on a stack that ends there, and waits for its end. Between nothing of the C
/// library is called, as that process has the place for its errors (`errno`).
fn run(control: &Control<'_>, stack: *mut u8) -> Result<(), Errno> {
    let flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_UNTRACED
        | libc::CLONE_PARENT_SETTID
        | libc::CLONE_CHILD_CLEARTID;
    let argument = (&raw const *control).cast_mut().cast::<c_void>();
    let id = control.id.as_ptr();
    // SAFETY: the stack is nobody else's, and stays, as what it is given does, until the process
    // has ended, which is waited for.
    let helper = unsafe {
        let none: *mut c_void = null_mut();
        libc::clone(main, stack.cast(), flags, argument, id, none, id)
    };
    let Some(helper) = Pid::from_raw(helper).filter(|_| helper > 0) else {
        return Err(last_error());
    };
    // Where the kernel does not ask for that it does not know it.
    let _ = set_ptracer(PTracer::ProcessID(helper));
    control.go.store(GO, Ordering::Release);
    let _ = futex::wake(&control.go, futex::Flags::PRIVATE, 1);
    loop {
        let id = control.id.load(Ordering::Acquire);
        if id == 0 {
            break;
        }
        // The kernel wakes it as a futex of several processes.
        let _ = futex::wait(&control.id, futex::Flags::empty(), id, None);
    }
    let mut status = 0;
    // SAFETY: waits for the process just made.
    unsafe { libc::waitpid(helper.as_raw_nonzero().get(), &raw mut status, libc::__WALL) };
    Ok(())
}

/// What the process does.
extern "C" fn main(argument: *mut c_void) -> c_int {
    // SAFETY: what `run` has given it, which stays until this process has ended.
    let control = unsafe { &*argument.cast::<Control<'_>>() };
    while control.go.load(Ordering::Acquire) == WAIT {
        let _ = futex::wait(&control.go, futex::Flags::PRIVATE, WAIT, None);
    }
    // SAFETY: so many are there, and only this process has them.
    let threads = unsafe { std::slice::from_raw_parts_mut(control.threads, MAX_THREADS) };
    let mut stopped = Stopped { threads, count: 0 };
    let result = stopped.stop(control.tasks);
    let result = result.and_then(|()| (control.work)());
    stopped.release();
    let outcome = match result {
        Ok(()) => DONE,
        Err(errno) => DONE + errno.raw_os_error().unsigned_abs(),
    };
    control.outcome.store(outcome, Ordering::Release);
    0
}

/// Threads that stand still, or are about to.
struct Stopped<'a> {
    threads: &'a mut [Thread],
    count: usize,
}

impl Stopped<'_> {
    /// Stops all of them: also those that were made while others were stopped.
    fn stop(&mut self, tasks: BorrowedFd<'_>) -> Result<(), Errno> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let before = self.count;
            seek(tasks, SeekFrom::Start(0))?;
            let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
            let mut entries = RawDir::new(tasks, &mut buffer);
            while let Some(entry) = entries.next() {
                self.seize(tasks, entry?.file_name().to_bytes())?;
            }
            let new = self.threads.iter_mut().take(self.count).skip(before);
            for thread in new {
                thread.wait(deadline)?;
            }
            if self.count == before {
                return Ok(());
            }
        }
    }

    /// Tells a thread of this name, which is its number, to stop, if it was not told before.
    fn seize(&mut self, tasks: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
        let number = std::str::from_utf8(name).ok();
        let Some(id) = number.and_then(|name| name.parse().ok()) else {
            return Ok(());
        };
        let mut known = self.threads.iter().take(self.count);
        if known.any(|thread| thread.id == id) {
            return Ok(());
        }
        let place = self.threads.get_mut(self.count).ok_or(Errno::TOOBIG)?;
        match trace(libc::PTRACE_SEIZE, id, 0) {
            Ok(()) => {}
            // It has ended, or is about to: then it runs no more.
            Err(Errno::SRCH) => return Ok(()),
            Err(_) if has_ended(tasks, name) => return Ok(()),
            Err(errno) => return Err(errno),
        }
        *place = Thread { id, signal: 0 };
        self.count += 1;
        // One that ends meanwhile is no more there, which shows when it is waited for.
        let _ = trace(libc::PTRACE_INTERRUPT, id, 0);
        Ok(())
    }

    /// Has them go on.
    fn release(&self) {
        for thread in self.threads.iter().take(self.count) {
            // Of what has not stopped the kernel lets go when this process ends.
            let _ = trace(libc::PTRACE_DETACH, thread.id, thread.signal);
        }
    }
}

impl Thread {
    /// Waits until it stands still, or has ended.
    fn wait(&mut self, deadline: Instant) -> Result<(), Errno> {
        let mut looks = 0;
        loop {
            let mut status = 0;
            // SAFETY: writes the status alone.
            let found = unsafe {
                let how = libc::__WALL | libc::WNOHANG;
                libc::waitpid(self.id, &raw mut status, how)
            };
            if found == self.id && libc::WIFSTOPPED(status) {
                let is_told = status >> 16 == PTRACE_EVENT_STOP;
                self.signal = if is_told { 0 } else { libc::WSTOPSIG(status) };
                return Ok(());
            }
            if found != 0 {
                // Its number may be another one's.
                self.id = 0;
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Errno::BUSY);
            }
            looks += 1;
            // SAFETY: neither writes anything.
            unsafe {
                if looks < EAGER_LOOKS {
                    libc::sched_yield();
                } else {
                    libc::usleep(50);
                }
            }
        }
    }
}

/// Whether a thread has ended and is only not forgotten yet.
fn has_ended(tasks: BorrowedFd<'_>, name: &[u8]) -> bool {
    const STAT: &[u8] = b"/stat";
    let mut path = [0; 32];
    let Some(room) = path.get_mut(..name.len() + STAT.len()) else {
        return false;
    };
    let (first, second) = room.split_at_mut(name.len());
    first.copy_from_slice(name);
    second.copy_from_slice(STAT);
    let path: &[u8] = room;
    let Ok(file) = openat(tasks, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
        return true;
    };
    let mut text = [0_u8; 256];
    let Ok(length) = rustix::io::read(&file, &mut text[..]) else {
        return true;
    };
    // Behind its name, which is in parentheses and may have some.
    let text = text.get(..length).unwrap_or_default();
    let name_end = text.iter().rposition(|byte| *byte == b')');
    let state = name_end.and_then(|end| text.get(end + 2));
    matches!(state, Some(b'Z' | b'X' | b'x'))
}

/// A request of ptrace(2) that has no address.
fn trace(request: libc::c_uint, id: c_int, data: c_int) -> Result<(), Errno> {
    let none: *const c_void = null();
    // SAFETY: none of those made here writes memory of this process.
    let result = unsafe { libc::ptrace(request, id, none, libc::c_long::from(data)) };
    if result == -1 {
        return Err(last_error());
    }
    Ok(())
}

fn last_error() -> Errno {
    let number = std::io::Error::last_os_error().raw_os_error();
    Errno::from_raw_os_error(number.unwrap_or(libc::EINVAL))
}

#[cfg(test)]
mod tests;
