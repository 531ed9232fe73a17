//! A connection, or a request for a queue pair of datagrams, at one end.

use crate::event::{ListenerId, Ports, Route};
use crate::fields::{CommId, Gid, Psn, Qpn, RetryCount, TimeExponent, Transport};
use crate::manager::Unsent;
use crate::message::{Datagram, TransactionId};
use crate::orphans::Orphan;
use crate::service::ServiceId;
use std::time::{Duration, Instant};

/// States of IBTA 12.9 and 12.11, by what has been sent or received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// A request was sent.
    ReqSent {
        /// The peer has said that its answer takes long.
        is_acknowledged: bool,
    },
    /// A request was received; its program decides.
    ReqReceived,
    /// A reply was sent.
    RepSent {
        /// The peer has said that its answer takes long.
        is_acknowledged: bool,
    },
    /// A reply was received; its program decides.
    RepReceived,
    /// Both may send.
    Established,
    /// It is to end.
    DreqSent,
    /// The peer ends it; the program has not answered.
    DreqReceived,
    /// It has ended, and packets may still be under way.
    Timewait,
    /// A queue pair of datagrams was asked for.
    SidrReqSent,
    /// One is asked for; the program decides.
    SidrReqReceived,
    /// A request was rejected, answered or given up. Its peer may not know, or a copy of it may be
    /// under way: it gets the same answer again.
    Answered,
    /// It is over.
    Ended,
}

/// What both queue pairs are to know of each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) transport: Transport,
    pub(crate) route: Route,
    pub(crate) local_qpn: Qpn,
    /// Sequence number of the first packet to the local queue pair.
    pub(crate) local_psn: Psn,
    pub(crate) remote_qpn: Qpn,
    /// Sequence number of the first packet to the peer's.
    pub(crate) remote_psn: Psn,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) retry_count: RetryCount,
    pub(crate) rnr_retry_count: RetryCount,
}

/// What waits for a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timer {
    pub(crate) at: Instant,
    /// How often the last message is sent again.
    pub(crate) retries: u8,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) ports: Ports,
    /// Whose shares it takes of what peers share.
    pub(crate) peer: Gid,
    /// What the peer calls it, where it has said so.
    pub(crate) remote_id: Option<CommId>,
    pub(crate) service_id: ServiceId,
    pub(crate) state: State,
    /// The exchange that answers belong to.
    pub(crate) transaction: TransactionId,
    /// Not of datagrams.
    pub(crate) terms: Option<Terms>,
    /// How long the peer may take to answer.
    pub(crate) timeout: Duration,
    /// How often a message is sent again.
    pub(crate) max_retries: u8,
    pub(crate) timer: Option<Timer>,
    /// What is sent again where an answer is missing, or where it was lost.
    pub(crate) last: Option<Box<Datagram>>,
    /// What it sends in its turn.
    pub(crate) unsent: Unsent,
    /// Whether the peer has begun it, and it is one of the peer's share.
    pub(crate) is_peers: bool,
    /// At which it waits for somebody to claim it.
    pub(crate) unclaimed_at: Option<ListenerId>,
    /// Why it is there, since it has no user.
    pub(crate) orphan: Option<Orphan>,
}

impl Connection {
    /// How long packets may be under way.
    pub(crate) fn under_way(&self) -> TimeExponent {
        self.terms
            .as_ref()
            .map_or(TimeExponent::default(), |terms| terms.route.ack_timeout)
    }

    /// Whether its last message is sent again, after a while.
    pub(crate) fn tells(&self) -> bool {
        self.timer.is_some_and(|timer| timer.retries > 0)
    }

    /// Whether a message is its peer's: from that port, by both names.
    pub(crate) fn is_of(&self, ports: Ports, remote_id: CommId) -> bool {
        self.ports == ports && self.remote_id == Some(remote_id)
    }
}
