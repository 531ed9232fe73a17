//! Archives in the `newc` format that the kernel unpacks its first file system from. Several
//! archives may lie one behind the other; a later one adds to, and replaces files of, the earlier
//! ones.

use std::io::{self, Write};

/// The kind bits of a file mode.
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// The kernel looks for the next archive at a multiple of this many bytes.
const ALIGN_BYTES: usize = 512;

/// Writes one archive.
#[derive(Debug)]
pub struct Archive<W> {
    out: W,
    written: usize,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// Begins an archive.
    pub fn new(out: W) -> Self {
        Self {
            out,
            written: 0,
            inode: 0,
        }
    }

    /// Adds a folder. Its parents must have been added.
    ///
    /// # Errors
    /// When writing fails.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, DIRECTORY | 0o755, &[])
    }

    /// Adds a file with permission bits.
    ///
    /// # Errors
    /// When writing fails.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.entry(path, REGULAR | (mode & 0o7777), data)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// When writing fails.
    pub fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, SYMLINK | 0o777, target.as_bytes())
    }

    /// Ends the archive and returns the stream, at a place where another archive may begin.
    ///
    /// # Errors
    /// When writing fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, &[])?;
        self.pad(ALIGN_BYTES)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        let name = path.trim_start_matches('/');
        let too_big = |_| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{path} is too big for an archive"),
            )
        };
        let size = u32::try_from(data.len()).map_err(too_big)?;
        let name_size = u32::try_from(name.len() + 1).map_err(too_big)?;
        self.inode += 1;
        // Inode, mode, uid, gid, links, mtime, size, device (major, minor), special device (same),
        // name size, checksum.
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            header += &format!("{field:08X}");
        }
        self.put(header.as_bytes())?;
        self.put(name.as_bytes())?;
        self.put(&[0])?;
        self.pad(4)?;
        self.put(data)?;
        self.pad(4)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.out.write_all(bytes)
    }

    fn pad(&mut self, align: usize) -> io::Result<()> {
        self.put(&vec![
            0;
            self.written.next_multiple_of(align) - self.written
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_ends_where_the_next_may_begin() {
        let mut archive = Archive::new(Vec::new());
        archive.file("/a", 0o644, b"one").unwrap();
        assert_eq!(archive.finish().unwrap().len() % ALIGN_BYTES, 0);
    }

    #[test]
    fn a_header_is_as_the_format_says() {
        let mut archive = Archive::new(Vec::new());
        archive.file("/dir/file", 0o755, b"data").unwrap();
        let bytes = archive.finish().unwrap();
        let text = std::str::from_utf8(&bytes[..110 + 8]).unwrap();
        assert_eq!(&text[..6], "070701");
        assert_eq!(&text[14..22], "000081ED", "mode");
        assert_eq!(&text[54..62], "00000004", "size");
        assert_eq!(&text[94..102], "00000009", "size of the name and its end");
        assert_eq!(&text[110..], "dir/file");
        assert_eq!(&bytes[120..124], b"data");
    }
}
