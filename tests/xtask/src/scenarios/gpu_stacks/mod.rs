//! Files on every common file system and what it may stand on, and GPU memory: the right bytes
//! everywhere, and past the guest's memory only where the disk gets the pages of a request as they
//! are, also when that changes.

mod change;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Guest;
use farlane_kit::qemu::VmConfig;
use farlane_kit::report::Report;

use crate::disks;
use crate::gpu_machine::{Backends, Ways, drop_caches, prepare, run_with_library};
use crate::lending::Blocks;
use crate::run::Run;
use crate::stacks::{BEFORE, FUNCTIONS, LARGE_MIB, PERSISTENT_MIB, SMALL_MIB, STACKS, Stack};

const FILE: &str = "/mnt/d/file";
const FILE_BYTES: u64 = 256 << 10;
/// A file in pieces of 256 KiB, which do not lie one behind the other: every other one is written,
/// the others are allocated only or holes.
const PIECES: &str = "/mnt/d/pieces";
const PIECES_BYTES: u64 = 16 << 20;
/// So many extents there are at least: three of four pieces, less than all of which may be
/// neighbours by chance.
const EXTENTS: u32 = 30;
/// With which numbers the file is filled: by a program that knows nothing of GPUs, and from GPU
/// memory.
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

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let blocks = [Blocks::new(LARGE_MIB)?, Blocks::new(SMALL_MIB)?];
    let parts = run.context.gpu_parts()?;
    let backends = Backends::start(run, "a", &[&blocks[0], &blocks[1]])?;
    let config = VmConfig::new("a").persistent(PERSISTENT_MIB);
    let [guest] = run.boot([backends.configure(parts, config)])?;
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
        report.tell("file systems and GPU memory", stack.name, figure);
    }
    let what = "a volume that changes under a program";
    change::run(&machine).with_context(|| what.to_owned())?;
    report.add(
        "file systems and GPU memory",
        what,
        "right bytes, plain over dm-crypt",
    );
    backends.end_with(guest)
}

impl Machine<'_> {
    fn shell(&self, line: &str) -> Result<()> {
        let words = &self.words;
        self.guest.run(&format!("{words}\n{line}")).map(drop)
    }

    /// Moves a file on a stack, by a program that knows nothing of GPUs and to and from GPU memory;
    /// says which way.
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
        let moved = self.gpu(&format!("read {FILE} --seed {seed} --bytes {FILE_BYTES}"))?;
        ensure!(
            moved == [expected, 0],
            "A read: the disk has moved {moved:?} bytes to and from device memory"
        );
        if stack.tunnels {
            self.pieces().context("A file in pieces")?;
        }
        self.shell(stack.remove)?;
        Ok(way)
    }

    /// Reads the file, and writes it from GPU memory; both are to have moved so many bytes by
    /// tunnels. Returns what it is made of then.
    fn rewrite(&self, seed: u32, expected: u64) -> Result<u32> {
        let (mut old, mut new) = (seed, FROM_GPU);
        let mut goes = 1;
        loop {
            let line = format!("rewrite {FILE} --seed {old} --to {new} --bytes {FILE_BYTES}");
            let moved = self.gpu(&line)?;
            // A tunnelled write is one that the file system makes without waiting for anything: it
            // may refuse.
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

    /// Reads a file in pieces, writes all of it, and reads it again: holes and what is only
    /// allocated are no bytes of the disk at first. A write over several extents may be refused, in
    /// part too, and then goes through the page cache.
    fn pieces(&self) -> Result<()> {
        self.shell(&format!(
            "gpu_io make-pieces {PIECES} --seed {PLAIN} --bytes {PIECES_BYTES} && \
             extents=$(xfs_io -r -c fiemap {PIECES} | grep -c ']: [0-9]') && [ $extents -ge \
             {EXTENTS} ]"
        ))?;
        drop_caches(self.guest)?;
        let (ways, moved) = self.transfer(&format!(
            "rewrite-pieces {PIECES} --seed {PLAIN} --to {FROM_GPU} --bytes {PIECES_BYTES}"
        ))?;
        let expected = PIECES_BYTES / 2;
        ensure!(
            moved[0] == expected && (expected..=expected + moved[1]).contains(&ways.p2p),
            "{ways:?}, and the disk has moved {moved:?} bytes"
        );
        drop_caches(self.guest)?;
        let moved = self.gpu(&format!(
            "read {PIECES} --seed {FROM_GPU} --bytes {PIECES_BYTES}"
        ))?;
        ensure!(
            moved == [PIECES_BYTES, 0],
            "Read again: the disk has moved {moved:?} bytes to and from device memory"
        );
        self.shell(&format!("rm {PIECES}"))
    }

    /// A transfer, past the page cache where the library would; returns what the disk has moved to
    /// device memory, and from it.
    fn gpu(&self, words: &str) -> Result<[u64; 2]> {
        let (ways, moved) = self.transfer(words)?;
        ensure!(
            ways.p2p == moved[0] + moved[1],
            "{ways:?}, and the disk has moved {moved:?} bytes"
        );
        Ok(moved)
    }

    /// The same, with what the library says. It does not count what it writes again.
    fn transfer(&self, words: &str) -> Result<(Ways, [u64; 2])> {
        let before = self.backends.tunnelled()?;
        let line = format!("gpu_io {words}");
        let (_, ways) = run_with_library(self.guest, "p2p", &line)?;
        let after = self.backends.tunnelled()?;
        Ok((ways, [after[0] - before[0], after[1] - before[1]]))
    }
}
