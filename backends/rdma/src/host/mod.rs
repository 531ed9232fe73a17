//! The socket for processes of this host: one connection is one context.
//!
//! One thread serves all connections. A process is let in by what the kernel says of it
//! (`SO_PEERCRED`), and its context ends with the connection or with the process, whichever is
//! first: a child of it may still hold the connection.
//!
//! Processes of other users whom the operator lets in ([`Admission`]) have a part of what there is
//! for processes, and find nothing of those of a third one. Those who are let in by a group have
//! one part: an account may have as many users as it likes (subuid(5)), and they keep its groups.
//! Their memory is never reached by system calls: it is what they share.

mod admission;
mod connection;
mod events;
mod file;
mod open;
mod packet;
mod sharing;

pub use admission::Admission;

use crate::nodes::Nodes;
use admission::Admitted;
use connection::{Connection, Next, Seat};
use farlane_abi::Errno;
use farlane_abi::control::MAX_CONTEXTS;
use farlane_abi::ids::ContextId;
use farlane_daemon::log_limit::LogLimit;
use farlane_daemon::warn_limited;
use farlane_guest_device::control::RequestCounters;
use farlane_rdma_remoting::{Party, Port, Resource, Server};
use farlane_sys::closing::Closing;
use farlane_zero_copy::{Process, Region};
use rustix::event::epoll;
use rustix::net::SocketFlags;
use sharing::Sharing;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections that one process can have, with the descriptors that wait to be closed where it is
/// one of the daemon's user.
const MAX_OF_PROCESS: usize = 64;
/// Descriptors of another user's processes, or of those let in by a group, that wait to be closed:
/// then none of them is heard.
const MOST_CLOSING_OF_USER: usize = 256;
/// Connections of processes of other users, which say something once and hear that they are
/// refused. The oldest of more goes unheard.
const MAX_REFUSED: usize = 16;
/// Descriptors of connections that were not let in, for either reason, that wait to be closed: then
/// others wait before they are accepted.
const MOST_CLOSING: usize = 1024;
/// Descriptors of a connection: its socket, its process, its doorbell and the eventfd that wakes
/// it.
const DESCRIPTORS: u64 = 4;
/// Pause where a connection cannot be accepted, because files have run out most likely.
const PAUSE: Duration = Duration::from_millis(500);
/// Events taken at a time.
const BATCH: usize = 64;

/// Epoll key of the listening socket.
const LISTENER: u64 = 0;
/// Of what tells that files have been looked at. Connections have keys from 2 on.
const LOOKED: u64 = 1;

/// What an epoll key stands for. Numbers of connections are never used again, so that a late
/// event cannot meet a successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Listener,
    Looked,
    Socket(u64),
    Process(u64),
}

impl Key {
    fn encode(self) -> epoll::EventData {
        epoll::EventData::new_u64(match self {
            Self::Listener => LISTENER,
            Self::Looked => LOOKED,
            Self::Socket(number) => number << 1,
            Self::Process(number) => number << 1 | 1,
        })
    }

    fn decode(data: epoll::EventData) -> Self {
        match data.u64() {
            LISTENER => Self::Listener,
            LOOKED => Self::Looked,
            key if key & 1 == 0 => Self::Socket(key >> 1),
            key => Self::Process(key >> 1),
        }
    }
}

/// The host socket's port, and what all its connections use.
pub(crate) struct HostState {
    port: Arc<Port>,
    server: Arc<Server>,
    nodes: Option<Arc<Nodes>>,
    counters: Arc<RequestCounters>,
    limit: LogLimit,
    /// What looks at files in which memory is that processes share.
    sharing: Sharing,
    /// What is closed of connections that have ended.
    closing: Closing<Sender>,
}

impl HostState {
    /// Finds out on which node mapped memory lies, where that is asked for.
    fn locate(&self, memory: &Region) {
        if let Some(nodes) = &self.nodes {
            nodes.locate(memory);
        }
    }

    /// Whether so much of a sender's waits to be closed that nothing more of its is taken.
    fn is_full(&self, sender: Sender) -> bool {
        let most = match sender {
            Sender::Process(_) => MAX_OF_PROCESS,
            Sender::Other(_) => MOST_CLOSING_OF_USER,
            Sender::Stranger | Sender::Refused => MOST_CLOSING,
        };
        self.closing.of(&sender) >= most
    }
}

/// Who has sent descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Sender {
    /// A process of the daemon's user, with this number.
    Process(i32),
    /// Processes of another user that was let in, or of all who were by a group.
    Other(Admitted),
    /// One of another user that was not.
    Stranger,
    /// One that was not let in, because there are too many.
    Refused,
}

/// The socket and its connections.
pub struct HostSocket {
    listener: OwnedFd,
    epoll: OwnedFd,
    host: HostState,
    user: u32,
    admission: Admission,
    /// What the processes of each other user have together.
    parties: BTreeMap<(Admitted, u32), Arc<Party>>,
    /// And those who are let in by each group, whatever users they are.
    groups: BTreeMap<u32, Party>,
    connections: BTreeMap<u64, Connection>,
    /// Those of them that are refused, the oldest first.
    refused: VecDeque<u64>,
    /// Context ids that are free.
    free: Vec<ContextId>,
    /// Number of the next connection, from one.
    next: u64,
    /// Since when the listener is not in the epoll set.
    deaf_since: Option<Instant>,
}

impl std::fmt::Debug for HostSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostSocket")
            .field("connections", &self.connections.len())
            .finish_non_exhaustive()
    }
}

impl HostSocket {
    /// Serves the contexts of `port` on a listening `SOCK_SEQPACKET` socket, to processes of this
    /// user and to those that `admission` lets in.
    ///
    /// # Errors
    /// Epoll cannot be set up: too many open files, most likely.
    pub fn new(
        listener: OwnedFd,
        admission: Admission,
        port: Arc<Port>,
        server: Arc<Server>,
        nodes: Option<Arc<Nodes>>,
        counters: Arc<RequestCounters>,
    ) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&listener)?;
        rustix::fs::fcntl_setfl(&listener, flags | rustix::fs::OFlags::NONBLOCK)?;
        let mut socket = Self {
            listener,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            host: HostState {
                port,
                server,
                nodes,
                counters,
                limit: LogLimit::new(),
                sharing: Sharing::new()?,
                closing: Closing::default(),
            },
            user: rustix::process::geteuid().as_raw(),
            admission,
            parties: BTreeMap::new(),
            groups: BTreeMap::new(),
            connections: BTreeMap::new(),
            refused: VecDeque::new(),
            free: (0..MAX_CONTEXTS).rev().filter_map(ContextId::new).collect(),
            next: 1,
            deaf_since: Some(Instant::now()),
        };
        let looked = socket.host.sharing.looked();
        epoll::add(
            &socket.epoll,
            looked,
            Key::Looked.encode(),
            epoll::EventFlags::IN,
        )?;
        socket.listen()?;
        Ok(socket)
    }

    /// Serves processes until epoll fails.
    ///
    /// # Errors
    /// `epoll_wait` has failed: nobody can be served any more.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(BATCH);
        loop {
            let pause = self.deaf_since.and_then(|_| PAUSE.try_into().ok());
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                pause.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            for event in &events {
                match Key::decode(event.data) {
                    Key::Listener => self.accept()?,
                    Key::Looked => self.looked(),
                    Key::Socket(number) => self.serve(number),
                    Key::Process(number) => self.close(number),
                }
            }
            // However much those say who are connected.
            self.listen_again(Instant::now())?;
        }
    }

    /// Lets new connections in.
    fn listen(&mut self) -> io::Result<()> {
        if self.deaf_since.is_some() {
            let key = Key::Listener.encode();
            epoll::add(&self.epoll, &self.listener, key, epoll::EventFlags::IN)?;
            self.deaf_since = None;
        }
        Ok(())
    }

    /// Lets new connections wait for [`PAUSE`].
    fn pause(&mut self, now: Instant) -> io::Result<()> {
        if self.deaf_since.is_none() {
            epoll::delete(&self.epoll, &self.listener)?;
        }
        self.deaf_since = Some(now);
        Ok(())
    }

    /// Lets them in where that is over.
    fn listen_again(&mut self, now: Instant) -> io::Result<()> {
        match self.deaf_since {
            Some(since) if now.saturating_duration_since(since) >= PAUSE => self.listen(),
            _ => Ok(()),
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        // Whose the next connection is shows when it has been accepted.
        if self.host.is_full(Sender::Refused) || self.host.is_full(Sender::Stranger) {
            return self.pause(Instant::now());
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.listener, flags) {
            Ok(socket) => {
                if let Err(e) = self.admit(socket) {
                    warn_limited!(self.host.limit, "Host socket: a process is refused: {e}");
                }
                Ok(())
            }
            // It has gone again.
            Err(
                rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED,
            ) => Ok(()),
            Err(e) => {
                warn_limited!(self.host.limit, "Host socket: cannot accept: {e}");
                self.pause(Instant::now())
            }
        }
    }

    /// Lets a connection in. One that cannot be is closed.
    fn admit(&mut self, socket: OwnedFd) -> io::Result<()> {
        let (process, seat) = match self.examine(&socket) {
            Ok(examined) => examined,
            Err(e) => {
                // What the peer has put into it by now ends with it.
                let _ = epoll::delete(&self.epoll, &socket);
                let closing = &self.host.closing;
                closing.close(Sender::Refused, vec![socket], ());
                return Err(e);
            }
        };
        let (number, is_refused) = (self.next, seat.is_err());
        self.next += 1;
        self.connections
            .insert(number, Connection::new(socket, process, seat));
        if is_refused {
            self.refused.push_back(number);
        }
        if self.refused.len() > MAX_REFUSED
            && let Some(oldest) = self.refused.pop_front()
        {
            self.close(oldest);
        }
        Ok(())
    }

    /// Whose it is, and where that one is let in, if it is. It is in the epoll set afterwards.
    fn examine(&mut self, socket: &OwnedFd) -> io::Result<(Arc<Process>, Result<Seat, Errno>)> {
        let process = Process::of_peer(socket.as_fd())?;
        let user = process.uid();
        let admitted = if user == self.user {
            Ok(None)
        } else {
            let by = self.admission.admits(user, socket.as_fd())?;
            by.map(Some).ok_or(Errno::EPERM)
        };
        if admitted.is_err() {
            warn_limited!(
                self.host.limit,
                "Host socket: process {} of user {} is refused",
                process.pid(),
                process.uid()
            );
        }
        let number = self.next;
        hear(&self.epoll, socket.as_fd(), number)?;
        let key = Key::Process(number).encode();
        epoll::add(&self.epoll, process.pidfd(), key, epoll::EventFlags::IN)?;
        let seat = match admitted {
            Ok(another) => Ok(self.seat(&process, another)?),
            Err(errno) => Err(errno),
        };
        Ok((process, seat))
    }

    /// Lets a process in, unless it has, or its user or all have, as much as they can.
    fn seat(&mut self, process: &Process, another: Option<Admitted>) -> io::Result<Seat> {
        let (pid, user) = (process.pid(), process.uid());
        let sender = another.map_or(Sender::Process(pid), Sender::Other);
        let seated = || self.connections.values().filter(|c| c.sender() == sender);
        let its = seated().filter(|c| c.pid() == pid).count();
        let closing = match another {
            None => self.host.closing.of(&sender),
            Some(_) => 0,
        };
        if its + closing >= MAX_OF_PROCESS {
            let why = format!("process {pid} has {} connections", its + closing);
            return Err(io::Error::other(why));
        }
        // It leaves others as many as its user has.
        if another.is_some()
            && (seated().count() + 1 >= self.free.len() || self.host.is_full(sender))
        {
            let why = format!("processes of user {user} ({sender:?}) have too many connections");
            return Err(io::Error::other(why));
        }
        let party = match another {
            None => Arc::new(self.host.port.party().clone()),
            Some(by) => self.party(by, user),
        };
        let share = party.take(Resource::Descriptors, DESCRIPTORS);
        let share = share.ok_or_else(|| io::Error::other("processes have too many files"))?;
        let id = self.free.pop();
        Ok(Seat {
            id: id.ok_or_else(|| io::Error::other("there are too many"))?,
            party,
            another,
            share,
        })
    }

    /// What processes of another user have together.
    fn party(&mut self, by: Admitted, user: u32) -> Arc<Party> {
        // Those are forgotten that have nothing any more. What a group has taken is known of it.
        self.parties.retain(|of, party| {
            let is_left = Arc::strong_count(party) > 1;
            *of == (by, user)
                || is_left
                || matches!(of, (Admitted::User(_), _)) && party.is_in_use()
        });
        let port = &self.host.port;
        let groups = &mut self.groups;
        let mut make = || match by {
            Admitted::User(_) => port.another_party(),
            Admitted::Group(group) => {
                let all = groups.entry(group);
                all.or_insert_with(|| port.another_party()).of_another()
            }
        };
        let party = self.parties.entry((by, user));
        Arc::clone(party.or_insert_with(|| Arc::new(make())))
    }

    fn serve(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        if connection.is_waiting() {
            return;
        }
        // Who has sent so much that waits to be closed is not heard any more.
        let is_heard = !self.host.is_full(connection.sender());
        let next = match is_heard {
            true => connection.serve(&self.host, number),
            false => Next::Close,
        };
        match next {
            Next::Go => {}
            // Not even that it has hung up: its process is watched.
            Next::Wait => {
                let _ = epoll::delete(&self.epoll, connection.descriptors()[0]);
            }
            Next::Close => self.close(number),
        }
    }

    /// Goes on with all whose files have been looked at.
    fn looked(&mut self) {
        for looked in self.host.sharing.take() {
            let number = looked.number;
            let Some(connection) = self.connections.get_mut(&number) else {
                // It has ended meanwhile.
                self.host.closing.free((looked.memory, looked.backings));
                continue;
            };
            let next = connection.shared(&self.host, looked);
            let [socket, _] = connection.descriptors();
            if next == Next::Close || hear(&self.epoll, socket, number).is_err() {
                self.close(number);
            }
        }
    }

    /// Ends a connection and its context.
    fn close(&mut self, number: u64) {
        if let Some(connection) = self.connections.remove(&number) {
            // Its descriptors may stay open for long.
            for fd in connection.descriptors() {
                let _ = epoll::delete(&self.epoll, fd);
            }
            self.refused.retain(|refused| *refused != number);
            self.free.extend(connection.close(&self.host));
        }
    }
}

/// Has a connection heard.
fn hear(epoll: &OwnedFd, socket: BorrowedFd<'_>, number: u64) -> rustix::io::Result<()> {
    let key = Key::Socket(number).encode();
    let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
    epoll::add(epoll, socket, key, flags)
}

#[cfg(test)]
mod tests;
