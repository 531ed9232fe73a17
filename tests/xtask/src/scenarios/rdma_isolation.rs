//! A hostile process, in a VM and on this machine, beside victims: the process next to it, and
//! unmodified programs between two VMs. It gets an error for everything that it tries, and they
//! notice nothing.
//!
//! In a VM it attacks our own driver and the backend behind it, or the RDMA device of the kernel.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;

use super::rdma_stock::DEVICE;
use crate::conditions::{no_complaint, wait_until};
use crate::farlane::Pair;
use crate::place::{Host, Place, Running};
use crate::run::Run;
use crate::tools::{TOOL_TIMEOUT, between};
use crate::vitals::Vitals;
use crate::way::Way;

/// What the victims in the two VMs run meanwhile.
const TRAFFIC: &[&str] = &[
    "ib_write_bw -s 65536 -n 1000 -F",
    "ibv_rc_pingpong -c -s 65536 -n 200",
    "ib_send_bw -s 65536 -n 500 -e -F",
];

/// Where a victim in a VM tells what it has.
const FILE: &str = "/tmp/witness";

/// How long a whole attack may take: thousands of calls on a machine that does much else.
const ATTACK_TIMEOUT: Duration = Duration::from_secs(600);

/// What the daemon says of those who break rules, in a VM and on this machine.
const REFUSALS: &[&str] = &["is cut off", "queue given up", "Host process"];

/// Through our library, and on this machine.
pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let socket = run.path("host");
    let stage = Stage::boot(run, Way::Library, Some(&socket))?;
    let host = Host::new(run.context.farlane()?.programs(), &socket, run.logs());
    let on_host = run.path("witness").display().to_string();
    stage.attacked(report, |report| {
        let witness = stage.witness(&host, &on_host)?;
        stage.attack("host", &host, &on_host, "sh -c", report)?;
        report.add("host", "the victim", witness.end()?);
        Ok(())
    })?;
    stage.unharmed(REFUSALS, report)
}

/// Through the guests' kernel.
pub fn stock(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let stage = Stage::boot(run, Way::Kernel, None)?;
    let objects = stage.objects()?;
    stage.attacked(report, |_| Ok(()))?;
    wait_until("the guests' kernels have no object of a program", || {
        Ok(stage.objects()? == objects)
    })
    .with_context(|| format!("There was {objects:?}, and now {:?}", stage.objects()))?;
    // Nothing that a process writes into its queues is worth a line of the log.
    stage.unharmed(&[], report)
}

/// Two guests with a hostile program.
struct Stage {
    way: Way,
    pair: Pair,
    _wire: Wire,
    before: Vitals,
}

impl Stage {
    fn boot(run: &Run<'_>, way: Way, host: Option<&Path>) -> Result<Self> {
        let workspace = run.context.workspace();
        workspace.build(&["farlane-attacks"])?;
        let hostile = workspace.built("farlane-attack-rdma")?;
        let files = [GuestFile::new(&hostile, "usr/bin/farlane-attack-rdma")];
        let wire = Wire::new()?;
        let pair = way.boot_pair(run, &wire, &files, host)?;
        // What the first programs cost once is no growth: the window, for one, becomes a part of
        // the VM's memory when it is first used.
        round(way, &pair.a, &pair.b)?;
        for guest in [&pair.a, &pair.b] {
            Witness::begin(way, guest, FILE)?.end()?;
        }
        let before = Vitals::of(&pair.backend)?;
        Ok(Self {
            way,
            pair,
            _wire: wire,
            before,
        })
    }

    fn witness<'a>(&self, place: &'a dyn Place, file: &'a str) -> Result<Witness<'a>> {
        Witness::begin(self.way, place, file)
    }

    /// Attacks in both guests, and what else there is to be done while the victims' traffic goes
    /// on.
    fn attacked(
        &self,
        report: &mut Report,
        others: impl FnOnce(&mut Report) -> Result<()>,
    ) -> Result<()> {
        let Pair { a, b, .. } = &self.pair;
        let rounds = beside(self.way, a, b, || {
            // As a user without rights: beside the victim, and from the other VM.
            let witness = self.witness(a, FILE)?;
            self.attack("VM", a, FILE, "su user -c", report)?;
            let known = a.read_file(FILE)?;
            b.write_file(FILE, 0o644, known.as_bytes())?;
            self.attack("other VM", b, FILE, "su user -c", report)?;
            report.add("VM", "the victim of both", witness.end()?);
            others(report)
        })?;
        let what = format!("{} beside it", TRAFFIC.join(", "));
        report.add("two VMs", what, format!("{rounds} rounds, all right"));
        Ok(())
    }

    /// The daemon lives, has not grown, and has said what it has to; the guests' kernels complain
    /// of nothing.
    fn unharmed(self, refusals: &[&str], report: &mut Report) -> Result<()> {
        let Self {
            mut pair, before, ..
        } = self;
        ensure!(pair.backend.is_running()?, "The daemon has ended");
        let after = before.settled("farlane-rdma", &pair.backend)?;
        report.add(
            "daemon",
            "own memory and open files, before and after",
            format!("{before}; {after}"),
        );
        let log = pair.backend.log();
        for said in refusals {
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

    /// What the guests' kernels have of their RDMA devices.
    fn objects(&self) -> Result<[String; 2]> {
        let [a, b] = [&self.pair.a, &self.pair.b].map(|guest| {
            let counts = guest.run(&format!("rdma res show {DEVICE}"))?;
            anyhow::Ok(counts.trim().to_owned())
        });
        Ok([a?, b?])
    }
}

/// The victims' traffic once.
fn round(way: Way, a: &Guest, b: &Guest) -> Result<()> {
    for line in TRAFFIC {
        between(way.over(), &way.line(line), a, b).context("A victim was harmed")?;
    }
    Ok(())
}

/// Runs the victims' traffic as long as `attacks` runs; returns how often.
fn beside(way: Way, a: &Guest, b: &Guest, attacks: impl FnOnce() -> Result<()>) -> Result<u32> {
    let going = AtomicBool::new(true);
    thread::scope(|scope| {
        let victims = scope.spawn(|| -> Result<u32> {
            let mut rounds = 0;
            while going.load(Ordering::Relaxed) || rounds == 0 {
                round(way, a, b)?;
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

impl Stage {
    /// Has a hostile process attack the device of a place, and the victim that `file` tells about.
    fn attack(
        &self,
        name: &str,
        place: &dyn Place,
        file: &str,
        shell: &str,
        report: &mut Report,
    ) -> Result<()> {
        let [attack, _] = programs(self.way);
        let output = place
            .spawn(&format!("{shell} 'farlane-attack-rdma {attack} {file}'"))?
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
}

/// What the hostile program is told to be: the attacker, the victim.
fn programs(way: Way) -> [&'static str; 2] {
    match way {
        Way::Library => ["attack", "witness"],
        Way::Kernel => ["stock", "stock-witness"],
    }
}

/// A process with memory that must not change.
struct Witness<'a> {
    place: &'a dyn Place,
    file: &'a str,
    running: Box<dyn Running + 'a>,
}

impl<'a> Witness<'a> {
    /// Starts it and waits until it has said in `file` what it has.
    fn begin(way: Way, place: &'a dyn Place, file: &'a str) -> Result<Self> {
        let [_, witness] = programs(way);
        let mut running = place.spawn(&format!("farlane-attack-rdma {witness} {file}"))?;
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
