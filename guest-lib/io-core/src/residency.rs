//! Which bytes of a file are in the page cache, without changing that.

use crate::files::OpenFile;
use crate::plan::Run;
use crate::sys;
use farlane_abi::width::to_usize;
use rustix::io::Errno;

/// Most pages that are looked at one by one: longer requests are cut.
pub const MOST_PAGES: usize = 8192;

/// What is known of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Residency {
    /// All of it is cached.
    All,
    /// Nothing of it is cached.
    Nothing,
    /// Runs that are and that are not, one after the other, together the whole range.
    Some(Vec<Run>),
    /// The kernel does not tell: the file belongs to somebody else.
    Unknown,
}

impl Residency {
    /// Cached bytes of a range of `length`.
    #[must_use]
    pub fn cached(&self, length: u64) -> Option<u64> {
        match self {
            Self::All => Some(length),
            Self::Nothing => Some(0),
            Self::Some(runs) => Some(cached(runs)),
            Self::Unknown => None,
        }
    }
}

fn cached(runs: &[Run]) -> u64 {
    let cached = runs.iter().filter(|run| run.cached);
    cached.map(|run| run.bytes).sum()
}

/// Looks at `length` bytes at `offset`, both multiples of the page size, the length not zero and at
/// most [`MOST_PAGES`]: one `cachestat`, and only where that says "some", one `mincore`, each page
/// by itself.
#[must_use]
pub fn look(opened: &OpenFile, offset: u64, length: u64) -> Residency {
    let page = sys::page_bytes() as u64;
    let pages = length / page;
    match sys::cachestat(opened.fd, offset, length) {
        Ok(stat) if stat.cached == 0 => Residency::Nothing,
        Ok(stat) if stat.cached >= pages => Residency::All,
        Ok(_) => each_page(opened, offset, length),
        // Linux before 6.5. There mincore must be asked by somebody who may write the file, or it
        // says that all is there.
        Err(Errno::NOSYS) if may_write(opened) => each_page(opened, offset, length),
        Err(_) => Residency::Unknown,
    }
}

fn may_write(opened: &OpenFile) -> bool {
    use rustix::fs::OFlags;
    matches!(opened.flags & OFlags::RWMODE, OFlags::RDWR | OFlags::WRONLY)
        || rustix::process::geteuid().is_root()
}

fn each_page(opened: &OpenFile, offset: u64, length: u64) -> Residency {
    let page = sys::page_bytes();
    let mut pages = [0_u8; MOST_PAGES];
    let count = to_usize(length).div_ceil(page);
    let Some(pages) = pages.get_mut(..count) else {
        return Residency::Unknown;
    };
    let asked = opened
        .file
        .mincore(opened.fd, offset, to_usize(length), pages);
    match asked {
        Ok(()) => of_runs(runs(pages, page as u64)),
        Err(_) => of_runs(bisect(opened, offset, length, page as u64)),
    }
}

fn of_runs(runs: Vec<Run>) -> Residency {
    match runs.as_slice() {
        [] => Residency::Unknown,
        [one] if one.cached => Residency::All,
        [_] => Residency::Nothing,
        _ => Residency::Some(runs),
    }
}

/// Runs of pages of which `mincore` says the same.
fn runs(pages: &[u8], page: u64) -> Vec<Run> {
    let chunks = pages.chunk_by(|a, b| a & 1 == b & 1);
    chunks
        .map(|chunk| Run {
            bytes: chunk.len() as u64 * page,
            cached: chunk.first().is_some_and(|first| first & 1 == 1),
        })
        .collect()
}

/// Where a mapping cannot be had: halves of halves.
fn bisect(opened: &OpenFile, offset: u64, length: u64, page: u64) -> Vec<Run> {
    let mut found: Vec<Run> = Vec::new();
    let mut left = vec![(offset, length)];
    while let Some((offset, length)) = left.pop() {
        let Ok(stat) = sys::cachestat(opened.fd, offset, length) else {
            return Vec::new();
        };
        let pages = length / page;
        if stat.cached == 0 || stat.cached >= pages || pages <= 1 {
            let cached = stat.cached > 0;
            match found.last_mut() {
                Some(last) if last.cached == cached => last.bytes += length,
                _ => found.push(Run {
                    bytes: length,
                    cached,
                }),
            }
            continue;
        }
        let half = pages / 2 * page;
        left.push((offset + half, length - half));
        left.push((offset, half));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
    use std::os::fd::AsRawFd as _;

    const PAGE: u64 = 4096;

    fn run(pages: u64, cached: bool) -> Run {
        Run {
            bytes: pages * PAGE,
            cached,
        }
    }

    /// A file on a disk whose pages 2, 3 and 6 of eight are cached.
    fn file() -> (tempfile::TempDir, std::fs::File) {
        // Beside the test's program, which is on a disk.
        let program = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let mut file = std::fs::File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(folder.path().join("file"))
            .unwrap();
        file.write_all(&vec![1; 8 * 4096]).unwrap();
        file.sync_all().unwrap();
        let fd = file.as_raw_fd();
        sys::advise(fd, 0, 0, libc::POSIX_FADV_DONTNEED).unwrap();
        sys::advise(fd, 0, 0, libc::POSIX_FADV_RANDOM).unwrap();
        for page in [2, 3, 6] {
            file.seek(SeekFrom::Start(page * PAGE)).unwrap();
            file.read_exact(&mut [0; 4096]).unwrap();
        }
        (folder, file)
    }

    #[test]
    fn runs_are_found_as_they_are_and_looking_changes_nothing() {
        let (_folder, file) = file();
        let opened = crate::files::open(file.as_raw_fd()).unwrap();
        let expected = [
            run(2, false),
            run(2, true),
            run(2, false),
            run(1, true),
            run(1, false),
        ];
        for _ in 0..3 {
            assert_eq!(
                look(&opened, 0, 8 * PAGE),
                Residency::Some(expected.to_vec())
            );
            assert_eq!(bisect(&opened, 0, 8 * PAGE, PAGE), expected);
        }
        assert_eq!(look(&opened, 2 * PAGE, 2 * PAGE), Residency::All);
        assert_eq!(look(&opened, 4 * PAGE, 2 * PAGE), Residency::Nothing);
        assert_eq!(
            look(&opened, 4 * PAGE, 4 * PAGE).cached(4 * PAGE),
            Some(PAGE)
        );
    }
}
