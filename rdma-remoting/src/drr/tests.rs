use super::*;
use crate::engine::{Spending, Turn};
use crate::ready::{Ready, Served};
use crate::round::{Look, Rota, Tenants};
use proptest::prelude::*;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One that always has messages of so many bytes to send.
struct Endless {
    bytes: u64,
    /// Of the message at hand.
    left: AtomicU64,
    cost: AtomicU64,
}

impl Endless {
    fn new(bytes: u64) -> Self {
        Self {
            bytes,
            left: AtomicU64::new(0),
            cost: AtomicU64::new(0),
        }
    }

    fn cost(&self) -> u64 {
        self.cost.load(Ordering::Relaxed)
    }

    fn send(&self, mut budget: Spending) -> Progress {
        let mut left = self.left.load(Ordering::Relaxed);
        while budget.has_operation() {
            if left == 0 {
                budget.begin();
                left = self.bytes;
            }
            left -= budget.take(left);
        }
        self.left.store(left, Ordering::Relaxed);
        let used = budget.used();
        self.cost.fetch_add(used.cost, Ordering::Relaxed);
        Progress {
            worked: used.cost > 0,
            more: true,
            used,
            ..Progress::default()
        }
    }
}

impl Served for Endless {
    fn turn(&self, turn: Turn) -> Progress {
        self.send(turn.budget.spend_until(turn.until))
    }
    fn is_ready(&self) -> bool {
        true
    }
    fn called(&self) {}
    fn watch(&self) {}
    fn rest(&self) {}
}

/// Whose costs differ by no more than a quantum, the operation that one of them has begun beyond
/// it, and what the other one has left that was no operation (Shreedhar and Varghese, Lemma 2).
fn are_even(costs: impl Iterator<Item = u64>) -> bool {
    let costs: Vec<_> = costs.collect();
    let (most, least) = (costs.iter().max(), costs.iter().min());
    most.zip(least)
        .is_none_or(|(most, least)| most - least <= QUANTUM + 2 * OPERATION_COST)
}

fn sizes() -> impl Strategy<Value = Vec<u64>> {
    let size = prop_oneof![Just(0), 1..100_u64, Just(4096), 1..(8_u64 << 20)];
    prop::collection::vec(size, 1..12)
}

/// Queue pairs with messages without end, all of which have turns.
fn endless(count: u32, now: Instant) -> (Vec<Arc<Endless>>, Ready<Endless>) {
    let all: Vec<_> = (0..count).map(|_| Arc::new(Endless::new(8))).collect();
    let mut ready = Ready::default();
    for (slot, one) in (0..).zip(&all) {
        ready.insert(slot, Arc::clone(one));
    }
    ready.call_all(now);
    (all, ready)
}

#[test]
fn a_turn_ends_in_which_nothing_may_be_carried_out() {
    let now = Instant::now();
    for count in [1, 3] {
        let (all, mut ready) = endless(count, now);
        for budget in [
            Budget::NO_OPERATION,
            Budget::new(0),
            Budget::new(QUANTUM).within(0, 9),
            Budget::new(0).within(0, 0).at_least_one(),
        ] {
            let progress = ready.turn(&Look::at(now), &budget, || || false);
            assert!(!progress.worked && progress.more, "{budget:?}");
        }
        assert!(all.iter().all(|one| one.cost() == 0));
    }
}

#[test]
fn a_limit_of_operations_is_shared_by_turns() {
    let now = Instant::now();
    let (all, mut ready) = endless(4, now);
    for _ in 0..40 {
        ready.turn(
            &Look::at(now),
            &Budget::UNBOUNDED.within(u64::MAX, 1),
            || || false,
        );
    }
    let costs: Vec<_> = all.iter().map(|one| one.cost()).collect();
    assert!(
        costs.iter().all(|cost| *cost == costs[0] && *cost > 0),
        "{costs:?}"
    );
}

proptest! {
    /// Whatever the messages, and whatever budget each round has.
    #[test]
    fn queue_pairs_differ_by_a_quantum_and_a_message(
        sizes in sizes(),
        budgets in prop::collection::vec(OPERATION_COST..3 * QUANTUM, 1..80),
        are_over in prop::collection::vec(any::<bool>(), 20),
    ) {
        let all: Vec<_> = sizes.iter().map(|&bytes| Arc::new(Endless::new(bytes))).collect();
        let mut ready = Ready::default();
        for (slot, one) in (0..).zip(&all) {
            ready.insert(slot, Arc::clone(one));
        }
        let now = Instant::now();
        ready.call_all(now);
        for budget in budgets {
            ready.turn(&Look::at(now), &Budget::new(budget), || || false);
            prop_assert!(are_even(all.iter().map(|one| one.cost())));
        }
        // Time ends some of the rounds: nobody is left out.
        let before: Vec<_> = all.iter().map(|one| one.cost()).collect();
        for is_over in are_over {
            ready.turn(&Look::at(now), &Budget::new(2 * QUANTUM), || || is_over);
        }
        prop_assert!(all.iter().zip(before).all(|(one, before)| one.cost() > before));
    }

    #[test]
    fn contexts_differ_by_a_quantum_and_a_message(
        sizes in sizes(),
        budgets in prop::collection::vec(OPERATION_COST..3 * QUANTUM, 1..80),
    ) {
        let all: Vec<_> = sizes.iter().map(|&bytes| Endless::new(bytes)).collect();
        let mut rota = Rota::default();
        rota.set(0..all.len(), |one| *one);
        let now = Instant::now();
        let turn = |one: &usize, _: &Look, budget: &Budget| all[*one].send(budget.spend());
        // All begin.
        rota.turn(&Look::at(now), &Budget::new(QUANTUM), &mut 100, || || false, turn);
        for budget in budgets {
            rota.turn(&Look::at(now), &Budget::new(budget), &mut 0, || || false, turn);
            prop_assert!(are_even(all.iter().map(Endless::cost)));
        }
    }

    /// However many contexts each has, and whatever they send.
    #[test]
    fn tenants_differ_by_a_quantum_and_a_message(
        tenants in prop::collection::vec(sizes(), 1..6),
        turns in 1..60_usize,
    ) {
        let mut contexts = Vec::new();
        for (tenant, sizes) in tenants.iter().enumerate() {
            contexts.extend(sizes.iter().map(|&bytes| (tenant, Endless::new(bytes))));
        }
        let mut list = Tenants::default();
        let all: Vec<usize> = (0..contexts.len()).collect();
        list.set(&all, |a, b| contexts[*a].0 == contexts[*b].0, |one| *one, |_| Arc::default());
        let now = Instant::now();
        let turn = |one: &usize, _: &Look, budget: &Budget| contexts[*one].1.send(budget.spend());
        for _ in 0..turns {
            list.turn_by(&Look::at(now), || || false, turn);
            let cost = |tenant| {
                let its = contexts.iter().filter(move |(its, _)| *its == tenant);
                its.map(|(_, one)| one.cost()).sum::<u64>()
            };
            let costs = (0..tenants.len()).map(cost);
            prop_assert!(are_even(costs));
        }
    }

    /// What is used never exceeds what all have together by more than the debt.
    #[test]
    fn a_deficit_pays_its_debt(
        used in prop::collection::vec((0..2 * QUANTUM, any::<bool>()), 1..99),
    ) {
        let mut deficit = Deficit::default();
        for (cost, more) in used {
            let budget = deficit.turn(&Budget::UNBOUNDED);
            prop_assert!(!budget.is_spent());
            deficit.settle(Usage { cost, ..Usage::default() }, more);
            prop_assert!(deficit.left < QUANTUM + OPERATION_COST && deficit.debt < QUANTUM);
            prop_assert!(more || deficit.left == 0);
        }
    }
}

#[test]
fn a_thousand_queue_pairs_gain_nothing_over_one() {
    let now = Instant::now();
    let contexts: Vec<_> = [1000_u32, 1]
        .iter()
        .map(|&queue_pairs| {
            let mut ready = Ready::default();
            let all: Vec<_> = (0..queue_pairs)
                .map(|_| Arc::new(Endless::new(8)))
                .collect();
            for (slot, one) in (0..).zip(&all) {
                ready.insert(slot, Arc::clone(one));
            }
            ready.call_all(now);
            (Cell::new(Some(ready)), all)
        })
        .collect();
    let mut tenants = Tenants::default();
    tenants.set(&[0_usize, 1], |a, b| a == b, |one| *one, |_| Arc::default());
    let turn = |one: &usize, look: &Look, budget: &Budget| {
        let (ready, _) = &contexts[*one];
        let mut its = ready.take().unwrap();
        let came = its.turn(look, budget, || || false);
        ready.set(Some(its));
        came
    };
    for _ in 0..1100 {
        tenants.turn_by(&Look::at(now), || || false, turn);
        let sum = |(_, all): &(_, Vec<Arc<Endless>>)| all.iter().map(|one| one.cost()).sum();
        let sums: Vec<_> = contexts.iter().map(sum).collect();
        assert!(are_even(sums.iter().copied()), "{sums:?}");
    }
    assert!(contexts[0].1.iter().all(|one| one.cost() > 0));
}

/// Those whose time is over have had a turn each, and begin nothing more.
#[test]
fn a_turn_that_is_over_is_not_spent() {
    let now = Instant::now();
    for count in [1, 3] {
        let (all, mut ready) = endless(count, now);
        let over = Look {
            until: Some(now),
            ..Look::at(now)
        };
        let progress = ready.turn(&over, &Budget::new(QUANTUM), || || false);
        assert!(progress.worked && progress.more);
        let costs: Vec<_> = all.iter().map(|one| one.cost()).collect();
        // The second one of each has begun, and goes on in its next turn.
        assert_eq!(costs, vec![2 * OPERATION_COST + 8; all.len()]);
    }
}

/// Two tenants that always have something to do, whose requests take so long each. Returns how
/// long they had the worker, and how many turns each had.
fn times(each: [Duration; 2], rounds: usize) -> ([Duration; 2], [u32; 2]) {
    let now = Cell::new(Instant::now());
    let (times, turns) = (Cell::default(), Cell::default());
    let ends = [Endless::new(8), Endless::new(8)];
    let mut tenants = Tenants::default();
    tenants.set(&[0, 1], |a, b| a == b, |one| *one, |_| Arc::default());
    let turn = |one: &usize, _: &Look, budget: &Budget| {
        let came = ends[*one].send(budget.spend());
        let took = each[*one] * u32::try_from(came.used.operations).unwrap();
        let (mut all, mut count): ([Duration; 2], [u32; 2]) = (times.get(), turns.get());
        all[*one] += took;
        count[*one] += 1;
        times.set(all);
        turns.set(count);
        now.set(now.get() + took);
        came
    };
    for _ in 0..rounds {
        let look = Look::at(now.get());
        tenants.turn(&look, || now.get(), turn);
    }
    (times.get(), turns.get())
}

#[test]
fn tenants_have_the_same_time_whatever_their_requests_take() {
    let ns = Duration::from_nanos;
    for each in [[200, 200], [200, 1000], [1500, 150], [1900, 2000]] {
        let ([one, other], turns) = times(each.map(ns), 5000);
        let (most, least) = (one.max(other), one.min(other));
        assert!(most - least < most / 20, "{each:?}: {one:?}, {other:?}");
        assert!(turns.iter().all(|turns| *turns > 200), "{turns:?}");
    }
    // What is beyond a bound is forgotten: the worker may not have had the CPU.
    let (_, turns) = times([ns(100), Duration::from_millis(1)], 1700);
    assert_eq!(turns, [1700, 100]);
}

/// Turns of two that always have something to do, or of the first of them where only that has, with
/// so many others between them, of which a look takes so long and costs so much; and the time of
/// all looks and of the two. There are 2000 rounds.
fn turns_beside(
    others: usize,
    are_both_busy: bool,
    each: Duration,
    cost: u64,
) -> ([u32; 2], [Duration; 2]) {
    let now = Cell::new(Instant::now());
    let (turns, times) = (
        [Cell::new(0), Cell::new(0)],
        [Cell::default(), Cell::default()],
    );
    let last = others + 1;
    let mut tenants = Tenants::default();
    let all: Vec<usize> = (0..=last).collect();
    tenants.set(&all, |a, b| a == b, |one| *one, |_| Arc::default());
    let turn = |one: &usize, _: &Look, budget: &Budget| {
        let is_busy = *one == 0 || *one == last && are_both_busy;
        let (came, took) = match is_busy {
            true => {
                let turns = &turns[usize::from(*one == last)];
                turns.set(turns.get() + 1);
                let came = Endless::new(8).send(budget.spend());
                let operations = u32::try_from(came.used.operations).unwrap();
                (came, operations * Duration::from_nanos(200))
            }
            false => {
                let used = Usage {
                    cost,
                    ..Usage::default()
                };
                let came = Progress {
                    idle: 1,
                    used,
                    ..Progress::default()
                };
                (came, each)
            }
        };
        times[usize::from(is_busy)].set(times[usize::from(is_busy)].get() + took);
        now.set(now.get() + took);
        came
    };
    for _ in 0..2000 {
        let look = Look::at(now.get());
        tenants.turn(&look, || now.get(), turn);
    }
    (turns.map(Cell::into_inner), times.map(Cell::into_inner))
}

/// Time that others have taken is not that of who comes behind them, whether they are many or have
/// taken long for nothing.
#[test]
fn nobody_owes_the_time_of_those_before_it() {
    let ([one, other], _) = turns_beside(200, true, Duration::from_nanos(100), LOOK_COST);
    assert!(one.abs_diff(other) < one / 20, "{one}, {other}");
    let look = Duration::from_micros(100);
    let ([one, other], [looks, busy]) = turns_beside(1, true, look, 64 * OPERATION_COST);
    assert!(one.abs_diff(other) < one / 20, "{one}, {other}");
    assert!(looks < busy * 11 / 20, "{looks:?}, {busy:?}");
}

/// Nobody has the rounds that it would forgo.
#[test]
fn who_alone_has_something_to_do_forgoes_nothing() {
    let (turns, _) = turns_beside(200, false, Duration::from_nanos(100), LOOK_COST);
    assert_eq!(turns, [2000, 0]);
}

#[test]
fn who_waits_for_its_turn_saves_nothing() {
    let mut deficit = Deficit::default();
    let used = Usage {
        cost: OPERATION_COST,
        ..Usage::default()
    };
    for _ in 0..5 {
        assert_eq!(deficit.turn(&Budget::UNBOUNDED), Budget::new(QUANTUM));
        deficit.settle(used, false);
    }
    // What is left of a round that ended before is there in the next.
    deficit.turn(&Budget::UNBOUNDED);
    deficit.settle(used, true);
    assert!(deficit.is_left());
    let rest = Budget::new(QUANTUM - OPERATION_COST);
    assert_eq!(deficit.turn(&Budget::UNBOUNDED), rest);
}
