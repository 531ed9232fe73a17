//! Plain writes of GPU memory to files: of all sizes and alignments, by eight threads; the file
//! system and the file are right afterwards, also to programs that know nothing of GPUs.

use anyhow::{Result, ensure};
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use super::Scenario;
use crate::gpu_machine::{Backends, drop_caches, mount, prepare, run_with_library};
use crate::lending::Blocks;
use crate::run::Run;

pub const SCENARIO: Scenario = Scenario {
    name: "gpu-write",
    about: "GPU memory is written to files, 1 B to 64 MiB, all alignments, 8 threads; the file system stays whole",
    is_test: true,
    run,
};

const DISK_MIB: u32 = 256;
const FILE_BYTES: u64 = 80 << 20;
const SEED: u32 = 11;

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = Blocks::new(DISK_MIB)?;
    let parts = run.context.gpu_parts()?;
    let backends = Backends::start(run, "a", &[&blocks])?;
    let [guest] = run.boot([backends.configure(parts, VmConfig::new("a"))])?;
    prepare(&guest)?;
    mount(&guest, "/dev/vda")?;
    guest.run(&format!(
        "gpu_io make /mnt/data --seed {SEED} --bytes {FILE_BYTES}"
    ))?;
    let matrix = format!("gpu_io write-matrix /mnt/data --seed {SEED} --threads 8");
    for way in ["p2p", "auto"] {
        drop_caches(&guest)?;
        let [_, before] = backends.tunnelled()?;
        let (_, ways) = run_with_library(&guest, way, &matrix)?;
        let [_, after] = backends.tunnelled()?;
        ensure!(
            ways.p2p > 0 && after > before,
            "FARLANE_IO={way}: {ways:?}, {} bytes tunnelled",
            after - before
        );
        let figure = format!(
            "{} MiB P2P, {} MiB through the page cache",
            ways.p2p >> 20,
            ways.cache >> 20
        );
        progress::note(&format!("FARLANE_IO={way}: {figure}"));
        report.add(
            "files from GPU memory",
            format!("all sizes and alignments, {way}"),
            &figure,
        );
    }
    // From the disk, and to a program without the library.
    guest.run("umount /mnt && fsck.ext4 -f -n /dev/vda && mount -t ext4 /dev/vda /mnt")?;
    guest.run(&format!("gpu_io check /mnt/data --seed {SEED}"))?;
    backends.end_with(guest)
}
