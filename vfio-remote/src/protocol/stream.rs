//! Frames over TCP, each preceded by its length, in TLS unless both ends are on one host.
//!
//! Nobody who sends ever waits: what the socket does not take is kept, up to a limit, and sent by
//! the thread that receives. Frames are encrypted when the socket takes them, so that one that is
//! urgent passes those that wait.

use super::connection::{ConnectionError, time_left};
use super::message::MAX_FRAME_BYTES;
use farlane_abi::width::to_usize;
use farlane_sys::eventfd;
use farlane_sys::socket;
use farlane_sys::sync::lock;
use rustix::event::{PollFd, PollFlags};
use rustls::Connection;
use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Bytes kept for a peer that does not take them.
const MAX_PENDING_BYTES: usize = 4 << 20;
/// Besides, of frames that are urgent: a peer that takes none must not have them pile up either.
const MAX_URGENT_BYTES: usize = 64 << 10;
/// Bytes that the system keeps: what is urgent does not pass these. Enough for a gigabit of a round
/// trip of two milliseconds.
const SOCKET_BYTES: usize = 256 << 10;
const LENGTH_BYTES: usize = 4;
const CHUNK_BYTES: usize = 16 << 10;

#[derive(Debug)]
struct State {
    tls: Option<Box<Connection>>,
    /// Frames that wait, and those that go before them.
    waiting: VecDeque<Vec<u8>>,
    urgent: VecDeque<Vec<u8>>,
    /// Bytes of both.
    waiting_bytes: usize,
    /// For the socket, encrypted: what it has not taken yet of the frames before.
    wire: VecDeque<u8>,
    /// From the socket, decrypted.
    arrived: Vec<u8>,
    /// Nothing that arrives is of use any more, but the end.
    is_over: bool,
    /// The peer has hung up.
    ended: bool,
    /// Nothing can be sent any more, which says nothing of what the peer has said, or will.
    cut: bool,
}

impl State {
    /// Encrypts the frame that goes next. False where there is none.
    fn encode_next(&mut self) -> Result<bool, ConnectionError> {
        let next = self.urgent.pop_front();
        let Some(frame) = next.or_else(|| self.waiting.pop_front()) else {
            return Ok(false);
        };
        self.waiting_bytes = self.waiting_bytes.saturating_sub(frame.len());
        let Some(tls) = &mut self.tls else {
            self.wire.extend(frame);
            return Ok(true);
        };
        let mut rest = &frame[..];
        while !rest.is_empty() {
            let taken = tls.writer().write(rest)?;
            rest = &rest[taken..];
            while tls.wants_write() {
                tls.write_tls(&mut self.wire)?;
            }
        }
        Ok(true)
    }
}

/// A socket whose handshake ends until then, in however many pieces the peer sends its part.
struct Handshaking<'a> {
    socket: &'a TcpStream,
    until: Instant,
}

impl io::Read for Handshaking<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(Some(time_left(self.until)?))?;
        self.socket.read(buffer)
    }
}

impl io::Write for Handshaking<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket
            .set_write_timeout(Some(time_left(self.until)?))?;
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A TCP connection.
#[derive(Debug)]
pub(crate) struct StreamSocket {
    socket: TcpStream,
    state: Mutex<State>,
    /// Wakes the receiver, who sends what is pending.
    wake: OwnedFd,
    /// The receiver is to return.
    nudged: AtomicBool,
    /// This end has hung up.
    ended: AtomicBool,
}

impl StreamSocket {
    /// Takes a connection, after the handshake where there is TLS, which ends until then.
    pub fn new(
        socket: TcpStream,
        mut tls: Option<Connection>,
        until: Instant,
    ) -> Result<Self, ConnectionError> {
        let mut arrived = Vec::new();
        socket.set_nodelay(true)?;
        rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BYTES)
            .map_err(io::Error::from)?;
        if let Some(tls) = &mut tls {
            let mut one = Handshaking {
                socket: &socket,
                until,
            };
            while tls.is_handshaking() {
                tls.complete_io(&mut one).map_err(handshake_error)?;
            }
            // What the last messages of the handshake leave to be sent.
            while tls.wants_write() {
                tls.write_tls(&mut one).map_err(handshake_error)?;
            }
            read_plain(tls, &mut arrived)?;
        }
        socket.set_nonblocking(true)?;
        let wake = eventfd::new().map_err(|e| ConnectionError::Io(e.into()))?;
        Ok(Self {
            socket,
            state: Mutex::new(State {
                tls: tls.map(Box::new),
                waiting: VecDeque::new(),
                urgent: VecDeque::new(),
                waiting_bytes: 0,
                wire: VecDeque::new(),
                arrived,
                is_over: false,
                ended: false,
                cut: false,
            }),
            wake,
            nudged: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The certificate that the peer has shown.
    pub fn peer_certificate(&self) -> Option<rustls::pki_types::CertificateDer<'static>> {
        let state = self.state();
        let certificates = state.tls.as_ref()?.peer_certificates()?;
        Some(certificates.first()?.clone().into_owned())
    }

    /// Another descriptor of the socket.
    pub fn keep_open(&self) -> io::Result<OwnedFd> {
        Ok(self.socket.try_clone()?.into())
    }

    /// Bytes that the socket has not taken.
    pub fn backlog(&self) -> usize {
        let state = self.state();
        state.waiting_bytes + state.wire.len()
    }

    /// Sends a frame, now or as soon as the peer takes it; one that is urgent before those that
    /// wait.
    pub fn send(&self, frame: &[u8], is_urgent: bool) -> Result<(), ConnectionError> {
        let state = self.state();
        if state.ended {
            return Err(ConnectionError::Closed);
        }
        self.append(state, frame, is_urgent)
    }

    /// The same, also to a peer that has nothing to say any more: it may go on listening. False
    /// where something waits already.
    pub fn send_to_the_end(&self, frame: &[u8]) -> Result<bool, ConnectionError> {
        let mut state = self.state();
        // Nobody receives any more who would send what waits.
        self.flush(&mut state)?;
        if state.waiting_bytes + state.wire.len() > 0 {
            return Ok(false);
        }
        self.append(state, frame, false).map(|()| true)
    }

    fn append(
        &self,
        mut state: MutexGuard<'_, State>,
        frame: &[u8],
        is_urgent: bool,
    ) -> Result<(), ConnectionError> {
        let length =
            u32::try_from(frame.len()).map_err(|_| ConnectionError::TooLong(frame.len()))?;
        if state.cut {
            return Err(ConnectionError::Reset);
        }
        let limit = MAX_PENDING_BYTES + if is_urgent { MAX_URGENT_BYTES } else { 0 };
        if state.waiting_bytes > limit {
            return Err(ConnectionError::Stuck);
        }
        let frame = [&length.to_le_bytes()[..], frame].concat();
        state.waiting_bytes += frame.len();
        match is_urgent {
            true => state.urgent.push_back(frame),
            false => state.waiting.push_back(frame),
        }
        self.flush(&mut state)?;
        if !state.wire.is_empty() {
            eventfd::signal(self.wake.as_fd());
        }
        Ok(())
    }

    /// Gives the socket what it takes. Where it takes nothing any more, the peer may have hung up,
    /// and its last words may still be to be read; or something else has happened. The receiver
    /// finds out.
    fn flush(&self, state: &mut State) -> Result<(), ConnectionError> {
        let flushed = match state.cut {
            true => Err(ConnectionError::Reset),
            false => self.try_flush(state),
        };
        if flushed.is_err() {
            state.cut = true;
            state.wire.clear();
            state.waiting.clear();
            state.urgent.clear();
            state.waiting_bytes = 0;
        }
        flushed
    }

    fn try_flush(&self, state: &mut State) -> Result<(), ConnectionError> {
        loop {
            if state.wire.is_empty() && !state.encode_next()? {
                return Ok(());
            }
            let (first, _) = state.wire.as_slices();
            match (&self.socket).write(first) {
                Ok(0) => return Err(ConnectionError::Reset),
                Ok(n) => drop(state.wire.drain(..n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(closed_or(e)),
            }
        }
    }

    /// Takes what the socket has. False where the peer has hung up, and not something in between:
    /// TLS has it say so.
    fn fill(&self, state: &mut State) -> Result<bool, ConnectionError> {
        let State {
            tls, arrived, wire, ..
        } = state;
        let read = match tls {
            None => {
                let mut chunk = [0; CHUNK_BYTES];
                let read = (&self.socket).read(&mut chunk);
                if let Ok(n) = read {
                    arrived.extend_from_slice(&chunk[..n]);
                }
                read
            }
            Some(tls) => {
                let read = tls.read_tls(&mut &self.socket);
                if let Ok(bytes) = read {
                    let state = tls
                        .process_new_packets()
                        .map_err(|e| ConnectionError::Tls(e.to_string()))?;
                    if !state.peer_has_closed() && bytes == 0 {
                        return Err(ConnectionError::Reset);
                    }
                    read_plain(tls, arrived)?;
                    if state.peer_has_closed() {
                        return Ok(false);
                    }
                    while tls.wants_write() {
                        tls.write_tls(wire)?;
                    }
                }
                read
            }
        };
        match read {
            Ok(0) => Ok(false),
            Ok(_) => Ok(true),
            Err(e) if comes_later(&e) => Ok(true),
            Err(e) => Err(closed_or(e)),
        }
    }

    /// Has the receiver, or the next one, return.
    pub fn nudge(&self) {
        self.nudged.store(true, Ordering::Release);
        eventfd::signal(self.wake.as_fd());
    }

    /// The next frame into `buffer`; false when the time is over, or there was a nudge.
    pub fn receive(
        &self,
        buffer: &mut Vec<u8>,
        until: Option<Instant>,
    ) -> Result<bool, ConnectionError> {
        self.receive_frame(buffer, until).map_err(|e| {
            // What follows from this end's hanging up says nothing of the other one.
            match self.ended.load(Ordering::Acquire) {
                true => ConnectionError::Ended,
                false => e,
            }
        })
    }

    fn receive_frame(
        &self,
        buffer: &mut Vec<u8>,
        until: Option<Instant>,
    ) -> Result<bool, ConnectionError> {
        // Once at least: whoever comes late with its question hears what has arrived.
        let mut has_looked = false;
        loop {
            if self.ended.load(Ordering::Acquire) {
                return Err(ConnectionError::Ended);
            }
            let wants_out = {
                let mut state = self.state();
                if state.is_over {
                    state.arrived.clear();
                } else if take_frame(&mut state.arrived, buffer)? {
                    return Ok(true);
                }
                if state.ended {
                    return Err(ConnectionError::Closed);
                }
                !state.wire.is_empty()
            };
            if self.nudged.swap(false, Ordering::AcqRel) {
                return Ok(false);
            }
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, wants_out);
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            // Where the peer goes on sending less than a frame, there is always something to be
            // read.
            if has_looked && left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            has_looked = true;
            let mut fds = [
                PollFd::new(&self.socket, flags),
                PollFd::new(&self.wake, PollFlags::IN),
            ];
            if socket::wait(&mut fds, until).map_err(io::Error::from)? == 0 {
                return Ok(false);
            }
            let _ = eventfd::drain(self.wake.as_fd());
            let mut state = self.state();
            let more = self.fill(&mut state)?;
            if more {
                // Whatever it says, what the peer has said comes first.
                let _ = self.flush(&mut state);
            }
            state.ended |= !more;
        }
    }

    /// What arrives from now on is of no use, but the end.
    pub fn ignore_frames(&self) {
        self.state().is_over = true;
    }

    /// The socket itself goes on taking what comes: one that does not breaks off the connection,
    /// see [`linger`](Self::linger).
    pub fn stop(&self) {
        self.ended.store(true, Ordering::Release);
        eventfd::signal(self.wake.as_fd());
    }

    /// Tells the peer that nothing more comes, as far as it takes that.
    fn say_goodbye(&self) {
        let mut state = self.state();
        while state.encode_next().is_ok_and(|more| more) {}
        let State { tls, wire, .. } = &mut *state;
        if let Some(tls) = tls {
            tls.send_close_notify();
            while tls.wants_write() && tls.write_tls(wire).is_ok() {}
        }
        let _ = self.flush(&mut state);
    }

    pub fn finish(&self) {
        self.say_goodbye();
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Sends what waits, and that nothing more comes; then waits until the peer has hung up too.
    /// All that for so long at most, and for an end that is not received at any more.
    ///
    /// What the peer still says is read and thrown away. A socket that is closed with something
    /// unread, or to which something comes afterwards, breaks off the connection (RFC 1122,
    /// 4.2.2.13): the peer loses what it has not been sent yet, and the goodbye.
    pub fn linger(&self, time: Duration) {
        let end = Instant::now() + time;
        self.say_goodbye();
        let mut chunk = [0; CHUNK_BYTES];
        let (mut is_said, mut has_heard) = (false, false);
        loop {
            if !is_said && self.is_flushed() {
                self.state().cut = true;
                let _ = self.socket.shutdown(Shutdown::Write);
                is_said = true;
            }
            if !has_heard {
                has_heard = match (&self.socket).read(&mut chunk) {
                    Ok(bytes) => bytes == 0,
                    Err(e) => !comes_later(&e),
                };
            }
            if is_said && has_heard {
                return;
            }
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::OUT, !is_said);
            flags.set(PollFlags::IN, !has_heard);
            let mut polled = [PollFd::new(&self.socket, flags)];
            if Instant::now() >= end || socket::wait(&mut polled, Some(end)) == Ok(0) {
                return;
            }
        }
    }

    /// Whether the system has all that was sent, or takes nothing any more.
    fn is_flushed(&self) -> bool {
        let mut state = self.state();
        self.flush(&mut state).is_err() || state.waiting_bytes + state.wire.len() == 0
    }

    pub fn close(&self) {
        self.ended.store(true, Ordering::Release);
        self.say_goodbye();
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

fn handshake_error(error: io::Error) -> ConnectionError {
    match error.kind() {
        io::ErrorKind::InvalidData => ConnectionError::Tls(error.to_string()),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ConnectionError::Stuck,
        _ => closed_or(error),
    }
}

/// Whether a socket has only nothing to read now.
fn comes_later(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

fn closed_or(error: io::Error) -> ConnectionError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => ConnectionError::Closed,
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => ConnectionError::Reset,
        _ => ConnectionError::Io(error),
    }
}

/// Appends what TLS has decrypted.
fn read_plain(tls: &mut Connection, arrived: &mut Vec<u8>) -> Result<(), ConnectionError> {
    let mut chunk = [0; CHUNK_BYTES];
    loop {
        match tls.reader().read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(n) => arrived.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(closed_or(e)),
        }
    }
}

/// Takes the first frame off `arrived`, if all of it is there.
fn take_frame(arrived: &mut Vec<u8>, frame: &mut Vec<u8>) -> Result<bool, ConnectionError> {
    let Some((length, rest)) = arrived.split_first_chunk::<LENGTH_BYTES>() else {
        return Ok(false);
    };
    let length = to_usize(u32::from_le_bytes(*length).into());
    if length > MAX_FRAME_BYTES {
        return Err(ConnectionError::TooLong(length));
    }
    let Some(bytes) = rest.get(..length) else {
        return Ok(false);
    };
    frame.clear();
    frame.extend_from_slice(bytes);
    arrived.drain(..LENGTH_BYTES + length);
    Ok(true)
}

#[cfg(test)]
mod tests;
