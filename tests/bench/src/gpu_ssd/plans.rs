//! Schedules of random requests under the model of this machine's disk.

use crate::report::Report;
use crate::scale;
use anyhow::Result;
use farlane_io_core::plan::oracle::{REQUEST, Random, exact, request};
use farlane_io_core::plan::{CostModel, Run, Scheduler, Way, greedy};
use serde::Serialize;
use std::time::Instant;

/// Requests, as in the paper (section 4.3.1).
const REQUESTS: usize = 200_000;
/// Requests whose schedules are timed.
const TIMED: usize = 20_000;

/// How good schedules are, and how long they take to make.
#[derive(Clone, Copy, Debug, Serialize)]
struct Quality {
    mean_of_optimum: f64,
    worst: f64,
    ns_a_call: f64,
}

/// Measures this project's schedules and the paper's.
pub fn measure(report: &mut Report, model: &CostModel) -> Result<()> {
    let mut scheduler = Scheduler::default();
    let own = quality(model, |runs, ways| {
        ways.clear();
        ways.extend_from_slice(scheduler.schedule(Some(model), runs));
    });
    let paper = quality(model, |runs, ways| *ways = greedy(model, runs));
    for (name, found) in [("exact in linear time", own), ("the paper's greedy", paper)] {
        println!(
            "schedules of {REQUESTS} requests, {name:<22} mean {:.4} of the optimum, worst \
             {:.3}x, {:.0} ns each",
            found.mean_of_optimum, found.worst, found.ns_a_call
        );
        report.keep(&format!("schedules, {name}"), found)?;
    }
    let reference = |value: f64| format!("the paper's greedy {value:.4}");
    report.at_least(
        "schedules, mean of the optimum",
        own.mean_of_optimum,
        "",
        0.989,
        &reference(paper.mean_of_optimum),
    );
    report.at_most(
        "schedules, worst",
        own.worst,
        "x",
        1.05,
        &reference(paper.worst),
    );
    Ok(())
}

fn quality(model: &CostModel, mut how: impl FnMut(&[Run], &mut Vec<Way>)) -> Quality {
    let mut random = Random::new(1);
    let mut ways = Vec::new();
    let (mut sum, mut worst) = (0.0, 0.0_f64);
    let count = scale::count(REQUESTS);
    for _ in 0..count {
        let runs = request(&mut random, REQUEST, 4.0);
        let (least, _) = exact(model, &runs);
        how(&runs, &mut ways);
        let took = model.cost_ns(&runs, &ways);
        sum += least / took;
        worst = worst.max(took / least);
    }
    let requests: Vec<_> = (0..TIMED)
        .map(|_| request(&mut random, REQUEST, 4.0))
        .collect();
    let start = Instant::now();
    for runs in &requests {
        how(runs, &mut ways);
    }
    Quality {
        mean_of_optimum: sum / count as f64,
        worst,
        ns_a_call: start.elapsed().as_secs_f64() * 1e9 / TIMED as f64,
    }
}
