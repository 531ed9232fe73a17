//! Completion queues.

use crate::arena::Part;
use crate::header::Header;
use crate::pd::Destroyed;
use crate::spin::Courtesy;
use crate::{Channel, Completion, Context, Error};
use farlane_abi::Errno;
use farlane_abi::queue::{
    ARM_NEXT, ARM_NONE, ARM_SOLICITED, CQ_OFF_ARMED, CQ_OFF_CONSUMED, CQ_OFF_ENTRIES,
    CQ_OFF_EVENTS, CQ_OFF_PRODUCED, CqLayout,
};
use farlane_abi::rdma::CreateCq;
use farlane_sys::sync::lock;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex};

/// A completion queue of a context.
#[derive(Debug)]
pub struct Cq {
    context: Arc<Context>,
    channel: Option<Arc<Channel>>,
    part: Part,
    header: Arc<Header>,
    layout: CqLayout,
    handle: u32,
    /// Entries taken so far: the consumer's end of the queue.
    consumed: Mutex<u32>,
    courtesy: Courtesy,
    /// Events taken from the channel so far.
    events_taken: AtomicU32,
    destroyed: Destroyed,
}

impl Cq {
    /// Creates a queue of at least `entries` entries, whose events go to `channel`.
    ///
    /// # Errors
    /// `EINVAL` for too many entries, `ENOMEM` where kernel or backend have no memory for them,
    /// `ENODEV` where the device is gone.
    pub fn create(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<&Arc<Channel>>,
    ) -> Result<Arc<Self>, Error> {
        let layout = CqLayout::new(entries).ok_or(Error::Invalid("number of entries"))?;
        let part = context.take(layout.segment_bytes())?;
        let request = CreateCq {
            region: part.region().into(),
            offset: part.offset()?.into(),
            entries: layout.entries.into(),
            event: channel.map_or(0, |channel| channel.index()).into(),
        };
        let handle = context.verbs().create_cq(&request)?.get();
        let queue = Arc::new(Self {
            context: Arc::clone(context),
            channel: channel.cloned(),
            part,
            header: Arc::clone(context.header()),
            layout,
            handle,
            consumed: Mutex::new(0),
            courtesy: Courtesy::default(),
            events_taken: AtomicU32::new(0),
            destroyed: Destroyed::default(),
        });
        if let Some(channel) = channel {
            channel.add(&queue);
        }
        Ok(queue)
    }

    /// The context it belongs to.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The channel that its events go to.
    #[must_use]
    pub fn channel(&self) -> Option<&Arc<Channel>> {
        self.channel.as_ref()
    }

    /// Where it lies.
    #[cfg(test)]
    pub(crate) fn part(&self) -> &Part {
        &self.part
    }

    /// Its handle, which asynchronous events name.
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Number of entries that it has room for.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.layout.entries
    }

    /// Takes completions, oldest first, and returns how many. Gives way to other programs now and
    /// then when called in vain many times in a row.
    ///
    /// # Errors
    /// `ENODEV` when the device is gone and everything it had completed has been taken, `EPROTO`
    /// when the backend broke the protocol.
    pub fn poll(&self, completions: &mut [Completion]) -> Result<usize, Errno> {
        let mut slots = completions.iter_mut();
        self.poll_each(slots.len(), |completion| {
            if let Some(slot) = slots.next() {
                *slot = completion;
            }
        })
    }

    /// As [`poll`](Self::poll), giving each of at most `most` completions to `take`. `take` must
    /// not use this queue.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    #[inline]
    pub fn poll_each(&self, most: usize, mut take: impl FnMut(Completion)) -> Result<usize, Errno> {
        if !self.header.is_here() {
            return Err(Errno::ENODEV);
        }
        let mut consumed = lock(&self.consumed);
        let produced = self.part.word(CQ_OFF_PRODUCED).load(Ordering::Acquire);
        let ready = produced.wrapping_sub(*consumed);
        if ready == 0 {
            drop(consumed);
            return self.found_nothing();
        }
        if ready > self.layout.entries {
            return Err(Errno::EPROTO);
        }
        // A number of entries, which fits.
        let count = u32::try_from(most).map_or(ready, |most| ready.min(most));
        let mask = self.layout.entries - 1;
        for index in 0..count {
            let entry = (consumed.wrapping_add(index) & mask) as usize;
            // SAFETY: the acquire load above has seen the backend publish this entry, which it
            // leaves alone until the consumer word has passed it; the lock keeps our own threads
            // out.
            take(unsafe {
                self.part
                    .read(CQ_OFF_ENTRIES + entry * size_of::<Completion>())
            });
        }
        *consumed = consumed.wrapping_add(count);
        self.part
            .word(CQ_OFF_CONSUMED)
            .store(*consumed, Ordering::Release);
        drop(consumed);
        self.courtesy.found();
        Ok(count as usize)
    }

    /// Takes out what a queue pair has completed that is gone, or was reset, at the backend: nobody
    /// is told of its requests any more, and a number that is given again names another one. What
    /// others have completed moves together, towards the newest.
    pub(crate) fn forget(&self, qp_number: u32) {
        // The memory of a child's parent.
        if !self.header.is_here() {
            return;
        }
        let mut consumed = lock(&self.consumed);
        let produced = self.part.word(CQ_OFF_PRODUCED).load(Ordering::Acquire);
        let ready = produced.wrapping_sub(*consumed);
        // Whoever polls says so.
        if ready > self.layout.entries {
            return;
        }
        let at = |index: u32| {
            let entry = (index & (self.layout.entries - 1)) as usize;
            CQ_OFF_ENTRIES + entry * size_of::<Completion>()
        };
        let mut kept = produced;
        for back in 1..=ready {
            let index = produced.wrapping_sub(back);
            // SAFETY: as in `poll_each`: the backend leaves the entries between the two words
            // alone.
            let completion: Completion = unsafe { self.part.read(at(index)) };
            if completion.qp_num.get() == qp_number {
                continue;
            }
            kept = kept.wrapping_sub(1);
            if kept != index {
                // SAFETY: as above.
                unsafe { self.part.write(at(kept), &completion) };
            }
        }
        *consumed = kept;
        self.part
            .word(CQ_OFF_CONSUMED)
            .store(kept, Ordering::Release);
    }

    #[cold]
    fn dead_or_empty(&self) -> Result<usize, Errno> {
        // What was published before the end comes first.
        let consumed = *lock(&self.consumed);
        if self.part.word(CQ_OFF_PRODUCED).load(Ordering::Acquire) == consumed {
            return Err(Errno::ENODEV);
        }
        Ok(0)
    }

    fn found_nothing(&self) -> Result<usize, Errno> {
        if self.header.is_dead() {
            return self.dead_or_empty();
        }
        self.courtesy.found_nothing();
        Ok(0)
    }

    /// Asks for one event at the next completion, or at the next solicited or failed one. A
    /// completion that is in the queue already raises none: poll once more after this.
    ///
    /// # Errors
    /// `ENODEV` when the device is gone.
    pub fn arm(&self, solicited_only: bool) -> Result<(), Errno> {
        if self.header.is_dead() {
            return Err(Errno::ENODEV);
        }
        let armed = self.part.word(CQ_OFF_ARMED);
        if solicited_only {
            // A request for any completion stands.
            let _ = armed.compare_exchange(
                ARM_NONE,
                ARM_SOLICITED,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
        } else {
            armed.store(ARM_NEXT, Ordering::Release);
        }
        // Pairs with the backend's fence between publishing a completion and looking at the
        // request: it sees the request, or the poll after this sees the completion.
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Destroys it at the backend.
    ///
    /// # Errors
    /// `EBUSY` while a queue pair uses it.
    pub fn destroy(&self) -> Result<(), Error> {
        self.destroyed
            .once(|| self.context.verbs().destroy_cq(&self.handle.into()))
    }

    /// Takes one event that the backend has raised and the channel has not given out.
    pub(crate) fn take_event(&self) -> bool {
        let raised = self.part.word(CQ_OFF_EVENTS).load(Ordering::Acquire);
        // The channel's lock keeps other takers out.
        let taken = self.events_taken.load(Ordering::Relaxed);
        if raised != taken {
            self.events_taken
                .store(taken.wrapping_add(1), Ordering::Relaxed);
        }
        raised != taken
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // Nothing uses it any more; what a hostile answer leaves ends with the context.
        let _ = self.destroy();
    }
}
