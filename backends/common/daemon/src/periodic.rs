//! Work that a daemon does again and again beside everything else.

use std::io;
use std::time::Duration;

/// Does `work` after every `pause`, from a thread of its own, until the process ends.
///
/// # Errors
/// There are no more threads.
pub fn every(
    pause: Duration,
    name: &str,
    mut work: impl FnMut() + Send + 'static,
) -> io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(move || {
        loop {
            std::thread::sleep(pause);
            work();
        }
    })?;
    Ok(())
}
