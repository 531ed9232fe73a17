//! One VMM after the other on a device's socket.

use crate::channel::Channel;
use crate::session::{Device, Session};
use crate::socket::Socket;
use crate::upstream;
use farlane_daemon::{log_limited, warn_limited};
use farlane_sys::sync::{held, lock};
use log::Level;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use vhost::vhost_user::{BackendReqHandler, Error};

/// Pause after a connection could not be taken, so that the next failure does not come at once.
const PAUSE: Duration = Duration::from_millis(200);

/// How often it is looked whether a VMM that is to leave can.
const LOOK: Duration = Duration::from_millis(50);

/// Ends the service of sockets that are served [until](serve_until) then.
#[derive(Clone, Debug, Default)]
pub struct Closing(Arc<Connections>);

#[derive(Debug, Default)]
struct Connections {
    state: Mutex<Connected>,
    left: Condvar,
}

/// The VMMs that are served.
#[derive(Debug, Default)]
struct Connected {
    closed: bool,
    next: u64,
    streams: HashMap<u64, UnixStream>,
}

/// A VMM's place among those that are served.
struct Registration<'a> {
    connections: &'a Connections,
    number: u64,
    socket: &'a Socket,
}

impl Connections {
    fn state(&self) -> MutexGuard<'_, Connected> {
        lock(&self.state)
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        let stream = self.connections.state().streams.remove(&self.number);
        if let Some(stream) = stream {
            let _ = stream.shutdown(Shutdown::Both);
            // With what it has sent and nobody has received.
            self.socket.discard(stream.into());
        }
        self.connections.left.notify_all();
    }
}

/// Whether an answer can be written.
fn has_room(stream: &UnixStream) -> bool {
    let mut room = [PollFd::new(stream, PollFlags::OUT)];
    poll(&mut room, Some(&Timespec::default())).is_ok_and(|ready| ready == 1)
}

impl Closing {
    /// Serves nobody any more. VMMs that are connected are not heard again. Returns when all
    /// requests that were taken from their queues are answered, and their connections closed.
    pub fn close(&self) {
        let mut state = self.0.state();
        state.closed = true;
        for stream in state.streams.values() {
            // The VMM notices when its connection is closed, which is after the last request is
            // answered.
            let _ = stream.shutdown(Shutdown::Read);
        }
        while !state.streams.is_empty() {
            let waited = self.0.left.wait_timeout(state, LOOK);
            state = held(waited).0;
            for stream in state.streams.values().filter(|stream| !has_room(stream)) {
                // It does not read, and whoever answers it would wait for ever.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    fn is_closed(&self) -> bool {
        self.0.state().closed
    }

    /// A VMM is going to be served; none if nobody is any more.
    fn enter<'a>(
        &'a self,
        stream: &UnixStream,
        socket: &'a Socket,
    ) -> io::Result<Option<Registration<'a>>> {
        let stream = stream.try_clone()?;
        let mut state = self.0.state();
        if state.closed {
            return Ok(None);
        }
        let number = state.next;
        state.next += 1;
        state.streams.insert(number, stream);
        Ok(Some(Registration {
            connections: &self.0,
            number,
            socket,
        }))
    }
}

/// As [`serve_until`], for ever.
pub fn serve<D: Device>(
    name: &str,
    socket: OwnedFd,
    make: impl Fn(&Arc<Channel>) -> io::Result<D>,
) -> ! {
    let listener = UnixListener::from(socket);
    let closing = Closing::default();
    loop {
        accept_all(name, &listener, &closing, &make);
    }
}

/// Serves VMMs on `socket`, one at a time and each with a device of its own that `make` makes,
/// until `closing`. A second one waits until the first has gone.
///
/// Whatever a VM or its VMM does ends its own connection at most.
pub fn serve_until<D: Device>(
    name: &str,
    socket: OwnedFd,
    closing: &Closing,
    make: impl Fn(&Arc<Channel>) -> io::Result<D>,
) {
    accept_all(name, &UnixListener::from(socket), closing, &make);
}

fn accept_all<D: Device>(
    name: &str,
    listener: &UnixListener,
    closing: &Closing,
    make: &impl Fn(&Arc<Channel>) -> io::Result<D>,
) {
    let socket = Arc::<Socket>::default();
    while !closing.is_closed() {
        if socket.is_full() {
            std::thread::sleep(PAUSE);
            continue;
        }
        let accepted = listener.accept();
        let served =
            accepted.and_then(|(stream, _)| serve_one(name, stream, closing, make, &socket));
        if let Err(e) = served {
            log_limited!(Level::Error, socket.limit, "{name}: cannot serve a VM: {e}");
            std::thread::sleep(PAUSE);
        }
    }
}

/// A VMM that is connected. When it is dropped, what is under way is ended; then the socket is
/// closed.
pub struct Connection<D: Device> {
    handler: BackendReqHandler<Mutex<Session<D>>>,
    session: Arc<Mutex<Session<D>>>,
    channel: Arc<Channel>,
    stream: UnixStream,
}

impl<D: Device> std::fmt::Debug for Connection<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("session", &self.session)
            .finish_non_exhaustive()
    }
}

impl<D: Device> Connection<D> {
    /// Takes a connection to `socket`, with a device that `make` makes.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(
        stream: UnixStream,
        socket: &Arc<Socket>,
        make: impl FnOnce(&Arc<Channel>) -> io::Result<D>,
    ) -> io::Result<Self> {
        let channel = Channel::new(Arc::clone(socket));
        let device = make(&channel)?;
        let session = Arc::new(Mutex::new(Session::new(device, Arc::clone(&channel))));
        Ok(Self {
            handler: upstream::handler(&stream, &session)?,
            session,
            channel,
            stream,
        })
    }

    /// Waits for the VMM's next message and answers it.
    ///
    /// # Errors
    /// It has gone, or has to go.
    pub fn step(&mut self) -> Result<(), Error> {
        if self.channel.socket().is_full() {
            return Err(Error::InvalidOperation("its descriptors cannot be closed"));
        }
        upstream::look_ahead(&self.stream, &self.channel).map_err(Error::SocketBroken)?;
        self.handler.handle_request()
    }
}

impl<D: Device> Drop for Connection<D> {
    fn drop(&mut self) {
        lock(&self.session).stop();
    }
}

fn serve_one<D: Device>(
    name: &str,
    stream: UnixStream,
    closing: &Closing,
    make: &impl Fn(&Arc<Channel>) -> io::Result<D>,
    socket: &Arc<Socket>,
) -> io::Result<()> {
    // Dropped after the connection.
    let Some(_registration) = closing.enter(&stream, socket)? else {
        return Ok(());
    };
    let mut connection = Connection::new(stream, socket, make)?;
    let limit = &socket.limit;
    log_limited!(Level::Info, limit, "{name}: a VM has connected");
    let ending = loop {
        if let Err(e) = connection.step() {
            break e;
        }
    };
    drop(connection);
    match ending {
        // Which of these it is depends on where in a message the VMM went away.
        Error::Disconnected | Error::PartialMessage | Error::SocketBroken(_) => {
            log_limited!(Level::Info, limit, "{name}: the VM has gone");
        }
        e => warn_limited!(limit, "{name}: the VM was disconnected: {e}"),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
