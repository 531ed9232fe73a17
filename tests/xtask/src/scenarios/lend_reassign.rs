//! One disk and three guests that take turns: each finds what the one before has written. Then the
//! administrator takes the disk away from one that is using it.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::compare::interval::median;
use farlane_kit::guest::Guest;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use crate::conditions::{PATIENCE, no_complaint};
use crate::fio::{Fio, VERIFY};
use crate::lending::{Blocks, Borrower, Lender, Nvme, namespace, wait_gone, wait_traffic};
use crate::run::Run;

const DISK: &str = "disk";

const ROUNDS: usize = 20;

/// Each round has a block of the disk.
const STAMP_BYTES: usize = 4096;

/// Never ends by itself.
const ENDLESS: &str = "--rw=randrw --bs=4k --iodepth=32 --time_based --runtime=600";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = Blocks::new(32)?;
    let lending = run.context.lending()?;
    let lender = lending.lender(run, "lender", &[Nvme::new(DISK, &blocks)])?;
    let names = ["a", "b", "c"];
    let borrower = |name| lending.borrower(run, name, &lender, DISK);
    let borrowers = [
        borrower(names[0])?,
        borrower(names[1])?,
        borrower(names[2])?,
    ];
    let guests = run.boot(names.map(|name| {
        let mut config = VmConfig::new(name).storage().vfio_user_port(DISK);
        config.memory_mib = 512;
        // A disk that is taken away answers no more: the guest is to notice soon.
        config.kernel_arguments(["nvme_core.io_timeout=3", "nvme_core.admin_timeout=3"])
    }))?;
    for guest in &guests {
        guest.run("modprobe nvme")?;
    }
    let turns = Turns {
        lender: &lender,
        borrowers: &borrowers,
        guests: &guests,
    };
    turns.rounds(report)?;
    turns.revoke(report)?;
    for guest in &guests {
        no_complaint(guest)?;
    }
    drop(guests);
    for borrower in borrowers {
        borrower.stop()?;
    }
    lender.stop()
}

struct Turns<'a> {
    lender: &'a Lender,
    borrowers: &'a [Borrower; 3],
    guests: &'a [Guest; 3],
}

impl Turns<'_> {
    fn rounds(&self, report: &mut Report) -> Result<()> {
        let mut took = Vec::new();
        for round in 0..ROUNDS {
            let begin = Instant::now();
            self.round(round)
                .with_context(|| format!("In round {round}"))?;
            took.push(begin.elapsed().as_secs_f64());
        }
        let figure = format!("{ROUNDS} rounds, {:.1} s each", median(&took));
        report.tell("lent NVMe", "three VMs take turns", figure);
        Ok(())
    }

    /// One guest gets the disk, finds the stamp of the one before, leaves its own, and lets go of
    /// the disk.
    fn round(&self, round: usize) -> Result<()> {
        let who = round % self.guests.len();
        let guest = &self.guests[who];
        ensure!(
            self.lender.holder(DISK)?.is_none(),
            "Somebody holds the disk before it is used"
        );
        guest.plug_vfio_user(DISK, self.borrowers[who].socket())?;
        let node = namespace(guest, DISK)?;
        self.lender.wait_held(DISK, guest.name())?;
        if let Some(before) = round.checked_sub(1) {
            let read = format!("dd if={node} iflag=direct bs={STAMP_BYTES} skip={before} count=1");
            let found = guest.run(&format!("{read} 2>/dev/null"))?;
            ensure!(
                found == stamp(before),
                "Block {before} of the disk has {found:?} and not {:?}",
                stamp(before)
            );
        }
        guest.write_file("/tmp/stamp", 0o644, stamp(round).as_bytes())?;
        guest.run(&format!(
            "dd if=/tmp/stamp of={node} oflag=direct bs={STAMP_BYTES} seek={round} count=1"
        ))?;
        guest.unplug(DISK)?;
        self.lender.wait_offered(DISK)?;
        Ok(())
    }

    /// The administrator takes the disk from the guest that writes to it: the guest sees it going
    /// and lives, and the next one gets the disk.
    fn revoke(&self, report: &mut Report) -> Result<()> {
        let [a, b, _] = self.guests;
        a.plug_vfio_user(DISK, self.borrowers[0].socket())?;
        let node = namespace(a, DISK)?;
        let fio = Fio::new(&node, ENDLESS);
        let job = a.spawn(fio.line())?;
        wait_traffic(a, &node)?;
        ensure!(!job.has_ended(), "fio ended early:\n{}", job.so_far());
        let begin = Instant::now();
        self.lender.revoke(DISK)?;
        self.lender.wait_offered(DISK)?;
        let free = begin.elapsed();
        let output = job.wait(PATIENCE)?;
        ensure!(
            !output.success(),
            "fio did not notice that its disk was taken:\n{}",
            output.all()
        );
        let dead = begin.elapsed();
        // QEMU does not unplug a vfio-user device by itself when the borrower asks for it.
        a.unplug(DISK)?;
        wait_gone(a, DISK)?;

        b.plug_vfio_user(DISK, self.borrowers[1].socket())?;
        let node = namespace(b, DISK)?;
        self.lender.wait_held(DISK, b.name())?;
        let words = format!("{VERIFY} --bs=4k --iodepth=32 --size=4m");
        Fio::new(&node, &words).verify(b)?;
        b.unplug(DISK)?;
        self.lender.wait_offered(DISK)?;
        let figure = format!(
            "on offer after {:.1} s, dead in its VM after {:.1} s, the next VM has it",
            free.as_secs_f64(),
            dead.as_secs_f64()
        );
        report.tell("lent NVMe", "revoked in use", figure);
        Ok(())
    }
}

/// What a round leaves on the disk: a whole block of it.
fn stamp(round: usize) -> String {
    let text = format!("round {round} ");
    text.chars().cycle().take(STAMP_BYTES).collect()
}
