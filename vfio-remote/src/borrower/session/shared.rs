//! What the threads of a session share: what has been asked of the lender, and what is known of the
//! lease.

use super::super::signals::Signals;
use super::SessionError;
use crate::protocol::message::{Fence, Refusal, Reply, Request, ToLender};
use crate::protocol::{ConnectionError, Sender};
use farlane_sys::sync::{held, lock};
use std::collections::HashMap;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How much longer than by its term a lease may last at a lender that has fallen silent: until it
/// has looked at the time (once a second) and stopped the device.
const STOPPING: Duration = Duration::from_secs(2);

/// Shortest term of a lease that makes sense.
const SHORTEST_TERM: Duration = Duration::from_millis(100);

/// What came under a number, and its descriptors.
type Answer = (Result<Reply, Refusal>, Vec<OwnedFd>);

/// A request that waits for its answer.
#[derive(Default)]
struct Waiting {
    /// Whether its answer is a lease.
    is_take: bool,
    answer: Option<Answer>,
}

#[derive(Default)]
struct Answers {
    next: u32,
    /// Requests that wait, and answers that wait to be taken.
    waiting: HashMap<u32, Waiting>,
    closed: bool,
    /// The lease is not renewed any more.
    resting: bool,
}

/// How long a device may reach memory that it has been shown, where nothing says that it has
/// stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// So much longer at most: by then its lender has noticed that the lease is over.
    For(Duration),
    /// While its lender runs. One of this host may be held, or wait for a device, and notices
    /// nothing; any other has said that its device is at something, which ends when it ends.
    WhileItRuns,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::For(left) => write!(f, "for up to {left:?}"),
            Self::WhileItRuns => f.write_str("until its lender says that it has stopped, or ends"),
        }
    }
}

/// What is known of the lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tenure {
    pub fence: Fence,
    pub term: Duration,
    /// When a renewal was last answered.
    pub renewed: Instant,
    /// The lender has said that its device has not let go of memory yet.
    pub is_busy: bool,
    /// It has said that the lease is over, and not yet that its device has stopped.
    pub stopping: bool,
}

impl Tenure {
    /// A lease that begins now.
    fn new(fence: Fence, term_ms: u32) -> Self {
        Self {
            fence,
            term: Duration::from_millis(u64::from(term_ms)).max(SHORTEST_TERM),
            renewed: Instant::now(),
            is_busy: false,
            stopping: false,
        }
    }

    /// How long the device may reach memory, where time proves something of a lender that is
    /// silent, or not.
    fn doubt(&self, time_proves: bool, now: Instant) -> Option<Doubt> {
        if !time_proves || self.is_busy || self.stopping {
            return Some(Doubt::WhileItRuns);
        }
        // A renewal that nobody has heard of may have reached the lender in the last moment of the
        // term.
        let until = self.renewed + 2 * self.term + STOPPING;
        let left = until.saturating_duration_since(now);
        (!left.is_zero()).then_some(Doubt::For(left))
    }
}

#[derive(Debug, Default)]
struct Lease {
    /// None where there is no lease, and as soon as the lender has said that the device reaches
    /// nothing any more.
    tenure: Option<Tenure>,
    /// The lease that there is, or was, and its term.
    taken: Option<Fence>,
    term: Option<Duration>,
    /// Nobody uses the session any more.
    retired: bool,
}

/// What the threads of a session share.
pub(super) struct Shared {
    pub sender: Sender,
    answers: Mutex<Answers>,
    changed: Condvar,
    /// Held while something is done for the VM that belongs to it.
    lease: Mutex<Lease>,
    /// The lease has ended without our doing, or the session has. Changes under the lock of the
    /// lease.
    lost: AtomicBool,
    /// `on_loss` has been called, or is being called.
    notified: AtomicBool,
    /// Something of the lender's may still be reached: the session is to stay, whatever comes.
    holds_on: AtomicBool,
    signals: Arc<Signals>,
    on_loss: OnLoss,
}

/// Is told of a lease that has ended.
pub(crate) type OnLoss = Box<dyn Fn(Fence) + Send + Sync>;

impl Shared {
    pub fn new(sender: Sender, signals: Arc<Signals>, on_loss: OnLoss) -> Self {
        Self {
            sender,
            answers: Mutex::default(),
            changed: Condvar::new(),
            lease: Mutex::default(),
            lost: AtomicBool::new(false),
            notified: AtomicBool::new(false),
            holds_on: AtomicBool::new(false),
            signals,
            on_loss,
        }
    }

    fn answers(&self) -> MutexGuard<'_, Answers> {
        lock(&self.answers)
    }

    fn lease(&self) -> MutexGuard<'_, Lease> {
        lock(&self.lease)
    }

    /// The term of the lease that there is, or was a moment ago.
    pub fn term(&self) -> Option<Duration> {
        self.lease().term
    }

    /// The lender has answered a renewal.
    pub fn renewed(&self) {
        if let Some(tenure) = &mut self.lease().tenure {
            tenure.renewed = Instant::now();
        }
    }

    /// The device reaches nothing any more; where a lease is named, the device that was taken under
    /// it. False where there is none.
    pub fn stopped(&self, named: Option<Fence>) -> bool {
        let mut lease = self.lease();
        let is_meant = |tenure: &mut Tenure| named.is_none_or(|fence| fence == tenure.fence);
        lease.tenure.take_if(is_meant).is_some()
    }

    /// See [`Doubt`]. None where the device is known to reach nothing.
    pub fn doubt(&self) -> Option<Doubt> {
        let time_proves = !self.sender.hears_of_the_end();
        self.lease().tenure?.doubt(time_proves, Instant::now())
    }

    /// The lender has said that its device has not let go of memory yet, or that it has.
    pub fn set_busy(&self, is_busy: bool) {
        if let Some(tenure) = &mut self.lease().tenure {
            tenure.is_busy = is_busy;
        }
    }

    /// The lender has said that a lease is over. Its device may take as long as it likes to stop:
    /// the lender says when it has.
    pub fn set_stopping(&self, fence: Fence) {
        let mut lease = self.lease();
        if let Some(tenure) = lease.tenure.as_mut().filter(|t| t.fence == fence) {
            tenure.stopping = true;
        }
    }

    /// Whether what comes under `fence` belongs to the lease that the VM has.
    pub fn is_current(&self, fence: Fence) -> bool {
        self.with_current(fence, |_| ())
    }

    /// Signals something to the VM, if it belongs to the lease that the VM has, and the VM goes on
    /// having it meanwhile.
    pub fn with_current(&self, fence: Fence, act: impl FnOnce(&Signals)) -> bool {
        let lease = self.lease();
        let is_current = lease.tenure.is_some_and(|tenure| tenure.fence == fence);
        let is_current = is_current && !lease.retired && !self.is_lost();
        if is_current {
            act(&self.signals);
        }
        is_current
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Whether it is known, or being said, to whom it concerns that the lease has ended.
    pub fn is_notified(&self) -> bool {
        self.notified.load(Ordering::Acquire)
    }

    /// From now on, or no more, something of the lender's may be reached, also after the lease: the
    /// session is not hung up, and the lease is renewed.
    pub fn hold_on(&self, holds: bool) {
        self.holds_on.store(holds, Ordering::Release);
    }

    /// Whether something of the lender's may be reached.
    pub fn holds_on(&self) -> bool {
        self.holds_on.load(Ordering::Acquire)
    }

    /// Nobody uses the session any more: whoever uses the signals next is not asked for anything.
    pub fn retire(&self) {
        self.lease().retired = true;
    }

    /// The device is gone for the VM.
    pub fn lose(&self) {
        let lease = self.lease();
        if !lease.retired && !self.lost.swap(true, Ordering::AcqRel) {
            self.signals.request_unplug();
        }
    }

    /// The same, and says so to whom it concerns. Not by a thread that holds locks: that may wait
    /// for other devices.
    pub fn lose_and_notify(&self) {
        self.lose();
        let taken = self.lease().taken;
        if let Some(fence) = taken
            && !self.notified.swap(true, Ordering::AcqRel)
        {
            (self.on_loss)(fence);
        }
    }

    /// The device is gone for the VM, and nothing is asked any more. What the lender still says is
    /// heard, until it hangs up too. While something of the lender's may be reached, it alone is
    /// lost.
    pub fn hang_up(&self) {
        self.lose();
        if self.holds_on() {
            return;
        }
        self.sender.finish();
        self.ask_nothing();
    }

    /// Ends the session.
    pub fn close(&self) {
        self.sender.close();
        self.ask_nothing();
    }

    /// Nothing is asked any more.
    pub fn ask_nothing(&self) {
        self.answers().closed = true;
        self.changed.notify_all();
    }

    /// Whether anything is asked.
    pub fn can_ask(&self) -> bool {
        !self.answers().closed
    }

    /// Renews no more.
    pub fn rest(&self) {
        self.answers().resting = true;
        self.changed.notify_all();
    }

    /// Whether it is not.
    pub fn rests(&self) -> bool {
        self.answers().resting
    }

    /// Waits until it is time to renew the lease, or nothing is asked any more. False where it is
    /// not renewed any more.
    pub fn wait_to_renew(&self, interval: Duration) -> bool {
        let (answers, _) = held(
            self.changed
                .wait_timeout_while(self.answers(), interval, |a| !a.closed && !a.resting),
        );
        !answers.resting
    }

    /// Sends what nobody waits for.
    pub fn send(&self, message: &ToLender) -> Result<(), SessionError> {
        let sent = self.sender.send(message, &[]);
        if sent.is_err() {
            self.hang_up();
        }
        Ok(sent?)
    }

    /// Takes an answer. One that came too late has nobody who waits for it.
    pub fn answered(&self, id: u32, result: Result<Reply, Refusal>, descriptors: Vec<OwnedFd>) {
        let is_take = self.answers().waiting.get(&id).is_some_and(|w| w.is_take);
        // The device has been taken. Here, because what comes behind this answer may belong to the
        // lease.
        if is_take
            && let Ok(Reply::Taken { fence, term_ms, .. } | Reply::Sublet { fence, term_ms }) =
                result
        {
            let tenure = Tenure::new(fence, term_ms);
            let mut lease = self.lease();
            lease.taken = Some(fence);
            lease.term = Some(tenure.term);
            lease.tenure = Some(tenure);
        }
        let mut answers = self.answers();
        if let Some(slot) = answers.waiting.get_mut(&id) {
            slot.answer = Some((result, descriptors));
            self.changed.notify_all();
        }
    }

    /// Asks, and waits for the answer until then. A lender that gives none is not there; but of one
    /// that is slow to read its device, renewals tell. Whoever asks sees to it that there is time
    /// for an answer.
    pub fn ask(
        &self,
        request: Request,
        descriptors: &[BorrowedFd<'_>],
        until: Instant,
    ) -> Result<(Reply, Vec<OwnedFd>), SessionError> {
        let is_renewal = matches!(request, Request::Renew { .. });
        let may_be_slow = matches!(request, Request::Words { .. });
        let id = {
            let mut answers = self.answers();
            if answers.closed {
                return Err(SessionError::Lost);
            }
            answers.next = answers.next.wrapping_add(1);
            let id = answers.next;
            let waiting = Waiting {
                is_take: matches!(request, Request::Take | Request::Sublet { .. }),
                answer: None,
            };
            answers.waiting.insert(id, waiting);
            id
        };
        let message = ToLender::Request { id, request };
        let sent = match is_renewal {
            true => self.sender.send_first(&message),
            false => self.sender.send(&message, descriptors),
        };
        if let Err(e) = sent {
            self.answers().waiting.remove(&id);
            self.hang_up();
            return Err(e.into());
        }
        let mut answers = self.answers();
        loop {
            let slot = answers.waiting.get_mut(&id);
            if let Some((result, fds)) = slot.and_then(|slot| slot.answer.take()) {
                answers.waiting.remove(&id);
                return Ok((result?, fds));
            }
            if is_renewal && answers.resting {
                answers.waiting.remove(&id);
                return Err(SessionError::Lost);
            }
            let left = until.saturating_duration_since(Instant::now());
            if answers.closed || left.is_zero() {
                answers.waiting.remove(&id);
                if may_be_slow && !answers.closed {
                    return Err(ConnectionError::Stuck.into());
                }
                drop(answers);
                // A lender that does not answer is one that is not there.
                self.hang_up();
                return Err(SessionError::Lost);
            }
            answers = held(self.changed.wait_timeout(answers, left)).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_proves_nothing_of_a_lender_whose_end_is_heard_of() {
        let renewed = Instant::now();
        let tenure = Tenure {
            fence: Fence(1),
            term: Duration::from_secs(3),
            renewed,
            is_busy: false,
            stopping: false,
        };
        let after = |seconds| renewed + Duration::from_secs(seconds);
        let left = Duration::from_secs(1);
        assert_eq!(tenure.doubt(true, after(7)), Some(Doubt::For(left)));
        assert_eq!(tenure.doubt(true, after(8)), None);
        assert_eq!(tenure.doubt(false, after(1000)), Some(Doubt::WhileItRuns));
        for (is_busy, stopping) in [(true, false), (false, true)] {
            let tenure = Tenure {
                is_busy,
                stopping,
                ..tenure
            };
            assert_eq!(tenure.doubt(true, after(1000)), Some(Doubt::WhileItRuns));
        }
    }
}
