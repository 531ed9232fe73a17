//! A guest process forges, replays and steals tokens, takes memory away in flight, and uses tokens of another VM; an honest
//! one beside it, and another VM, go on.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_vmkit::guest::{Guest, Job};
use farlane_vmkit::guest_root::GuestFile;
use farlane_vmkit::held::{Call, Held};
use farlane_vmkit::progress;
use farlane_vmkit::qemu::VmConfig;
use farlane_vmkit::report::Report;

use super::Scenario;
use crate::conditions::{PATIENCE, no_complaint, wait_until};
use crate::gpu_machine::{Backends, GPU, PROGRAM_TIMEOUT, mount, prepare};
use crate::lending::Blocks;
use crate::run::Run;

pub const SCENARIO: Scenario = Scenario {
    name: "gpu-hostile",
    about: "tokens forged, replayed, of another VM, after unregister, and memory unmapped in flight: errors, and nothing else",
    is_test: true,
    run,
};

const PACKAGE: &str = "farlane-token-hostile";
const DISK_MIB: u32 = 128;
const FILE_BYTES: u64 = 16 << 20;
const SEED: u32 = 3;
/// The files that have the attacker read, and unmap its memory.
const READ: &str = "/tmp/read";
const UNMAP: &str = "/tmp/unmap";
/// How long the guest is seen to wait for a read: twice as long as a backend may be silent to the guest's driver.
const HOLD_SECONDS: u64 = 8;
/// The disk that is attacked, and the one of honest processes.
const TARGET: &str = "/dev/vda";
const HONEST: &str = "/dev/vdb";
/// The tunnel's driver.
const DRIVER: &str = "/sys/bus/virtio/drivers/farlane";
/// The GPU's memory, in sysfs.
const RESOURCE: &str = "$(for d in /sys/bus/pci/devices/*; do [ $(cat $d/class) = 0x120000 ] && echo $d/resource2; done)";

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    progress::step("Building the attacker", || workspace.build(&[PACKAGE]))?;
    let program = GuestFile::new(
        workspace.built("farlane-token-hostile")?,
        "usr/bin/token-hostile",
    );
    let parts = run.context.gpu_parts()?;
    let blocks = [0; 4].map(|_| Blocks::new(DISK_MIB));
    let [a, b, c, d] = blocks;
    let blocks = [a?, b?, c?, d?];
    let backends = [
        Backends::start(run, "a", &[&blocks[0], &blocks[1]])?,
        Backends::start(run, "b", &[&blocks[2], &blocks[3]])?,
    ];
    let config = |name, at: usize| {
        let config = VmConfig::new(name).files([program.clone()]);
        backends[at].configure(parts, config)
    };
    let guests = run.boot([config("a", 0), config("b", 1)])?;
    for guest in &guests {
        prepare(guest)?;
        guest.run(&format!("echo 1 >$(dirname {RESOURCE})/enable"))?;
    }
    honest(&guests, report)?;
    let reading = Reading::hold(&guests[0], &backends[0], blocks[0].path())?;
    unmapped_in_flight(reading, report)?;
    let refused = stolen(&guests, &backends)?;
    say(
        report,
        "a token of another VM",
        &format!("{refused} requests refused"),
    );
    let reading = Reading::hold(&guests[1], &backends[1], blocks[2].path())?;
    unbound_in_flight(reading, report)?;
    unplugged(&guests[0])?;
    say(
        report,
        "the GPU unplugged under reads",
        "errors, the VM goes on",
    );
    for guest in &guests {
        no_complaint(guest)?;
    }
    drop(guests);
    for backends in backends {
        backends.stop()?;
    }
    Ok(())
}

fn say(report: &mut Report, what: &str, figure: &str) {
    progress::note(&format!("{what}: {figure}"));
    report.add("hostile tokens", what, figure);
}

/// Attacks in VM a; an honest process in it, and one in VM b, must not notice.
fn honest(guests: &[Guest; 2], report: &mut Report) -> Result<()> {
    let matrix = format!("gpu_io read-matrix /mnt/data --seed {SEED} --threads 2 --max 65536");
    let line = format!("FARLANE_IO=p2p farlane-run --io {matrix}");
    let mut bystanders = Vec::new();
    for guest in guests {
        mount(guest, HONEST)?;
        guest.run(&format!(
            "gpu_io make /mnt/data --seed {SEED} --bytes {FILE_BYTES}"
        ))?;
        guest.run("sync && echo 3 >/proc/sys/vm/drop_caches")?;
        bystanders.push(guest.spawn(&line)?);
    }
    let attack = format!("token-hostile {TARGET} {RESOURCE} attack");
    let output = guests[0].spawn(&attack)?.wait(PROGRAM_TIMEOUT)?;
    ensure!(
        output.success(),
        "The attack: {}\n{}",
        output.how(),
        output.all()
    );
    for bystander in bystanders {
        let output = bystander.wait(PROGRAM_TIMEOUT)?;
        ensure!(
            output.success(),
            "A bystander: {}\n{}",
            output.how(),
            output.all()
        );
    }
    say(
        report,
        "forged, replayed, stolen, revoked, unmapped",
        output.stdout.trim(),
    );
    Ok(())
}

/// An attacker whose disk's worker is about to read blocks into its memory.
struct Reading<'a> {
    guest: &'a Guest,
    line: String,
    job: Job<'a>,
    held: Held,
}

impl<'a> Reading<'a> {
    fn hold(guest: &'a Guest, backends: &Backends, blocks: &Path) -> Result<Self> {
        let line = format!("token-hostile {TARGET} {RESOURCE} unmap {READ} {UNMAP}");
        let job = guest.spawn(&line)?;
        job.wait_output(PATIENCE, |said| said.contains("Ready"))?;
        let mut held = Held::stop(backends.disks.pid(), |name| name.starts_with("queue"))?;
        guest.run(&format!("touch {READ}"))?;
        let reads = |held: &Held, call: &Call| {
            let file = held.file_of(call.arguments[0]);
            call.number == libc::SYS_preadv && file.as_deref() == Some(blocks)
        };
        let read = held.advance(PATIENCE, reads)?;
        ensure!(read.is_some(), "The disk is not read:\n{}", job.so_far());
        Ok(Self {
            guest,
            line,
            job,
            held,
        })
    }

    /// Goes on holding, by the guest's clock, as its driver counts. Time for a backend that does not wait to let go of the memory,
    /// too: where it is not enough, what lands afterwards tells.
    fn wait(&self, mut check: impl FnMut() -> Result<()>) -> Result<()> {
        let uptime = || {
            let seconds = self.guest.run("cut -d . -f 1 /proc/uptime")?;
            seconds.trim().parse::<u64>().context("No uptime")
        };
        let end = uptime()? + HOLD_SECONDS;
        while uptime()? < end {
            check()?;
        }
        Ok(())
    }
}

/// Memory is unmapped meanwhile: the unmapping waits, and nothing lands afterwards.
fn unmapped_in_flight(reading: Reading<'_>, report: &mut Report) -> Result<()> {
    reading.guest.run(&format!("touch {UNMAP}"))?;
    reading.wait(|| {
        let said = reading.job.so_far();
        ensure!(
            !said.contains("Unmapped"),
            "Memory was unmapped while the disk still read into it:\n{said}"
        );
        Ok(())
    })?;
    let Reading {
        line, job, held, ..
    } = reading;
    drop(held);
    let output = job.wait(PROGRAM_TIMEOUT)?;
    ensure!(
        output.success(),
        "`{line}`: {}\n{}",
        output.how(),
        output.all()
    );
    let landed = output.stdout.lines().last().unwrap_or_default();
    say(report, "memory unmapped while a read was held", landed);
    Ok(())
}

/// The tunnel's driver is unbound meanwhile: that waits, and the VM goes on.
fn unbound_in_flight(reading: Reading<'_>, report: &mut Report) -> Result<()> {
    let guest = reading.guest;
    let unbind = guest.spawn(&format!(
        "basename {DRIVER}/virtio* >{DRIVER}/unbind && echo Unbound"
    ))?;
    reading.wait(|| {
        ensure!(
            !unbind.so_far().contains("Unbound"),
            "The device was let go of while the disk still read into its memory"
        );
        Ok(())
    })?;
    let Reading { job, held, .. } = reading;
    drop(held);
    let output = unbind.wait(PROGRAM_TIMEOUT)?;
    ensure!(
        output.stdout.contains("Unbound"),
        "Unbinding: {}\n{}",
        output.how(),
        output.all()
    );
    // It has no device any more.
    guest.run(&format!("touch {UNMAP}"))?;
    job.wait(PROGRAM_TIMEOUT)?;
    say(
        report,
        "the tunnel unbound while a read was held",
        "waits, the VM goes on",
    );
    Ok(())
}

/// A token that lives in VM a is used in VM b.
fn stolen(guests: &[Guest; 2], backends: &[Backends; 2]) -> Result<u64> {
    let [a, b] = guests;
    // It keeps its token until its standard input ends.
    let lend = format!(
        "sh -c 'echo $$ >/tmp/holder; exec tail -f /dev/null' | token-hostile {TARGET} {RESOURCE} lend >/tmp/token"
    );
    let lending = a.spawn(&lend)?;
    wait_until("a token is lent", || {
        Ok(a.exec("grep -q . /tmp/token")?.success())
    })?;
    let token = a.read_file("/tmp/token")?;
    let before = backends[1].disks.metrics()?.sum("tokens_refused")?;
    let steal = format!("token-hostile {TARGET} {RESOURCE} steal {}", token.trim());
    let output = b.spawn(&steal)?.wait(Duration::from_secs(60))?;
    ensure!(
        output.success(),
        "Stealing: {}\n{}",
        output.how(),
        output.all()
    );
    let after = backends[1].disks.metrics()?.sum("tokens_refused")?;
    ensure!(after > before, "Nothing was refused");
    a.run("kill $(cat /tmp/holder)")?;
    let output = lending.wait(PROGRAM_TIMEOUT)?;
    ensure!(
        output.success(),
        "Lending: {}\n{}",
        output.how(),
        output.all()
    );
    Ok(after - before)
}

/// The GPU goes while it is read into.
fn unplugged(guest: &Guest) -> Result<()> {
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    let line = format!(
        "while FARLANE_IO=p2p farlane-run --io gpu_io read /mnt/data --seed {SEED} --bytes {FILE_BYTES}; do :; done"
    );
    let reading = guest.spawn(&line)?;
    guest.unplug(GPU).context("The GPU cannot be unplugged")?;
    let output = reading.wait(PROGRAM_TIMEOUT)?;
    ensure!(
        output.success(),
        "The loop: {}\n{}",
        output.how(),
        output.all()
    );
    guest.run("umount /mnt && fsck.ext4 -f -n /dev/vdb")?;
    Ok(())
}
