//! What happens because nothing has.

use super::Manager;
use crate::connection::{State, Timer};
use crate::event::Event;
use crate::fields::{CommId, PrivateData, RejectReason};
use std::time::Instant;

impl Manager {
    /// When [`advance`](Self::advance) has something to do.
    #[must_use]
    pub fn next_timer(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// It is this time, or later than it was.
    pub fn advance(&mut self, now: Instant) {
        while self.expire_one(now) {}
    }

    /// Lets one timer end that has ended by then. Returns whether there was one.
    pub fn expire_one(&mut self, now: Instant) -> bool {
        let Some(&(at, id)) = self.timers.first() else {
            return false;
        };
        if at > now {
            return false;
        }
        self.timers.pop_first();
        let timer = self.connections.get_mut(&id).and_then(|c| c.timer.take());
        if let Some(timer) = timer {
            self.expired(now, id, timer);
        }
        true
    }

    fn expired(&mut self, now: Instant, id: CommId, timer: Timer) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        // Where the last one was not taken yet it is not sent again.
        let is_unsent = !connection.unsent.is_empty();
        let retries = match is_unsent {
            true => Some(timer.retries),
            false => timer.retries.checked_sub(1),
        };
        match (connection.state, retries) {
            (
                State::ReqSent { .. }
                | State::RepSent { .. }
                | State::DreqSent
                | State::SidrReqSent
                | State::Timewait,
                Some(retries),
            ) => {
                let at = now + connection.timeout;
                if !is_unsent {
                    self.send_last(id);
                }
                self.set_timer(id, Some(Timer { at, retries }));
            }
            (State::ReqSent { .. }, None) => {
                self.send_rej(id, RejectReason::TIMEOUT, PrivateData::default());
                self.end_of(id);
                self.tell(Event::Unreachable { id });
            }
            (State::RepSent { .. }, None) => {
                self.send_rej(id, RejectReason::TIMEOUT, PrivateData::default());
                self.wait_out_rejected(now, id);
                self.tell(Event::Unreachable { id });
            }
            (State::DreqSent, None) => {
                self.wait_out(now, id);
                self.tell(Event::Disconnected { id });
            }
            (State::SidrReqSent, None) => {
                self.end(id);
                self.tell(Event::Unreachable { id });
            }
            (State::Timewait, None) => {
                self.end(id);
                self.tell(Event::TimewaitExit { id });
            }
            (State::Answered, _) => self.end(id),
            (
                State::ReqReceived
                | State::RepReceived
                | State::Established
                | State::DreqReceived
                | State::SidrReqReceived
                | State::Ended,
                _,
            ) => {}
        }
    }
}
