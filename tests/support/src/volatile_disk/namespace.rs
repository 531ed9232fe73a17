//! A mount namespace of the calling thread.

use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;
use std::io;

/// Gives the calling thread a mount namespace of its own, which its later threads and processes
/// share. Mounts in it are seen by nobody else and go with the last of them.
pub fn enter() -> io::Result<()> {
    // SAFETY: no file descriptor table is unshared (see `unshare_unsafe`), and what this thread
    // shares with others besides mounts is its root, working directory and umask, which nobody here
    // changes.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    let alone = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", alone)?;
    Ok(())
}
