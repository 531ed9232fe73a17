//! A hostile process, in a VM and on this machine, beside victims: the process next to it, and
//! unmodified programs between two VMs. It gets an error for everything that it tries, and they
//! notice nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use crate::conditions::no_complaint;
use crate::place::{Host, Over, Place, Running};
use crate::run::Run;
use crate::tools::{TOOL_TIMEOUT, between};
use crate::vitals::Vitals;

/// What the victims in the two VMs run meanwhile.
const TRAFFIC: &[&str] = &[
    "ib_write_bw -s 65536 -n 1000 -F",
    "ibv_rc_pingpong -g 0 -c -s 65536 -n 200",
    "ib_send_bw -s 65536 -n 500 -e -F",
];

/// Where a victim in a VM tells what it has.
const FILE: &str = "/tmp/witness";

/// How long a whole attack may take: thousands of calls on a machine that does much else.
const ATTACK_TIMEOUT: Duration = Duration::from_secs(600);

/// What the daemon says of those who break rules, in a VM and on this machine.
const REFUSALS: &[&str] = &["is cut off", "queue given up", "Host process"];

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let farlane = run.context.farlane()?;
    let workspace = run.context.workspace();
    workspace.build(&["farlane-attacks"])?;
    let hostile = workspace.built("farlane-attack-rdma")?;
    let files = [GuestFile::new(&hostile, "usr/bin/farlane-attack-rdma")];
    let socket = run.path("host");
    let wire = Wire::new()?;
    let mut pair = farlane.boot_pair_with(run, &wire, &files, Some(&socket))?;
    let host = Host::new(farlane.programs(), &socket, run.logs());

    // What the first programs cost once is no growth: the window, for one, becomes a part of the
    // VM's memory when it is first used.
    round(&pair.a, &pair.b)?;
    for guest in [&pair.a, &pair.b] {
        Witness::begin(guest, FILE)?.end()?;
    }
    let before = Vitals::of(&pair.backend)?;
    let on_host = run.path("witness").display().to_string();
    let rounds = beside(&pair.a, &pair.b, || {
        // As a user without rights: beside the victim, and from the other VM.
        let witness = Witness::begin(&pair.a, FILE)?;
        attack("VM", &pair.a, FILE, "su user -c", report)?;
        let known = pair.a.read_file(FILE)?;
        pair.b.write_file(FILE, 0o644, known.as_bytes())?;
        attack("other VM", &pair.b, FILE, "su user -c", report)?;
        report.add("VM", "the victim of both", witness.end()?);

        let witness = Witness::begin(&host, &on_host)?;
        attack("host", &host, &on_host, "sh -c", report)?;
        report.add("host", "the victim", witness.end()?);
        Ok(())
    })?;
    let what = format!("{} beside it", TRAFFIC.join(", "));
    report.add("two VMs", what, format!("{rounds} rounds, all right"));

    ensure!(pair.backend.is_running()?, "The daemon has ended");
    let after = before.settled("farlane-rdma", &pair.backend)?;
    report.add(
        "daemon",
        "own memory and open files, before and after",
        format!("{before}; {after}"),
    );
    let log = pair.backend.log();
    for said in REFUSALS {
        ensure!(log.contains(said), "The daemon has not logged: {said}");
    }
    ensure!(
        !log.contains("panicked"),
        "A thread of the daemon panicked:\n{log}"
    );
    let warnings = log.lines().filter(|line| line.contains(" WARN ")).count();
    report.add(
        "daemon",
        "refusals logged, others counted",
        format!("{warnings} lines"),
    );
    for guest in [&pair.a, &pair.b] {
        unharmed(guest, report)?;
    }
    pair.backend.stop()
}

/// The victims' traffic once.
fn round(a: &Guest, b: &Guest) -> Result<()> {
    for line in TRAFFIC {
        between(Over::Farlane, line, a, b).context("A victim was harmed")?;
    }
    Ok(())
}

/// Runs the victims' traffic as long as `attacks` runs; returns how often.
fn beside(a: &Guest, b: &Guest, attacks: impl FnOnce() -> Result<()>) -> Result<u32> {
    let going = AtomicBool::new(true);
    thread::scope(|scope| {
        let victims = scope.spawn(|| -> Result<u32> {
            let mut rounds = 0;
            while going.load(Ordering::Relaxed) || rounds == 0 {
                round(a, b)?;
                rounds += 1;
            }
            Ok(rounds)
        });
        let attacked = attacks();
        going.store(false, Ordering::Relaxed);
        let victims = victims
            .join()
            .map_err(|_| anyhow!("The victims' thread panicked"))?;
        attacked?;
        victims
    })
}

/// Has a hostile process attack the device of a place, and the victim that `file` tells about.
fn attack(
    name: &str,
    place: &dyn Place,
    file: &str,
    shell: &str,
    report: &mut Report,
) -> Result<()> {
    let output = place
        .spawn(&format!("{shell} 'farlane-attack-rdma attack {file}'"))?
        .wait(ATTACK_TIMEOUT)?;
    let said = output.all();
    let bad: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with("BAD "))
        .collect();
    ensure!(
        output.success() && bad.is_empty(),
        "Attacks in {name} had effects ({}):\n{}\nThe end of what it said:\n{}",
        output.how(),
        bad.join("\n"),
        farlane_kit::process::tail(&said, 5)
    );
    for line in said.lines() {
        let (what, got) = line.split_once(" -> ").unwrap_or(("in all", line));
        report.add(name, what, got);
    }
    Ok(())
}

/// A process with memory that must not change.
struct Witness<'a> {
    place: &'a dyn Place,
    file: &'a str,
    running: Box<dyn Running + 'a>,
}

impl<'a> Witness<'a> {
    /// Starts it and waits until it has said in `file` what it has.
    fn begin(place: &'a dyn Place, file: &'a str) -> Result<Self> {
        let mut running = place.spawn(&format!("farlane-attack-rdma witness {file}"))?;
        let deadline = Instant::now() + TOOL_TIMEOUT;
        loop {
            let there = place
                .spawn(&format!("test -e {file}"))?
                .wait(TOOL_TIMEOUT)?;
            if there.success() {
                return Ok(Self {
                    place,
                    file,
                    running,
                });
            }
            if running.wait_briefly()? || Instant::now() > deadline {
                bail!("The witness does not begin:\n{}", running.so_far());
            }
        }
    }

    /// Tells it to end; returns what it says, which must be good.
    fn end(self) -> Result<String> {
        let removed = self.place.spawn(&format!("rm {}", self.file))?;
        removed.wait(TOOL_TIMEOUT)?;
        let watched = self.running.wait(TOOL_TIMEOUT)?;
        watched.check("The process beside the hostile one")?;
        Ok(watched.all().trim().to_owned())
    }
}

/// The guest's kernel complains of nothing, and holds no page that was pinned.
fn unharmed(guest: &Guest, report: &mut Report) -> Result<()> {
    no_complaint(guest)?;
    // Each processor counts for itself, and adds up now and then, or when it is told to.
    let counted = "echo 1 >/proc/sys/vm/stat_refresh && grep nr_foll_pin_ /proc/vmstat";
    let pins = guest.run(counted)?;
    let count = |name: &str| -> Result<u64> {
        let line = pins.lines().find_map(|line| line.strip_prefix(name));
        let count = line.and_then(|rest| rest.trim().parse().ok());
        count.with_context(|| format!("No {name} in:\n{pins}"))
    };
    let acquired = count("nr_foll_pin_acquired")?;
    let released = count("nr_foll_pin_released")?;
    ensure!(
        acquired == released && acquired > 0,
        "Guest {} has pinned {acquired} pages and let go of {released}",
        guest.name()
    );
    let pages = format!("{acquired} pinned, {released} let go");
    report.add(
        format!("VM {}", guest.name()),
        "pages; kernel without complaint",
        pages,
    );
    Ok(())
}
