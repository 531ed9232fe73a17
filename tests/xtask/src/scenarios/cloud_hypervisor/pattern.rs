//! What the guest writes on disks (`pattern` in `tests/xtask/guest/pvh/blk.c`).

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

/// What stands at an offset that was written with this seed.
fn word(seed: u64, offset: u64) -> u64 {
    let word = (offset + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(seed.wrapping_mul(0xd1b5_4a32_d192_ed03));
    word ^ (word >> 29)
}

/// A file has, from an offset on, what was written with this seed.
///
/// # Errors
/// It has something else.
pub fn check(path: &Path, offset: u64, length: u64, seed: u64) -> Result<()> {
    let mut bytes = vec![0; usize::try_from(length)?];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut bytes, offset));
    read.with_context(|| format!("Cannot read {}", path.display()))?;
    for (found, at) in bytes.chunks(8).zip((offset..).step_by(8)) {
        ensure!(
            found == word(seed, at).to_le_bytes(),
            "{} has at {at:#x} what was not written there with seed {seed}: {found:x?}",
            path.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_another_byte_is_not_what_was_written() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let words = (0..512).flat_map(|at| word(7, 4096 + 8 * at).to_le_bytes());
        let mut bytes: Vec<u8> = words.collect();
        file.as_file().write_all_at(&bytes, 4096).unwrap();
        check(file.path(), 4096, 4096, 7).unwrap();
        assert!(check(file.path(), 4096, 4096, 8).is_err());
        bytes[4095] ^= 1;
        file.as_file().write_all_at(&bytes, 4096).unwrap();
        assert!(check(file.path(), 4096, 4096, 7).is_err());
    }
}
