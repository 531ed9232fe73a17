use super::*;
use crate::engine::{QUANTUM, Schedule as _};
use crate::inbox::Scheduled;
use farlane_abi::arena::HEADER_SEGMENT_BYTES;
use farlane_sys::sync::lock;
use farlane_worker::wake::Sleep;
use farlane_zero_copy::Mapping;
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::AsFd as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::time::Duration;

/// One that has so much to do.
#[derive(Default)]
struct Fake {
    work: AtomicU32,
    turns: AtomicUsize,
    rests: AtomicBool,
    deadline: Mutex<Option<Instant>>,
    scheduled: Mutex<Option<Arc<Scheduled>>>,
}

impl Served for Fake {
    fn turn(&self, _: Turn) -> Progress {
        self.turns.fetch_add(1, Ordering::Relaxed);
        let has_work = self.is_ready();
        if has_work {
            self.work.fetch_sub(1, Ordering::Relaxed);
        }
        Progress {
            worked: has_work,
            deadline: *lock(&self.deadline),
            ..Progress::default()
        }
    }

    fn is_ready(&self) -> bool {
        self.work.load(Ordering::Relaxed) > 0
    }

    fn called(&self) {
        if let Some(scheduled) = &*lock(&self.scheduled) {
            scheduled.called();
        }
    }

    fn watch(&self) {
        self.rests.store(false, Ordering::Relaxed);
    }

    fn rest(&self) {
        self.rests.store(true, Ordering::Relaxed);
    }
}

struct Rig {
    ready: Ready<Fake>,
    all: Vec<Arc<Fake>>,
    header: SharedMemory,
    inbox: Arc<Inbox>,
    now: Instant,
}

impl Rig {
    fn new(members: u32) -> Self {
        let fd = memfd_create("header", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, HEADER_SEGMENT_BYTES).unwrap();
        let mapping = Mapping::new(fd.as_fd(), 0, HEADER_SEGMENT_BYTES, true).unwrap();
        let mut ready = Ready::default();
        let all: Vec<_> = (0..members).map(|_| Arc::<Fake>::default()).collect();
        for (slot, one) in (0..).zip(&all) {
            ready.insert(slot, Arc::clone(one));
        }
        Self {
            ready,
            all,
            header: SharedMemory::new(mapping),
            inbox: Arc::default(),
            now: Instant::now(),
        }
    }

    /// How the one of a slot is scheduled.
    fn scheduled(&self, slot: u32) -> Arc<Scheduled> {
        let scheduled = Scheduled::new(&self.inbox, slot);
        let one = &self.all[to_usize(slot.into())];
        *lock(&one.scheduled) = Some(Arc::clone(&scheduled));
        scheduled
    }

    /// As a process that has posted.
    fn ring(&self, slot: usize) {
        let set = |at: usize, bit: usize| {
            let word = self.header.word(at + bit / 32 * 4).unwrap();
            word.fetch_or(1 << (bit % 32), Ordering::Release);
        };
        set(OFF_RUNG, slot);
        set(OFF_RUNG_SUMMARY, slot / 32);
    }

    fn turn(&mut self) -> Progress {
        self.ready.call_scheduled(&self.inbox, self.now);
        self.ready.call_rung(&self.header, self.now);
        self.ready
            .turn(&Look::at(self.now), &Budget::UNBOUNDED, || || false)
    }

    fn turns(&self) -> Vec<usize> {
        let turns = |one: &Arc<Fake>| one.turns.swap(0, Ordering::Relaxed);
        self.all.iter().map(turns).collect()
    }
}

#[test]
fn those_who_rest_have_no_turns_until_they_are_rung() {
    let mut rig = Rig::new(4096);
    assert_eq!(rig.turn(), Progress::default());
    assert!(rig.all.iter().all(|one| one.rests.load(Ordering::Relaxed)));
    rig.all[4095].work.store(2, Ordering::Relaxed);
    rig.ring(4095);
    assert!(rig.turn().worked && rig.turn().worked && !rig.turn().worked);
    let turns = rig.turns();
    assert_eq!((turns[4095], turns.iter().sum()), (3, 3));
    // It is looked at for a while, in which nobody rings.
    assert!(!rig.all[4095].rests.load(Ordering::Relaxed));
    rig.now += BUSY;
    rig.turn();
    assert!(rig.all[4095].rests.load(Ordering::Relaxed));
    rig.turns();
    rig.turn();
    assert_eq!(rig.turns().iter().sum::<usize>(), 0);
}

/// What it has to do is done beside whoever has its slot by then.
#[test]
fn who_is_removed_when_it_is_done_has_turns_until_then() {
    let mut rig = Rig::new(2);
    let next = Arc::<Fake>::default();
    for (slot, work) in [(0, 3), (1, 0)] {
        let gone = &rig.all[to_usize(u64::from(slot))];
        gone.work.store(work, Ordering::Relaxed);
        rig.ready.remove_when_done(slot);
        rig.ready.insert(slot, Arc::clone(&next));
    }
    assert_eq!(rig.ready.iter().filter(|one| one.is_ready()).count(), 1);
    for _ in 0..3 {
        assert!(rig.turn().worked);
    }
    assert!(!rig.turn().worked);
    assert_eq!(rig.turns(), [3, 0]);
    assert_eq!(rig.ready.iter().count(), 2);
}

#[test]
fn what_was_posted_before_the_process_knew_that_it_has_to_ring_is_found() {
    let mut rig = Rig::new(1);
    rig.ring(0);
    rig.turn();
    rig.now += BUSY;
    // Between the look and the word.
    struct Late(Arc<Fake>);
    impl Served for Late {
        fn turn(&self, turn: Turn) -> Progress {
            self.0.turn(turn)
        }
        fn is_ready(&self) -> bool {
            self.0.is_ready()
        }
        fn called(&self) {
            self.0.called();
        }
        fn watch(&self) {
            self.0.watch();
        }
        fn rest(&self) {
            self.0.work.store(1, Ordering::Relaxed);
            self.0.rest();
        }
    }
    let mut ready = Ready::default();
    ready.insert(0, Arc::new(Late(Arc::clone(&rig.all[0]))));
    rig.all[0].work.store(0, Ordering::Relaxed);
    ready.call(0, rig.now);
    let look = Look::at(rig.now);
    assert!(!ready.turn(&look, &Budget::new(QUANTUM), || || false).worked);
    assert!(!rig.all[0].rests.load(Ordering::Relaxed));
    assert!(ready.turn(&look, &Budget::new(QUANTUM), || || false).worked);
}

#[test]
fn of_very_many_who_ring_some_have_their_turn_in_the_next() {
    let mut rig = Rig::new(4096);
    (0..4096).for_each(|slot| rig.ring(slot));
    assert!(rig.turn().cut);
    assert_eq!(rig.turns().iter().sum::<usize>(), 32 * RUNG_IN_A_TURN);
    let mut most = 4096 / 32;
    while rig.turn().cut {
        most -= 1;
        assert!(most > 0);
    }
    assert!(rig.turns().iter().all(|&turns| turns > 0));
}

#[test]
fn who_rings_in_each_turn_keeps_nobody_from_being_called() {
    let mut rig = Rig::new(4096);
    rig.ring(4095);
    for _ in 0..4096 / 32 / RUNG_IN_A_TURN + 1 {
        (0..4000).for_each(|slot| rig.ring(slot));
        rig.turn();
    }
    assert!(rig.turns()[4095] > 0);
    // Bits of a summary without any, and of slots that nobody has, come to nothing.
    let mut rig = Rig::new(1);
    for at in 0..SUMMARY_WORDS {
        let word = rig.header.word(OFF_RUNG_SUMMARY + 4 * at).unwrap();
        word.store(u32::MAX, Ordering::Relaxed);
    }
    assert_eq!(rig.turn(), Progress::default());
    rig.ring(4095);
    assert_eq!(rig.turn(), Progress::default());
}

#[test]
fn of_very_many_who_are_scheduled_or_due_some_have_their_turn_in_the_next() {
    let mut rig = Rig::new(1000);
    for slot in 0..1000 {
        rig.scheduled(slot).schedule();
    }
    assert_eq!((rig.turn().idle, rig.turn().cut), (CALLED_IN_A_TURN, true));
    (0..6).for_each(|_| assert!(!rig.turn().worked));
    assert!(!rig.turn().cut && rig.turns().iter().all(|&turns| turns > 0));
    let at = rig.now + BUSY;
    for one in &rig.all {
        *lock(&one.deadline) = Some(at);
    }
    rig.turn();
    rig.now = at;
    rig.turn();
    for one in &rig.all {
        *lock(&one.deadline) = None;
    }
    rig.turns();
    (0..1000 / CALLED_IN_A_TURN + 1).for_each(|_| assert!(!rig.turn().worked));
    assert!(rig.turns().iter().all(|&turns| turns > 0) && rig.ready.timers.is_empty());
}

#[test]
fn a_timer_gives_one_turn_and_moves_with_the_deadline() {
    let mut rig = Rig::new(2);
    let at = |millis| rig.now + Duration::from_millis(millis);
    let [soon, later, last] = [at(20), at(30), at(40)];
    *lock(&rig.all[0].deadline) = Some(later);
    *lock(&rig.all[1].deadline) = Some(soon);
    (0..2).for_each(|slot| rig.ring(slot));
    assert_eq!(rig.turn().deadline, Some(soon));
    *lock(&rig.all[1].deadline) = Some(last);
    rig.now += BUSY;
    assert_eq!(rig.turn().deadline, Some(later));
    rig.turns();
    rig.now = later;
    rig.turn();
    assert_eq!(rig.turns(), [1, 0]);
    *lock(&rig.all[0].deadline) = None;
    rig.ready.remove(1);
    rig.turn();
    assert!(rig.ready.timers.is_empty());
    assert!(rig.ready.clear().is_empty());
    assert_eq!(rig.turn(), Progress::default());
}

#[test]
fn who_is_scheduled_has_a_turn_that_begins_after_that() {
    let mut rig = Rig::new(2);
    let scheduled = rig.scheduled(1);
    scheduled.schedule();
    scheduled.schedule();
    assert_eq!(rig.inbox.slots(), [1]);
    rig.turn();
    assert_eq!(rig.turns(), [0, 1]);
    // Since it was called: it has another one.
    scheduled.schedule();
    assert_eq!(rig.inbox.slots(), [1]);
    rig.turn();
    // A worker that sleeps is woken.
    let bell = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let sleep = Arc::new(Sleep::new(bell));
    rig.inbox.tell(Some(Arc::clone(&sleep)));
    let rang = || rustix::io::read(&sleep.event, &mut [0_u8; 8]).is_ok();
    scheduled.schedule();
    assert!(!rang());
    rig.turn();
    sleep.announce();
    scheduled.schedule();
    assert!(rang());
}

/// Who has turns for another reason does not fill the inbox, however often it is scheduled.
#[test]
fn who_is_scheduled_again_and_again_is_in_the_inbox_once() {
    let many = u32::try_from(4 * CALLED_IN_A_TURN).unwrap();
    let mut rig = Rig::new(many);
    let all: Vec<_> = (0..many).map(|slot| rig.scheduled(slot)).collect();
    for _ in 0..100 {
        all.iter().for_each(|scheduled| scheduled.schedule());
        rig.turn();
        let waiting = rig.inbox.slots().len() + rig.ready.scheduled.len();
        assert!(waiting <= all.len(), "{waiting}");
    }
}

#[test]
fn one_whose_time_is_over_waits_for_the_others() {
    let mut rig = Rig::new(3);
    for (slot, one) in rig.all.iter().enumerate() {
        one.work.store(9, Ordering::Relaxed);
        rig.ring(slot);
    }
    let look = Look::at(rig.now);
    rig.ready.call_rung(&rig.header, rig.now);
    for expected in [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]] {
        assert!(rig.ready.turn(&look, &Budget::new(QUANTUM), || || true).cut);
        assert_eq!(rig.turns(), expected);
    }
}

proptest! {
    /// Whatever happens, who has something to do has turns until it has not, and those who rest
    /// say so.
    #[test]
    fn nobody_is_forgotten(
        steps in prop::collection::vec((0_u8..6, 0_usize..70, 1_u32..4), 0..120),
    ) {
        let mut rig = Rig::new(70);
        (0..70).for_each(|slot| drop(rig.scheduled(slot)));
        let mut there = [true; 70];
        for (kind, who, work) in steps {
            let slot = u32::try_from(who).unwrap();
            match kind {
                0 | 1 if there[who] => {
                    rig.all[who].work.fetch_add(work, Ordering::Relaxed);
                    if kind == 1 {
                        let scheduled = lock(&rig.all[who].scheduled).clone().unwrap();
                        scheduled.schedule();
                    } else if rig.all[who].rests.load(Ordering::Relaxed) {
                        rig.ring(who);
                    }
                }
                2 => rig.now += BUSY,
                3 if there[who] => {
                    rig.ready.remove(slot);
                    there[who] = false;
                }
                4 if !there[who] => {
                    rig.all[who] = Arc::default();
                    drop(rig.scheduled(slot));
                    rig.ready.insert(slot, Arc::clone(&rig.all[who]));
                    there[who] = true;
                }
                _ => {
                    rig.turn();
                }
            }
        }
        for _ in 0..1000 {
            rig.turn();
        }
        for (one, there) in rig.all.iter().zip(there) {
            prop_assert!(!there || !one.is_ready());
        }
        rig.now += BUSY;
        rig.turn();
        prop_assert!(rig.ready.busy.is_empty());
        for (one, there) in rig.all.iter().zip(there) {
            prop_assert!(!there || one.rests.load(Ordering::Relaxed));
        }
    }
}
