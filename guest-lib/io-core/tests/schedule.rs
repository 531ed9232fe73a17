//! Schedules against the exact solution, and that against all schedules there are.
#![allow(clippy::unwrap_used)]

use farlane_io_core::plan::oracle::{REQUEST, Random, exact, p3700, request};
use farlane_io_core::plan::{CostModel, Parameters, Run, Scheduler, Way, greedy, schedule};
use proptest::prelude::*;

/// Room for sums in another order.
const ROUNDING: f64 = 1.0 + 1e-9;

/// The least cost of all schedules there are.
fn brute_force(model: &CostModel, runs: &[Run]) -> f64 {
    let mut least = f64::INFINITY;
    for choice in 0..1_u32 << runs.len() {
        let ways: Vec<_> = (0..runs.len())
            .map(|i| {
                if choice >> i & 1 == 1 {
                    Way::Cache
                } else {
                    Way::P2p
                }
            })
            .collect();
        let possible = |(run, way): (&Run, &Way)| run.cached || *way == Way::P2p;
        if runs.iter().zip(&ways).all(possible) {
            least = least.min(model.cost_ns(runs, &ways));
        }
    }
    least
}

fn models() -> impl Strategy<Value = CostModel> {
    // Overhead, bandwidth, share of the largest cutoff that a device with these can have.
    let p2p = (0.0..2e6_f64, 1e7..2e10_f64, 0.0..1.0_f64);
    (p2p, 0.0..1e5_f64, 1e7..5e10_f64).prop_map(|((overhead, bandwidth, share), call, cache)| {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let cutoff_bytes = (overhead * bandwidth / 1e9 * share) as u64;
        CostModel::new(Parameters {
            cutoff_bytes,
            p2p_overhead_ns: overhead,
            p2p_bandwidth: bandwidth,
            cache_overhead_ns: call,
            cache_bandwidth: cache,
            readahead_bandwidth: None,
        })
        .unwrap()
    })
}

fn runs(most: usize) -> impl Strategy<Value = Vec<Run>> {
    let run = (1..600_u64, any::<bool>()).prop_map(|(pages, cached)| Run {
        bytes: pages * 4096,
        cached,
    });
    prop::collection::vec(run, 0..most)
}

proptest! {
    #[test]
    fn the_oracle_finds_the_least_of_all_schedules(model in models(), runs in runs(11)) {
        let (least, ways) = exact(&model, &runs);
        let brute = brute_force(&model, &runs);
        prop_assert!((least - brute).abs() <= brute * 1e-9, "{least} {brute}");
        prop_assert!(model.cost_ns(&runs, &ways) <= least * ROUNDING);
    }

    #[test]
    fn a_schedule_takes_the_least_time_there_is(model in models(), runs in runs(80)) {
        let ways = schedule(Some(&model), &runs);
        prop_assert_eq!(ways.len(), runs.len());
        let (least, _) = exact(&model, &runs);
        let took = model.cost_ns(&runs, &ways);
        prop_assert!(took <= least * ROUNDING, "{took} {least}");
    }

    #[test]
    fn what_is_not_cached_goes_by_p2p(model in prop::option::of(models()), runs in runs(80)) {
        let ways = schedule(model.as_ref(), &runs);
        prop_assert_eq!(ways.len(), runs.len());
        for (run, way) in runs.iter().zip(&ways) {
            prop_assert!(run.cached || *way == Way::P2p);
        }
    }

    #[test]
    fn a_scheduler_keeps_nothing_of_the_request_before(
        model in models(), first in runs(40), second in runs(40)
    ) {
        let mut scheduler = Scheduler::with_capacity(4);
        scheduler.schedule(Some(&model), &first);
        let again = scheduler.schedule(Some(&model), &second).to_vec();
        prop_assert_eq!(again, schedule(Some(&model), &second));
    }

    #[test]
    fn without_a_model_only_what_is_wholly_cached_comes_from_the_cache(runs in runs(20)) {
        let ways = schedule(None, &runs);
        let cached = runs.iter().all(|run| run.cached);
        let expected = if cached { Way::Cache } else { Way::P2p };
        prop_assert!(ways.iter().all(|way| *way == expected));
    }

    #[test]
    fn lengths_that_no_file_has_do_no_harm(
        model in models(),
        runs in prop::collection::vec((any::<u64>(), any::<bool>()), 0..20)
    ) {
        let runs: Vec<_> = runs.into_iter().map(|(bytes, cached)| Run { bytes, cached }).collect();
        prop_assert_eq!(schedule(Some(&model), &runs).len(), runs.len());
        prop_assert_eq!(greedy(&model, &runs).len(), runs.len());
    }
}

/// (mean of optimum / schedule, largest schedule / optimum) over random requests of 8 MB.
fn quality(
    requests: u32,
    shortest: f64,
    mut how: impl FnMut(&CostModel, &[Run]) -> Vec<Way>,
) -> (f64, f64) {
    let model = p3700();
    let mut random = Random::new(4);
    let (mut sum, mut worst) = (0.0, 0.0_f64);
    for _ in 0..requests {
        let runs = request(&mut random, REQUEST, shortest);
        let (least, _) = exact(&model, &runs);
        let took = model.cost_ns(&runs, &how(&model, &runs));
        sum += least / took;
        worst = worst.max(took / least);
    }
    (sum / f64::from(requests), worst)
}

#[test]
fn two_hundred_thousand_requests_take_no_longer_than_the_optimum() {
    let mut scheduler = Scheduler::default();
    let (mean, worst) = quality(200_000, 8.0, |model, runs| {
        scheduler.schedule(Some(model), runs).to_vec()
    });
    assert!(mean >= 0.989, "mean {mean}");
    assert!(worst <= 1.05, "worst {worst}");
}

#[test]
fn requests_of_single_pages_take_no_longer_than_the_optimum() {
    let (mean, worst) = quality(2_000, 1.0, |model, runs| schedule(Some(model), runs));
    assert!(mean >= 0.989, "mean {mean}");
    assert!(worst <= 1.05, "worst {worst}");
}

#[test]
fn the_heuristic_of_the_paper_is_good_on_average_only() {
    let (mean, worst) = quality(20_000, 8.0, greedy);
    assert!(mean >= 0.95, "mean {mean}");
    assert!(worst > 1.05, "{worst}: then it would do");
    eprintln!("greedy: mean {mean:.4} of the optimum, worst {worst:.3}x");
}

#[test]
fn the_random_requests_are_whole() {
    let mut random = Random::new(1);
    for _ in 0..1000 {
        let runs = request(&mut random, REQUEST, 1.0);
        assert_eq!(runs.iter().map(|run| run.bytes).sum::<u64>(), REQUEST);
        assert!(runs.windows(2).all(|pair| pair[0].cached != pair[1].cached));
    }
}
