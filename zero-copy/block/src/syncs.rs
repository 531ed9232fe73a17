//! Syncs of an open file that are under way.
//!
//! What the kernel could not write back it tells one sync of, once for each time that the file was
//! opened (lib/errseq.c). So a sync that ends well while others are under way means nothing before
//! those have ended: one of them may have been told.

use farlane_sys::eventfd;
use farlane_sys::sync::lock;
use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

/// Those of an open file, of all workers that use it.
#[derive(Clone, Debug, Default)]
pub struct Syncs(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// The number of the next one.
    next: u64,
    under_way: BTreeSet<u64>,
    /// Who waits for some to end.
    waiting: Vec<Arc<OwnedFd>>,
}

impl State {
    /// Whether none is under way that has a number below this one.
    fn has_none_before(&self, number: u64) -> bool {
        self.under_way.first().is_none_or(|first| *first >= number)
    }
}

/// A sync that is under way until this is dropped. What it has found out is known to all before.
#[derive(Debug)]
pub struct UnderWay {
    syncs: Syncs,
    number: u64,
}

/// The syncs that were under way when one ended.
#[derive(Debug)]
pub struct Beside {
    syncs: Syncs,
    /// They have numbers below this one.
    before: u64,
}

impl Syncs {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    /// One begins.
    #[must_use]
    pub fn begin(&self) -> UnderWay {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.under_way.insert(number);
        UnderWay {
            syncs: self.clone(),
            number,
        }
    }
}

impl UnderWay {
    /// It has ended. Returns those that have not.
    #[must_use]
    pub fn end(self) -> Beside {
        let (syncs, before) = (self.syncs.clone(), self.syncs.state().next);
        drop(self);
        Beside { syncs, before }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = self.syncs.state();
        state.under_way.remove(&self.number);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        for wake in waiting {
            eventfd::signal(wake.as_fd());
        }
    }
}

impl Beside {
    /// Whether all of them have ended. Whoever asks is awake when one does: all are his own.
    #[must_use]
    pub fn are_over(&self) -> bool {
        self.syncs.state().has_none_before(self.before)
    }

    /// Whether all of them have ended. If not, the eventfd `wake` is signalled when it is time to
    /// ask again.
    #[must_use]
    pub fn are_over_or_wake(&self, wake: &Arc<OwnedFd>) -> bool {
        let mut state = self.syncs.state();
        let are_over = state.has_none_before(self.before);
        if !are_over && !state.waiting.iter().any(|other| Arc::ptr_eq(other, wake)) {
            state.waiting.push(Arc::clone(wake));
        }
        are_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn wake() -> Arc<OwnedFd> {
        Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap())
    }

    fn is_signalled(wake: &OwnedFd) -> bool {
        rustix::io::read(wake, &mut [0; 8]).is_ok()
    }

    #[test]
    fn a_sync_waits_for_those_that_were_under_way_when_it_ended_and_for_no_others() {
        let (syncs, wake) = (Syncs::default(), wake());
        let [first, second, third] = [0, 1, 2].map(|_| syncs.begin());
        let beside = second.end();
        assert!(!beside.are_over_or_wake(&wake) && !is_signalled(&wake));
        let later = syncs.begin();
        drop(third);
        assert!(is_signalled(&wake) && !beside.are_over_or_wake(&wake));
        drop(first);
        assert!(is_signalled(&wake) && beside.are_over_or_wake(&wake));
        drop(later);
        assert!(!is_signalled(&wake));
    }

    #[test]
    fn who_is_awake_anyway_is_not_woken() {
        let syncs = Syncs::default();
        let [first, second] = [0, 1].map(|_| syncs.begin());
        let beside = second.end();
        assert!(!beside.are_over());
        drop(first);
        assert!(beside.are_over() && syncs.state().waiting.is_empty());
    }

    #[test]
    fn workers_that_sync_at_the_same_time_all_go_on() {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let syncs = Syncs::default();
        let patience = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let wake = wake();
                    for _ in 0..300 {
                        let one = syncs.begin();
                        std::thread::yield_now();
                        let beside = one.end();
                        while !beside.are_over_or_wake(&wake) {
                            let mut fds = [PollFd::new(&wake, PollFlags::IN)];
                            assert_eq!(poll(&mut fds, Some(&patience)), Ok(1));
                            is_signalled(&wake);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn one_by_itself_waits_for_none() {
        let (syncs, wake) = (Syncs::default(), wake());
        assert!(syncs.begin().end().are_over_or_wake(&wake));
        assert!(!is_signalled(&wake));
    }
}
