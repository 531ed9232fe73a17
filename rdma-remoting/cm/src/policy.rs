//! Times and numbers that are policy.

use crate::fields::{CmRetries, TimeExponent};
use std::time::Duration;

/// How long a peer may take to answer a message, and the manager does at most: 4.3 s, as with
/// Linux's `rdma_cm`.
pub(crate) const RESPONSE_TIMEOUT: TimeExponent = TimeExponent::of(20);
/// How often a message is sent again, as with Linux's `rdma_cm`: a peer is unreachable after some
/// 75 s.
pub(crate) const RETRIES: CmRetries = CmRetries::MAX;
/// How long a program may take to answer, as it is told a peer that asks again: 69 s, as with
/// Linux's `rdma_cm`.
pub(crate) const SERVICE_TIMEOUT: TimeExponent = TimeExponent::of(24);
/// How long this adapter takes to acknowledge a packet at most, as its devices say it
/// (`local_ca_ack_delay`): 134 ms, as Linux's software RDMA.
pub(crate) const ACK_DELAY: TimeExponent = TimeExponent::of(15);
/// How long the answer to a request is kept for who asks again: 137 s. A peer that was told that
/// the answer takes long asks after about half of that.
pub(crate) const ANSWER_KEPT: Duration = TimeExponent::of(SERVICE_TIMEOUT.get() + 1).duration();
/// How often a rejection of what was accepted is sent again: for 30 s with Linux's timeout.
pub(crate) const REJECTIONS: u8 = 7;
/// How long a peer may take at most to answer that a connection ends, whatever it has asked for:
/// 8.6 s, so that what is sent again as often as it may be is over after 137 s.
pub(crate) const END_TIMEOUT: Duration = TimeExponent::of(RESPONSE_TIMEOUT.get() + 1).duration();
/// The shortest time of a peer's choice that is kept: 17 ms. With a shorter one a peer would have
/// messages sent as fast as it likes.
const SHORTEST: TimeExponent = TimeExponent::of(12);
/// The shortest time, of those of a peer's choice, after which a message is sent again: 268 ms. As
/// many connections as a peer may have ask for few messages a second.
const SHORTEST_REPEAT: TimeExponent = TimeExponent::of(16);
/// The longest one: 69 s. With a longer one a peer would have what it has made kept for hours.
const LONGEST: TimeExponent = SERVICE_TIMEOUT;

/// The part of all connections that may be of no user any more and not answered by their peers,
/// which share that: who never answers holds few of what a user may have.
pub(crate) const ENDING: usize = 4;

/// A time of a peer's choice, between the shortest and the longest.
pub(crate) fn bounded(time: TimeExponent) -> Duration {
    time.clamp(SHORTEST, LONGEST).duration()
}

/// The same, of a time after which a message is sent again.
pub(crate) fn bounded_repeat(time: TimeExponent) -> Duration {
    bounded(time.max(SHORTEST_REPEAT))
}

/// How much a manager has at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections and requests that have a user, or wait for one. Of those that peers have begun
    /// a peer has at most half of what is left by all others, rounded up: beyond that its
    /// requests are dropped. A peer is a port where it is known which one has a GID
    /// ([`Manager::with_homes`](crate::Manager::with_homes)), else a GID.
    pub connections: usize,
    /// Of these, requests of peers that nobody has claimed, which they share in the same way, as
    /// they do the backlog of a listener.
    pub requests: usize,
    /// Connections without a user that wait until nothing of them is under way any more. Beyond
    /// that the oldest of the peer that has most is forgotten. Those whose peer has not answered
    /// that they end are a quarter of `connections` besides, and counted as the user's still.
    pub orphans: usize,
    /// Listeners.
    pub listeners: usize,
    /// Requests that wait at a listener, whatever backlog it asks for.
    pub backlog: usize,
    /// Answers that wait to be sent, which peers share in the same way. What is beyond a peer's
    /// share is lost, as if the network had lost it.
    pub answers: usize,
}

impl Default for Limits {
    /// Those of a port: as many connections as Linux has of ids by default; its greatest backlog.
    fn default() -> Self {
        Self {
            connections: 65_536,
            requests: 8192,
            orphans: 4096,
            listeners: 4096,
            backlog: 1024,
            answers: 1024,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_of_a_peers_choice_is_neither_nothing_nor_hours() {
        assert_eq!(bounded(TimeExponent::of(0)), SHORTEST.duration());
        assert_eq!(bounded(TimeExponent::MAX), LONGEST.duration());
        assert_eq!(bounded(RESPONSE_TIMEOUT), RESPONSE_TIMEOUT.duration());
        assert!(SHORTEST.duration() > Duration::from_millis(16));
        assert!(LONGEST.duration() < Duration::from_secs(70));
    }
}
