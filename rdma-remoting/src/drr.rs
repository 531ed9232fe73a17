//! Deficit round robin (Shreedhar and Varghese, "Efficient fair queuing using deficit round robin",
//! SIGCOMM 1995), over tenants, the contexts of each, and the queue pairs of each context.
//!
//! Who has something to do has a [`QUANTUM`] in each round. What it costs more than that is a debt
//! of the next round; what is left of it, where a round ends before, is there in the next. Messages
//! are cut where the quantum ends, so that after any time two who always had something to do differ
//! by a quantum and two operations at most (Lemma 2 there).

use crate::engine::{Budget, LOOK_COST, OPERATION_COST, Progress, QUANTUM, Usage, is_past};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How many that had nothing to do have a turn before the clock is looked at, which takes as long
/// as one of them.
pub(crate) const BETWEEN_CLOCKS: usize = 32;

/// What one may still use in its round, or owes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Deficit {
    left: u64,
    debt: u64,
}

impl Deficit {
    /// Its turn comes: what it may use, where `of` is left for all. It has a new quantum when what
    /// it has is no operation any more.
    pub fn turn(&mut self, of: &Budget) -> Budget {
        if !self.is_left() {
            self.left = (self.left + QUANTUM).saturating_sub(self.debt);
            self.debt = 0;
        }
        of.at_most(self.left)
    }

    /// It has used so much, and has more to do or not: who has not saves nothing.
    pub fn settle(&mut self, used: Usage, more: bool) {
        // A debt of calls, and of looks at many contexts, is bounded by one round.
        let over = used.cost.saturating_sub(self.left);
        self.debt = (self.debt + over).min(QUANTUM - OPERATION_COST);
        self.left = match more {
            true => self.left.saturating_sub(used.cost),
            false => 0,
        };
    }

    /// Whether its round goes on.
    pub fn is_left(self) -> bool {
        self.left >= OPERATION_COST
    }
}

/// What a microsecond of a worker costs, in bytes: more than it moves in any, so that it is the
/// time of a tenant's turns that is fair, however long its requests take.
const MICROSECOND_COST: u64 = 64 << 10;
/// Most that a tenant owes for the time of its turns, in rounds: of a worker that did not have the
/// CPU meanwhile it is not the tenant's fault.
const MOST_ROUNDS: u64 = 16;

/// What the turns of a tenant have taken beyond their cost, while others waited: it forgoes rounds
/// for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Arrears(u64);

impl Arrears {
    /// Its round comes: whether it forgoes it.
    pub fn forgo(&mut self) -> bool {
        let left = self.0.checked_sub(QUANTUM);
        self.0 = left.unwrap_or(self.0);
        left.is_some()
    }

    /// Its turn has taken so long.
    pub fn took(&mut self, time: Duration, used: Usage) {
        let us = time.as_secs().saturating_mul(1_000_000);
        let us = us.saturating_add(time.subsec_micros().into());
        let time = us.saturating_mul(MICROSECOND_COST);
        let owed = self.0.saturating_add(time.saturating_sub(used.cost));
        self.0 = owed.min(MOST_ROUNDS * QUANTUM);
    }
}

/// What a turn in a [`round`] came to.
pub(crate) struct Had {
    pub progress: Progress,
    /// It is to have turns again.
    pub stays: bool,
    /// Its own quantum is not used up.
    pub is_left: bool,
}

/// Gives turns to those of a list, in order, all of which have one, and those who have more to do
/// further ones, until the budget is used up or the time `is_over`. A budget of nothing is one turn
/// for each, in which they carry nothing out.
///
/// `turn(one, rest of the budget, again)` gives one; or none, where it is another one and it has
/// nothing more to do. Progress is cut where not all have had one.
pub(crate) fn round<K: Copy>(
    list: &mut VecDeque<K>,
    budget: &Budget,
    until: Option<Instant>,
    is_over: Option<impl Fn() -> bool>,
    mut turn: impl FnMut(K, &Budget, bool) -> Option<Had>,
) -> Progress {
    let mut progress = Progress::default();
    let mut rest = *budget;
    let (mut left, mut again, mut more) = (list.len(), false, false);
    let mut clock = Clock::default();
    loop {
        if left == 0 {
            // Without a budget, or time, there is nothing more for anybody.
            if !more || budget.is_spent() || is_past(until) {
                break;
            }
            (left, again, more) = (list.len(), true, false);
        }
        let Some(one) = list.pop_front() else {
            break;
        };
        left -= 1;
        let Some(had) = turn(one, &rest, again) else {
            list.push_back(one);
            continue;
        };
        let came = had.progress;
        more |= came.more;
        progress = progress.and(came);
        rest = budget.rest(progress.used);
        let is_spent = rest.is_spent() && !budget.is_spent();
        if had.stays {
            if is_spent && rest.is_paid_out() && came.more && had.is_left {
                // It goes on in the next round, with what is left of its quantum. Where a limit of
                // bytes or operations is reached it does not: its quantum could last for minutes.
                list.push_front(one);
            } else {
                list.push_back(one);
            }
        }
        let is_last = left == 0 && !more;
        let ask = clock.had(&came);
        if !is_last && (is_spent || ask && is_over.as_ref().is_some_and(|is_over| is_over())) {
            more = true;
            break;
        }
    }
    progress.more = more;
    progress.cut = !again && left > 0;
    progress
}

/// When to look at the clock.
#[derive(Default)]
pub(crate) struct Clock {
    looks: usize,
}

impl Clock {
    /// One more has had a turn: whether it may have taken so long that the clock is to be looked
    /// at.
    pub fn had(&mut self, came: &Progress) -> bool {
        self.looks += came.idle.max(1);
        let ask = came.worked || came.cut || self.looks >= BETWEEN_CLOCKS;
        if ask {
            self.looks = 0;
        }
        ask
    }
}

/// What a turn costs at least.
pub(crate) fn charged(came: &Progress) -> Usage {
    came.used.at_least(LOOK_COST)
}

#[cfg(test)]
mod tests;
