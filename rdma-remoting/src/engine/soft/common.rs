//! What both halves of a queue pair go by.

use super::attributes::State;
use super::fabric::Names;
use super::transport::Transport;
use super::waits::{Receiver, Requesting};
use crate::completion_queue::CompletionSink;
use crate::counters::Counters;
use crate::engine::{Admission, Destination, PortAddress, QpNumber, RawGid};
use crate::ledger::Account;
use crate::memory::{Binder, MemoryTable, PdHandle};
use crate::traffic::Traffic;
use farlane_sys::log_limit::LogLimit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Lives of requesters and responders that have begun.
static LIVES: AtomicU64 = AtomicU64::new(0);

/// One life of half a queue pair, from reset to reset. No other half, and no other life of the same
/// one, has its equal: a successor with the same number is told from whom it succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life(u64);

impl Life {
    /// A life that no half has had.
    pub fn begin() -> Self {
        Self(LIVES.fetch_add(1, Ordering::Relaxed))
    }
}

/// The identity of a queue pair, its state, and where its completions and events go.
pub struct QpCommon {
    pub number: QpNumber,
    pub transport: Transport,
    pub address: PortAddress,
    /// What ports are called.
    pub names: Names,
    pub pd: PdHandle,
    pub memory: Arc<MemoryTable>,
    /// For which it binds memory windows.
    pub binder: Binder,
    /// The peer's requester, while it waits for a receive request of this one.
    pub receiver: Arc<Receiver>,
    /// Its own requester, while it waits for the peer to answer.
    pub requesting: Requesting,
    pub signal_all: bool,
    pub send_cq: Arc<dyn CompletionSink>,
    pub recv_cq: Arc<dyn CompletionSink>,
    pub events: Box<dyn Fn(u32) + Send + Sync>,
    pub counters: Arc<Counters>,
    pub traffic: Arc<Traffic>,
    pub limit: Arc<LogLimit>,
    /// Whom its port has to do with; all where there is none.
    pub admission: Option<Arc<dyn Admission>>,
    /// Who pays for its groups.
    pub account: Option<Arc<Account>>,
    pub state: SharedState,
}

/// The state of a queue pair: an atomic, because an error on either side moves it without the
/// other's lock. It begins as Reset.
#[derive(Debug)]
pub struct SharedState(AtomicU8);

impl Default for SharedState {
    fn default() -> Self {
        Self(AtomicU8::new(State::Reset as u8))
    }
}

impl SharedState {
    pub fn get(&self) -> State {
        State::from_wire(self.0.load(Ordering::Acquire)).unwrap_or(State::Error)
    }

    pub fn set(&self, to: State) {
        self.0.store(to as u8, Ordering::Release);
    }

    /// Goes to SQE from a state in which it sends. Returns whether it did.
    fn fail_sending(&self) -> bool {
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                let sends = now == State::ReadyToSend as u8 || now == State::Draining as u8;
                sends.then_some(State::SendError as u8)
            })
            .is_ok()
    }

    /// Goes to the error state from any state but reset. Returns whether it was not there already.
    fn fail(&self) -> bool {
        let error = State::Error as u8;
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                (now != State::Reset as u8 && now != error).then_some(error)
            })
            .is_ok()
    }
}

impl QpCommon {
    /// Whether its port takes datagrams of the port with this GID, and may send it some.
    pub fn admits(&self, gid: &RawGid) -> bool {
        let admission = self.admission.as_ref();
        admission.is_none_or(|admission| admission.admits(gid))
    }

    /// The port of a peer whose name was valid when it was set, by the GID of its address. No port
    /// may have had it then: whoever has it now must be one that this one may have to do with.
    pub fn resolve(&self, destination: Destination) -> Option<Destination> {
        let resolved = self.names.resolve(destination);
        match resolved {
            Destination::Gid(gid) if resolved != destination && !self.admits(&gid) => None,
            _ => Some(resolved),
        }
    }

    /// Whether its port has this GID now.
    pub fn is_called(&self, gid: RawGid) -> bool {
        let own = self.address.gid;
        gid == own || self.names.resolve(Destination::Gid(gid)) == Destination::Gid(own)
    }

    pub fn state(&self) -> State {
        self.state.get()
    }

    /// Goes to the error state from any state but reset. Returns whether it was not there already.
    pub fn enter_error(&self) -> bool {
        let entered = self.state.fail();
        if entered {
            // It has requests to flush; its peer waits for nothing any more.
            self.requesting.schedule();
            self.receiver.changed();
        }
        entered
    }

    /// A send request completes in error: goes where its transport goes then.
    pub fn enter_send_error(&self) {
        if self.transport.after_send_error() == State::Error {
            self.enter_error();
        } else if self.state.fail_sending() {
            // It has requests to flush; whoever sends to it is answered as before.
            self.requesting.schedule();
        }
    }
}
