//! Completion queues in memory shared with a process.

use crate::clock::DeviceClock;
use crate::ring::{Place, Producer, Words};
use farlane_abi::queue::{
    ARM_NEXT, ARM_NONE, ARM_SOLICITED, CQ_OFF_ARMED, CQ_OFF_CONSUMED, CQ_OFF_ENTRIES,
    CQ_OFF_EVENTS, CQ_OFF_PRODUCED, Completion, CqLayout, TimedCompletion, WC_STATUS_SUCCESS,
};
use farlane_abi::rxe::{CONTROL_OFF_ARMED, CONTROL_OFF_EVENTS, RingLayout, RxeCompletion};
use farlane_zero_copy::{OutOfBounds, SharedMemory};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use thiserror::Error;

/// A completion found no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("The completion queue has overrun its {entries} entries")]
pub struct Overrun {
    /// Entries of the completion queue.
    pub entries: u32,
}

/// Takes completions of work requests.
pub trait CompletionSink: Send + Sync {
    /// Adds a completion. `solicited` says that it counts for those who wait for solicited ones
    /// only; an error always does.
    ///
    /// # Errors
    /// [`Overrun`], from then on for ever.
    fn push(&self, completion: &Completion, solicited: bool) -> Result<(), Overrun>;
}

/// Takes the completions of half a queue pair that has none: of extended reliable connections
/// (IBTA annex A14) an initiator receives nothing, and a target sends nothing.
#[derive(Clone, Copy, Debug)]
pub struct NoCompletions;

impl CompletionSink for NoCompletions {
    fn push(&self, _: &Completion, _: bool) -> Result<(), Overrun> {
        Ok(())
    }
}

/// Called when an armed completion queue raises its event.
pub type Notify = Box<dyn Fn() + Send + Sync>;

/// How the entries of a completion queue are written.
enum Format {
    Plain,
    /// They say when they came.
    Timed(DeviceClock),
    /// As the user ABI of rxe has them.
    Rxe,
}

/// By which a process asks for events, and learns of them.
struct EventWords {
    memory: SharedMemory,
    armed_at: usize,
    events_at: usize,
}

/// A completion queue in shared memory, the backend's end.
pub struct SharedCompletionQueue {
    ring: Producer,
    format: Format,
    words: EventWords,
    overrun: AtomicBool,
    notify: Option<Notify>,
    on_overrun: Notify,
}

impl std::fmt::Debug for SharedCompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedCompletionQueue")
            .field("entries", &self.ring.entries())
            .finish_non_exhaustive()
    }
}

impl SharedCompletionQueue {
    /// A queue in `memory`, whose completions say when they came where the layout has room for
    /// that. `notify` is called for an event; `on_overrun` once, when it overruns.
    ///
    /// # Errors
    /// [`OutOfBounds`] where the segment is shorter than the layout needs.
    pub fn new(
        memory: SharedMemory,
        layout: &CqLayout,
        clock: &DeviceClock,
        notify: Option<Notify>,
        on_overrun: Notify,
    ) -> Result<Self, OutOfBounds> {
        memory.require(layout.segment_bytes())?;
        let place = Place {
            produced_at: CQ_OFF_PRODUCED,
            consumed_at: CQ_OFF_CONSUMED,
            entries_at: CQ_OFF_ENTRIES,
            entries: layout.entries,
            stride: layout.stride(),
            words: Words::Numbers,
        };
        let words = EventWords {
            memory: memory.clone(),
            armed_at: CQ_OFF_ARMED,
            events_at: CQ_OFF_EVENTS,
        };
        Ok(Self {
            ring: Producer::new(memory, place),
            format: match layout.is_timed {
                true => Format::Timed(*clock),
                false => Format::Plain,
            },
            words,
            overrun: AtomicBool::new(false),
            notify,
            on_overrun,
        })
    }

    /// The same of one that is a ring of the user ABI of rxe, in `ring`. `control` is its control
    /// block.
    ///
    /// # Errors
    /// [`OutOfBounds`] where the ring is shorter than the layout needs.
    pub fn of_rxe(
        ring: SharedMemory,
        layout: &RingLayout,
        control: SharedMemory,
        notify: Option<Notify>,
        on_overrun: Notify,
    ) -> Result<Self, OutOfBounds> {
        ring.require(layout.segment_bytes())?;
        let words = EventWords {
            memory: control,
            armed_at: CONTROL_OFF_ARMED,
            events_at: CONTROL_OFF_EVENTS,
        };
        Ok(Self {
            ring: Producer::new(ring, Place::of_indices(layout)),
            format: Format::Rxe,
            words,
            overrun: AtomicBool::new(false),
            notify,
            on_overrun,
        })
    }

    /// Whether it is a ring of the user ABI of rxe.
    #[must_use]
    pub fn is_rxe(&self) -> bool {
        matches!(self.format, Format::Rxe)
    }

    /// Has the completions of such a one lie in another ring, with those that wait, which the
    /// process does not take meanwhile. `None` where more wait than there is room for, or than are
    /// moved in a turn.
    ///
    /// # Errors
    /// [`OutOfBounds`] where the ring is shorter than the layout needs.
    pub fn move_ring(
        &self,
        ring: SharedMemory,
        layout: &RingLayout,
    ) -> Result<Option<()>, OutOfBounds> {
        ring.require(layout.segment_bytes())?;
        let place = Place::of_indices(layout);
        Ok(self
            .ring
            .move_all_to(ring, place, size_of::<RxeCompletion>()))
    }

    /// Has the next completions lie at the beginning of `memory`, which has room for as many as
    /// `layout` says. Those that wait stay where they are; returns the number of the first that
    /// does not. `None` where more wait than there is room for from now on.
    ///
    /// # Errors
    /// [`OutOfBounds`] where the memory is shorter than that.
    pub fn resize(
        &self,
        memory: SharedMemory,
        layout: &CqLayout,
    ) -> Result<Option<u32>, OutOfBounds> {
        let layout = CqLayout {
            is_timed: self.is_timed(),
            ..*layout
        };
        memory.require(layout.entries_bytes())?;
        Ok(self.ring.move_to(memory, layout.entries))
    }

    /// Entries that it has room for.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    /// Whether its completions say when they came.
    #[must_use]
    pub fn is_timed(&self) -> bool {
        matches!(self.format, Format::Timed(_))
    }

    fn add(&self, completion: &Completion) -> Option<()> {
        match &self.format {
            Format::Plain => self.ring.push(completion),
            Format::Rxe => self.ring.push(&rxe_completion(completion)),
            Format::Timed(clock) => self.ring.push_with(|memory, at| {
                let timed = TimedCompletion {
                    completion: *completion,
                    time: clock.now().into(),
                };
                memory.write(at, &timed)
            }),
        }
    }

    fn overrun(&self) -> Overrun {
        if !self.overrun.swap(true, Ordering::Relaxed) {
            (self.on_overrun)();
        }
        Overrun {
            entries: self.ring.entries(),
        }
    }

    fn raise(&self, solicited: bool) {
        let Some(notify) = &self.notify else {
            return;
        };
        let EventWords {
            memory,
            armed_at,
            events_at,
        } = &self.words;
        let (Ok(armed), Ok(events)) = (memory.word(*armed_at), memory.word(*events_at)) else {
            return;
        };
        fence(Ordering::SeqCst);
        let wanted = armed.load(Ordering::Relaxed);
        let fires = match wanted {
            ARM_NEXT => true,
            ARM_SOLICITED => solicited,
            _ => false,
        };
        let taken = || {
            armed
                .compare_exchange(wanted, ARM_NONE, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        if fires && taken() {
            events.fetch_add(1, Ordering::Release);
            notify();
        }
    }
}

impl CompletionSink for SharedCompletionQueue {
    fn push(&self, completion: &Completion, solicited: bool) -> Result<(), Overrun> {
        if self.overrun.load(Ordering::Relaxed) || self.add(completion).is_none() {
            return Err(self.overrun());
        }
        self.raise(solicited || completion.status != 0);
        Ok(())
    }
}

/// A completion as the user ABI of rxe has it.
fn rxe_completion(completion: &Completion) -> RxeCompletion {
    let detail = completion.vendor_err.get();
    // Of one without an error it says where a datagram has come from.
    let (vendor_err, route) = match completion.status {
        WC_STATUS_SUCCESS => (0, detail),
        _ => (detail, 0),
    };
    let [low, high, sl, _] = route.to_le_bytes();
    RxeCompletion {
        wr_id: completion.wr_id,
        status: u32::from(completion.status).into(),
        opcode: u32::from(completion.opcode).into(),
        vendor_err: vendor_err.into(),
        byte_len: completion.byte_len,
        imm: completion.imm,
        qp_num: completion.qp_num,
        src_qp: completion.src_qp,
        wc_flags: u32::from(completion.flags.get()).into(),
        slid: u16::from_le_bytes([low, high]).into(),
        sl,
        port_num: 1,
        ..RxeCompletion::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_zero_copy::Mapping;
    use std::os::fd::AsFd as _;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    fn queue(entries: u32) -> (SharedMemory, SharedCompletionQueue, [Arc<AtomicU32>; 2]) {
        let layout = CqLayout::new(entries).unwrap();
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, layout.segment_bytes()).unwrap();
        let memory =
            SharedMemory::new(Mapping::new(fd.as_fd(), 0, layout.segment_bytes(), true).unwrap());
        let counts = [Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0))];
        let count = |c: &Arc<AtomicU32>| -> Notify {
            let c = Arc::clone(c);
            Box::new(move || {
                c.fetch_add(1, Ordering::Relaxed);
            })
        };
        let cq = SharedCompletionQueue::new(
            memory.clone(),
            &layout,
            &DeviceClock::default(),
            Some(count(&counts[0])),
            count(&counts[1]),
        )
        .unwrap();
        (memory, cq, counts)
    }

    #[test]
    fn an_armed_queue_raises_one_event() {
        let (memory, cq, [events, _]) = queue(8);
        let ok = Completion::default();
        let failed = Completion {
            status: 5,
            ..Default::default()
        };
        let arm = |how| {
            memory
                .word(CQ_OFF_ARMED)
                .unwrap()
                .store(how, Ordering::Relaxed)
        };
        cq.push(&ok, true).unwrap();
        assert_eq!(events.load(Ordering::Relaxed), 0);
        arm(ARM_NEXT);
        cq.push(&ok, false).unwrap();
        cq.push(&ok, false).unwrap();
        assert_eq!(events.load(Ordering::Relaxed), 1);
        arm(ARM_SOLICITED);
        cq.push(&ok, false).unwrap();
        assert_eq!(events.load(Ordering::Relaxed), 1);
        cq.push(&failed, false).unwrap();
        assert_eq!(events.load(Ordering::Relaxed), 2);
        let seen = memory.word(CQ_OFF_EVENTS).unwrap().load(Ordering::Relaxed);
        assert_eq!(seen, 2);
    }

    #[test]
    fn an_overrun_is_told_once_and_is_for_ever() {
        let (memory, cq, [_, overruns]) = queue(2);
        let ok = Completion::default();
        cq.push(&ok, false).unwrap();
        cq.push(&ok, false).unwrap();
        assert_eq!(cq.push(&ok, false), Err(Overrun { entries: 2 }));
        memory
            .word(CQ_OFF_CONSUMED)
            .unwrap()
            .store(2, Ordering::Relaxed);
        assert_eq!(cq.push(&ok, false), Err(Overrun { entries: 2 }));
        assert_eq!(overruns.load(Ordering::Relaxed), 1);
    }

    fn entries_of(entries: u32) -> (SharedMemory, CqLayout) {
        let layout = CqLayout::new(entries).unwrap();
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, layout.entries_bytes()).unwrap();
        let mapping = Mapping::new(fd.as_fd(), 0, layout.entries_bytes(), true).unwrap();
        (SharedMemory::new(mapping), layout)
    }

    #[test]
    fn entries_of_a_queue_that_is_resized_keep_their_numbers() {
        let (memory, cq, [_, overruns]) = queue(4);
        let consumed = |number: u32| {
            let word = memory.word(CQ_OFF_CONSUMED).unwrap();
            word.store(number, Ordering::Relaxed);
        };
        let push = |wr_id: u64| {
            cq.push(
                &Completion {
                    wr_id: wr_id.into(),
                    ..Completion::default()
                },
                false,
            )
        };
        let at = |memory: &SharedMemory, offset: usize| {
            let entry: Completion = memory.read(offset).unwrap();
            entry.wr_id.get()
        };
        (0..3).for_each(|number| push(number).unwrap());
        consumed(1);
        // Two wait.
        let (one, layout) = entries_of(1);
        assert_eq!(cq.resize(one, &layout).unwrap(), None);
        let (eight, layout) = entries_of(8);
        assert_eq!(cq.resize(eight.clone(), &layout).unwrap(), Some(3));
        (3..9).for_each(|number| push(number).unwrap());
        let size = size_of::<Completion>();
        assert_eq!(at(&memory, CQ_OFF_ENTRIES + 2 * size), 2);
        assert_eq!((at(&eight, 3 * size), at(&eight, 0)), (3, 8));
        let produced = memory.word(CQ_OFF_PRODUCED).unwrap();
        assert_eq!(produced.load(Ordering::Relaxed), 9);
        consumed(8);
        let (two, layout) = entries_of(2);
        assert_eq!(cq.resize(two.clone(), &layout).unwrap(), Some(9));
        push(9).unwrap();
        assert_eq!(at(&two, size), 9);
        assert_eq!(overruns.load(Ordering::Relaxed), 0);
        assert_eq!(push(10), Err(Overrun { entries: 2 }));
        // A process that says that it has taken what there was not.
        consumed(77);
        let (four, layout) = entries_of(4);
        assert_eq!(cq.resize(four, &layout).unwrap(), None);
        let (short, _) = entries_of(2);
        assert!(cq.resize(short, &layout).is_err());
    }

    #[test]
    fn completions_that_say_when_they_came_come_in_the_order_of_their_times() {
        let layout = CqLayout::of(4, true).unwrap();
        let fd = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, layout.segment_bytes()).unwrap();
        let mapping = Mapping::new(fd.as_fd(), 0, layout.segment_bytes(), true).unwrap();
        let memory = SharedMemory::new(mapping);
        let clock = DeviceClock::default();
        let nothing = || Box::new(|| ()) as Notify;
        let cq = SharedCompletionQueue::new(memory.clone(), &layout, &clock, None, nothing());
        let cq = cq.unwrap();
        let push = |wr_id: u64| {
            let wr_id = wr_id.into();
            let completion = Completion {
                wr_id,
                ..Completion::default()
            };
            cq.push(&completion, false).unwrap();
        };
        let at = |memory: &SharedMemory, begin: usize, index: usize| {
            let entry: TimedCompletion = memory.read(begin + index * 40).unwrap();
            (entry.completion.wr_id.get(), entry.time.get())
        };
        let before = clock.now();
        (0..4).for_each(push);
        let entries = [0, 1, 2, 3].map(|index| at(&memory, CQ_OFF_ENTRIES, index));
        assert_eq!(entries.map(|(wr_id, _)| wr_id), [0, 1, 2, 3]);
        let times = entries.map(|(_, time)| time);
        assert!(times.is_sorted() && before <= times[0] && times[3] <= clock.now());
        let word = memory.word(CQ_OFF_CONSUMED).unwrap();
        word.store(4, Ordering::Relaxed);
        // It stays so in other memory, which is as long as that takes.
        let plain = CqLayout::new(8).unwrap();
        let (short, _) = entries_of(8);
        assert!(cq.resize(short, &plain).is_err());
        let (longer, _) = entries_of(16);
        assert_eq!(cq.resize(longer.clone(), &plain).unwrap(), Some(4));
        push(4);
        let (wr_id, time) = at(&longer, 0, 4);
        assert!(wr_id == 4 && time >= times[3] && time <= clock.now());
    }

    #[test]
    fn a_consumer_that_lies_gets_an_overrun() {
        let (memory, cq, _) = queue(4);
        memory
            .word(CQ_OFF_CONSUMED)
            .unwrap()
            .store(77, Ordering::Relaxed);
        assert!(cq.push(&Completion::default(), false).is_err());
    }
}
