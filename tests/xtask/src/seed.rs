//! The seed of what a scenario does at random: another one in each run, told, and given again where
//! a run is to be repeated.

use std::fs::File;
use std::io::Read as _;

use anyhow::{Context as _, Result};
use farlane_kit::progress;

/// Repeats a run.
const VARIABLE: &str = "FARLANE_SEED";

/// The seed of this run.
pub fn seed() -> Result<u64> {
    let seed = match std::env::var(VARIABLE) {
        Ok(text) => text
            .parse()
            .with_context(|| format!("{VARIABLE}={text} is no number"))?,
        Err(_) => {
            let mut bytes = [0; 8];
            File::open("/dev/urandom")?.read_exact(&mut bytes)?;
            u64::from_le_bytes(bytes)
        }
    };
    progress::note(&format!("{VARIABLE}={seed} makes the same choices again"));
    Ok(seed)
}
