//! What a peer's requester reaches of a queue pair.

use super::common::QpCommon;
use super::responder::Responder;
use crate::request::RecvWqe;
use crate::work_queue::WorkSource;
use farlane_sys::sync::lock;
use farlane_worker::wake;
use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, MutexGuard};

/// The end of a connection that the peer's requests go to.
pub struct Target {
    pub common: QpCommon,
    responder: Mutex<Responder>,
    /// The peer's requester waits for a receive request.
    awaited: AtomicU32,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target")
            .field("number", &self.common.number)
            .field("state", &self.common.state())
            .finish_non_exhaustive()
    }
}

impl Target {
    pub fn new(common: QpCommon, recvs: Box<dyn WorkSource<RecvWqe>>) -> Self {
        Self {
            common,
            responder: Mutex::new(Responder::new(recvs)),
            awaited: AtomicU32::new(0),
        }
    }

    pub fn responder(&self) -> MutexGuard<'_, Responder> {
        lock(&self.responder)
    }

    /// The peer's requester waits for a receive request of this one.
    pub fn wait_for_receive(&self) {
        wake::wait_for_other(&self.awaited);
    }

    /// Whether the peer's requester waits for a receive request, and there is one.
    pub fn has_awaited(&self) -> bool {
        wake::is_awaited(&self.awaited) && self.responder().has_work()
    }

    /// Has the peer's requester woken, where it waits for a receive request and there is one.
    pub fn pass_on(&self) {
        if self.has_awaited() && wake::must_pass_on(&self.awaited) {
            self.common.wakes.wake();
        }
    }

    /// It has changed otherwise than by a receive request.
    pub fn changed(&self) {
        self.common.wakes.changed();
        if wake::must_pass_on(&self.awaited) {
            self.common.wakes.wake();
        }
    }
}
