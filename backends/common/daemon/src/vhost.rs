//! One VM after the other on a vhost-user socket.

use crate::log_limit::LogLimit;
use crate::vring::{QueueMemory, VmMemory, Vring, collect};
use crate::{log_limited, warn_limited};
use farlane_sys::sync::lock;
use log::Level;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vhost::vhost_user::{Error as ProtocolError, Listener};
use vhost_user_backend::{Error as DaemonError, VhostUserBackend, VhostUserDaemon};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::event::{EventConsumer, EventNotifier};

/// Pause after a connection could not be served, so that the next failure does not come at once.
const PAUSE: Duration = Duration::from_millis(200);

/// A device for one connection of one VM.
pub trait VmDevice: VhostUserBackend<Bitmap = (), Vring = Vring> + 'static {
    /// Hands over the device's queues, in order, before the VM is there.
    fn take_vrings(self: &Arc<Self>, vrings: Vec<Vring>);

    /// The VM is gone, or has broken the protocol. Its memory goes when this returns.
    fn gone(&self);
}

/// Gives the worker threads of a device's daemon the events that end them, for
/// [`VhostUserBackend::exit_event`].
///
/// The daemon takes the descriptor of each such event out of its owner and never closes it, which
/// would cost one for every VM that comes and goes. So this keeps it, and must outlive the daemon:
/// it is a field of the device.
#[derive(Debug)]
pub struct ExitEvents {
    /// What the daemon never closes.
    _kept: Vec<OwnedFd>,
    /// What it will ask for.
    prepared: Mutex<Vec<(EventConsumer, EventNotifier)>>,
}

impl ExitEvents {
    /// Events for `workers` worker threads.
    ///
    /// # Errors
    /// Too many open files.
    pub fn new(workers: usize) -> io::Result<Self> {
        let mut kept = Vec::new();
        let mut prepared = Vec::new();
        for _ in 0..workers {
            let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let notifier = event.try_clone()?.into_raw_fd();
            // SAFETY: VringEpollHandler::new, the only taker, turns the consumer into its bare
            // number at once, and one that is never taken is forgotten below; so `kept` stays the
            // descriptor's only owner. The notifier owns its own one.
            prepared.push(unsafe {
                (
                    EventConsumer::from_raw_fd(event.as_raw_fd()),
                    EventNotifier::from_raw_fd(notifier),
                )
            });
            kept.push(event);
        }
        Ok(Self {
            _kept: kept,
            prepared: Mutex::new(prepared),
        })
    }

    /// The event of one more worker.
    pub fn take(&self) -> Option<(EventConsumer, EventNotifier)> {
        lock(&self.prepared).pop()
    }
}

impl Drop for ExitEvents {
    fn drop(&mut self) {
        while let Some((consumer, _notifier)) = self.take() {
            let _ = consumer.into_raw_fd();
        }
    }
}

/// Serves VMs on `socket`, one at a time and each with a device of its own made by `make`, for
/// ever. A second VM waits until the first one has gone. What they can have logged goes by one
/// limit, however often they come.
///
/// Whatever a VM or its VMM does ends its own connection at most.
pub fn serve<D: VmDevice>(
    name: &str,
    socket: OwnedFd,
    make: impl Fn(Arc<QueueMemory>, Arc<LogLimit>) -> io::Result<Arc<D>>,
) -> ! {
    let mut listener = Listener::from(UnixListener::from(socket));
    let limit = Arc::default();
    loop {
        if let Err(e) = serve_one(name, &mut listener, &make, &limit) {
            log_limited!(Level::Error, limit, "{name}: {e}");
            std::thread::sleep(PAUSE);
        }
    }
}

fn serve_one<D: VmDevice>(
    name: &str,
    listener: &mut Listener,
    make: &impl Fn(Arc<QueueMemory>, Arc<LogLimit>) -> io::Result<Arc<D>>,
    limit: &Arc<LogLimit>,
) -> Result<(), DaemonError> {
    let memory = Arc::new(QueueMemory::default());
    let device = make(Arc::clone(&memory), Arc::clone(limit)).map_err(DaemonError::StartDaemon)?;
    let (daemon, vrings) = collect(&memory, limit, || {
        // What it maps it touches through the queues only.
        let mapped = VmMemory::new(GuestMemoryMmap::new());
        VhostUserDaemon::new(name.to_owned(), Arc::clone(&device), mapped)
    });
    let mut daemon = daemon?;
    device.take_vrings(vrings);

    daemon.start(listener)?;
    log_limited!(Level::Info, limit, "{name}: a VM has connected");
    let ending = daemon.wait();
    device.gone();
    // Ends the worker threads.
    drop(daemon);
    match ending {
        // Which of these it is depends on where in a message the VMM went away.
        Ok(())
        | Err(DaemonError::HandleRequest(
            ProtocolError::Disconnected
            | ProtocolError::PartialMessage
            | ProtocolError::SocketBroken(_),
        )) => log_limited!(Level::Info, limit, "{name}: the VM has gone"),
        Err(e) => warn_limited!(limit, "{name}: the VM was disconnected: {e}"),
    }
    Ok(())
}
