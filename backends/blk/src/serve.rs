//! One VMM after the other on a disk's socket.

use crate::channel::Channel;
use crate::disk::Disk;
use crate::session::Session;
use farlane_daemon::log_limit::LogLimit;
use farlane_daemon::{log_limited, warn_limited};
use log::Level;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vhost::vhost_user::{BackendReqHandler, Error};

/// Pause after a connection could not be taken, so that the next failure does not come at once.
const PAUSE: Duration = Duration::from_millis(200);
/// Pause between two looks at the sizes of disks.
const LOOK: Duration = Duration::from_secs(1);

/// Serves VMMs on `socket`, one at a time, for ever. A second one waits until the first has gone.
///
/// Whatever a VM or its VMM does ends its own connection at most.
pub fn serve(disk: &Arc<Disk>, socket: OwnedFd) -> ! {
    let listener = UnixListener::from(socket);
    let limit = LogLimit::new();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(e) = serve_one(disk, stream, &limit) {
                    log::error!("Disk {}: {e}", disk.serial());
                    std::thread::sleep(PAUSE);
                }
            }
            Err(e) => {
                log::error!("Disk {}: cannot take a connection: {e}", disk.serial());
                std::thread::sleep(PAUSE);
            }
        }
    }
}

fn serve_one(disk: &Arc<Disk>, stream: UnixStream, limit: &LogLimit) -> io::Result<()> {
    let serial = disk.serial();
    let ahead = stream.try_clone()?;
    let channel = Arc::new(Channel::default());
    let session = Arc::new(Mutex::new(Session::new(
        Arc::clone(disk),
        Arc::clone(&channel),
    )));
    let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&session));
    log_limited!(Level::Info, limit, "Disk {serial}: a VM has connected");
    let ending = loop {
        if let Err(e) = channel.look_ahead(&ahead) {
            break Error::SocketBroken(e);
        }
        match handler.handle_request() {
            Ok(()) => (),
            Err(e) => break e,
        }
    };
    // Ends what is under way; then the socket is closed.
    session
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .stop();
    match ending {
        // Which of these it is depends on where in a message the VMM went away.
        Error::Disconnected | Error::PartialMessage | Error::SocketBroken(_) => {
            log_limited!(Level::Info, limit, "Disk {serial}: the VM has gone");
        }
        e => warn_limited!(limit, "Disk {serial}: the VM was disconnected: {e}"),
    }
    Ok(())
}

/// Looks at the sizes of disks now and then, from a thread of its own.
///
/// # Errors
/// When the thread cannot be started.
pub fn watch_sizes(disks: Vec<Arc<Disk>>) -> io::Result<()> {
    std::thread::Builder::new()
        .name("sizes".to_owned())
        .spawn(move || {
            loop {
                std::thread::sleep(LOOK);
                disks.iter().for_each(|disk| disk.look_at_size());
            }
        })
        .map(drop)
}
