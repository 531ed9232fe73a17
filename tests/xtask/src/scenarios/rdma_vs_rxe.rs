//! The same programs in the same two guests over Linux's software RoCE and over both paths of
//! Farlane: the drop-in library, and the RDMA device of the guests' kernel. In turns.

use std::time::Duration;

use anyhow::{Context as _, Result};
use farlane_kit::compare::{Bar, Bars, Comparison, Plan, Round, Side, alternating, compare};
use farlane_kit::guest::{Guest, Job};
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use super::rdma_stock::{DEVICE, GID};
use crate::conditions::{PATIENCE, wait_until};
use crate::place::{Over, Place as _};
use crate::run::Run;
use crate::stock::Stock;
use crate::tools::{bandwidths, between, latencies, message_rates};
use crate::versus::{Form, tell};

/// A program, its arguments, what it measures, and how often it repeats over the slow and the fast
/// ones in each form.
struct Measure {
    line: &'static str,
    figure: Figure,
    rxe_iterations: [u32; 2],
    farlane_iterations: [u32; 2],
    /// Beside what the drop-in library is measured in the small form: none leaves it out there.
    in_small: &'static [Path],
    /// How much better than rxe each path has to be, and than the kernel's the drop-in library.
    factors: Factors,
}

/// Quotients of rates; of times they are upside down.
struct Factors {
    drop_in_to_rxe: f64,
    stock_to_rxe: f64,
    drop_in_to_stock: f64,
}

impl Factors {
    const fn of(drop_in_to_rxe: f64, stock_to_rxe: f64, drop_in_to_stock: f64) -> Self {
        Self {
            drop_in_to_rxe,
            stock_to_rxe,
            drop_in_to_stock,
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Figure {
    Bandwidth,
    Latency,
    MessageRate,
}

/// What the programs talk over.
#[derive(Clone, Copy, PartialEq)]
enum Path {
    DropIn,
    Rxe,
    Stock,
}

/// What the drop-in library is compared with.
const BOTH: [Path; 2] = [Path::Rxe, Path::Stock];

const MEASURES: &[Measure] = &[
    Measure {
        line: "ib_write_bw -s 1048576 -t 16",
        figure: Figure::Bandwidth,
        rxe_iterations: [16, 32],
        farlane_iterations: [300, 1000],
        in_small: &BOTH,
        factors: Factors::of(20.0, 20.0, 0.5),
    },
    Measure {
        line: "ib_write_lat -s 8",
        figure: Figure::Latency,
        rxe_iterations: [200, 500],
        farlane_iterations: [200, 1000],
        in_small: &[],
        factors: Factors::of(2.0, 2.0, 0.8),
    },
    Measure {
        line: "ib_send_lat -e -s 8",
        figure: Figure::Latency,
        rxe_iterations: [200, 500],
        farlane_iterations: [200, 500],
        in_small: &[Path::Rxe],
        factors: Factors::of(2.0, 2.0, 0.8),
    },
    // A post of one request, which over the kernel's device is a system call,
    Measure {
        line: "ib_write_bw -s 8",
        figure: Figure::MessageRate,
        rxe_iterations: [1600, 3200],
        farlane_iterations: [16000, 48000],
        in_small: &[],
        factors: Factors::of(10.0, 10.0, 1.5),
    },
    // and one of 16.
    Measure {
        line: "ib_write_bw -s 8 -l 16",
        figure: Figure::MessageRate,
        rxe_iterations: [1600, 3200],
        farlane_iterations: [16000, 48000],
        in_small: &[],
        factors: Factors::of(10.0, 10.0, 0.3),
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
    let stock = Stock::boot(run, &wire, |config, _| {
        config.files(farlane.guest_libraries())
    })?;
    let mut held = Vec::new();
    for guest in [&stock.a, &stock.b] {
        start_rxe(guest)?;
        held.push(hold(guest)?);
    }
    let mut bars = Bars::default();
    for measure in MEASURES {
        measure.compare(form, &stock, &mut bars, report)?;
    }
    form.enforce(&bars)?;
    drop(held);
    stock.stop()
}

/// Makes a software RoCE device on the wire and waits for its device node and its address.
pub fn start_rxe(guest: &Guest) -> Result<()> {
    guest
        .run("modprobe rdma_rxe && modprobe rdma_ucm && rdma link add rxe0 type rxe netdev eth0")?;
    let has = "test -e /dev/infiniband/uverbs0 && \
               grep -q ffff: /sys/class/infiniband/rxe0/ports/1/gids/1";
    wait_until("the RoCE device has its node", || {
        Ok(guest.exec(has)?.success())
    })
}

/// Programs that have the device open meanwhile, by the drop-in library and by the kernel, with a
/// queue pair each, and wait for a peer.
fn hold(guest: &Guest) -> Result<[Job<'_>; 2]> {
    let start = |path: Path| -> Result<Job<'_>> {
        let port = guest.free_port()?;
        let line = format!("ibv_rc_pingpong -e -g {GID} -p {port}{}", path.options());
        let job = guest.spawn(&path.over().command(&line))?;
        guest
            .wait_listening(port, PATIENCE)
            .with_context(|| job.so_far())?;
        Ok(job)
    };
    Ok([start(Path::DropIn)?, start(Path::Stock)?])
}

impl Path {
    /// What it is called in tables.
    fn name(self) -> &'static str {
        match self {
            Self::DropIn => "drop-in",
            Self::Rxe => "rxe",
            Self::Stock => "stock",
        }
    }

    fn over(self) -> Over {
        match self {
            Self::DropIn => Over::Farlane,
            Self::Rxe | Self::Stock => Over::Rxe,
        }
    }

    /// Which device the programs are told, and which of its addresses.
    fn options(self) -> String {
        match self {
            Self::DropIn => String::new(),
            Self::Rxe => " -d rxe0".to_owned(),
            Self::Stock => format!(" -d {DEVICE}"),
        }
    }
}

impl Measure {
    /// All paths in each round: the drop-in library beside the others, and the kernel's device
    /// beside rxe.
    fn compare(
        &self,
        form: Form,
        stock: &Stock<'_>,
        bars: &mut Bars,
        report: &mut Report,
    ) -> Result<()> {
        let (plan, references) = match form {
            Form::Small => (SMALL, self.in_small),
            Form::Long => (LONG_PLAN, &BOTH[..]),
        };
        if references.is_empty() {
            return Ok(());
        }
        let unit = match self.figure {
            Figure::Bandwidth => "MiB/s",
            Figure::Latency => "us",
            Figure::MessageRate => "/s",
        };
        let wanted: Vec<Bar> = references
            .iter()
            .map(|path| match path {
                Path::Stock => self.bar(form, self.factors.drop_in_to_stock),
                _ => self.bar(form, self.factors.drop_in_to_rxe),
            })
            .collect();
        let mut turns = alternating(references.len(), |side| {
            let path = match side {
                Side::Ours => Path::DropIn,
                Side::Theirs(number) => references[number],
            };
            self.figure(form, path, &stock.a, &stock.b)
        });
        let mut all: Vec<Round> = Vec::new();
        let found = compare(&plan, &wanted, |numbers| {
            let rounds = turns(numbers)?;
            all.extend_from_slice(&rounds);
            Ok(rounds)
        })?;
        let mut told = |ours, theirs, comparison: &Comparison| {
            let what = format!("{}, {ours}", self.line);
            tell(bars, report, ("two VMs", &what), (unit, theirs), comparison);
        };
        for (path, comparison) in references.iter().zip(&found) {
            told(Path::DropIn.name(), path.name(), comparison);
        }
        if references == BOTH {
            let of = |reference: usize| all.iter().map(|round| round.theirs[reference]).collect();
            let bar = (self.bar(form, self.factors.stock_to_rxe), &plan);
            let beside = Comparison::of_rounds(of(1), Some(of(0)), bar, found[0].conditions);
            told(Path::Stock.name(), Path::Rxe.name(), &beside);
        }
        Ok(())
    }

    /// What a quotient with this factor has to be.
    fn bar(&self, form: Form, factor: f64) -> Bar {
        // Between the two paths of the same device the small form sees only what is far off.
        let factor = match form {
            Form::Small if factor <= 1.0 => factor / 3.0,
            _ => factor,
        };
        match self.figure {
            Figure::Bandwidth | Figure::MessageRate => Bar::AtLeast(factor),
            Figure::Latency => Bar::AtMost(1.0 / factor),
        }
    }

    fn figure(&self, form: Form, path: Path, server: &Guest, client: &Guest) -> Result<f64> {
        let pick = |[small, long]: [u32; 2]| if form == Form::Small { small } else { long };
        let iterations = pick(match path {
            Path::Rxe => self.rxe_iterations,
            Path::DropIn | Path::Stock => self.farlane_iterations,
        });
        let options = path.options();
        let line = format!("{}{options} -x {GID} -F -n {iterations}", self.line);
        let text = between(path.over(), &line, server, client)?;
        match self.figure {
            Figure::Bandwidth => bandwidths(&text)?.first().map(|row| row.mib_per_second),
            Figure::Latency => latencies(&text)?.first().map(|row| row.typical_us),
            Figure::MessageRate => message_rates(&text)?.first().copied(),
        }
        .context("No figure was printed")
    }
}
