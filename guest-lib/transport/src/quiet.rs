//! Signals, which belong to the program that a library is in.

use std::thread::{Builder, JoinHandle};

/// Starts a thread that blocks every signal: signals belong to the program's own threads.
///
/// # Errors
/// When the system has no thread to give.
pub fn spawn_quiet(
    name: &str,
    stack_bytes: usize,
    body: impl FnOnce() + Send + 'static,
) -> std::io::Result<JoinHandle<()>> {
    with_signals_blocked(|| {
        Builder::new()
            .name(name.into())
            .stack_size(stack_bytes)
            .spawn(body)
    })
}

/// Runs `body` with every signal blocked: a thread made by it starts that way, and no handler
/// interrupts it.
pub fn with_signals_blocked<T>(body: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both point to writable sets; `all` is initialised by the first call.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
    }
    let result = body();
    // SAFETY: `before` was initialised by pthread_sigmask, which cannot fail with these arguments.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    result
}
