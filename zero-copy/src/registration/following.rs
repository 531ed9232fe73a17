//! Memory of a region that has whatever its VM has.

use super::{Gates, Memory};
use farlane_sys::sync::{lock, write};
use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock, TryLockError};

/// No place: it has ended.
const NOWHERE: usize = 2;

/// Memory that is exchanged while transfers go on: none of them fails, or waits for another one.
/// Each touches what was there when it began, and whoever exchanges it waits for those.
///
/// A gate that is closed for the exchange would do neither: a transfer between two parts of the
/// region, which has opened it once, would wait for itself.
#[derive(Debug)]
pub(super) struct Following {
    /// The memory lies in the present place. The other one is empty, but for an exchange.
    places: [RwLock<Option<Memory>>; 2],
    /// Which one is the present place, or [`NOWHERE`].
    present: AtomicUsize,
    /// Held during an exchange, and while the transfers that began before are waited for.
    exchange: Mutex<()>,
}

impl Following {
    /// One of no memory yet.
    pub fn new() -> Self {
        Self {
            places: [
                RwLock::new(Some(Memory::Mapped(Vec::new()))),
                RwLock::new(None),
            ],
            present: AtomicUsize::new(0),
            exchange: Mutex::new(()),
        }
    }

    /// Opens the gate for a transfer, unless the region has ended.
    pub fn enter(&self) -> Option<Gates<'_>> {
        loop {
            let place = self.places.get(self.present.load(Ordering::Acquire))?;
            let memory = match place.try_read() {
                Ok(memory) => Some(memory),
                Err(TryLockError::Poisoned(memory)) => Some(memory.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            if let Some(memory) = memory.filter(|memory| memory.is_some()) {
                return Some(Gates {
                    memory,
                    _shared: None,
                });
            }
            // It was the present place just now: another one is.
            spin_loop();
        }
    }

    /// Has the memory that `now` finds, which is called when no other exchange is under way. When
    /// this returns, no transfer touches what it had before.
    pub fn exchange(&self, now: impl FnOnce() -> Memory) {
        let _exchange = lock(&self.exchange);
        let before = self.present.load(Ordering::Relaxed);
        let (Some(from), Some(to)) = (self.places.get(before), self.places.get(1 - before % 2))
        else {
            return;
        };
        *write(to) = Some(now());
        self.present.store(1 - before, Ordering::Release);
        let memory = write(from).take();
        drop(memory);
    }

    /// Ends all access. When this returns, no transfer touches the memory.
    pub fn end(&self) {
        let _exchange = lock(&self.exchange);
        let before = self.present.swap(NOWHERE, Ordering::AcqRel);
        let memory = self
            .places
            .get(before)
            .and_then(|place| write(place).take());
        drop(memory);
    }
}
