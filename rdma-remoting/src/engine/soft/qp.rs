//! A queue pair of the software engine.

use super::attributes::{self, State};
use super::carrier::Carrier;
use super::common::{QpCommon, SharedState};
use super::context::Owner;
use super::fabric::{Fabric, QpName};
use super::groups::Groups;
use super::local_copy::LocalCopy;
use super::objects::{Receives, SoftCq};
use super::requester::Requester;
use super::target::Target;
use super::transport::Transport;
use super::waits::Requesting;
use crate::address::GroupGid;
use crate::counters;
use crate::engine::{Budget, Destination, EngineQp, Progress, QpNumber, QpSpec, Turn};
use crate::memory::Binder;
use crate::traffic::Count;
use farlane_abi::Errno;
use farlane_abi::queue::MAX_WQ_ENTRIES;
use farlane_abi::rdma::{QP_AV, QPT_GSI, QpAttr};
use farlane_sys::sync::lock;
use std::sync::{Arc, Mutex, MutexGuard};

/// A queue pair.
///
/// Locks, in order: those of the context's objects and of its [`Ready`](crate::ready::Ready),
/// `attr`, `requester`, the target's responder (a requester takes its peer's, never a second one),
/// then the end of a domain's queue, a shared receive queue's, the fabric's, what the completion
/// queues lock, the receiver's waiter, the inbox of whoever is scheduled and the asynchronous event
/// ring's, of which none is held while another is taken but the first.
pub struct SoftQp<C: Carrier = LocalCopy> {
    fabric: Arc<Fabric>,
    target: Arc<Target>,
    attr: Mutex<Held>,
    requester: Mutex<Requester<C>>,
}

/// The attributes as the program set them.
#[derive(Clone, Copy, Default)]
struct Held {
    attr: QpAttr,
    /// The port that the address vector named when it was set, once it was. Other ports may be
    /// called so meanwhile.
    port: Option<Destination>,
}

impl Held {
    /// The peer of a queue pair that goes to state `to`.
    fn peer(&self, transport: Transport, to: State) -> Option<QpName> {
        let named = attributes::peer(transport, to, &self.attr)?;
        Some(QpName {
            destination: self.port.unwrap_or(named.destination),
            ..named
        })
    }
}

impl SoftQp {
    /// A queue pair in the reset state.
    ///
    /// # Errors
    /// `ENOMEM` where there are `limit`, `EBUSY` for a second one of general services of its port,
    /// `EINVAL` for objects of another engine.
    pub fn new(
        owner: &Owner,
        spec: QpSpec,
        transport: Transport,
        fabric: &Arc<Fabric>,
        limit: u32,
    ) -> Result<Self, Errno> {
        let carrier = LocalCopy(Arc::clone(fabric));
        Self::over(carrier, owner, spec, transport, fabric, limit)
    }
}

impl<C: Carrier> SoftQp<C> {
    /// The same, whose messages go by this carrier.
    ///
    /// # Errors
    /// Those of [`new`](SoftQp::new).
    pub fn over(
        carrier: C,
        owner: &Owner,
        spec: QpSpec,
        transport: Transport,
        fabric: &Arc<Fabric>,
        limit: u32,
    ) -> Result<Self, Errno> {
        let (sends, recvs) = (spec.sends, Receives::try_from(spec.recvs)?);
        let (send_cq, recv_cq) = (
            SoftCq::sink_of(spec.send_cq)?,
            SoftCq::sink_of(spec.recv_cq)?,
        );
        let of = &owner.spec;
        let number = (spec.kind == QPT_GSI).then_some(QpNumber::GENERAL_SERVICES);
        let target = fabric.add(of.address, number, limit, |number| {
            let common = QpCommon {
                number,
                transport,
                address: of.address,
                names: fabric.names.clone(),
                pd: spec.pd,
                memory: Arc::clone(&owner.memory),
                binder: Binder::new_one(),
                receiver: Arc::default(),
                requesting: Requesting::new(spec.schedule),
                signal_all: spec.signal_all,
                send_cq,
                recv_cq,
                events: spec.events,
                counters: Arc::clone(&of.counters),
                traffic: Arc::clone(&of.traffic),
                limit: Arc::clone(&of.limit),
                admission: of.admission.clone(),
                account: of.account.clone(),
                state: SharedState::default(),
            };
            Target::new(common, recvs)
        })?;
        counters::count(&target.common.counters.queue_pairs, 1);
        Ok(Self {
            fabric: Arc::clone(fabric),
            target,
            attr: Mutex::default(),
            requester: Mutex::new(Requester::new(sends, carrier, fabric.transfers.clone())),
        })
    }

    fn common(&self) -> &QpCommon {
        &self.target.common
    }

    fn requester(&self) -> MutexGuard<'_, Requester<C>> {
        lock(&self.requester)
    }

    fn attr(&self) -> MutexGuard<'_, Held> {
        lock(&self.attr)
    }

    /// It has changed otherwise than by a request: it has a turn, and so has its peer, where that
    /// waits for it.
    fn changed(&self, peer: Option<QpName>) {
        let qp = self.common();
        qp.requesting.schedule();
        qp.receiver.changed();
        if let Some(peer) = peer.and_then(|peer| self.fabric.find(peer)) {
            peer.common.requesting.peer_changed();
        }
    }

    fn flush(&self, budget: Budget) -> Progress {
        let mut budget = budget.spend();
        let qp = self.common();
        let most = budget.flushes(MAX_WQ_ENTRIES);
        let sends = match qp.state() {
            State::SendError | State::Error => self.requester().flush(qp, most),
            _ => self.requester().flush_first_ones(qp, most),
        };
        budget.flushed(sends);
        // A send queue that makes no sense ends receiving, too.
        let recvs = match qp.state() {
            State::Error => {
                let most = budget.flushes(MAX_WQ_ENTRIES);
                self.target.responder().flush(qp, most)
            }
            _ => 0,
        };
        budget.flushed(recvs);
        if sends + recvs > 0 {
            qp.traffic.add([
                (Count::Flushed, sends.into()),
                (Count::FlushedReceives, recvs.into()),
            ]);
        }
        Progress {
            worked: sends + recvs > 0,
            used: budget.used(),
            more: sends + recvs > 0 && budget.is_over(),
            ..Progress::default()
        }
    }
}

impl<C: Carrier> EngineQp for SoftQp<C> {
    fn number(&self) -> QpNumber {
        self.common().number
    }

    fn modify(&self, mask: u32, attr: &QpAttr) -> Result<(), Errno> {
        let mut held = self.attr();
        let mut requester = self.requester();
        let mut responder = self.target.responder();
        let qp = self.common();
        let from = qp.state();
        let (to, new) = attributes::modify(qp.transport, from, &held.attr, mask, attr)?;
        let port = match mask & QP_AV {
            _ if to == State::Reset => None,
            0 => held.port,
            _ => Some(qp.resolve(Destination::of(&new)).ok_or(Errno::EACCES)?),
        };
        if (from, to) == (State::SendError, State::ReadyToSend) {
            requester.go_on();
        }
        *held = Held { attr: new, port };
        let peer = held.peer(qp.transport, to);
        if to == State::Reset {
            requester.reset();
            responder.reset();
        } else {
            requester.set(to, &new, peer);
            responder.set(&new, peer);
        }
        self.common().state.set(to);
        drop((responder, requester));
        self.changed(peer);
        Ok(())
    }

    fn query(&self) -> QpAttr {
        let attr = self.attr();
        let state = self.common().state();
        QpAttr {
            qp_state: state as u8,
            cur_qp_state: state as u8,
            sq_draining: u8::from(state == State::Draining && self.requester().is_active()),
            ..attr.attr
        }
    }

    fn attach(&self, group: GroupGid) -> Result<(), Errno> {
        if self.common().transport != Transport::Datagram {
            return Err(Errno::EINVAL);
        }
        self.requester().carrier().attach(group, &self.target)
    }

    fn detach(&self, group: GroupGid) -> Result<(), Errno> {
        let was_attached = self.requester().carrier().detach(group, &self.target);
        was_attached.then_some(()).ok_or(Errno::EINVAL)
    }

    fn is_attached(&self) -> bool {
        Groups::has(&self.target)
    }

    fn progress(&self, turn: Turn) -> Progress {
        self.target.pass_on();
        match self.common().state() {
            State::Reset | State::Init | State::ReadyToReceive => Progress::default(),
            state @ (State::ReadyToSend | State::Draining) => {
                let is_draining = state == State::Draining;
                let mut requester = self.requester();
                if requester.has_to_flush() {
                    drop(requester);
                    return self.flush(turn.budget);
                }
                requester.run(self.common(), turn, is_draining)
            }
            State::SendError | State::Error => self.flush(turn.budget),
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
            State::SendError => self.requester().has_work(),
            State::Error => self.requester().has_work() || self.target.responder().has_to_flush(),
        }
    }

    fn pause(&self, paused: bool) {
        // In the order of locks; whoever moves bytes of this queue pair holds one of the two.
        let attr = self.attr();
        let mut requester = self.requester();
        let mut responder = self.target.responder();
        requester.pause(paused);
        responder.pause(paused);
        drop((requester, responder));
        let qp = self.common();
        self.changed(attr.peer(qp.transport, qp.state()));
    }

    fn destroy(&self) {
        let common = self.common();
        self.fabric.remove(common.address, common.number);
        let mut requester = self.requester();
        requester.carrier().forget(&self.target);
        let mut responder = self.target.responder();
        self.common().state.set(State::Reset);
        requester.reset();
        responder.reset();
        drop((requester, responder));
        self.common().receiver.changed();
        counters::uncount(&self.common().counters.queue_pairs, 1);
    }
}
