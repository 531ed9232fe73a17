//! A guest process forges, replays and steals tokens, takes memory away in flight, and uses tokens
//! of another VM; an honest one beside it, and another VM, go on.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_abi::tunnel::{ENVELOPE_MAGIC, SECTOR_BYTES};
use farlane_kit::guest::Guest;
use farlane_kit::guest_root::GuestFile;
use farlane_kit::held::{Call, Held};
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use crate::conditions::{PATIENCE, no_complaint, wait_until};
use crate::gpu_machine::{
    Backends, GPU, PROGRAM_TIMEOUT, mount, prepare, run_with_library, ways, with_library,
};
use crate::lending::Blocks;
use crate::run::Run;

const PACKAGE: &str = "farlane-attacks";
const DISK_MIB: u32 = 128;
const FILE_BYTES: u64 = 16 << 20;
const SEED: u32 = 3;
/// Bytes of a read that is held: one request.
const HELD_BYTES: u64 = 64 << 10;
/// The files that have the attacker read, and unmap its memory.
const READ: &str = "/tmp/read";
const UNMAP: &str = "/tmp/unmap";
/// How long the guest is seen to wait for a read: twice as long as a backend may be silent to the
/// guest's driver.
const HOLD_SECONDS: u64 = 8;
/// The disk that is attacked, and the one of honest processes.
const TARGET: &str = "/dev/vda";
const HONEST: &str = "/dev/vdb";
/// The tunnel's driver.
const DRIVER: &str = "/sys/bus/virtio/drivers/farlane";
/// The GPU's memory, in sysfs.
const RESOURCE: &str = "$(for d in /sys/bus/pci/devices/*; do [ $(cat $d/class) = 0x120000 ] && \
                        echo $d/resource2; done)";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    progress::step("Building the attacker", || workspace.build(&[PACKAGE]))?;
    let program = GuestFile::new(
        workspace.built("farlane-attack-tokens")?,
        "usr/bin/farlane-attack-tokens",
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
    unmapped_in_flight(&guests[0], &backends[0], blocks[0].path(), report)?;
    let refused = stolen(&guests, &backends)?;
    say(
        report,
        "a token of another VM",
        &format!("{refused} requests refused"),
    );
    let disks = [blocks[2].path(), blocks[3].path()];
    unbound_in_flight(&guests[1], &backends[1], disks, report)?;
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
    report.tell("hostile tokens", what, figure);
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
    let attack = format!("farlane-attack-tokens {TARGET} {RESOURCE} attack");
    let output = guests[0].spawn(&attack)?.wait(PROGRAM_TIMEOUT)?;
    output.check("The attack")?;
    for bystander in bystanders {
        let output = bystander.wait(PROGRAM_TIMEOUT)?;
        output.check("A bystander")?;
    }
    say(
        report,
        "forged, replayed, stolen, revoked, unmapped",
        output.stdout.trim(),
    );
    Ok(())
}

/// Stops what serves the disks of a VM, and has it go on until it is about to read blocks into
/// memory for what `begin` begins.
fn hold_read(
    backends: &Backends,
    blocks: &Path,
    begin: impl FnOnce() -> Result<()>,
) -> Result<Held> {
    let mut held = Held::stop(backends.disks.pid(), |name| name.starts_with("queue"))?;
    begin()?;
    let reads = |held: &Held, call: &Call| {
        let file = held.file_of(call.arguments[0]);
        call.number == libc::SYS_preadv && file.as_deref() == Some(blocks)
    };
    let read = held.advance(PATIENCE, reads)?;
    ensure!(read.is_some(), "The disk is not read");
    Ok(held)
}

/// Goes on holding, by the guest's clock, as its driver counts. Time for a backend that does not
/// wait to let go of the memory, too: where it is not enough, what lands afterwards tells.
fn hold_on(guest: &Guest, mut check: impl FnMut() -> Result<()>) -> Result<()> {
    let uptime = || {
        let seconds = guest.run("cut -d . -f 1 /proc/uptime")?;
        seconds.trim().parse::<u64>().context("No uptime")
    };
    let end = uptime()? + HOLD_SECONDS;
    while uptime()? < end {
        check()?;
    }
    Ok(())
}

/// Memory is unmapped while a disk reads into it: the unmapping waits, and nothing lands
/// afterwards.
fn unmapped_in_flight(
    guest: &Guest,
    backends: &Backends,
    blocks: &Path,
    report: &mut Report,
) -> Result<()> {
    let line = format!("farlane-attack-tokens {TARGET} {RESOURCE} unmap {READ} {UNMAP}");
    let job = guest.spawn(&line)?;
    job.wait_output(PATIENCE, |said| said.contains("Ready"))?;
    let held = hold_read(backends, blocks, || {
        guest.run(&format!("touch {READ}")).map(drop)
    })?;
    guest.run(&format!("touch {UNMAP}"))?;
    hold_on(guest, || {
        let said = job.so_far();
        ensure!(
            !said.contains("Unmapped"),
            "Memory was unmapped while the disk still read into it:\n{said}"
        );
        Ok(())
    })?;
    drop(held);
    let output = job.wait(PROGRAM_TIMEOUT)?;
    output.check(format_args!("`{line}`"))?;
    let landed = output.stdout.lines().last().unwrap_or_default();
    say(report, "memory unmapped while a read was held", landed);
    Ok(())
}

/// The tunnel's driver is unbound while a disk reads into device memory: that waits, and the VM
/// goes on. The process that reads has its bytes, by the tunnel; one that writes to the other disk
/// meanwhile is told of each write that has not arrived, and none of its envelopes is on a disk.
fn unbound_in_flight(
    guest: &Guest,
    backends: &Backends,
    [target, honest]: [&Path; 2],
    report: &mut Report,
) -> Result<()> {
    let line = format!("farlane-attack-tokens {TARGET} {RESOURCE} write");
    // Its context is the first one.
    let writing = guest.spawn(&line)?;
    writing.wait_output(PATIENCE, |said| said.contains("Writing"))?;
    let read = format!("gpu_io read /mnt/data --seed {SEED} --bytes {HELD_BYTES}");
    // What the file system reads to find the file is in memory afterwards.
    run_with_library(guest, "p2p", &read)?;
    let mut reading = None;
    let mut held = hold_read(backends, honest, || {
        reading = Some(guest.spawn(&with_library("p2p", &read))?);
        Ok(())
    })?;
    held.release_others();
    let reading = reading.context("Nothing was begun")?;
    let unbind = guest.spawn(&format!(
        "basename {DRIVER}/virtio* >{DRIVER}/unbind && echo Unbound"
    ))?;
    hold_on(guest, || {
        ensure!(
            !unbind.so_far().contains("Unbound"),
            "The device was let go of while the disk still read into its memory"
        );
        Ok(())
    })?;
    drop(held);
    let output = unbind.wait(PROGRAM_TIMEOUT)?;
    ensure!(
        output.stdout.contains("Unbound"),
        "Unbinding: {}\n{}",
        output.how(),
        output.all()
    );
    let output = writing.wait(PROGRAM_TIMEOUT)?;
    let written = output.stdout.lines().last().unwrap_or_default();
    ensure!(
        output.success() && !written.contains(" 0 were refused"),
        "`{line}`: {}\n{}",
        output.how(),
        output.all()
    );
    for blocks in [target, honest] {
        no_envelope(blocks)?;
    }
    let output = reading.wait(PROGRAM_TIMEOUT)?;
    output.check(format_args!("`{read}`"))?;
    let ways = ways(&output.stderr)?;
    ensure!(
        ways.p2p == HELD_BYTES,
        "{HELD_BYTES} bytes were read by the tunnel, and the library says {ways:?}"
    );
    say(
        report,
        "the tunnel unbound while a read was held",
        &format!("waits, the VM goes on, the bytes are there; {written}"),
    );
    Ok(())
}

/// Nothing on a disk is an envelope.
fn no_envelope(blocks: &Path) -> Result<()> {
    let magic = ENVELOPE_MAGIC.to_le_bytes();
    let bytes = std::fs::read(blocks)?;
    let found = bytes
        .chunks(SECTOR_BYTES)
        .position(|sector| sector.starts_with(&magic));
    ensure!(
        found.is_none(),
        "{}: an envelope is in sector {found:?}",
        blocks.display()
    );
    Ok(())
}

/// A token that lives in VM a is used in VM b.
fn stolen(guests: &[Guest; 2], backends: &[Backends; 2]) -> Result<u64> {
    let [a, b] = guests;
    // It keeps its token until its standard input ends.
    let lend = format!(
        "sh -c 'echo $$ >/tmp/holder; exec tail -f /dev/null' | farlane-attack-tokens {TARGET} \
         {RESOURCE} lend >/tmp/token"
    );
    let lending = a.spawn(&lend)?;
    wait_until("a token is lent", || {
        Ok(a.exec("grep -q . /tmp/token")?.success())
    })?;
    let token = a.read_file("/tmp/token")?;
    let before = backends[1].disks.metrics()?.sum("tokens_refused")?;
    let steal = format!(
        "farlane-attack-tokens {TARGET} {RESOURCE} steal {}",
        token.trim()
    );
    let output = b.spawn(&steal)?.wait(Duration::from_secs(60))?;
    output.check("Stealing")?;
    let after = backends[1].disks.metrics()?.sum("tokens_refused")?;
    ensure!(after > before, "Nothing was refused");
    a.run("kill $(cat /tmp/holder)")?;
    let output = lending.wait(PROGRAM_TIMEOUT)?;
    output.check("Lending")?;
    Ok(after - before)
}

/// The GPU goes while it is read into.
fn unplugged(guest: &Guest) -> Result<()> {
    guest.run("echo 3 >/proc/sys/vm/drop_caches")?;
    let line = format!(
        "while FARLANE_IO=p2p farlane-run --io gpu_io read /mnt/data --seed {SEED} --bytes \
         {FILE_BYTES}; do :; done"
    );
    let reading = guest.spawn(&line)?;
    guest.unplug(GPU).context("The GPU cannot be unplugged")?;
    let output = reading.wait(PROGRAM_TIMEOUT)?;
    output.check("The loop")?;
    guest.run("umount /mnt && fsck.ext4 -f -n /dev/vdb")?;
    Ok(())
}
