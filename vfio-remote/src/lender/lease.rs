//! Who holds a device: at most one, for as long as it renews.
//!
//! offered -> held -> returning -> offered, or quarantined for good. While a device is returning
//! nobody can take it: its mappings go and it is reset. The term of one that is held begins when it
//! has been made ready for its holder. Times are handed in, so that all of it can be tested.

use crate::protocol::message::{Fence, Refusal};
use std::time::{Duration, Instant, SystemTime, SystemTimeError};

/// Numbers of leases: each is greater than all before, also before a restart of the lender, as
/// long as the host's clock does not go back further than the lender was away.
#[derive(Debug)]
pub(crate) struct Fences {
    last: u64,
}

impl Fences {
    /// Those of a lender that starts at this time.
    ///
    /// # Errors
    /// It is before 1970, so the numbers would be those of leases that were.
    pub fn at(started: SystemTime) -> Result<Self, SystemTimeError> {
        let since = started.duration_since(SystemTime::UNIX_EPOCH)?;
        let last = since.as_secs() * 1_000_000 + u64::from(since.subsec_micros());
        Ok(Self { last })
    }

    fn next(&mut self) -> Fence {
        self.last += 1;
        Fence(self.last)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Offered,
    Held {
        fence: Fence,
        holder: String,
        since: Instant,
        /// None before it is ready.
        until: Option<Instant>,
    },
    Returning {
        fence: Fence,
        holder: String,
    },
    /// It could not be made as new: why.
    Quarantined(String),
}

/// The lease of one device.
#[derive(Debug)]
pub(crate) struct Lease {
    state: State,
    fences: Fences,
    term: Duration,
}

/// Why a device cannot be taken now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TakeError {
    /// Somebody holds it.
    Held(String),
    /// It is being returned: a moment.
    Returning,
    /// It never can: why.
    Quarantined(String),
}

impl Lease {
    /// An offered device, leases of which have these numbers and end `term` after they were renewed
    /// last.
    pub fn new(fences: Fences, term: Duration) -> Self {
        Self {
            state: State::Offered,
            fences,
            term,
        }
    }

    /// Makes `holder` the one who holds it. The term begins with [`begin`](Self::begin).
    pub fn take(&mut self, holder: &str, now: Instant) -> Result<Fence, TakeError> {
        match &self.state {
            State::Held { holder, .. } => Err(TakeError::Held(holder.clone())),
            State::Quarantined(why) => Err(TakeError::Quarantined(why.clone())),
            State::Returning { .. } => Err(TakeError::Returning),
            State::Offered => {
                let fence = self.fences.next();
                self.state = State::Held {
                    fence,
                    holder: holder.to_owned(),
                    since: now,
                    until: None,
                };
                Ok(fence)
            }
        }
    }

    /// The device is ready: the time that this took is not the holder's.
    pub fn begin(&mut self, named: Fence, now: Instant) {
        let term = self.term;
        if let State::Held { fence, until, .. } = &mut self.state
            && *fence == named
        {
            *until = Some(now + term);
        }
    }

    /// Goes on holding.
    pub fn renew(&mut self, named: Fence, now: Instant) -> Result<(), Refusal> {
        let term = self.term;
        match &mut self.state {
            State::Held {
                fence,
                until: Some(until),
                ..
            } if *fence == named && now < *until => {
                *until = now + term;
                Ok(())
            }
            _ => Err(Refusal::Ended(named)),
        }
    }

    /// When it ends unless it is renewed.
    pub fn until(&self, named: Fence) -> Option<Instant> {
        match &self.state {
            State::Held { fence, until, .. } if *fence == named => *until,
            _ => None,
        }
    }

    /// Nobody may use the device under this lease any more. True if it was held until now.
    pub fn begin_return(&mut self, named: Fence) -> bool {
        if let State::Held { fence, holder, .. } = &self.state
            && *fence == named
        {
            self.state = State::Returning {
                fence: *fence,
                holder: holder.clone(),
            };
            return true;
        }
        false
    }

    /// The device is as new.
    pub fn finish_return(&mut self, named: Fence) {
        if matches!(&self.state, State::Returning { fence, .. } if *fence == named) {
            self.state = State::Offered;
        }
    }

    /// The device cannot be made as new: nobody can take it any more.
    pub fn quarantine(&mut self, named: Fence, why: String) {
        if matches!(&self.state, State::Returning { fence, .. } if *fence == named) {
            self.state = State::Quarantined(why);
        }
    }

    /// A device that nobody has cannot be taken any more. One that somebody has is quarantined when
    /// it has been returned.
    pub fn withdraw(&mut self, why: String) {
        if self.state == State::Offered {
            self.state = State::Quarantined(why);
        }
    }

    /// Why nobody can take it any more.
    pub fn quarantined(&self) -> Option<&str> {
        match &self.state {
            State::Quarantined(why) => Some(why),
            _ => None,
        }
    }

    /// Whether nobody has it, or is just returning it.
    pub fn is_free(&self) -> bool {
        matches!(self.state, State::Offered | State::Quarantined(_))
    }

    /// Who has it, and is not just returning it.
    pub fn held_by(&self) -> Option<&str> {
        match &self.state {
            State::Held { holder, .. } => Some(holder),
            _ => None,
        }
    }

    /// Holder, number of the lease, and for how long it has been held.
    pub fn holder(&self, now: Instant) -> Option<(String, Fence, Duration)> {
        match &self.state {
            State::Offered | State::Quarantined(_) => None,
            State::Held {
                fence,
                holder,
                since,
                ..
            } => Some((
                holder.clone(),
                *fence,
                now.saturating_duration_since(*since),
            )),
            State::Returning { fence, holder } => {
                Some((format!("{holder} (returning)"), *fence, Duration::ZERO))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TERM: Duration = Duration::from_secs(3);

    fn offered() -> Lease {
        Lease::new(Fences::at(SystemTime::now()).unwrap(), TERM)
    }

    #[test]
    fn leases_are_numbered_by_a_clock_that_is_set() {
        let epoch = SystemTime::UNIX_EPOCH;
        let first = |started| Fences::at(started).map(|mut fences| fences.next());
        assert_eq!(first(epoch).ok(), Some(Fence(1)));
        let later = epoch + Duration::from_millis(1_500);
        assert_eq!(first(later).ok(), Some(Fence(1_500_001)));
        assert!(first(epoch - Duration::from_micros(1)).is_err());
    }

    #[test]
    fn a_lease_that_is_not_renewed_ends() {
        let start = Instant::now();
        let mut lease = offered();
        let fence = lease.take("a", start).unwrap();
        lease.begin(fence, start);
        assert_eq!(
            lease.take("b", start).unwrap_err(),
            TakeError::Held("a".into())
        );
        lease.renew(fence, start + Duration::from_secs(2)).unwrap();
        assert_eq!(lease.until(fence), Some(start + Duration::from_secs(5)));
        assert_eq!(
            lease.renew(fence, start + Duration::from_secs(5)),
            Err(Refusal::Ended(fence))
        );
    }

    #[test]
    fn the_term_begins_when_the_device_is_ready() {
        let start = Instant::now();
        let mut lease = offered();
        let fence = lease.take("a", start).unwrap();
        assert_eq!(lease.until(fence), None);
        assert_eq!(lease.renew(fence, start), Err(Refusal::Ended(fence)));
        let ready = start + 10 * TERM;
        assert_eq!(
            lease.take("b", ready).unwrap_err(),
            TakeError::Held("a".into())
        );
        lease.begin(fence, ready);
        assert_eq!(lease.until(fence), Some(ready + TERM));
        lease.renew(fence, ready).unwrap();
    }

    #[test]
    fn a_device_is_offered_again_only_when_it_is_as_new() {
        let now = Instant::now();
        let mut lease = offered();
        let first = lease.take("a", now).unwrap();
        assert!(lease.begin_return(first));
        assert_eq!(lease.take("b", now).unwrap_err(), TakeError::Returning);
        assert_eq!(lease.held_by(), None);
        assert_eq!(lease.renew(first, now), Err(Refusal::Ended(first)));
        lease.finish_return(first);
        let second = lease.take("b", now).unwrap();
        lease.begin(second, now);
        assert!(second > first);
        // What belongs to the first lease does nothing to the second.
        assert!(!lease.begin_return(first));
        lease.finish_return(first);
        lease.begin(first, now + TERM);
        assert_eq!(lease.until(second), Some(now + TERM));
    }

    #[test]
    fn a_device_that_is_not_as_new_is_never_taken_again() {
        let now = Instant::now();
        let mut lease = offered();
        let fence = lease.take("a", now).unwrap();
        lease.quarantine(fence, "not while it is held".into());
        assert_eq!(lease.quarantined(), None);
        assert!(lease.begin_return(fence));
        lease.quarantine(fence, "it is broken".into());
        lease.finish_return(fence);
        let broken = TakeError::Quarantined("it is broken".into());
        assert_eq!(lease.take("b", now), Err(broken));
        assert_eq!(lease.renew(fence, now), Err(Refusal::Ended(fence)));
        assert!(lease.is_free() && lease.holder(now).is_none());
    }

    proptest! {
        #[test]
        fn there_is_never_more_than_one_holder_and_fences_grow(
            steps in prop::collection::vec((0..5_u8, 0..3_usize, 0..4000_u64), 0..60),
        ) {
            let mut now = Instant::now();
            let mut lease = offered();
            let mut last = Fence(0);
            let mut fences = [None; 3];
            for (step, who, wait) in steps {
                now += Duration::from_millis(wait);
                match (step, fences[who]) {
                    (0, _) => if let Ok(fence) = lease.take("x", now) {
                        prop_assert!(fence > last);
                        last = fence;
                        fences[who] = Some(fence);
                    },
                    (1, Some(fence)) => {
                        prop_assert!(lease.renew(fence, now).is_err() || fence == last);
                    }
                    (2, Some(fence)) => prop_assert!(!lease.begin_return(fence) || fence == last),
                    (3, Some(fence)) => lease.finish_return(fence),
                    (4, Some(fence)) => lease.begin(fence, now),
                    _ => {}
                }
                prop_assert!(lease.is_free() == lease.holder(now).is_none());
            }
        }
    }
}
