//! Completion queues.

use crate::arena::Part;
use crate::header::Header;
use crate::pd::Destroyed;
use crate::spin::Courtesy;
use crate::{Channel, Completion, Context, Error};
use farlane_abi::Errno;
use farlane_abi::queue::{
    ARM_NEXT, ARM_NONE, ARM_SOLICITED, CQ_OFF_ARMED, CQ_OFF_CONSUMED, CQ_OFF_ENTRIES,
    CQ_OFF_EVENTS, CQ_OFF_PRODUCED, CqLayout, MAX_CQ_ENTRIES, TimedCompletion,
};
use farlane_abi::rdma::{CQ_TIMED, CreateCq, CreateCqEx, ResizeCq, VerbsVersion};
use farlane_sys::sync::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex};

/// How a completion queue is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct CqInit<'a> {
    /// Entries that it has room for, at least.
    pub entries: u32,
    /// Where its events go.
    pub channel: Option<&'a Arc<Channel>>,
    /// Which of the context's [vectors](Context::comp_vectors) its events come by.
    pub comp_vector: u32,
    /// Its completions say when they came.
    pub is_timed: bool,
}

/// A completion queue of a context.
#[derive(Debug)]
pub struct Cq {
    context: Arc<Context>,
    channel: Option<Arc<Channel>>,
    /// Where its words lie, and its entries until it is resized.
    part: Arc<Part>,
    header: Arc<Header>,
    handle: u32,
    /// Its completions say when they came.
    is_timed: bool,
    ring: Mutex<Ring>,
    courtesy: Courtesy,
    /// Events taken from the channel so far.
    events_taken: AtomicU32,
    destroyed: Destroyed,
}

/// The consumer's end of a queue.
#[derive(Debug)]
struct Ring {
    /// Entries taken so far.
    consumed: u32,
    /// Where entries lie that come.
    entries: Entries,
    /// Where those lie that came before the queue was resized, oldest first; each until the entry
    /// of this number.
    before: VecDeque<(u32, Entries)>,
}

/// Where entries lie.
#[derive(Debug)]
struct Entries {
    part: Arc<Part>,
    /// Where they begin there.
    at: usize,
    /// How many, a power of two.
    count: u32,
    /// Bytes from one to the next.
    stride: usize,
}

impl Entries {
    /// Where the entry of this number lies in the part.
    #[inline]
    fn offset(&self, number: u32) -> usize {
        let entry = (number & (self.count - 1)) as usize;
        self.at + entry * self.stride
    }
}

/// Whether an entry of this number comes before the one of another, of those that can be in a
/// queue.
fn is_before(number: u32, end: u32) -> bool {
    (1..=MAX_CQ_ENTRIES).contains(&end.wrapping_sub(number))
}

impl Ring {
    /// Where the entry of this number lies.
    fn of(&self, number: u32) -> &Entries {
        let found = self.before.iter().find(|(end, _)| is_before(number, *end));
        found.map_or(&self.entries, |(_, entries)| entries)
    }

    /// Entries up to this number have been taken.
    fn consume(&mut self, to: u32) {
        self.consumed = to;
        while let Some((end, _)) = self.before.front()
            && !is_before(to, *end)
        {
            self.before.pop_front();
        }
    }
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
        let init = CqInit {
            entries,
            channel,
            ..CqInit::default()
        };
        Self::create_with(context, &init)
    }

    /// The same with more attributes.
    ///
    /// # Errors
    /// As [`create`](Self::create); `EINVAL` for a vector that there is not, `EOPNOTSUPP` for times
    /// where the backend's [version](Context::version) has none.
    pub fn create_with(context: &Arc<Context>, init: &CqInit<'_>) -> Result<Arc<Self>, Error> {
        let CqInit {
            entries,
            channel,
            comp_vector,
            is_timed,
        } = *init;
        let version = context.version();
        if is_timed && version < VerbsVersion::V3 {
            return Err(Errno::EOPNOTSUPP.into());
        }
        if comp_vector >= context.comp_vectors()? {
            return Err(Error::Invalid("completion vector"));
        }
        let layout = CqLayout::of(entries, is_timed);
        let layout = layout.ok_or(Error::Invalid("number of entries"))?;
        let part = Arc::new(context.take(layout.segment_bytes())?);
        let request = CreateCq {
            region: part.region().into(),
            offset: part.offset()?.into(),
            entries: layout.entries.into(),
            event: channel.map_or(0, |channel| channel.index()).into(),
        };
        let handle = match version {
            VerbsVersion::V1 | VerbsVersion::V2 => context.verbs().create_cq(&request)?,
            VerbsVersion::V3 => context.verbs().create_cq_ex(&CreateCqEx {
                base: request,
                flags: if is_timed { CQ_TIMED } else { 0 }.into(),
                comp_vector: comp_vector.into(),
            })?,
        };
        let handle = handle.get();
        let queue = Arc::new(Self {
            context: Arc::clone(context),
            channel: channel.cloned(),
            ring: Mutex::new(Ring {
                consumed: 0,
                entries: Entries {
                    part: Arc::clone(&part),
                    at: CQ_OFF_ENTRIES,
                    count: layout.entries,
                    stride: layout.stride(),
                },
                before: VecDeque::new(),
            }),
            part,
            header: Arc::clone(context.header()),
            handle,
            is_timed,
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

    /// In how many places entries lie.
    #[cfg(test)]
    pub(crate) fn places(&self) -> usize {
        1 + lock(&self.ring).before.len()
    }

    /// Where entries lie that come.
    #[cfg(test)]
    pub(crate) fn entries_part(&self) -> Arc<Part> {
        Arc::clone(&lock(&self.ring).entries.part)
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
        lock(&self.ring).entries.count
    }

    /// Gives it room for at least `entries` entries. What waits in it stays.
    ///
    /// # Errors
    /// `EINVAL` for none, for too many, and where more wait; `EOPNOTSUPP` where the backend's
    /// [version](Context::version) has no such call; `ENOMEM` where kernel or backend have no
    /// memory for them, `ENODEV` where the device is gone, `EPROTO` for an answer that cannot be.
    pub fn resize(&self, entries: u32) -> Result<(), Error> {
        if self.context.version() < VerbsVersion::V2 {
            return Err(Error::Refused(Errno::EOPNOTSUPP));
        }
        let layout = CqLayout::of(entries, self.is_timed).filter(|_| entries > 0);
        let layout = layout.ok_or(Error::Invalid("number of entries"))?;
        let part = self.context.take(layout.entries_bytes())?;
        let request = ResizeCq {
            cq: self.handle.into(),
            region: part.region().into(),
            offset: part.offset()?.into(),
            entries: layout.entries.into(),
        };
        // From the answer on completions lie elsewhere: nobody takes one meanwhile.
        let mut ring = lock(&self.ring);
        let first = self.context.verbs().resize_cq(&request)?.get();
        let entries = Entries {
            part: Arc::new(part),
            at: 0,
            count: layout.entries,
            stride: layout.stride(),
        };
        let waited = first.wrapping_sub(ring.consumed);
        if waited > ring.entries.count.min(entries.count) {
            self.context.keep(entries.part);
            return Err(Error::Refused(Errno::EPROTO));
        }
        let before = std::mem::replace(&mut ring.entries, entries);
        // No completion lies where there was none since the time before.
        let is_empty = ring.before.back().is_some_and(|(end, _)| *end == first);
        if waited > 0 && !is_empty {
            ring.before.push_back((first, before));
        }
        Ok(())
    }

    /// Takes completions, oldest first, and returns how many. Gives way to other programs now and
    /// then when called in vain many times in a row, and looks once more after that.
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
        // SAFETY: as `poll_entries` promises: an entry begins with the completion.
        self.poll_entries(most, |entries, number| unsafe {
            take(entries.part.read(entries.offset(number)));
        })
    }

    /// As [`poll_each`](Self::poll_each), with the time at which each came, by the
    /// [clock](Context::clock) of the device; zero where it was not [asked](CqInit::is_timed) for.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    #[inline]
    pub fn poll_timed(
        &self,
        most: usize,
        mut take: impl FnMut(TimedCompletion),
    ) -> Result<usize, Errno> {
        if !self.is_timed {
            return self.poll_each(most, |completion| {
                take(TimedCompletion {
                    completion,
                    ..TimedCompletion::default()
                });
            });
        }
        // SAFETY: as `poll_entries` promises, in a queue whose entries have times.
        self.poll_entries(most, |entries, number| unsafe {
            take(entries.part.read(entries.offset(number)));
        })
    }

    /// Calls `take` for each of at most `most` entries: the backend has published it and leaves it
    /// alone meanwhile, and so do our own threads.
    #[inline]
    fn poll_entries(
        &self,
        most: usize,
        mut take: impl FnMut(&Entries, u32),
    ) -> Result<usize, Errno> {
        if !self.header.is_here() {
            return Err(Errno::ENODEV);
        }
        let mut ring = lock(&self.ring);
        let mut ready = self.ready(&ring);
        if ready == 0 {
            drop(ring);
            if !self.found_nothing()? {
                return Ok(0);
            }
            // Much may have come meanwhile, up to the end of the connection. A program that is told
            // of the end after a poll in vain destroys the queue pair, and loses what it completed.
            ring = lock(&self.ring);
            ready = self.ready(&ring);
            if ready == 0 {
                return Ok(0);
            }
        }
        if ready > ring.entries.count {
            return Err(Errno::EPROTO);
        }
        // A number of entries, which fits.
        let count = u32::try_from(most).map_or(ready, |most| ready.min(most));
        let is_resized = !ring.before.is_empty();
        for index in 0..count {
            let number = ring.consumed.wrapping_add(index);
            let entries = if is_resized {
                ring.of(number)
            } else {
                &ring.entries
            };
            // The acquire load above has seen the backend publish this entry, which it leaves alone
            // until the consumer word has passed it; the lock keeps our own threads out.
            take(entries, number);
        }
        let consumed = ring.consumed.wrapping_add(count);
        ring.consume(consumed);
        self.part
            .word(CQ_OFF_CONSUMED)
            .store(consumed, Ordering::Release);
        drop(ring);
        self.courtesy.found();
        Ok(count as usize)
    }

    /// Entries that have come and were not taken.
    #[inline]
    fn ready(&self, ring: &Ring) -> u32 {
        let produced = self.part.word(CQ_OFF_PRODUCED).load(Ordering::Acquire);
        produced.wrapping_sub(ring.consumed)
    }

    /// Takes out what a queue pair has completed that is gone, or was reset, at the backend: nobody
    /// is told of its requests any more, and a number that is given again names another one. What
    /// others have completed moves together, towards the newest.
    pub(crate) fn forget(&self, qp_number: u32) {
        // The memory of a child's parent.
        if !self.header.is_here() {
            return;
        }
        let mut ring = lock(&self.ring);
        let produced = self.part.word(CQ_OFF_PRODUCED).load(Ordering::Acquire);
        let ready = produced.wrapping_sub(ring.consumed);
        // Whoever polls says so.
        if ready > ring.entries.count {
            return;
        }
        let mut kept = produced;
        for back in 1..=ready {
            let index = produced.wrapping_sub(back);
            // SAFETY: as in `poll_each`: the backend leaves the entries between the two words
            // alone.
            let completion: Completion = unsafe {
                let entries = ring.of(index);
                entries.part.read(entries.offset(index))
            };
            if completion.qp_num.get() == qp_number {
                continue;
            }
            kept = kept.wrapping_sub(1);
            if kept != index {
                let (from, to) = (ring.of(index), ring.of(kept));
                let (from, to) = ((from, from.offset(index)), (to, to.offset(kept)));
                // SAFETY: as above; both entries are as long.
                unsafe {
                    if self.is_timed {
                        let timed: TimedCompletion = from.0.part.read(from.1);
                        to.0.part.write(to.1, &timed);
                    } else {
                        to.0.part.write(to.1, &completion);
                    }
                }
            }
        }
        ring.consume(kept);
        self.part
            .word(CQ_OFF_CONSUMED)
            .store(kept, Ordering::Release);
    }

    /// A poll found nothing. Returns whether it has to look once more.
    fn found_nothing(&self) -> Result<bool, Errno> {
        if self.header.is_dead() {
            return self.dead_or_empty();
        }
        Ok(self.courtesy.found_nothing())
    }

    #[cold]
    fn dead_or_empty(&self) -> Result<bool, Errno> {
        // What was published before the end comes first.
        if self.ready(&lock(&self.ring)) == 0 {
            return Err(Errno::ENODEV);
        }
        Ok(true)
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
        // Nothing of ours uses it any more; what the backend still uses ends with the context.
        if self.destroy().is_err() {
            let entries = &lock(&self.ring).entries;
            self.context.keep(Arc::clone(&self.part));
            self.context.keep(Arc::clone(&entries.part));
        }
    }
}
