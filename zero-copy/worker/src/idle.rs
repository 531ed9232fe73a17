//! How a controller's worker waits for the next command.
//!
//! After the last command it polls, giving way, if that has found the next command before: it does
//! not where the driver waits for this very CPU. Where commands come at a steady pace, it naps for
//! the first part of the gap, so that whoever takes the completion has the CPU, and polls for the
//! rest. Then it naps, with a look at the doorbells between two naps; then it sleeps until somebody
//! rings. A nap costs two switches and lets others have the CPU in the meantime, a doorbell that
//! has to be rung costs a trap and messages between processes: so it naps for several times as long
//! as the driver usually takes from one command to the next.

use std::time::{Duration, Instant};

/// Polling without a nap while nobody else wants the CPU.
const SPIN: Duration = Duration::from_micros(30);
/// Usual gaps between two commands of which the first part is napped through and the rest polled:
/// the end of the nap, and waking, fall into the gap, and the command finds the worker awake.
const FORESEEN: std::ops::Range<Duration> = Duration::from_micros(70)..Duration::from_millis(1);
/// What it takes to wake.
const WAKING: Duration = Duration::from_micros(25);
/// A `sched_yield` that took longer than this: somebody else had the CPU.
const YIELD_TAKEN: Duration = Duration::from_micros(4);
/// Polls between two looks at the clock.
const POLLS_BETWEEN_LOOKS: u32 = 16;
/// Commands without polling after it was in vain: at first, and at most.
const FIRST_TRUST: u32 = 16;
const LAST_TRUST: u32 = 1024;
/// The first nap.
const NAP: Duration = Duration::from_micros(15);
/// A nap while doorbells ring.
const LONGEST_NAP: Duration = Duration::from_micros(100);
/// Napping, at least and at most, before sleeping.
const FIRST_PATIENCE: Duration = Duration::from_micros(400);
const LAST_PATIENCE: Duration = Duration::from_millis(4);
/// Naps there have to be before sleeping: time passes, too, while others have the CPU.
const FEWEST_NAPS: u32 = 4;
/// Naps while doorbells do not ring: after some milliseconds, after two seconds.
const SHARED_NAP: Duration = Duration::from_millis(1);
const SHARED_IDLE_NAP: Duration = Duration::from_millis(10);
const SHARED_IDLE: Duration = Duration::from_secs(2);

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Look again.
    Look,
    /// Wait for so long at most, or a notice.
    Nap(Duration),
    /// Arrange for being woken, look again, and wait.
    Sleep,
}

/// Decides how to wait.
#[derive(Debug)]
pub struct Idle {
    /// Whether doorbells ring.
    rings: bool,
    since: Option<Instant>,
    polls: u32,
    naps: u32,
    /// It has polled since the last command.
    spun: bool,
    /// Commands to go before polling is tried again.
    contended: u32,
    trust: u32,
    /// Average time without work between two commands, where it is short.
    gap: Duration,
}

impl Idle {
    /// For doorbells that ring, or do not.
    pub fn new(rings: bool) -> Self {
        Self {
            rings,
            since: None,
            polls: 0,
            naps: 0,
            spun: false,
            contended: 0,
            trust: FIRST_TRUST,
            gap: Duration::ZERO,
        }
    }

    /// There was work.
    pub fn worked(&mut self) {
        if let Some(since) = self.since.take() {
            let gap = since.elapsed().min(2 * LAST_PATIENCE);
            self.gap = (self.gap * 7 + gap) / 8;
            self.contended = self.contended.saturating_sub(1);
            if self.spun && self.naps > 0 {
                self.in_vain();
            } else if self.spun && self.contended == 0 {
                self.trust = FIRST_TRUST;
            }
        }
        self.spun = false;
        self.polls = 0;
        self.naps = 0;
    }

    /// Polling found nothing, or took the CPU from somebody else.
    fn in_vain(&mut self) {
        if self.contended == 0 {
            self.contended = self.trust;
            self.trust = (self.trust * 2).min(LAST_TRUST);
        }
    }

    /// Time to nap before sleeping: four times the usual gap. Where gaps are so long that this
    /// cannot bridge them, napping is in vain.
    fn patience(&self) -> Duration {
        if self.gap > LAST_PATIENCE {
            FIRST_PATIENCE
        } else {
            (4 * self.gap).clamp(FIRST_PATIENCE, LAST_PATIENCE)
        }
    }

    /// There was none; says what to do. Has given way if that is to look again.
    pub fn idle(&mut self) -> Rest {
        self.polls += 1;
        if self.since.is_some() && !self.polls.is_multiple_of(POLLS_BETWEEN_LOOKS) {
            std::hint::spin_loop();
            return Rest::Look;
        }
        let now = Instant::now();
        let waited = now - *self.since.get_or_insert(now);
        let mut polling = Duration::ZERO..SPIN;
        if self.contended == 0 && FORESEEN.contains(&self.gap) {
            let nap = (self.gap / 2).saturating_sub(WAKING);
            if waited < nap / 2 {
                self.polls = POLLS_BETWEEN_LOOKS - 1;
                return Rest::Nap(nap);
            }
            polling = Duration::ZERO..2 * self.gap;
        }
        if self.contended == 0 && polling.contains(&waited) {
            self.spun = true;
            std::thread::yield_now();
            if now.elapsed() > YIELD_TAKEN {
                self.in_vain();
            }
            return Rest::Look;
        }
        self.polls = POLLS_BETWEEN_LOOKS - 1;
        // It may be idle for years.
        self.naps = self.naps.saturating_add(1);
        let nap = (waited / 4).max(NAP);
        if !self.rings {
            let longest = if waited < SHARED_IDLE {
                SHARED_NAP
            } else {
                SHARED_IDLE_NAP
            };
            return Rest::Nap(nap.min(longest));
        }
        if waited < self.patience() || self.naps <= FEWEST_NAPS {
            Rest::Nap(nap.min(LONGEST_NAP))
        } else {
            Rest::Sleep
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_doorbells_that_ring_it_sleeps_in_the_end() {
        let mut idle = Idle::new(true);
        let mut naps = 0;
        loop {
            match idle.idle() {
                Rest::Look => (),
                Rest::Nap(nap) => {
                    assert!(nap <= LONGEST_NAP);
                    naps += 1;
                    std::thread::sleep(nap);
                }
                Rest::Sleep => break,
            }
        }
        assert!(naps >= FEWEST_NAPS);
    }

    #[test]
    fn it_naps_as_often_as_it_likes() {
        let mut idle = Idle::new(false);
        idle.since = Instant::now().checked_sub(Duration::from_secs(3));
        idle.polls = POLLS_BETWEEN_LOOKS - 1;
        idle.naps = u32::MAX;
        assert_eq!(idle.idle(), Rest::Nap(SHARED_IDLE_NAP));
    }

    #[test]
    fn with_doorbells_that_do_not_it_naps_for_longer_and_longer() {
        let mut idle = Idle::new(false);
        idle.since = Instant::now().checked_sub(Duration::from_millis(1));
        idle.polls = POLLS_BETWEEN_LOOKS - 1;
        assert!(matches!(idle.idle(), Rest::Nap(nap) if nap >= Duration::from_micros(250)));
        idle.since = Instant::now().checked_sub(Duration::from_secs(1));
        assert_eq!(idle.idle(), Rest::Nap(SHARED_NAP));
        idle.since = Instant::now().checked_sub(Duration::from_secs(3));
        assert_eq!(idle.idle(), Rest::Nap(SHARED_IDLE_NAP));
    }

    #[test]
    fn polling_in_vain_is_tried_less_and_less_often() {
        let mut idle = Idle::new(true);
        let mut polled = 0;
        for _ in 0..FIRST_TRUST * 8 {
            while idle.idle() == Rest::Look {}
            polled += u32::from(idle.spun);
            idle.worked();
        }
        // A loaded machine may have it nap where it would poll, never the reverse.
        assert!((1..=4).contains(&polled), "{polled}");
    }

    #[test]
    fn patience_follows_the_gaps() {
        let mut idle = Idle::new(true);
        assert_eq!(idle.patience(), FIRST_PATIENCE);
        idle.gap = Duration::from_micros(500);
        assert_eq!(idle.patience(), Duration::from_millis(2));
        idle.gap = Duration::from_millis(7);
        assert_eq!(idle.patience(), FIRST_PATIENCE);
    }
}
