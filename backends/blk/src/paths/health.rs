//! Whether a path can be used, and what becomes of a request that has failed on one.
//!
//! A path is up until a request fails on it in a way that can be the path's fault. Then it is
//! suspected: nothing new goes over it until it is known whether it is broken. It is if the request
//! succeeds over another path, or if a read of its own fails; it is not if that read succeeds. A
//! failed path comes back when it can be read again and is still a path to the same disk.

use super::{PathId, PathSet};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// Rounds over all paths after which an error is the request's own, although the paths are well.
const ROUNDS: u8 = 3;

/// Health of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Health {
    /// In use.
    Up,
    /// A request has failed on it; it is being probed.
    Suspect,
    /// Not in use.
    Failed,
}

/// The health of a path, which several threads change.
#[derive(Debug)]
pub struct Changing(AtomicU8);

impl Changing {
    /// An `Up` path.
    #[must_use]
    pub fn new() -> Self {
        Self(AtomicU8::new(Health::Up as u8))
    }

    /// The present health.
    #[must_use]
    pub fn get(&self) -> Health {
        match self.0.load(Ordering::Acquire) {
            0 => Health::Up,
            1 => Health::Suspect,
            _ => Health::Failed,
        }
    }

    /// Changes it if it is what it is believed to be. Returns whether it was.
    pub fn change(&self, from: Health, to: Health) -> bool {
        let (from, to) = (from as u8, to as u8);
        let changed = self
            .0
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
        changed.is_ok()
    }
}

impl Default for Changing {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether an error can be the path's fault. Errors of the medium are none of those (`ENODATA`,
/// `EILSEQ`: blk_status_t of Linux).
#[must_use]
pub fn can_be_the_path(errno: i32) -> bool {
    matches!(
        errno,
        libc::EIO
            | libc::ENODEV
            | libc::ENXIO
            | libc::ETIMEDOUT
            | libc::ENOLINK
            | libc::EREMOTEIO
            | libc::EBADFD
            | libc::EBADF
            | libc::ESHUTDOWN
            | libc::ECONNRESET
            | libc::ENOTCONN
            | libc::ENOMEDIUM
            // A device that has gone has no blocks.
            | libc::ENOSPC
    )
}

/// A request that has failed, and waits.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// The paths on which it has failed in this round.
    pub tried: PathSet,
    /// Completed rounds.
    pub rounds: u8,
    /// It is the business of this path, and that of another only if this one has failed: a flush.
    pub belongs_to: Option<PathId>,
    /// For how long it has waited.
    pub waited: Duration,
}

/// Decision about a request that waits for a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Retry over another path.
    Again,
    /// Begin a new round: retry over any path.
    NewRound,
    /// Keep waiting.
    Wait,
    /// Answer with an error.
    GiveUp,
}

impl Waiting {
    /// Decides. `up` and `suspect` are the paths of which that is known; it waits for `patience` at
    /// most.
    #[must_use]
    pub fn decide(&self, up: PathSet, suspect: PathSet, patience: Duration) -> Decision {
        if self.waited >= patience {
            return Decision::GiveUp;
        }
        if let Some(path) = self.belongs_to {
            if suspect.contains(path) {
                return Decision::Wait;
            }
            if up.contains(path) {
                return self.next_round();
            }
        }
        if !up.outside(self.tried).is_empty() {
            return Decision::Again;
        }
        if !suspect.is_empty() || up.is_empty() {
            return Decision::Wait;
        }
        // All paths are well, and it fails on each.
        self.next_round()
    }

    fn next_round(&self) -> Decision {
        if self.rounds + 1 < ROUNDS {
            Decision::NewRound
        } else {
            Decision::GiveUp
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LONG: Duration = Duration::from_secs(30);

    fn waiting(tried: u32, rounds: u8) -> Waiting {
        Waiting {
            tried: PathSet(tried),
            rounds,
            belongs_to: None,
            waited: Duration::ZERO,
        }
    }

    /// Decides, where these paths are up and those suspected: a bit each.
    fn decide(request: &Waiting, up: u32, suspect: u32) -> Decision {
        request.decide(PathSet(up), PathSet(suspect), LONG)
    }

    #[test]
    fn a_request_goes_over_every_path_that_is_up_and_then_waits_for_what_is_found() {
        assert_eq!(decide(&waiting(0b01, 0), 0b10, 0b01), Decision::Again);
        assert_eq!(decide(&waiting(0b11, 0), 0, 0b11), Decision::Wait);
        // One was found to be well: perhaps it has just come back.
        assert_eq!(decide(&waiting(0b11, 0), 0b01, 0), Decision::NewRound);
        assert_eq!(decide(&waiting(0b11, 2), 0b01, 0), Decision::GiveUp);
        // None is: it may take some time.
        assert_eq!(decide(&waiting(0b11, 0), 0, 0), Decision::Wait);
        let late = Waiting {
            waited: LONG,
            ..waiting(0b11, 0)
        };
        assert_eq!(decide(&late, 0, 0), Decision::GiveUp);
    }

    #[test]
    fn a_flush_goes_over_another_path_only_if_its_own_has_failed() {
        let flush = Waiting {
            belongs_to: Some(PathId::FIRST),
            ..waiting(0b01, 0)
        };
        assert_eq!(decide(&flush, 0b10, 0b01), Decision::Wait);
        assert_eq!(decide(&flush, 0b11, 0), Decision::NewRound);
        let third = Waiting { rounds: 2, ..flush };
        assert_eq!(decide(&third, 0b11, 0), Decision::GiveUp);
        assert_eq!(decide(&flush, 0b10, 0), Decision::Again);
        assert_eq!(decide(&flush, 0, 0), Decision::Wait);
    }

    #[test]
    fn a_path_is_suspected_first_and_verdicts_do_not_overtake_each_other() {
        let path = Changing::new();
        assert!(path.change(Health::Up, Health::Suspect));
        assert!(!path.change(Health::Up, Health::Suspect));
        // A request has succeeded elsewhere: the probe that is under way comes too late.
        assert!(path.change(Health::Suspect, Health::Failed));
        assert!(!path.change(Health::Suspect, Health::Up));
        assert!(path.change(Health::Failed, Health::Up));
        assert_eq!(path.get(), Health::Up);
    }

    #[test]
    fn errors_of_the_medium_are_the_guests() {
        assert!(can_be_the_path(libc::EIO) && can_be_the_path(libc::ENODEV));
        assert!(!can_be_the_path(libc::ENODATA) && !can_be_the_path(libc::EILSEQ));
        assert!(!can_be_the_path(libc::EINVAL) && !can_be_the_path(libc::EOPNOTSUPP));
    }

    proptest! {
        /// Whatever paths do, a request is done again only over a path that is up, and ends.
        #[test]
        fn every_request_ends(
            states in prop::collection::vec((0..8_u32, 0..8_u32), 1..200), flush: bool,
        ) {
            let mut request = waiting(0b001, 0);
            request.belongs_to = flush.then_some(PathId::FIRST);
            for (n, (up, suspect)) in states.iter().enumerate() {
                let suspect = suspect & !up;
                request.waited = LONG * u32::try_from(n).unwrap() / 200;
                let tried = request.tried.0;
                match decide(&request, *up, suspect) {
                    Decision::Again => {
                        let next = up & !tried;
                        prop_assert!(next != 0);
                        prop_assert!(!flush || (up | suspect) & 1 == 0);
                        request.tried = PathSet(tried | next & next.wrapping_neg());
                    }
                    Decision::NewRound => {
                        prop_assert!(*up != 0 && request.rounds < ROUNDS);
                        prop_assert!(flush || suspect == 0);
                        request.tried = PathSet(up & up.wrapping_neg());
                        request.rounds += 1;
                    }
                    Decision::Wait => prop_assert!(up & !tried == 0 || flush),
                    Decision::GiveUp => return Ok(()),
                }
            }
            request.waited = LONG;
            prop_assert_eq!(decide(&request, 0b111, 0), Decision::GiveUp);
        }
    }
}
