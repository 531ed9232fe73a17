//! kill -9 of a borrower, a VM and a lender, each while a disk is in use: nobody but the VM that used it notices, that
//! VM sees errors and lives, nothing is written to its memory after its lease has ended, and the disk is on offer again.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use farlane_vm_agent::protocol::Ending;
use farlane_vmkit::attachments::Ram;
use farlane_vmkit::guest::{Guest, Job};
use farlane_vmkit::progress;
use farlane_vmkit::qemu::VmConfig;
use farlane_vmkit::report::Report;
use farlane_vmkit::scratch::Scratch;

use super::Scenario;
use crate::conditions::{PATIENCE, no_complaint};
use crate::fio::{FIO_TIMEOUT, Fio, figures};
use crate::lending::{Blocks, Borrower, Lender, Nvme, namespace, wait_gone, wait_traffic};
use crate::run::Run;

pub const SCENARIO: Scenario = Scenario {
    name: "lend-crash",
    about: "kill -9 of borrower, VM and lender while fio writes to a lent NVMe; others go on, the disk is free in time",
    is_test: true,
    run,
};

/// The disk whose users die.
const DISK: &str = "disk";

/// A disk of the same lender, and one of another, that a VM goes on to use.
const NEAR: &str = "near";
const OTHER: &str = "other";

/// A disk is on offer again within this after its user has died. It is reported as it is; the scenario fails at
/// [`SLACK`] times that, as a busy machine may keep the lender from running.
const OFFERED: Duration = Duration::from_secs(5);
const SLACK: u32 = 3;

/// A guest gives up on a disk that does not answer after a few seconds instead of half a minute.
const IMPATIENT: [&str; 2] = ["nvme_core.io_timeout=3", "nvme_core.admin_timeout=3"];

const ENDLESS: &str = "--rw=randrw --bs=4k --iodepth=32 --time_based --runtime=600";

/// Writes and checks for a while; what it writes is checked soon after.
const WITNESS: &str = "--rw=randwrite --bs=4k --iodepth=4 --size=8m --verify=crc32c --verify_fatal=1 \
    --verify_backlog=64 --time_based --runtime=8";

/// Writes and checks once.
const CHECK: &str =
    "--rw=randwrite --bs=4k --iodepth=32 --size=4m --verify=crc32c --verify_fatal=1";

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let disks = [Blocks::new(32)?, Blocks::new(32)?, Blocks::new(32)?];
    let mut stage = Stage::new(run, &disks)?;
    let memory = Scratch::in_memory()?;
    let ram = ["v", "u"].map(|name| memory.join(name));
    let config = |name: &str| {
        let config = VmConfig::new(name).storage().vfio_user_port(DISK);
        config.kernel_arguments(IMPATIENT)
    };
    let small = |name: &str, ram: &PathBuf| {
        let mut config = config(name).ram(Ram::File(ram.clone()));
        config.memory_mib = 512;
        config
    };
    let witness = config("w").vfio_user(NEAR, stage.near.socket());
    let [first, second, witness] = run.boot([
        small("v", &ram[0]),
        small("u", &ram[1]),
        witness.vfio_user(OTHER, stage.other.socket()),
    ])?;
    for guest in [&first, &second, &witness] {
        guest.run("modprobe nvme")?;
    }

    first.plug_vfio_user(DISK, stage.victim.socket())?;
    stage.borrower_killed(&first, &ram[0], &witness, report)?;
    stage.vm_killed(&first, &ram[0], &witness, report)?;
    stage.lender_killed(&second, &witness, report)?;
    for guest in [&second, &witness] {
        no_complaint(guest)?;
    }
    drop((first, second, witness));
    let Stage {
        lender,
        other_lender,
        victim,
        next,
        near,
        other,
        ..
    } = stage;
    for borrower in [victim, next, near, other] {
        borrower.stop()?;
    }
    lender.stop()?;
    other_lender.stop()
}

/// Two lenders, and the borrowers between them and the guests.
struct Stage<'r> {
    run: &'r Run<'r>,
    disks: &'r [Blocks; 3],
    /// Lends [`DISK`] and [`NEAR`].
    lender: Lender,
    /// Lends [`OTHER`].
    other_lender: Lender,
    /// For whoever has the disk and dies.
    victim: Borrower,
    /// For whoever gets it next.
    next: Borrower,
    near: Borrower,
    other: Borrower,
}

impl<'r> Stage<'r> {
    fn new(run: &'r Run<'r>, disks: &'r [Blocks; 3]) -> Result<Self> {
        let lending = run.context.lending()?;
        let lender = lending.lender(run, "lender", &offered(disks))?;
        let other_lender = lending.lender(run, "other-lender", &[Nvme::new(OTHER, &disks[2])])?;
        Ok(Self {
            victim: lending.borrower(run, "victim", &lender, DISK)?,
            next: lending.borrower(run, "next", &lender, DISK)?,
            near: lending.borrower(run, NEAR, &lender, NEAR)?,
            other: lending.borrower(run, OTHER, &other_lender, OTHER)?,
            run,
            disks,
            lender,
            other_lender,
        })
    }

    /// The guest's processors stand still from before the end of its lease: what its memory gets then comes from the
    /// device alone.
    fn borrower_killed(
        &mut self,
        guest: &Guest,
        ram: &Path,
        witness: &Guest,
        report: &mut Report,
    ) -> Result<()> {
        let job = self.use_disk(guest)?;
        let near = going(witness, NEAR)?;
        guest.qmp().stop()?;
        let begin = Instant::now();
        self.victim.kill()?;
        self.offered("borrower killed", begin, report)?;
        self.next_one_leaves_alone(ram, witness)?;
        guest.qmp().cont()?;
        ends_in_error(guest, job)?;
        goes_on(near)?;

        guest.unplug(DISK)?;
        wait_gone(guest, DISK)?;
        let lending = self.run.context.lending()?;
        self.victim = lending.borrower(self.run, "victim", &self.lender, DISK)?;
        guest.plug_vfio_user(DISK, self.victim.socket())?;
        Fio::new(&namespace(guest, DISK)?, CHECK).run(guest)?;
        shown(
            report,
            "borrower killed",
            "its VM sees errors, and uses the disk again",
        );
        Ok(())
    }

    fn vm_killed(
        &mut self,
        guest: &Guest,
        ram: &Path,
        witness: &Guest,
        report: &mut Report,
    ) -> Result<()> {
        let job = self.use_disk(guest)?;
        let near = going(witness, NEAR)?;
        let begin = Instant::now();
        guest.kill()?;
        drop(job);
        self.offered("VM killed", begin, report)?;
        self.next_one_leaves_alone(ram, witness)?;
        goes_on(near)
    }

    /// All who have borrowed from this lender lose their disks; those of another lender notice nothing.
    fn lender_killed(&mut self, guest: &Guest, witness: &Guest, report: &mut Report) -> Result<()> {
        guest.plug_vfio_user(DISK, self.victim.socket())?;
        let job = self.use_disk(guest)?;
        let other = going(witness, OTHER)?;
        let begin = Instant::now();
        self.lender.kill()?;
        let lending = self.run.context.lending()?;
        self.lender = lending.lender(self.run, "lender", &offered(self.disks))?;
        self.offered("lender killed, and started again", begin, report)?;
        ends_in_error(guest, job)?;
        goes_on(other)?;

        guest.unplug(DISK)?;
        wait_gone(guest, DISK)?;
        guest.plug_vfio_user(DISK, self.victim.socket())?;
        Fio::new(&namespace(guest, DISK)?, CHECK).run(guest)?;
        shown(
            report,
            "lender killed",
            "its VMs see errors, and use the disk again",
        );
        Ok(())
    }

    /// Has a guest, into which the disk was plugged, write to it without end.
    fn use_disk<'g>(&self, guest: &'g Guest) -> Result<Job<'g>> {
        let node = namespace(guest, DISK)?;
        self.lender.wait_held(DISK, "victim")?;
        let job = guest.spawn(Fio::new(&node, ENDLESS).line())?;
        wait_traffic(guest, &node)?;
        ensure!(!job.has_ended(), "fio ended early:\n{}", job.so_far());
        Ok(job)
    }

    /// The disk has no holder soon after `begin`.
    fn offered(&self, what: &str, begin: Instant, report: &mut Report) -> Result<()> {
        self.lender.wait_offered(DISK)?;
        let took = begin.elapsed();
        let figure = format!(
            "on offer after {:.2} s (at most {} s)",
            took.as_secs_f64(),
            OFFERED.as_secs()
        );
        shown(report, what, &figure);
        ensure!(took <= OFFERED * SLACK, "{what}: {figure}");
        Ok(())
    }

    /// The next holder of the disk works with it, and the memory of a guest that does not run, and whose lease has
    /// ended, stays as it is.
    fn next_one_leaves_alone(&self, ram: &Path, next: &Guest) -> Result<()> {
        let before = fs::read(ram).with_context(|| format!("Cannot read {}", ram.display()))?;
        next.plug_vfio_user(DISK, self.next.socket())?;
        Fio::new(&namespace(next, DISK)?, CHECK).run(next)?;
        next.unplug(DISK)?;
        self.lender.wait_offered(DISK)?;
        if let Some(page) = first_difference(ram, &before)? {
            bail!("The memory of a guest without a lease changed at {page:#x}");
        }
        Ok(())
    }
}

/// What the first lender offers.
fn offered(disks: &[Blocks; 3]) -> [Nvme; 2] {
    [Nvme::new(DISK, &disks[0]), Nvme::new(NEAR, &disks[1])]
}

/// Has a guest write to a disk and check it for a while.
fn going<'g>(guest: &'g Guest, disk: &str) -> Result<Job<'g>> {
    let node = namespace(guest, disk)?;
    let job = guest.spawn(Fio::new(&node, WITNESS).line())?;
    wait_traffic(guest, &node)?;
    Ok(job)
}

/// It has come to its end, and found everything that it wrote.
fn goes_on(job: Job<'_>) -> Result<()> {
    let figures = figures(WITNESS, &job.wait(FIO_TIMEOUT)?)?;
    ensure!(figures.read.requests > 0, "Nothing was checked");
    Ok(())
}

/// A program whose disk has gone fails, and its guest lives.
fn ends_in_error(guest: &Guest, job: Job<'_>) -> Result<()> {
    let output = job.wait(PATIENCE)?;
    ensure!(
        matches!(output.ending, Ending::Exited(code) if code != 0),
        "fio lost its disk and ended with {}:\n{}",
        output.how(),
        output.all()
    );
    // A request failed: with EIO, or, once the disk has no blocks any more, with ENOSPC.
    ensure!(
        output.all().contains("io_u error"),
        "fio failed, but not for its disk:\n{}",
        output.all()
    );
    guest.run("true")?;
    no_complaint(guest)
}

/// Where a file differs from what it was.
fn first_difference(path: &Path, before: &[u8]) -> Result<Option<usize>> {
    let mut file = File::open(path).with_context(|| format!("Cannot open {}", path.display()))?;
    let mut now = vec![0; 1 << 20];
    for (number, part) in before.chunks(now.len()).enumerate() {
        let now = &mut now[..part.len()];
        file.read_exact(now)?;
        if now != part {
            let inside = now.iter().zip(part).position(|(now, then)| now != then);
            return Ok(Some((number << 20) + inside.unwrap_or_default()));
        }
    }
    Ok(None)
}

fn shown(report: &mut Report, what: &str, figure: &str) {
    progress::note(&format!("{what}: {figure}"));
    report.add("lent NVMe", what, figure);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_byte_is_found() {
        let folder = Scratch::new().unwrap();
        let path = folder.join("memory");
        let mut bytes = vec![7; (1 << 20) + 5000];
        fs::write(&path, &bytes).unwrap();
        assert_eq!(first_difference(&path, &bytes).unwrap(), None);
        bytes[(1 << 20) + 4321] = 8;
        assert_eq!(
            first_difference(&path, &bytes).unwrap(),
            Some((1 << 20) + 4321)
        );
    }
}
