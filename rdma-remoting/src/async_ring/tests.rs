use super::*;
use farlane_abi::arena::HEADER_SEGMENT_BYTES;
use farlane_abi::rdma::{EVENT_COMM_EST, EVENT_QP_FATAL, EVENT_QP_REQ_ERR};
use farlane_abi::width::to_usize;
use farlane_zero_copy::Mapping;
use proptest::prelude::*;
use rustix::fs::MemfdFlags;
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::AsFd as _;
use std::sync::atomic::AtomicU32;

/// Counts tokens.
#[derive(Default)]
struct Tokens(AtomicU32);

impl EventSink for Tokens {
    fn raise(&self, index: u32) {
        assert_eq!(index, EVENT_ASYNC);
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A ring, and the process that it belongs to.
struct Rig {
    ring: Arc<AsyncRing>,
    tokens: Arc<Tokens>,
    header: SharedMemory,
}

impl Rig {
    fn new() -> Self {
        let file = rustix::fs::memfd_create("header", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, HEADER_SEGMENT_BYTES).unwrap();
        let map = || Mapping::new(file.as_fd(), 0, HEADER_SEGMENT_BYTES, true).unwrap();
        let tokens = Arc::new(Tokens::default());
        let events = Arc::clone(&tokens) as _;
        Self {
            ring: Arc::new(AsyncRing::new(SharedMemory::new(map()), events)),
            tokens,
            header: SharedMemory::new(map()),
        }
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        self.header.word(at).unwrap()
    }

    /// Takes an event, as (kind, object), for a token.
    fn take(&self) -> Option<(u32, u32)> {
        let consumed = self.word(OFF_ASYNC_CONSUMED).load(Ordering::SeqCst);
        let produced = self.word(OFF_ASYNC_PRODUCED).load(Ordering::SeqCst);
        assert!(produced.wrapping_sub(consumed) <= ASYNC_ENTRIES);
        let tokens = self.tokens.0.load(Ordering::SeqCst);
        assert_eq!(tokens, produced.wrapping_sub(consumed), "one a token");
        if tokens == 0 {
            return None;
        }
        let entry = to_usize(u64::from(consumed % ASYNC_ENTRIES));
        let at = OFF_ASYNC_RING + entry * size_of::<AsyncEvent>();
        let event: AsyncEvent = self.header.read(at).unwrap();
        self.word(OFF_ASYNC_CONSUMED)
            .store(consumed.wrapping_add(1), Ordering::SeqCst);
        self.tokens.0.fetch_sub(1, Ordering::SeqCst);
        Some((event.kind.get(), event.object.get()))
    }

    /// Takes all events, with turns of the context whenever there is none.
    fn take_all(&self) -> Vec<(u32, u32)> {
        let mut all = Vec::new();
        loop {
            while let Some(event) = self.take() {
                all.push(event);
            }
            if self.ring.pass_on() == 0 {
                return all;
            }
        }
    }

    fn waiting(&self) -> usize {
        let waiting = lock(&self.ring.waiting);
        assert_eq!(waiting.events.len(), waiting.ages.len());
        waiting.events.len()
    }
}

fn full(rig: &Rig) -> ObjectEvents {
    let object = ObjectEvents::new(&rig.ring, 1);
    for _ in 0..ASYNC_ENTRIES {
        object.teller()(EVENT_COMM_EST);
    }
    assert_eq!(rig.waiting(), 0);
    object
}

#[test]
fn a_process_that_takes_nothing_has_one_event_of_a_kind_and_object_wait() {
    let rig = Rig::new();
    let full = full(&rig);
    let kinds = [EVENT_QP_REQ_ERR, EVENT_QP_FATAL];
    let objects: Vec<_> = (2..300).map(|n| ObjectEvents::new(&rig.ring, n)).collect();
    for _ in 0..50 {
        for kind in kinds {
            objects.iter().for_each(|object| object.teller()(kind));
        }
        assert_eq!(rig.ring.pass_on(), 0);
    }
    assert!(!rig.ring.is_ready());
    assert_eq!(rig.waiting(), objects.len() * kinds.len());
    // They come in order, behind what was in the ring.
    let of_kind = |kind| (2..300).map(move |object| (kind, object));
    let mut told = vec![(EVENT_COMM_EST, 1); to_usize(ASYNC_ENTRIES.into())];
    told.extend(kinds.into_iter().flat_map(of_kind));
    assert_eq!(rig.take_all(), told);
    assert_eq!(rig.waiting(), 0);
    // What was told can happen again.
    objects[0].teller()(EVENT_QP_FATAL);
    assert_eq!(rig.take_all(), [(EVENT_QP_FATAL, 2)]);
    drop(full);
}

#[test]
fn nothing_is_told_of_an_object_that_is_gone() {
    let rig = Rig::new();
    let _full = full(&rig);
    for _ in 0..1000 {
        let (gone, stays) = (
            ObjectEvents::new(&rig.ring, 7),
            ObjectEvents::new(&rig.ring, 8),
        );
        let (late, kept) = (gone.teller(), stays.teller());
        late(EVENT_QP_FATAL);
        kept(EVENT_QP_FATAL);
        late(EVENT_COMM_EST);
        assert_eq!(rig.waiting(), 3);
        drop(gone);
        late(EVENT_QP_FATAL);
        assert_eq!(rig.waiting(), 1);
        drop(stays);
        assert_eq!(rig.waiting(), 0);
        assert!(!rig.ring.is_waiting());
    }
    // Who has its handle afterwards has its own events.
    let next = ObjectEvents::new(&rig.ring, 7);
    next.teller()(EVENT_QP_REQ_ERR);
    let told = rig.take_all();
    assert_eq!(
        told[to_usize(ASYNC_ENTRIES.into())..],
        [(EVENT_QP_REQ_ERR, 7)]
    );
}

#[test]
fn the_end_has_a_token_where_the_ring_is_full() {
    let rig = Rig::new();
    let full = full(&rig);
    full.teller()(EVENT_QP_FATAL);
    rig.ring.end();
    assert_eq!(rig.tokens.0.load(Ordering::SeqCst), ASYNC_ENTRIES + 1);
    full.teller()(EVENT_QP_REQ_ERR);
    assert_eq!(rig.waiting(), 0);
    assert_eq!(rig.ring.pass_on(), 0);

    let rig = Rig::new();
    rig.ring.end();
    assert_eq!(rig.take_all(), [(EVENT_DEVICE_FATAL, 0)]);
}

/// A process that says it has taken what there never was, or gives back what it has taken.
#[test]
fn a_consumer_word_that_makes_no_sense_keeps_events_waiting() {
    let rig = Rig::new();
    let object = ObjectEvents::new(&rig.ring, 3);
    for word in [1, 77, 0x8000_0000, u32::MAX - 63] {
        rig.word(OFF_ASYNC_CONSUMED).store(word, Ordering::SeqCst);
        object.teller()(EVENT_QP_FATAL);
        assert_eq!(rig.ring.pass_on(), 0, "{word:#x}");
        assert_eq!(rig.waiting(), 1);
    }
    rig.word(OFF_ASYNC_CONSUMED).store(0, Ordering::SeqCst);
    assert!(rig.ring.is_ready());
    assert_eq!(rig.take_all(), [(EVENT_QP_FATAL, 3)]);
}

/// A thread tells, one gives turns until it sleeps, and the process rings as the library does:
/// after the last event of the ring, where it reads that the other sleeps.
#[test]
fn a_worker_that_sleeps_is_rung_when_events_wait() {
    const OBJECTS: u32 = 20_000;
    let rig = Rig::new();
    let sleeps = AtomicBool::new(false);
    let (ring_bell, bell) = std::sync::mpsc::channel::<()>();
    let taken = AtomicU32::new(0);
    let tokens = &rig.tokens;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let objects: Vec<_> = (1..=OBJECTS)
                .map(|handle| ObjectEvents::new(&rig.ring, handle))
                .collect();
            for object in &objects {
                object.teller()(EVENT_QP_FATAL);
            }
            while taken.load(Ordering::SeqCst) < OBJECTS {
                std::thread::yield_now();
            }
        });
        scope.spawn(|| {
            let bell = bell;
            loop {
                while rig.ring.pass_on() > 0 {}
                sleeps.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                if rig.ring.pass_on() == 0 && bell.recv().is_err() {
                    return;
                }
                sleeps.store(false, Ordering::Relaxed);
            }
        });
        let began = std::time::Instant::now();
        let mut consumed = 0_u32;
        while consumed < OBJECTS {
            if tokens.0.load(Ordering::SeqCst) == 0 {
                if began.elapsed() > std::time::Duration::from_secs(60) {
                    taken.store(OBJECTS, Ordering::SeqCst);
                    drop(ring_bell);
                    panic!("{consumed} of {OBJECTS} came");
                }
                std::thread::yield_now();
                continue;
            }
            tokens.0.fetch_sub(1, Ordering::SeqCst);
            let produced = rig.word(OFF_ASYNC_PRODUCED).load(Ordering::Acquire);
            let ready = produced.wrapping_sub(consumed);
            consumed += 1;
            rig.word(OFF_ASYNC_CONSUMED)
                .store(consumed, Ordering::Release);
            if ready == 1 {
                fence(Ordering::SeqCst);
                if sleeps.load(Ordering::Relaxed) {
                    ring_bell.send(()).unwrap();
                }
            }
        }
        taken.store(OBJECTS, Ordering::SeqCst);
        drop(ring_bell);
    });
    assert_eq!(tokens.0.load(Ordering::SeqCst), 0);
}

proptest! {
    /// Each kind of each object comes once for all the times that it happened since it came last,
    /// in the order in which they happened first.
    #[test]
    fn events_come_in_order(
        steps in prop::collection::vec((0_u8..4, 0_usize..40, 0_u32..3), 0..900),
    ) {
        let rig = Rig::new();
        let events = |n: usize| ObjectEvents::new(&rig.ring, u32::try_from(n).unwrap());
        let mut objects: Vec<_> = (0..40).map(events).collect();
        // What is in the ring, and what waits.
        let (mut there, mut waits) = (VecDeque::new(), VecDeque::new());
        let mut seen = BTreeSet::new();
        for (step, n, kind) in steps {
            let event = (kind, u32::try_from(n).unwrap());
            match step {
                0 | 1 => {
                    objects[n].teller()(kind);
                    if seen.insert(event) {
                        waits.push_back(event);
                    }
                }
                2 => {
                    prop_assert_eq!(rig.take(), there.pop_front());
                    rig.ring.pass_on();
                }
                _ => {
                    objects[n] = events(n);
                    waits.retain(|waiting: &(u32, u32)| waiting.1 != event.1);
                    seen.retain(|waiting| waiting.1 != event.1);
                }
            }
            while there.len() < to_usize(ASYNC_ENTRIES.into())
                && let Some(next) = waits.pop_front()
            {
                seen.remove(&next);
                there.push_back(next);
            }
            prop_assert_eq!(rig.waiting(), waits.len());
        }
        there.append(&mut waits);
        prop_assert_eq!(rig.take_all(), Vec::from(there));
    }
}
