//! Plain reads of a file into GPU memory: of all sizes and alignments, by eight threads, each
//! checked on the GPU's side; by the way that the library is told, and by the one it chooses.

use anyhow::{Result, ensure};
use farlane_kit::report::Report;

use crate::gpu_machine::{boot_with_data, drop_caches, run_with_library};
use crate::lending::Blocks;
use crate::run::Run;

/// Where the figures go.
const PLACE: &str = "GPU memory from files";

const DISK_MIB: u32 = 256;
/// With which numbers the file is filled.
const SEED: u32 = 7;

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = Blocks::new(DISK_MIB)?;
    let (backends, guest) = boot_with_data(run, &blocks, SEED)?;
    let matrix = format!("gpu_io read-matrix /mnt/data --seed {SEED} --threads 8");
    // What is in no cache goes past it, but for parts of blocks.
    drop_caches(&guest)?;
    let (_, forced) = run_with_library(&guest, "p2p", &matrix)?;
    let [tunnelled, _] = backends.tunnelled()?;
    ensure!(
        forced.p2p > 0 && tunnelled >= forced.p2p,
        "{forced:?}, but {tunnelled} bytes tunnelled"
    );
    let figure = format!(
        "{} MiB past the page cache, {} MiB through it",
        forced.p2p >> 20,
        forced.cache >> 20
    );
    report.tell(PLACE, "all sizes and alignments, P2P", figure);

    drop_caches(&guest)?;
    let (_, free) = run_with_library(&guest, "auto", &matrix)?;
    let figure = format!(
        "{} MiB P2P, {} MiB page cache, {} MiB read ahead",
        free.p2p >> 20,
        free.cache >> 20,
        free.read_ahead >> 20
    );
    report.tell(PLACE, "the same, as the library chooses", figure);
    // A file in the page cache is read from there.
    guest.run("cat /mnt/data >/dev/null")?;
    let line = format!("gpu_io read /mnt/data --seed {SEED} --bytes 33554432");
    let (_, cached) = run_with_library(&guest, "auto", &line)?;
    ensure!(
        cached.p2p == 0 && cached.cache >= 32 << 20,
        "A cached file: {cached:?}"
    );
    backends.end_with(guest)
}
