//! The same programs in the same two guests over Linux's software RoCE and over Farlane, in turns.

use anyhow::{Context as _, Result, bail};
use farlane_vmkit::guest::Guest;
use farlane_vmkit::report::Report;
use farlane_vmkit::wire::Wire;

use super::Scenario;
use crate::place::Over;
use crate::run::Run;
use crate::tools::{bandwidths, between, latencies, median};

pub const SCENARIO: Scenario = Scenario {
    name: "rdma-vs-rxe",
    about: "ib_write_bw, ib_write_lat and ib_send_lat -e over Linux rdma_rxe and over Farlane, in turns",
    is_test: false,
    run,
};

/// How much faster Farlane must be.
const BANDWIDTH_RATIO: f64 = 20.0;
const LATENCY_RATIO: f64 = 2.0;

/// How often each program runs over each; the median counts.
const ROUNDS: usize = 3;

/// A program, its arguments, what it measures, and how often it repeats over the slow and the fast one.
struct Measure {
    line: &'static str,
    figure: Figure,
    rxe_iterations: u32,
    farlane_iterations: u32,
}

#[derive(Clone, Copy, PartialEq)]
enum Figure {
    Bandwidth,
    Latency,
}

const MEASURES: &[Measure] = &[
    Measure {
        line: "ib_write_bw -s 1048576 -t 16",
        figure: Figure::Bandwidth,
        rxe_iterations: 48,
        farlane_iterations: 1000,
    },
    Measure {
        line: "ib_write_lat -s 8",
        figure: Figure::Latency,
        rxe_iterations: 1000,
        farlane_iterations: 1000,
    },
    Measure {
        line: "ib_send_lat -e -s 8",
        figure: Figure::Latency,
        rxe_iterations: 1000,
        farlane_iterations: 1000,
    },
];

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let farlane = run.context.farlane()?;
    let wire = Wire::new()?;
    let pair = farlane.boot_pair(run, &wire)?;
    start_rxe(&pair.a)?;
    start_rxe(&pair.b)?;
    let mut missed = Vec::new();
    for measure in MEASURES {
        let (mut rxe, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            rxe.push(measure.figure(Over::Rxe, &pair.a, &pair.b)?);
            ours.push(measure.figure(Over::Farlane, &pair.a, &pair.b)?);
        }
        let (rxe, ours) = (median(rxe)?, median(ours)?);
        let (unit, ratio, bar) = match measure.figure {
            Figure::Bandwidth => ("MiB/s", ours / rxe, BANDWIDTH_RATIO),
            Figure::Latency => ("us", rxe / ours, LATENCY_RATIO),
        };
        let figures = format!(
            "rxe {rxe:.1} {unit}, Farlane {ours:.1} {unit}: {ratio:.1}x (at least {bar:.0}x)"
        );
        report.add("two VMs", measure.line, &figures);
        if ratio < bar {
            missed.push(format!("{}: {figures}", measure.line));
        }
    }
    if !missed.is_empty() {
        bail!("Farlane is not fast enough:\n{}", missed.join("\n"));
    }
    pair.backend.stop()
}

/// Makes a software RoCE device on the wire and waits for its device node.
pub fn start_rxe(guest: &Guest) -> Result<()> {
    guest
        .run("modprobe rdma_rxe && modprobe rdma_ucm && rdma link add rxe0 type rxe netdev eth0")?;
    guest.run("i=0; until [ -e /dev/infiniband/uverbs0 ]; do i=$((i+1)); [ $i -lt 300 ] || exit 1; usleep 50000; done")?;
    Ok(())
}

impl Measure {
    fn figure(&self, over: Over, server: &Guest, client: &Guest) -> Result<f64> {
        let line = match over {
            Over::Rxe => format!("{} -d rxe0 -x 1 -F -n {}", self.line, self.rxe_iterations),
            Over::Farlane => format!("{} -F -n {}", self.line, self.farlane_iterations),
        };
        let text = between(over, &line, server, client)?;
        match self.figure {
            Figure::Bandwidth => bandwidths(&text)?.first().map(|row| row.mib_per_second),
            Figure::Latency => latencies(&text)?.first().map(|row| row.typical_us),
        }
        .context("No figure was printed")
    }
}
