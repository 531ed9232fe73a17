//! A queue pair of the software engine.

use super::attributes::{self, State};
use super::common::{QpCommon, SharedState};
use super::fabric::Fabric;
use super::requester::Requester;
use super::target::Target;
use super::waits::Receiver;
use crate::counters;
use crate::engine::{EngineQp, Progress, QpNumber, QpSpec, Turn};
use farlane_abi::Errno;
use farlane_abi::rdma::QpAttr;
use farlane_sys::sync::lock;
use std::sync::{Arc, Mutex, MutexGuard};

/// Requests of each kind that are flushed in one turn.
const FLUSHES_PER_TURN: u32 = 256;

/// A queue pair of a reliable connection (RC).
///
/// Locks, in order: `attr`, `requester`, the target's responder (a requester takes its peer's,
/// never a second one), then what the completion queues lock.
pub struct SoftQp {
    fabric: Arc<Fabric>,
    target: Arc<Target>,
    /// Guards the attributes as the program set them.
    attr: Mutex<QpAttr>,
    requester: Mutex<Requester>,
}

impl SoftQp {
    /// A queue pair in the reset state; none where there are `limit`.
    pub fn new(spec: QpSpec, fabric: &Arc<Fabric>, limit: u32) -> Option<Self> {
        let (sends, recvs) = (spec.sends, spec.recvs);
        let target = fabric.add(spec.address, limit, |number| {
            let common = QpCommon {
                number,
                address: spec.address,
                pd: spec.pd,
                memory: spec.memory,
                answers: Arc::clone(&fabric.answers),
                receiver: Receiver::default(),
                schedule: spec.schedule,
                signal_all: spec.signal_all,
                send_cq: spec.send_cq,
                recv_cq: spec.recv_cq,
                events: spec.events,
                counters: spec.counters,
                limit: spec.limit,
                state: SharedState::default(),
            };
            Target::new(common, recvs)
        })?;
        counters::count(&target.common.counters.queue_pairs, 1);
        // Whoever waits for one of this number finds one, which does not answer yet.
        target.common.tell_waiting();
        Some(Self {
            fabric: Arc::clone(fabric),
            target,
            attr: Mutex::new(QpAttr::default()),
            requester: Mutex::new(Requester::new(sends, Arc::clone(fabric))),
        })
    }

    fn common(&self) -> &QpCommon {
        &self.target.common
    }

    fn requester(&self) -> MutexGuard<'_, Requester> {
        lock(&self.requester)
    }

    fn attr(&self) -> MutexGuard<'_, QpAttr> {
        lock(&self.attr)
    }

    fn flush(&self) -> Progress {
        let qp = self.common();
        let sends = self.requester().flush(qp, FLUSHES_PER_TURN);
        let recvs = self.target.responder().flush(qp, FLUSHES_PER_TURN);
        counters::count(&qp.counters.flushed, u64::from(sends) + u64::from(recvs));
        Progress {
            worked: sends + recvs > 0,
            ..Progress::default()
        }
    }
}

impl EngineQp for SoftQp {
    fn number(&self) -> QpNumber {
        self.common().number
    }

    fn modify(&self, mask: u32, attr: &QpAttr) -> Result<(), Errno> {
        let mut held = self.attr();
        let mut requester = self.requester();
        let mut responder = self.target.responder();
        let (to, new) = attributes::modify(self.common().state(), &held, mask, attr)?;
        *held = new;
        if to == State::Reset {
            requester.reset();
            responder.reset();
        } else {
            let peer = attributes::peer(to, &new);
            requester.set(&new, peer);
            responder.set(&new, peer);
        }
        self.common().state.set(to);
        drop((responder, requester, held));
        self.common().changed();
        Ok(())
    }

    fn query(&self) -> QpAttr {
        let attr = self.attr();
        let state = self.common().state();
        QpAttr {
            qp_state: state as u8,
            cur_qp_state: state as u8,
            sq_draining: u8::from(state == State::Draining && self.requester().is_active()),
            ..*attr
        }
    }

    fn progress(&self, turn: Turn) -> Progress {
        self.target.pass_on();
        match self.common().state() {
            State::Reset | State::Init | State::ReadyToReceive => Progress::default(),
            state @ (State::ReadyToSend | State::Draining) => {
                let is_draining = state == State::Draining;
                self.requester().run(self.common(), turn, is_draining)
            }
            State::Error => self.flush(),
        }
    }

    fn is_ready(&self) -> bool {
        if self.target.has_awaited() {
            return true;
        }
        match self.common().state() {
            State::Reset | State::Init | State::ReadyToReceive => false,
            state @ (State::ReadyToSend | State::Draining) => {
                let is_draining = state == State::Draining;
                self.requester().is_ready(self.common(), is_draining)
            }
            State::Error => self.requester().has_work() || self.target.responder().has_work(),
        }
    }

    fn pause(&self, paused: bool) {
        // In the order of locks; whoever moves bytes of this queue pair holds one of the two.
        let mut requester = self.requester();
        let mut responder = self.target.responder();
        requester.pause(paused);
        responder.pause(paused);
        drop((requester, responder));
        self.common().changed();
    }

    fn destroy(&self) {
        let common = self.common();
        self.fabric.remove(common.address, common.number);
        let mut requester = self.requester();
        let mut responder = self.target.responder();
        self.common().state.set(State::Reset);
        requester.reset();
        responder.reset();
        drop((requester, responder));
        self.common().wait_for_none();
        self.common().changed();
        counters::uncount(&self.common().counters.queue_pairs, 1);
    }
}
