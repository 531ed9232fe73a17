//! The same programs in the same two guests over Linux's software RoCE and over Farlane, in turns.

use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_kit::compare::{Bar, Bars, Plan, Side, alternating};
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use crate::conditions::wait_until;
use crate::place::Over;
use crate::run::Run;
use crate::tools::{bandwidths, between, latencies};
use crate::versus::{Form, tell};

/// How much faster Farlane must be.
const BANDWIDTH_RATIO: f64 = 20.0;
const LATENCY_RATIO: f64 = 2.0;

/// A program, its arguments, what it measures, and how often it repeats over the slow and the fast
/// one in each form; the small form leaves one out.
struct Measure {
    line: &'static str,
    figure: Figure,
    rxe_iterations: [u32; 2],
    farlane_iterations: [u32; 2],
    in_small: bool,
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
        rxe_iterations: [16, 32],
        farlane_iterations: [300, 1000],
        in_small: true,
    },
    Measure {
        line: "ib_write_lat -s 8",
        figure: Figure::Latency,
        rxe_iterations: [200, 500],
        farlane_iterations: [200, 1000],
        in_small: false,
    },
    Measure {
        line: "ib_send_lat -e -s 8",
        figure: Figure::Latency,
        rxe_iterations: [200, 500],
        farlane_iterations: [200, 500],
        in_small: true,
    },
];

/// Few rounds, as starting the programs takes seconds in emulated guests, and as the bars are far
/// from the figures.
const SMALL: Plan = Plan {
    least: 4,
    step: 2,
    most: 10,
    patience: Duration::from_secs(15),
    confidence: 0.85,
    confidence_of_miss: 0.95,
};
const LONG_PLAN: Plan = Plan {
    least: 6,
    step: 3,
    most: 12,
    ..Plan::LONG
};

pub fn versus(run: &Run<'_>, form: Form, report: &mut Report) -> Result<()> {
    let farlane = run.context.farlane()?;
    let wire = Wire::new()?;
    let pair = farlane.boot_pair(run, &wire)?;
    start_rxe(&pair.a)?;
    start_rxe(&pair.b)?;
    let mut bars = Bars::default();
    let plan = match form {
        Form::Small => SMALL,
        Form::Long => LONG_PLAN,
    };
    let chosen = |measure: &&Measure| form == Form::Long || measure.in_small;
    for measure in MEASURES.iter().filter(chosen) {
        let (unit, bar) = match measure.figure {
            Figure::Bandwidth => ("MiB/s", Bar::AtLeast(BANDWIDTH_RATIO)),
            Figure::Latency => ("us", Bar::AtMost(1.0 / LATENCY_RATIO)),
        };
        let one = |side| {
            let over = match side {
                Side::Ours => Over::Farlane,
                Side::Theirs(_) => Over::Rxe,
            };
            measure.figure(form, over, &pair.a, &pair.b)
        };
        let found = farlane_kit::compare::compare(&plan, &[bar], alternating(1, one))?;
        for comparison in &found {
            let what = ("two VMs", measure.line);
            tell(&mut bars, report, what, (unit, "rxe"), comparison);
        }
    }
    form.enforce(&bars)?;
    pair.backend.stop()
}

/// Makes a software RoCE device on the wire and waits for its device node.
pub fn start_rxe(guest: &Guest) -> Result<()> {
    guest
        .run("modprobe rdma_rxe && modprobe rdma_ucm && rdma link add rxe0 type rxe netdev eth0")?;
    wait_until("the RoCE device has its node", || {
        Ok(guest.exec("test -e /dev/infiniband/uverbs0")?.success())
    })
}

impl Measure {
    fn figure(&self, form: Form, over: Over, server: &Guest, client: &Guest) -> Result<f64> {
        let pick = |[small, long]: [u32; 2]| if form == Form::Small { small } else { long };
        let line = match over {
            Over::Rxe => format!(
                "{} -d rxe0 -x 1 -F -n {}",
                self.line,
                pick(self.rxe_iterations)
            ),
            Over::Farlane => format!("{} -F -n {}", self.line, pick(self.farlane_iterations)),
        };
        let text = between(over, &line, server, client)?;
        match self.figure {
            Figure::Bandwidth => bandwidths(&text)?.first().map(|row| row.mib_per_second),
            Figure::Latency => latencies(&text)?.first().map(|row| row.typical_us),
        }
        .context("No figure was printed")
    }
}
