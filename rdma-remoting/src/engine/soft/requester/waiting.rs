//! A request that waits: until when, and how often it is tried again.

use super::super::attributes::{ack_timeout, rnr_delay};
use super::super::carrier::Carrier;
use super::super::common::QpCommon;
use super::super::responder::NotReady;
use super::Requester;
use crate::engine::earlier;
use crate::traffic::Count;
use farlane_abi::queue::{WC_STATUS_RETRY_EXC_ERR, WC_STATUS_RNR_RETRY_EXC_ERR};
use std::mem::discriminant;
use std::time::{Duration, Instant};

/// `rnr_retry` that means for ever.
pub(super) const RNR_FOR_EVER: u8 = 7;

/// How long at least a request that is tried for ever waits for a receive request of whose arrival
/// nobody tells. The receiver's timer may be shorter (IBTA 9.7.5.2.8: a requester waits for that
/// long at least); so many looks a second cost a worker a hundredth of its time.
const LEAST_LOOK_DELAY: Duration = Duration::from_micros(100);

/// When a word that is in use for long is looked at again.
const WORD_DELAY: Duration = Duration::from_millis(1);

/// Why a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The peer does not answer.
    Answer,
    /// The peer has no receive request.
    Receiver(NotReady),
    /// The word of an atomic operation is in use for long.
    Word,
}

impl<C: Carrier> Requester<C> {
    /// Counts a wait. Returns when to look again, or the status to fail with.
    pub(super) fn wait(
        &mut self,
        qp: &QpCommon,
        wait: Wait,
        now: Instant,
    ) -> Result<Option<Instant>, u8> {
        let until = self.wait_for(qp, wait, now)?;
        Ok(match wait {
            Wait::Word => earlier(until, Some(now + WORD_DELAY)),
            Wait::Answer | Wait::Receiver(_) => until,
        })
    }

    /// The same but for when it is to look again.
    fn wait_for(&mut self, qp: &QpCommon, wait: Wait, now: Instant) -> Result<Option<Instant>, u8> {
        let Some(active) = self.active.as_mut() else {
            return Ok(None);
        };
        let count = |what| qp.traffic.add([(what, 1)]);
        // IBTA 9.7.5.2.8: no retry at all, not one after a while.
        if matches!(wait, Wait::Receiver(_)) && active.rnr_retries_left == 0 {
            count(Count::NotReady);
            return Err(WC_STATUS_RNR_RETRY_EXC_ERR);
        }
        let is_for_ever = matches!(wait, Wait::Receiver(_)) && self.attr.rnr_retry == RNR_FOR_EVER;
        let delay: Option<Duration> = match wait {
            Wait::Answer | Wait::Word => ack_timeout(self.attr.timeout),
            Wait::Receiver(answer) if is_for_ever => {
                (!answer.rings).then(|| rnr_delay(answer.timer).max(LEAST_LOOK_DELAY))
            }
            Wait::Receiver(answer) => Some(rnr_delay(answer.timer)),
        };
        let until = match active.waiting {
            // The timer runs as it was set: a peer that changes it does not begin it again.
            Some((same, until)) if discriminant(&same) == discriminant(&wait) => until,
            _ => {
                if matches!(wait, Wait::Receiver(_)) {
                    count(Count::NotReady);
                }
                let until = delay.map(|d| now + d);
                active.waiting = Some((wait, until));
                return Ok(until);
            }
        };
        let (Some(until), Some(delay)) = (until, delay) else {
            return Ok(None);
        };
        if now < until {
            return Ok(Some(until));
        }
        count(match wait {
            Wait::Receiver(_) => Count::NotReady,
            Wait::Answer | Wait::Word => Count::Timeouts,
        });
        if is_for_ever {
            active.waiting = Some((wait, Some(now + delay)));
            self.carrier.timer_ended();
            return Ok(Some(now + delay));
        }
        let (left, status) = match wait {
            Wait::Answer | Wait::Word => (&mut active.retries_left, WC_STATUS_RETRY_EXC_ERR),
            Wait::Receiver(_) => (&mut active.rnr_retries_left, WC_STATUS_RNR_RETRY_EXC_ERR),
        };
        *left = left.checked_sub(1).ok_or(status)?;
        if matches!(wait, Wait::Receiver(_)) && *left == 0 {
            // The last retry has met no receive request either; an answer that is missing is missed
            // when its timer has passed.
            return Err(status);
        }
        let until = now + delay;
        active.waiting = Some((wait, Some(until)));
        self.carrier.timer_ended();
        Ok(Some(until))
    }
}
