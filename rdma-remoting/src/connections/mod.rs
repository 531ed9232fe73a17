//! Connection management: what connects the programs of ports, by messages of their queue pairs 1
//! ([`farlane_rdma_cm`]).
//!
//! Each port has a manager of its own, whose messages are brought to the ports that they are for:
//! to queue pair 1 of a port whose guest's kernel has one, else to that port's manager. What such a
//! queue pair sends to a port that has none comes here ([`Management`]). A thread does all that,
//! and lets timers end; a worker only takes calls, each of which costs a bounded number of messages
//! that wait here.
//!
//! * [`port`]: a port's manager, and which programs have which connections;
//! * [`ids`]: what one program has; [`places`]: where they are bound;
//! * [`queue_pairs`]: whose queue pairs are;
//! * [`calls`]: calls on these; [`terms`]: connection management's terms and those of the verbs.
//!
//! **Locks.** A port's, then the list's; none other is taken under them, but the ledger's and those
//! of GIDs. That of who brings a port's messages comes before those of all ports, and no two of
//! these are held at once. None is taken under that of a port's queue pairs, which an engine takes
//! under its own, after the list's ([`Management::is_named`]).

mod calls;
mod ids;
mod places;
mod port;
mod queue_pairs;
mod terms;
#[cfg(test)]
mod tests;

pub(crate) use calls::Program;
pub(crate) use port::{PortConnections, PortSpec};
pub(crate) use queue_pairs::NamedQueuePair;

use crate::engine::{Engine, Management, ManagementDatagram, QpNumber, RawGid};
use crate::gids::Gids;
use farlane_rdma_cm::{Gid, Ports, Transmit};
use farlane_sys::sync::{held, lock};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::engine::PortNames as _;

/// Messages of a port that are brought in its turn, before another port has one.
const MESSAGES_A_TURN: usize = 16;

/// Connection management of all ports.
pub(crate) struct Connections {
    engine: Arc<dyn Engine>,
    gids: Arc<Gids>,
    list: Mutex<List>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Who has something to do.
#[derive(Default)]
struct List {
    /// By the GIDs of their addresses.
    ports: HashMap<RawGid, Weak<PortConnections>>,
    /// Those whose messages wait, each once.
    ready: VecDeque<RawGid>,
    /// When timers of ports end.
    timers: BTreeSet<(Instant, RawGid)>,
    /// Messages are brought next, where some wait: a timer has ended since.
    messages_next: bool,
    stop: bool,
}

/// What is to be done.
enum Work {
    /// Bring messages of this port.
    Messages(RawGid),
    /// End timers of this port.
    Timers(RawGid),
}

impl List {
    fn port(&self, gid: &RawGid) -> Option<Arc<PortConnections>> {
        self.ports.get(gid).and_then(Weak::upgrade)
    }

    /// Where there are timers that have ended as well as messages, one after the other.
    fn next(&mut self, now: Instant) -> Option<Work> {
        if std::mem::take(&mut self.messages_next)
            && let Some(port) = self.ready.pop_front()
        {
            return Some(Work::Messages(port));
        }
        if let Some(&(at, port)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            self.messages_next = true;
            return Some(Work::Timers(port));
        }
        self.ready.pop_front().map(Work::Messages)
    }
}

impl Connections {
    pub fn new(engine: Arc<dyn Engine>, gids: Arc<Gids>) -> Arc<Self> {
        let connections = Arc::new(Self {
            engine,
            gids,
            list: Mutex::default(),
            changed: Condvar::new(),
            thread: Mutex::default(),
        });
        let management = Arc::downgrade(&connections);
        connections.engine.manage_by(Arc::new(Taken(management)));
        connections
    }

    /// Has a thread of its own do what is to be done.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        let connections = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("connections".into())
            .spawn(move || connections.run())?;
        *lock(&self.thread) = Some(thread);
        Ok(())
    }

    pub fn stop(&self) {
        lock(&self.list).stop = true;
        self.changed.notify_all();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            log::error!("The thread of connection management has panicked");
        }
    }

    fn run(&self) {
        let mut list = lock(&self.list);
        while !list.stop {
            let now = Instant::now();
            if let Some(work) = list.next(now) {
                drop(list);
                self.carry_out(&work, now);
                list = lock(&self.list);
                continue;
            }
            list = match list.timers.first() {
                None => held(self.changed.wait(list)),
                Some((at, _)) => {
                    let left = at.saturating_duration_since(now);
                    held(self.changed.wait_timeout(list, left)).0
                }
            };
        }
    }

    /// Does what is to be done at this time, of a server without a thread for it.
    pub fn turn(&self, now: Instant) {
        loop {
            let work = lock(&self.list).next(now);
            match work {
                None => return,
                Some(work) => self.carry_out(&work, now),
            }
        }
    }

    fn carry_out(&self, work: &Work, now: Instant) {
        match work {
            Work::Timers(gid) => {
                let port = lock(&self.list).port(gid);
                if let Some(port) = port {
                    port.advance(now);
                }
            }
            Work::Messages(gid) => {
                let port = lock(&self.list).port(gid);
                if let Some(port) = port
                    && self.bring_some(&port, now)
                {
                    self.note_messages(*gid);
                }
            }
        }
    }

    /// Brings a message to the port that it is for. It is lost where one of the two has not the GID
    /// any more, or may not have to do with the other.
    fn bring(&self, from: &PortConnections, message: &Transmit, now: Instant) {
        let Ports { local, remote } = message.ports;
        let Some(home) = self.gids.home(&remote.0) else {
            return;
        };
        if self.gids.home(&local.0) != Some(from.gid()) || !from.admits(&home) {
            return;
        }
        let datagram = ManagementDatagram {
            port: from.address(),
            from: local.0,
            to: remote.0,
            bytes: &message.datagram,
        };
        // Looked at there, too, as with any datagram.
        if self.engine.deliver_management(&datagram) {
            return;
        }
        let to = lock(&self.list).port(&home);
        if let Some(to) = to.filter(|to| to.admits(&from.gid())) {
            let ports = Ports {
                local: remote,
                remote: local,
            };
            to.receive(now, ports, &message.datagram[..]);
        }
    }

    /// Brings some of a port's messages. Returns whether others wait.
    fn bring_some(&self, from: &PortConnections, now: Instant) -> bool {
        let bringing = lock(&from.bringing);
        let (messages, more) = from.take_messages(MESSAGES_A_TURN);
        for message in messages {
            self.bring(from, &message, now);
        }
        drop(bringing);
        more
    }

    /// Brings all that waits of a port: when it returns all of that is there. Of what comes
    /// meanwhile it brings some.
    fn bring_all(&self, from: &PortConnections, now: Instant) {
        // Each has few messages.
        let turns = 1 + from.waiting() * 4 / MESSAGES_A_TURN;
        for _ in 0..turns {
            if !self.bring_some(from, now) {
                return;
            }
        }
    }

    /// Messages of a port wait, of which nobody has noted it yet.
    fn note_messages(&self, port: RawGid) {
        lock(&self.list).ready.push_back(port);
        self.changed.notify_one();
    }

    /// A timer of a port ends then, and no more `instead`.
    fn note_timer(&self, port: RawGid, at: Instant, instead: Option<Instant>) {
        let mut list = lock(&self.list);
        if let Some(instead) = instead {
            list.timers.remove(&(instead, port));
        }
        list.timers.insert((at, port));
        drop(list);
        self.changed.notify_one();
    }

    fn add(&self, port: &Arc<PortConnections>) {
        let weak = Arc::downgrade(port);
        lock(&self.list).ports.insert(port.gid(), weak);
    }

    /// A port is gone. Another one may have its name since.
    pub fn forget(&self, port: &PortConnections) {
        let (name, mut list) = (port.gid(), lock(&self.list));
        let its = list.ports.get(&name);
        if its.is_some_and(|its| std::ptr::eq(its.as_ptr(), port)) {
            list.ports.remove(&name);
            list.ready.retain(|one| *one != name);
            list.timers.retain(|(_, one)| *one != name);
        }
    }
}

/// What queue pairs 1 send to ports that have none.
struct Taken(Weak<Connections>);

impl Management for Taken {
    fn is_named(&self, port: &RawGid, number: QpNumber) -> bool {
        let connections = self.0.upgrade();
        let port = connections.and_then(|connections| lock(&connections.list).port(port));
        port.is_some_and(|port| port.queue_pairs.is_named(number))
    }

    fn take(&self, datagram: &ManagementDatagram<'_>) {
        let Some(connections) = self.0.upgrade() else {
            return;
        };
        let port = lock(&connections.list).port(&datagram.port.gid);
        if let Some(port) = port {
            port.pass_on(Transmit {
                ports: Ports {
                    local: Gid(datagram.from),
                    remote: Gid(datagram.to),
                },
                datagram: Box::new(*datagram.bytes),
            });
        }
    }
}
