//! Plain writes of GPU memory to files: of all sizes and alignments, by eight threads; the file
//! system and the file are right afterwards, also to programs that know nothing of GPUs.

use anyhow::{Result, ensure};
use farlane_kit::report::Report;

use crate::gpu_machine::{boot_with_data, drop_caches, run_with_library};
use crate::lending::Blocks;
use crate::run::Run;

const DISK_MIB: u32 = 256;
const SEED: u32 = 11;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = Blocks::new(DISK_MIB)?;
    let (backends, guest) = boot_with_data(run, &blocks, SEED)?;
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
        report.tell(
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
