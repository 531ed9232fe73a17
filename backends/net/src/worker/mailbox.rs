//! What others tell a worker: bounded queues, and a bell for one that sleeps.

use farlane_zero_copy::eventfd;
use rustix::event::EventfdFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Wakes a worker, if it sleeps.
#[derive(Debug)]
pub struct Bell {
    fd: OwnedFd,
    asleep: AtomicBool,
}

impl Bell {
    /// A bell that is not to be rung.
    ///
    /// # Errors
    /// Too many open files.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            fd: rustix::event::eventfd(0, flags)?,
            asleep: AtomicBool::new(false),
        })
    }

    /// Something was put where the worker looks.
    pub fn ring(&self) {
        // Either the worker's look, after `about_to_sleep`, finds it, or this finds the worker asleep.
        fence(Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            eventfd::signal(self.fd.as_fd());
        }
    }

    /// The worker is about to sleep: it looks once more, and then waits for [`fd`](Self::fd).
    pub fn about_to_sleep(&self) {
        self.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The worker is awake.
    pub fn awake(&self) {
        if !self.asleep.swap(false, Ordering::SeqCst) {
            let _ = eventfd::drain(self.fd.as_fd());
        }
    }

    /// Readable when it was rung.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Something that weighs as much as it has bytes.
pub trait Weighs {
    /// Its bytes.
    fn bytes(&self) -> usize;
}

/// A bounded queue with one reader. What one writer puts in comes out in order.
#[derive(Debug)]
pub struct Mailbox<T> {
    queue: Mutex<Queue<T>>,
    /// Things in it, for a look without the lock.
    length: AtomicUsize,
    most: usize,
    most_bytes: usize,
}

#[derive(Debug)]
struct Queue<T> {
    things: VecDeque<T>,
    bytes: usize,
}

impl<T: Weighs> Mailbox<T> {
    /// One for at most so many things, of so many bytes together.
    #[must_use]
    pub fn new(most: usize, most_bytes: usize) -> Self {
        Self {
            queue: Mutex::new(Queue {
                things: VecDeque::new(),
                bytes: 0,
            }),
            length: AtomicUsize::new(0),
            most,
            most_bytes,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts something in.
    ///
    /// # Errors
    /// It is full: the thing comes back.
    pub fn put(&self, thing: T) -> Result<(), T> {
        let mut queue = self.lock();
        let bytes = queue.bytes + thing.bytes();
        if queue.things.len() >= self.most || bytes > self.most_bytes {
            return Err(thing);
        }
        queue.bytes = bytes;
        queue.things.push_back(thing);
        self.length.store(queue.things.len(), Ordering::Release);
        Ok(())
    }

    /// Takes the oldest.
    pub fn take(&self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let mut queue = self.lock();
        let thing = queue.things.pop_front()?;
        queue.bytes -= thing.bytes();
        self.length.store(queue.things.len(), Ordering::Release);
        Some(thing)
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.length.load(Ordering::Acquire) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Weighs for usize {
        fn bytes(&self) -> usize {
            *self
        }
    }

    #[test]
    fn it_is_bounded_and_in_order() {
        let mailbox = Mailbox::new(3, 100);
        assert!(mailbox.is_empty());
        for thing in [10_usize, 20, 30] {
            mailbox.put(thing).unwrap();
        }
        assert_eq!(mailbox.put(1), Err(1));
        assert_eq!(mailbox.take(), Some(10));
        assert_eq!(mailbox.put(51), Err(51));
        mailbox.put(50).unwrap();
        assert_eq!(
            [
                mailbox.take(),
                mailbox.take(),
                mailbox.take(),
                mailbox.take()
            ],
            [Some(20), Some(30), Some(50), None]
        );
        mailbox.put(100).unwrap();
    }

    #[test]
    fn no_ring_is_lost() {
        let (bell, mailbox) = (Bell::new().unwrap(), Mailbox::new(4, 1 << 20));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for thing in 0..2000_usize {
                    let mut thing = thing;
                    while let Err(back) = mailbox.put(thing) {
                        thing = back;
                        std::thread::yield_now();
                    }
                    bell.ring();
                }
            });
            let mut next = 0;
            while next < 2000 {
                bell.about_to_sleep();
                if mailbox.is_empty() {
                    let fd = rustix::event::PollFd::new(&bell.fd, rustix::event::PollFlags::IN);
                    rustix::event::poll(&mut [fd], None).unwrap();
                }
                bell.awake();
                while let Some(thing) = mailbox.take() {
                    assert_eq!(thing, next);
                    next += 1;
                }
            }
        });
    }
}
