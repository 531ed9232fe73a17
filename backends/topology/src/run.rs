//! What the program does, for whatever command line has led here.

use crate::interrupt::Interrupt;
use crate::live::{self, Live};
use crate::metrics::{self, Counters};
use crate::options::{Command, Options, ShowOptions, WatchOptions};
use crate::report::Report;
use crate::series::Series;
use crate::{drawing, figure, show};
use anyhow::{Context as _, bail};
use farlane_daemon::terminal::print;
use farlane_zero_copy::topology::Sysfs;
use std::io::IsTerminal as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// Shows the machine, or follows backends. To be called before there is a second thread.
///
/// # Errors
/// What cannot be read or written.
pub fn run(options: &Options) -> anyhow::Result<()> {
    match &options.command {
        None => show_machine(&options.show),
        Some(Command::Show(options)) => show_machine(options),
        Some(Command::Watch(options)) => watch(options),
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("Cannot write {}", path.display()))
}

fn show_machine(options: &ShowOptions) -> anyhow::Result<()> {
    let root = &options.sysfs;
    if !root.is_dir() {
        bail!("{} is no folder", root.display());
    }
    let machine = Sysfs::new(root);
    let functions = machine.functions();
    if let Some(path) = &options.svg {
        write(path, &drawing::draw(&machine, &functions))?;
    }
    print(&show::text(&machine, &functions))?;
    if !machine.describes_nodes() {
        eprintln!("{} says nothing of nodes", root.display());
    }
    Ok(())
}

/// The counters of all backends that answer, and why others do not.
fn read_all(options: &WatchOptions) -> (Counters, Vec<metrics::MetricsError>) {
    let mut counters = Counters::new();
    let mut errors = Vec::new();
    for socket in &options.sockets {
        match metrics::read(socket) {
            Ok(of_one) => counters.extend(of_one),
            Err(e) => errors.push(e),
        }
    }
    (counters, errors)
}

/// As [`read_all`]; at the beginning all have to answer, and somebody has to count bytes by node.
fn read_first(options: &WatchOptions) -> anyhow::Result<Counters> {
    let (counters, errors) = read_all(options);
    if let Some(error) = errors.into_iter().next() {
        return Err(error.into());
    }
    if counters.is_empty() {
        bail!("None of these backends counts bytes by node");
    }
    Ok(counters)
}

fn watch(options: &WatchOptions) -> anyhow::Result<()> {
    let interrupt = Interrupt::begin().context("Cannot block signals")?;
    let first = read_first(options)?;
    if options.once {
        if let Some(path) = &options.json {
            write_json(path, &Report::of_counters(&first))?;
        }
        return Ok(print(&live::table(&first))?);
    }
    let begun = Instant::now();
    let interval = Duration::from_millis(options.interval_ms);
    let end = options
        .seconds
        .map(|seconds| begun + Duration::from_secs_f64(seconds));
    let mut series = Series::default();
    let mut live = Live::new(std::io::stdout().is_terminal());
    series.take(0.0, first);
    let mut next = begun;
    let mut ended = false;
    let mut printed = Ok(());
    while !ended && printed.is_ok() {
        // A look that took longer than the interval is followed by the next one in its turn.
        next = (next + interval).max(Instant::now());
        let until = end.map_or(next, |end| end.min(next));
        ended = interrupt.pause(until) || end.is_some_and(|end| Instant::now() >= end);
        let (counters, _) = read_all(options);
        if let Some(tick) = series.take(begun.elapsed().as_secs_f64(), counters) {
            printed = print(&live.tick(tick));
        }
    }
    if let Some(path) = &options.svg {
        write(path, &figure::draw(&series))?;
    }
    if let Some(path) = &options.json {
        write_json(path, &Report::of(&series))?;
    }
    printed?;
    Ok(print(&live::table(&series.moved))?)
}

fn write_json(path: &Path, report: &Report) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    write(path, &text)
}
