//! Completion queues.

use super::CallHost;
use crate::async_ring::ObjectEvents;
use crate::completion_queue::{Notify, SharedCompletionQueue};
use crate::counters;
use crate::engine::CqSpec;
use crate::ledger::Resource;
use crate::objects::CqObject;
use crate::segment::Part;
use farlane_abi::Errno;
use farlane_abi::control::{EVENT_FIRST_CHANNEL, MAX_EVENTS};
use farlane_abi::queue::CqLayout;
use farlane_abi::rdma::{CQ_TIMED, CreateCq, CreateCqEx, EVENT_CQ_ERR, Handle, ResizeCq};
use farlane_abi::zerocopy::little_endian::U32;
use farlane_sys::sync::lock;
use farlane_zero_copy::{OutOfBounds, SharedMemory};
use std::sync::{Arc, Mutex};

impl CallHost<'_> {
    /// `EINVAL`, too, for a completion vector that there is not, `EOPNOTSUPP` for flags that are
    /// not known.
    pub(super) fn add_cq_ex(&self, args: &CreateCqEx) -> Result<Handle, Errno> {
        if args.flags.get() & !CQ_TIMED != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if args.comp_vector.get() >= self.context.comp_vectors {
            return Err(Errno::EINVAL);
        }
        self.add_cq(&args.base, args.flags.get() & CQ_TIMED != 0)
    }

    pub(super) fn add_cq(&self, args: &CreateCq, is_timed: bool) -> Result<Handle, Errno> {
        if args.entries.get() == 0 {
            return Err(Errno::EINVAL);
        }
        let layout = CqLayout::of(args.entries.get(), is_timed).ok_or(Errno::EINVAL)?;
        let part = self.part(args.region, args.offset, layout.segment_bytes())?;
        let memory = part.memory.clone();
        let clock = &self.context.clock;
        self.insert_cq(args.event, part, None, |notify, on_overrun| {
            SharedCompletionQueue::new(memory, &layout, clock, notify, on_overrun)
        })
    }

    /// Makes a completion queue that is the one that `make` makes, of a notification for an event
    /// and one for an overrun.
    pub(super) fn insert_cq(
        &self,
        event: U32,
        part: Part,
        entries: Option<Part>,
        make: impl FnOnce(Option<Notify>, Notify) -> Result<SharedCompletionQueue, OutOfBounds>,
    ) -> Result<Handle, Errno> {
        let event = event.get();
        if event != 0 && !(EVENT_FIRST_CHANNEL..MAX_EVENTS).contains(&event) {
            return Err(Errno::EINVAL);
        }
        let asyncs = self.context.asyncs().ok_or(Errno::EINVAL)?;
        let notify = (event != 0).then(|| -> Notify {
            let events = Arc::clone(&self.context.events);
            let counters = Arc::clone(&self.context.counters);
            Box::new(move || {
                counters::count(&counters.events, 1);
                events.raise(event);
            })
        });
        let mut objects = self.context.objects();
        let share = self.take(Resource::CompletionQueues, 1)?;
        let (handle, _) = objects.cqs.insert_with(|handle| {
            let events = ObjectEvents::new(&asyncs, handle);
            let tell = events.teller();
            let on_overrun = Box::new(move || tell(EVENT_CQ_ERR));
            let queue = Arc::new(make(notify, on_overrun).map_err(|_| Errno::EINVAL)?);
            let engine = self.context.engine_context.create_cq(CqSpec {
                sink: Arc::clone(&queue) as _,
                entries: queue.entries(),
            })?;
            Ok(CqObject {
                queue,
                engine,
                _part: part,
                entries: Mutex::new(entries),
                _events: events,
                _share: share,
            })
        })?;
        Ok(handle.into())
    }

    pub(super) fn change_cq(&mut self, args: &ResizeCq) -> Result<u32, Errno> {
        if args.entries.get() == 0 {
            return Err(Errno::EINVAL);
        }
        let cq = self.cq(args.cq)?;
        if cq.queue.is_rxe() {
            return Err(Errno::EINVAL);
        }
        let layout = CqLayout::of(args.entries.get(), cq.queue.is_timed());
        let layout = layout.ok_or(Errno::EINVAL)?;
        let part = self.part(args.region, args.offset, layout.entries_bytes())?;
        self.resize_to(&cq, part, layout.entries, |queue, memory| {
            queue.resize(memory, &layout)
        })
    }

    /// Has a completion queue lie in a part with room for so many, as `resize` has it. What was
    /// posted completes first, as far as there is time for it in a turn: it counts.
    pub(super) fn resize_to<T>(
        &mut self,
        cq: &CqObject,
        part: Part,
        entries: u32,
        resize: impl FnOnce(&SharedCompletionQueue, SharedMemory) -> Result<Option<T>, OutOfBounds>,
    ) -> Result<T, Errno> {
        if let Some(turn) = &mut self.turn {
            let carried_out = self.context.carry_out_posted(turn);
            turn.carried_out = turn.carried_out.and(carried_out);
        }
        let before = cq.queue.entries();
        cq.engine.resize(entries)?;
        let resized = resize(&cq.queue, part.memory.clone());
        let Some(resized) = resized.ok().flatten() else {
            cq.engine.resize(before)?;
            return Err(Errno::EINVAL);
        };
        *lock(&cq.entries) = Some(part);
        Ok(resized)
    }

    pub(super) fn remove_cq(&self, cq: Handle) -> Result<(), Errno> {
        let mut objects = self.context.objects();
        // A queue pair holds the object of its completion queue.
        if Arc::strong_count(objects.cqs.get(cq.get()).ok_or(Errno::EBADF)?) > 1 {
            return Err(Errno::EBUSY);
        }
        let object = objects.cqs.remove(cq.get()).ok_or(Errno::EBADF)?;
        drop(objects);
        object.engine.destroy();
        Ok(())
    }
}
