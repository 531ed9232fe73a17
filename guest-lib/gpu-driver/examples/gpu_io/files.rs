//! Whole files of known contents.

use crate::{Report, contents};
use anyhow::{Context as _, Result, bail};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

const CHUNK: usize = 1 << 20;

/// Makes a file.
pub fn make(path: &Path, seed: u64, bytes: u64) -> Result<Report> {
    let mut file = File::create(path).with_context(|| format!("Cannot make {}", path.display()))?;
    let mut at = 0;
    while at < bytes {
        let chunk = usize::try_from((bytes - at).min(1 << 20))?.min(CHUNK);
        file.write_all(&contents::make(seed, at, chunk))?;
        at += u64::try_from(chunk)?;
    }
    file.sync_all()?;
    Ok(Report {
        what: "make",
        checks: 0,
        bytes,
    })
}

/// Compares a file.
pub fn check(path: &Path, seed: u64) -> Result<Report> {
    let mut file = File::open(path).with_context(|| format!("Cannot open {}", path.display()))?;
    let mut data = vec![0; CHUNK];
    let mut at = 0;
    loop {
        let read = file.read(&mut data)?;
        if read == 0 {
            break;
        }
        let should = contents::make(seed, at, read);
        if let Some(place) = contents::difference(&data[..read], &should) {
            bail!(
                "{}: byte {} is {:#04x}, not {:#04x}",
                path.display(),
                at + u64::try_from(place)?,
                data[place],
                should[place]
            );
        }
        at += u64::try_from(read)?;
    }
    Ok(Report {
        what: "check",
        checks: 1,
        bytes: at,
    })
}
