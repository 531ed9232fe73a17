//! What a panic does to a daemon: it ends it, whichever thread panics.
//!
//! A daemon that has lost a thread looks alive to its VMM and serves nobody; one that has ended is
//! noticed and started again. The `release` profile has `panic = "abort"` for the same reason; this
//! holds in every profile.

/// Has every panic from now on end the process with SIGABRT, after its message.
pub fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}
