//! Temporary folders that are gone when their user is, also after Ctrl-C.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};

/// The folders that exist now.
static FOLDERS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// A temporary folder with a short path, as the names of UNIX sockets in it are limited to 107
/// bytes.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes a folder of its own for one scenario.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new() -> Result<Self> {
        Self::within(&std::env::temp_dir())
    }

    /// Makes a folder whose files are memory of this machine (tmpfs).
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn in_memory() -> Result<Self> {
        Self::within(Path::new("/dev/shm"))
    }

    fn within(parent: &Path) -> Result<Self> {
        let mut folders = folders();
        let folder = tempfile::Builder::new()
            .prefix("farlane-")
            .tempdir_in(parent)
            .context("Cannot make a temporary folder")?;
        let path = folder.keep();
        folders.insert(path.clone());
        Ok(Self(path))
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes a file in the folder, of so many bytes, none of which is stored.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn sparse(&self, name: impl AsRef<Path>, bytes: u64) -> Result<PathBuf> {
        let path = self.join(name);
        sparse_file(&path, bytes)?;
        Ok(path)
    }

    /// A path in the folder.
    #[must_use]
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        folders().remove(&self.0);
        remove(&self.0);
    }
}

/// Makes a file of so many bytes, none of which is stored.
///
/// # Errors
/// When it cannot be made.
pub fn sparse_file(path: &Path, bytes: u64) -> Result<()> {
    File::create(path)
        .and_then(|file| file.set_len(bytes))
        .with_context(|| format!("Cannot make {}", path.display()))
}

/// Removes all folders: this process ends now.
pub fn remove_all() {
    for path in folders().iter() {
        remove(path);
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        eprintln!("Cannot remove {}: {error}", path.display());
    }
}

fn folders() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    FOLDERS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_folder_is_gone_when_it_is_dropped() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().to_owned();
        fs::write(scratch.join("file"), "x").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }
}
