//! The event queue of a VM.
//!
//! An event goes from the engine's thread straight into a buffer of the guest. Where the guest has
//! posted none, events are counted by context and index, so that what waits is bounded by the
//! number of those, and delivered one by one as buffers come.

use crate::ring::{Chain, Ring};
use farlane_abi::control::Event;
use farlane_abi::ids::ContextId;
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_sys::sync::lock;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use vm_memory::Bytes as _;

/// Context and event index.
type Key = (ContextId, u32);

/// The event queue of one connection of a VM.
pub struct EventQueue {
    state: Mutex<State>,
}

struct State {
    /// None where it is stopped.
    ring: Option<Ring>,
    /// Events without a buffer, and how many of each.
    waiting: BTreeMap<Key, u64>,
    /// The last one that was delivered: the next comes after it, so that none starves.
    last: Option<Key>,
}

impl std::fmt::Debug for EventQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventQueue").finish_non_exhaustive()
    }
}

/// Raises the events of one context.
#[derive(Debug)]
pub struct ContextEvents {
    queue: Arc<EventQueue>,
    context: ContextId,
    /// Changed under the queue's lock.
    open: AtomicBool,
}

impl ContextEvents {
    /// Event `index` has happened, once. Does not wait for the guest.
    pub fn raise(&self, index: u32) {
        let mut state = self.queue.state();
        if self.open.load(Ordering::Relaxed) {
            self.queue.raise(&mut state, (self.context, index));
        }
    }

    /// No event of this context is delivered when this has returned, not even one that waits.
    pub fn close(&self) {
        let mut state = self.queue.state();
        self.open.store(false, Ordering::Relaxed);
        let mut later = state.waiting.split_off(&(self.context, 0));
        // There are fewer events.
        state
            .waiting
            .append(&mut later.split_off(&(self.context, u32::MAX)));
    }
}

impl EventQueue {
    /// An event queue that has not started.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                ring: None,
                waiting: BTreeMap::new(),
                last: None,
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The queue starts; its buffers are looked at with the next event, or
    /// [flush](Self::flush).
    pub fn start(&self, ring: Ring) {
        self.state().ring = Some(ring);
    }

    /// The queue stops: when this returns nothing touches it. Says at which buffer.
    pub fn stop(&self) -> u16 {
        let ring = self.state().ring.take();
        ring.map_or(0, |ring| ring.next_available())
    }

    /// Where the events of `context` go.
    #[must_use]
    pub fn context(self: &Arc<Self>, context: ContextId) -> Arc<ContextEvents> {
        Arc::new(ContextEvents {
            queue: Arc::clone(self),
            context,
            open: AtomicBool::new(true),
        })
    }

    fn raise(&self, state: &mut State, key: Key) {
        if state.waiting.is_empty() && self.deliver(state, key, Put::One) {
            return;
        }
        let count = state.waiting.entry(key).or_default();
        *count = count.saturating_add(1);
        self.flush_locked(state);
    }

    /// Delivers what waits, as far as there are buffers: the guest has posted some.
    pub fn flush(&self) {
        self.flush_locked(&mut self.state());
    }

    fn flush_locked(&self, state: &mut State) {
        while let Some(key) = state.next_waiting() {
            if !self.deliver(state, key, Put::Waiting) {
                return;
            }
            state.last = Some(key);
            if let Some(count) = state.waiting.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    state.waiting.remove(&key);
                }
            }
        }
    }

    /// Puts one event into a buffer, if there is one.
    fn deliver(&self, state: &State, key: Key, put: Put) -> bool {
        let Some(ring) = &state.ring else {
            return false;
        };
        let event = Event {
            context: key.0.get().into(),
            index: key.1.into(),
        };
        self.put(ring, &event)
            // Asks for a kick only where one is needed. True: buffers have come in between.
            || put == Put::Waiting && ring.ask_to_be_told() && self.put(ring, &event)
    }

    /// Fills the next good buffer. Bad ones are given back empty, no more than the queue holds.
    fn put(&self, ring: &Ring, event: &Event) -> bool {
        let mut used = false;
        let mut filled = false;
        for _ in 0..ring.size() {
            let Ok(Some(chain)) = ring.take() else {
                break;
            };
            let head = chain.head_index();
            if head >= ring.size() {
                continue;
            }
            filled = fill(chain, event);
            if !ring.put(head, if filled { size_of::<Event>() } else { 0 }) {
                filled = false;
                break;
            }
            used = true;
            if filled {
                break;
            }
        }
        if used {
            ring.tell();
        }
        filled
    }
}

/// Writes an event into a buffer. Looks at its first descriptor only: a guest can make a chain of
/// tens of thousands, and the engine's thread would go through them.
fn fill(mut chain: Chain, event: &Event) -> bool {
    let bytes = event.as_bytes();
    let Some(buffer) = chain.next() else {
        return false;
    };
    buffer.is_write_only()
        && usize::try_from(buffer.len()).is_ok_and(|room| room >= bytes.len())
        && chain.memory().write_slice(bytes, buffer.addr()).is_ok()
}

/// Whether other events wait already.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Put {
    /// No: the fast way. If it fails, the event comes back as one that waits.
    One,
    Waiting,
}

impl State {
    fn next_waiting(&self) -> Option<Key> {
        let from = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.waiting.range((from, Bound::Unbounded)).next();
        next.or_else(|| self.waiting.first_key_value())
            .map(|(&key, _)| key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::VmMemory;
    use farlane_abi::control::MAX_CONTEXTS;
    use farlane_vhost_user::session::Setup;
    use farlane_vhost_user::vring::Layout;
    use farlane_zero_copy::AddressSpace;
    use vm_memory::{GuestAddress, GuestAddressSpace as _, GuestMemoryMmap};

    const SIZE: u16 = 8;
    const DESCRIPTORS: u64 = 0x1000;
    const AVAILABLE: u64 = 0x2000;
    const USED: u64 = 0x3000;
    const BUFFERS: u64 = 0x4000;

    fn id(number: u32) -> ContextId {
        ContextId::new(number).unwrap()
    }

    /// A guest's side of the queue.
    struct Guest {
        memory: VmMemory,
        posted: u16,
        seen: u16,
    }

    impl Guest {
        fn new() -> (Self, Arc<EventQueue>) {
            let ram = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
            let memory = VmMemory::new(ram);
            let layout = Layout {
                size: SIZE,
                descriptors: DESCRIPTORS,
                available: AVAILABLE,
                used: USED,
            };
            let setup = Setup::new(1, AddressSpace::new(), layout);
            let events = EventQueue::new();
            events.start(Ring::start(&memory, &setup).unwrap());
            let guest = Self {
                memory,
                posted: 0,
                seen: 0,
            };
            (guest, events)
        }

        fn write(&self, at: u64, bytes: &[u8]) {
            let memory = self.memory.memory();
            memory.write_slice(bytes, GuestAddress(at)).unwrap();
        }

        fn read_u32(&self, at: u64) -> u32 {
            self.memory.memory().read_obj(GuestAddress(at)).unwrap()
        }

        /// Posts a buffer of so many bytes, which the device may write or not.
        fn post(&mut self, length: u32, writable: bool) {
            self.post_first(length, if writable { 2 } else { 0 });
        }

        /// Posts a buffer whose first descriptor has these flags; the next one is number 2.
        fn post_first(&mut self, length: u32, flags: u8) {
            let head = self.posted % SIZE;
            let mut descriptor = [0; 16];
            let address = BUFFERS + u64::from(head) * 8;
            descriptor[..8].copy_from_slice(&address.to_le_bytes());
            descriptor[8..12].copy_from_slice(&length.to_le_bytes());
            descriptor[12] = flags;
            descriptor[14] = 2;
            self.write(DESCRIPTORS + u64::from(head) * 16, &descriptor);
            self.write(AVAILABLE + 4 + u64::from(head) * 2, &head.to_le_bytes());
            self.posted = self.posted.wrapping_add(1);
            self.write(AVAILABLE + 2, &self.posted.to_le_bytes());
        }

        /// What has been delivered since: context and index, or nothing for an empty buffer.
        fn take(&mut self) -> Vec<Option<(u32, u32)>> {
            let used = u16::try_from(self.read_u32(USED) >> 16).unwrap();
            let mut taken = Vec::new();
            while self.seen != used {
                let at = USED + 4 + u64::from(self.seen % SIZE) * 8;
                let (head, length) = (self.read_u32(at), self.read_u32(at + 4));
                let buffer = BUFFERS + u64::from(head) * 8;
                let event = (self.read_u32(buffer), self.read_u32(buffer + 4));
                taken.push((length == 8).then_some(event));
                self.seen = self.seen.wrapping_add(1);
            }
            taken
        }
    }

    #[test]
    fn each_event_is_delivered_once_whenever_buffers_come() {
        let (mut guest, events) = Guest::new();
        let (one, two) = (events.context(id(1)), events.context(id(2)));
        guest.post(8, true);
        one.raise(0);
        assert_eq!(guest.take(), [Some((1, 0))]);
        // None left: they wait, and take turns when buffers come.
        for _ in 0..3 {
            one.raise(5);
        }
        two.raise(0);
        assert_eq!(guest.take(), []);
        let mut got = Vec::new();
        for _ in 0..3 {
            guest.post(8, true);
            guest.post(8, true);
            events.flush();
            got.extend(guest.take());
        }
        assert_eq!(got[..2], [Some((1, 5)), Some((2, 0))]);
        assert_eq!(got[2..], [Some((1, 5)), Some((1, 5))]);
        // Two buffers are left over.
        two.raise(7);
        one.raise(7);
        assert_eq!(guest.take(), [Some((2, 7)), Some((1, 7))]);
    }

    #[test]
    fn bad_buffers_come_back_empty_and_lose_no_event() {
        let (mut guest, events) = Guest::new();
        let one = events.context(id(1));
        guest.post(8, false);
        guest.post(7, true);
        guest.post(8, true);
        one.raise(3);
        assert_eq!(guest.take(), [None, None, Some((1, 3))]);
        guest.post(4, true);
        one.raise(4);
        assert_eq!(guest.take(), [None]);
        // One in pieces, though the second one is good.
        guest.post_first(4, 2 | 1);
        events.flush();
        assert_eq!(guest.take(), [None]);
        // A buffer that is none.
        let slot = AVAILABLE + 4 + u64::from(guest.posted % SIZE) * 2;
        guest.write(slot, &SIZE.to_le_bytes());
        guest.posted += 1;
        guest.write(AVAILABLE + 2, &guest.posted.to_le_bytes());
        events.flush();
        assert_eq!(guest.take(), []);
        // An index that runs ahead of the queue is no buffer at all.
        guest.write(
            AVAILABLE + 2,
            &(guest.posted.wrapping_add(SIZE + 1)).to_le_bytes(),
        );
        events.flush();
        assert_eq!(guest.take(), []);
        guest.write(AVAILABLE + 2, &guest.posted.to_le_bytes());
        guest.post(8, true);
        events.flush();
        assert_eq!(guest.take(), [Some((1, 4))]);
    }

    #[test]
    fn a_closed_context_has_no_events() {
        let (mut guest, events) = Guest::new();
        let contexts = [0, 1, MAX_CONTEXTS - 1].map(|number| events.context(id(number)));
        for context in &contexts {
            context.raise(1);
        }
        contexts[1].close();
        contexts[1].raise(2);
        contexts[2].close();
        for _ in 0..4 {
            guest.post(8, true);
        }
        events.flush();
        assert_eq!(guest.take(), [Some((0, 1))]);
    }
}
