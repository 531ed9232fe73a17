//! The verdicts on synthetic series: what noise may not turn over, and what it may not hide.

use super::*;

/// Numbers that look random, the same each time (xorshift64*).
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
        f64::from(u32::try_from(bits).unwrap()) / f64::from(1 << 24)
    }

    /// Around 1 with a standard deviation, as the sum of twelve uniform numbers is nearly normal;
    /// never below 0.05.
    fn noisy(&mut self, deviation: f64) -> f64 {
        let sum: f64 = (0..12).map(|_| self.uniform()).sum();
        (1.0 + deviation * (sum - 6.0)).max(0.05)
    }
}

/// Verdicts and rounds of many comparisons of a true ratio, both sides with noise; a load makes
/// each tenth round of one side take three times as long.
fn verdicts(truth: f64, noise: f64, bar: Bar, plan: &Plan) -> Vec<(Verdict, usize)> {
    (0..500_u64)
        .map(|seed| {
            let mut random = Random(seed * 7919 + 1);
            let mut figure = |of: f64| {
                let load = if random.uniform() < 0.1 { 3.0 } else { 1.0 };
                of * random.noisy(noise) / load
            };
            let mut measure = alternating(1, |side| {
                Ok(match side {
                    Side::Ours => figure(truth),
                    Side::Theirs(_) => figure(1.0),
                })
            });
            let mut figures = Vec::new();
            loop {
                let wanted = if figures.is_empty() {
                    plan.least
                } else {
                    plan.step
                };
                let to = (figures.len() + wanted).min(plan.most);
                let rounds = measure(figures.len()..to).unwrap();
                figures.extend(rounds.iter().map(|round| round.ours / round.theirs[0]));
                if let Some(verdict) = judge(&figures, bar, plan) {
                    return (verdict, figures.len());
                }
            }
        })
        .collect()
}

fn count(all: &[(Verdict, usize)], verdict: Verdict) -> usize {
    all.iter().filter(|(found, _)| *found == verdict).count()
}

#[test]
fn noise_of_30_percent_does_not_turn_equal_sides_over() {
    for plan in [Plan::SMALL, Plan::LONG] {
        let all = verdicts(1.0, 0.3, Bar::AtLeast(0.9), &plan);
        assert!(count(&all, Verdict::Missed) <= 5, "{plan:?}");
        // The small form's bars are further away.
        let all = verdicts(1.0, 0.3, Bar::AtLeast(0.7), &plan);
        assert_eq!(count(&all, Verdict::Missed), 0, "{plan:?}");
    }
}

#[test]
fn noise_of_30_percent_does_not_hide_a_side_that_is_half_as_fast() {
    for (plan, least) in [(Plan::SMALL, 450), (Plan::LONG, 475)] {
        let all = verdicts(0.5, 0.3, Bar::AtLeast(0.9), &plan);
        let found = [Verdict::Met, Verdict::Missed, Verdict::Undecided].map(|v| count(&all, v));
        assert_eq!(found[0], 0, "{plan:?}: {found:?}");
        assert!(found[1] >= least, "{plan:?}: {found:?}");
    }
}

#[test]
fn times_are_judged_the_other_way_round() {
    let slow = verdicts(2.0, 0.1, Bar::AtMost(1.3), &Plan::SMALL);
    assert_eq!(count(&slow, Verdict::Met), 0);
    assert!(count(&slow, Verdict::Missed) >= 475);
    let equal = verdicts(1.0, 0.1, Bar::AtMost(1.3), &Plan::SMALL);
    assert_eq!(count(&equal, Verdict::Missed), 0);
    assert!(count(&equal, Verdict::Met) >= 475);
}

#[test]
fn clear_cases_end_early() {
    // A miss needs a look more than a bar that is met. A load may need one more.
    for (truth, at) in [(3.5, 6), (0.2, 12)] {
        let all = verdicts(truth, 0.02, Bar::AtLeast(1.0), &Plan::SMALL);
        let early = all.iter().filter(|(_, rounds)| *rounds <= at).count();
        assert!(early >= 480, "{truth}: {early}");
    }
}

#[test]
fn rounds_go_on_while_the_bar_is_inside_of_the_interval() {
    let figures: Vec<f64> = (0..34)
        .map(|i| if i % 2 == 0 { 0.8 } else { 1.2 })
        .collect();
    let plan = Plan::LONG;
    let at = |n: usize, bar| judge(&figures[..n], Bar::AtLeast(bar), &plan);
    assert_eq!(at(9, 1.0), None);
    assert_eq!(at(32, 1.0), None);
    // At the end the median says: of 33 figures it is 0.8.
    assert_eq!(at(33, 1.0), Some(Verdict::Undecided));
    assert_eq!(at(33, 0.8), Some(Verdict::Met));
    assert_eq!(at(33, 1.3), Some(Verdict::Missed));
    // Too few for an interval.
    assert_eq!(at(5, 0.1), None);
}

#[test]
fn a_comparison_with_several_references_goes_on_until_all_are_judged() {
    let mut asked = Vec::new();
    let mut sides = Vec::new();
    let mut measure = alternating(2, |side| {
        sides.push(side);
        let turn = (sides.len() - 1) / 3 % 2 == 0;
        Ok(match side {
            Side::Ours => 10.0,
            Side::Theirs(0) => 1.0,
            Side::Theirs(_) => {
                if turn {
                    9.0
                } else {
                    11.0
                }
            }
        })
    });
    let bars = [Bar::AtLeast(5.0), Bar::AtLeast(1.0)];
    // However slow the machine is.
    let patient = Plan {
        patience: Duration::from_secs(3600),
        ..Plan::SMALL
    };
    let all = compare(&patient, &bars, |numbers| {
        asked.push(numbers.clone());
        measure(numbers)
    });
    drop(measure);
    let all = all.unwrap();
    assert_eq!(asked, [0..6, 6..12, 12..18, 18..24, 24..30]);
    assert_eq!(all[0].verdict, Verdict::Met);
    assert!((all[0].figure - 10.0).abs() < 1e-12 && all[0].conditions.wake_up_us > 0.0);
    assert_eq!(all[1].rounds.len(), 30);
    let theirs = [Side::Theirs(0), Side::Theirs(1)];
    assert_eq!(sides[..3], [Side::Ours, theirs[0], theirs[1]]);
    assert_eq!(sides[3..6], [theirs[1], theirs[0], Side::Ours]);
}

#[test]
fn what_is_no_number_is_an_error() {
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let result = compare(
            &Plan::SMALL,
            &[Bar::AtLeast(1.0)],
            alternating(1, |_| Ok(bad)),
        );
        assert!(result.is_err(), "{bad}");
    }
    let short = compare(&Plan::SMALL, &[Bar::AtLeast(1.0)], |_| Ok(Vec::new()));
    assert!(short.is_err());
    assert!(observe(&Plan::SMALL, Bar::AtMost(1.0), |_| Ok(f64::NAN)).is_err());
}

#[test]
fn a_figure_alone_is_judged_like_a_ratio() {
    let mut rounds = 0;
    let found = observe(&Plan::SMALL, Bar::AtMost(2.0), |_| {
        rounds += 1;
        Ok(0.0)
    });
    let found = found.unwrap();
    assert_eq!(
        (found.verdict, rounds, found.theirs),
        (Verdict::Met, 6, None)
    );
}

#[test]
fn a_comparison_ends_when_its_time_is_over_but_not_before_the_least_rounds() {
    let hasty = Plan {
        patience: Duration::ZERO,
        ..Plan::SMALL
    };
    let mut round = 0;
    let found = observe(&hasty, Bar::AtMost(2.0), |_| {
        round += 1;
        Ok(f64::from(round % 2) * 3.0)
    });
    assert_eq!(found.unwrap().rounds.len(), hasty.least);
}
