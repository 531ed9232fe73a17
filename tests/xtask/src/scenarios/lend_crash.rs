//! kill -9 of a borrower, a VM and a lender, each while a disk is in use: nobody but the VM that
//! used it notices, that VM sees errors and lives, nothing is written to its memory after its lease
//! has ended, and the disk is on offer again.
//!
//! Each of them dies while the lender is about to read blocks into the VM's memory: the
//! controller's worker is held there (`farlane_kit::held`), and the disk must not be on offer
//! before that read is over.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::attachments::Ram;
use farlane_kit::guest::{Guest, Job};
use farlane_kit::held::{Call, Held};
use farlane_kit::protocol::Ending;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::Scratch;

use crate::conditions::{PATIENCE, no_complaint, wait_until};
use crate::fio::{FIO_TIMEOUT, Fio, figures};
use crate::lending::{Blocks, Borrower, Lender, Nvme, namespace, wait_gone, wait_traffic};
use crate::run::Run;

/// The disk whose users die.
const DISK: &str = "disk";

/// A disk of the same lender, and one of another, that a VM goes on to use.
const NEAR: &str = "near";
const OTHER: &str = "other";

/// How long a lease lasts that is not renewed: the longest there is. A disk whose user has died is
/// on offer again without that.
const TERM: Duration = Duration::from_secs(60);

/// What the lender calls a holder whose lease has ended and whose device is not yet as new.
const RETURNING: &str = "victim (returning)";

/// A guest gives up on a disk that does not answer after a few seconds instead of half a minute.
pub const IMPATIENT: [&str; 2] = ["nvme_core.io_timeout=3", "nvme_core.admin_timeout=3"];

const ENDLESS: &str = "--rw=randrw --bs=4k --iodepth=32 --time_based --runtime=600";

/// Writes and checks twice; what it writes is checked soon after.
const WITNESS: &str = "--rw=randwrite --bs=4k --iodepth=4 --size=8m --loops=2 --verify=crc32c \
                       --verify_fatal=1 \
    --verify_backlog=64";

/// Writes and checks once.
const CHECK: &str =
    "--rw=randwrite --bs=4k --iodepth=32 --size=4m --verify=crc32c --verify_fatal=1";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
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
        let lender = lending.lender_of_term(run, "lender", &offered(disks), TERM)?;
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

    /// The guest's processors stand still from before the end of its lease: what its memory gets
    /// then comes from the device alone.
    fn borrower_killed(
        &mut self,
        guest: &Guest,
        ram: &Path,
        witness: &Guest,
        report: &mut Report,
    ) -> Result<()> {
        let job = self.use_disk(guest)?;
        let reading = self.hold_a_read()?;
        let near = going(witness, NEAR)?;
        guest.qmp().stop()?;
        self.victim.kill()?;
        self.offered_after(
            "borrower killed",
            RETURNING,
            reading,
            (witness, near),
            report,
        )?;
        self.next_one_leaves_alone(ram, witness)?;
        guest.qmp().cont()?;
        ends_in_error(guest, job)?;

        guest.unplug(DISK)?;
        wait_gone(guest, DISK)?;
        let lending = self.run.context.lending()?;
        self.victim = lending.borrower(self.run, "victim", &self.lender, DISK)?;
        self.plug_again(guest)?;
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
        let reading = self.hold_a_read()?;
        let near = going(witness, NEAR)?;
        guest.kill()?;
        drop(job);
        // Its borrower takes memory away from the device first, and gives it back when that takes
        // long.
        self.offered_after("VM killed", RETURNING, reading, (witness, near), report)?;
        self.next_one_leaves_alone(ram, witness)
    }

    /// All who have borrowed from this lender lose their disks; those of another lender notice
    /// nothing.
    fn lender_killed(&mut self, guest: &Guest, witness: &Guest, report: &mut Report) -> Result<()> {
        guest.plug_vfio_user(DISK, self.victim.socket())?;
        let job = self.use_disk(guest)?;
        let reading = self.hold_a_read()?;
        let other = going(witness, OTHER)?;
        reading.kill()?;
        self.lender.kill()?;
        goes_on(other)?;
        let lending = self.run.context.lending()?;
        self.lender = lending.lender_of_term(self.run, "lender", &offered(self.disks), TERM)?;
        self.lender.wait_offered(DISK)?;
        ends_in_error(guest, job)?;

        guest.unplug(DISK)?;
        wait_gone(guest, DISK)?;
        self.plug_again(guest)?;
        shown(
            report,
            "lender killed",
            "its VMs see errors, and use the disk again",
        );
        Ok(())
    }

    /// The guest whose disk has failed, and was unplugged, uses it again.
    fn plug_again(&self, guest: &Guest) -> Result<()> {
        guest.plug_vfio_user(DISK, self.victim.socket())?;
        Fio::new(&namespace(guest, DISK)?, CHECK).run(guest)?;
        Ok(())
    }

    /// Stops the controller of [`DISK`] where it is about to read blocks into the memory of its
    /// user.
    fn hold_a_read(&self) -> Result<Held> {
        let mut held = Held::stop(self.lender.backend().pid(), |name| name == "nvme")?;
        let reads = |held: &Held, call: &Call| {
            let file = held.file_of(call.arguments[0]);
            call.number == libc::SYS_preadv && file.as_deref() == Some(self.disks[0].path())
        };
        let call = held.advance(PATIENCE, reads)?;
        ensure!(call.is_some(), "The lender reads nothing for {DISK}");
        held.release_others();
        Ok(held)
    }

    /// The user of the disk has died while the lender had a read in its hands. The disk is not on
    /// offer as long as the read is under way, and the lender says that it is `held`; then it is,
    /// and not when the lease's term is over. Others go on meanwhile.
    fn offered_after(
        &self,
        what: &str,
        held: &str,
        reading: Held,
        (witness, near): (&Guest, Job<'_>),
        report: &mut Report,
    ) -> Result<()> {
        let mut holder = None;
        wait_until(&format!("{DISK} is held by {held}"), || {
            holder = self.lender.holder(DISK)?;
            Ok(holder.as_deref() == Some(held))
        })?;
        goes_on(near)?;
        Fio::new(&namespace(witness, NEAR)?, CHECK).run(witness)?;
        let still = self.lender.holder(DISK)?;
        ensure!(
            still == holder,
            "{what}: the holder was {holder:?}, then {still:?}, while the lender still read for it"
        );
        let begin = Instant::now();
        drop(reading);
        self.lender.wait_offered(DISK)?;
        let figure = format!(
            "on offer {:.3} s after its last read, without waiting for the lease's {} s",
            begin.elapsed().as_secs_f64(),
            TERM.as_secs()
        );
        shown(report, what, &figure);
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

    /// The next holder of the disk works with it, and the memory of a guest that does not run, and
    /// whose lease has ended, stays as it is.
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
pub fn ends_in_error(guest: &Guest, job: Job<'_>) -> Result<()> {
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
pub fn first_difference(path: &Path, before: &[u8]) -> Result<Option<usize>> {
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
    report.tell("lent NVMe", what, figure);
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
