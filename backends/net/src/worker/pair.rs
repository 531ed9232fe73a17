//! A queue pair, as its worker and the others know it.

use super::mailbox::{Bell, Mailbox, Weighs};
use super::{Parts, Terms, work};
use crate::bits::FrameHeader;
use crate::interface::Interface;
use farlane_daemon::limb::Limb;
use farlane_vhost::session::Setup;
use farlane_zero_copy::placement::Placement;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// Frames that wait to be handed over to a worker: at most so many, of so many bytes.
const FRAMES: usize = 1024;
const FRAME_BYTES: usize = 4 << 20;
/// Commands that wait: a front-end gives them one after the other.
const COMMANDS: usize = 16;

/// One of the two queues of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The guest receives from it.
    Receive,
    /// The guest sends into it.
    Transmit,
}

/// What a worker is told.
#[derive(Debug)]
pub enum Command {
    /// Serve a queue.
    Begin(Side, Box<Setup>, Terms),
    /// Stop to, and say where the next one begins.
    End(Side, Sender<u16>),
    /// The worker is not needed any more.
    Leave,
}

impl Weighs for Command {
    fn bytes(&self) -> usize {
        1
    }
}

/// A frame that another worker took.
#[derive(Debug)]
pub struct Handed {
    /// Its header.
    pub header: FrameHeader,
    /// The frame.
    pub bytes: Box<[u8]>,
}

impl Weighs for Handed {
    fn bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Pair {
    /// Its number.
    pub index: u16,
    /// Wakes the worker.
    pub bell: Bell,
    /// What it is told.
    pub commands: Mailbox<Command>,
    /// Frames that others have for its receive queue.
    pub frames: Mailbox<Handed>,
    served: AtomicBool,
}

impl Pair {
    /// One that nobody serves.
    ///
    /// # Errors
    /// Too many open files.
    pub fn new(index: u16) -> io::Result<Self> {
        Ok(Self {
            index,
            bell: Bell::new()?,
            commands: Mailbox::new(COMMANDS, COMMANDS),
            frames: Mailbox::new(FRAMES, FRAME_BYTES),
            served: AtomicBool::new(false),
        })
    }

    /// Whether its receive queue is served.
    pub fn is_served(&self) -> bool {
        self.served.load(Ordering::Acquire)
    }

    pub(super) fn set_served(&self, served: bool) {
        self.served.store(served, Ordering::Release);
    }

    /// Throws away the frames that wait; returns how many.
    pub(super) fn throw_away(&self) -> u64 {
        let mut count = 0;
        while self.frames.take().is_some() {
            count += 1;
        }
        count
    }
}

/// A worker that runs.
#[derive(Debug)]
pub struct Worker {
    pair: Arc<Pair>,
    thread: JoinHandle<()>,
}

impl Worker {
    /// Starts a worker for a pair, in a limb.
    ///
    /// # Errors
    /// There are no more threads, or the port's queue cannot be opened.
    pub fn start(
        interface: &Arc<Interface>,
        pair: &Arc<Pair>,
        limb: &Limb,
        placement: &Arc<Placement>,
    ) -> io::Result<Self> {
        let port = interface.port.open(pair.index)?;
        let parts = Parts {
            interface: Arc::clone(interface),
            pair: Arc::clone(pair),
            limb: limb.clone(),
            placement: Arc::clone(placement),
            port,
        };
        let thread = limb.spawn(format!("pair {}", pair.index), move || work(parts))?;
        Ok(Self {
            pair: Arc::clone(pair),
            thread,
        })
    }

    fn tell(&self, command: Command) {
        let mut command = command;
        // It takes them at least once a turn.
        while let Err(back) = self.pair.commands.put(command) {
            if self.thread.is_finished() {
                return;
            }
            command = back;
            std::thread::yield_now();
        }
        self.pair.bell.ring();
    }

    /// Has it serve a queue.
    pub fn begin(&self, side: Side, setup: Setup, terms: Terms) {
        self.tell(Command::Begin(side, Box::new(setup), terms));
    }

    /// Has it stop to; returns the running number of the first buffer that was not taken. It touches neither the queue nor its
    /// memory then.
    #[must_use]
    pub fn end(&self, side: Side) -> u16 {
        let (reply, answer) = channel();
        self.tell(Command::End(side, reply));
        answer.recv().unwrap_or_else(|_| {
            log::error!("A queue pair's worker has panicked");
            0
        })
    }

    /// Ends it.
    pub fn leave(self) {
        self.tell(Command::Leave);
        let _ = self.thread.join();
    }
}
