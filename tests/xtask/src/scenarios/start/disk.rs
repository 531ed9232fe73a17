//! A disk from which a BIOS starts a program that reads and writes it.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::process::check_output;

use crate::run::Run;

/// The program, in the checkout: it copies the second sector of each disk to the third.
const SOURCE: &str = "tests/xtask/guest/boot_sector.S";

/// As a file of nothing but its bytes, which stands where a BIOS puts it.
const FLAGS: &str = "-nostdlib -static -no-pie -Wl,--build-id=none -Wl,-Ttext=0x7c00 \
                     -Wl,--oformat=binary";

const TIMEOUT: Duration = Duration::from_secs(60);

const SECTOR_BYTES: usize = 512;

/// Sectors that are written; a disk has more.
const SECTORS: usize = 3;

/// How much of a disk's file is looked at: of a format with tables, its first cluster lies there.
const LOOKED_AT_BYTES: usize = 1 << 20;

/// The program.
pub struct BootSector(Vec<u8>);

impl BootSector {
    /// Assembles it.
    pub fn build(run: &Run<'_>) -> Result<Self> {
        let out = run.path("boot_sector");
        let mut compiler = Command::new("cc");
        compiler.args(FLAGS.split_whitespace()).arg("-o").arg(&out);
        compiler.arg(run.context.workspace().root().join(SOURCE));
        check_output("the C compiler", compiler, TIMEOUT)?;
        let bytes = fs::read(&out).context("There is no boot sector")?;
        ensure!(
            bytes.len() == SECTOR_BYTES,
            "The boot sector has {} bytes",
            bytes.len()
        );
        Ok(Self(bytes))
    }

    /// The first sectors of a disk: the program, a text of this disk's own, and nothing.
    pub fn disk(&self, text: &str) -> Vec<u8> {
        let mut disk = self.0.clone();
        disk.extend(text.bytes());
        disk.resize(SECTORS * SECTOR_BYTES, 0);
        disk
    }
}

/// Whether the program has run from a disk's file: its text stands there twice, a sector apart.
pub fn has_copied(file: &Path, text: &str) -> Result<bool> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    let limit = u64::try_from(LOOKED_AT_BYTES)?;
    let opened = fs::File::open(file).with_context(|| format!("No {}", file.display()))?;
    opened.take(limit).read_to_end(&mut bytes)?;
    Ok(copies(&bytes, text) == [true, true])
}

/// Whether sectors begin with the text: of the first two of them, whether the second follows.
fn copies(bytes: &[u8], text: &str) -> Vec<bool> {
    let begins = |sector: &[u8]| sector.starts_with(text.as_bytes());
    let sectors = bytes.chunks(SECTOR_BYTES).map(begins);
    sectors.skip_while(|begins| !begins).take(2).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_told_from_the_original() {
        let disk = BootSector(vec![1; SECTOR_BYTES]).disk("text");
        assert_eq!(copies(&disk, "text"), [true, false]);
        let mut copied = disk;
        copied.copy_within(SECTOR_BYTES..2 * SECTOR_BYTES, 2 * SECTOR_BYTES);
        assert_eq!(copies(&copied, "text"), [true, true]);
    }
}
