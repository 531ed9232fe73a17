//! What the threads of a session share: what has been asked of the lender, and what is known of the lease.

use super::super::signals::Signals;
use super::SessionError;
use crate::link::Sender;
use crate::link::message::{Fence, Refusal, Reply, Request, ToLender};
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What came under a number, and its descriptors.
type Answer = (Result<Reply, Refusal>, Vec<OwnedFd>);

#[derive(Default)]
struct Answers {
    next: u32,
    /// Requests that wait, and answers that wait to be taken.
    waiting: HashMap<u32, Option<Answer>>,
    closed: bool,
}

/// What is known of the lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tenure {
    pub fence: Fence,
    pub term: Duration,
    /// When a renewal was last answered.
    pub renewed: Instant,
}

/// What the threads of a session share.
pub(super) struct Shared {
    pub sender: Sender,
    answers: Mutex<Answers>,
    changed: Condvar,
    /// None where there is no lease, and as soon as the lender has said that the device reaches nothing any more.
    tenure: Mutex<Option<Tenure>>,
    /// The lease has ended without our doing, or the link has.
    lost: AtomicBool,
    /// `on_loss` has been called, or is being called.
    told: AtomicBool,
    pub signals: Arc<Signals>,
    on_loss: Box<dyn Fn() + Send + Sync>,
}

impl Shared {
    pub fn new(
        sender: Sender,
        signals: Arc<Signals>,
        on_loss: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self {
            sender,
            answers: Mutex::default(),
            changed: Condvar::new(),
            tenure: Mutex::default(),
            lost: AtomicBool::new(false),
            told: AtomicBool::new(false),
            signals,
            on_loss,
        }
    }

    fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn tenure(&self) -> MutexGuard<'_, Option<Tenure>> {
        self.tenure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether what comes under `fence` belongs to the lease that the VM has.
    pub fn is_current(&self, fence: Fence) -> bool {
        !self.is_lost() && self.tenure().is_some_and(|tenure| tenure.fence == fence)
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// The device is gone for the VM.
    pub fn lose(&self) {
        if !self.lost.swap(true, Ordering::AcqRel) {
            self.signals.want_back();
        }
    }

    /// The same, and says so to whom it concerns. Not by a thread that holds locks: that may wait for other devices.
    pub fn lose_and_tell(&self) {
        self.lose();
        if !self.told.swap(true, Ordering::AcqRel) {
            (self.on_loss)();
        }
    }

    pub fn close(&self) {
        self.sender.close();
        self.answers().closed = true;
        self.changed.notify_all();
    }

    /// Takes an answer. One that came too late has nobody who waits for it.
    pub fn answered(&self, id: u32, result: Result<Reply, Refusal>, descriptors: Vec<OwnedFd>) {
        let mut answers = self.answers();
        if let Some(slot) = answers.waiting.get_mut(&id) {
            *slot = Some((result, descriptors));
            self.changed.notify_all();
        }
    }

    pub fn ask(
        &self,
        request: Request,
        descriptors: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<(Reply, Vec<OwnedFd>), SessionError> {
        let until = Instant::now() + patience;
        let id = {
            let mut answers = self.answers();
            if answers.closed {
                return Err(SessionError::Lost);
            }
            answers.next = answers.next.wrapping_add(1);
            let id = answers.next;
            answers.waiting.insert(id, None);
            id
        };
        let sent = self
            .sender
            .send(&ToLender::Request { id, request }, descriptors);
        if let Err(e) = sent {
            self.answers().waiting.remove(&id);
            self.close();
            return Err(e.into());
        }
        let mut answers = self.answers();
        loop {
            if matches!(answers.waiting.get(&id), Some(Some(_)))
                && let Some(Some((result, fds))) = answers.waiting.remove(&id)
            {
                return Ok((result?, fds));
            }
            let left = until.saturating_duration_since(Instant::now());
            if answers.closed || left.is_zero() {
                answers.waiting.remove(&id);
                drop(answers);
                // A lender that does not answer is one that is not there.
                self.close();
                return Err(SessionError::Lost);
            }
            answers = self
                .changed
                .wait_timeout(answers, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
