//! Mapped files that shrink.
//!
//! Whoever has given us a file can shrink it while we have it mapped; touching what is gone raises
//! `SIGBUS`, which ends the process and so cuts off everybody else whom it serves. With
//! [`install`], the page is replaced by one of zeroes instead: its owner has lost it, and nobody
//! else notices. System calls that are given such memory fail with `EFAULT`, with or without this.
//!
//! Each page that is replaced may cost the process two more mappings, of which it has not many
//! (`vm.max_map_count`): a mapping that has lost [`MOST_PAGES`] is replaced as a whole when it
//! loses another one, whatever others have lost; so are all when [`MOST_PAGES_OF_ALL`] are
//! replaced.
//!
//! Only [`Mapping`](crate::Mapping)s and [`CoveredMemory`] are covered; a fault anywhere else ends
//! the process as ever.

use farlane_sys::sync::lock;
use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, Once};
use vm_memory::{GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _};

/// Mappings that there can be at a time: those beyond are refused. Memory is used for those that
/// there are.
pub const PLACES: usize = 512 * 1024;
/// Lost pages of a mapping that are replaced one by one.
pub const MOST_PAGES: u64 = 128;
/// Lost pages of all mappings that there are which are replaced one by one: an eighth of the
/// mappings that a process may have where nobody has changed it.
pub const MOST_PAGES_OF_ALL: u64 = 4096;

/// A mapping, for the handler. `turn` is odd while `start` and `end` are of a live mapping: it
/// changes before and after them, so that the handler never takes the parts of two for one.
struct Place {
    turn: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicU64,
    /// Pages of it that are replaced one by one.
    pages: AtomicU64,
}

static TABLE: [Place; PLACES] = [const {
    Place {
        turn: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        lost: AtomicU64::new(0),
        pages: AtomicU64::new(0),
    }
}; PLACES];

/// Places that are free. Never taken by the handler.
static FREE: Mutex<Free> = Mutex::new(Free {
    returned: Vec::new(),
    fresh: 0,
});

struct Free {
    returned: Vec<usize>,
    /// The first that nobody has ever had; the handler looks no further.
    fresh: usize,
}

/// Places below this one may be in use.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Faults that cost a page.
static LOST: AtomicU64 = AtomicU64::new(0);
/// Pages that are replaced one by one, of the mappings that there are.
static PAGES: AtomicU64 = AtomicU64::new(0);
static INSTALLED: AtomicBool = AtomicBool::new(false);
static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::uninit()));

/// What handled `SIGBUS` before.
struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: written once, before `INSTALLED` is set; read only after that was seen.
unsafe impl Sync for Previous {}

/// A covered mapping's place in the table.
#[derive(Debug)]
pub(crate) struct Covered(usize);

/// Covers `length` bytes at `start`, which are mapped, until the place is dropped. None where there
/// are too many.
pub(crate) fn cover(start: usize, length: usize) -> Option<Covered> {
    let mut free = lock(&FREE);
    let index = match free.returned.pop() {
        Some(index) => index,
        None if free.fresh < PLACES => {
            free.fresh += 1;
            USED.store(free.fresh, Ordering::Release);
            free.fresh - 1
        }
        None => return None,
    };
    drop(free);
    let place = &TABLE[index];
    place.lost.store(0, Ordering::Relaxed);
    place.start.store(start, Ordering::Relaxed);
    place
        .end
        .store(start.saturating_add(length), Ordering::Relaxed);
    place.turn.fetch_add(1, Ordering::Release);
    Some(Covered(index))
}

impl Covered {
    /// Faults that cost this mapping a page.
    pub(crate) fn lost(&self) -> u64 {
        TABLE[self.0].lost.load(Ordering::Relaxed)
    }
}

impl Drop for Covered {
    fn drop(&mut self) {
        let place = &TABLE[self.0];
        place.turn.fetch_add(1, Ordering::Release);
        PAGES.fetch_sub(place.pages.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        // Before another one writes what the handler may be about to compare.
        fence(Ordering::SeqCst);
        let mut free = lock(&FREE);
        free.returned.push(self.0);
    }
}

/// The memory of a VM as [`vm_memory`] has mapped it, covered as long as this lives. Nobody may
/// touch it any longer.
#[derive(Debug)]
pub struct CoveredMemory {
    // First: the ranges may be somebody else's at once.
    _covered: Vec<Covered>,
    _memory: GuestMemoryMmap,
}

impl CoveredMemory {
    /// Covers it. None where there are too many mappings.
    #[must_use]
    pub fn new(memory: &GuestMemoryMmap) -> Option<Self> {
        let ranges = memory.iter().map(|region| {
            let length = usize::try_from(region.len()).ok()?;
            cover(region.as_ptr().expose_provenance(), length)
        });
        Some(Self {
            _covered: ranges.collect::<Option<_>>()?,
            _memory: memory.clone(),
        })
    }
}

/// How many pages of mapped files had gone when they were touched.
#[must_use]
pub fn lost_pages() -> u64 {
    LOST.load(Ordering::Relaxed)
}

/// From now on a mapped file that shrinks ends this process no more. Once is enough.
///
/// # Errors
/// The system refuses.
pub fn install() -> io::Result<()> {
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| result = install_once());
    result
}

fn install_once() -> io::Result<()> {
    let mut previous = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: `sigaction` is plain data for which zeroes are valid; the handler has the signature
    // that SA_SIGINFO asks for, and calls only what may be called in one.
    let rc = unsafe {
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = handle as *const () as usize;
        // On the stack that the thread has for that, if any: its own may be what has run out.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        // First, for the handler may be called as soon as it is there.
        if libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr()) == 0 {
            *PREVIOUS.0.get() = previous;
            INSTALLED.store(true, Ordering::Release);
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut())
        } else {
            -1
        }
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Runs in a signal handler: no locks, no allocation, no `errno`.
extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`. A fault's has an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    if code == libc::BUS_ADRERR && replace(address) {
        return;
    }
    // Somebody has sent it: there will be no second fault.
    let sent = code <= 0;
    // SAFETY: `PREVIOUS` was written before `INSTALLED` was set, and never again; zeroes are a
    // valid action, the default one. Without errors for a valid action of a valid signal, so that
    // `errno` is left alone.
    unsafe {
        let default: libc::sigaction = MaybeUninit::zeroed().assume_init();
        let previous = if INSTALLED.load(Ordering::Acquire) && !sent {
            (*PREVIOUS.0.get()).as_ptr()
        } else {
            &raw const default
        };
        libc::sigaction(signal, previous, ptr::null_mut());
    }
    if sent {
        let pid = rustix::process::getpid();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::BUS);
    }
}

/// Puts zeroes where a covered mapping has lost its page. Says whether there is one.
fn replace(address: usize) -> bool {
    let used = USED.load(Ordering::Acquire).min(PLACES);
    for place in &TABLE[..used] {
        let turn = place.turn.load(Ordering::Acquire);
        let start = place.start.load(Ordering::Relaxed);
        let end = place.end.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let live = turn % 2 == 1 && place.turn.load(Ordering::Relaxed) == turn;
        if live && (start..end).contains(&address) {
            place.lost.fetch_add(1, Ordering::Relaxed);
            LOST.fetch_add(1, Ordering::Relaxed);
            let alone = place.takes_page();
            let page = address & !(PAGE - 1);
            // A page; or all of it: where there are too many, where pages are huge, or where the
            // kernel will not have more pieces.
            return alone && put_zeroes(page, PAGE.min(end - page))
                || put_zeroes(start, end - start);
        }
    }
    false
}

impl Place {
    /// Counts a page that is to be replaced alone, if it may be.
    fn takes_page(&self) -> bool {
        let count = |counter: &AtomicU64, most| {
            let next = |count| (count < most).then_some(count + 1);
            let (set, get) = (Ordering::Relaxed, Ordering::Relaxed);
            counter.fetch_update(set, get, next).is_ok()
        };
        if !count(&self.pages, MOST_PAGES) {
            return false;
        }
        let is_counted = count(&PAGES, MOST_PAGES_OF_ALL);
        if !is_counted {
            self.pages.fetch_sub(1, Ordering::Relaxed);
        }
        is_counted
    }
}

/// What a mapping is made of, but for huge pages.
const PAGE: usize = 4096;

fn put_zeroes(start: usize, length: usize) -> bool {
    // SAFETY: [start, start + length) is of a mapping that lives, since a thread is touching it,
    // and whose users make no references to its bytes: others write them at any time. rustix makes
    // the system call itself.
    let zeroes = unsafe {
        rustix::mm::mmap_anonymous(
            ptr::with_exposed_provenance_mut(start),
            length,
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::PRIVATE
                | rustix::mm::MapFlags::FIXED
                | rustix::mm::MapFlags::NORESERVE,
        )
    };
    zeroes.is_ok()
}
