//! Files of the machine, below a folder that is `/` but in tests. All of them may be anything: what
//! is read of one is bounded, and no open waits.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Most bytes of a file, unless it is said otherwise.
const MOST_BYTES: u64 = 64 << 10;
/// Most entries of a folder.
const MOST_ENTRIES: usize = 4096;

/// The folder.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    /// Below this folder.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Where a file of the machine is.
    #[must_use]
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        self.0.join(inside.strip_prefix("/").unwrap_or(inside))
    }

    /// Where a file below it is on the machine.
    #[must_use]
    pub fn inside(&self, path: &Path) -> PathBuf {
        let inside = path.strip_prefix(&self.0).unwrap_or(path);
        Path::new("/").join(inside)
    }

    /// Opens a file for reading, without waiting for who writes a pipe.
    ///
    /// # Errors
    /// As open(2).
    pub fn open(&self, inside: impl AsRef<Path>) -> io::Result<File> {
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(self.path(inside))
    }

    /// The beginning of a text.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn text(&self, inside: impl AsRef<Path>) -> io::Result<String> {
        self.long_text(inside, MOST_BYTES)
    }

    /// The first `most` bytes of a text.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn long_text(&self, inside: impl AsRef<Path>, most: u64) -> io::Result<String> {
        let bytes = self.bytes(inside, most)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The first `most` bytes of a file.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn bytes(&self, inside: impl AsRef<Path>, most: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open(inside)?.take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// A number that a file of the kernel tells; none where there is no such file.
    #[must_use]
    pub fn number(&self, inside: impl AsRef<Path>) -> Option<u64> {
        self.text(inside).ok()?.trim().parse().ok()
    }

    /// The names in a folder, sorted; none where there is no such folder.
    #[must_use]
    pub fn names(&self, inside: impl AsRef<Path>) -> Vec<OsString> {
        let entries = fs::read_dir(self.path(inside)).into_iter().flatten();
        let names = entries.flatten().map(|entry| entry.file_name());
        let mut names: Vec<_> = names.take(MOST_ENTRIES).collect();
        names.sort();
        names
    }

    /// The last name of what a link leads to.
    #[must_use]
    pub fn link_name(&self, inside: impl AsRef<Path>) -> Option<String> {
        let target = fs::read_link(self.path(inside)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_bounded_and_wait_for_nobody() {
        let made = tempfile::tempdir().unwrap();
        let root = Root::new(made.path());
        fs::write(root.path("/a"), [b'7'; 100_000]).unwrap();
        assert_eq!(root.text("/a").unwrap().len(), 64 << 10);
        assert_eq!(root.long_text("a", 3).unwrap(), "777");
        assert_eq!(root.number("a"), None);
        fs::write(root.path("b"), "12\n").unwrap();
        assert_eq!(root.number("/b"), Some(12));
        fs::write(root.path("b"), b"\xff\x1b").unwrap();
        assert_eq!(root.text("b").unwrap(), "\u{fffd}\u{1b}");
        let (mode, pipe) = (rustix::fs::Mode::RUSR, rustix::fs::FileType::Fifo);
        let at = root.path("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &at, pipe, mode, 0).unwrap();
        assert_eq!(root.text("pipe").unwrap(), "");
        assert_eq!(root.names("none").len(), 0);
        assert_eq!(root.names("/"), ["a", "b", "pipe"]);
        assert_eq!(root.inside(&at), Path::new("/pipe"));
    }
}
