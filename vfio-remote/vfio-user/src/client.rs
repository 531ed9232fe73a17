//! The client's memory, by messages.

use crate::Counters;
use crate::counters::Count;
use crate::socket::{Socket, SocketError};
use crate::wire::{self, Command, DmaAccess, HEADER_BYTES, Header};
use farlane_abi::width::{to_u64, to_usize};
use farlane_sys::sync::{held, lock};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::ThreadId;
use std::time::{Duration, Instant};
use thiserror::Error;
use zerocopy::IntoBytes as _;

/// How long a client may take to answer a message. QEMU waits as long for the server's answers.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Messages under way at a time.
const MAX_PENDING: usize = 256;

/// Why memory of a client could not be reached.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The connection has ended.
    #[error("The client has gone")]
    Gone,
    /// It has not answered in time.
    #[error("The client did not answer for {} seconds", ANSWER_TIMEOUT.as_secs())]
    Timeout,
    /// It refuses.
    #[error("The client refuses: {0}")]
    Refused(Errno),
    /// It has answered something else than was asked.
    #[error("The client's answer is malformed")]
    Malformed,
    /// The range wraps around.
    #[error("{length} bytes at {address:#x} wrap around")]
    Range {
        /// Address of the first byte.
        address: u64,
        /// Length in bytes.
        length: usize,
    },
    /// The call came from the thread that takes the answers, out of a call of
    /// [`Device`](crate::Device): it would wait for itself.
    #[error("The client cannot be reached while it is being answered")]
    OwnThread,
    /// The answers are not taken: see [`Client::pause_access`].
    #[error("The client's answers are not taken now")]
    AccessPause,
    /// Too many messages are under way.
    #[error("{MAX_PENDING} messages are under way")]
    Busy,
}

/// What a message is waited for with.
#[derive(Debug)]
enum Answer {
    /// None yet.
    Awaited,
    /// There it is, without header.
    Body(Vec<u8>),
    /// It is an error.
    Refused(Errno),
    /// It is not waited for.
    AccessPause,
}

#[derive(Debug, Default)]
struct Pending {
    /// Messages that wait for an answer, by their number.
    answers: HashMap<u16, (Command, Answer)>,
    next_id: u16,
    /// By how many.
    held_off: usize,
    ended: bool,
}

#[derive(Debug)]
struct Shared {
    socket: Socket,
    /// Held while a message is sent, so that messages do not mix.
    sending: Mutex<()>,
    /// Never held together with `sending`.
    pending: Mutex<Pending>,
    changed: Condvar,
    /// The thread that receives.
    receiver: ThreadId,
    /// Bytes of data in a message.
    max_transfer: AtomicUsize,
    counters: Counters,
}

/// A connected client, as a device sees it. All copies are the same client.
#[derive(Clone, Debug)]
pub struct Client(Arc<Shared>);

impl Client {
    /// The client at the other end of a UNIX stream socket. This thread receives its messages.
    ///
    /// For those who serve without [`Server`](crate::Server), with a [`Session`](crate::Session).
    #[must_use]
    pub fn new(stream: OwnedFd, counters: Counters) -> Self {
        Self(Arc::new(Shared {
            socket: Socket::new(stream),
            sending: Mutex::new(()),
            pending: Mutex::default(),
            changed: Condvar::new(),
            receiver: std::thread::current().id(),
            max_transfer: AtomicUsize::new(0),
            counters,
        }))
    }

    /// Reads the client's memory. Long reads are several messages.
    ///
    /// # Errors
    /// See [`ClientError`]. A part may have been read then.
    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<(), ClientError> {
        let mut at = check_range(address, data.len())?;
        for part in data.chunks_mut(self.max_transfer()?) {
            let access = access(at, part.len());
            let body = self.request(Command::DmaRead, &access, &[])?;
            part.copy_from_slice(read_data(&body, &access).ok_or(ClientError::Malformed)?);
            self.0.counters.add(Count::DmaReads, 1);
            at = at.wrapping_add(access.count);
        }
        Ok(())
    }

    /// Writes the client's memory. It has been written when this returns. Long writes are several
    /// messages.
    ///
    /// # Errors
    /// See [`ClientError`]. A part may have been written then.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), ClientError> {
        let mut at = check_range(address, data.len())?;
        for part in data.chunks(self.max_transfer()?) {
            let access = access(at, part.len());
            let body = self.request(Command::DmaWrite, &access, part)?;
            if !is_write_answer(&body, &access) {
                return Err(ClientError::Malformed);
            }
            self.0.counters.add(Count::DmaWrites, 1);
            at = at.wrapping_add(access.count);
        }
        Ok(())
    }

    /// Until what this returns is dropped, nothing of the client's memory is reached: what is under
    /// way fails, and what begins.
    ///
    /// For whoever keeps the thread that takes the answers waiting for something that may itself
    /// wait for one.
    #[must_use]
    pub fn pause_access(&self) -> AccessPause {
        let mut pending = self.pending();
        pending.held_off += 1;
        for (_, answer) in pending.answers.values_mut() {
            if matches!(answer, Answer::Awaited) {
                *answer = Answer::AccessPause;
            }
        }
        drop(pending);
        self.0.changed.notify_all();
        AccessPause(self.clone())
    }

    /// Ends the connection. The device is told by
    /// [`disconnected`](crate::Device::disconnected), after this has returned.
    pub fn disconnect(&self) {
        self.0.socket.shutdown();
    }

    /// How many messages there have been, with all clients of the server.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.0.counters.clone()
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.0.socket
    }

    /// What has been negotiated. Until then, nothing can be reached.
    pub(crate) fn set_max_transfer(&self, bytes: u32) {
        let bytes = to_usize(bytes.into());
        self.0.max_transfer.store(bytes, Ordering::Relaxed);
    }

    /// Sends a message of the server.
    pub(crate) fn send(
        &self,
        first: &[u8],
        second: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), SocketError> {
        let _sending = lock(&self.0.sending);
        self.0.socket.send(first, second, fds)
    }

    /// Takes a reply. One that nobody waits for, because it comes too late, is dropped.
    pub(crate) fn answered(&self, header: &Header, body: &[u8]) {
        let mut pending = self.pending();
        let Some((command, answer)) = pending.answers.get_mut(&header.id) else {
            log::debug!("A reply that nobody waits for: {header:?}");
            return;
        };
        if header.command != command.to_wire() || !matches!(answer, Answer::Awaited) {
            log::debug!("A reply to nothing that was asked: {header:?}");
            return;
        }
        *answer = if header.flags & wire::FLAG_ERROR == 0 {
            Answer::Body(body.to_vec())
        } else {
            let raw = i32::try_from(header.error).ok();
            let known = raw.filter(|raw| (1..4096).contains(raw));
            Answer::Refused(known.map_or(Errno::IO, Errno::from_raw_os_error))
        };
        drop(pending);
        self.0.changed.notify_all();
    }

    /// The connection has ended.
    pub(crate) fn end(&self) {
        self.0.socket.shutdown();
        self.pending().ended = true;
        self.0.changed.notify_all();
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        lock(&self.0.pending)
    }

    fn max_transfer(&self) -> Result<usize, ClientError> {
        let bytes = self.0.max_transfer.load(Ordering::Relaxed);
        if bytes == 0 {
            Err(ClientError::Gone)
        } else {
            Ok(bytes)
        }
    }

    /// Sends a command and waits for its answer.
    fn request(
        &self,
        command: Command,
        access: &DmaAccess,
        data: &[u8],
    ) -> Result<Vec<u8>, ClientError> {
        if std::thread::current().id() == self.0.receiver {
            return Err(ClientError::OwnThread);
        }
        let id = self.begin(command)?;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let size = HEADER_BYTES + size_of::<DmaAccess>() + data.len();
        let header = Header {
            id,
            command: command.to_wire(),
            size: u32::try_from(size).map_err(|_| ClientError::Busy)?,
            flags: wire::TYPE_COMMAND,
            error: 0,
        };
        let mut fixed = [0; HEADER_BYTES + size_of::<DmaAccess>()];
        fixed[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        fixed[HEADER_BYTES..].copy_from_slice(access.as_bytes());
        if let Err(error) = self.send(&fixed, data, &[]) {
            log::debug!("A message to the client could not be sent: {error}");
            self.pending().answers.remove(&id);
            // Part of it may have been sent.
            self.0.socket.shutdown();
            return Err(ClientError::Gone);
        }
        self.wait(id, deadline)
    }

    /// A number for a message that will be answered.
    fn begin(&self, command: Command) -> Result<u16, ClientError> {
        let mut pending = self.pending();
        if pending.ended {
            return Err(ClientError::Gone);
        }
        if pending.held_off > 0 {
            return Err(ClientError::AccessPause);
        }
        if pending.answers.len() >= MAX_PENDING {
            return Err(ClientError::Busy);
        }
        loop {
            let id = pending.next_id;
            pending.next_id = id.wrapping_add(1);
            if let std::collections::hash_map::Entry::Vacant(entry) = pending.answers.entry(id) {
                entry.insert((command, Answer::Awaited));
                return Ok(id);
            }
        }
    }

    fn wait(&self, id: u16, deadline: Instant) -> Result<Vec<u8>, ClientError> {
        let mut pending = self.pending();
        while let Some((_, Answer::Awaited)) = pending.answers.get(&id) {
            let left = deadline.saturating_duration_since(Instant::now());
            if pending.ended || left.is_zero() {
                break;
            }
            let (guard, _) = held(self.0.changed.wait_timeout(pending, left));
            pending = guard;
        }
        match pending.answers.remove(&id) {
            Some((_, Answer::Body(body))) => Ok(body),
            Some((_, Answer::Refused(error))) => Err(ClientError::Refused(error)),
            Some((_, Answer::AccessPause)) => Err(ClientError::AccessPause),
            _ if pending.ended => Err(ClientError::Gone),
            _ => Err(ClientError::Timeout),
        }
    }
}

/// While it is there, nothing of a client's memory is reached: see [`Client::pause_access`].
#[derive(Debug)]
pub struct AccessPause(Client);

impl Drop for AccessPause {
    fn drop(&mut self) {
        self.0.pending().held_off -= 1;
    }
}

fn check_range(address: u64, length: usize) -> Result<u64, ClientError> {
    let bytes = u64::try_from(length).ok();
    match bytes.and_then(|bytes| address.checked_add(bytes)) {
        Some(_) => Ok(address),
        None => Err(ClientError::Range { address, length }),
    }
}

fn access(address: u64, length: usize) -> DmaAccess {
    DmaAccess {
        address,
        // A part of at most MAX_TRANSFER_BYTES.
        count: to_u64(length),
    }
}

/// The data in the answer to a read.
fn read_data<'a>(body: &'a [u8], asked: &DmaAccess) -> Option<&'a [u8]> {
    let (fixed, data) = body.split_at_checked(size_of::<DmaAccess>())?;
    let whole = u64::try_from(data.len()) == Ok(asked.count);
    (whole && fixed == asked.as_bytes()).then_some(data)
}

/// Whether the answer to a write says that all has been written. QEMU answers with a header only.
fn is_write_answer(body: &[u8], asked: &DmaAccess) -> bool {
    let fixed = asked.as_bytes();
    // The protocol's text has 12 bytes here, its other implementations 16.
    body.is_empty() || (body.len() >= 12 && body.len() <= fixed.len() && fixed.starts_with(body))
}
