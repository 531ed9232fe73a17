//! Files gathered for a guest, and the forms in which it gets them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cpio::Archive;
use crate::process::check_output;
use crate::tree::Tree;

/// Where the guests' libraries lie.
pub const LIBRARY_FOLDER: &str = "usr/lib/x86_64-linux-gnu";

/// How long making a file system may take.
const MAKE_TIMEOUT: Duration = Duration::from_secs(120);

/// Files, links and folders, so that every folder comes before what is in it.
#[derive(Debug, Default)]
pub struct Contents {
    folders: BTreeSet<String>,
    files: BTreeMap<String, (u32, Vec<u8>)>,
    links: BTreeMap<String, String>,
}

impl Contents {
    /// Adds a folder and those above it.
    pub fn folder(&mut self, path: &str) {
        let path = path.trim_start_matches('/');
        for (end, _) in path.match_indices('/') {
            self.folders.insert(path[..end].to_owned());
        }
        self.folders.insert(path.to_owned());
    }

    /// Adds a file; one that was there is replaced.
    pub fn data(&mut self, path: &str, mode: u32, data: Vec<u8>) {
        let path = path.trim_start_matches('/');
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.folder(folder);
        }
        self.files.insert(path.to_owned(), (mode, data));
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.folder(folder);
        }
        self.links.insert(path.to_owned(), target.to_owned());
    }

    /// Adds a file of this machine, with its permission bits.
    pub fn copy(&mut self, path: &str, source: &Path) -> Result<()> {
        let data = fs::read(source).with_context(|| format!("Cannot read {}", source.display()))?;
        let mode = fs::metadata(source)
            .with_context(|| format!("Cannot see {}", source.display()))?
            .permissions()
            .mode();
        self.data(path, mode & 0o777, data);
        Ok(())
    }

    /// Adds libraries to the folder of libraries.
    pub fn copy_libraries<'l>(
        &mut self,
        libraries: impl IntoIterator<Item = &'l PathBuf>,
    ) -> Result<()> {
        for library in libraries {
            let name = library.file_name().context("A library has no name")?;
            self.copy(&format!("{LIBRARY_FOLDER}/{}", name.display()), library)?;
        }
        Ok(())
    }

    /// Adds a folder of this machine with all that is in it.
    pub fn copy_folder(&mut self, path: &str, source: &Path) -> Result<()> {
        for entry in
            fs::read_dir(source).with_context(|| format!("Cannot read {}", source.display()))?
        {
            let entry = entry?;
            let inside = format!("{path}/{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                self.copy_folder(&inside, &entry.path())?;
            } else {
                self.copy(&inside, &entry.path())?;
            }
        }
        Ok(())
    }

    /// Writes an archive that the kernel unpacks.
    pub fn write_archive(&self, archive: &Path) -> Result<()> {
        let out = File::create(archive)
            .with_context(|| format!("Cannot create {}", archive.display()))?;
        self.write(out)
            .with_context(|| format!("Cannot write {}", archive.display()))
    }

    fn write(&self, out: impl Write) -> Result<()> {
        let mut archive = Archive::new(BufWriter::new(out));
        for path in &self.folders {
            archive.directory(path)?;
        }
        for (path, target) in &self.links {
            archive.symlink(path, target)?;
        }
        for (path, (mode, data)) in &self.files {
            archive.file(path, *mode, data)?;
        }
        archive.finish()?;
        Ok(())
    }

    /// Writes a read-only file system (EROFS) with all of it, owned by root.
    pub fn write_image(&self, tree: &Tree, image: &Path) -> Result<()> {
        let staging = tempfile::tempdir().context("Cannot make a temporary folder")?;
        self.write_folder(staging.path())
            .with_context(|| format!("Cannot write {}", staging.path().display()))?;
        let mut command = tree.program("usr/bin/mkfs.erofs");
        command.args(["--quiet", "-T0", "--all-root"]);
        command.arg(image).arg(staging.path());
        check_output("mkfs.erofs", command, MAKE_TIMEOUT)?;
        Ok(())
    }

    fn write_folder(&self, folder: &Path) -> io::Result<()> {
        let allow = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode));
        allow(folder, 0o755)?;
        for path in &self.folders {
            let path = folder.join(path);
            fs::create_dir(&path)?;
            allow(&path, 0o755)?;
        }
        for (path, target) in &self.links {
            symlink(target, folder.join(path))?;
        }
        for (path, (mode, data)) in &self.files {
            let path = folder.join(path);
            fs::write(&path, data)?;
            allow(&path, *mode)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_folder_above_a_file_is_in_the_archive() {
        let mut contents = Contents::default();
        contents.data("/a/b/c", 0o644, Vec::new());
        assert_eq!(
            contents.folders.into_iter().collect::<Vec<_>>(),
            ["a", "a/b"]
        );
    }
}
