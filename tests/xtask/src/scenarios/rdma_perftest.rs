//! Debian's own perftest, unmodified, between two guests: bandwidth and latency of sends, writes
//! and reads.

use anyhow::{Result, ensure};
use farlane_kit::progress;
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use super::rdma_pingpong::ping_pongs;
use crate::metrics::Metrics;
use crate::place::Over;
use crate::run::Run;
use crate::tools::{Ends, bandwidths, between, latencies, payload_bytes};

/// All sizes from 2 bytes to 8 MiB; several queue pairs; both directions at once; sleeping on
/// events; inline data; completions asked for one by one and in bulk.
pub const LINES: &[&str] = &[
    "ib_send_bw -a -n 100",
    "ib_write_bw -a -n 100",
    "ib_read_bw -a -n 100",
    "ib_write_bw -s 65536 -n 200 -q 4",
    "ib_send_bw -s 65536 -n 200 -b",
    "ib_send_bw -s 4096 -n 500 -e",
    "ib_write_bw -s 64 -n 2000 -I 64 -Q 1",
    "ib_write_lat -s 8 -n 1000",
    "ib_write_lat -s 65536 -n 200",
    "ib_send_lat -s 8 -n 1000",
    "ib_send_lat -s 8 -n 500 -e",
    "ib_read_lat -s 8 -n 1000",
];

/// Has a program run through all sizes, which takes 5 to 10 s of a processor however few messages
/// it sends of each: for each size it measures how fast its clock is. And what has its place where
/// one size will do: in a brief run, and where another place or program has all of them.
const ALL_SIZES: &str = " -a";
const ONE_SIZE: &str = " -s 65536";

/// perftest never looks at what it has received. These do (`-c`), with messages of several sizes.
const CHECKED: &[&str] = &[
    "ibv_rc_pingpong -g 0 -c -s 64 -n 1000",
    "ibv_rc_pingpong -g 0 -c -s 1048576 -n 20",
];

/// The sizes whose figures go into the table, of programs that run through all of them.
const SHOWN_BYTES: &[u64] = &[8, 4096, 65536, 1 << 20, 8 << 20];

/// By which programs find their device.
#[derive(Clone, Copy)]
pub struct Through<'a> {
    /// Over what they talk.
    pub over: Over,
    /// What they are told of the device.
    pub options: &'a str,
}

/// Through our library, whose device is the only one.
pub const OURS: Through<'static> = Through {
    over: Over::Farlane,
    options: "",
};

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let wire = Wire::new()?;
    let pair = run.context.farlane()?.boot_pair(run, &wire)?;
    perftests(run, OURS, pair.ends(), LINES, report)?;
    ping_pongs(pair.ends(), CHECKED, report)?;
    pair.backend.stop()
}

/// The same line with one size in place of all.
pub fn with_one_size(line: &str) -> String {
    line.replace(ALL_SIZES, ONE_SIZE)
}

/// Runs programs of perftest, of which the daemon of the run must have moved as many bytes as they
/// say, and reports their figures.
pub fn perftests(
    run: &Run<'_>,
    through: Through<'_>,
    ends: Ends<'_>,
    lines: impl IntoIterator<Item = impl AsRef<str>>,
    report: &mut Report,
) -> Result<()> {
    let moved = || {
        let metrics = Metrics::read(&run.metrics(), "farlane_rdma_")?;
        anyhow::Ok(metrics.sum("bytes_out")? + metrics.sum("bytes_in")?)
    };
    for line in lines {
        let line = &match run.is_brief() {
            true => with_one_size(line.as_ref()),
            false => line.as_ref().to_owned(),
        };
        let before = moved()?;
        let text = perftest(through, ends, line, report)?;
        let (moved, said) = (moved()? - before, payload_bytes(line, &text)?);
        // A program whose clock was unsteady has been run again.
        ensure!(
            moved > 0 && moved.is_multiple_of(said),
            "`{line}` says that it moved {said} bytes, the daemon moved {moved}:\n{text}"
        );
    }
    Ok(())
}

/// Runs a program of perftest and reports its figures. Returns what it printed.
fn perftest(
    through: Through<'_>,
    ends: Ends<'_>,
    line: &str,
    report: &mut Report,
) -> Result<String> {
    let Through { over, options } = through;
    let Ends {
        name,
        server,
        client,
    } = ends;
    let text = between(over, &format!("{line} {options} -F"), server, client)?;
    let rows: Vec<(u64, String)> = if line.contains("_bw") {
        // A few bytes in a long time are 0.00 MiB/s; what was moved the daemon's counters say.
        let rows = bandwidths(&text)?;
        rows.iter()
            .map(|row| (row.bytes, format!("{:10.1} MiB/s", row.mib_per_second)))
            .collect()
    } else {
        let rows = latencies(&text)?;
        rows.iter()
            .map(|row| (row.bytes, format!("{:10.2} us", row.typical_us)))
            .collect()
    };
    let all_sizes = line.contains(ALL_SIZES);
    ensure!(
        !all_sizes || rows.len() == 23,
        "`{line}` went through {} sizes, not 23:\n{text}",
        rows.len()
    );
    for (bytes, figure) in rows {
        progress::note(&format!("{name}: {line}: {bytes} bytes: {}", figure.trim()));
        if !all_sizes {
            report.add(name, line, figure);
        } else if SHOWN_BYTES.contains(&bytes) {
            report.add(name, format!("{line}: {bytes} bytes"), figure);
        }
    }
    Ok(text)
}
