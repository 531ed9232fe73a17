//! `cargo xtask clean`.

use std::fs;
use std::process::ExitCode;

use anyhow::{Context, Result};
use farlane_kit::progress;
use farlane_kit::workspace::Workspace;

/// Removes the kit's cache: Debian trees, guest roots, driver builds and logs.
pub fn run(workspace: &Workspace) -> Result<ExitCode> {
    let cache = workspace.cache();
    if cache.exists() {
        let _lock = workspace.lock_cache()?;
        progress::step(&format!("Removing {}", cache.display()), || {
            fs::remove_dir_all(&cache).with_context(|| format!("Cannot remove {}", cache.display()))
        })?;
    }
    Ok(ExitCode::SUCCESS)
}
