//! Who has a turn, and how long: of the queue pairs of a context, and of the contexts of each tenant.

use crate::engine::Progress;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long the queue pairs of a context, and the contexts of a tenant, may take in one turn of a worker, besides the last one's: the
/// rest go on in the next.
const TURN: Duration = Duration::from_micros(100);
/// How many with nothing to do have a turn before the clock is looked at.
const IDLE: usize = 64;

/// How many have a turn in one of their worker's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// As many as there is time for: others wait.
    Bounded,
    /// All: before the worker sleeps, which goes by what they say.
    Whole,
}

impl Pace {
    /// Says when the time of a round of so many that begins now is over.
    pub fn clock(self, of: usize) -> impl Fn() -> bool {
        let began = (self == Self::Bounded && of > 1).then(Instant::now);
        move || began.is_some_and(|began| began.elapsed() >= TURN)
    }
}

/// Gives all of `list` a turn, beginning at the `next` one, or as many as there are until the time `is_over`, but at least one: then
/// the next round begins with the others.
pub(crate) fn round<T>(
    list: &[T],
    next: &AtomicUsize,
    mut turn: impl FnMut(&T) -> Progress,
    is_over: impl Fn() -> bool,
) -> Progress {
    let first = next.load(Ordering::Relaxed) % list.len().max(1);
    let (behind, ahead) = list.split_at(first);
    let mut progress = Progress::default();
    let (mut done, mut idle) = (0, 0);
    for one in ahead.iter().chain(behind) {
        let came = turn(one);
        progress = progress.and(came);
        done += 1;
        idle += 1;
        if done < list.len() && (came.worked || idle == IDLE) {
            idle = 0;
            if is_over() {
                progress.cut = true;
                break;
            }
        }
    }
    next.store(first + done, Ordering::Relaxed);
    progress
}

/// What a worker serves, by tenant: each has a round in a turn, however many there are of its own.
#[derive(Debug)]
pub(crate) struct Tenants<T>(Vec<Tenant<T>>);

#[derive(Debug)]
struct Tenant<T> {
    /// At least one.
    list: Vec<T>,
    next: AtomicUsize,
}

impl<T> Default for Tenants<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Clone> Tenants<T> {
    /// Serves `all` from now on. Tenants who stay go on where they are.
    pub fn set(&mut self, all: &[T], are_one_tenants: impl Fn(&T, &T) -> bool) {
        let before = std::mem::take(&mut self.0);
        let is_of = |tenant: &Tenant<T>, one: &T| {
            tenant.list.first().is_some_and(|f| are_one_tenants(f, one))
        };
        for one in all {
            if let Some(tenant) = self.0.iter_mut().find(|tenant| is_of(tenant, one)) {
                tenant.list.push(one.clone());
                continue;
            }
            let before = before.iter().find(|tenant| is_of(tenant, one));
            let next = before.map_or(0, |tenant| tenant.next.load(Ordering::Relaxed));
            self.0.push(Tenant {
                list: vec![one.clone()],
                next: next.into(),
            });
        }
    }

    /// A round for each tenant; `clock` says of one of so many that begins when its time is over.
    pub fn turn<C: Fn() -> bool>(
        &self,
        mut turn: impl FnMut(&T) -> Progress,
        clock: impl Fn(usize) -> C,
    ) -> Progress {
        self.0.iter().fold(Progress::default(), |progress, tenant| {
            let is_over = clock(tenant.list.len());
            progress.and(round(&tenant.list, &tenant.next, &mut turn, is_over))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn a_round_that_is_over_goes_on_with_those_who_had_no_turn() {
        let (next, had) = (AtomicUsize::new(0), RefCell::new(Vec::new()));
        let give = |list: &[u32], worked, is_over: bool| {
            had.borrow_mut().clear();
            let turn = |one: &u32| {
                had.borrow_mut().push(*one);
                Progress {
                    worked,
                    ..Progress::default()
                }
            };
            let progress = round(list, &next, turn, || is_over);
            assert_eq!(progress.worked, worked && !list.is_empty());
            (had.borrow().clone(), progress.cut)
        };
        let list = [0, 1, 2];
        for one in [0, 1, 2, 0, 1] {
            assert_eq!(give(&list, true, true), (vec![one], true));
        }
        assert_eq!(give(&list, true, false), (vec![2, 0, 1], false));
        assert_eq!(give(&list, false, false), (vec![2, 0, 1], false));
        // The list has become shorter, and empty.
        assert_eq!(give(&[0], true, true), (vec![0], false));
        assert_eq!(give(&[], true, true), (vec![], false));
        // Many who have nothing to do cost time as well, are no work, and what is behind them is not forgotten.
        let many: Vec<u32> = (0..100).collect();
        let (first, cut) = give(&many, false, true);
        assert_eq!((first.len(), cut), (IDLE, true));
        assert_eq!(give(&many, false, true).0.first(), Some(&64));
    }

    #[test]
    fn a_tenant_has_one_round_in_a_turn_whatever_it_has_open() {
        let mut tenants = Tenants::default();
        // The tenant is the hundred.
        let set =
            |tenants: &mut Tenants<u32>, all: &[u32]| tenants.set(all, |a, b| a / 100 == b / 100);
        let turn = |tenants: &Tenants<u32>, is_over: bool| {
            let mut had = Vec::new();
            let busy = |one: &u32| {
                had.push(*one);
                Progress {
                    worked: true,
                    ..Progress::default()
                }
            };
            let cut = tenants.turn(busy, |_| move || is_over).cut;
            (had, cut)
        };
        set(&mut tenants, &[100, 101, 200, 102, 201]);
        assert_eq!(turn(&tenants, true), (vec![100, 200], true));
        assert_eq!(turn(&tenants, true), (vec![101, 201], true));
        // Who comes and goes does not keep others' from their turn.
        set(&mut tenants, &[300, 100, 101, 102, 201, 200]);
        assert_eq!(turn(&tenants, true), (vec![300, 102, 201], true));
        assert_eq!(turn(&tenants, true), (vec![300, 100, 200], true));
        assert_eq!(
            turn(&tenants, false),
            (vec![300, 101, 102, 100, 201, 200], false)
        );
        set(&mut tenants, &[]);
        assert_eq!(turn(&tenants, true), (vec![], false));
    }
}
