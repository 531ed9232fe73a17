//! Files on every common file system and what it may stand on, and GPU memory: the right bytes everywhere, and past the guest's
//! memory only where the disk gets the pages of a request as they are.

use anyhow::{Context as _, Result, ensure};
use farlane_vmkit::guest::Guest;
use farlane_vmkit::progress;
use farlane_vmkit::qemu::VmConfig;
use farlane_vmkit::report::Report;

use super::Scenario;
use crate::conditions::no_complaint;
use crate::disks;
use crate::gpu_machine::{Backends, drop_caches, prepare, run_with_library};
use crate::lending::Blocks;
use crate::run::Run;
use crate::stacks::{BEFORE, FUNCTIONS, LARGE_MIB, SMALL_MIB, STACKS, Stack};

pub const SCENARIO: Scenario = Scenario {
    name: "gpu-stacks",
    about: "GPU memory and files on ext4, xfs, btrfs, f2fs, fscrypt, dm, loop, overlayfs, NFS: right bytes, and which way",
    is_test: true,
    run,
};

const FILE: &str = "/mnt/d/file";
const FILE_BYTES: u64 = 256 << 10;
/// With which numbers the file is filled: by a program that knows nothing of GPUs, and from GPU memory.
const PLAIN: u32 = 17;
const FROM_GPU: u32 = 18;
/// How often a tunnelled write may be refused.
const GOES: u32 = 5;

struct Machine<'a> {
    guest: &'a Guest,
    backends: &'a Backends,
    /// What the shell is to know: the disks, and functions.
    words: String,
}

fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = [Blocks::new(LARGE_MIB)?, Blocks::new(SMALL_MIB)?];
    let parts = run.context.gpu_parts()?;
    let backends = Backends::start(run, "a", &[&blocks[0], &blocks[1]])?;
    let [guest] = run.boot([backends.configure(parts, VmConfig::new("a"))])?;
    prepare(&guest)?;
    let [large, small] = [disks::node(&guest, "a-d0")?, disks::node(&guest, "a-d1")?];
    let machine = Machine {
        guest: &guest,
        backends: &backends,
        words: format!("large={large}; small={small}; file={FILE}\n{FUNCTIONS}"),
    };
    guest.run(BEFORE)?;
    for stack in STACKS {
        let figure = machine
            .stack(stack)
            .with_context(|| format!("On {}", stack.name))?;
        progress::note(&format!("{}: {figure}", stack.name));
        report.add("file systems and GPU memory", stack.name, figure);
    }
    let refused = backends.disks.metrics()?.sum("tokens_refused")?;
    ensure!(refused == 0, "{refused} requests were refused");
    no_complaint(&guest)?;
    drop(guest);
    backends.stop()
}

impl Machine<'_> {
    fn shell(&self, line: &str) -> Result<()> {
        let words = &self.words;
        self.guest.run(&format!("{words}\n{line}")).map(drop)
    }

    /// Moves a file on a stack, by a program that knows nothing of GPUs and to and from GPU memory; says which way.
    fn stack(&self, stack: &Stack) -> Result<&'static str> {
        let guest = self.guest;
        self.shell(stack.make)?;
        let seal = stack.seal.unwrap_or("true");
        self.shell(&format!(
            "mkdir -p /mnt/d && gpu_io make {FILE} --seed {PLAIN} --bytes {FILE_BYTES} && {seal}"
        ))?;
        drop_caches(guest)?;
        let (expected, way) = if stack.tunnels {
            (FILE_BYTES, "tunnelled")
        } else {
            (0, "page cache")
        };
        let mut seed = PLAIN;
        if stack.seal.is_none() {
            seed = self.rewrite(seed, expected)?;
            drop_caches(guest)?;
            // From the disk, to a program without the library; and below to one with it.
            guest.run(&format!("gpu_io check {FILE} --seed {seed}"))?;
            drop_caches(guest)?;
        }
        let moved = self.gpu(&format!("read {FILE} --seed {seed}"))?;
        ensure!(
            moved == [expected, 0],
            "A read: the disk has moved {moved:?} bytes to and from device memory"
        );
        self.shell(stack.remove)?;
        Ok(way)
    }

    /// Reads the file, and writes it from GPU memory; both are to have moved so many bytes by tunnels. Returns what it is made of then.
    fn rewrite(&self, seed: u32, expected: u64) -> Result<u32> {
        let (mut old, mut new) = (seed, FROM_GPU);
        let mut goes = 1;
        loop {
            let moved = self.gpu(&format!("rewrite {FILE} --seed {old} --to {new}"))?;
            // A tunnelled write is one that the file system makes without waiting for anything: it may refuse.
            let refused = moved == [expected, 0] && goes < GOES;
            ensure!(
                moved == [expected, expected] || refused,
                "A read and a write: the disk has moved {moved:?} bytes to and from device memory"
            );
            if moved[1] == expected {
                return Ok(new);
            }
            goes += 1;
            (old, new) = (new, old);
        }
    }

    /// A transfer of the whole file, past the page cache where the library would; returns what the disk has moved to device memory,
    /// and from it.
    fn gpu(&self, words: &str) -> Result<[u64; 2]> {
        let before = self.backends.tunnelled()?;
        let line = format!("gpu_io {words} --bytes {FILE_BYTES}");
        let (_, ways) = run_with_library(self.guest, "p2p", &line)?;
        let after = self.backends.tunnelled()?;
        let moved = [after[0] - before[0], after[1] - before[1]];
        ensure!(
            ways.p2p == moved[0] + moved[1],
            "{ways:?}, and the disk has moved {moved:?} bytes"
        );
        Ok(moved)
    }
}
