//! A log scanner built on plain `pread`: it looks on the GPU for addresses in a log file that lies
//! on an ext4 disk. The program knows nothing of how bytes get there; run with the library, they
//! come from the page cache, by read-ahead, or straight from the disk, past the guest's memory
//! (spin-atc17, section 6.2).

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::report::Report;

use crate::conditions::no_complaint;
use crate::gpu_machine::{Backends, Ways, boot_mounted, drop_caches, run_with_library};
use crate::lending::Blocks;
use crate::run::Run;

const DISK_MIB: u32 = 128;
/// How often the piece of log is repeated, each time with an address of its own after it.
const PIECES: usize = 48;
const PIECE_LINES: usize = 4096;
/// What may cross the guest's memory besides: the file system's own blocks, the program's files.
const OWN_BYTES: u64 = 2 << 20;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    show(run, report)
}

/// The story, for whoever watches.
pub fn show(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = Blocks::new(DISK_MIB)?;
    let (backends, guest) = boot_mounted(run, &blocks)?;
    let bytes = plant(&guest)?;
    let expected = expected(&guest)?;
    let mut scan = |what: &str| {
        let before = counted(&backends)?;
        let (found, ways) = scan(&guest)?;
        ensure!(
            found == expected,
            "{what}: found {found:?}, planted {expected:?}"
        );
        let after = counted(&backends)?;
        let (tunnelled, others) = (
            after.tunnelled - before.tunnelled,
            after.others - before.others,
        );
        let figure = format!(
            "{} found; cache {}, read-ahead {}, P2P {} KiB; across the guest's memory {} KiB",
            found.len(),
            ways.cache >> 10,
            ways.read_ahead >> 10,
            ways.p2p >> 10,
            others >> 10
        );
        report.tell("log scanner", what, &figure);
        anyhow::Ok((ways, tunnelled, others))
    };
    // Just written: nothing has to be read.
    let (ways, tunnelled, _) = scan("log in the page cache")?;
    ensure!(
        ways.p2p == 0 && tunnelled == 0 && ways.cache >= bytes,
        "{ways:?}"
    );
    drop_caches(&guest)?;
    let (ways, tunnelled, others) = scan("log on the disk")?;
    ensure!(
        ways.p2p >= bytes / 2 && tunnelled >= ways.p2p && others <= bytes - ways.p2p + OWN_BYTES,
        "{ways:?}, {tunnelled} bytes tunnelled, {others} others"
    );
    drop_caches(&guest)?;
    let half = bytes >> 21;
    guest.run(&format!("dd if=/mnt/log of=/dev/null bs=1M count={half}"))?;
    let (ways, tunnelled, _) = scan("half of it in the page cache")?;
    ensure!(ways.p2p > 0 && tunnelled > 0 && ways.cache > 0, "{ways:?}");
    guest.run("umount /mnt")?;
    no_complaint(&guest)?;
    drop(guest);
    backends.stop()
}

/// Bytes that disks have moved.
struct Counted {
    tunnelled: u64,
    /// To the guest's memory.
    others: u64,
}

fn counted(backends: &Backends) -> Result<Counted> {
    let counters = backends.disks.metrics()?;
    let tunnelled = counters.sum("bytes_tunnelled_in")?;
    Ok(Counted {
        tunnelled,
        others: counters.sum("bytes_read")? - tunnelled,
    })
}

/// Makes a log of harmless lines with an address that is looked for after each piece; returns its
/// length.
fn plant(guest: &Guest) -> Result<u64> {
    let mut piece = String::new();
    for line in 0..PIECE_LINES {
        let (a, b, port) = (line % 251, line / 251, 1024 + line * 13 % 50_000);
        writeln!(
            piece,
            "Nov 21 04:{:02}:{:02} gate sshd[{port}]: Accepted publickey for ops from \
             10.{b}.{a}.7 port {port} ssh2",
            line / 60 % 60,
            line % 60
        )?;
    }
    guest.write_file("/tmp/piece", 0o644, piece.as_bytes())?;
    let mut patterns = String::new();
    let mut planted = String::new();
    for number in 0..PIECES {
        writeln!(patterns, "203.0.113.{}", 100 + number)?;
        writeln!(
            planted,
            "cat /tmp/piece; echo 'sshd: Failed password for root from 203.0.113.{} port 22'",
            100 + number
        )?;
    }
    guest.write_file("/tmp/patterns", 0o644, patterns.as_bytes())?;
    guest.write_file("/tmp/plant", 0o755, planted.as_bytes())?;
    guest.run("sh /tmp/plant >/mnt/log && sync")?;
    let size = guest.run("stat -c %s /mnt/log")?;
    size.trim().parse().context("The log has no size")
}

/// What grep finds, without GPU or library.
fn expected(guest: &Guest) -> Result<BTreeSet<String>> {
    let text = guest.run("LC_ALL=C /usr/bin/grep -obF -f /tmp/patterns /mnt/log")?;
    let found: BTreeSet<String> = text
        .lines()
        .map(|line| line.replacen(':', "\t", 1))
        .collect();
    ensure!(
        found.len() == PIECES,
        "grep has found {} of {PIECES} addresses",
        found.len()
    );
    Ok(found)
}

fn scan(guest: &Guest) -> Result<(BTreeSet<String>, Ways)> {
    let (output, ways) = run_with_library(guest, "auto", "log_scan /mnt/log /tmp/patterns")?;
    let found = output.stdout.lines().map(str::to_owned).collect();
    Ok((found, ways))
}
