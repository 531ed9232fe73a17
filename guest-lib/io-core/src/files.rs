//! What is known of the program's files: how they are aligned, on which disk they lie.

use crate::direct_fds::DirectFds;
use crate::disks::StackWatch;
use crate::file_id::{FileId, borrow};
use crate::fork::{Inside, ParentState};
use crate::lock::Lock;
use crate::plan::CostModel;
use crate::stream::Stream;
use crate::sys;
use farlane_abi::width::to_usize;
use farlane_transport::guard::{Guarded, InUse};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Direct I/O with a file that was refused as often as this in a row is not tried any more while it
/// is open.
const MOST_REFUSALS: u32 = 8;

/// `FS_XFLAG_REALTIME` (linux/fs.h).
const XFLAG_REALTIME: u32 = 1;

/// The providers that calibrations are kept for.
const PROVIDERS: [&str; 3] = ["soft", "p2pmem", "cuda"];

/// What `statx` says of how a file is stored.
#[derive(Clone, Copy, Debug, Default)]
struct Attributes {
    /// `STATX_ATTR_*` that are so.
    set: u64,
    /// Those that the file system would tell.
    known: u64,
}

impl Attributes {
    /// `STATX_ATTR_COMPRESSED`, `STATX_ATTR_ENCRYPTED`, `STATX_ATTR_VERITY` and `STATX_ATTR_DAX`
    /// (linux/stat.h).
    const COMPRESSED: u64 = 0x4;
    const ENCRYPTED: u64 = 0x800;
    const VERITY: u64 = 0x0010_0000;
    const DAX: u64 = 0x0020_0000;

    /// Whether the file lies in persistent memory that the processor reads and writes: then no
    /// request goes to a disk, and there is nothing to be gained by direct I/O.
    fn is_dax(self) -> bool {
        self.set & Self::DAX != 0
    }

    /// Whether direct I/O hands the pages of a request to the disk as they are, and the disk's
    /// bytes to them: on ext4 and xfs, of which it is known. Others may keep checksums or copies,
    /// or lie on more devices than the one that `stat` names (btrfs, f2fs, bcachefs). Encryption
    /// works on the pages of a request, in place where the disk does not do it
    /// (block/blk-crypto-fallback.c); the other attributes do not use the disk alone. An ext4 that
    /// does not tell of encryption may have it; xfs has none.
    fn pass_pages(self, magic: libc::c_long) -> bool {
        let changing = Self::COMPRESSED | Self::ENCRYPTED | Self::VERITY | Self::DAX;
        let tells = match magic {
            libc::EXT4_SUPER_MAGIC => self.known & Self::ENCRYPTED != 0,
            libc::XFS_SUPER_MAGIC => true,
            _ => false,
        };
        tells && self.set & changing == 0
    }
}

/// Whether a file of xfs lies on its realtime device, which is another one than that of the file
/// system's number; statx does not tell of it.
fn is_elsewhere(fd: BorrowedFd<'_>, magic: libc::c_long) -> bool {
    magic == libc::XFS_SUPER_MAGIC
        && sys::extended_flags(fd.as_raw_fd()).is_none_or(|flags| flags & XFLAG_REALTIME != 0)
}

/// The disk beneath a file system.
#[derive(Debug)]
pub struct DiskFacts {
    /// Layers of block devices beneath the file system.
    pub stack: StackWatch,
    /// What calibration has found, by provider.
    models: [OnceLock<Option<CostModel>>; PROVIDERS.len()],
}

/// What is known of one file.
#[derive(Debug)]
pub struct File {
    /// Device and inode number.
    pub id: FileId,
    /// To what file offsets and lengths of direct I/O are aligned; none where there is no direct
    /// I/O.
    pub offset_align: Option<u64>,
    /// To what its buffers are aligned.
    pub memory_align: usize,
    /// The block device beneath it.
    pub disk: Arc<DiskFacts>,
    /// No tunnels: pages of the file are not what is on the disk, or direct I/O through one went
    /// another way.
    pub tunnel_off: AtomicBool,
    /// How often direct I/O with device memory was refused for another reason than the memory,
    /// since it has worked last.
    refusals: AtomicU32,
    /// Sequences among the reads of the file.
    pub stream: Lock<Stream>,
    /// Descriptors of the library for direct I/O.
    pub(crate) direct_fds: DirectFds,
    mapping: Lock<Mapping>,
    /// The program has closed a descriptor while a call was at it.
    is_leaving: AtomicBool,
}

/// An address range whose pages are those of the file: never read or written, only asked about.
#[derive(Debug, Default)]
struct Mapping {
    address: usize,
    length: usize,
}

/// The program's descriptor, looked at now.
#[derive(Clone, Debug)]
pub struct OpenFile {
    /// The program's descriptor.
    pub fd: RawFd,
    /// File that it is open on.
    pub file: Arc<File>,
    /// Length of the file in bytes.
    pub size: u64,
    /// Flags that it was opened with.
    pub flags: OFlags,
}

pub(crate) static FILES: Lock<Files> = Lock::new(Files {
    files: BTreeMap::new(),
    disks: BTreeMap::new(),
});
/// Whether any file is known.
static ANY: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
pub(crate) struct Files {
    files: BTreeMap<FileId, Arc<File>>,
    disks: BTreeMap<u64, Arc<DiskFacts>>,
}

/// Looks at a descriptor; none when it is no regular file.
#[must_use]
pub fn open(fd: RawFd) -> Option<OpenFile> {
    let borrowed = borrow(fd)?;
    let stat = rustix::fs::fstat(borrowed).ok()?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
        return None;
    }
    let flags = rustix::fs::fcntl_getfl(borrowed).ok()?;
    if flags.contains(OFlags::PATH) {
        return None;
    }
    let id = FileId::of(&stat);
    let known = FILES.lock().known(id);
    let file = known.unwrap_or_else(|| learn(id, borrowed));
    Some(OpenFile {
        fd,
        file,
        size: u64::try_from(stat.st_size).ok()?,
        flags,
    })
}

/// Looks at a file for the first time; the lock is not held over it.
fn learn(id: FileId, fd: BorrowedFd<'_>) -> Arc<File> {
    use rustix::fs::{AtFlags, StatxFlags};
    let disk = FILES.lock().disks.get(&id.device).cloned();
    let disk = disk.unwrap_or_else(|| {
        let (major, minor) = id.device_number();
        Arc::new(DiskFacts {
            stack: StackWatch::new(Path::new("/sys"), major, minor),
            models: [const { OnceLock::new() }; PROVIDERS.len()],
        })
    });
    let statx = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    let aligns = statx.filter(|statx| {
        let answered = StatxFlags::from_bits_retain(statx.stx_mask);
        answered.contains(StatxFlags::DIOALIGN) && statx.stx_dio_offset_align > 0
    });
    let magic = rustix::fs::fstatfs(fd).map_or(0, |statfs| statfs.f_type);
    let attributes = statx.map(|statx| Attributes {
        set: statx.stx_attributes.bits(),
        known: statx.stx_attributes_mask.bits(),
    });
    let attributes = attributes.unwrap_or_default();
    let aligns = aligns.filter(|_| !attributes.is_dax());
    let passes_pages = attributes.pass_pages(magic) && !is_elsewhere(fd, magic);
    let mut files = FILES.lock();
    let disk = Arc::clone(files.disks.entry(id.device).or_insert(disk));
    let file = files.files.entry(id).or_insert_with(|| {
        ANY.store(true, Ordering::Relaxed);
        Arc::new(File {
            id,
            offset_align: aligns.map(|statx| u64::from(statx.stx_dio_offset_align)),
            memory_align: aligns.map_or(1, |statx| to_usize(statx.stx_dio_mem_align.into()).max(1)),
            disk,
            tunnel_off: AtomicBool::new(!passes_pages),
            refusals: AtomicU32::new(0),
            stream: Lock::new(Stream::default()),
            direct_fds: DirectFds::new(),
            mapping: Lock::new(Mapping::default()),
            is_leaving: AtomicBool::new(false),
        })
    });
    Arc::clone(file)
}

impl OpenFile {
    /// A descriptor of the same file for direct I/O, with the same rights.
    ///
    /// # Errors
    /// As [`DirectFds::enter`].
    pub(crate) fn direct(&self) -> Result<InUse<Arc<Guarded>>, Errno> {
        self.file
            .direct_fds
            .enter(self.file.id, self.fd, self.flags)
    }
}

impl DiskFacts {
    /// The system's read-ahead window in bytes.
    #[must_use]
    pub fn window_bytes(&self) -> u64 {
        self.stack.last().stack.window_bytes
    }

    /// What calibration has found for memory of a provider.
    #[must_use]
    pub fn model(&self, id: FileId, provider: &str) -> Option<&CostModel> {
        let at = PROVIDERS.iter().position(|name| *name == provider)?;
        let found = self.models.get(at)?.get_or_init(|| {
            let (major, minor) = id.device_number();
            match crate::plan::store::find(major, minor, provider) {
                Ok(model) => model,
                Err(error) => {
                    crate::log::once(&format!("The calibrations cannot be used: {error}"));
                    None
                }
            }
        });
        found.as_ref()
    }
}

impl File {
    /// Whether direct I/O with device memory has been refused so often that it is not tried any
    /// more.
    pub(crate) fn is_direct_off(&self) -> bool {
        self.refusals.load(Ordering::Relaxed) >= MOST_REFUSALS
    }

    /// Direct I/O with device memory was refused, and perhaps only for this request.
    pub(crate) fn direct_fails(&self) {
        self.refusals.fetch_add(1, Ordering::Relaxed);
    }

    /// Direct I/O with device memory has moved bytes.
    pub(crate) fn direct_works(&self) {
        if self.refusals.load(Ordering::Relaxed) > 0 {
            self.refusals.store(0, Ordering::Relaxed);
        }
    }

    /// The program is about to close a descriptor, which ends its locks: ours go before it, as far
    /// as none of them is in use.
    fn let_go(&self) {
        self.direct_fds.close_unused();
        self.mapping.lock().unmap();
    }

    /// Asks which pages of `length` bytes at `offset` (a multiple of the page size) are in memory:
    /// a byte a page, bit 0.
    ///
    /// # Errors
    /// `ENOMEM` where the mapping cannot be made or queried, `EOVERFLOW` where the range has no
    /// addresses.
    pub fn mincore(
        &self,
        fd: RawFd,
        offset: u64,
        length: usize,
        pages: &mut [u8],
    ) -> Result<(), Errno> {
        let end = to_usize(offset)
            .checked_add(length)
            .ok_or(Errno::OVERFLOW)?;
        let mut mapping = self.mapping.lock();
        if mapping.length < end {
            mapping.unmap();
            // Room for the file to grow; only addresses are used up.
            let length = end.checked_next_power_of_two().ok_or(Errno::OVERFLOW)?;
            *mapping = Mapping::of(fd, length.max(1 << 24))?;
        }
        let from = mapping.address + to_usize(offset);
        sys::mincore(from, length, pages)
    }
}

impl Mapping {
    fn of(fd: RawFd, length: usize) -> Result<Self, Errno> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
        let fd = borrow(fd).ok_or(Errno::BADF)?;
        // SAFETY: the kernel chooses addresses that nothing else uses; nothing is ever accessed
        // there.
        let base = unsafe {
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::empty(),
                flags,
                fd,
                0,
            )?
        };
        // SAFETY: the mapping just made.
        let _ = unsafe { madvise(base, length, Advice::LinuxDontFork) };
        Ok(Self {
            address: base.addr(),
            length,
        })
    }

    fn unmap(&mut self) {
        if self.length > 0 {
            let base = std::ptr::with_exposed_provenance_mut(self.address);
            // SAFETY: our own mapping, which nobody uses while its lock is held.
            let _ = unsafe { rustix::mm::munmap(base, self.length) };
            *self = Self::default();
        }
    }
}

/// Whether any file is known.
#[must_use]
pub fn is_any_known() -> bool {
    ANY.load(Ordering::Relaxed)
}

impl ParentState for Files {
    /// A child does not have our descriptors: what other threads were in the middle of changing is
    /// left alone.
    fn forget(&mut self) {
        std::mem::forget(std::mem::take(&mut self.files));
        std::mem::forget(std::mem::take(&mut self.disks));
        ANY.store(false, Ordering::Relaxed);
    }
}

impl Files {
    /// All that are known.
    pub(crate) fn all(&self) -> Vec<Arc<File>> {
        self.files.values().cloned().collect()
    }

    /// Has a file's descriptors of ours go, and forgets it if no call of another thread is at it:
    /// that would open one again, and close it some time later, with the locks that the program has
    /// by then.
    pub(crate) fn forget_file(&mut self, id: FileId) -> Option<Arc<File>> {
        let file = self.files.get(&id)?;
        file.let_go();
        // Whoever gets it does so with the lock of all files, which the caller has.
        if Arc::strong_count(file) > 1 {
            file.is_leaving.store(true, Ordering::Relaxed);
            return None;
        }
        self.files.remove(&id)
    }

    /// What is known of a file. Of one that was to be forgotten, and has no descriptor of ours that
    /// would keep its number, that is nothing: by now the number may be another file's.
    fn known(&mut self, id: FileId) -> Option<Arc<File>> {
        let file = self.files.get(&id)?;
        let is_unused = Arc::strong_count(file) == 1 && file.direct_fds.are_shut();
        if is_unused && file.is_leaving.load(Ordering::Relaxed) {
            self.files.remove(&id);
            return None;
        }
        Some(Arc::clone(file))
    }
}

/// A call that may lock the file is under way ([`locks`](crate::locks)).
pub(crate) fn locking(id: FileId) {
    // Who has interrupted the library may have interrupted who holds a lock.
    let inside = Inside::enter();
    let waits = inside.is_some();
    if let Some(file) = known_if(id, waits) {
        file.direct_fds.shut(id, waits);
    }
}

/// The program's locks of a file have changed: whether it has any is asked when that is of
/// interest.
pub(crate) fn locks_changed(id: FileId) {
    let inside = Inside::enter();
    let waits = inside.is_some();
    if let Some(file) = known_if(id, waits) {
        file.direct_fds.locks_changed(waits);
    }
}

fn known_if(id: FileId, waits: bool) -> Option<Arc<File>> {
    FILES.lock_if(waits)?.files.get(&id).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    #[test]
    fn files_whose_pages_are_not_the_disks_are_not_tunnelled() {
        let ext4 = libc::EXT4_SUPER_MAGIC;
        // As ext4 tells it (ext4_getattr), and the kernel for all file systems.
        let known = 0x4 | 0x10 | 0x20 | 0x40 | 0x800 | 0x0010_0000 | 0x0020_0000;
        let passes = |set, known, magic| Attributes { set, known }.pass_pages(magic);
        assert!(passes(0, known, ext4) && passes(0x10 | 0x40, known, ext4));
        // Compressed, encrypted, with verity, in persistent memory.
        for set in [0x4, 0x800, 0x0010_0000, 0x0020_0000] {
            assert!(!passes(set, known, ext4), "{set:#x}");
            assert!(
                !passes(set, known & !0x800, libc::XFS_SUPER_MAGIC),
                "{set:#x}"
            );
        }
        // Nothing is known of encryption.
        assert!(!passes(0, known & !0x800, ext4));
        assert!(passes(0, known & !0x800, libc::XFS_SUPER_MAGIC));
        // A file system may have other devices than the one that it is called by.
        for other in [libc::BTRFS_SUPER_MAGIC, 0xF2F5_2010, libc::NFS_SUPER_MAGIC] {
            assert!(!passes(0, known, other), "{other:#x}");
        }
    }

    #[test]
    fn files_of_a_realtime_device_are_elsewhere() {
        // Of a file system that knows such flags at all, and of xfs.
        let file = tempfile::tempfile_in(std::env::current_exe().unwrap().parent().unwrap());
        let file = file.unwrap();
        let flags = sys::extended_flags(file.as_raw_fd()).unwrap();
        assert_eq!(flags & XFLAG_REALTIME, 0);
        assert!(!is_elsewhere(file.as_fd(), libc::XFS_SUPER_MAGIC));
        // A pipe has none: what cannot be asked is not on the disk.
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert!(is_elsewhere(pipe.as_fd(), libc::XFS_SUPER_MAGIC));
        assert!(!is_elsewhere(pipe.as_fd(), libc::EXT4_SUPER_MAGIC));
    }

    #[test]
    fn what_a_file_system_does_not_tell_is_not_taken_for_granted() {
        // tmpfs says nothing of encryption.
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let opened = open(file.as_raw_fd()).unwrap();
        assert!(opened.file.tunnel_off.load(Ordering::Relaxed));
    }
}
