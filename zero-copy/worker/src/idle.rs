//! How a worker waits for the next request: it polls, naps, and sleeps.
//!
//! Polling is free while nobody else wants the CPU, and finds work in a fraction of the time that
//! being woken takes. So a worker polls for about as long as being woken costs, which it measures:
//! a wait that its own time limit ends shows how much later than that the worker runs. What it
//! polls in vain beyond its policy's time comes out of a budget ([`policy`](crate::policy)).
//!
//! When somebody else wants the CPU (a `sched_yield`, or a group of polls, that takes long shows
//! it), a thread that polls is set back behind those that it kept waiting, while one that sleeps is
//! scheduled at once when it is woken. Polling then stops, and is tried again after a number of
//! waits that doubles each time it was still wrong.
//!
//! Where requests come at a steady pace, a worker that naps does so for the first part of the gap,
//! so that whoever takes the completion has the CPU, and polls for the rest; one that sleeps does
//! so at once where the gap is longer than a wake-up.

mod cost;

use crate::policy::{
    FEWEST_NAPS, FIRST_PATIENCE, FORESEEN, LAST_PATIENCE, LONGEST_NAP, NAP, Policy, Polling,
    SHARED_IDLE, SHARED_IDLE_NAP, SHARED_NAP, WAKING, Wait, YIELD_TAKEN,
};
use cost::{SpinBudget, WakeCost};
use std::time::{Duration, Instant};

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// Look again.
    Look,
    /// Wait for so long at most, or a notice.
    Nap(Duration),
    /// Arrange for being woken, look again, and wait, for so long at most where that is said.
    Sleep(Option<Duration>),
}

/// Decides how to wait.
#[derive(Debug)]
pub struct Idle {
    policy: Policy,
    /// When it was without work for the first time since it had some.
    since: Option<Instant>,
    looked: Option<Instant>,
    polls: u32,
    waits: u32,
    /// It has polled since the last request.
    spun: bool,
    /// Waits to go before polling is tried again.
    contended: u32,
    trust: u32,
    /// Average time without work between two requests, where it is short.
    gap: Duration,
    wake: WakeCost,
    budget: SpinBudget,
}

impl Idle {
    /// Waits by `policy`.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self {
            since: None,
            looked: None,
            polls: 0,
            waits: 0,
            spun: false,
            contended: 0,
            trust: policy.first_trust,
            gap: Duration::ZERO,
            wake: WakeCost::default(),
            budget: SpinBudget::default(),
            policy,
        }
    }

    /// There was work.
    pub fn worked(&mut self) {
        self.found(Instant::now);
    }

    fn found(&mut self, now: impl FnOnce() -> Instant) {
        if let Some(since) = self.since.take() {
            let has_waited = self.waits > 0;
            if self.policy.polling == Polling::WhereItPays {
                let mut gap = now().saturating_duration_since(since);
                if has_waited {
                    gap = gap.saturating_sub(self.wake.cost());
                }
                let gap = gap.min(2 * LAST_PATIENCE);
                self.gap = (self.gap * 7 + gap) / 8;
            }
            self.contended = self.contended.saturating_sub(u32::from(has_waited));
            match self.policy.polling {
                Polling::WhereItPays if self.spun && has_waited => self.in_vain(),
                _ if self.spun && self.contended == 0 => self.trust = self.policy.first_trust,
                _ => (),
            }
        }
        self.looked = None;
        self.spun = false;
        self.polls = 0;
        self.waits = 0;
    }

    /// The wait that [`idle`](Self::idle) has asked for begins at `now`. To be told where looking
    /// once more takes long: else that counts as the cost of being woken.
    pub fn waits(&mut self, now: Instant) {
        self.wake.begins(now);
    }

    /// The wait is over that [`idle`](Self::idle) has asked for.
    pub fn woke(&mut self) {
        self.woke_at(Instant::now());
    }

    fn woke_at(&mut self, now: Instant) {
        self.wake.woke(now);
        if self.policy.polling == Polling::Always {
            self.found(|| now);
        }
    }

    /// Polling found nothing, or took the CPU from somebody else.
    fn in_vain(&mut self) {
        if self.contended == 0 {
            self.contended = self.trust;
            self.trust = (self.trust * 2).min(self.policy.last_trust);
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
        let timed = self.since.is_some() || self.policy.polling == Polling::Always;
        if timed && self.contended == 0 && !self.polls.is_multiple_of(self.policy.polls) {
            std::hint::spin_loop();
            return Rest::Look;
        }
        self.look(Instant::now(), |now| {
            std::thread::yield_now();
            now.elapsed()
        })
    }

    /// What to do as of `now`; `give_way` says how long it took to be back.
    fn look(&mut self, now: Instant, give_way: impl FnOnce(Instant) -> Duration) -> Rest {
        let waited = now.saturating_duration_since(*self.since.get_or_insert(now));
        if self
            .looked
            .is_some_and(|then| now.saturating_duration_since(then) > self.policy.polls_taken)
        {
            self.in_vain();
        }
        if self.contended > 0 {
            if waited < self.policy.contended_spin {
                return Rest::Look;
            }
        } else {
            let spin = self.spin(now);
            let mut polling = spin;
            if FORESEEN.contains(&self.gap) {
                match self.policy.wait {
                    Wait::Sleep if self.gap > spin => polling = Duration::ZERO,
                    Wait::Sleep => (),
                    Wait::Naps | Wait::NapsThenSleep => {
                        let waking = self.wake.cost().max(WAKING);
                        let nap = (self.gap / 2).saturating_sub(waking);
                        if waited < nap / 2 {
                            return self.nap(now, nap);
                        }
                        polling = (2 * self.gap).min(self.budget.left(now)).max(spin);
                    }
                }
            }
            if waited < polling {
                self.spun = true;
                let took = give_way(now);
                self.looked = Some(now + took);
                if took > YIELD_TAKEN {
                    self.in_vain();
                }
                return Rest::Look;
            }
        }
        self.wait(now, waited)
    }

    /// Polling before a wait: as long as a wake-up costs, as far as the budget allows.
    fn spin(&mut self, now: Instant) -> Duration {
        let (wanted, least) = (self.wake.cost(), self.policy.spin);
        if wanted <= least {
            return least;
        }
        wanted.min(self.budget.left(now)).max(least)
    }

    fn nap(&mut self, now: Instant, nap: Duration) -> Rest {
        self.polls = self.policy.polls - 1;
        self.looked = None;
        self.wake.wait(now, Some(nap));
        Rest::Nap(nap)
    }

    fn wait(&mut self, now: Instant, waited: Duration) -> Rest {
        if self.waits == 0 && self.spun && self.contended == 0 {
            self.budget
                .spend(now, waited.saturating_sub(self.policy.spin));
            if self.policy.polling == Polling::Always {
                // Nobody else wanted the CPU.
                self.trust = self.policy.first_trust;
            }
        }
        // It may be idle for years.
        self.waits = self.waits.saturating_add(1);
        let nap = (waited / 4).max(NAP);
        match self.policy.wait {
            Wait::Naps if waited < SHARED_IDLE => self.nap(now, nap.min(SHARED_NAP)),
            Wait::Naps => self.nap(now, nap.min(SHARED_IDLE_NAP)),
            Wait::NapsThenSleep if waited < self.patience() || self.waits <= FEWEST_NAPS => {
                self.nap(now, nap.min(LONGEST_NAP))
            }
            // Its naps measure what being woken costs.
            Wait::NapsThenSleep => self.sleep(now, None),
            Wait::Sleep => {
                let limit = self.wake.probe(now);
                self.sleep(now, limit)
            }
        }
    }

    fn sleep(&mut self, now: Instant, limit: Option<Duration>) -> Rest {
        self.wake.wait(now, limit);
        self.polls = self.policy.polls - 1;
        self.looked = None;
        Rest::Sleep(limit)
    }
}

#[cfg(test)]
mod tests;
