//! What waits for the worker of a session.

use crate::protocol::Received;
use crate::protocol::message::ToLender;
use farlane_sys::sync::{held, lock};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// Messages that wait at most.
const LIMIT: usize = 256;

/// A message of the borrower.
type Message = Received<ToLender>;

/// What a worker does.
#[derive(Debug)]
pub(super) enum Work {
    /// What a message asks for.
    Message(Message),
    /// The lease may have ended.
    Look,
}

#[derive(Debug, Default)]
struct State {
    messages: VecDeque<Message>,
    look: bool,
    ended: bool,
}

/// Messages in their order, from the thread that receives to the one that works.
#[derive(Debug, Default)]
pub(super) struct WorkQueue {
    state: Mutex<State>,
    changed: Condvar,
}

impl WorkQueue {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Appends a message. Gives it back where there is no room for it until then.
    pub fn push(&self, message: Message, until: Instant) -> Option<Message> {
        let left = until.saturating_duration_since(Instant::now());
        let is_full = |state: &mut State| state.messages.len() >= LIMIT;
        let (mut state, _) = held(self.changed.wait_timeout_while(self.state(), left, is_full));
        if is_full(&mut state) {
            return Some(message);
        }
        state.messages.push_back(message);
        self.changed.notify_all();
        None
    }

    /// Has the worker look at its lease, before it takes a message.
    pub fn look(&self) {
        self.state().look = true;
        self.changed.notify_all();
    }

    /// There is nothing to be done any more, whatever waits.
    pub fn end(&self) {
        self.state().ended = true;
        self.changed.notify_all();
    }

    /// What is to be done next. None after the end.
    pub fn next(&self) -> Option<Work> {
        let is_idle = |s: &mut State| !s.ended && !s.look && s.messages.is_empty();
        let mut state = held(self.changed.wait_while(self.state(), is_idle));
        if state.ended {
            return None;
        }
        if std::mem::take(&mut state.look) {
            return Some(Work::Look);
        }
        let message = state.messages.pop_front();
        self.changed.notify_all();
        message.map(Work::Message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Message {
        Received {
            message: ToLender::Memory {
                id: 1,
                result: Err(0),
            },
            descriptors: Vec::new(),
        }
    }

    #[test]
    fn who_looks_passes_what_waits_and_the_end_passes_all() {
        let queue = WorkQueue::default();
        let now = Instant::now();
        for _ in 0..LIMIT {
            assert!(queue.push(message(), now).is_none());
        }
        assert!(queue.push(message(), now).is_some());
        queue.look();
        assert!(matches!(queue.next(), Some(Work::Look)));
        assert!(matches!(queue.next(), Some(Work::Message(_))));
        assert!(queue.push(message(), now).is_none());
        queue.end();
        assert!(queue.next().is_none());
    }
}
