//! Receive requests that several queue pairs take (IBTA 10.2.9).
//!
//! Each message takes the oldest request, whichever queue pair it comes to. Who posts to the queue
//! rings no queue pair: those whose peers wait for a receive request are in a list, and who posts
//! while there is one rings the queue itself, which then [passes that on](SharedReceives::pass_on).

use crate::memory::PdHandle;
use crate::request::RecvWqe;
use crate::schedule::Schedule;
use crate::sync::{Mutex, lock};
use crate::work_queue::{Entries, QueueError, SharedSource};
use farlane_abi::Errno;
use farlane_abi::rdma::{EVENT_SRQ_ERR, EVENT_SRQ_LIMIT_REACHED};
use farlane_abi::width::to_usize;
use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};

/// Those that are told of new requests, or of the end, in a turn: about 10 us.
const TOLD_IN_A_TURN: usize = 64;

/// Told of asynchronous events, `EVENT_SRQ_*` of [`farlane_abi::rdma`].
pub type Events = Box<dyn Fn(u32) + Send + Sync>;

/// A shared receive queue. Its lock comes after that of any queue pair's responder; nothing is
/// called under it.
pub struct SharedReceives {
    pd: PdHandle,
    queue: Mutex<Queue>,
    events: Events,
}

struct Queue {
    /// None from its end on: its memory is not kept by those who know it still.
    source: Option<Box<dyn SharedSource>>,
    /// When fewer requests are left than this, that is told once.
    limit: Option<NonZeroU32>,
    /// Why nothing can be taken any more.
    dead: Option<QueueError>,
    /// Who waits for a request, the longest first.
    waiting: VecDeque<Weak<dyn Schedule>>,
}

impl Queue {
    /// Whether it has come below its limit; from then on it has none.
    fn passes_limit(&mut self) -> bool {
        let Some(queued) = self.source.as_ref().map(|source| source.queued()) else {
            return false;
        };
        self.limit.take_if(|limit| queued < limit.get()).is_some()
    }

    /// Who posts has to ring, or need not.
    fn want_rings(&self, wanted: bool) {
        if let Some(source) = &self.source {
            source.want_rings(wanted);
        }
    }

    /// How many can take something now, or learn that nobody can any more.
    fn ready(&self) -> usize {
        match &self.source {
            Some(source) if !self.is_over() => to_usize(source.queued().into()),
            _ => self.waiting.len(),
        }
    }

    /// Whether nothing can be taken any more.
    fn is_over(&self) -> bool {
        self.source.is_none() || self.dead.is_some()
    }
}

impl fmt::Debug for SharedReceives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceives")
            .field("pd", &self.pd)
            .finish_non_exhaustive()
    }
}

impl SharedReceives {
    /// A queue of what comes from `source`, whose elements name memory of protection domain `pd`.
    #[must_use]
    pub fn new(source: Box<dyn SharedSource>, pd: PdHandle, events: Events) -> Arc<Self> {
        let queue = Queue {
            source: Some(source),
            limit: None,
            dead: None,
            waiting: VecDeque::new(),
        };
        Arc::new(Self {
            pd,
            queue: Mutex::new(queue),
            events,
        })
    }

    /// Protection domain of the memory that its requests name: that of a queue pair may be another
    /// one.
    #[must_use]
    pub fn pd(&self) -> PdHandle {
        self.pd
    }

    /// Takes the oldest request into `into`, and gives its place back; false when there is none.
    ///
    /// # Errors
    /// See [`QueueError`]. A bad request has been taken; any other error is for ever, and has those
    /// scheduled that wait: of very many some, and who is told of `EVENT_SRQ_ERR`
    /// [passes it on](Self::pass_on) to the others.
    pub fn take(&self, into: &mut RecvWqe) -> Result<bool, QueueError> {
        let (taken, event) = {
            let mut queue = lock(&self.queue);
            let dead = queue.dead;
            let Some(source) = &mut queue.source else {
                return Ok(false);
            };
            if let Some(error) = dead {
                return Err(error);
            }
            let taken = source.take(into);
            let event = match &taken {
                Ok(false) => None,
                Ok(true) | Err(QueueError::Request(_)) => {
                    source.retire();
                    queue.passes_limit().then_some(EVENT_SRQ_LIMIT_REACHED)
                }
                Err(error) => {
                    queue.dead = Some(*error);
                    Some(EVENT_SRQ_ERR)
                }
            };
            (taken, event)
        };
        if let Some(event) = event {
            (self.events)(event);
        }
        if event == Some(EVENT_SRQ_ERR) {
            self.pass_on();
        }
        taken
    }

    /// Whether something can be taken, or an error comes of it.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let queue = lock(&self.queue);
        let source = queue.source.as_ref();
        queue.is_over() || source.is_some_and(|source| source.is_ready())
    }

    /// Whether who posts can be asked to ring.
    #[must_use]
    pub fn rings(&self) -> bool {
        let queue = lock(&self.queue);
        queue.source.as_ref().is_none_or(|source| source.rings())
    }

    /// Tells of fewer requests than `limit` from now on, once, also where there are fewer already;
    /// zero: not any more (IBTA 11.2.3.3, Modify SRQ).
    pub fn set_limit(&self, limit: u32) {
        let passes = {
            let mut queue = lock(&self.queue);
            queue.limit = NonZeroU32::new(limit);
            queue.dead.is_none() && queue.passes_limit()
        };
        if passes {
            (self.events)(EVENT_SRQ_LIMIT_REACHED);
        }
    }

    /// Has the requests that are posted from now on lie elsewhere: as [`SharedSource::move_to`].
    ///
    /// # Errors
    /// The same, and `EINVAL` where that is less than the limit, or nothing can be taken any more.
    pub fn move_to(&self, to: Entries) -> Result<u32, Errno> {
        let mut queue = lock(&self.queue);
        let is_below = queue.limit.is_some_and(|limit| limit.get() > to.count());
        if is_below || queue.is_over() {
            return Err(Errno::EINVAL);
        }
        queue.source.as_mut().ok_or(Errno::EINVAL)?.move_to(to)
    }

    /// The limit; zero where there is none, or it was told of.
    #[must_use]
    pub fn limit(&self) -> u32 {
        lock(&self.queue).limit.map_or(0, NonZeroU32::get)
    }

    /// Has `who` scheduled when there are requests, once: until then it must not say so again. It
    /// looks once more after this. Where nothing can be taken any more it is scheduled at once.
    pub fn wait(&self, who: Weak<dyn Schedule>) {
        {
            let mut queue = lock(&self.queue);
            if !queue.is_over() {
                queue.waiting.push_back(who);
                queue.want_rings(true);
                return;
            }
        }
        if let Some(who) = who.upgrade() {
            who.schedule();
        }
    }

    /// Who waits no more, and never will again.
    pub fn forget(&self, who: &Weak<dyn Schedule>) {
        let mut queue = lock(&self.queue);
        queue.waiting.retain(|other| !other.ptr_eq(who));
    }

    /// Has those scheduled that have waited longest, one for each request that can be taken, and
    /// all where nothing can be any more: of very many some. Returns whether there was one.
    pub fn pass_on(&self) -> bool {
        self.pass_on_to(TOLD_IN_A_TURN) > 0
    }

    /// The same, to so many at most. Returns how many there were.
    pub(crate) fn pass_on_to(&self, most: usize) -> usize {
        let most = most.min(TOLD_IN_A_TURN);
        let told: Vec<_> = {
            let mut queue = lock(&self.queue);
            let count = queue.ready().min(queue.waiting.len()).min(most);
            queue.waiting.drain(..count).collect()
        };
        for who in told.iter().filter_map(Weak::upgrade) {
            who.schedule();
        }
        told.len()
    }

    /// Nothing is taken from it any more, and those that wait are scheduled: of very many some, and
    /// whoever closes it [passes it on](Self::pass_on) to the others. When it returns its source is
    /// gone, and with that its memory.
    pub fn close(&self) {
        let source = lock(&self.queue).source.take();
        drop(source);
        self.pass_on();
    }

    /// Whether [`pass_on`](Self::pass_on) would find somebody.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        let queue = lock(&self.queue);
        !queue.waiting.is_empty() && queue.ready() > 0
    }

    /// It is looked at from now on: who posts need not ring.
    pub fn watch(&self) {
        lock(&self.queue).want_rings(false);
    }

    /// It is looked at no more, unless [somebody waits](Self::is_awaited) for what was posted
    /// before: who posts rings while somebody waits.
    pub fn rest(&self) {
        let queue = lock(&self.queue);
        queue.want_rings(!queue.waiting.is_empty());
    }
}
