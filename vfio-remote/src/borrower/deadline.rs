//! The time that a VMM leaves us.

use crate::lender::unmapping;
use std::time::{Duration, Instant};

/// How long one request of a VMM, which waits five seconds for us, waits for lenders and other
/// devices: for all that it asks of them.
const PATIENCE: Duration = Duration::from_millis(4500);
/// So much of it is left when a device that goes on with what it has begun is waited for no more:
/// so that its last word comes in time.
const LAST_WORD: Duration = Duration::from_millis(500);

/// How long a thread that nobody waits for has what a VMM may wait for.
const TURN: Duration = Duration::from_secs(3);
/// A lender that is there answers within so much.
const ANSWER: Duration = Duration::from_millis(200);
/// So much is left to a request that has waited for another thread: for something to be shown, and
/// a bit. With what a device that is given up takes, it is still over when a VMM gives up.
const LEAST: Duration = Duration::from_millis(300);

/// When all is over that one request waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    /// That of a request that begins now.
    pub fn begin() -> Self {
        Self(Instant::now() + PATIENCE)
    }

    /// That of something that nobody waits for, and that begins now.
    pub fn of_a_turn() -> Self {
        Self(Instant::now() + TURN)
    }

    /// That of something that others wait for until then.
    pub fn at(until: Instant) -> Self {
        Self(until)
    }

    fn at_least(self, time: Duration) -> Self {
        Self(self.0.max(Instant::now() + time))
    }

    /// The same for a request that has waited for another thread meanwhile: that time was not its
    /// own, nor the lender's.
    pub fn after_a_wait(self) -> Self {
        self.at_least(LEAST)
    }

    /// The same, with time for a lender to take memory away once.
    pub fn for_one_unmapping(self) -> Self {
        self.at_least(unmapping::PATIENCE + LAST_WORD + ANSWER)
    }

    /// The same for the last thing that a lender is asked: that the time was used up before may be
    /// no fault of its.
    pub fn for_the_last_word(self) -> Self {
        self.at_least(ANSWER)
    }

    /// When the last answer has to be there.
    pub fn answered_by(self) -> Instant {
        self.0
    }

    /// So much earlier, as far as there is time for that: something else is still to be done.
    pub fn earlier(self, by: Duration) -> Self {
        let earlier = self.0.checked_sub(by).unwrap_or(self.0);
        Self(earlier.max(Instant::now() + ANSWER).min(self.0))
    }

    /// Whether a lender can still answer what it answers at once, such as where memory is.
    pub fn has_time_to_ask(self) -> bool {
        Instant::now() + ANSWER <= self.0
    }

    /// Whether a lender can still take memory away, or say that its device is at it, as late as so
    /// much from now.
    pub fn has_time(self, after: Duration) -> bool {
        Instant::now() + after + unmapping::PATIENCE + LAST_WORD <= self.0
    }
}
