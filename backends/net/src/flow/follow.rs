//! Where the process of a flow runs, told from the queues on which the guest sends: the flow is to
//! follow it.
//!
//! A NIC learns a flow's queue from the queue on which its other direction is sent (Linux: `tun`'s
//! automatic steering; virtio 1.2, 5.1.5.6.1). To take the last one is not enough: a Linux guest
//! sends on the queue of the CPU that it happens to be on, and for a received stream that is in
//! turn the CPU of the *process* that reads and the CPU of the *receive queue*, where the soft
//! interrupt acknowledges. After a process has moved, both are seen mixed until the flow has moved
//! too, and the last one would make it flap.
//!
//! * A frame on *another* queue than the flow's shows that somebody is there: only a process can
//!   be, the soft interrupt runs where the flow's queue is. A frame on the flow's own queue shows
//!   little when it is a bare acknowledgement, and that the process may be here when it carries
//!   data. So other queues gain by what is sent there; data at home takes that away,
//!   acknowledgements at home hardly do. Among other queues the majority wins (Boyer and Moore).
//! * Timers, and what waits in queues, still send from the old CPU after a move: for some time
//!   after it (`stay`) votes are not counted. If they still come in its second half, two processes
//!   share the flow: the time doubles, up to a bound. A time without any brings it back to the
//!   least.

use super::parse::Signal;
use crate::pairs::PairId;

/// How fast a flow follows its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FollowLimits {
    /// Weight of votes that moves a flow: 1 for an acknowledgement, 2 for anything else.
    pub threshold: u8,
    /// Microseconds that a flow stays at least.
    pub stay_us: u32,
    /// The same for a flow that two processes share.
    pub longest_stay_us: u32,
}

impl Default for FollowLimits {
    fn default() -> Self {
        Self {
            threshold: 3,
            stay_us: 2_000,
            longest_stay_us: 64_000,
        }
    }
}

/// Acknowledgements at home that take away one vote.
const ACKNOWLEDGEMENTS_AT_HOME: u8 = 32;

/// Votes for the queue of a flow's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessVotes {
    candidate: PairId,
    score: u8,
    at_home: u8,
    /// Others voted in the second half of the stay.
    shared: bool,
    /// Microseconds; zero: the least.
    stay_us: u32,
    moved_at: u64,
}

impl ProcessVotes {
    /// A frame was sent on `queue`; the flow's queue is `home`. Returns the queue to which it is to
    /// move.
    pub fn count(
        &mut self,
        home: PairId,
        queue: PairId,
        signal: Signal,
        now_us: u64,
        follow: &FollowLimits,
    ) -> Option<PairId> {
        let weight = if signal == Signal::Acknowledge { 1 } else { 2 };
        if queue == home {
            self.at_home(weight);
            return None;
        }
        let stay = self.stay_us.max(follow.stay_us);
        let stayed = now_us.saturating_sub(self.moved_at);
        if self.moved_at != 0 && stayed < u64::from(stay) {
            self.shared |= stayed >= u64::from(stay) / 2;
            return None;
        }
        if self.shared {
            // Once more, for longer; at the longest the votes count all the same.
            self.shared = false;
            if stay < follow.longest_stay_us {
                self.stay_us = stay.saturating_mul(2).min(follow.longest_stay_us);
                self.moved_at = now_us;
                return None;
            }
        } else if self.moved_at != 0 && stayed >= 2 * u64::from(stay) {
            self.stay_us = 0;
        }
        if self.candidate == queue || self.score == 0 {
            self.candidate = queue;
            self.score = self.score.saturating_add(weight);
        } else {
            self.score = self.score.saturating_sub(weight);
        }
        if self.score < follow.threshold {
            return None;
        }
        self.score = 0;
        self.at_home = 0;
        self.moved_at = now_us.max(1);
        Some(queue)
    }

    fn at_home(&mut self, weight: u8) {
        if weight > 1 {
            self.score = self.score.saturating_sub(weight);
            return;
        }
        self.at_home += 1;
        if self.at_home >= ACKNOWLEDGEMENTS_AT_HOME {
            self.at_home = 0;
            self.score = self.score.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests;
