//! What the worker of a queue pair is sent: the front-end's commands, and frames that other workers
//! have read.
//!
//! All of it comes through one mailbox ([`farlane_worker::mailbox`]), which wakes a worker that
//! sleeps.

use super::Framing;
use super::frame::{Frame, MAX_BYTES, MAX_FRAMES};
use crate::pairs::Side;
use farlane_sys::sync::lock;
use farlane_vhost_user::session::Setup;
use farlane_worker::mailbox::{self, Receiver, Sender};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};

/// Commands for which there is room besides: a front-end gives them one after the other.
const COMMANDS: usize = 16;

/// What a worker is told.
#[derive(Debug)]
pub enum Command {
    /// Serve a queue.
    Begin(Side, Box<Setup>, Framing),
    /// Stop to, and say where the next one begins.
    End(Side, mpsc::Sender<u16>),
    /// The worker is not needed any more.
    Leave,
}

/// Either.
#[derive(Debug)]
pub(crate) enum Mail {
    Command(Command),
    Frame(Frame),
}

/// The mailbox of a pair, whose worker may change.
#[derive(Debug)]
pub struct Mailbox {
    sender: Sender<Mail>,
    /// Frames that wait, and their bytes.
    frames: AtomicUsize,
    bytes: AtomicUsize,
    /// While no worker has it.
    receiver: Mutex<Option<Receiver<Mail>>>,
}

impl Mailbox {
    /// An empty one.
    ///
    /// # Errors
    /// Too many open files.
    pub fn new() -> io::Result<Self> {
        let (sender, receiver) = mailbox::new(MAX_FRAMES + COMMANDS)?;
        Ok(Self {
            sender,
            frames: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            receiver: Mutex::new(Some(receiver)),
        })
    }

    /// Hands a frame over. Frames of one worker arrive in their order.
    ///
    /// # Errors
    /// Too many wait: the frame comes back.
    pub fn hand_over(&self, frame: Frame) -> Result<(), Frame> {
        let bytes = frame.bytes.len();
        let frames = self.frames.fetch_add(1, Ordering::Relaxed);
        let waiting = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let refused = if frames >= MAX_FRAMES || waiting.saturating_add(bytes) > MAX_BYTES {
            Mail::Frame(frame)
        } else {
            match self.sender.send(Mail::Frame(frame)) {
                Ok(()) => return Ok(()),
                Err(refused) => refused.into_inner(),
            }
        };
        self.taken(bytes);
        match refused {
            Mail::Frame(frame) => Err(frame),
            Mail::Command(_) => Ok(()),
        }
    }

    /// A frame waits no longer.
    fn taken(&self, bytes: usize) {
        self.frames.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Tells the worker something.
    ///
    /// # Errors
    /// There is no room now: the command comes back.
    pub(super) fn tell(&self, command: Command) -> Result<(), Command> {
        match self.sender.send(Mail::Command(command)) {
            Ok(()) => Ok(()),
            Err(refused) => match refused.into_inner() {
                Mail::Command(command) => Err(command),
                Mail::Frame(_) => Ok(()),
            },
        }
    }

    /// The worker's end; nothing while another worker has it.
    pub(super) fn open(self: &Arc<Self>) -> Option<Inbox> {
        let receiver = self.place().take()?;
        Some(Inbox {
            mailbox: Arc::clone(self),
            receiver,
        })
    }

    fn place(&self) -> MutexGuard<'_, Option<Receiver<Mail>>> {
        lock(&self.receiver)
    }
}

/// A mailbox in the hands of its worker.
#[derive(Debug)]
pub(crate) struct Inbox {
    mailbox: Arc<Mailbox>,
    receiver: Receiver<Mail>,
}

impl Inbox {
    /// The next mail.
    pub fn take(&mut self) -> Option<Mail> {
        let mail = self.receiver.take()?;
        if let Mail::Frame(frame) = &mail {
            self.mailbox.taken(frame.bytes.len());
        }
        Some(mail)
    }

    /// The worker will sleep. `false`: there is mail, it is not to. Either way
    /// [`awake`](Self::awake) follows.
    pub fn announce(&mut self) -> bool {
        self.receiver.announce()
    }

    /// It does not sleep any more.
    pub fn awake(&mut self) {
        self.receiver.awake();
    }

    /// Readable when a worker that sleeps is to wake.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.receiver.fd()
    }

    /// The worker ends: the next one goes on.
    pub fn close(self) {
        *self.mailbox.place() = Some(self.receiver);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bits::FrameHeader;
    use crate::flow::Route;
    use zerocopy::FromZeros as _;

    fn frame(bytes: usize) -> Frame {
        Frame {
            header: FrameHeader::new_zeroed(),
            bytes: vec![0; bytes].into(),
            since: std::time::Instant::now(),
            route: Route::Deliver,
        }
    }

    fn lengths(inbox: &mut Inbox) -> Vec<usize> {
        std::iter::from_fn(|| inbox.take())
            .map(|mail| match mail {
                Mail::Frame(frame) => frame.bytes.len(),
                Mail::Command(_) => 0,
            })
            .collect()
    }

    #[test]
    fn frames_are_bounded_by_number_and_bytes_and_come_in_order() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        for bytes in 1..=MAX_FRAMES {
            mailbox.hand_over(frame(bytes)).unwrap();
        }
        assert_eq!(mailbox.hand_over(frame(7)).unwrap_err().bytes.len(), 7);
        // A command finds room, and comes when it was sent.
        mailbox.tell(Command::Leave).unwrap();
        let mut inbox = mailbox.open().unwrap();
        let all: Vec<_> = (1..=MAX_FRAMES).chain([0]).collect();
        assert_eq!(lengths(&mut inbox), all);
        mailbox.hand_over(frame(MAX_BYTES - 100)).unwrap();
        assert!(mailbox.hand_over(frame(101)).is_err());
        mailbox.hand_over(frame(100)).unwrap();
        assert!(mailbox.hand_over(frame(1)).is_err());
        assert_eq!(lengths(&mut inbox), [MAX_BYTES - 100, 100]);
        mailbox.hand_over(frame(MAX_BYTES)).unwrap();
    }

    #[test]
    fn one_worker_after_the_other_has_it() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let first = mailbox.open().unwrap();
        assert!(mailbox.open().is_none());
        mailbox.hand_over(frame(1)).unwrap();
        first.close();
        let mut second = mailbox.open().unwrap();
        assert!(!second.announce());
        second.awake();
        assert_eq!(lengths(&mut second), [1]);
        assert!(second.announce());
        second.awake();
    }
}
