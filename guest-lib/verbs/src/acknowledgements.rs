//! Events that a program has been given and has to acknowledge.

use farlane_sys::sync::{held, lock};
use std::sync::{Condvar, Mutex};

/// Events that were given to the program and those that it has acknowledged. An object is not
/// destroyed before the two are equal.
#[derive(Debug, Default)]
pub struct Acknowledgements {
    /// Given and not acknowledged. Below zero while a program acknowledges more than it got.
    outstanding: Mutex<i64>,
    changed: Condvar,
}

impl Acknowledgements {
    /// An event is given to the program. Call this under the lock of the table in which the
    /// object was found, so that its destruction cannot overtake it.
    pub fn give(&self) {
        *lock(&self.outstanding) += 1;
    }

    /// The program acknowledges events.
    pub fn take_back(&self, count: u32) {
        *lock(&self.outstanding) -= i64::from(count);
        self.changed.notify_all();
    }

    /// Waits until every event that was given is acknowledged.
    pub fn wait(&self) {
        let mut outstanding = lock(&self.outstanding);
        while *outstanding > 0 {
            outstanding = held(self.changed.wait(outstanding));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::thread;

    /// Whether a thread of this process is blocked in a system call; one that has ended is not.
    fn is_blocked(thread: libc::pid_t) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
        // The state follows the name, which is in parentheses (proc_pid_stat(5)).
        stat.is_ok_and(|stat| stat.rsplit_once(") ").unwrap().1.starts_with('S'))
    }

    #[test]
    fn waiting_ends_with_the_last_acknowledgement() {
        let acks = Arc::new(Acknowledgements::default());
        acks.wait();
        acks.give();
        acks.give();
        let over = Arc::new(AtomicBool::new(false));
        let (sender, id) = mpsc::channel();
        let waiter = thread::spawn({
            let (acks, over) = (Arc::clone(&acks), Arc::clone(&over));
            move || {
                // SAFETY: it has no conditions.
                sender.send(unsafe { libc::gettid() }).unwrap();
                acks.wait();
                over.store(true, Ordering::SeqCst);
            }
        });
        let id = id.recv().unwrap();
        let settle = || {
            while !waiter.is_finished() && !is_blocked(id) {
                thread::yield_now();
            }
        };
        settle();
        acks.take_back(1);
        // Whoever woke it has let it look.
        settle();
        assert!(!over.load(Ordering::SeqCst));
        acks.take_back(1);
        waiter.join().unwrap();
        assert!(over.load(Ordering::SeqCst));
    }
}
