//! `farlane doctor` in a container of its own: it names each fault that is made there, and that
//! alone.

mod faults;
mod guest;

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::process::{output, tail};
use farlane_kit::progress;
use farlane_kit::report::Report;
use serde::Deserialize;

use crate::room::Room;
use crate::run::Run;
use faults::{Fault, MACHINES, NOT_HERE};

const TIMEOUT: Duration = Duration::from_secs(120);
/// How many faults are found at least, whatever the machine has of itself.
const LEAST: usize = 10;

/// What `farlane doctor --json` prints, as far as it is looked at.
#[derive(Debug, Deserialize)]
struct Findings {
    format: u32,
    findings: Vec<Finding>,
}

#[derive(Debug, Deserialize)]
struct Finding {
    name: String,
    level: String,
    what: String,
    remedy: Option<String>,
}

/// A name, and how bad it is.
type Found = (String, String);

impl Findings {
    /// What is not as it should be, of a document.
    fn parse(text: &str) -> Result<BTreeSet<Found>> {
        let document: Self =
            serde_json::from_str(text).with_context(|| format!("It prints {text:?}"))?;
        ensure!(document.format == 1, "Its format is {}", document.format);
        let mut found = BTreeSet::new();
        for finding in document.findings {
            let is_ok = finding.level == "ok";
            ensure!(
                !finding.what.is_empty() && finding.remedy.is_none() == is_ok,
                "{finding:?} has no text"
            );
            if !is_ok {
                found.insert((finding.name, finding.level));
            }
        }
        Ok(found)
    }
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    progress::step("Building farlane, a backend and the libraries", || {
        workspace.build(&["farlane-tool", "farlane-blk", "farlane-verbs"])
    })?;
    let over = run.path("room");
    std::fs::create_dir(&over)?;
    let programs = [
        (workspace.built("farlane")?, "/opt/farlane"),
        (workspace.built("farlane-blk")?, "/opt/farlane-blk"),
        (
            workspace.built("libfarlane_verbs.so")?,
            "/opt/verbs/libibverbs.so.1",
        ),
    ];
    let programs = programs.each_ref().map(|(from, to)| (from.as_path(), *to));
    let room = Room::new(run.context.kit()?.tree(), &over, &programs, None)?;

    let untouched = look(&room, "/opt/farlane doctor --json")?.context("It has ended with 77")?;
    let faults = faults::all();
    let injected: BTreeSet<_> = faults.iter().map(|fault| fault.name).collect();
    let others: Vec<_> = untouched
        .iter()
        .filter(|(name, _)| injected.contains(&**name) && !MACHINES.contains(&&**name))
        .collect();
    ensure!(
        others.is_empty(),
        "{others:?} is found where nothing was done"
    );

    let mut found = 0;
    for fault in &faults {
        let of = || format!("With {} ({})", fault.about, fault.name);
        let outcome = match is_found(&room, fault, &untouched).with_context(of)? {
            Outcome::Found => {
                found += 1;
                "found"
            }
            Outcome::NotHere => "not possible on this machine",
            Outcome::Before => "this machine has it of itself",
        };
        report.add("farlane doctor", fault.about, outcome);
    }
    ensure!(found >= LEAST, "Only {found} faults could be made");
    guest::run(run, report)
}

/// What has come of a fault.
enum Outcome {
    Found,
    /// It cannot be made.
    NotHere,
    /// It was there without being made.
    Before,
}

/// Looks without the fault and with it. Another difference than the fault's own is an error.
fn is_found(room: &Room, fault: &Fault, untouched: &BTreeSet<Found>) -> Result<Outcome> {
    let [without, with] = fault.lines();
    let before = match fault.ready {
        "" => untouched.clone(),
        _ => match look(room, &without)? {
            Some(before) => before,
            None => return Ok(Outcome::NotHere),
        },
    };
    // What was made ready is not this machine's own any more; for `bpf` there is only looked.
    let is_machines = MACHINES.contains(&fault.name);
    let is_own = is_machines && (fault.ready.is_empty() || fault.name == "bpf");
    if before.iter().any(|(name, _)| name == fault.name) {
        ensure!(is_own, "It is found before it is made: {before:?}");
        return Ok(Outcome::Before);
    }
    let after = look(room, &with)?.context("It cannot be made, though all is ready")?;
    let expected = (fault.name.to_owned(), fault.level.to_owned());
    let more: Vec<_> = after.difference(&before).collect();
    ensure!(more == [&expected], "{more:?} is found, not {expected:?}");
    let gone: Vec<_> = before.difference(&after).collect();
    ensure!(gone.is_empty(), "{gone:?} is not found any more");
    Ok(Outcome::Found)
}

/// What the program finds, at the end of a line; none where the line says that its fault has no
/// place on this machine.
fn look(room: &Room, line: &str) -> Result<Option<BTreeSet<Found>>> {
    let said = output("farlane doctor", room.shell(line), TIMEOUT)?;
    let errors = String::from_utf8_lossy(&said.stderr).into_owned();
    if said.status.code() == Some(NOT_HERE) {
        return Ok(None);
    }
    let found = Findings::parse(&String::from_utf8_lossy(&said.stdout))
        .with_context(|| tail(&errors, 20))?;
    let is_bad = found.iter().any(|(_, level)| level == "problem");
    if said.status.code() != Some(i32::from(is_bad)) {
        bail!("It ends with {} and {found:?}: {errors}", said.status);
    }
    Ok(Some(found))
}
