//! A disk that another process lends: the guest's own NVMe driver, nvme-cli, ext4 and fio work with
//! it, and the next guest finds the same files on it.

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::attachments::Ram;
use farlane_kit::compare::cpu::kept_from;
use farlane_kit::guest::Guest;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use serde_json::Value;
use std::time::Duration;

use crate::conditions::no_complaint;
use crate::fio::{Fio, VERIFY};
use crate::lending::{Blocks, Borrower, Lender, Nvme, namespace, wait_gone};
use crate::mounted::{self, COPY};
use crate::run::Run;

/// The device that goes from one guest to another, and those of the variants.
const DISK: &str = "disk";
const MESSAGES: &str = "messages";
const SHARED: &str = "shared";

const DISK_MIB: u32 = 192;
const SMALL_MIB: u32 = 32;

/// Reads for a while, many at a time.
const STEADY: &str = "--rw=randread --norandommap --bs=4k --iodepth=32 --time_based --runtime=2";

/// How often this is tried at most: on a busy machine others may take the processors meanwhile.
const STEADY_TRIES: usize = 4;

/// In steady state at most one access to the device's registers stops the VM for so many requests.
const REQUESTS_PER_TRAP: u64 = 20;

/// For how long others have a processor at a time (`base_slice_ns` of Linux on two processors,
/// rounded up). A device whose guest does not run so long sleeps (`farlane_worker::idle`), and the
/// next request wakes it, by a doorbell of each queue of the pair at most.
const TIME_SLICE: Duration = Duration::from_millis(3);
const DOORBELLS: u64 = 2;

/// A file on the disk's file system that fio writes.
const DATA: &str = "/mnt/data";

/// What happens is told at each step.
struct Story<'a> {
    /// Where the figures go.
    report: &'a mut Report,
    place: &'static str,
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = [DISK_MIB, SMALL_MIB, SMALL_MIB].map(Blocks::new);
    let [disk, messages, shared] = blocks;
    let (disk, messages, shared) = (disk?, messages?, shared?);
    let lending = run.context.lending()?;
    let devices = [
        Nvme::new(DISK, &disk),
        Nvme::new(MESSAGES, &messages),
        Nvme::new(SHARED, &shared).shared_doorbells(),
    ];
    let lender = lending.lender(run, "lender", &devices)?;
    let borrower = |name, device| lending.borrower(run, name, &lender, device);
    let borrowers = [borrower("a", DISK)?, borrower("b", DISK)?];
    let by_messages = borrower("c", MESSAGES)?;
    let with_shared = borrower("d", SHARED)?;
    let private = VmConfig::new("c").storage().ram(Ram::Private);
    let [a, b, c] = run.boot([
        VmConfig::new("a")
            .storage()
            .vfio_user(DISK, borrowers[0].socket()),
        VmConfig::new("b")
            .storage()
            .vfio_user_port(DISK)
            .vfio_user(SHARED, with_shared.socket()),
        private.vfio_user(MESSAGES, by_messages.socket()),
    ])?;

    let mut story = Story::new(report);
    story.tell(&lender, &borrowers, [&a, &b])?;
    messages_only(&c, &by_messages, &mut story)?;
    shared_doorbells(&b, &lender, &with_shared, &mut story)?;
    for guest in [&a, &b, &c] {
        no_complaint(guest)?;
    }
    drop((a, b, c));
    for borrower in borrowers.into_iter().chain([by_messages, with_shared]) {
        borrower.stop()?;
    }
    lender.stop()
}

/// The story alone, for whoever watches.
pub fn show(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = Blocks::new(DISK_MIB)?;
    let lending = run.context.lending()?;
    let lender = lending.lender(run, "lender", &[Nvme::new(DISK, &blocks)])?;
    let borrower = |name| lending.borrower(run, name, &lender, DISK);
    let borrowers = [borrower("a")?, borrower("b")?];
    let [a, b] = run.boot([
        VmConfig::new("a")
            .storage()
            .vfio_user(DISK, borrowers[0].socket()),
        VmConfig::new("b").storage().vfio_user_port(DISK),
    ])?;
    Story::new(report).tell(&lender, &borrowers, [&a, &b])?;
    drop((a, b));
    let [first, second] = borrowers;
    first.stop()?;
    second.stop()?;
    lender.stop()
}

impl<'a> Story<'a> {
    fn new(report: &'a mut Report) -> Self {
        Self {
            report,
            place: "lent NVMe",
        }
    }

    fn say(&mut self, what: &str, figure: &str) {
        self.report.tell(self.place, what, figure);
    }

    /// A guest makes a file system on the lent disk; after it lets go of the disk another one has
    /// its files.
    fn tell(
        &mut self,
        lender: &Lender,
        borrowers: &[Borrower; 2],
        [a, b]: [&Guest; 2],
    ) -> Result<()> {
        a.run("modprobe nvme")?;
        b.run("modprobe nvme")?;
        let node = namespace(a, DISK)?;
        lender.wait_held(DISK, a.name())?;
        self.say("nvme id-ctrl", &identify(a, &node)?);
        a.run(&format!(
            "mkfs.ext4 -q {node} && mount -t ext4 {node} /mnt && {COPY}"
        ))?;
        self.verify(
            a,
            "fio --verify=crc32c",
            Fio::new(
                DATA,
                &format!("{VERIFY} --iodepth=32 --bsrange=4k-64k --size=48m"),
            ),
        )?;
        self.steady(a, &node, lender, &borrowers[0])?;
        let files = mounted::sum(a)?;
        a.run("umount /mnt")?;
        self.say("mkfs.ext4, mount, cp, umount", &format!("{files} files"));

        a.unplug(DISK)?;
        wait_gone(a, DISK)?;
        lender.wait_offered(DISK)?;
        b.plug_vfio_user(DISK, borrowers[1].socket())?;
        let node = namespace(b, DISK)?;
        lender.wait_held(DISK, b.name())?;
        println!("{}", lender.table()?);
        self.say("hot-removed from VM a, hot-added to VM b", "held by b");
        b.run(&format!(
            "fsck.ext4 -f -n {node} && mount -t ext4 -o ro {node} /mnt"
        ))?;
        mounted::check(b)?;
        self.say(
            "fsck.ext4, mount, sha256sum -c in VM b",
            &format!("{files} files are the same"),
        );
        b.run("umount /mnt")?;
        b.unplug(DISK)?;
        lender.wait_offered(DISK)?;
        Ok(())
    }

    /// Runs fio with checks of what it reads.
    fn verify(&mut self, guest: &Guest, what: &str, fio: Fio) -> Result<()> {
        let verified = fio.verify(guest)?;
        self.say(what, &verified.to_string());
        Ok(())
    }

    /// Many requests at a time hardly ever stop the VM, as far as nothing else keeps guest and
    /// device from running: the device sleeps when the guest has not run for long, and then needs
    /// to be woken.
    fn steady(
        &mut self,
        guest: &Guest,
        node: &str,
        lender: &Lender,
        borrower: &Borrower,
    ) -> Result<()> {
        let kept = || anyhow::Ok(kept_from(guest.pid())? + kept_from(lender.pid())?);
        let mut tries = Vec::new();
        for _ in 0..STEADY_TRIES {
            let before = (borrower.trapped()?, kept()?);
            let read = Fio::new(node, STEADY).run(guest)?.read;
            let trapped = borrower.trapped()? - before.0;
            let kept = kept()?.saturating_sub(before.1);
            let sleeps = kept.as_nanos() / TIME_SLICE.as_nanos();
            let allowed = read.requests / REQUESTS_PER_TRAP + DOORBELLS * u64::try_from(sleeps)?;
            let figure = format!(
                "{:.0} IOPS, {trapped} trapped accesses for {} requests; guest and device waited \
                 {:.0} ms for processors",
                read.iops,
                read.requests,
                1000.0 * kept.as_secs_f64()
            );
            if trapped < allowed {
                self.say("fio --rw=randread --iodepth=32", &figure);
                return Ok(());
            }
            tries.push(figure);
        }
        bail!(
            "More than one trapped access for {REQUESTS_PER_TRAP} requests, and those after \
             waiting for processors:\n{}",
            tries.join("\n")
        )
    }
}

/// What nvme-cli is told by the controller.
fn identify(guest: &Guest, node: &str) -> Result<String> {
    let text = guest.run(&format!("nvme id-ctrl {node} -o json"))?;
    let identity: Value = serde_json::from_str(&text).context("nvme-cli prints no JSON")?;
    let field = |name: &str| {
        let value = identity[name].as_str();
        anyhow::Ok(
            value
                .with_context(|| format!("No {name} in:\n{text}"))?
                .trim()
                .to_owned(),
        )
    };
    let (serial, model) = (field("sn")?, field("mn")?);
    ensure!(serial == DISK, "The serial number is {serial}");
    guest.run(&format!(
        "nvme id-ns {node} && nvme smart-log {node} && nvme flush {node}"
    ))?;
    Ok(format!("{model}, serial number {serial}"))
}

/// A VMM that does not share its guest's memory: each access of the device is a message.
fn messages_only(guest: &Guest, borrower: &Borrower, story: &mut Story<'_>) -> Result<()> {
    guest.run("modprobe nvme")?;
    let node = namespace(guest, MESSAGES)?;
    let words = format!("{VERIFY} --iodepth=32 --bsrange=512-32k --size=4m");
    story.verify(guest, "memory by messages: fio", Fio::new(&node, &words))?;
    let metrics = borrower.metrics()?;
    for direction in ["dma_reads", "dma_writes"] {
        let messages = metrics.sum(direction)?;
        ensure!(
            messages > 0,
            "Memory was not reached by messages: no {direction}"
        );
    }
    let timed = metrics.sum("register_read_seconds_count")?;
    let forwarded = metrics.sum("forwarded")?;
    ensure!(
        timed > 0 && timed <= forwarded,
        "{timed} register reads are timed, of {forwarded} accesses"
    );
    Ok(())
}

/// A device whose doorbells are memory of the guest.
fn shared_doorbells(
    guest: &Guest,
    lender: &Lender,
    borrower: &Borrower,
    story: &mut Story<'_>,
) -> Result<()> {
    let node = namespace(guest, SHARED)?;
    let words = format!("{VERIFY} --iodepth=32 --bsrange=4k-64k --size=8m");
    story.verify(guest, "shared doorbells: fio", Fio::new(&node, &words))?;
    story.place = "lent NVMe, shared doorbells";
    story.steady(guest, &node, lender, borrower)
}
