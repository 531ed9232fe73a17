//! Serves a device on a socket, client after client.

use crate::client::Client;
use crate::reply::Reply;
use crate::session::{Next, Session};
use crate::socket::{MESSAGE_TIMEOUT, SocketError};
use crate::stop::Stop;
use crate::wire::{self, HEADER_BYTES};
use crate::{Counters, Device, MAX_TRANSFER_BYTES};
use farlane_sys::chain;
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

/// Most bytes after the header of a message: a transfer, and what describes it.
const MAX_BODY_BYTES: usize = MAX_TRANSFER_BYTES as usize + size_of::<wire::RegionAccess>();

/// How long to wait where the system has run out of something.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);

/// How long few connections are told about.
const LOG_PERIOD: Duration = Duration::from_secs(20);

/// Serves a device.
#[derive(Debug)]
pub struct Server;

impl Server {
    /// Serves `device` on the listening UNIX stream socket `listener`, on this thread. `name` is
    /// for logs.
    ///
    /// A device has one client at a time; the next one is served when it has gone. Until then it
    /// waits: a VMM that restarts must not be refused because its predecessor's
    /// end has not been noticed yet.
    ///
    /// Returns when the listener fails. Shutting it down (`shutdown(2)`) makes it fail.
    pub fn serve(name: &str, listener: OwnedFd, device: impl Device) -> io::Error {
        Self::serve_until(
            name,
            listener,
            device,
            &Counters::default(),
            &Stop::default(),
        )
    }

    /// As [`serve`](Self::serve), and counts messages in `counters`; until it is stopped, there are
    /// clients.
    pub fn serve_until(
        name: &str,
        listener: OwnedFd,
        mut device: impl Device,
        counters: &Counters,
        stop: &Stop,
    ) -> io::Error {
        let listener = UnixListener::from(listener);
        if let Err(error) = listener.set_nonblocking(false) {
            return error;
        }
        let mut buffers = Buffers::default();
        let mut log = ConnectionLog::default();
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    let told = log.tell(name);
                    if told {
                        log::info!("{name}: a client has connected");
                    }
                    let client = Client::new(stream.into(), counters.clone());
                    let end = match stop.enter(&client) {
                        true => serve_client(&client, &mut device, &mut buffers),
                        false => SocketError::Closed,
                    };
                    stop.leave();
                    match end {
                        _ if !told => log::debug!("{name}: {}", chain(&end)),
                        SocketError::Closed => log::info!("{name}: the client has gone"),
                        error => log::warn!("{name}: the client is dropped: {}", chain(&error)),
                    }
                    buffers.shrink();
                }
                Err(error) if is_passing(&error) => {}
                Err(error) if is_shortage(&error) => {
                    log::warn!("{name}: a client has to wait: {error}");
                    std::thread::sleep(SHORTAGE_PAUSE);
                }
                Err(error) => return error,
            }
        }
    }
}

/// Errors of a connection that was not to be, accept(2).
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), Interrupted | ConnectionAborted | WouldBlock)
}

fn is_shortage(error: &io::Error) -> bool {
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| shortages.contains(&errno))
}

/// Connections that are told about: a client that connects again and again must not fill the log.
#[derive(Debug, Default)]
struct ConnectionLog {
    begin: Option<Instant>,
    told: u32,
    untold: u64,
}

impl ConnectionLog {
    /// Connections told about in a [`LOG_PERIOD`].
    const MOST: u32 = 10;

    /// Whether the next one is told about.
    fn tell(&mut self, name: &str) -> bool {
        if self.begin.is_none_or(|begin| begin.elapsed() > LOG_PERIOD) {
            if self.untold > 0 {
                log::warn!("{name}: {} more clients have connected", self.untold);
            }
            *self = Self {
                begin: Some(Instant::now()),
                ..Self::default()
            };
        }
        self.told = self.told.saturating_add(1);
        if self.told > Self::MOST {
            self.untold += 1;
        }
        self.told <= Self::MOST
    }
}

/// What a connection needs for its messages.
#[derive(Default)]
struct Buffers {
    body: Vec<u8>,
    reply: Reply,
}

impl Buffers {
    /// Gives back what a client with large messages has needed.
    fn shrink(&mut self) {
        *self = Self::default();
    }
}

/// Returns why the connection has ended.
fn serve_client(client: &Client, device: &mut impl Device, buffers: &mut Buffers) -> SocketError {
    // One that says nothing, or no version, must not keep the device from who does.
    let mut deadline = Some(Instant::now() + MESSAGE_TIMEOUT);
    // Ended before the device is told: no thread of it waits for an answer that cannot come.
    let mut session = Session::new(device, client.clone());
    let end = loop {
        match serve_message(client, &mut session, buffers, deadline) {
            Ok(Next::Continue) => deadline = None,
            Ok(Next::End) => break SocketError::NoVersion,
            Err(error) => break error,
        }
    };
    client.end();
    drop(session);
    end
}

fn serve_message(
    client: &Client,
    session: &mut Session<'_, impl Device>,
    buffers: &mut Buffers,
    deadline: Option<Instant>,
) -> Result<Next, SocketError> {
    let Buffers { body, reply } = buffers;
    let message = client.socket().receive(body, MAX_BODY_BYTES, deadline)?;
    let header = message.header;
    if header.flags & wire::FLAGS_TYPE == wire::TYPE_REPLY {
        // Nothing is asked of a client before the version has been agreed.
        if !session.is_agreed() {
            return Ok(Next::End);
        }
        client.answered(&header, body);
        return Ok(Next::Continue);
    }
    let next = session.handle(&header, body, message.fds, message.fds_lost, reply);
    if header.flags & wire::FLAG_NO_REPLY == 0 {
        let fds: Vec<_> = reply.fds.iter().map(|fd| fd.as_fd()).collect();
        let (head, body) = reply.bytes.split_at(HEADER_BYTES);
        client.send(head, body, &fds)?;
    }
    // The device's files are not kept open for longer than needed.
    reply.fds.clear();
    Ok(next)
}
