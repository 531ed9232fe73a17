//! Attackers of a lender and of a borrower, and a VM that abuses its lent disk, beside a VM that
//! uses a disk of the same lender through the same borrower. They get errors, or lose their
//! connections; the VM finds all that it has written.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use farlane_kit::backend::Backend;
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::process::check_output;
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use crate::conditions::{no_complaint, wait_until};
use crate::fio::Fio;
use crate::lending::{Blocks, Lender, Nvme, namespace};
use crate::run::Run;
use crate::seed::seed;
use crate::vitals::Vitals;

/// The disk of the VM, and the one that is attacked.
const DISK: &str = "disk";
const TARGET: &str = "target";

const MESSAGES: u64 = 10_000;

/// What the VM does all the time: it writes, and looks at what it has written.
const TRAFFIC: &str = "--rw=randrw --bs=4k --iodepth=32 --size=8m --verify=crc32c --verify_fatal=1";

/// How often a guest does each of the things that it must not.
const ABUSE_ROUNDS: u32 = 1024;

/// Prints the address of the NVMe function of a guest.
const FIND_FUNCTION: &str = "for d in /sys/bus/pci/devices/*; do [ $(cat $d/class) = 0x010802 ] \
                             && echo ${d##*/}; done; true";

/// How long an attack may take, on a machine that does much else.
const ATTACK_TIMEOUT: Duration = Duration::from_secs(600);

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let (disk, target) = (Blocks::new(32)?, Blocks::new(32)?);
    let lending = run.context.lending()?;
    let devices = [Nvme::new(DISK, &disk), Nvme::new(TARGET, &target)];
    let lender = lending.lender(run, "lender", &devices)?;
    let borrower = SharedBorrower::start(run, &lender)?;
    let attacker = Attacker::build(run)?;
    let mut config = VmConfig::new("victim")
        .storage()
        .vfio_user(DISK, &borrower.disk)
        .vfio_user_port(TARGET);
    config.memory_mib = 512;
    let abuser = GuestFile::new(run.guest_program("nvme_hostile")?, "usr/bin/nvme_hostile");
    let mut hostile = VmConfig::new("hostile")
        .vfio_user_port(TARGET)
        .files([abuser]);
    hostile.memory_mib = 512;
    let [guest, hostile] = run.boot([config, hostile])?;
    guest.run("modprobe nvme")?;
    let node = namespace(&guest, DISK)?;
    // What the first use costs is no growth, nor what the first client does.
    Fio::new(&node, TRAFFIC).run(&guest)?;
    attacker.borrower(&borrower, 100)?;
    lender.wait_offered(TARGET)?;
    let before = [
        Vitals::of(lender.backend())?,
        Vitals::of(&borrower.backend)?,
    ];

    let rounds = beside(&guest, &node, || {
        attacks(&attacker, &lender, &borrower, report)?;
        lender.wait_offered(TARGET)?;
        abuse(&hostile, &borrower, attacker.seed, report)?;
        lender.wait_offered(TARGET)
    })?;
    let what = format!("fio {TRAFFIC}");
    report.add(
        "VM beside them",
        what,
        format!("{rounds} rounds, all right"),
    );
    for (name, backend, before) in [
        ("farlane-lend", lender.backend(), &before[0]),
        ("farlane-borrow", &borrower.backend, &before[1]),
    ] {
        let after = before.settled(name, backend)?;
        let figure = format!("{before}; {after}");
        report.add(name, "own memory and open files, before and after", figure);
    }
    ensure!(
        lender.holder(DISK)?.as_deref() == Some("borrower"),
        "The VM's disk has another holder"
    );

    // What was attacked is as good as ever.
    guest.plug_vfio_user(TARGET, &borrower.target)?;
    let node = namespace(&guest, TARGET)?;
    Fio::new(&node, TRAFFIC).run(&guest)?;
    guest.unplug(TARGET)?;
    lender.wait_offered(TARGET)?;
    report.add("VM", "the attacked disk, afterwards", "fio verified it");
    no_complaint(&guest)?;
    no_complaint(&hostile)?;
    drop((guest, hostile));
    for backend in [lender.backend(), &borrower.backend] {
        let log = backend.log();
        ensure!(!log.contains("panicked"), "A daemon panicked:\n{log}");
    }
    borrower.backend.stop()?;
    lender.stop()
}

/// Both attacks, one after the other.
fn attacks(
    attacker: &Attacker,
    lender: &Lender,
    borrower: &SharedBorrower,
    report: &mut Report,
) -> Result<()> {
    let mut add = |who: &str, what: &str, outcome: String| {
        report.tell(who, what, outcome);
    };
    let outcome = attacker.borrower(borrower, MESSAGES)?;
    add("farlane-borrow", "malformed vfio-user messages", outcome);
    let outcome = attacker.lender(lender, MESSAGES)?;
    add("farlane-lend", "malformed lending messages", outcome);
    Ok(())
}

/// Has a guest program its disk with what no driver would.
fn abuse(guest: &Guest, borrower: &SharedBorrower, seed: u64, report: &mut Report) -> Result<()> {
    guest.plug_vfio_user(TARGET, &borrower.target)?;
    let mut function = String::new();
    wait_until("the guest has found the disk's function", || {
        function = guest.run(FIND_FUNCTION)?.trim().to_owned();
        Ok(!function.is_empty())
    })?;
    let begin = Instant::now();
    let line = format!("nvme_hostile {function} {seed} {ABUSE_ROUNDS}");
    let output = guest.spawn(&line)?.wait(ATTACK_TIMEOUT)?;
    output.check(format_args!("`{line}`"))?;
    let survived = output.stdout.lines().last().unwrap_or_default();
    let figure = format!("{survived}, in {:.1} s", begin.elapsed().as_secs_f64());
    report.tell("VM", "that abuses its disk", figure);
    guest.unplug(TARGET)
}

/// The program that attacks.
struct Attacker {
    program: PathBuf,
    /// What its messages are made of.
    seed: u64,
}

impl Attacker {
    fn build(run: &Run<'_>) -> Result<Self> {
        let workspace = run.context.workspace();
        progress::step("Building the attacker", || {
            workspace.build(&["farlane-attacks"])
        })?;
        Ok(Self {
            program: workspace.built("farlane-attack-lending")?,
            seed: seed()?,
        })
    }

    /// vfio-user messages about the device that may be attacked.
    fn borrower(&self, borrower: &SharedBorrower, count: u64) -> Result<String> {
        let mut command = Command::new(&self.program);
        command.arg("borrower").arg(&borrower.target);
        command.args([count, self.seed].map(|number| number.to_string()));
        outcome("the attacker of the borrower", command, count)
    }

    /// Lending messages about it.
    fn lender(&self, lender: &Lender, count: u64) -> Result<String> {
        let mut command = Command::new(&self.program);
        command.arg("lender").arg(lender.socket());
        command.args([count, self.seed].map(|number| number.to_string()));
        command.arg(TARGET);
        outcome("the attacker of the lender", command, count)
    }
}

/// Runs an attack with so many messages. It fails when one of those that are invalid is not
/// refused; it must have had some.
fn outcome(name: &str, command: Command, count: u64) -> Result<String> {
    let begin = Instant::now();
    let said = check_output(name, command, ATTACK_TIMEOUT)?;
    let number = |wanted: &str| -> Result<u64> {
        let mut words = said
            .split_whitespace()
            .filter_map(|word| word.split_once('='));
        let found = words.find(|(name, _)| *name == wanted);
        let (_, number) =
            found.with_context(|| format!("{name} does not tell {wanted}: {said}"))?;
        Ok(number.parse()?)
    };
    let (sent, invalid) = (number("sent")?, number("invalid")?);
    ensure!(
        sent == count && invalid > count / 8,
        "{name} has attacked nothing: {said}"
    );
    Ok(format!(
        "{invalid} invalid, all refused; {} that may be valid; {}, in {:.1} s",
        sent - invalid,
        said.trim(),
        begin.elapsed().as_secs_f64()
    ))
}

/// Has the VM use its disk as long as `attacks` runs; returns how often.
fn beside(guest: &Guest, node: &str, attacks: impl FnOnce() -> Result<()>) -> Result<u32> {
    let going = AtomicBool::new(true);
    thread::scope(|scope| {
        let victim = scope.spawn(|| -> Result<u32> {
            let mut rounds = 0;
            while going.load(Ordering::Relaxed) || rounds == 0 {
                let round = Fio::new(node, TRAFFIC).run(guest);
                round.context("The VM beside the attack was harmed")?;
                rounds += 1;
            }
            Ok(rounds)
        });
        let attacked = attacks();
        going.store(false, Ordering::Relaxed);
        let rounds = victim.join();
        attacked?;
        rounds.map_err(|_| anyhow!("The VM's thread panicked"))?
    })
}

/// One borrower for both devices: what attacks one must not hold up the other.
struct SharedBorrower {
    backend: Backend,
    disk: PathBuf,
    target: PathBuf,
}

impl SharedBorrower {
    fn start(run: &Run<'_>, lender: &Lender) -> Result<Self> {
        let lending = run.context.lending()?;
        let (disk, target) = (run.path("borrowed-disk"), run.path("borrowed-target"));
        let mut command = Command::new(lending.borrow());
        for (socket, device) in [(&disk, DISK), (&target, TARGET)] {
            command.arg("--socket-path").arg(socket);
            command.args(["--device", device]);
        }
        command.args(["--lender", &lender.address(), "--name", "borrower"]);
        let log = run.logs().join("borrower.log");
        let backend = Backend::start("farlane-borrow", command, &[&disk, &target], &log)?;
        Ok(Self {
            backend,
            disk,
            target,
        })
    }
}
