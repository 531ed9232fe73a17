//! A guest with two nodes, on a machine that is described to have two as well: fio with its thread
//! and its buffers on nodes of choice. The disks have no file system and no partitions, so that
//! nothing but fio moves data.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::numa::Numa;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;
use farlane_kit::scratch::Scratch;

use super::{DISK_BYTES, JOBS, NODE_MIB, VERIFIED_MIB};
use crate::conditions::no_complaint;
use crate::disks::{Disk, DiskBackend, node, path_name, socket, two_paths};
use crate::numa::{Locality, Memory, NODES, Placed, backend_words, per_cent};
use crate::run::Run;

/// Disks with two paths each: one whose requests are split where it is worth it, one of another
/// daemon that splits them by the page, and one that cannot be written.
const DISK: &str = "octo";
const FINE: &str = "octo-fine";
const SEALED: &str = "octo-sealed";

/// Processors of each node of the guest: twice as many queues as nodes.
const NODE_CPUS: u32 = 2;

/// Each 4 KiB of what is on the sealed disk.
const SEAL: &[u8; 16] = b"sealed since 23h";
const SEALED_BYTES: u64 = 16 << 20;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let folder = Scratch::new()?;
    let numa = Numa::new([(NODE_CPUS, NODE_MIB); 2], 21);
    let words = backend_words(run, &numa)?;
    let disks = run.context.disks()?;
    let [disk, fine, sealed] = [
        (DISK, DISK_BYTES),
        (FINE, DISK_BYTES),
        (SEALED, SEALED_BYTES),
    ]
    .map(|(name, bytes)| two_paths(&folder, name, bytes));
    let ([disk, fine], [sealed, sealed_again]) = ([disk?, fine?], sealed?);
    fs::write(
        &sealed,
        SEAL.repeat(usize::try_from(SEALED_BYTES)? / SEAL.len()),
    )?;
    let served = [
        Disk::on_nodes(DISK, &[&disk[0], &disk[1]]),
        Disk::on_nodes(SEALED, &[&sealed, &sealed_again]).with("read-only=on"),
    ];
    let backend = disks.serve_with(run, "farlane-blk", &served, &words, &[])?;
    let mut finer = words;
    finer.extend(["--split".into(), "4K".into()]);
    let served = [Disk::on_nodes(FINE, &[&fine[0], &fine[1]])];
    let fine_backend = disks.serve_with(run, "farlane-blk-fine", &served, &finer, &[])?;

    let mut config = VmConfig::new("octo")
        .storage()
        .numa(numa)
        // So that pages are interleaved one by one.
        .kernel_arguments(["transparent_hugepage=never"]);
    for disk in [DISK, FINE, SEALED] {
        config = config.vhost_user_disk(disk, socket(run, disk), 2 * NODE_CPUS);
    }
    let [guest] = run.boot([config])?;
    let mut story = Story {
        guest: &guest,
        report,
    };
    let device = node(&guest, DISK)?;
    let queues = guest.run(&format!(
        "ls /sys/block/{}/mq | wc -l",
        device.trim_start_matches("/dev/")
    ))?;
    ensure!(queues.trim() == "4", "{device} has {queues} queues");
    for job in JOBS {
        story.job(&backend, DISK, job)?;
    }
    story.job(&fine_backend, FINE, Placed::new(0, Memory::Interleaved))?;
    story.sealed(&backend)?;
    no_complaint(&guest)?;
    drop(guest);
    backend.stop()?;
    fine_backend.stop()
}

struct Story<'a> {
    guest: &'a Guest,
    report: &'a mut Report,
}

impl Story<'_> {
    fn say(&mut self, what: &str, figure: &str) {
        self.report.tell("farlane-blk", what, figure);
    }

    fn job(&mut self, backend: &DiskBackend, disk: &str, job: Placed) -> Result<()> {
        let device = node(self.guest, disk)?;
        let before = backend.metrics()?;
        let figures = job
            .verify(self.guest, &device, VERIFIED_MIB)
            .with_context(|| format!("{disk}, {}", job.name()))?;
        let after = backend.metrics()?;
        let moved =
            Locality::bytes(&after, "disk", disk)?.since(&Locality::bytes(&before, "disk", disk)?);
        let labels = [("disk", disk)];
        let split = after.of("split", &labels)? - before.of("split", &labels)?;
        let wanted = figures.read.bytes + figures.write.bytes;
        let say = || format!("{disk}, {}: {moved:?}, split {split}", job.name());
        ensure!(
            moved.total() == wanted,
            "fio moved {wanted} bytes. {}",
            say()
        );
        let (total, local) = (moved.total(), moved.local());
        let mut figure = format!("{} % local", per_cent(local, total)?);
        match job.memory {
            Memory::On(node) => {
                ensure!(moved.on(node) == total && split == 0, "{}", say());
                ensure!(
                    local == total && moved.over(&path_name(node)) == total,
                    "{}",
                    say()
                );
            }
            // Pieces of a page are worth being moved apart only where that was wished.
            Memory::Interleaved if disk == DISK => {
                ensure!(NODES.iter().all(|node| moved.on(*node) > 0), "{}", say());
                figure += ": pieces are too small to be split";
            }
            Memory::Interleaved | Memory::Striped => {
                ensure!(NODES.iter().all(|node| moved.on(*node) > 0), "{}", say());
                ensure!(local == total && split > 0, "{}", say());
                for node in NODES {
                    ensure!(moved.over(&path_name(node)) == moved.on(node), "{}", say());
                }
                figure += &format!(", {split} requests split");
            }
        }
        let what = match disk {
            FINE => format!("{}, --split 4K", job.name()),
            _ => job.name(),
        };
        self.say(&what, &figure);
        Ok(())
    }

    /// Reads of a disk that cannot be written, on the wrong node.
    fn sealed(&mut self, backend: &DiskBackend) -> Result<()> {
        let device = node(self.guest, SEALED)?;
        let before = backend.metrics()?;
        let read = self.guest.run(&format!(
            "numactl --cpunodebind=0 --membind=1 dd if={device} iflag=direct bs=256k 2>/dev/null \
             >/dev/shm/read; \
             stat -c %s /dev/shm/read; tr -d '{}' </dev/shm/read | wc -c; rm /dev/shm/read",
            String::from_utf8_lossy(SEAL)
        ))?;
        ensure!(
            read.split_whitespace()
                .eq([SEALED_BYTES.to_string().as_str(), "0"]),
            "The sealed disk has {read}"
        );
        let moved = Locality::bytes(&backend.metrics()?, "disk", SEALED)?
            .since(&Locality::bytes(&before, "disk", SEALED)?);
        ensure!(
            moved.total() == SEALED_BYTES
                && moved.on(1) == SEALED_BYTES
                && moved.local() == SEALED_BYTES,
            "{moved:?}"
        );
        let write = self.guest.exec(&format!(
            "dd if=/dev/zero of={device} bs=4k count=1 oflag=direct"
        ))?;
        ensure!(!write.success(), "A read-only disk was written");
        self.say(
            "read-only, thread on node 0, buffers on node 1",
            "100 % local",
        );
        Ok(())
    }
}
