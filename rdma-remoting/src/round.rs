//! Who has a turn, and how long: of the contexts of each tenant.
//!
//! Those that had something to do lately come first in each turn. The others are looked at in
//! rotation, a bounded number of them in a turn, so that they delay nobody however many there are.
//! Before a worker sleeps it has to have looked at all of them once: it does that in as many turns
//! as it takes, a *sweep*, in which those who are busy have theirs as ever.

use crate::engine::{Progress, Turn};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long the calls of a context, its queue pairs, and the contexts of a tenant may take in one
/// turn of a worker, besides the first one's and the last one's: the rest go on in the next.
pub(crate) const TURN: Duration = Duration::from_micros(100);
/// How many with nothing to do have a turn before the clock is looked at.
const BETWEEN_CLOCKS: usize = 64;
/// Idle contexts of a tenant, and idle queue pairs of those, that are looked at in a turn: about
/// 10 us.
const IDLE_OF_TENANT: usize = 128;
/// Who had something to do is busy for so long.
pub(crate) const BUSY: Duration = Duration::from_millis(10);

/// How many have a turn in one of their worker's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// As many as there is time for: others wait.
    Bounded,
    /// All have a turn, however long it takes.
    Whole,
}

/// A turn of a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    /// When it began, and where.
    pub turn: Turn,
    /// Which sweep it is of.
    pub sweep: u64,
    /// How much of it there is.
    pub pace: Pace,
}

impl Look {
    /// Says when the time that begins now is over.
    pub fn clock(&self) -> impl Fn() -> bool + use<> {
        let began = (self.pace == Pace::Bounded).then(Instant::now);
        move || began.is_some_and(|began| began.elapsed() >= TURN)
    }

    fn idle_of_tenant(&self) -> usize {
        match self.pace {
            Pace::Bounded => IDLE_OF_TENANT,
            Pace::Whole => usize::MAX,
        }
    }
}

/// Whether a turn may have taken so long that the clock is to be looked at.
fn took_time(came: &Progress) -> bool {
    came.worked || came.idle > 0 || came.cut
}

/// A list whose members have turns.
#[derive(Debug)]
pub(crate) struct Rota<T> {
    all: Vec<Member<T>>,
    /// Who is looked at next, busy or not.
    next: usize,
    /// Where those are who were busy lately: who has waited longest comes first.
    busy: Vec<usize>,
    sweep: u64,
    /// How many the sweep has not come to.
    left: usize,
}

#[derive(Debug)]
struct Member<T> {
    one: T,
    /// When it had something to do, as long as it is busy.
    worked: Option<Instant>,
    sweep: u64,
}

impl<T> Default for Rota<T> {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            next: 0,
            busy: Vec::new(),
            sweep: 0,
            left: 0,
        }
    }
}

impl<T> Rota<T> {
    /// Has `all`, of which each has a key of its own, have turns from now on. Those who stay go on
    /// as they are.
    pub fn set(&mut self, all: impl Iterator<Item = T>, key: impl Fn(&T) -> usize) {
        let worked: HashMap<usize, Option<Instant>> = self
            .busy
            .iter()
            .filter_map(|&at| self.all.get(at))
            .map(|member| (key(&member.one), member.worked))
            .collect();
        let next = self.all.get(self.next).map(|member| key(&member.one));
        self.all = all
            .map(|one| Member {
                // Mostly nobody is busy when one more comes.
                worked: (!worked.is_empty())
                    .then(|| worked.get(&key(&one)).copied().flatten())
                    .flatten(),
                one,
                sweep: 0,
            })
            .collect();
        let all = || self.all.iter().enumerate();
        let is_next = |member: &Member<T>| Some(key(&member.one)) == next;
        self.next = all().find(|(_, m)| is_next(m)).map_or(0, |(at, _)| at);
        self.busy = all()
            .filter(|(_, member)| member.worked.is_some())
            .map(|(at, _)| at)
            .collect();
        self.sweep = 0;
        self.left = self.all.len();
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.all.iter().map(|member| &member.one)
    }

    /// Gives turns: to those who are busy until the time of a `clock` is over, but to one at least,
    /// and to others in rotation as long as there are `idle` looks, of which each turn takes some.
    /// Progress is cut when the sweep has not come to all.
    ///
    /// Where only one is busy nobody waits, and there is no clock: a look at it costs as much as a
    /// look at a queue pair.
    pub fn turn<C: Fn() -> bool>(
        &mut self,
        look: &Look,
        idle: &mut usize,
        clock: impl Fn() -> C,
        mut turn: impl FnMut(&T) -> Progress,
    ) -> Progress {
        if self.sweep != look.sweep {
            self.sweep = look.sweep;
            self.left = self.all.len();
        }
        let mut progress = Progress::default();
        let (mut done, busy) = (0, self.busy.len());
        let mut is_over = (busy > 1).then(&clock);
        while done < busy {
            let came = self.give(self.busy[done], look, &mut turn);
            progress = progress.and(came);
            done += 1;
            if done < busy
                && (took_time(&came) || done.is_multiple_of(BETWEEN_CLOCKS))
                && is_over.as_ref().is_some_and(|is_over| is_over())
            {
                break;
            }
        }
        self.retire(look.turn.now, done);
        let mut looks = self.all.len();
        while looks > 0 && *idle > 0 {
            let is_last = self.next >= self.all.len();
            let at = if is_last { 0 } else { self.next };
            self.next = at + 1;
            looks -= 1;
            if self.all[at].worked.is_some() {
                // Its turn comes, or has come, with those who are busy.
                continue;
            }
            let came = self.give(at, look, &mut turn);
            *idle = idle.saturating_sub(came.idle.saturating_add(1));
            progress = progress.and(came);
            if took_time(&came) && is_over.get_or_insert_with(&clock)() {
                break;
            }
        }
        progress.cut = self.left > 0;
        progress
    }

    fn give(&mut self, at: usize, look: &Look, turn: &mut impl FnMut(&T) -> Progress) -> Progress {
        let member = &mut self.all[at];
        let came = turn(&member.one);
        if came.worked && member.worked.replace(look.turn.now).is_none() {
            self.busy.push(at);
        }
        if !came.cut && member.sweep != look.sweep {
            member.sweep = look.sweep;
            self.left -= 1;
        }
        came
    }

    /// So many of those who are busy have had their turn. Who has had nothing to do for long is not
    /// busy any more.
    fn retire(&mut self, now: Instant, done: usize) {
        let all = &mut self.all;
        self.busy.rotate_left(done);
        self.busy.retain(|&at| {
            let worked = &mut all[at].worked;
            *worked = worked.filter(|at| now.saturating_duration_since(*at) < BUSY);
            worked.is_some()
        });
    }
}

/// What a worker serves, by tenant: each has a round in a turn, however many there are of its own.
#[derive(Debug)]
pub(crate) struct Tenants<T>(Vec<Rota<T>>);

impl<T> Default for Tenants<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Clone> Tenants<T> {
    /// Serves `all`, of which each has a key of its own, from now on. Tenants who stay go on where
    /// they are.
    pub fn set(
        &mut self,
        all: &[T],
        are_one_tenants: impl Fn(&T, &T) -> bool,
        key: impl Fn(&T) -> usize,
    ) {
        let mut lists: Vec<Vec<T>> = Vec::new();
        for one in all {
            match lists.iter_mut().find(|l| are_one_tenants(&l[0], one)) {
                Some(list) => list.push(one.clone()),
                None => lists.push(vec![one.clone()]),
            }
        }
        let mut before = std::mem::take(&mut self.0);
        for list in lists {
            let is_of = |rota: &Rota<T>| {
                let mut all = rota.iter();
                all.next().is_some_and(|one| are_one_tenants(one, &list[0]))
            };
            let at = before.iter().position(is_of);
            let mut rota = at.map_or_else(Rota::default, |at| before.swap_remove(at));
            rota.set(list.into_iter(), &key);
            self.0.push(rota);
        }
    }

    /// A round for each tenant; a `clock` says when the time of one that begins is over.
    pub fn turn<C: Fn() -> bool>(
        &mut self,
        look: &Look,
        clock: impl Fn() -> C,
        mut turn: impl FnMut(&T) -> Progress,
    ) -> Progress {
        self.0
            .iter_mut()
            .fold(Progress::default(), |progress, rota| {
                let mut idle = look.idle_of_tenant();
                progress.and(rota.turn(look, &mut idle, &clock, &mut turn))
            })
    }
}

#[cfg(test)]
mod tests;
