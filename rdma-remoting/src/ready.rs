//! Which queue pairs and shared receive queues of a context have turns: those that have something
//! to do.
//!
//! A queue pair comes to have turns when its process [rings](farlane_abi::arena), when whoever has
//! changed what it waits for [schedules](crate::engine::Schedule) it, and when its timer is over.
//! It goes on to have them while it has something to do, and for a while after that, in which the
//! process need not ring. One that rests costs nothing, however many of them there are.

use crate::drr::{Deficit, Had, charged, round};
use crate::engine::{Budget, Progress, Turn};
use crate::inbox::Inbox;
use crate::round::{BUSY, Look};
use farlane_abi::arena::{OFF_RUNG, OFF_RUNG_SUMMARY, RUNG_WORDS};
use farlane_abi::width::to_usize;
use farlane_zero_copy::SharedMemory;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Words of the summary of what was rung.
const SUMMARY_WORDS: usize = RUNG_WORDS.div_ceil(32);
/// Words of what was rung that are looked at in a turn: each is 32 queue pairs. As many as
/// [`CALLED_IN_A_TURN`].
const RUNG_IN_A_TURN: usize = 4;
/// How many come to have turns in a turn because they were scheduled, and because their timers are
/// over: about 10 us.
const CALLED_IN_A_TURN: usize = 128;

/// What has turns.
pub(crate) trait Served {
    /// Has one.
    fn turn(&self, turn: Turn) -> Progress;
    /// Whether a turn would find something to do.
    fn is_ready(&self) -> bool;
    /// It comes to have a turn because it was scheduled: from now on it can be again.
    fn called(&self);
    /// It is looked at from now on: nobody needs to ring.
    fn watch(&self);
    /// It is looked at no more: who posts something rings, unless it is found in a look after this.
    fn rest(&self);
}

struct Member<T: ?Sized> {
    one: Arc<T>,
    /// It has turns until then, and longer if it has something to do.
    until: Option<Instant>,
    timer: Option<Instant>,
    deficit: Deficit,
    /// It had more to do than its turn.
    more: bool,
}

/// The queue pairs of a context, by slot, and who of them has turns.
pub(crate) struct Ready<T: ?Sized> {
    members: Vec<Option<Member<T>>>,
    /// Slots of those that have turns: who has waited longest comes first.
    busy: VecDeque<u32>,
    timers: BTreeSet<(Instant, u32)>,
    /// What was rung and has not been looked at, as in the summary.
    rung: [u32; SUMMARY_WORDS],
    /// Slots of those that were scheduled and have not been called.
    scheduled: Vec<u32>,
    /// Those that were removed and have something left to do: who has waited longest comes first.
    leaving: VecDeque<Arc<T>>,
}

impl<T: ?Sized> Default for Ready<T> {
    fn default() -> Self {
        Self {
            members: Vec::new(),
            busy: VecDeque::new(),
            timers: BTreeSet::new(),
            rung: [0; SUMMARY_WORDS],
            scheduled: Vec::new(),
            leaving: VecDeque::new(),
        }
    }
}

impl<T: Served + ?Sized> Ready<T> {
    /// Has one have turns, when it has something to do. It takes a slot that nobody has.
    pub fn insert(&mut self, slot: u32, one: Arc<T>) {
        let at = to_usize(slot.into());
        if self.members.len() <= at {
            self.members.resize_with(at + 1, || None);
        }
        one.rest();
        self.members[at] = Some(Member {
            one,
            until: None,
            timer: None,
            deficit: Deficit::default(),
            more: false,
        });
    }

    /// Has it have no more.
    pub fn remove(&mut self, slot: u32) {
        self.take(slot);
    }

    /// Has it have no more, but for what it has to do now. Its slot is free.
    pub fn remove_when_done(&mut self, slot: u32) {
        let one = self.take(slot).filter(|one| one.is_ready());
        self.leaving.extend(one);
    }

    fn take(&mut self, slot: u32) -> Option<Arc<T>> {
        let place = self.members.get_mut(to_usize(slot.into()));
        let member = place.and_then(Option::take)?;
        if member.until.is_some() {
            self.busy.retain(|&busy| busy != slot);
        }
        if let Some(timer) = member.timer {
            self.timers.remove(&(timer, slot));
        }
        Some(member.one)
    }

    /// Has nobody have any. Returns those that were removed and have something left to do.
    #[must_use]
    pub fn clear(&mut self) -> VecDeque<Arc<T>> {
        std::mem::take(self).leaving
    }

    /// All that there are.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<T>> {
        let members = self.members.iter().flatten().map(|member| &member.one);
        members.chain(&self.leaving)
    }

    /// It has turns from now until then, at least one.
    fn call(&mut self, slot: u32, until: Instant) {
        let place = self.members.get_mut(to_usize(slot.into()));
        if let Some(member) = place.and_then(Option::as_mut) {
            match &mut member.until {
                Some(other) => *other = until.max(*other),
                none => {
                    *none = Some(until);
                    member.one.watch();
                    self.busy.push_back(slot);
                }
            }
        }
    }

    /// All have a turn.
    pub fn call_all(&mut self, now: Instant) {
        for at in 0..self.members.len() {
            if let Ok(slot) = u32::try_from(at) {
                self.call(slot, now);
            }
        }
    }

    /// Those have turns that were scheduled: of very many some in the next turn.
    pub fn call_scheduled(&mut self, inbox: &Inbox, now: Instant) {
        if self.scheduled.is_empty() {
            self.scheduled = inbox.take();
        }
        for _ in 0..CALLED_IN_A_TURN {
            let Some(slot) = self.scheduled.pop() else {
                return;
            };
            if let Some(Some(member)) = self.members.get(to_usize(slot.into())) {
                member.one.called();
            }
            self.call(slot, now + BUSY);
        }
    }

    /// Those have turns whose process has rung, as `header` has it: of very many some in the next
    /// turn.
    pub fn call_rung(&mut self, header: &SharedMemory, now: Instant) {
        // Who rings meanwhile comes when all of these have come.
        if self.rung == [0; SUMMARY_WORDS] {
            for (at, rung) in self.rung.iter_mut().enumerate() {
                *rung = take(header, OFF_RUNG_SUMMARY + 4 * at);
            }
        }
        let mut left = RUNG_IN_A_TURN;
        for at in 0..SUMMARY_WORDS {
            while self.rung[at] != 0 && left > 0 {
                let bit = self.rung[at].trailing_zeros();
                self.rung[at] &= self.rung[at] - 1;
                let word = 32 * at + to_usize(bit.into());
                let mut rung = take(header, OFF_RUNG + 4 * word);
                left -= usize::from(rung != 0);
                while rung != 0 {
                    let at = 32 * word + to_usize(rung.trailing_zeros().into());
                    rung &= rung - 1;
                    if let Ok(slot) = u32::try_from(at) {
                        self.call(slot, now + BUSY);
                    }
                }
            }
        }
    }

    /// Those have turns whose timers are over.
    fn call_due(&mut self, now: Instant) {
        for _ in 0..CALLED_IN_A_TURN {
            let Some(&(_, slot)) = self.timers.first().filter(|(at, _)| *at <= now) else {
                return;
            };
            self.timers.pop_first();
            let place = self.members.get_mut(to_usize(slot.into()));
            if let Some(member) = place.and_then(Option::as_mut) {
                member.timer = None;
            }
            self.call(slot, now);
        }
    }

    /// Gives turns in a [`round`] until the budget is used up or the time of a `clock` is over, but
    /// one at least. Progress is cut where not all have had one.
    pub fn turn<C: Fn() -> bool>(
        &mut self,
        look: &Look,
        budget: &Budget,
        clock: impl Fn() -> C,
    ) -> Progress {
        self.call_due(look.now);
        let left = self.turn_of_leaving(look, budget);
        if self.busy.is_empty() {
            return self.left_over(left);
        }
        let mut busy = std::mem::take(&mut self.busy);
        let is_over = (busy.len() > 1).then(clock);
        let give = |slot, rest: &Budget, again| self.give(slot, look, rest, again);
        let rest = budget.rest(left.used);
        let progress = round(&mut busy, &rest, look.until, is_over, give);
        self.busy = busy;
        self.left_over(left.and(progress))
    }

    /// A turn of one that was removed.
    fn turn_of_leaving(&mut self, look: &Look, budget: &Budget) -> Progress {
        let Some(one) = self.leaving.pop_front() else {
            return Progress::default();
        };
        let came = one.turn(look.turn(*budget));
        if one.is_ready() {
            self.leaving.push_back(one);
        }
        came
    }

    /// With who has had no turn of those that are called, and when others come to have some.
    fn left_over(&self, progress: Progress) -> Progress {
        Progress {
            cut: progress.cut || self.rung != [0; SUMMARY_WORDS] || !self.scheduled.is_empty(),
            deadline: self.timers.first().map(|&(at, _)| at),
            ..progress
        }
    }

    /// Gives a turn to one that was first of those that have them.
    fn give(&mut self, slot: u32, look: &Look, rest: &Budget, again: bool) -> Option<Had> {
        let place = self.members.get_mut(to_usize(slot.into()));
        let member = place.and_then(Option::as_mut)?;
        if again && !member.more {
            return None;
        }
        let now = look.now;
        let mut came = member.one.turn(look.turn(member.deficit.turn(rest)));
        came.used = charged(&came);
        came.idle = usize::from(!came.worked);
        member.deficit.settle(came.used, came.more);
        member.more = came.more;
        if member.timer != came.deadline {
            if let Some(timer) = std::mem::replace(&mut member.timer, came.deadline) {
                self.timers.remove(&(timer, slot));
            }
            self.timers.extend(came.deadline.map(|at| (at, slot)));
        }
        if came.worked || came.more {
            member.until = Some(now + BUSY);
        }
        let mut stays = member.until.is_some_and(|until| until > now);
        if !stays {
            member.one.rest();
            // What was posted before the process knew that it has to ring.
            stays = member.one.is_ready();
            if stays {
                member.one.watch();
            } else {
                member.until = None;
            }
        }
        Some(Had {
            progress: came,
            stays,
            is_left: member.deficit.is_left(),
        })
    }
}

/// Takes the bits of a word. A segment without it has none.
fn take(header: &SharedMemory, at: usize) -> u32 {
    match header.word(at) {
        Ok(word) if word.load(Ordering::Relaxed) != 0 => word.swap(0, Ordering::Acquire),
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
