//! Who has a turn, and how long: of the contexts of each tenant. How much of it each has is
//! [deficit round robin](crate::drr).
//!
//! Those that had something to do lately come first in each turn. The others are looked at in
//! rotation, a bounded number of them in a turn, so that they delay nobody however many there are.
//! Before a worker sleeps it has to have looked at all of them once: it does that in as many turns
//! as it takes, a *sweep*, in which those who are busy have theirs as ever.

use crate::drr::{Arrears, BETWEEN_CLOCKS, Clock, Deficit, Had, charged, round};
use crate::engine::{Budget, LOOK_COST, Progress, Turn, Usage, earlier};
use crate::throughput::Throughput;
use farlane_abi::width::to_usize;
use farlane_zero_copy::topology::Node;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the calls of a context, its queue pairs, and the contexts of a tenant may take in one
/// turn of a worker, besides the first one's and the last one's: the rest go on in the next.
pub(crate) const TURN: Duration = Duration::from_micros(100);
/// How long a tenant's turn may take where no other one had something to do lately: one that comes
/// waits as long. With [`TURN`], in which a message of 1 MiB between a process and a VM is cut in
/// three, those came to 0.9 of their rate.
const TURN_ALONE: Duration = Duration::from_millis(1);
/// Most idle contexts of a tenant, and idle queue pairs of those, that are looked at in a turn:
/// about 10 us.
const IDLE_OF_TENANT: usize = 128;
/// Of these a turn looks at one for so much time since the last one, so that short turns of who is
/// busy are not made of looks at who is not.
const IDLE_LOOK_EVERY: Duration = Duration::from_micros(1);
/// Fewest of them.
const LEAST_IDLE_OF_TENANT: usize = 2;
/// So many looks in vain at others are not a tenant's time: about 1 us.
const LOOKS_OF_OTHERS: usize = 8;
/// Who had something to do is busy for so long.
pub(crate) const BUSY: Duration = Duration::from_millis(10);
/// A tenant that had something to do counts as one that others delay for so long. Not measured: who
/// sends twenty messages a second is not to notice how long others' turns may take.
pub(crate) const LATELY: Duration = Duration::from_millis(100);

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
    /// When it began.
    pub now: Instant,
    /// The node of the worker, where workers belong to nodes.
    pub node: Option<Node>,
    /// When the time of the tenant is over, where others wait.
    pub until: Option<Instant>,
    /// Which sweep it is of.
    pub sweep: u64,
    /// How much of it there is.
    pub pace: Pace,
    /// Idle contexts of a tenant, and idle queue pairs of those, that are looked at, where the pace
    /// is bounded.
    pub idle: usize,
}

impl Look {
    /// A bounded one of the first sweep.
    #[cfg(test)]
    pub fn at(now: Instant) -> Self {
        Self {
            now,
            node: None,
            until: None,
            sweep: 1,
            pace: Pace::Bounded,
            idle: IDLE_OF_TENANT,
        }
    }

    /// The turn of a queue pair.
    pub fn turn(&self, budget: Budget) -> Turn {
        Turn {
            now: self.now,
            node: self.node,
            budget,
            until: self.until,
        }
    }

    /// Says when the time of the tenant is over, or one that begins now.
    pub fn clock(&self) -> impl Fn() -> bool + use<> {
        let end = || (self.pace != Pace::Whole).then(|| Instant::now() + TURN);
        let end = self.until.or_else(end);
        move || end.is_some_and(|end| Instant::now() >= end)
    }

    fn idle_of_tenant(&self) -> usize {
        match self.pace {
            Pace::Bounded => self.idle,
            Pace::Whole => usize::MAX,
        }
    }
}

/// How many idle ones of a tenant are looked at in a turn, so long after the last one, where
/// somebody may be busy.
fn idle_looks(since: Duration) -> usize {
    let looks = since.as_nanos() / IDLE_LOOK_EVERY.as_nanos();
    let looks = usize::try_from(looks).unwrap_or(IDLE_OF_TENANT);
    looks.clamp(LEAST_IDLE_OF_TENANT, IDLE_OF_TENANT)
}

/// A list whose members have turns.
#[derive(Debug)]
pub(crate) struct Rota<T> {
    all: Vec<Member<T>>,
    /// Who is looked at next, busy or not.
    next: usize,
    /// Where those are who were busy lately: who has waited longest comes first.
    busy: VecDeque<usize>,
    sweep: u64,
    /// How many the sweep has not come to.
    left: usize,
}

#[derive(Debug)]
struct Member<T> {
    one: T,
    /// Until when it is busy, as long as it is.
    busy: Option<Instant>,
    deficit: Deficit,
    /// It had more to do than its turn.
    more: bool,
    sweep: u64,
}

impl<T> Default for Rota<T> {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            next: 0,
            busy: VecDeque::new(),
            sweep: 0,
            left: 0,
        }
    }
}

impl<T> Rota<T> {
    /// Has `all`, of which each has a key of its own, have turns from now on. Those who stay go on
    /// as they are.
    pub fn set(&mut self, all: impl Iterator<Item = T>, key: impl Fn(&T) -> usize) {
        let busy: HashMap<usize, Option<Instant>> = self
            .busy
            .iter()
            .filter_map(|&at| self.all.get(at))
            .map(|member| (key(&member.one), member.busy))
            .collect();
        let next = self.all.get(self.next).map(|member| key(&member.one));
        self.all = all
            .map(|one| Member {
                // Mostly nobody is busy when one more comes.
                busy: (!busy.is_empty())
                    .then(|| busy.get(&key(&one)).copied().flatten())
                    .flatten(),
                one,
                deficit: Deficit::default(),
                more: false,
                sweep: 0,
            })
            .collect();
        let all = || self.all.iter().enumerate();
        let is_next = |member: &Member<T>| Some(key(&member.one)) == next;
        self.next = all().find(|(_, m)| is_next(m)).map_or(0, |(at, _)| at);
        self.busy = all()
            .filter(|(_, member)| member.busy.is_some())
            .map(|(at, _)| at)
            .collect();
        self.sweep = 0;
        self.left = self.all.len();
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.all.iter().map(|member| &member.one)
    }

    /// Gives turns: a [`round`] to those who are busy until the budget is used up or the time of a
    /// `clock` is over, but one turn to one at least, and to others in rotation as long as there
    /// are `idle` looks, of which each turn takes some. Progress is cut when the sweep has not come
    /// to all.
    ///
    /// Where only one is busy nobody waits, and there is no clock: a look at it costs as much as a
    /// look at a queue pair.
    pub fn turn<C: Fn() -> bool>(
        &mut self,
        look: &Look,
        budget: &Budget,
        idle: &mut usize,
        clock: impl Fn() -> C,
        mut turn: impl FnMut(&T, &Look, &Budget) -> Progress,
    ) -> Progress {
        if self.sweep != look.sweep {
            self.sweep = look.sweep;
            self.left = self.all.len();
        }
        let mut busy = std::mem::take(&mut self.busy);
        let mut is_over = (busy.len() > 1).then(&clock);
        let give = |at: usize, rest: &Budget, again: bool| {
            if again && !self.all[at].more {
                return None;
            }
            let progress = self.give(at, look, rest, &mut turn);
            let member = &mut self.all[at];
            // Who has had nothing to do for long is not busy any more.
            member.busy = member.busy.filter(|until| look.now < *until);
            Some(Had {
                progress,
                stays: member.busy.is_some(),
                is_left: member.deficit.is_left(),
            })
        };
        let mut progress = round(&mut busy, budget, look.until, is_over.as_ref(), give);
        self.busy = busy;
        let (mut looks, mut asks) = (self.all.len(), Clock::default());
        while looks > 0 && *idle > 0 {
            let is_last = self.next >= self.all.len();
            let at = if is_last { 0 } else { self.next };
            self.next = at + 1;
            looks -= 1;
            if self.all[at].busy.is_some() {
                // Its turn comes, or has come, with those who are busy.
                continue;
            }
            // Who begins has one operation whatever others have used: a debt of the tenant's.
            let rest = budget.rest(progress.used).at_least_one();
            let came = self.give(at, look, &rest, &mut turn);
            let member = &self.all[at];
            if member.more && member.deficit.is_left() {
                // Its round has begun: those behind it have theirs after it.
                self.busy.push_front(at);
            } else if member.busy.is_some() {
                self.busy.push_back(at);
            }
            *idle = idle.saturating_sub(came.idle.saturating_add(1));
            progress = progress.and(came);
            if asks.had(&came) && is_over.get_or_insert_with(&clock)() {
                break;
            }
        }
        progress.cut = self.left > 0;
        progress
    }

    fn give(
        &mut self,
        at: usize,
        look: &Look,
        rest: &Budget,
        turn: &mut impl FnMut(&T, &Look, &Budget) -> Progress,
    ) -> Progress {
        let member = &mut self.all[at];
        let budget = member.deficit.turn(rest);
        let mut came = turn(&member.one, look, &budget);
        came.used = charged(&came);
        member.deficit.settle(came.used, came.more);
        member.more = came.more;
        if came.worked || came.more {
            member.busy = Some(look.now + BUSY);
        }
        if !came.cut && member.sweep != look.sweep {
            member.sweep = look.sweep;
            self.left -= 1;
        }
        came
    }
}

/// The contexts of a tenant.
#[derive(Debug)]
struct Tenant<T> {
    rota: Rota<T>,
    deficit: Deficit,
    arrears: Arrears,
    throughput: Arc<Throughput>,
    /// It had more to do than its last turn, most of which went to what has limits.
    waits: bool,
    /// Until when it counts as one that had something to do lately.
    lately: Option<Instant>,
}

impl<T> Tenant<T> {
    fn has_worked_lately(&self, now: Instant) -> bool {
        self.lately.is_some_and(|until| now < until)
    }
}

/// What a worker serves, by tenant: each has a round in a turn, however many there are of its own.
#[derive(Debug)]
pub(crate) struct Tenants<T> {
    all: Vec<Tenant<T>>,
    /// When the last turn was over, where the clock was looked at for that and the next one follows
    /// at once.
    ended: Option<Instant>,
    /// When the last turn began.
    began: Option<Instant>,
}

impl<T> Default for Tenants<T> {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            ended: None,
            began: None,
        }
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
        throughput: impl Fn(&T) -> Arc<Throughput>,
    ) {
        let mut lists: Vec<Vec<T>> = Vec::new();
        for one in all {
            match lists.iter_mut().find(|l| are_one_tenants(&l[0], one)) {
                Some(list) => list.push(one.clone()),
                None => lists.push(vec![one.clone()]),
            }
        }
        let mut before = std::mem::take(&mut self.all);
        for list in lists {
            let is_of = |tenant: &Tenant<T>| {
                let mut all = tenant.rota.iter();
                all.next().is_some_and(|one| are_one_tenants(one, &list[0]))
            };
            let at = before.iter().position(is_of);
            let none = || Tenant {
                rota: Rota::default(),
                deficit: Deficit::default(),
                arrears: Arrears::default(),
                throughput: throughput(&list[0]),
                waits: false,
                lately: None,
            };
            let mut tenant = at.map_or_else(none, |at| before.swap_remove(at));
            tenant.rota.set(list.into_iter(), &key);
            self.all.push(tenant);
        }
        self.interrupted();
        // Nothing of theirs waits for this worker any more.
        for gone in before {
            let change = (gone.waits, false);
            gone.throughput.carried(Usage::default(), change);
        }
    }

    /// The next turn does not follow the last one at once: what was between them is no tenant's.
    pub fn interrupted(&mut self) {
        self.ended = None;
    }

    /// When a turn begins: where the last one ended, unless there was something in between; and how
    /// many idle ones of a tenant are looked at in it. A worker that is going to sleep has nothing
    /// else to do.
    pub fn begin(&mut self, is_resting: bool) -> (Instant, usize) {
        let now = self.ended.take().unwrap_or_else(Instant::now);
        let last = self.began.replace(now).unwrap_or(now);
        let idle = match is_resting {
            true => IDLE_OF_TENANT,
            false => idle_looks(now.saturating_duration_since(last)),
        };
        (now, idle)
    }

    /// A quantum for each tenant, within its limits and its time; `time` says what it is. What one
    /// takes longer it owes the others, where there are some.
    pub fn turn(
        &mut self,
        look: &Look,
        time: impl Fn() -> Instant,
        turn: impl FnMut(&T, &Look, &Budget) -> Progress,
    ) -> Progress {
        self.turn_of(look, Look::clock, Some(time), turn)
    }

    /// The same, whatever it takes; a `clock` says when the time of one that begins is over.
    #[cfg(test)]
    pub fn turn_by<C: Fn() -> bool>(
        &mut self,
        look: &Look,
        clock: impl Fn() -> C,
        turn: impl FnMut(&T, &Look, &Budget) -> Progress,
    ) -> Progress {
        self.turn_of(look, |_| clock(), None::<fn() -> Instant>, turn)
    }

    fn turn_of<C: Fn() -> bool>(
        &mut self,
        look: &Look,
        clock: impl Fn(&Look) -> C,
        time: Option<impl Fn() -> Instant>,
        mut turn: impl FnMut(&T, &Look, &Budget) -> Progress,
    ) -> Progress {
        let mut progress = Progress::default();
        let has_others = self.all.len() > 1;
        let is_timed = has_others && time.is_some() && look.pace == Pace::Bounded;
        // When the clock was looked at, and looks in vain since then.
        let (mut began, mut looks) = (look.now, 0);
        let mut its = *look;
        let lately = |tenant: &Tenant<T>| usize::from(tenant.has_worked_lately(look.now));
        let mut all_lately: usize = self.all.iter().map(lately).sum();
        for tenant in &mut self.all {
            let was_lately = lately(tenant);
            if all_lately <= was_lately {
                // Nobody waits for it.
                tenant.arrears = Arrears::default();
            } else if tenant.arrears.forgo() {
                // It has not been looked at, and its worker does not sleep before it was.
                progress.worked = true;
                progress.cut = true;
                continue;
            }
            if let Some(time) = &time
                && was_lately > 0
                && looks >= LOOKS_OF_OTHERS
            {
                (began, looks) = (time(), 0);
            }
            let is_begin_known = looks < LOOKS_OF_OTHERS;
            let time_of_turn = match all_lately > was_lately {
                true => TURN,
                false => TURN_ALONE,
            };
            its.until = is_timed.then(|| began + time_of_turn);
            let mut idle = look.idle_of_tenant();
            let (budget, until) = match tenant.throughput.allowance(look.now) {
                Ok(budget) => (budget, None),
                // What others have sent to it arrives meanwhile.
                Err(until) => (Budget::NO_OPERATION, Some(until)),
            };
            let budget = tenant.deficit.turn(&budget);
            let clock = || clock(&its);
            let rota = &mut tenant.rota;
            let mut came = rota.turn(&its, &budget, &mut idle, clock, &mut turn);
            tenant.deficit.settle(came.used, came.more);
            // A turn that went to something else, or in which it waited for tokens, is not what
            // keeps it from using them.
            let could_use = match until {
                None => came.used.is_mostly_limited(),
                Some(_) => tenant.waits,
            };
            let waits = came.more && could_use;
            let change = (std::mem::replace(&mut tenant.waits, waits), waits);
            tenant.throughput.carried(came.used, change);
            // One of a word that is in use takes as long as many.
            let its_looks = came.idle.max(to_usize(came.used.cost / LOOK_COST)).max(1);
            if let Some(time) = &time
                && has_others
                && (came.worked || its_looks >= BETWEEN_CLOCKS)
            {
                let now = time();
                // Else it has had nothing to do for long: once it owes nothing.
                if is_begin_known {
                    let took = now.saturating_duration_since(began);
                    tenant.arrears.took(took, came.used);
                }
                (began, looks) = (now, 0);
                self.ended = Some(now);
            } else {
                looks += its_looks;
            }
            came.deadline = earlier(came.deadline, until);
            if came.worked {
                tenant.lately = Some(look.now + LATELY);
                all_lately += 1 - was_lately;
            }
            progress = progress.and(came);
        }
        if !progress.worked || looks >= LOOKS_OF_OTHERS {
            // The worker may sleep before the next one, or has looked at many since then.
            self.interrupted();
        }
        progress
    }
}

#[cfg(test)]
mod tests;
