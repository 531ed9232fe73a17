//! Mailboxes: how one worker passes work to another.
//!
//! Many may send, one receives. A mailbox has room for a number of items, and a sender that finds
//! it full gets the item back at once: nobody ever waits for a receiver. The receiver is woken
//! through an eventfd, only if it sleeps ([`wake`](crate::wake)).
//!
//! ```
//! let (sender, mut receiver) = farlane_worker::mailbox::new::<u32>(64)?;
//! sender.send(7).unwrap();
//! assert_eq!(receiver.take(), Some(7));
//! // A receiver that has other work looks at that, too, between announcing and sleeping.
//! if receiver.announce() {
//!     // Wait for receiver.fd() and for whatever else there is: poll, epoll, io_uring.
//! }
//! receiver.awake();
//! # std::io::Result::Ok(())
//! ```

use crate::wake::Sleep;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, TryRecvError, TrySendError};
use std::time::{Duration, Instant};

/// Why an item comes back to who sent it.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused<T> {
    /// There is no room: the receiver has fallen behind.
    #[error("The mailbox is full")]
    Full(T),
    /// The receiver is no more.
    #[error("Nobody receives from the mailbox")]
    Closed(T),
}

impl<T> std::fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Full(_) => "Full",
            Self::Closed(_) => "Closed",
        })
    }
}

impl<T> Refused<T> {
    /// The item.
    pub fn into_inner(self) -> T {
        match self {
            Self::Full(item) | Self::Closed(item) => item,
        }
    }
}

/// Sends to a mailbox; can be cloned and shared.
pub struct Sender<T> {
    queue: mpsc::SyncSender<T>,
    sleep: Arc<Sleep<OwnedFd>>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self {
            queue: self.queue.clone(),
            sleep: Arc::clone(&self.sleep),
        }
    }
}

impl<T> std::fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender").finish_non_exhaustive()
    }
}

impl<T: Send> Sender<T> {
    /// Sends an item, and wakes the receiver if it sleeps. Never waits. Items of one sender arrive
    /// in their order.
    ///
    /// # Errors
    /// The item, where there is no room or nobody receives.
    pub fn send(&self, item: T) -> Result<(), Refused<T>> {
        self.queue.try_send(item).map_err(|refused| match refused {
            TrySendError::Full(item) => Refused::Full(item),
            TrySendError::Disconnected(item) => Refused::Closed(item),
        })?;
        self.sleep.wake();
        Ok(())
    }

    /// Wakes the receiver if it sleeps, without an item: it looks at everything that it serves.
    pub fn nudge(&self) {
        self.sleep.wake();
    }
}

/// Receives from a mailbox. What is left in it when this is dropped is dropped with it.
pub struct Receiver<T> {
    queue: mpsc::Receiver<T>,
    /// Found by a look that was not to take it.
    found: Option<T>,
    /// A sender has woken, or is about to, and the event is not taken yet.
    owed: bool,
    sleep: Arc<Sleep<OwnedFd>>,
}

impl<T> std::fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiver").finish_non_exhaustive()
    }
}

impl<T: Send> Receiver<T> {
    /// The next item, if there is one.
    pub fn take(&mut self) -> Option<T> {
        self.found.take().or_else(|| self.queue.try_recv().ok())
    }

    /// Whether there is an item.
    pub fn has(&mut self) -> bool {
        if self.found.is_none() {
            self.found = self.queue.try_recv().ok();
        }
        self.found.is_some()
    }

    /// Whether there is no item and no sender any more.
    pub fn is_closed(&mut self) -> bool {
        if self.found.is_some() {
            return false;
        }
        match self.queue.try_recv() {
            Ok(item) => {
                self.found = Some(item);
                false
            }
            Err(e) => e == TryRecvError::Disconnected,
        }
    }

    /// Says that the receiver will sleep, and looks once more: false where there is an item, and
    /// then it is not to sleep. Whoever waits for other things, too, looks at them after this.
    /// Either way [`awake`](Self::awake) follows.
    ///
    /// The last sender that goes wakes nobody: who wants a receiver to end sends an item that says
    /// so, or nudges it.
    pub fn announce(&mut self) -> bool {
        self.sleep.announce();
        !self.has()
    }

    /// The receiver does not sleep any more: nobody wakes it until it announces the next time.
    /// Makes [`fd`](Self::fd) quiet.
    pub fn awake(&mut self) {
        self.owed |= !self.sleep.awake();
        if self.owed {
            // Who was about to wake may not have done it yet: then the next sleep is short, and
            // this is made up for after it.
            let mut count = [0; 8];
            self.owed = rustix::io::read(&self.sleep.event, &mut count).is_err();
        }
    }

    /// Sleeps until there is an item, somebody nudges, or `timeout` has passed (none: for ever).
    ///
    /// # Errors
    /// What `ppoll` says.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Option<T>> {
        if let Some(item) = self.take() {
            return Ok(Some(item));
        }
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let slept = self.announce().then(|| self.sleep_until(until));
        self.awake();
        slept.unwrap_or(Ok(()))?;
        Ok(self.take())
    }

    fn sleep_until(&self, until: Option<Instant>) -> io::Result<()> {
        let mut fds = [PollFd::new(&self.sleep.event, PollFlags::IN)];
        farlane_sys::socket::wait(&mut fds, until)?;
        Ok(())
    }

    /// Is readable when the receiver has been woken: an eventfd, for poll, epoll or io_uring.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.sleep.event.as_fd()
    }
}

/// A mailbox with room for `room` items, at least one.
///
/// # Errors
/// There are no more descriptors.
pub fn new<T: Send>(room: usize) -> io::Result<(Sender<T>, Receiver<T>)> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let sleep = Arc::new(Sleep::new(event));
    // A channel without room would be a rendezvous, which waits.
    let (sender, receiver) = mpsc::sync_channel(room.max(1));
    let sender = Sender {
        queue: sender,
        sleep: Arc::clone(&sleep),
    };
    let receiver = Receiver {
        queue: receiver,
        found: None,
        owed: false,
        sleep,
    };
    Ok((sender, receiver))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wake::Event as _;
    use rustix::event::{Timespec, poll};

    #[test]
    fn who_finds_it_full_keeps_the_item() {
        let (sender, mut receiver) = new(2).unwrap();
        assert_eq!(sender.send(1), Ok(()));
        assert_eq!(sender.clone().send(2), Ok(()));
        assert_eq!(sender.send(3), Err(Refused::Full(3)));
        assert_eq!(receiver.take(), Some(1));
        assert_eq!(sender.send(3), Ok(()));
        assert_eq!((receiver.take(), receiver.take()), (Some(2), Some(3)));
        assert_eq!(receiver.take(), None);
        drop(receiver);
        assert_eq!(sender.send(4).unwrap_err().into_inner(), 4);
    }

    #[test]
    fn what_is_looked_at_is_not_lost() {
        let (sender, mut receiver) = new(2).unwrap();
        sender.send(1).unwrap();
        assert!(receiver.has() && receiver.has());
        sender.send(2).unwrap();
        drop(sender);
        assert!(!receiver.announce() && !receiver.is_closed());
        receiver.awake();
        assert_eq!((receiver.take(), receiver.take()), (Some(1), Some(2)));
        assert!(receiver.is_closed());
    }

    #[test]
    fn only_a_sleeper_is_woken_and_only_once() {
        let (sender, mut receiver) = new(8).unwrap();
        let woken = |receiver: &Receiver<u8>| {
            let mut fds = [PollFd::new(&receiver.sleep.event, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
        };
        sender.send(1).unwrap();
        assert!(!woken(&receiver));
        assert_eq!(receiver.take(), Some(1));
        assert!(receiver.announce());
        sender.send(2).unwrap();
        sender.send(3).unwrap();
        assert!(woken(&receiver));
        let mut count = [0; 8];
        rustix::io::read(receiver.fd(), &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        receiver.awake();
        assert!(!woken(&receiver));
        assert!(!receiver.announce());
        receiver.awake();
        while receiver.take().is_some() {}
        assert!(receiver.announce());
        sender.nudge();
        assert!(woken(&receiver) && !receiver.has());
    }

    #[test]
    fn a_wake_up_that_comes_late_is_made_up_for() {
        let (_sender, mut receiver) = new::<u8>(1).unwrap();
        assert!(receiver.announce());
        // A sender that is stopped between the two halves of its wake-up.
        assert!(receiver.sleep.awake());
        receiver.awake();
        receiver.sleep.event.raise();
        for _ in 0..2 {
            let (since, length) = (Instant::now(), Duration::from_millis(1));
            assert_eq!(receiver.wait(Some(length)).unwrap(), None);
            if since.elapsed() >= length {
                return;
            }
        }
        panic!("the event stays raised");
    }

    #[test]
    fn a_receiver_that_sleeps_misses_nothing() {
        const SENDERS: u64 = 4;
        const ITEMS: u64 = 20_000;
        let (sender, mut receiver) = new::<(u64, u64)>(16).unwrap();
        let senders: Vec<_> = (0..SENDERS)
            .map(|number| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    for item in 0..ITEMS {
                        let mut full = sender.send((number, item));
                        while let Err(Refused::Full(item)) = full {
                            std::thread::yield_now();
                            full = sender.send(item);
                        }
                        full.unwrap();
                    }
                })
            })
            .collect();
        let mut next = [0; 4];
        while next.iter().sum::<u64>() < SENDERS * ITEMS {
            // Without a timeout: a wake-up that is missed hangs the test.
            if let Some((number, item)) = receiver.wait(None).unwrap() {
                let number = usize::try_from(number).unwrap();
                assert_eq!(item, next[number]);
                next[number] += 1;
            }
        }
        for sender in senders {
            sender.join().unwrap();
        }
        assert_eq!(receiver.take(), None);
        assert_eq!(receiver.wait(Some(Duration::from_millis(1))).unwrap(), None);
    }
}
