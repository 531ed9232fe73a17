//! Reads and writes between GPU memory and files on volumes of two disks.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use crate::gpu_machine::{Backends, drop_caches, mount, prepare, run_with_library};
use crate::lending::Blocks;
use crate::run::Run;
use crate::volumes::Volume;

const DISK_MIB: u32 = 64;
const NODES: [&str; 2] = ["/dev/vda", "/dev/vdb"];

/// The file, the largest transfer, and the numbers that the file is filled with.
const FILE_BYTES: u64 = 32 << 20;
const TRANSFER_BYTES: u64 = 1 << 20;
const SEED: u32 = 13;

/// Volumes through which sectors reach the disks as they are, once each.
const TRANSPARENT: [Volume; 2] = [Volume::MdStriped, Volume::LvmStriped];
/// Volumes that copy or change them.
const OPAQUE: [Volume; 2] = [Volume::MdMirrored, Volume::Encrypted];

/// The counters of what the disks move by themselves when files are read and written.
const COUNTERS: [&str; 2] = ["bytes_tunnelled_in", "bytes_tunnelled_out"];

/// The machine whose disks the volumes are made of.
struct Machine<'a> {
    guest: &'a Guest,
    backends: &'a Backends,
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = [Blocks::new(DISK_MIB)?, Blocks::new(DISK_MIB)?];
    let parts = run.context.gpu_parts()?;
    let backends = Backends::start(run, "a", &[&blocks[0], &blocks[1]])?;
    let [guest] = run.boot([backends.configure(parts, VmConfig::new("a"))])?;
    prepare(&guest)?;
    let machine = Machine {
        guest: &guest,
        backends: &backends,
    };
    for (volumes, tunnels) in [(TRANSPARENT, true), (OPAQUE, false)] {
        for volume in volumes {
            let figure = machine
                .volume(volume, tunnels)
                .with_context(|| format!("On {}", volume.name()))?;
            report.tell("files and GPU memory", volume.name(), figure);
        }
    }
    backends.end_with(guest)
}

impl Machine<'_> {
    /// Makes a volume and moves a file on it; says how much of it each disk has moved by itself.
    fn volume(&self, volume: Volume, tunnels: bool) -> Result<String> {
        let guest = self.guest;
        let made = volume.make(guest, NODES)?;
        mount(guest, made.node)?;
        guest.run(&format!(
            "gpu_io make /mnt/data --seed {SEED} --bytes {FILE_BYTES}"
        ))?;
        // Where nothing is to be tunnelled, one transfer shows it as well as many.
        let (commands, more) = if tunnels {
            (
                ["read-matrix", "write-matrix"],
                format!("--threads 4 --max {TRANSFER_BYTES}"),
            )
        } else {
            (["read", "write"], format!("--bytes {}", FILE_BYTES / 2))
        };
        let mut figures = Vec::new();
        for (command, counter) in commands.into_iter().zip(COUNTERS) {
            let line = format!("gpu_io {command} /mnt/data --seed {SEED} {more}");
            drop_caches(guest)?;
            let before = self.counters(counter)?;
            let (_, ways) = run_with_library(guest, "p2p", &line)?;
            let after = self.counters(counter)?;
            let moved = [0, 1].map(|disk| after[disk] - before[disk]);
            if tunnels {
                ensure!(
                    ways.p2p > 0 && moved.iter().all(|bytes| *bytes > 0),
                    "{command}: {ways:?}, and the disks have moved {moved:?} bytes"
                );
                figures.push(format!(
                    "{command} {} and {} MiB by the disks",
                    moved[0] >> 20,
                    moved[1] >> 20
                ));
            } else {
                ensure!(
                    ways.p2p == 0 && moved == [0, 0],
                    "{command}: {ways:?}, and the disks have moved {moved:?} bytes"
                );
                figures.push(format!(
                    "{command} {} MiB by the page cache",
                    ways.cache >> 20
                ));
            }
        }
        // As a program finds it that knows nothing of GPUs, from the disks.
        guest.run(&format!(
            "umount /mnt && fsck.ext4 -f -n {0} && mount -t ext4 {0} /mnt && gpu_io check \
             /mnt/data --seed {SEED}",
            made.node
        ))?;
        guest.run("umount /mnt")?;
        made.remove()?;
        Ok(figures.join(", "))
    }

    /// A counter of each disk.
    fn counters(&self, name: &str) -> Result<[u64; 2]> {
        let metrics = self.backends.disks.metrics()?;
        let of = |disk: u32| metrics.of(name, &[("disk", &format!("a-d{disk}"))]);
        Ok([of(0)?, of(1)?])
    }
}
