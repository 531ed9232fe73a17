//! One process writes a file through the page cache and another reads it into GPU memory, and the
//! reverse, with fsync and without: whatever was written before is what is read, whichever way
//! bytes take.

use anyhow::{Result, ensure};
use farlane_kit::progress;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use super::Scenario;
use crate::conditions::no_complaint;
use crate::gpu_machine::{Backends, mount, prepare, run_with_library};
use crate::lending::Blocks;
use crate::run::Run;

pub const SCENARIO: Scenario = Scenario {
    name: "gpu-coherence",
    about: "a process with the page cache and one with GPU memory see each other's writes in order, with fsync and without",
    is_test: true,
    run,
};

const DISK_MIB: u32 = 64;

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = Blocks::new(DISK_MIB)?;
    let parts = run.context.gpu_parts()?;
    let backends = Backends::start(run, "a", &[&blocks])?;
    let [guest] = run.boot([backends.configure(parts, VmConfig::new("a"))])?;
    prepare(&guest)?;
    mount(&guest, "/dev/vda")?;
    for way in ["p2p", "auto"] {
        let (_, ways) = run_with_library(&guest, way, "gpu_coherence /mnt/shared --rounds 60")?;
        ensure!(way != "p2p" || ways.p2p > 0, "FARLANE_IO={way}: {ways:?}");
        let figure = format!(
            "{} MiB P2P, {} MiB through the page cache",
            ways.p2p >> 20,
            ways.cache >> 20
        );
        progress::note(&format!("FARLANE_IO={way}: {figure}"));
        report.add("page cache and P2P", format!("POSIX order, {way}"), &figure);
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
