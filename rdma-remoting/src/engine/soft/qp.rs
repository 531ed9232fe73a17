//! A queue pair of the software engine.

use super::attributes::{self, State};
use super::fabric::Fabric;
use super::requester::Requester;
use super::responder::Responder;
use crate::completion_queue::CompletionSink;
use crate::counters::{self, Live};
use crate::engine::{EngineQp, PortAddress, Progress, QpNumber, QpSpec, Turn};
use crate::memory::{MemoryTable, PdHandle};
use farlane_abi::Errno;
use farlane_abi::rdma::QpAttr;
use farlane_sys::log_limit::LogLimit;
use farlane_sys::sync::lock;
use farlane_worker::wake;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

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

/// Requests of each kind that are flushed in one turn.
const FLUSHES_PER_TURN: u32 = 256;

/// A queue pair of a reliable connection (RC).
///
/// Locks, in order: `attr`, `requester`, `responder` (a requester takes its peer's, never a second
/// one), then what the completion queues lock. The state is an atomic of its own because an error
/// on either side moves it without the other's lock.
pub struct SoftQp {
    pub number: QpNumber,
    pub address: PortAddress,
    pub pd: PdHandle,
    pub memory: Arc<MemoryTable>,
    pub fabric: Arc<Fabric>,
    pub signal_all: bool,
    pub send_cq: Arc<dyn CompletionSink>,
    pub recv_cq: Arc<dyn CompletionSink>,
    pub events: Box<dyn Fn(u32) + Send + Sync>,
    pub counters: Arc<Live>,
    pub limit: Arc<LogLimit>,
    state: AtomicU8,
    /// Guards the attributes as the program set them.
    attr: Mutex<QpAttr>,
    requester: Mutex<Requester>,
    responder: Mutex<Responder>,
    /// The peer's requester waits for a receive request.
    awaited: AtomicU32,
}

impl std::fmt::Debug for SoftQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SoftQp")
            .field("number", &self.number)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl SoftQp {
    pub fn new(number: QpNumber, spec: QpSpec, fabric: Arc<Fabric>) -> Self {
        counters::add(&spec.counters.queue_pairs, 1);
        Self {
            number,
            address: spec.address,
            pd: spec.pd,
            memory: spec.memory,
            fabric,
            signal_all: spec.signal_all,
            send_cq: spec.send_cq,
            recv_cq: spec.recv_cq,
            events: spec.events,
            counters: spec.counters,
            limit: spec.limit,
            state: AtomicU8::new(0),
            attr: Mutex::new(QpAttr::default()),
            requester: Mutex::new(Requester::new(spec.sends)),
            responder: Mutex::new(Responder::new(spec.recvs)),
            awaited: AtomicU32::new(0),
        }
    }

    /// Whether these attributes name its port.
    pub fn is_named_by(&self, attr: &QpAttr) -> bool {
        if attr.is_global == 0 {
            attr.dlid.get() == self.address.lid
        } else {
            attr.dgid == self.address.gid
        }
    }

    pub fn state(&self) -> State {
        State::from_wire(self.state.load(Ordering::Acquire)).unwrap_or(State::Error)
    }

    /// Goes to the error state from any state but reset. Returns whether it was not there already.
    pub fn enter_error(&self) -> bool {
        let error = State::Error as u8;
        let entered = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                (now != State::Reset as u8 && now != error).then_some(error)
            })
            .is_ok();
        if entered {
            // Its own worker has requests to flush, its peer's waits for nothing any more.
            self.fabric.wake();
        }
        entered
    }

    /// The peer's requester waits for a receive request of this one.
    pub fn wait_for_receive(&self) {
        wake::wait_for_other(&self.awaited);
    }

    /// Whether the peer's requester waits for a receive request, and there is one.
    fn has_awaited(&self) -> bool {
        wake::is_awaited(&self.awaited) && self.responder().has_work()
    }

    /// It has changed otherwise than by a receive request.
    fn changed(&self) {
        self.fabric.changed();
        if wake::must_pass_on(&self.awaited) {
            self.fabric.wake();
        }
    }

    pub fn responder(&self) -> MutexGuard<'_, Responder> {
        lock(&self.responder)
    }

    fn requester(&self) -> MutexGuard<'_, Requester> {
        lock(&self.requester)
    }

    fn attr(&self) -> MutexGuard<'_, QpAttr> {
        lock(&self.attr)
    }

    fn flush(&self) -> Progress {
        let sends = self.requester().flush(self, FLUSHES_PER_TURN);
        let recvs = self.responder().flush(self, FLUSHES_PER_TURN);
        counters::add(&self.counters.flushed, u64::from(sends) + u64::from(recvs));
        Progress {
            worked: sends + recvs > 0,
            ..Progress::default()
        }
    }
}

impl EngineQp for SoftQp {
    fn number(&self) -> QpNumber {
        self.number
    }

    fn modify(&self, mask: u32, attr: &QpAttr) -> Result<(), Errno> {
        let mut held = self.attr();
        let mut requester = self.requester();
        let mut responder = self.responder();
        let (to, new) = attributes::modify(self.state(), &held, mask, attr)?;
        *held = new;
        if to == State::Reset {
            requester.reset();
            responder.reset();
        } else {
            requester.set(&new);
            responder.set(&new);
        }
        self.state.store(to as u8, Ordering::Release);
        drop((responder, requester, held));
        self.changed();
        Ok(())
    }

    fn query(&self) -> QpAttr {
        let attr = self.attr();
        let state = self.state();
        QpAttr {
            qp_state: state as u8,
            cur_qp_state: state as u8,
            sq_draining: u8::from(state == State::Draining && self.requester().is_active()),
            ..*attr
        }
    }

    fn progress(&self, turn: Turn) -> Progress {
        if self.has_awaited() && wake::must_pass_on(&self.awaited) {
            self.fabric.wake();
        }
        match self.state() {
            State::Reset | State::Init | State::ReadyToReceive => Progress::default(),
            state @ (State::ReadyToSend | State::Draining) => {
                self.requester().run(self, turn, state == State::Draining)
            }
            State::Error => self.flush(),
        }
    }

    fn is_ready(&self) -> bool {
        if self.has_awaited() {
            return true;
        }
        match self.state() {
            State::Reset | State::Init | State::ReadyToReceive => false,
            state @ (State::ReadyToSend | State::Draining) => {
                self.requester().is_ready(self, state == State::Draining)
            }
            State::Error => self.requester().has_work() || self.responder().has_work(),
        }
    }

    fn pause(&self, paused: bool) {
        // In the order of locks; whoever moves bytes of this queue pair holds one of the two.
        let mut requester = self.requester();
        let mut responder = self.responder();
        requester.pause(paused);
        responder.pause(paused);
        drop((requester, responder));
        self.changed();
    }

    fn destroy(&self) {
        self.fabric.remove(self.number);
        let mut requester = self.requester();
        let mut responder = self.responder();
        self.state.store(State::Reset as u8, Ordering::Release);
        requester.reset();
        responder.reset();
        drop((requester, responder));
        self.changed();
        counters::sub(&self.counters.queue_pairs, 1);
    }
}
