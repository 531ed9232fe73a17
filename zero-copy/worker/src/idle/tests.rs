use super::*;
use crate::policy::{LONGEST_SPIN, PROBE, REQUESTS, RINGS, SPIN_BURST, SPIN_SHARE, doorbells};

const MICROSECOND: Duration = Duration::from_micros(1);
/// What a yield takes while nobody else wants the CPU, and while somebody does.
const FREE: Duration = Duration::from_nanos(400);
const TAKEN: Duration = Duration::from_millis(3);

/// A worker on a machine with a clock of its own.
struct Machine {
    idle: Idle,
    now: Instant,
    /// What being woken costs.
    waking: Duration,
    yields: Duration,
}

/// How a request was found.
#[derive(Debug, Default)]
struct Found {
    polled: Duration,
    waits: u32,
    late: Duration,
}

impl Machine {
    fn new(policy: Policy, waking: Duration) -> Self {
        Self {
            idle: Idle::new(policy),
            now: Instant::now(),
            waking,
            yields: FREE,
        }
    }

    /// Waits for a request that comes after `gap`.
    fn request_after(&mut self, gap: Duration) -> Found {
        let due = self.now + gap;
        let mut found = Found::default();
        while self.now < due {
            let begin = self.now;
            let yields = self.yields;
            match self.idle.look(self.now, |_| yields) {
                Rest::Look => {
                    self.now += 2 * MICROSECOND;
                    found.polled += self.now - begin;
                }
                Rest::Nap(limit) => self.wait(begin + limit, &mut found),
                Rest::Sleep(limit) => {
                    let end = limit.map_or(due, |limit| due.min(begin + limit));
                    self.wait(end, &mut found);
                }
            }
        }
        found.late = self.now - due;
        let now = self.now;
        self.idle.found(|| now);
        found
    }

    fn wait(&mut self, end: Instant, found: &mut Found) {
        self.now = end + self.waking;
        found.waits += 1;
        self.idle.woke_at(self.now);
    }
}

fn machines(waking: Duration) -> impl Iterator<Item = Machine> {
    [REQUESTS, RINGS, doorbells(true)]
        .into_iter()
        .map(move |policy| Machine::new(policy, waking))
}

#[test]
fn it_polls_for_about_as_long_as_being_woken_costs() {
    for mut machine in machines(600 * MICROSECOND) {
        for _ in 0..100 {
            machine.request_after(20 * LONGEST_SPIN);
        }
        // Requests that come sooner than it could be woken are found by polling.
        let found: Vec<_> = (0..3000)
            .map(|_| machine.request_after(200 * MICROSECOND))
            .collect();
        let late = found[2000..].iter().map(|found| found.late).max();
        assert!(late <= Some(20 * MICROSECOND), "{late:?}");
    }
}

#[test]
fn where_being_woken_costs_little_it_polls_no_longer_than_its_policy_says() {
    for mut machine in machines(5 * MICROSECOND) {
        let spin = machine.idle.policy.spin;
        for _ in 0..100 {
            let found = machine.request_after(20 * LONGEST_SPIN);
            assert!(found.polled <= (found.waits + 1) * (spin + 10 * MICROSECOND));
            assert!(found.waits > 0);
        }
    }
}

#[test]
fn polling_in_vain_stays_within_its_budget() {
    for mut machine in machines(900 * MICROSECOND) {
        let (begin, spin) = (machine.now, machine.idle.policy.spin);
        let (mut polled, mut waits) = (Duration::ZERO, 0);
        for _ in 0..2000 {
            // Just too late for polling.
            let found = machine.request_after(LONGEST_SPIN + spin);
            polled += found.polled;
            waits += found.waits + 1;
        }
        let allowed = (machine.now - begin) / SPIN_SHARE + SPIN_BURST;
        let usual = waits * (spin + 10 * MICROSECOND);
        assert!(polled <= allowed + usual, "{polled:?} of {allowed:?}");
    }
}

#[test]
fn it_does_not_poll_while_the_cpu_is_wanted_by_others() {
    for mut machine in machines(600 * MICROSECOND) {
        for _ in 0..10 {
            machine.request_after(20 * LONGEST_SPIN);
        }
        machine.yields = TAKEN;
        let looks: Duration = (0..500)
            .map(|_| machine.request_after(20 * LONGEST_SPIN).polled)
            .sum();
        assert!(looks <= 500 * 20 * MICROSECOND, "{looks:?}");
        // It tries again, in the end.
        machine.yields = FREE;
        let polls = |machine: &mut Machine| machine.request_after(10 * MICROSECOND).waits == 0;
        assert!((0..10_000).any(|_| polls(&mut machine)));
    }
}

#[test]
fn an_idle_worker_measures_once_and_sleeps() {
    let mut machine = Machine::new(REQUESTS, 50 * MICROSECOND);
    let found = machine.request_after(Duration::from_secs(3600));
    assert_eq!(found.waits, 2);
    assert_eq!(machine.idle.wake.cost(), 50 * MICROSECOND);
    assert!(found.polled <= REQUESTS.spin + PROBE);
}

#[test]
fn with_doorbells_that_ring_it_sleeps_in_the_end() {
    let mut idle = Idle::new(doorbells(true));
    let mut naps = 0;
    loop {
        match idle.idle() {
            Rest::Look => (),
            Rest::Nap(nap) => {
                assert!(nap <= LONGEST_NAP);
                naps += 1;
                std::thread::sleep(nap);
                idle.woke();
            }
            Rest::Sleep(limit) => {
                assert_eq!(limit, None);
                break;
            }
        }
    }
    assert!(naps >= FEWEST_NAPS);
}

#[test]
fn with_doorbells_that_do_not_it_naps_for_longer_and_longer_for_ever() {
    let mut idle = Idle::new(doorbells(false));
    let nap = |idle: &mut Idle, waited| {
        let now = Instant::now();
        idle.since = now.checked_sub(waited);
        idle.waits = u32::MAX;
        idle.look(now, |_| FREE)
    };
    assert_eq!(
        nap(&mut idle, Duration::from_millis(1)),
        Rest::Nap(Duration::from_micros(250))
    );
    let waited = Duration::from_secs(1);
    assert_eq!(nap(&mut idle, waited), Rest::Nap(SHARED_NAP));
    let waited = Duration::from_secs(3);
    assert_eq!(nap(&mut idle, waited), Rest::Nap(SHARED_IDLE_NAP));
}

#[test]
fn polling_in_vain_is_tried_less_and_less_often() {
    let mut machine = Machine::new(doorbells(true), 5 * MICROSECOND);
    let polled = (0..REQUESTS.first_trust * 8)
        .filter(|_| machine.request_after(2 * FORESEEN.end).polled > Duration::ZERO)
        .count();
    assert!((1..=4).contains(&polled), "{polled}");
}

#[test]
fn a_taken_cpu_ends_polling_for_a_number_of_waits_that_doubles() {
    let mut machine = Machine::new(RINGS, 5 * MICROSECOND);
    for trust in [RINGS.first_trust, 2 * RINGS.first_trust] {
        machine.idle.in_vain();
        let mut waits = 0;
        while machine.idle.contended > 0 {
            waits += machine.request_after(Duration::from_millis(10)).waits;
        }
        assert!((trust..=trust + 1).contains(&waits), "{waits}");
    }
    assert_eq!(machine.idle.trust, 4 * RINGS.first_trust);
}

#[test]
fn patience_follows_the_gaps() {
    let mut idle = Idle::new(doorbells(true));
    assert_eq!(idle.patience(), FIRST_PATIENCE);
    idle.gap = Duration::from_micros(500);
    assert_eq!(idle.patience(), Duration::from_millis(2));
    idle.gap = Duration::from_millis(7);
    assert_eq!(idle.patience(), FIRST_PATIENCE);
}
