//! One process writes a file through the page cache and another reads it into GPU memory, and the
//! reverse, with fsync and without: whatever was written before is what is read, whichever way
//! bytes take.

use anyhow::{Result, ensure};
use farlane_kit::report::Report;

use crate::conditions::no_complaint;
use crate::gpu_machine::{boot_mounted, run_with_library};
use crate::lending::Blocks;
use crate::run::Run;

const DISK_MIB: u32 = 64;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = Blocks::new(DISK_MIB)?;
    let (backends, guest) = boot_mounted(run, &blocks)?;
    for way in ["p2p", "auto"] {
        let (_, ways) = run_with_library(&guest, way, "gpu_coherence /mnt/shared --rounds 60")?;
        ensure!(way != "p2p" || ways.p2p > 0, "FARLANE_IO={way}: {ways:?}");
        let figure = format!(
            "{} MiB P2P, {} MiB through the page cache",
            ways.p2p >> 20,
            ways.cache >> 20
        );
        report.tell("page cache and P2P", format!("POSIX order, {way}"), &figure);
    }
    let [read, written] = backends.tunnelled()?;
    ensure!(
        read > 0 && written > 0,
        "{read} and {written} bytes tunnelled"
    );
    guest.run("umount /mnt && fsck.ext4 -f -n /dev/vda")?;
    no_complaint(&guest)?;
    drop(guest);
    backends.stop()
}
