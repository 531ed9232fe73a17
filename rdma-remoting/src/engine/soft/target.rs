//! What a peer's requester reaches of a queue pair.

use super::common::QpCommon;
use super::objects::Receives;
use super::responder::Responder;
use crate::address::GroupGid;
use farlane_sys::sync::lock;
use std::sync::{Mutex, MutexGuard};

/// The end of a connection that the peer's requests go to.
pub struct Target {
    pub common: QpCommon,
    responder: Mutex<Responder>,
    /// Multicast groups that it is in.
    pub groups: Mutex<Vec<GroupGid>>,
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
    pub fn new(common: QpCommon, recvs: Receives) -> Self {
        Self {
            common,
            responder: Mutex::new(Responder::new(recvs)),
            groups: Mutex::default(),
        }
    }

    pub fn responder(&self) -> MutexGuard<'_, Responder> {
        lock(&self.responder)
    }

    /// Whether the peer's requester waits for a receive request, and there is one.
    pub fn has_awaited(&self) -> bool {
        self.common.receiver.is_awaited() && self.responder().can_receive()
    }

    /// Has the peer's requester look, where it waits for a receive request and there is one.
    pub fn pass_on(&self) {
        if self.has_awaited() {
            self.common.receiver.pass_on();
        }
    }
}
