//! Both ends of a connection.

use super::address::{Address, AddressError};
use super::message::{MAX_DESCRIPTORS, MAX_FRAME_BYTES};
use super::packet::PacketSocket;
use super::stream::StreamSocket;
use super::tls::{self, TlsError, TlsIdentity};
use farlane_sys::socket::{packet_pair, packet_socket};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags, sockopt};
use rustls::pki_types::CertificateDer;
use rustls::{ClientConnection, ServerConnection};
use serde::{Serialize, de::DeserializeOwned};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long connecting may take, from its first packet to the last message of the handshake,
/// however the other end spreads it.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);

/// Why a connection does not work.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// The other end has hung up, and nobody else for it.
    #[error("The connection is closed")]
    Closed,
    /// This end has hung up, or given the other one up.
    #[error("The connection was closed here")]
    Ended,
    /// The connection was broken off, by the other end or by something in between.
    #[error("The connection was reset")]
    Reset,
    /// The other end takes nothing, or does not finish a handshake.
    #[error("The other end does not respond")]
    Stuck,
    /// A frame that is longer than any message.
    #[error("A frame of {0} bytes")]
    TooLong(usize),
    /// A frame that is no message.
    #[error("A frame that is no message")]
    Malformed(#[from] postcard::Error),
    /// More descriptors than any message has, or fewer than this one needs, or none can be sent.
    #[error("A message with {0} descriptors")]
    Descriptors(usize),
    /// A message that has no place there.
    #[error("A message that has no place there: {0}")]
    Unexpected(&'static str),
    /// TLS failed.
    #[error("TLS: {0}")]
    Tls(String),
    /// TLS cannot be used.
    #[error(transparent)]
    Identity(#[from] TlsError),
    /// The address cannot be used.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Certificates are needed there.
    #[error("{0} needs a certificate, a key and authorities")]
    NoIdentity(Address),
    /// Nobody can be reached.
    #[error("Cannot connect to {address}")]
    Connect {
        /// Address of the lender.
        address: Address,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The system failed.
    #[error("The connection failed")]
    Io(#[from] std::io::Error),
}

#[derive(Debug)]
enum Inner {
    Packet(PacketSocket),
    Stream(StreamSocket),
}

/// The sending half; clones are the same.
#[derive(Clone, Debug)]
pub struct Sender(Arc<Inner>);

/// The receiving half.
#[derive(Debug)]
pub struct Receiver {
    inner: Arc<Inner>,
    buffer: Vec<u8>,
}

/// A message and the descriptors that came with it.
#[derive(Debug)]
pub struct Received<M> {
    /// The message.
    pub message: M,
    /// Its descriptors, in order.
    pub descriptors: Vec<OwnedFd>,
}

impl ConnectionError {
    /// Whether the other end has said something that makes no sense, and has not ended.
    pub(crate) fn is_of_this_end(&self) -> bool {
        matches!(
            self,
            Self::Malformed(_) | Self::TooLong(_) | Self::Descriptors(_) | Self::Unexpected(_)
        )
    }
}

/// What the other end of a connection has proved of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// It is a process of this host that ran as this user.
    User(u32),
    /// It has the key of a certificate that one of our authorities has signed.
    Certificate(CertificateDer<'static>),
    /// Nothing: it can reach a port of this host.
    Unproved,
}

impl Peer {
    /// Whether it is of this host, and root's or this process's own user's, who could do everything
    /// that this process does.
    #[must_use]
    pub fn is_own(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        matches!(self, Self::User(user) if *user == 0 || *user == own)
    }

    /// Whether it has proved that it may be called `name`.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        match self {
            Self::User(_) => self.is_own(),
            Self::Certificate(certificate) => tls::is_valid_for(certificate, name),
            Self::Unproved => false,
        }
    }
}

fn halves(inner: Inner) -> (Sender, Receiver) {
    let inner = Arc::new(inner);
    let receiver = Receiver {
        inner: Arc::clone(&inner),
        buffer: Vec::new(),
    };
    (Sender(inner), receiver)
}

fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, ConnectionError> {
    let frame = postcard::to_stdvec(message)?;
    match frame.len() > MAX_FRAME_BYTES {
        true => Err(ConnectionError::TooLong(frame.len())),
        false => Ok(frame),
    }
}

impl Sender {
    /// Sends a message. Waits a bounded time for a peer on this host, never for one behind TCP.
    ///
    /// # Errors
    /// The connection has ended or is stuck, the message is too long, or descriptors cannot be
    /// sent.
    pub fn send<M: Serialize>(
        &self,
        message: &M,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), ConnectionError> {
        let frame = encode(message)?;
        if descriptors.len() > MAX_DESCRIPTORS {
            return Err(ConnectionError::Descriptors(descriptors.len()));
        }
        match &*self.0 {
            Inner::Packet(socket) => socket.send(&frame, descriptors),
            Inner::Stream(socket) if descriptors.is_empty() => socket.send(&frame, false),
            Inner::Stream(_) => Err(ConnectionError::Descriptors(descriptors.len())),
        }
    }

    /// Sends a message without descriptors before those that wait to be sent: renewals are not to
    /// stand behind data.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub(crate) fn send_first<M: Serialize>(&self, message: &M) -> Result<(), ConnectionError> {
        let frame = encode(message)?;
        match &*self.0 {
            Inner::Packet(socket) => socket.send(&frame, &[]),
            Inner::Stream(socket) => socket.send(&frame, true),
        }
    }

    /// Sends bytes that need not be a message: for tests of the other end.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_frame(&self, frame: &[u8]) -> Result<(), ConnectionError> {
        if frame.len() > MAX_FRAME_BYTES {
            return Err(ConnectionError::TooLong(frame.len()));
        }
        match &*self.0 {
            Inner::Packet(socket) => socket.send(frame, &[]),
            Inner::Stream(socket) => socket.send(frame, false),
        }
    }

    /// Sends a message without descriptors, and waits for nobody. False where the other end has not
    /// taken what was sent before: as much as `backlog` bytes behind TCP, where more could be sent
    /// all the same.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub(crate) fn try_send<M: Serialize>(
        &self,
        message: &M,
        backlog: usize,
    ) -> Result<bool, ConnectionError> {
        let frame = postcard::to_stdvec(message)?;
        match &*self.0 {
            Inner::Packet(socket) => socket.try_send(&frame),
            Inner::Stream(socket) if socket.backlog() >= backlog => Ok(false),
            Inner::Stream(socket) => socket.send(&frame, false).map(|()| true),
        }
    }

    /// Sends a message without descriptors, also to an end that has nothing to say any more, and
    /// waits for nobody. False where the other end has not taken what was sent before.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub(crate) fn send_to_the_end<M: Serialize>(
        &self,
        message: &M,
    ) -> Result<bool, ConnectionError> {
        let frame = encode(message)?;
        match &*self.0 {
            Inner::Packet(socket) => socket.try_send(&frame),
            Inner::Stream(socket) => socket.send_to_the_end(&frame),
        }
    }

    /// Has the receiver of this end, or the next one, return without a message.
    pub(crate) fn nudge(&self) {
        match &*self.0 {
            Inner::Packet(socket) => socket.nudge(),
            Inner::Stream(socket) => socket.nudge(),
        }
    }

    /// Whether messages can have descriptors.
    #[must_use]
    pub fn carries_descriptors(&self) -> bool {
        matches!(*self.0, Inner::Packet(_))
    }

    /// Whether this end hears of it whenever the other one has ended, by itself or by force: the
    /// host's kernel says so.
    pub(crate) fn hears_of_the_end(&self) -> bool {
        matches!(*self.0, Inner::Packet(_))
    }

    /// What keeps the other end from hearing that this process has ended, while it is open. Closing
    /// the connection at this end is heard all the same.
    pub(crate) fn keep_open(&self) -> std::io::Result<OwnedFd> {
        match &*self.0 {
            Inner::Packet(socket) => socket.keep_open(),
            Inner::Stream(socket) => socket.keep_open(),
        }
    }

    /// What the other end has proved of itself.
    #[must_use]
    pub fn peer(&self) -> Peer {
        match &*self.0 {
            Inner::Packet(socket) => Peer::User(socket.peer()),
            Inner::Stream(socket) => match socket.peer_certificate() {
                Some(certificate) => Peer::Certificate(certificate),
                None => Peer::Unproved,
            },
        }
    }

    /// Ends receiving at this end: its receiver fails from now on. The other end notices nothing.
    pub(crate) fn stop(&self) {
        match &*self.0 {
            Inner::Packet(socket) => socket.stop(),
            Inner::Stream(socket) => socket.stop(),
        }
    }

    /// Ends sending at this end. The other end notices; what it still says is received, until it
    /// hangs up too.
    pub(crate) fn finish(&self) {
        match &*self.0 {
            Inner::Packet(socket) => socket.finish(),
            Inner::Stream(socket) => socket.finish(),
        }
    }

    /// Ends sending at this end, which is not received at any more, and waits until the other end
    /// has taken what was sent and hung up too, or for so long.
    pub(crate) fn linger(&self, time: Duration) {
        match &*self.0 {
            // Its packets are in the other end's socket, and stay there.
            Inner::Packet(_) => {}
            Inner::Stream(socket) => socket.linger(time),
        }
    }

    /// Ends the connection: both halves, at both ends, fail from now on.
    pub fn close(&self) {
        match &*self.0 {
            Inner::Packet(socket) => socket.close(),
            Inner::Stream(socket) => socket.close(),
        }
    }
}

impl Receiver {
    /// The next message, or nothing when the time is over, or this end has been told to look at
    /// something else.
    ///
    /// # Errors
    /// The connection has ended, or what came is no message; it is then to be closed.
    pub fn receive<M: DeserializeOwned>(
        &mut self,
        until: Option<Instant>,
    ) -> Result<Option<Received<M>>, ConnectionError> {
        let descriptors = match &*self.inner {
            Inner::Packet(socket) => match socket.receive(&mut self.buffer, until)? {
                Some(descriptors) => descriptors,
                None => return Ok(None),
            },
            Inner::Stream(socket) => {
                if !socket.receive(&mut self.buffer, until)? {
                    return Ok(None);
                }
                Vec::new()
            }
        };
        let (message, rest) = postcard::take_from_bytes(&self.buffer)?;
        if !rest.is_empty() {
            return Err(ConnectionError::Malformed(
                postcard::Error::DeserializeBadEncoding,
            ));
        }
        Ok(Some(Received {
            message,
            descriptors,
        }))
    }
}

impl Receiver {
    /// Waits until the connection ends, whatever else comes: how.
    pub(crate) fn wait_for_end(&mut self) -> ConnectionError {
        if let Inner::Stream(socket) = &*self.inner {
            socket.ignore_frames();
        }
        loop {
            let got = match &*self.inner {
                Inner::Packet(socket) => socket.receive(&mut self.buffer, None).map(drop),
                Inner::Stream(socket) => socket.receive(&mut self.buffer, None).map(drop),
            };
            match got {
                Ok(()) | Err(ConnectionError::TooLong(_) | ConnectionError::Descriptors(_)) => {}
                Err(e) => return e,
            }
        }
    }
}

/// What a borrower needs to connect again and again, without opening a file or asking for a name.
/// Clones connect to one lender, whichever [that is](Self::redirect) then.
#[derive(Clone, Debug)]
pub struct Connector {
    target: Arc<RwLock<Target>>,
    identity: Option<TlsIdentity>,
}

/// Where a lender is.
#[derive(Clone, Debug)]
struct Target {
    address: Address,
    places: Vec<SocketAddr>,
}

impl Connector {
    /// Prepares connections to the lender at `address`; `identity` is for TLS.
    ///
    /// # Errors
    /// Its host cannot be found, or there is no identity where one is needed.
    pub fn new(address: Address, identity: Option<TlsIdentity>) -> Result<Self, ConnectionError> {
        let address = needs_no_other(address, identity.as_ref())?;
        let target = Target {
            places: address.resolve()?,
            address,
        };
        Ok(Self {
            target: Arc::new(RwLock::new(target)),
            identity,
        })
    }

    /// Connects to another lender from now on, whose [places](Address::resolve) are known.
    ///
    /// # Errors
    /// There is no identity, and one is needed there.
    pub fn redirect(
        &self,
        address: Address,
        places: Vec<SocketAddr>,
    ) -> Result<(), ConnectionError> {
        let address = needs_no_other(address, self.identity.as_ref())?;
        let mut target = self.target.write().unwrap_or_else(PoisonError::into_inner);
        *target = Target { address, places };
        Ok(())
    }

    fn target(&self) -> Target {
        let target = self.target.read();
        target.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where the lender is.
    #[must_use]
    pub fn address(&self) -> Address {
        self.target().address
    }

    /// Connects, within a bounded time.
    ///
    /// # Errors
    /// See [`ConnectionError`].
    pub fn connect(&self) -> Result<(Sender, Receiver), ConnectionError> {
        self.connect_until(Instant::now() + HANDSHAKE)
    }

    /// The same, until then.
    pub(crate) fn connect_until(
        &self,
        until: Instant,
    ) -> Result<(Sender, Receiver), ConnectionError> {
        let Target { address, places } = self.target();
        connect(&address, &places, self.identity.as_ref(), until)
    }
}

/// An address for which this identity is enough.
fn needs_no_other(
    address: Address,
    identity: Option<&TlsIdentity>,
) -> Result<Address, ConnectionError> {
    match matches!(address, Address::Tls { .. }) && identity.is_none() {
        true => Err(ConnectionError::NoIdentity(address)),
        false => Ok(address),
    }
}

/// What is left of the time until then; an error of the system's kind where nothing is.
pub(super) fn time_left(until: Instant) -> std::io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(std::io::ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

fn connect(
    address: &Address,
    places: &[SocketAddr],
    identity: Option<&TlsIdentity>,
    until: Instant,
) -> Result<(Sender, Receiver), ConnectionError> {
    let failed = |source| ConnectionError::Connect {
        address: address.clone(),
        source,
    };
    if let Address::Unix(path) = address {
        let name = SocketAddrUnix::new(path.as_path()).map_err(|e| failed(e.into()))?;
        let socket = packet_socket().map_err(|e| failed(e.into()))?;
        // It bounds connecting too, to one that listens and accepts nobody.
        let left = time_left(until).map_err(failed)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left))
            .map_err(|e| failed(e.into()))?;
        rustix::net::connect(&socket, &name).map_err(|e| match e {
            Errno::AGAIN => failed(std::io::ErrorKind::TimedOut.into()),
            e => failed(e.into()),
        })?;
        return Ok(halves(Inner::Packet(PacketSocket::new(socket)?)));
    }
    let mut last = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
    let mut connected = None;
    let numbered: Vec<_> = (1_u32..).zip(places.iter().rev()).collect();
    for (to_try, place) in numbered.into_iter().rev() {
        // Each has its share of what is left.
        let share = |left| left / to_try;
        let tried = time_left(until)
            .map(share)
            .and_then(|left| TcpStream::connect_timeout(place, left));
        match tried {
            Ok(socket) => {
                connected = Some(socket);
                break;
            }
            Err(e) => last = e,
        }
    }
    let socket = connected.ok_or_else(|| failed(last))?;
    let tls = match address {
        Address::Tls { host, .. } => {
            let identity = identity.ok_or_else(|| ConnectionError::NoIdentity(address.clone()))?;
            let name = tls::server_name(host)?;
            let client = ClientConnection::new(Arc::clone(&identity.client), name)
                .map_err(|e| ConnectionError::Tls(e.to_string()))?;
            Some(client.into())
        }
        _ => None,
    };
    Ok(halves(Inner::Stream(StreamSocket::new(
        socket, tls, until,
    )?)))
}

/// Two ends of a connection within this process.
///
/// # Errors
/// Out of descriptors.
pub fn pair() -> Result<[(Sender, Receiver); 2], ConnectionError> {
    let (one, other) = packet_pair().map_err(|e| ConnectionError::Io(e.into()))?;
    let end = |socket| Ok::<_, ConnectionError>(halves(Inner::Packet(PacketSocket::new(socket)?)));
    Ok([end(one)?, end(other)?])
}

/// What a lender accepts connections with. Each accepted connection is finished (the handshake,
/// above all) by a thread of its own, with [`Incoming::finish`].
#[derive(Debug)]
pub enum Acceptor {
    /// A listening sequential-packet UNIX socket.
    Unix(OwnedFd),
    /// A listening TCP socket; with an identity there is TLS.
    Tcp(TcpListener, Option<TlsIdentity>),
}

/// A connection that is to be finished.
#[derive(Debug)]
pub struct Incoming {
    pending: Pending,
    until: Instant,
}

#[derive(Debug)]
enum Pending {
    Unix(OwnedFd),
    Tcp(TcpStream, Option<TlsIdentity>),
}

impl Acceptor {
    /// The next connection.
    ///
    /// # Errors
    /// Out of descriptors, above all.
    pub fn accept(&self) -> std::io::Result<Incoming> {
        let pending = match self {
            Self::Unix(socket) => {
                Pending::Unix(rustix::net::accept_with(socket, SocketFlags::CLOEXEC)?)
            }
            Self::Tcp(listener, identity) => Pending::Tcp(listener.accept()?.0, identity.clone()),
        };
        Ok(Incoming {
            pending,
            until: Instant::now() + HANDSHAKE,
        })
    }
}

impl Incoming {
    /// Until when the peer may take for all that comes before its first request.
    pub(crate) fn until(&self) -> Instant {
        self.until
    }

    /// As which user of this host the peer ran when it connected, over a UNIX socket.
    pub(crate) fn user(&self) -> Option<u32> {
        match &self.pending {
            Pending::Unix(socket) => farlane_zero_copy::peer_user(socket.as_fd()).ok(),
            Pending::Tcp(..) => None,
        }
    }

    /// Does the handshake.
    ///
    /// # Errors
    /// The peer does not finish it, or is not to be believed.
    pub fn finish(self) -> Result<(Sender, Receiver), ConnectionError> {
        let until = self.until;
        match self.pending {
            Pending::Unix(socket) => Ok(halves(Inner::Packet(PacketSocket::new(socket)?))),
            Pending::Tcp(socket, identity) => {
                let tls = match identity {
                    Some(identity) => Some(
                        ServerConnection::new(identity.server)
                            .map_err(|e| ConnectionError::Tls(e.to_string()))?
                            .into(),
                    ),
                    None => None,
                };
                Ok(halves(Inner::Stream(StreamSocket::new(
                    socket, tls, until,
                )?)))
            }
        }
    }
}
