//! Sleeping without missing what others post: announce, look again, sleep.
//!
//! The *sleeper* says that it will sleep, looks once more, and sleeps. A *poster* publishes, and
//! wakes the sleeper if it says that it sleeps. Each puts a full fence between its store and its
//! load, so at least one of them sees the other's store (Dekker's argument). Checked with loom in
//! `tests/loom.rs`, also that it fails without the fence.
//!
//! The word is either in memory that both map (the backend state and the caller-waiting word of
//! `farlane_abi::arena`, `QUEUE_ASLEEP` of `farlane_abi::gpu`), or a [`Sleep`] of one process.

use farlane_abi::arena::{BACKEND_AWAKE, BACKEND_SLEEPING};

use crate::sync::atomic::{AtomicU32, Ordering, fence};

/// A word that one side stores and the other loads. The fences give the order.
pub trait Word {
    /// A relaxed store.
    fn put(&self, value: u32);
    /// A relaxed load.
    fn get(&self) -> u32;
}

impl Word for AtomicU32 {
    fn put(&self, value: u32) {
        self.store(value, Ordering::Relaxed);
    }

    fn get(&self) -> u32 {
        self.load(Ordering::Relaxed)
    }
}

/// The sleeper's side: announces sleep on every word of `words`. After this the caller must look
/// at every ring once more before it sleeps.
pub fn announce<'a, W: Word + 'a>(words: impl Iterator<Item = &'a W>) {
    for word in words {
        word.put(BACKEND_SLEEPING);
    }
    fence(Ordering::SeqCst);
}

/// The sleeper's side: it is awake again.
pub fn awake<'a, W: Word + 'a>(words: impl Iterator<Item = &'a W>) {
    for word in words {
        word.put(BACKEND_AWAKE);
    }
}

/// The poster's side, after it has published: whether the other side must be woken.
#[must_use]
pub fn must_wake<W: Word>(word: &W) -> bool {
    fence(Ordering::SeqCst);
    word.get() != BACKEND_AWAKE
}

/// The third party's side: says that its thread cannot go on before something is posted to a
/// context that another thread serves. After this it looks once more, and sleeps. A poster wakes
/// that other thread only, and only if that sleeps: it has to pass the wake-up on, see
/// [`must_pass_on`].
pub fn wait_for_other<W: Word>(word: &W) {
    word.put(AWAITED);
    fence(Ordering::SeqCst);
}

/// The other thread's side, when it finds what was posted, in a turn or after it has announced
/// sleep: whether somebody waits for that, who is to be woken now. The word says so once.
#[must_use]
pub fn must_pass_on<W: Word>(word: &W) -> bool {
    let awaited = word.get() == AWAITED;
    if awaited {
        word.put(NOT_AWAITED);
    }
    awaited
}

/// Whether somebody waits: what [`must_pass_on`] would say.
#[must_use]
pub fn is_awaited<W: Word>(word: &W) -> bool {
    word.get() == AWAITED
}

const NOT_AWAITED: u32 = 0;
const AWAITED: u32 = 1;

/// Wakes a sleeper.
pub trait Event {
    /// Raises the event that the sleeper waits for.
    fn raise(&self);
}

/// Whether a thread of this process sleeps, and what wakes it. In a cache line of its own: posters
/// only read it while the thread is awake.
#[derive(Debug)]
#[repr(align(128))]
pub struct Sleep<E> {
    pub(crate) state: AtomicU32,
    /// What wakes it.
    pub event: E,
}

impl<E: Event> Sleep<E> {
    /// Of a thread that is awake.
    pub fn new(event: E) -> Self {
        Self {
            state: AtomicU32::new(BACKEND_AWAKE),
            event,
        }
    }

    /// The sleeper's side: it will sleep, if it finds nothing when it looks once more.
    pub fn announce(&self) {
        announce(std::iter::once(&self.state));
    }

    /// The sleeper's side: it does not sleep any more. Whether it had said so and nobody has woken
    /// it: else an event is raised already, or is about to be.
    pub fn awake(&self) -> bool {
        self.state.swap(BACKEND_AWAKE, Ordering::Relaxed) != BACKEND_AWAKE
    }

    /// A poster's side, after it has published. Of several posters one wakes.
    pub fn wake(&self) {
        if must_wake(&self.state)
            && self.state.swap(BACKEND_AWAKE, Ordering::Relaxed) != BACKEND_AWAKE
        {
            self.event.raise();
        }
    }
}
