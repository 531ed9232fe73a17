//! Queues of a vhost-user device whose notifications a device can take for itself.
//!
//! [`VhostUserDaemon`](vhost_user_backend::VhostUserDaemon) wakes its worker thread for every
//! kick. A [`Vring`] whose kick is diverted gives the kick's eventfd to the device instead, which
//! wakes the thread that it wants to wake, without a hop through the worker.

use crate::log_limit::LogLimit;
use crate::{eventfd, warn_limited};
use farlane_sys::sync::{held, lock};
use farlane_zero_copy::fault::CoveredMemory;
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use vhost_user_backend::{VringMutex, VringState, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::{Error as QueueError, QueueT as _};
use vm_memory::{GuestAddressSpace as _, GuestMemoryAtomic, GuestMemoryMmap};

/// Memory of a VM as the queues of a device see it.
pub type VmMemory = GuestMemoryAtomic<GuestMemoryMmap>;

/// The memory of one VM for the queues of its device: as the VMM has shared it, but only once it is
/// [covered](farlane_zero_copy::fault), since whoever has shared it can take it back.
#[derive(Debug)]
pub struct QueueMemory {
    memory: VmMemory,
    /// Its present state, and earlier ones that somebody may still touch.
    covered: Mutex<Vec<(CoveredMemory, Arc<GuestMemoryMmap>)>>,
}

impl Default for QueueMemory {
    fn default() -> Self {
        Self {
            memory: VmMemory::new(GuestMemoryMmap::new()),
            covered: Mutex::default(),
        }
    }
}

impl QueueMemory {
    /// The present state, whenever one asks.
    #[must_use]
    pub fn memory(&self) -> &VmMemory {
        &self.memory
    }

    /// The VMM has shared this in place of what was.
    ///
    /// # Errors
    /// There are too many mappings; nothing has changed then.
    pub fn replace(&self, memory: &GuestMemoryMmap) -> io::Result<()> {
        let full = || io::Error::from(io::ErrorKind::OutOfMemory);
        let covered = CoveredMemory::new(memory).ok_or_else(full)?;
        let mut states = lock(&self.covered);
        let guard = held(self.memory.lock());
        guard.replace(memory.clone());
        states.push((covered, self.memory.memory().into_inner()));
        // Nobody has it any more, and nobody can get it.
        states.retain(|(_, state)| Arc::strong_count(state) > 1);
        Ok(())
    }
}

/// Tells a queue's driver of used buffers. Does not block.
pub fn signal_used(queue: &VringState<VmMemory>) {
    if let Some(call) = queue.get_call() {
        // SAFETY: the queue, which is borrowed meanwhile, has it open.
        eventfd::signal(unsafe { BorrowedFd::borrow_raw(call.as_raw_fd()) });
    }
}

type Divert = Box<dyn Fn(Option<OwnedFd>) + Send + Sync>;
type Follow = Box<dyn Fn(bool) + Send + Sync>;

/// Where a queue goes on whose buffers nobody tracks in flight, of `size` buffers, `used` of which
/// have been used so far, and which starts at `base` as its front-end says. Front-ends of a backend
/// that was killed do not know what it has used, and some (Cloud Hypervisor, whenever a queue
/// starts) name the driver's available index: buffers that are available and not used are nobody's
/// then, and are taken (again). A device that stops uses what it has taken before it says where it
/// is, so that for one that goes on the two are the same.
#[must_use]
pub fn resume_at(base: u16, used: u16, size: u16) -> u16 {
    let unused = base.wrapping_sub(used);
    if unused <= size { used } else { base }
}

/// A queue. Clones are handles to the same one.
#[derive(Clone)]
pub struct Vring {
    inner: VringMutex<VmMemory>,
    divert: Arc<OnceLock<Divert>>,
    follow: Arc<OnceLock<Follow>>,
    base: Arc<AtomicU16>,
    /// It has been started.
    begun: Arc<AtomicBool>,
    /// There is something to tell as soon as there is a way.
    owed: Arc<AtomicBool>,
    limit: Arc<LogLimit>,
}

impl std::fmt::Debug for Vring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vring")
            .field("diverted", &self.divert.get().is_some())
            .finish_non_exhaustive()
    }
}

thread_local! {
    /// Queues made on this thread, see [`collect`].
    static MADE: RefCell<Vec<Vring>> = const { RefCell::new(Vec::new()) };
    /// Whose memory theirs is, and how much they log.
    static OF: RefCell<Option<(VmMemory, Arc<LogLimit>)>> = const { RefCell::new(None) };
}

/// Runs `make` and returns with its result the queues that it made on this thread, in order. They
/// lie in `memory`, and what they log goes by `limit`.
///
/// `VhostUserDaemon` makes its queues itself, over memory of its own, and hands out only those that
/// have a worker.
pub(crate) fn collect<T>(
    memory: &QueueMemory,
    limit: &Arc<LogLimit>,
    make: impl FnOnce() -> T,
) -> (T, Vec<Vring>) {
    OF.set(Some((memory.memory().clone(), Arc::clone(limit))));
    MADE.take();
    let result = make();
    OF.set(None);
    (result, MADE.take())
}

impl Vring {
    /// Gives the eventfd of each future kick to `divert`, `None` when it goes away. The queue's
    /// worker never sees it, and the queue never becomes ready: it is for one that carries no
    /// buffers. Only the first call counts.
    pub fn divert_kick(&self, divert: impl Fn(Option<OwnedFd>) + Send + Sync + 'static) {
        let _ = self.divert.set(Box::new(divert));
    }

    /// Tells `follow` whenever the queue is enabled or disabled: some VMMs (Cloud Hypervisor) pause
    /// a VM by that alone. The queue is disabled already when it is called. Only the first call
    /// counts.
    pub fn follow_enabled(&self, follow: impl Fn(bool) + Send + Sync + 'static) {
        let _ = self.follow.set(Box::new(follow));
    }

    /// Where the queue has gone on when it was started: at zero after a reset of the device,
    /// elsewhere after a pause of the VM. None: it is stopped.
    #[must_use]
    pub fn started_at(&self) -> Option<u16> {
        let is_started = self.inner.get_ref().get_queue().ready();
        is_started.then(|| self.base.load(Ordering::Acquire))
    }

    /// Has the queue's worker look at it. A kick that it reads while the queue is disabled, or when
    /// it is stopped, is lost.
    fn kick_again(&self) {
        if let Some(kick) = self.inner.get_ref().get_kick() {
            // SAFETY: the queue, which is locked meanwhile, has it open.
            let kick = unsafe { BorrowedFd::borrow_raw(kick.as_raw_fd()) };
            eventfd::signal(kick);
        }
    }

    /// Finds out where to go on.
    fn resume(&self) {
        // Where its addresses are no memory there is nothing to go on with.
        if let Ok(used) = self.inner.queue_used_idx() {
            let size = self.inner.get_ref().get_queue().size();
            let base = resume_at(self.inner.queue_next_avail(), used, size);
            self.inner.set_queue_next_avail(base);
            self.inner.set_queue_next_used(used);
            self.base.store(base, Ordering::Release);
            let is_first = !self.begun.swap(true, Ordering::Relaxed);
            if is_first && used != 0 {
                self.owed.store(true, Ordering::Relaxed);
                self.tell_owed();
            }
        }
    }

    /// Tells the driver of what a backend before this one has used, once. If it was killed it may
    /// not have told, and nobody else ever would; to a driver that knows it is one interrupt too
    /// many.
    fn tell_owed(&self) {
        let queue = self.inner.get_ref();
        if queue.get_call().is_some() && self.owed.swap(false, Ordering::Relaxed) {
            signal_used(&queue);
        }
    }

    /// Takes an eventfd of the front-end, or nothing where it is none.
    fn adopt(&self, what: &str, file: Option<File>) -> Option<OwnedFd> {
        eventfd::adopt(file?.into())
            .inspect_err(|e| warn_limited!(self.limit, "Ignoring the {what} of a queue: {e}"))
            .ok()
    }
}

impl<'a> VringStateGuard<'a, VmMemory> for Vring {
    type G = <VringMutex<VmMemory> as VringStateGuard<'a, VmMemory>>::G;
}

impl<'a> VringStateMutGuard<'a, VmMemory> for Vring {
    type G = <VringMutex<VmMemory> as VringStateMutGuard<'a, VmMemory>>::G;
}

impl VringT<VmMemory> for Vring {
    fn new(mem: VmMemory, max_queue_size: u16) -> Result<Self, QueueError> {
        let (memory, limit) = OF.with_borrow(|of| of.clone().unwrap_or((mem, Arc::default())));
        let vring = Self {
            inner: VringMutex::new(memory, max_queue_size)?,
            divert: Arc::default(),
            follow: Arc::default(),
            base: Arc::default(),
            begun: Arc::default(),
            owed: Arc::default(),
            limit,
        };
        MADE.with_borrow_mut(|made| made.push(vring.clone()));
        Ok(vring)
    }

    fn set_kick(&self, file: Option<File>) {
        let fd = self.adopt("kick", file);
        match self.divert.get() {
            Some(divert) => divert(fd),
            None => self.inner.set_kick(fd.map(Into::into)),
        }
    }

    fn set_call(&self, file: Option<File>) {
        self.inner
            .set_call(self.adopt("call", file).map(Into::into));
        self.tell_owed();
    }

    fn set_err(&self, file: Option<File>) {
        self.inner
            .set_err(self.adopt("error", file).map(Into::into));
    }

    fn read_kick(&self) -> io::Result<bool> {
        let queue = self.inner.get_ref();
        if let Some(kick) = queue.get_kick() {
            // Somebody else may have read it, or have it block.
            // SAFETY: the queue, which is locked meanwhile, has it open.
            let _ = eventfd::drain(unsafe { BorrowedFd::borrow_raw(kick.as_raw_fd()) });
        }
        Ok(queue.is_enabled())
    }

    fn get_ref(&self) -> <Self as VringStateGuard<'_, VmMemory>>::G {
        self.inner.get_ref()
    }

    fn get_mut(&self) -> <Self as VringStateMutGuard<'_, VmMemory>>::G {
        self.inner.get_mut()
    }

    fn add_used(&self, desc_index: u16, len: u32) -> Result<(), QueueError> {
        self.inner.add_used(desc_index, len)
    }

    fn signal_used_queue(&self) -> io::Result<()> {
        signal_used(&self.inner.get_ref());
        Ok(())
    }

    fn enable_notification(&self) -> Result<bool, QueueError> {
        self.inner.enable_notification()
    }

    fn disable_notification(&self) -> Result<(), QueueError> {
        self.inner.disable_notification()
    }

    fn needs_notification(&self) -> Result<bool, QueueError> {
        self.inner.needs_notification()
    }

    fn set_enabled(&self, enabled: bool) {
        self.inner.set_enabled(enabled);
        if let Some(follow) = self.follow.get() {
            follow(enabled);
        }
        if enabled {
            self.kick_again();
        }
    }

    fn set_queue_info(
        &self,
        desc_table: u64,
        avail_ring: u64,
        used_ring: u64,
    ) -> Result<(), QueueError> {
        self.inner.set_queue_info(desc_table, avail_ring, used_ring)
    }

    fn queue_next_avail(&self) -> u16 {
        self.inner.queue_next_avail()
    }

    fn set_queue_next_avail(&self, base: u16) {
        self.inner.set_queue_next_avail(base);
    }

    fn set_queue_next_used(&self, idx: u16) {
        self.inner.set_queue_next_used(idx);
    }

    fn queue_used_idx(&self) -> Result<u16, QueueError> {
        self.inner.queue_used_idx()
    }

    fn set_queue_size(&self, num: u16) {
        self.inner.set_queue_size(num);
    }

    fn set_queue_event_idx(&self, enabled: bool) {
        self.inner.set_queue_event_idx(enabled);
    }

    fn set_queue_ready(&self, ready: bool) {
        if ready {
            self.resume();
        }
        self.inner.set_queue_ready(ready);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;
    use vm_memory::{Bytes as _, FileOffset, GuestAddress};

    #[test]
    fn a_driver_is_told_once_of_what_a_backend_before_this_one_has_used() {
        let ram = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap();
        let memory = VmMemory::new(ram);
        let call = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let told = || eventfd::drain(call.as_fd());
        for (used, calls_first) in [(0_u16, false), (0, true), (3, false), (3, true)] {
            let used_index = GuestAddress(0x3002);
            memory.memory().write_obj(used, used_index).unwrap();
            let vring = Vring::new(memory.clone(), 8).unwrap();
            vring.set_queue_info(0x1000, 0x2000, 0x3000).unwrap();
            let set_call = || vring.set_call(Some(call.try_clone().unwrap().into()));
            if calls_first {
                set_call();
                assert_eq!(told(), 0);
            }
            vring.set_queue_ready(true);
            if !calls_first {
                set_call();
            }
            assert_eq!(told(), u64::from(used != 0));
            // A pause, after which this one goes on.
            vring.set_queue_ready(false);
            vring.set_call(None);
            vring.set_queue_ready(true);
            set_call();
            assert_eq!(told(), 0);
        }
    }

    #[test]
    fn an_eventfd_that_has_come_to_block_blocks_no_thread() {
        eventfd::install();
        let vring = Vring::new(VmMemory::new(GuestMemoryMmap::new()), 8).unwrap();
        let [kick, call] = [(); 2].map(|()| {
            let flags = rustix::event::EventfdFlags::CLOEXEC;
            rustix::event::eventfd(0, flags).unwrap()
        });
        let file = |fd: &OwnedFd| Some(File::from(fd.try_clone().unwrap()));
        vring.set_kick(file(&kick));
        vring.set_call(file(&call));
        for fd in [&kick, &call] {
            rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::empty()).unwrap();
        }
        assert!(!vring.read_kick().unwrap());
        let _ = eventfd::drain(call.as_fd());
        rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        vring.signal_used_queue().unwrap();
        assert!(eventfd::drain(call.as_fd()) >= u64::MAX - 1);
    }

    #[test]
    fn memory_is_covered_as_long_as_somebody_may_touch_it() {
        let table = || {
            let file = tempfile::tempfile().unwrap();
            file.set_len(4096).unwrap();
            let ram = [(GuestAddress(0), 4096, Some(FileOffset::new(file, 0)))];
            GuestMemoryMmap::from_ranges_with_files(ram).unwrap()
        };
        let memory = QueueMemory::default();
        let states = || memory.covered.lock().unwrap().len();
        for _ in 0..3 {
            memory.replace(&table()).unwrap();
            assert_eq!(states(), 1);
        }
        let held = memory.memory().memory();
        memory.replace(&table()).unwrap();
        memory.replace(&table()).unwrap();
        assert_eq!(states(), 2);
        drop(held);
        memory.replace(&table()).unwrap();
        assert_eq!(states(), 1);
    }
}
