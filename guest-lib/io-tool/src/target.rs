//! The file or device whose transfers are measured.

use anyhow::{Context as _, Result, bail};
use farlane_io_core::plan::oracle::Random;
use rustix::fs::{
    Advice, AtFlags, FileType, Mode, OFlags, SeekFrom, StatxFlags, fadvise, fstat, open, openat,
    seek, statx,
};
use std::io::Write as _;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

/// Bytes of the file that is made in a folder.
const MADE: u64 = 256 << 20;
/// Bytes that are held in the page cache to be copied from there.
const CACHED: u64 = 64 << 20;
/// Bytes that are read one after the other to measure read-ahead, at most and at least.
const SEQUENCE: u64 = 128 << 20;
const SHORTEST_SEQUENCE: u64 = 32 << 20;
/// Smallest alignment of direct I/O where the kernel does not say it.
const USUAL_ALIGNMENT: u64 = 4096;

/// What is read, twice: through the page cache and past it.
#[derive(Debug)]
pub struct Target {
    buffered: OwnedFd,
    direct: OwnedFd,
    bytes: u64,
    cached: u64,
    alignment: u64,
    /// The device's name in the store.
    pub device: String,
}

impl Target {
    /// Opens a block device or a file for reading, or makes a file in a folder that is gone when
    /// this is dropped.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let context = || format!("Cannot open {shown}");
        let read = OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = open(path, read, Mode::empty()).with_context(context)?;
        let buffered = match FileType::from_raw_mode(fstat(&opened)?.st_mode) {
            FileType::RegularFile | FileType::BlockDevice => opened,
            FileType::Directory => made(path)?,
            kind => bail!("{shown} is neither a block device nor a file nor a folder ({kind:?})"),
        };
        let alignment = alignment(&buffered)
            .with_context(|| format!("{shown} cannot be read by direct I/O"))?;
        // The same file, also if it has no name.
        let again = format!("/proc/self/fd/{}", buffered.as_raw_fd());
        let direct = openat(
            rustix::fs::CWD,
            &again,
            read | OFlags::DIRECT,
            Mode::empty(),
        )
        .with_context(|| format!("{shown} cannot be opened for direct I/O"))?;
        let bytes = seek(&buffered, SeekFrom::End(0)).with_context(context)?;
        let device = farlane_io_core::plan::device::name(&fstat(&buffered)?);
        let target = Self {
            buffered,
            direct,
            bytes,
            cached: CACHED.min(bytes / 2) / alignment * alignment,
            alignment,
            device,
        };
        target.fill_cache()?;
        Ok(target)
    }

    /// The sizes that are measured: each twice the one before, up to `largest` and to an eighth of
    /// the file.
    pub fn sizes(&self, largest: u64) -> Vec<u64> {
        let largest = largest.min(self.bytes / 8);
        std::iter::successors(Some(USUAL_ALIGNMENT.max(self.alignment)), |size| {
            size.checked_mul(2)
        })
        .take_while(|size| *size <= largest)
        .collect()
    }

    /// For direct I/O, and a random offset outside the cached part.
    pub fn direct(&self, random: &mut Random, bytes: u64) -> (BorrowedFd<'_>, u64) {
        let offset = self.cached + self.offset(random, self.bytes - self.cached, bytes);
        (self.direct.as_fd(), offset)
    }

    /// For reads through the page cache, and a random offset in the cached part.
    pub fn cached(&self, random: &mut Random, bytes: u64) -> (BorrowedFd<'_>, u64) {
        (
            self.buffered.as_fd(),
            self.offset(random, self.cached, bytes),
        )
    }

    /// For reads through the page cache.
    pub fn buffered(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }

    /// Consecutive bytes that are not cached, to be read in order; nothing if there are too few.
    pub fn sequence(&self) -> Result<Option<Range<u64>>> {
        let start = self.cached.next_multiple_of(1 << 20);
        let end = self.bytes.min(start + SEQUENCE) / (1 << 20) * (1 << 20);
        if end < start + SHORTEST_SEQUENCE {
            return Ok(None);
        }
        fadvise(&self.buffered, start, None, Advice::DontNeed)?;
        Ok(Some(start..end))
    }

    /// Drops bytes from the page cache.
    pub fn forget(&self, offset: u64, length: u64) -> Result<()> {
        fadvise(
            &self.buffered,
            offset,
            NonZeroU64::new(length),
            Advice::DontNeed,
        )?;
        Ok(())
    }

    fn offset(&self, random: &mut Random, of: u64, bytes: u64) -> u64 {
        let places = of.saturating_sub(bytes) / self.alignment + 1;
        random.below(places) * self.alignment
    }

    /// Drops the file from the page cache and reads the part that is to be in it.
    fn fill_cache(&self) -> Result<()> {
        fadvise(&self.buffered, 0, None, Advice::DontNeed)?;
        let cached = NonZeroU64::new(self.cached);
        fadvise(&self.buffered, 0, cached, Advice::WillNeed)?;
        let mut piece = vec![0; 1 << 20];
        let mut at = 0;
        while at < self.cached {
            let got = rustix::io::pread(&self.buffered, &mut piece, at)?;
            if got == 0 {
                bail!("The file ends at {at} of {} bytes", self.bytes);
            }
            at += u64::try_from(got)?;
        }
        Ok(())
    }
}

/// A new file in `folder` without a name, with contents that no layer can leave out.
fn made(folder: &Path) -> Result<OwnedFd> {
    let mut file = tempfile::tempfile_in(folder)
        .with_context(|| format!("Cannot make a file in {}", folder.display()))?;
    let mut random = Random::new(1);
    let mut piece = Vec::new();
    let mut left = MADE;
    while left > 0 {
        piece.clear();
        piece.extend((0..(1 << 17)).flat_map(|_| random.any().to_le_bytes()));
        file.write_all(&piece)
            .with_context(|| format!("Cannot write {MADE} bytes in {}", folder.display()))?;
        left = left.saturating_sub(u64::try_from(piece.len())?);
    }
    file.sync_all()?;
    Ok(file.into())
}

/// To what direct I/O must be aligned in the file.
fn alignment(file: &OwnedFd) -> Result<u64> {
    const DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(libc::STATX_DIOALIGN);
    let status = statx(file, "", AtFlags::EMPTY_PATH, DIOALIGN)?;
    if status.stx_mask & DIOALIGN.bits() == 0 {
        return Ok(USUAL_ALIGNMENT);
    }
    match status.stx_dio_offset_align {
        0 => bail!("its file system has none"),
        alignment => Ok(u64::from(alignment)),
    }
}
