use super::*;
use std::os::unix::thread::JoinHandleExt as _;
use std::thread::JoinHandle;

#[test]
fn a_thread_is_inside_once_and_until_the_first_one_goes() {
    let first = Inside::enter();
    assert!(first.is_some() && Inside::enter().is_none() && Inside::enter().is_none());
    drop(first);
    assert!(Inside::enter().is_some());
}

/// Whether a thread of this process waits for a lock: with nothing else it sleeps on a futex.
fn waits(thread: &AtomicI32) -> bool {
    let thread = thread.load(Ordering::Relaxed);
    let call = std::fs::read_to_string(format!("/proc/self/task/{thread}/syscall"));
    call.is_ok_and(|call| call.starts_with(&format!("{} ", libc::SYS_futex)))
}

/// Whether a signal is kept from a thread until it does not block it any more.
fn is_kept_from(thread: &AtomicI32, signal: i32) -> bool {
    let thread = thread.load(Ordering::Relaxed);
    let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status"));
    let status = status.unwrap_or_default();
    let mut sets = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:"));
    let set = sets
        .next()
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set >> (signal - 1) & 1 == 1)
}

/// The child that the handler has made; zero in that child.
static NESTED: AtomicI32 = AtomicI32::new(-1);

/// Who hangs, here or in the child, is ended by a signal.
extern "C" fn fork_once_more(_: i32) {
    // SAFETY: the child goes on as its parent does, and ends.
    let child = unsafe {
        let child = libc::fork();
        libc::alarm(60);
        child
    };
    NESTED.store(child, Ordering::Relaxed);
}

fn fork_as_the_c_library_does() {
    // SAFETY: these are its calls.
    unsafe {
        prepare();
        parent();
    }
}

/// A thread that forks, as far as the library is concerned, and its number when it has one.
fn forker(number: &'static AtomicI32) -> JoinHandle<()> {
    std::thread::spawn(|| {
        number.store(rustix::thread::gettid().as_raw_pid(), Ordering::Relaxed);
        fork_as_the_c_library_does();
        if NESTED.load(Ordering::Relaxed) == 0 {
            // All locks are free here, too.
            fork_as_the_c_library_does();
            // SAFETY: ends the handler's child.
            unsafe { libc::_exit(0) };
        }
    })
}

/// In a process of its own. A signal comes while a thread waits for the third lock. Afterwards
/// all of them are free.
fn interrupted() -> bool {
    static FIRST: AtomicI32 = AtomicI32::new(0);
    static SECOND: AtomicI32 = AtomicI32::new(0);
    let signal = libc::SIGUSR1;
    // SAFETY: the handler makes calls that handlers may make.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = fork_once_more as *const () as usize;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
    crate::files::FILES.take();
    let first = forker(&FIRST);
    while !waits(&FIRST) {
        std::thread::yield_now();
    }
    // SAFETY: the thread has not been waited for.
    unsafe { libc::pthread_kill(first.as_pthread_t(), signal) };
    while NESTED.load(Ordering::Relaxed) < 0 && !is_kept_from(&FIRST, signal) {
        std::thread::yield_now();
    }
    // SAFETY: this thread has taken it.
    unsafe { crate::files::FILES.give() };
    let ended = first.join().is_ok();
    // Who waits now waits for ever: nobody else is here.
    let second = forker(&SECOND);
    while !second.is_finished() && !waits(&SECOND) {
        std::thread::yield_now();
    }
    let mut status = -1;
    // SAFETY: waits for the child of the handler.
    unsafe { libc::waitpid(NESTED.load(Ordering::Relaxed), &raw mut status, 0) };
    ended && second.is_finished() && status == 0
}

#[test]
fn a_signal_handler_forks_while_its_thread_does() {
    // The child's locks are free, whatever other tests are at.
    crate::registry::watch_forks();
    // SAFETY: the child runs threads of its own and ends; one that hangs is ended by a signal.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::alarm(60);
            libc::_exit(i32::from(!interrupted()))
        };
    }
    let mut status = -1;
    // SAFETY: waits for the child just made.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}
