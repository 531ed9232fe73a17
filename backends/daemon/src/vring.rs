//! Queues of a vhost-user device whose notifications a device can take for itself.
//!
//! [`VhostUserDaemon`](vhost_user_backend::VhostUserDaemon) wakes its worker thread for every
//! kick. A [`Vring`] whose kick is diverted gives the kick's eventfd to the device instead, which
//! wakes the thread that it wants to wake, without a hop through the worker.

use crate::log_limit::LogLimit;
use crate::{eventfd, warn_limited};
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, OnceLock};
use vhost_user_backend::{VringMutex, VringStateGuard, VringStateMutGuard, VringT};
use virtio_queue::Error as QueueError;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

/// Memory of a VM as the daemon of a device sees it.
pub type VmMemory = GuestMemoryAtomic<GuestMemoryMmap>;

type Divert = Box<dyn Fn(Option<OwnedFd>) + Send + Sync>;

/// A queue. Clones are handles to the same one.
#[derive(Clone)]
pub struct Vring {
    inner: VringMutex<VmMemory>,
    divert: Arc<OnceLock<Divert>>,
    base: Arc<AtomicU16>,
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
    /// Of what they log.
    static LIMIT: RefCell<Arc<LogLimit>> = RefCell::default();
}

/// Runs `make` and returns with its result the queues that it made on this thread, in order. What they log goes by this limit.
///
/// `VhostUserDaemon` makes its queues itself and hands out only those that have a worker.
pub(crate) fn collect<T>(limit: &Arc<LogLimit>, make: impl FnOnce() -> T) -> (T, Vec<Vring>) {
    LIMIT.set(Arc::clone(limit));
    MADE.take();
    let result = make();
    (result, MADE.take())
}

impl Vring {
    /// Gives the eventfd of each future kick to `divert`, `None` when it goes away. The queue's
    /// worker never sees it, and the queue never becomes ready: it is for one that carries no
    /// buffers. Only the first call counts.
    pub fn divert_kick(&self, divert: impl Fn(Option<OwnedFd>) + Send + Sync + 'static) {
        let _ = self.divert.set(Box::new(divert));
    }

    /// Where the queue was last started: zero after a reset of the device, elsewhere after a pause
    /// of the VM.
    #[must_use]
    pub fn base(&self) -> u16 {
        self.base.load(Ordering::Acquire)
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
        let vring = Self {
            inner: VringMutex::new(mem, max_queue_size)?,
            divert: Arc::default(),
            base: Arc::default(),
            limit: LIMIT.with_borrow(Arc::clone),
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
    }

    fn set_err(&self, file: Option<File>) {
        self.inner
            .set_err(self.adopt("error", file).map(Into::into));
    }

    fn read_kick(&self) -> io::Result<bool> {
        match self.inner.read_kick() {
            // Somebody else has read it: nothing to do, and nothing to end the worker for.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            other => other,
        }
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
        self.inner.signal_used_queue()
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
        self.base.store(base, Ordering::Release);
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
        self.inner.set_queue_ready(ready);
    }
}
