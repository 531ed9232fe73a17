//! What a daemon holds of its own, before and after something that it must not grow by.

use std::fs;

use anyhow::{Context as _, Result};
use farlane_kit::backend::Backend;

use crate::conditions::{PATIENCE, wait_until};

/// What a daemon's own memory may grow by, in KiB.
const GROWTH_KIB: u64 = 16 << 10;

/// What a daemon holds of its own.
#[derive(Debug, Clone)]
pub struct Vitals {
    /// Memory that is nobody else's, in KiB: what guests share with it is theirs.
    own_kib: u64,
    /// What its open files are.
    files: Vec<String>,
}

impl Vitals {
    /// What it holds now.
    pub fn of(backend: &Backend) -> Result<Self> {
        let folder = format!("/proc/{}", backend.pid());
        let status = fs::read_to_string(format!("{folder}/status"));
        let status = status.context("Cannot see a daemon's memory")?;
        let own = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let own = own.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse().ok());
        let mut files = Vec::new();
        for file in fs::read_dir(format!("{folder}/fd")).context("Cannot see its files")? {
            // One that is closed at this moment is none.
            if let Ok(file) = fs::read_link(file?.path()) {
                files.push(file.display().to_string());
            }
        }
        Ok(Self {
            own_kib: own.context("The kernel does not tell a daemon's own memory")?,
            files,
        })
    }

    /// Memory of its own, in KiB.
    pub fn own_kib(&self) -> u64 {
        self.own_kib
    }

    /// What it holds when no more than this and what it may grow by.
    pub fn settled(&self, name: &str, backend: &Backend) -> Result<Self> {
        let mut now = Self::of(backend)?;
        let what = format!("{name} holds no more than {self}");
        let settled = wait_until(&what, || {
            now = Self::of(backend)?;
            Ok(now.own_kib <= self.own_kib + GROWTH_KIB && now.files.len() <= self.files.len())
        });
        settled.with_context(|| {
            let mut new = now.files.clone();
            for old in &self.files {
                if let Some(at) = new.iter().position(|file| file == old) {
                    new.swap_remove(at);
                }
            }
            format!(
                "It holds {now} after {} s; new are {new:?}",
                PATIENCE.as_secs()
            )
        })?;
        Ok(now)
    }
}

impl std::fmt::Display for Vitals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} KiB, {} files", self.own_kib, self.files.len())
    }
}
