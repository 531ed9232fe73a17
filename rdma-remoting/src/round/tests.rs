use super::*;
use crate::engine::QUANTUM;
use crate::throughput::Rates;
use std::cell::{Cell, RefCell};
use std::num::NonZeroU64;

/// Turns that are written down.
struct Rig {
    rota: Rota<usize>,
    look: Look,
    had: RefCell<Vec<usize>>,
}

impl Rig {
    fn new(members: usize) -> Self {
        let mut rota = Rota::default();
        rota.set(0..members, |one| *one);
        let look = Look::at(Instant::now());
        let had = RefCell::default();
        Self { rota, look, had }
    }

    /// Who has a turn, in order, and whether the sweep goes on.
    fn turn(
        &mut self,
        mut idle: usize,
        is_over: bool,
        works: impl Fn(usize) -> bool,
    ) -> (Vec<usize>, bool) {
        let turn = |one: &usize, _: &Look, _: &Budget| {
            self.had.borrow_mut().push(*one);
            Progress {
                worked: works(*one),
                ..Progress::default()
            }
        };
        let came = self.rota.turn(
            &self.look,
            &Budget::new(QUANTUM),
            &mut idle,
            || || is_over,
            turn,
        );
        (self.had.take(), came.cut)
    }
}

#[test]
fn idle_ones_are_looked_at_in_rotation_and_busy_ones_in_every_turn() {
    let mut rig = Rig::new(10);
    assert_eq!(rig.turn(4, false, |_| false), (vec![0, 1, 2, 3], true));
    assert_eq!(rig.turn(4, false, |one| one == 6).0, [4, 5, 6, 7]);
    assert_eq!(rig.turn(4, false, |_| false), (vec![6, 8, 9, 0, 1], false));
    // One that has had nothing to do for long is one of the others.
    rig.look.now += BUSY;
    assert_eq!(rig.turn(2, false, |_| false).0, [6, 2, 3]);
    assert_eq!(rig.turn(2, false, |_| false).0, [4, 5]);
}

#[test]
fn a_turn_that_is_over_goes_on_with_those_who_had_none() {
    let mut rig = Rig::new(3);
    let all = |_| true;
    for expected in [vec![0], vec![0, 1], vec![0, 2], vec![1], vec![0], vec![2]] {
        assert_eq!(rig.turn(9, true, all).0, expected);
    }
    // The list has become shorter, and empty.
    rig.rota.set([2].into_iter(), |one| *one);
    assert_eq!(rig.turn(1, true, all).0, [2]);
    rig.rota.set(std::iter::empty(), |one| *one);
    assert_eq!(rig.turn(1, true, all), (vec![], false));
}

#[test]
fn many_who_are_idle_do_not_keep_those_who_are_busy_waiting() {
    let mut rig = Rig::new(81_920);
    let busy = 80_000;
    while !rig
        .turn(IDLE_OF_TENANT, false, |one| one == busy)
        .0
        .contains(&busy)
    {}
    for _ in 0..1000 {
        let (had, _) = rig.turn(IDLE_OF_TENANT, false, |one| one == busy);
        assert_eq!((had[0], had.len()), (busy, 1 + IDLE_OF_TENANT));
    }
}

#[test]
fn short_turns_look_at_few_who_are_idle() {
    let looks = |nanoseconds| idle_looks(Duration::from_nanos(nanoseconds));
    assert_eq!([looks(0), looks(500), looks(50_000)], [2, 2, 50]);
    assert_eq!([looks(1 << 20), looks(u64::MAX)], [IDLE_OF_TENANT; 2]);
    // Who rests looks at as many as it can.
    let mut tenants = Tenants::<usize>::default();
    assert_eq!(tenants.begin(false).1, LEAST_IDLE_OF_TENANT);
    assert_eq!(tenants.begin(true).1, IDLE_OF_TENANT);
    // All have their look, however short turns are.
    let mut rig = Rig::new(20);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..10 {
        seen.extend(rig.turn(looks(0), false, |one| one == 7).0);
    }
    assert_eq!(seen.len(), 20);
}

#[test]
fn a_sweep_ends_when_all_were_looked_at_once() {
    let mut rig = Rig::new(5);
    while rig.turn(2, false, |one| one == 3).1 {}
    for _ in 0..4 {
        rig.look.sweep += 1;
        let mut had = Vec::new();
        loop {
            let (more, cut) = rig.turn(2, true, |_| false);
            had.extend(more);
            if !cut {
                break;
            }
        }
        had.sort_unstable();
        had.dedup();
        assert_eq!(had, [0, 1, 2, 3, 4]);
    }
    // One of which there is more to be looked at.
    let (mut looks, more) = (0, Cell::new(2_u32));
    rig.look.sweep += 1;
    loop {
        let turn = |one: &usize, _: &Look, _: &Budget| Progress {
            cut: *one == 4 && more.replace(more.get().saturating_sub(1)) > 0,
            ..Progress::default()
        };
        looks += 1;
        if !rig
            .rota
            .turn(&rig.look, &Budget::new(QUANTUM), &mut 5, || || false, turn)
            .cut
        {
            break;
        }
    }
    assert_eq!(looks, 3);
}

#[test]
fn a_tenant_has_one_round_in_a_turn_whatever_it_has_open() {
    let mut tenants = Tenants::default();
    let look = Rig::new(0).look;
    // The tenant is the hundred.
    let set = |tenants: &mut Tenants<usize>, all: &[usize]| {
        tenants.set(
            all,
            |a, b| a / 100 == b / 100,
            |one| *one,
            |_| Arc::default(),
        );
    };
    let turn = |tenants: &mut Tenants<usize>, is_busy: &dyn Fn(usize) -> bool| {
        let mut had = Vec::new();
        let poll = |one: &usize, _: &Look, _: &Budget| {
            if is_busy(*one) {
                had.push(*one);
            }
            Progress {
                worked: is_busy(*one),
                ..Progress::default()
            }
        };
        tenants.turn_by(&look, || || true, poll);
        had
    };
    // A busy one of each: the one who has 99 idle ones beside it has as many turns as the one that
    // is alone.
    let many: Vec<usize> = (100..200).chain([200]).collect();
    set(&mut tenants, &many);
    let busy = |one| one == 142 || one == 200;
    turn(&mut tenants, &busy);
    let mut turns = Vec::new();
    for _ in 0..100 {
        turns.extend(turn(&mut tenants, &busy));
    }
    let of = |who: usize| turns.iter().filter(|one| **one == who).count();
    assert_eq!([of(142), of(200)], [100, 100]);

    // Who comes and goes does not keep others from their turn.
    set(&mut tenants, &[300, 142, 200]);
    assert_eq!(turn(&mut tenants, &|one| one < 300), [142, 200]);
    set(&mut tenants, &[]);
    assert!(turn(&mut tenants, &|_| true).is_empty());
}

/// The clock of the last turn is that of the next one where that follows at once: not after looks
/// at many, and not where the worker may have slept.
#[test]
fn a_turn_begins_when_the_last_one_ended_unless_there_was_something_in_between() {
    for (busy, follows) in [(Some(49), true), (Some(0), false), (None, false)] {
        let mut tenants = Tenants::default();
        // One of 40, and ten of one.
        let all: Vec<usize> = (0..50).collect();
        let key = |one: &usize| one.saturating_sub(39);
        let set = |tenants: &mut Tenants<usize>| {
            tenants.set(
                &all,
                |one, other| key(one) == key(other),
                |one| *one,
                |_| Arc::default(),
            );
        };
        set(&mut tenants);
        let now = Instant::now();
        let past = now.checked_sub(Duration::from_secs(5)).unwrap();
        let look = Look::at(past);
        let poll = |one: &usize, _: &Look, _: &Budget| Progress {
            worked: Some(*one) == busy,
            ..Progress::default()
        };
        tenants.turn(&look, || past, poll);
        let (began, _) = tenants.begin(false);
        assert_eq!(began == past, follows, "{busy:?}");
        assert!(follows || began >= now, "{busy:?}");
        // Whoever comes and goes costs a worker time that no other one owes.
        tenants.turn(&look, || past, poll);
        set(&mut tenants);
        assert!(tenants.begin(false).0 >= now);
    }
}

/// Who has had nothing to do for long begins its turn when those before it have had theirs, which
/// the clock was not looked at for.
#[test]
fn who_begins_again_does_not_owe_the_looks_at_those_before_it() {
    let mut tenants = Tenants::default();
    let all: Vec<usize> = (0..=100).collect();
    tenants.set(&all, |_, _| false, |one| *one, |_| Arc::default());
    let look = Rig::new(0).look;
    let time = Cell::new(look.now);
    let mut had = |busy: &[usize]| {
        let mut had = Vec::new();
        let poll = |one: &usize, _: &Look, _: &Budget| {
            time.set(time.get() + Duration::from_micros(10));
            let worked = busy.contains(one);
            had.extend(worked.then_some(*one));
            Progress {
                worked,
                used: Usage::default().at_least(u64::from(worked) * QUANTUM),
                ..Progress::default()
            }
        };
        let look = Look {
            now: time.get(),
            ..look
        };
        tenants.turn(&look, || time.get(), poll);
        had
    };
    assert_eq!(had(&[0]), [0]);
    for _ in 0..3 {
        assert_eq!(had(&[0, 100]), [0, 100]);
    }
}

/// Nobody has a worker for long where others want it; a message is cut for those, and not for one
/// who may come.
#[test]
fn a_turn_is_long_where_no_other_tenant_had_something_to_do_lately() {
    let mut tenants = Tenants::default();
    tenants.set(&[0, 1], |_, _| false, |one| *one, |_| Arc::default());
    let mut look = Rig::new(0).look;
    let mut turn = |look: &Look, busy: usize| {
        let times = Cell::new(None);
        let poll = |one: &usize, its: &Look, _: &Budget| {
            if *one == busy {
                times.set(its.until.map(|until| until - look.now));
            }
            Progress {
                worked: *one == busy,
                ..Progress::default()
            }
        };
        tenants.turn(look, || look.now, poll);
        times.get()
    };
    assert_eq!(turn(&look, 0), Some(TURN_ALONE));
    assert_eq!(turn(&look, 1), Some(TURN));
    assert_eq!(turn(&look, 0), Some(TURN));
    look.now += LATELY;
    assert_eq!(turn(&look, 0), Some(TURN_ALONE));
}

/// Also where they have gone, or were paused, in the middle of their work.
#[test]
fn a_tenant_that_nobody_serves_has_a_rest() {
    let mut tenants = Tenants::default();
    let mut look = Rig::new(0).look;
    let rates = Rates {
        operations: NonZeroU64::new(1000),
        ..Rates::default()
    };
    let throughput = Arc::new(Throughput::new(rates, look.now));
    let set = |tenants: &mut Tenants<usize>, all: &[usize]| {
        tenants.set(all, |_, _| true, |one| *one, |_| Arc::clone(&throughput));
    };
    let waits = |_: &usize, _: &Look, budget: &Budget| {
        let mut budget = budget.spend();
        budget.begin();
        Progress {
            more: true,
            used: budget.used(),
            ..Progress::default()
        }
    };
    for stays in [true, false] {
        set(&mut tenants, &[1]);
        tenants.turn(&look, || look.now, waits);
        if !stays {
            set(&mut tenants, &[]);
        }
        look.now += Duration::from_secs(9);
        let most = if stays { 1000 } else { 20 };
        let budget = Budget::UNBOUNDED.within(u64::MAX, most);
        assert_eq!(throughput.allowance(look.now), Ok(budget));
    }
}

/// What a turn goes to that has no limit, such as flushing, keeps nobody from what has one; nor
/// does a wait for tokens begin a rest.
#[test]
fn who_has_more_to_do_that_is_not_limited_has_a_rest() {
    let flushed = {
        let mut budget = Budget::UNBOUNDED.spend();
        budget.flushed(999);
        budget.used()
    };
    let carried_out = |count: u32| {
        let mut budget = Budget::UNBOUNDED.spend();
        (0..count).for_each(|_| budget.begin());
        budget.used()
    };
    let begin = Rig::new(0).look;
    for (used, most) in [
        (carried_out(5), 1000),
        (carried_out(2).and(flushed), 20),
        (carried_out(300).and(flushed), 1000),
        (flushed, 20),
        (Usage::default(), 20),
    ] {
        let rates = Rates {
            operations: NonZeroU64::new(1000),
            ..Rates::default()
        };
        let throughput = Arc::new(Throughput::new(rates, begin.now));
        let mut tenants = Tenants::default();
        tenants.set(&[1], |_, _| true, |one| *one, |_| Arc::clone(&throughput));
        let mut look = begin;
        let poll = |_: &usize, _: &Look, budget: &Budget| Progress {
            worked: true,
            used: match budget.spend().has_operation() {
                true => used,
                false => Usage::default(),
            },
            more: true,
            ..Progress::default()
        };
        for _ in 0..2 {
            // The second one is of who waits for tokens, where so many were used.
            tenants.turn(&look, || look.now, poll);
        }
        look.now += Duration::from_secs(9);
        while let Err(until) = throughput.allowance(look.now) {
            look.now = until + Duration::from_secs(9);
        }
        let budget = Budget::UNBOUNDED.within(u64::MAX, most);
        assert_eq!(throughput.allowance(look.now), Ok(budget), "{used:?}");
    }
}

/// Those whose queue pairs have nothing to do take time all the same.
#[test]
fn contexts_do_not_look_at_idle_queue_pairs_for_longer_than_a_turn() {
    let mut rig = Rig::new(1000);
    rig.turn(1000, false, |_| true);
    let looks = Cell::new(0_usize);
    let turn = |_: &usize, _: &Look, _: &Budget| {
        looks.set(looks.get() + 1);
        Progress {
            idle: 50,
            ..Progress::default()
        }
    };
    rig.rota
        .turn(&rig.look, &Budget::new(QUANTUM), &mut 0, || || true, turn);
    assert_eq!(looks.take(), 1, "of those who are busy");
    let mut rig = Rig::new(1000);
    rig.rota.turn(
        &rig.look,
        &Budget::new(QUANTUM),
        &mut 128,
        || || false,
        turn,
    );
    assert_eq!(looks.take(), 3, "of the others");
    rig.rota
        .turn(&rig.look, &Budget::new(QUANTUM), &mut 128, || || true, turn);
    assert_eq!(looks.take(), 1);
}

/// A tenant's contexts, each of which takes so many turns to be looked at.
#[test]
fn all_are_looked_at_however_many_turns_each_takes() {
    for turns_of in [&[64_u32, 61, 1][..], &[300, 1, 5], &[1; 300]] {
        let mut tenants = Tenants::default();
        let all: Vec<usize> = (0..turns_of.len()).collect();
        tenants.set(&all, |_, _| true, |one| *one, |_| Arc::default());
        let mut look = Rig::new(0).look;
        for _ in 0..3 {
            look.sweep += 1;
            let left: Vec<_> = turns_of.iter().map(|&left| Cell::new(left)).collect();
            let mut turns = 0;
            loop {
                let poll = |one: &usize, _: &Look, _: &Budget| {
                    let left = &left[*one];
                    left.set(left.get().saturating_sub(1));
                    Progress {
                        cut: left.get() > 0,
                        ..Progress::default()
                    }
                };
                turns += 1;
                assert!(turns < 1000, "{turns_of:?}: the sweep does not end");
                if !tenants.turn_by(&look, || || false, poll).cut {
                    break;
                }
            }
            assert!(left.iter().all(|left| left.get() == 0), "{turns_of:?}");
        }
    }
}
