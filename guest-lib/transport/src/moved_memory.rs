//! Memory of the program that a backend of another user maps: where that reaches none by system
//! calls, what is registered lies in files of memory.
//!
//! Pages of the program's own that a registered byte is on move into a file, with what else is on
//! them: the heap's own data, other variables, frames of a stack. When nothing on them is
//! registered any more they move back, as allocators have the kernel empty pages, and map them
//! elsewhere, in ways that pages of a file do not know. No thread runs at a move
//! ([`with_threads_stopped`]), so none loses what it writes.
//!
//! What is registered besides on a page that has moved is found there. So the bytes of a
//! registration are a list of pieces ([`Piece`]), which the backend puts together. Which pages lie
//! where the kernel says (`/proc/self/maps`), whatever the program has unmapped meanwhile.
//!
//! A backend seals a file against any mapping but the one that it has made, and ends that when
//! nothing in the file is registered any more. From then on the file is over: what still lies there
//! moves into another one when it is registered again. A file is of one backend alone.
//!
//! A child has copies of them: see [`children`].

mod children;

use crate::maps::{FileId, Pages, Run, inside, parts, runs};
use crate::stop::with_threads_stopped;
use crate::{Origin, PerProcess};
use farlane_abi::PAGE_BYTES;
use farlane_abi::control::{MAX_SHARED_BYTES, MAX_SHARED_PIECES};
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
use farlane_sys::{Mmap, memory_file};
use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, mmap_anonymous, mremap_fixed};
use rustix::net::getpeername;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Resource, getrlimit};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Bytes of a file that holds what small registrations have moved: each file is a descriptor of the
/// program's.
const FILE_BYTES: usize = 4 << 20;

/// What is registered, and the files, of this process. A child has none: its memory is its own.
static LEDGER: PerProcess<Mutex<Ledger>> = PerProcess::new();

#[derive(Debug, Default)]
struct Ledger {
    files: Files,
    /// The pages on which something of a registration lies.
    registered: HashMap<u64, Range<usize>>,
    next: u64,
}

type Files = Vec<Arc<MemoryFile>>;

/// A file that has pages of the program.
#[derive(Debug)]
struct MemoryFile {
    /// A number of the program's: it may have closed it, and opened something else with it.
    file: ManuallyDrop<OwnedFd>,
    id: FileId,
    /// Who maps it.
    backend: Backend,
    /// All of it, from which parts are mapped at the program's addresses: also where the backend
    /// has sealed it against any other mapping.
    pages: Mmap,
    /// Changed under the lock of all files only.
    uses: Mutex<Uses>,
}

/// What a file is used for.
#[derive(Debug, Default)]
struct Uses {
    /// Bytes of it that are registered, from one to before another, and how often.
    registered: BTreeMap<(usize, usize), usize>,
    /// Something was, and the backend cannot map it any more.
    is_over: bool,
}

/// Whoever maps files: of two, none can map what the other has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Backend(u64);

impl Backend {
    /// That at the other end of a connected socket.
    pub fn of_peer(socket: BorrowedFd<'_>) -> Self {
        let mut hasher = DefaultHasher::new();
        // Of another PID namespace all have the same number.
        let process = socket_peercred(socket).map(|peer| peer.pid.as_raw_nonzero());
        process.ok().hash(&mut hasher);
        getpeername(socket).ok().flatten().hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// Bytes of a file.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    of: Arc<MemoryFile>,
    pub offset: u64,
    pub length: u64,
}

impl Piece {
    pub fn file(&self) -> BorrowedFd<'_> {
        self.of.file.as_fd()
    }

    /// Where it lies in its file.
    fn range(&self) -> (usize, usize) {
        let end = self.offset.saturating_add(self.length);
        (to_usize(self.offset), to_usize(end))
    }

    /// It is registered.
    fn begin(&self) {
        let mut uses = lock(&self.of.uses);
        *uses.registered.entry(self.range()).or_default() += 1;
    }

    /// It is no more.
    fn end(&self) {
        let mut uses = lock(&self.of.uses);
        if let Entry::Occupied(mut times) = uses.registered.entry(self.range()) {
            *times.get_mut() -= 1;
            if *times.get() == 0 {
                times.remove();
            }
        }
        uses.is_over |= uses.registered.is_empty();
    }
}

/// Memory that is registered. When it is dropped no backend has it any more.
#[derive(Debug)]
pub(crate) struct Registered {
    id: u64,
    origin: Origin,
    /// The backend has them, whatever the program has unmapped: nothing else comes there.
    pieces: Vec<Piece>,
}

impl Registered {
    /// Has `length` bytes at `address`, more than none, lie in files, and says where in their
    /// order.
    ///
    /// # Errors
    /// `EFAULT` where something of them is not mapped; `EOPNOTSUPP` where something is neither the
    /// program's own nor moved already (files that it has mapped, devices, huge pages, what cannot
    /// be written, the end of the stack), where its threads cannot be stopped, and for more than
    /// [`MAX_SHARED_BYTES`]; `ENOSPC` for more than [`MAX_SHARED_PIECES`] pieces; `EBUSY` where a
    /// thread does not stop, or another backend has something that lies on the same pages; `EBADF`
    /// where it is on pages of a file whose descriptor the program has closed; what the system
    /// says.
    ///
    /// # Safety
    /// The memory is the caller's, and neither unmapped nor mapped anew meanwhile.
    pub(crate) unsafe fn new(
        backend: Backend,
        address: usize,
        length: usize,
    ) -> Result<(Self, Vec<Piece>), Errno> {
        if length as u64 > MAX_SHARED_BYTES {
            return Err(Errno::OPNOTSUPP);
        }
        let range = address..address.checked_add(length).ok_or(Errno::FAULT)?;
        let pages = outward(&range).ok_or(Errno::FAULT)?;
        children::prepare_for();
        let origin = Origin::here();
        let mut ledger = lock(LEDGER.get());
        // SAFETY: as promised.
        let pieces = unsafe { ledger.share(backend, &range, &pages) };
        let pieces = pieces.inspect_err(|_| ledger.move_back(&pages))?;
        pieces.iter().for_each(Piece::begin);
        let id = ledger.next;
        ledger.next += 1;
        ledger.registered.insert(id, pages);
        let registered = Self {
            id,
            origin,
            pieces: pieces.clone(),
        };
        Ok((registered, pieces))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let pieces = std::mem::take(&mut self.pieces);
        // A child has its parent's ledger, and ends nothing of that.
        if !self.origin.is_here() {
            std::mem::forget(pieces);
            return;
        }
        let mut ledger = lock(LEDGER.get());
        pieces.iter().for_each(Piece::end);
        drop(pieces);
        if let Some(pages) = ledger.registered.remove(&self.id) {
            ledger.move_back(&pages);
        }
    }
}

impl Ledger {
    /// Has all pages of a range lie in files. Says where these bytes of them do.
    ///
    /// # Safety
    /// As of [`Registered::new`].
    unsafe fn share(
        &mut self,
        backend: Backend,
        range: &Range<usize>,
        pages: &Range<usize>,
    ) -> Result<Vec<Piece>, Errno> {
        let all = mappings()?;
        self.tidy(&all);
        let parts = parts(&all, pages).ok_or(Errno::FAULT)?;
        let private = own(&self.files, backend, &parts)?;
        if private.is_empty() {
            return pieces(&self.files, &all, range);
        }
        // SAFETY: as promised, and private or nobody else's any more, as the kernel says.
        unsafe { move_into_file(&mut self.files, backend, &private, &all) }?;
        pieces(&self.files, &mappings()?, range)
    }

    /// Forgets files of which the program has nothing mapped any more, and no backend anything, but
    /// one of the usual length that none has ever had, which is used anew.
    fn tidy(&mut self, all: &[Run]) {
        let mut is_first = true;
        self.files.retain(|file| {
            if Arc::strong_count(file) > 1 || file.is_mapped(all) {
                return true;
            }
            let is_usable = !file.is_over() && file.pages.len() == FILE_BYTES;
            is_usable && std::mem::take(&mut is_first)
        });
    }

    /// Moves pages back into private memory on which nothing is registered. Whatever fails: they
    /// stay where they are.
    fn move_back(&mut self, pages: &Range<usize>) {
        let mut idle = vec![pages.clone()];
        for other in self.registered.values() {
            idle = idle
                .iter()
                .flat_map(|range| without(range, other))
                .collect();
        }
        if idle.is_empty() {
            return;
        }
        let Ok(all) = mappings() else {
            return;
        };
        let moved: Vec<_> = idle
            .iter()
            .flat_map(|range| inside(&all, range))
            .filter_map(|run| {
                let (file, offset) = file_of(&self.files, run.pages)?;
                let at = usize::try_from(offset).ok()?;
                let from = file.pages.get(at, run.range.len())?;
                Some((run.range, from))
            })
            .collect();
        if !moved.is_empty() && move_to_private(&moved).is_ok() {
            let all = mappings();
            all.iter().for_each(|all| self.tidy(all));
        }
    }
}

/// What of a range is not of another one.
fn without(
    range: &Range<usize>,
    other: &Range<usize>,
) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = range.clone();
    let before = start..other.start.clamp(start, end);
    let behind = other.end.clamp(start, end)..end;
    let rest = [before, behind].into_iter();
    rest.filter(|range| !range.is_empty())
}

/// The pages on which something of a range lies.
fn outward(range: &Range<usize>) -> Option<Range<usize>> {
    let page = to_usize(PAGE_BYTES);
    let end = range.end.checked_next_multiple_of(page)?;
    Some(range.start / page * page..end)
}

fn mappings() -> Result<Vec<Run>, Errno> {
    let maps = std::fs::read("/proc/self/maps");
    let maps = maps.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    Ok(runs(&String::from_utf8_lossy(&maps)))
}

/// The file of these pages, if it is one of these, and where in it they are.
fn file_of(files: &Files, pages: Pages) -> Option<(&Arc<MemoryFile>, u64)> {
    let Pages::Shared { file, offset } = pages else {
        return None;
    };
    let found = files.iter().find(|known| known.id == file)?;
    Some((found, offset))
}

impl MemoryFile {
    fn new(backend: Backend, bytes: usize) -> Result<Arc<Self>, Errno> {
        let length = bytes as u64;
        // Beyond it the kernel would end the program.
        let most = getrlimit(Resource::Fsize).current;
        if most.is_some_and(|most| most < length) {
            return Err(Errno::FBIG);
        }
        let file = memory_file("farlane-memory")?;
        ftruncate(&file, length)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let id = FileId::of(&fstat(&file)?);
        let pages = Mmap::shared(&file, 0, bytes, Mmap::READ_WRITE)?;
        // And so is what is mapped from there.
        pages.keep_from_children()?;
        Ok(Arc::new(Self {
            file: ManuallyDrop::new(file),
            id,
            backend,
            pages,
            uses: Mutex::default(),
        }))
    }

    /// Whether its descriptor is still its own.
    fn is_open(&self) -> bool {
        fstat(&*self.file).is_ok_and(|stat| FileId::of(&stat) == self.id)
    }

    /// Whether a backend can map it no more.
    fn is_over(&self) -> bool {
        lock(&self.uses).is_over
    }

    /// Gives out `bytes` of it, all of which are there, if it has them: where nothing of the
    /// program lies, and nothing is registered.
    fn take(&self, bytes: usize, all: &[Run]) -> Result<Option<usize>, Errno> {
        let uses = lock(&self.uses);
        if uses.is_over || !self.is_open() {
            return Ok(None);
        }
        let registered = uses.registered.keys();
        let registered = registered.filter_map(|(start, end)| outward(&(*start..*end)));
        let mut taken: Vec<_> = self.mapped(all).chain(registered).collect();
        taken.sort_unstable_by_key(|range| range.start);
        let mut at = 0;
        for range in taken {
            if range.start >= at + bytes {
                break;
            }
            at = at.max(range.end);
        }
        if self.pages.get(at, bytes).is_none() {
            return Ok(None);
        }
        let flags = FallocateFlags::empty();
        fallocate(&*self.file, flags, at as u64, bytes as u64)?;
        Ok(Some(at))
    }

    /// Whether a run is of the mapping of all of it.
    fn has(&self, run: &Run) -> bool {
        let start = self.pages.base().as_ptr().expose_provenance();
        (start..start + self.pages.len()).contains(&run.range.start)
    }

    /// Which of its bytes pages of the program are, and not only those of that mapping.
    fn mapped(&self, all: &[Run]) -> impl Iterator<Item = Range<usize>> {
        all.iter().filter_map(|run| match run.pages {
            Pages::Shared { file, offset } if file == self.id && !self.has(run) => {
                let start = usize::try_from(offset).ok()?;
                Some(start..start.checked_add(run.range.len())?)
            }
            _ => None,
        })
    }

    /// Whether there are some.
    fn is_mapped(&self, all: &[Run]) -> bool {
        self.mapped(all).next().is_some()
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        if self.is_open() {
            // SAFETY: used no more.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

/// What of these parts is to be moved, where all of them can be registered then.
fn own(files: &Files, backend: Backend, parts: &[Run]) -> Result<Vec<Range<usize>>, Errno> {
    if parts.len() > to_usize(MAX_SHARED_PIECES.into()) {
        return Err(Errno::NOSPC);
    }
    let mut private = Vec::new();
    for part in parts {
        match part.pages {
            Pages::Private => private.push(part.range.clone()),
            pages => {
                let (file, _) = file_of(files, pages).ok_or(Errno::OPNOTSUPP)?;
                if file.is_over() {
                    private.push(part.range.clone());
                } else if file.backend != backend {
                    return Err(Errno::BUSY);
                }
            }
        }
    }
    Ok(private)
}

/// Where the bytes of a range lie.
fn pieces(files: &Files, all: &[Run], range: &Range<usize>) -> Result<Vec<Piece>, Errno> {
    let parts = parts(all, range).ok_or(Errno::FAULT)?;
    if parts.len() > to_usize(MAX_SHARED_PIECES.into()) {
        return Err(Errno::NOSPC);
    }
    let piece = |part: &Run| {
        let (of, offset) = file_of(files, part.pages).ok_or(Errno::FAULT)?;
        of.is_open().then_some(()).ok_or(Errno::BADF)?;
        Ok(Piece {
            of: Arc::clone(of),
            offset,
            length: part.range.len() as u64,
        })
    };
    parts.iter().map(piece).collect()
}

/// Moves pages into a file of a backend's, one range behind the other. `all` is what is mapped.
///
/// # Safety
/// They are private memory, or of files that are over, which nobody unmaps meanwhile.
unsafe fn move_into_file(
    files: &mut Files,
    backend: Backend,
    private: &[Range<usize>],
    all: &[Run],
) -> Result<(), Errno> {
    let bytes = private.iter().map(Range::len).sum();
    let mut found = None;
    for file in files.iter().filter(|file| file.backend == backend) {
        if let Some(at) = file.take(bytes, all)? {
            found = Some((Arc::clone(file), at));
            break;
        }
    }
    let (file, at) = match found {
        Some(found) => found,
        None => {
            let made = MemoryFile::new(backend, bytes.max(FILE_BYTES))?;
            let at = made.take(bytes, all)?.ok_or(Errno::NOMEM)?;
            files.push(Arc::clone(&made));
            (made, at)
        }
    };
    let work = || {
        let mut at = at;
        for range in private {
            // SAFETY: as promised, and no thread runs.
            unsafe { replace(range, &file.pages, at) }?;
            at += range.len();
        }
        Ok(())
    };
    // Where they cannot be stopped nothing can be shared.
    with_threads_stopped(&work).map_err(|errno| match errno {
        Errno::PERM | Errno::ACCESS | Errno::NOSYS | Errno::INVAL => Errno::OPNOTSUPP,
        other => other,
    })
}

/// Puts the pages of a mapping from `at` on in the place of those of a range, with what is there.
///
/// # Safety
/// They are this process's, and no thread runs.
unsafe fn replace(range: &Range<usize>, pages: &Mmap, at: usize) -> Result<(), Errno> {
    let length = range.len();
    let to = pages.get(at, length).ok_or(Errno::FAULT)?.as_ptr();
    copy(range, to)?;
    let place = with_exposed_provenance_mut(range.start);
    // SAFETY: the same bytes take the place of those that were there. Of length zero: a further
    // mapping of these pages, which stay mapped where they are.
    let mapped = unsafe { mremap_fixed(to.cast(), 0, length, MremapFlags::MAYMOVE, place) };
    if let Err(errno) = mapped {
        // What was there may be unmapped by now.
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: as above.
        unsafe {
            mmap_anonymous(place, length, Mmap::READ_WRITE, flags)?;
            std::ptr::copy_nonoverlapping(to, place.cast(), length);
        }
        return Err(errno);
    }
    Ok(())
}

/// Moves pages, which lie in files, each with its place there, into private memory.
fn move_to_private(moved: &[(Range<usize>, NonNull<u8>)]) -> Result<(), Errno> {
    let pages = Mmap::anonymous(moved.iter().map(|(range, _)| range.len()).sum())?;
    // Told by this, and not by what an error leaves: how much of the mapping is elsewhere now.
    let done = AtomicUsize::new(0);
    let work = || {
        for (range, from) in moved {
            let length = range.len();
            let at = done.load(Ordering::Relaxed);
            let to = pages.get(at, length).ok_or(Errno::FAULT)?.as_ptr();
            // SAFETY: both have so many bytes, and no thread runs.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, length) };
            let place = with_exposed_provenance_mut(range.start);
            // SAFETY: the same bytes take the place of those that were there; this part of the
            // mapping is used no more.
            unsafe { mremap_fixed(to.cast(), length, length, MremapFlags::MAYMOVE, place) }?;
            done.store(at + length, Ordering::Relaxed);
        }
        Ok(())
    };
    let result = with_threads_stopped(&work);
    if done.load(Ordering::Relaxed) > 0 {
        std::mem::forget(pages);
    }
    result
}

/// Copies a range by the kernel, as a file that the program has mapped may have become shorter.
fn copy(range: &Range<usize>, to: *mut u8) -> Result<(), Errno> {
    let mut done = 0;
    while done < range.len() {
        let left = range.len() - done;
        let from = with_exposed_provenance_mut::<u8>(range.start + done);
        let vector = |base: *mut u8| libc::iovec {
            iov_base: base.cast(),
            iov_len: left,
        };
        // SAFETY: inside of the destination, which has so many bytes and is this process's own; the
        // kernel checks what is read.
        let copied = unsafe {
            let (local, remote) = (vector(to.add(done)), vector(from));
            let own = libc::getpid();
            libc::process_vm_readv(own, &raw const local, 1, &raw const remote, 1, 0)
        };
        match usize::try_from(copied) {
            Ok(copied) if copied > 0 => done += copied,
            Ok(_) => return Err(Errno::FAULT),
            Err(_) => {
                let number = std::io::Error::last_os_error().raw_os_error();
                return Err(Errno::from_raw_os_error(number.unwrap_or(libc::EFAULT)));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
