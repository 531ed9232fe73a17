//! What is known of the program's files: how they are aligned, on which disk they lie.

use crate::descriptors::Own;
use crate::disks::Watched;
use crate::fork::Inside;
use crate::lock::Lock;
use crate::plan::CostModel;
use crate::readahead::{Advice, Stream};
use crate::{locks, readahead, sys};
use rustix::fs::{OFlags, Stat};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Direct I/O with a file that was refused as often as this in a row is not tried any more while it
/// is open.
const MOST_REFUSALS: u32 = 8;

/// After as many requests to a locked file it is asked whether it still is, and then each time
/// after twice as many: what that costs (a look at every descriptor of the process) is little
/// beside the requests.
const PLAIN_REQUESTS: u32 = 16;

/// `FS_XFLAG_REALTIME` (linux/fs.h).
const XFLAG_REALTIME: u32 = 1;

/// A file, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId {
    /// Device number of the file system.
    pub device: u64,
    /// Number in it.
    pub inode: u64,
}

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
    /// Its layers.
    pub stack: Watched,
    /// What calibration has found, by provider.
    models: [OnceLock<Option<CostModel>>; PROVIDERS.len()],
}

/// What is known of one file.
#[derive(Debug)]
pub struct File {
    /// Which one.
    pub id: FileId,
    /// To what file offsets and lengths of direct I/O are aligned; none where there is no direct
    /// I/O.
    pub offset_align: Option<u64>,
    /// To what its buffers are aligned.
    pub memory_align: usize,
    /// The disk.
    pub disk: Arc<DiskFacts>,
    /// No tunnels: pages of the file are not what is on the disk, or direct I/O through one went
    /// another way.
    pub tunnel_off: AtomicBool,
    /// How often direct I/O with device memory was refused for another reason than the memory,
    /// since it has worked last.
    refusals: AtomicU32,
    /// Pattern of reads.
    pub stream: Lock<Stream>,
    /// Descriptors of ours. Nothing is opened or closed without the lock.
    pub(crate) own: Lock<Vec<Own>>,
    /// The program has POSIX locks of the file, as far as is known: nothing that could end them has
    /// happened since they were seen. It changes with the lock of `own`.
    is_locked: AtomicBool,
    /// Requests that have gone the plain way since then.
    plain: AtomicU32,
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
pub struct Opened {
    /// The descriptor.
    pub fd: RawFd,
    /// Its file.
    pub file: Arc<File>,
    /// Length of the file in bytes.
    pub size: u64,
    /// Flags that it was opened with.
    pub flags: OFlags,
}

static FILES: Lock<Files> = Lock::new(Files {
    files: BTreeMap::new(),
    disks: BTreeMap::new(),
});
/// Whether any file is known.
static ANY: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
struct Files {
    files: BTreeMap<FileId, Arc<File>>,
    disks: BTreeMap<u64, Arc<DiskFacts>>,
}

pub(crate) fn borrow(fd: RawFd) -> Option<BorrowedFd<'static>> {
    // SAFETY: the program's descriptor over one of its own calls; the kernel checks it.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

pub(crate) fn id_of(stat: &Stat) -> FileId {
    FileId {
        device: stat.st_dev,
        inode: stat.st_ino,
    }
}

/// Looks at a descriptor; none when it is no regular file.
#[must_use]
pub fn open(fd: RawFd) -> Option<Opened> {
    let borrowed = borrow(fd)?;
    let stat = rustix::fs::fstat(borrowed).ok()?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
        return None;
    }
    let flags = rustix::fs::fcntl_getfl(borrowed).ok()?;
    if flags.contains(OFlags::PATH) {
        return None;
    }
    let id = id_of(&stat);
    let known = FILES.lock().known(id);
    let file = known.unwrap_or_else(|| learn(id, borrowed));
    Some(Opened {
        fd,
        file,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        flags,
    })
}

/// Looks at a file for the first time; the lock is not held over it.
fn learn(id: FileId, fd: BorrowedFd<'_>) -> Arc<File> {
    use rustix::fs::{AtFlags, StatxFlags};
    let disk = FILES.lock().disks.get(&id.device).cloned();
    let disk = disk.unwrap_or_else(|| {
        let (major, minor) = (rustix::fs::major(id.device), rustix::fs::minor(id.device));
        Arc::new(DiskFacts {
            stack: Watched::new(Path::new("/sys"), major, minor),
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
            memory_align: aligns
                .and_then(|statx| usize::try_from(statx.stx_dio_mem_align).ok())
                .map_or(1, |align| align.max(1)),
            disk,
            tunnel_off: AtomicBool::new(!passes_pages),
            refusals: AtomicU32::new(0),
            stream: Lock::new(Stream::default()),
            own: Lock::new(Vec::new()),
            is_locked: AtomicBool::new(false),
            plain: AtomicU32::new(0),
            mapping: Lock::new(Mapping::default()),
            is_leaving: AtomicBool::new(false),
        })
    });
    Arc::clone(file)
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
            let (major, minor) = (rustix::fs::major(id.device), rustix::fs::minor(id.device));
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

    /// Whether the program has POSIX locks of the file, as far as is known: then there is no direct
    /// I/O.
    pub(crate) fn is_locked(&self) -> bool {
        self.is_locked.load(Ordering::Relaxed)
    }

    /// Whether a request goes the plain way because of them. Now and then one does not, and the
    /// kernel is asked again: who reads while another thread closes the file finds locks that end
    /// with that, after it was told of the close.
    pub(crate) fn goes_plain(&self) -> bool {
        if !self.is_locked() {
            return false;
        }
        let plain = self.plain.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if plain < PLAIN_REQUESTS || !plain.is_power_of_two() {
            return true;
        }
        let _own = self.own.lock();
        self.set_locked(false);
        false
    }

    /// To be called with the lock of `own`.
    pub(crate) fn set_locked(&self, is_locked: bool) {
        self.is_locked.store(is_locked, Ordering::Relaxed);
    }

    /// The program's locks have changed, or do so now: it is asked when that is of interest. To be
    /// called with the lock of `own`.
    fn has_other_locks(&self) {
        self.set_locked(false);
        self.plain.store(0, Ordering::Relaxed);
    }

    /// The program is about to close a descriptor, which ends its locks: ours go before it, as far
    /// as none of them is in use.
    fn let_go(&self) {
        let mut own = self.own.lock();
        own.retain(Own::is_used);
        self.has_other_locks();
        drop(own);
        self.mapping.lock().unmap();
    }

    /// The program is about to lock the file: ours are closed. If it `waits`, those that others
    /// use, too, when they do so no more.
    fn shut(&self, waits: bool) {
        loop {
            let in_use = {
                let Some(own) = self.own.lock_if(waits) else {
                    return;
                };
                if own.iter().all(Own::is_shut) {
                    return;
                }
                // Locks that were taken around the C library would go now, and stay until `execve`
                // otherwise.
                if locks::are_held(self.id) == Ok(true) {
                    return;
                }
                let is_in_use = |own: &&Own| own.guarded().shut(false).is_err();
                own.iter()
                    .find(is_in_use)
                    .map(|own| Arc::clone(own.guarded()))
            };
            match in_use {
                // Nobody gets it any more who has not got it yet.
                Some(in_use) if waits && in_use.shut(true).is_ok() => (),
                _ => return,
            }
        }
    }

    /// Asks which pages of `length` bytes at `offset` (a multiple of the page size) are in memory:
    /// a byte a page, bit 0.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn mincore(
        &self,
        fd: RawFd,
        offset: u64,
        length: usize,
        pages: &mut [u8],
    ) -> Result<(), Errno> {
        let end = sys::to_usize(offset)
            .checked_add(length)
            .ok_or(Errno::OVERFLOW)?;
        let mut mapping = self.mapping.lock();
        if mapping.length < end {
            mapping.unmap();
            // Room for the file to grow; only addresses are used up.
            let length = end.checked_next_power_of_two().ok_or(Errno::OVERFLOW)?;
            *mapping = Mapping::of(fd, length.max(1 << 24))?;
        }
        let from = mapping.address + sys::to_usize(offset);
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

impl Files {
    /// Has a file's descriptors of ours go, and forgets it if no call of another thread is at it:
    /// that would open one again, and close it some time later, with the locks that the program has
    /// by then.
    fn forget(&mut self, id: FileId) -> Option<Arc<File>> {
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
        let is_unused = Arc::strong_count(file) == 1 && file.own.lock().iter().all(Own::is_shut);
        if is_unused && file.is_leaving.load(Ordering::Relaxed) {
            self.files.remove(&id);
            return None;
        }
        Some(Arc::clone(file))
    }
}

/// The program is about to close `fd`, a descriptor of the file with this number.
pub(crate) fn forget_one(id: FileId, fd: RawFd) {
    let gone = FILES.lock().forget(id);
    if let Some(file) = gone {
        readahead::drop_file(&file, fd);
    }
}

/// A call that may lock the file is under way ([`locks`](crate::locks)).
pub(crate) fn locking(id: FileId) {
    // Who has interrupted the library may have interrupted who holds a lock.
    let inside = Inside::enter();
    let waits = inside.is_some();
    if let Some(file) = known_if(id, waits) {
        file.shut(waits);
    }
}

/// The program's locks of a file have changed: whether it has any is asked when that is of
/// interest.
pub(crate) fn locks_changed(id: FileId) {
    let inside = Inside::enter();
    let waits = inside.is_some();
    if let Some(file) = known_if(id, waits)
        && let Some(_own) = file.own.lock_if(waits)
    {
        file.has_other_locks();
    }
}

fn known_if(id: FileId, waits: bool) -> Option<Arc<File>> {
    FILES.lock_if(waits)?.files.get(&id).cloned()
}

/// Forgets files of which the program has no descriptor any more, when it has closed some.
pub(crate) fn forget_all_but(open: &BTreeSet<FileId>) {
    let known: Vec<_> = FILES.lock().files.values().cloned().collect();
    for file in known.iter().filter(|file| open.contains(&file.id)) {
        let _own = file.own.lock();
        file.has_other_locks();
    }
    for file in known.into_iter().filter(|file| !open.contains(&file.id)) {
        let own = file.own.lock().first().and_then(Own::enter);
        if let Some(own) = own {
            readahead::drop_file(&file, own.number());
        }
        let id = file.id;
        drop(file);
        FILES.lock().forget(id);
    }
}

/// Before a fork.
pub(crate) fn hold() {
    FILES.take();
}

/// After a fork.
///
/// # Safety
/// This thread has called [`hold`].
pub(crate) unsafe fn release() {
    // SAFETY: as promised by the caller.
    unsafe { FILES.give() };
}

/// In a child, which does not have our descriptors: what other threads were in the middle of
/// changing is left alone.
///
/// # Safety
/// As [`release`].
pub(crate) unsafe fn forget() {
    // SAFETY: the lock is held, says the caller.
    let files = unsafe { FILES.held() };
    std::mem::forget(std::mem::take(&mut files.files));
    std::mem::forget(std::mem::take(&mut files.disks));
    ANY.store(false, Ordering::Relaxed);
}

/// Is told what the program says with `posix_fadvise` of how it will read.
pub fn advised(fd: RawFd, advice: c_int) {
    let advice = match advice {
        libc::POSIX_FADV_NORMAL => Advice::Normal,
        libc::POSIX_FADV_SEQUENTIAL => Advice::Sequential,
        libc::POSIX_FADV_RANDOM => Advice::Random,
        _ => return,
    };
    readahead::advise(fd, advice);
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
    fn a_file_is_not_forgotten_while_a_call_is_at_it() {
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        let opened = open(fd).unwrap();
        let id = opened.file.id;
        let is_same = || Arc::ptr_eq(&open(fd).unwrap().file, &opened.file);
        forget_one(id, fd);
        assert!(is_same());
        let old = Arc::downgrade(&opened.file);
        drop(opened);
        // Then it is looked at anew: the number may be another file's.
        let opened = open(fd).unwrap();
        assert!(old.upgrade().is_none());
        drop(opened);
        forget_one(id, fd);
        assert!(!FILES.lock().files.contains_key(&id));
    }

    #[test]
    fn what_a_file_system_does_not_tell_is_not_taken_for_granted() {
        // tmpfs says nothing of encryption.
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let opened = open(file.as_raw_fd()).unwrap();
        assert!(opened.file.tunnel_off.load(Ordering::Relaxed));
    }
}
