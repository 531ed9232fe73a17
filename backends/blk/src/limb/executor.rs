//! The thread of a limb.

use crate::paths::Paths;
use crate::paths::ring::PathRing;
use farlane_block::bounce::Bounce;
use farlane_block::ring::{Durable, Event};
use farlane_block::vectors::transfer_some;
use farlane_daemon::limb::Limb;
use farlane_worker::idle::{Idle, Rest};
use farlane_worker::mailbox::{self, Receiver, Refused, Sender};
use farlane_worker::timeslice;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Transfers that fit into a limb's mailbox.
const ROOM: usize = 1024;
/// A thread shares its CPU in slices as short as this.
const SLICE: Duration = Duration::from_micros(100);
/// Pause after the ring has failed.
const PAUSE: Duration = Duration::from_millis(10);
/// Most bytes of one transfer through a copy.
pub const COPY_BYTES: usize = 1 << 20;

/// Bytes to be moved between a path and memory.
#[derive(Debug)]
pub struct Transfer {
    /// Which path.
    pub path: usize,
    /// Whether it is written, and how; else it is read.
    pub write: Option<Durable>,
    /// First byte on the disk.
    pub offset: u64,
    /// The memory. Whoever hands over a transfer keeps it mapped until it has the answer.
    pub vectors: Vec<libc::iovec>,
    /// Whether the memory is not aligned for the path: a copy is made, and fewer bytes may be
    /// moved.
    pub copies: bool,
    /// Number by which the queue's worker knows it.
    pub slot: usize,
    /// Where the answer goes.
    pub answer: Sender<Answer>,
}

/// What became of a transfer.
#[derive(Debug)]
pub struct Answer {
    /// Its number.
    pub slot: usize,
    /// Bytes that were moved; negative for an error number.
    pub result: i32,
    /// Its vectors, as they were.
    pub vectors: Vec<libc::iovec>,
}

// SAFETY: the vectors are addresses of memory that is mapped for the whole process; whoever has
// handed over the transfer keeps it mapped, and does not touch it as other than memory that others
// may write.
unsafe impl Send for Transfer {}
// SAFETY: as above.
unsafe impl Send for Answer {}

enum Message {
    Transfer(Transfer),
    End,
}

/// A limb's thread, which can be handed transfers.
#[derive(Debug)]
pub struct Executor {
    inbox: Sender<Message>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Executor {
    /// Starts it.
    ///
    /// # Errors
    /// What the system says.
    pub fn start(limb: &Limb, paths: Arc<Paths>) -> io::Result<Self> {
        let (inbox, receiver) = mailbox::new(ROOM)?;
        let thread = limb.spawn(format!("limb {}", limb.node()), move || {
            // What works without is slower, no more.
            let _ = farlane_worker::timing::set_timer_slack();
            let _ = timeslice::request(SLICE);
            match PathRing::new(Arc::clone(&paths), &[receiver.fd()]) {
                Ok(ring) => Limbs::new(paths, receiver, ring).run(),
                Err(e) => log::error!("A limb cannot be served: {e}"),
            }
        })?;
        Ok(Self {
            inbox,
            thread: Some(thread),
        })
    }

    /// Hands over a transfer; comes back where there is no room, or nobody.
    ///
    /// # Errors
    /// The transfer.
    ///
    /// # Safety
    /// The memory that the vectors name is valid until the answer has been taken, and others may
    /// write it meanwhile.
    pub unsafe fn hand(&self, transfer: Transfer) -> Result<(), Transfer> {
        let sent = self.inbox.send(Message::Transfer(transfer));
        match sent.map_err(Refused::into_inner) {
            Err(Message::Transfer(transfer)) => Err(transfer),
            Ok(()) | Err(Message::End) => Ok(()),
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let mut end = self.inbox.send(Message::End);
        while let Err(Refused::Full(message)) = end {
            std::thread::yield_now();
            end = self.inbox.send(message);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A transfer under way.
struct Running {
    transfer: Transfer,
    copy: Option<Bounce>,
    /// The vector of the copy.
    own: [libc::iovec; 1],
}

/// The thread's side.
struct Limbs {
    paths: Arc<Paths>,
    inbox: Receiver<Message>,
    ring: PathRing,
    idle: Idle,
    running: Vec<Option<Box<Running>>>,
    free: Vec<usize>,
    ending: bool,
}

impl Limbs {
    fn new(paths: Arc<Paths>, inbox: Receiver<Message>, ring: PathRing) -> Self {
        Self {
            paths,
            inbox,
            ring,
            idle: Idle::new(true),
            running: Vec::new(),
            free: Vec::new(),
            ending: false,
        }
    }

    fn run(mut self) {
        loop {
            let mut worked = self.take();
            if let Err(e) = self.ring.submit() {
                log::error!("A limb's ring failed: {e}");
                std::thread::sleep(PAUSE);
            }
            worked |= self.reap();
            if self.ending && self.free.len() == self.running.len() {
                return;
            }
            if worked {
                self.idle.worked();
            } else if self.idle.idle() != Rest::Look {
                self.sleep();
            }
        }
    }

    fn sleep(&mut self) {
        if self.inbox.announce()
            && let Err(e) = self.ring.wait(None)
        {
            log::error!("A limb's ring failed: {e}");
            std::thread::sleep(PAUSE);
        }
        self.inbox.awake();
    }

    fn take(&mut self) -> bool {
        let mut worked = false;
        while let Some(message) = self.inbox.take() {
            worked = true;
            match message {
                Message::Transfer(transfer) => self.begin(transfer),
                Message::End => self.ending = true,
            }
        }
        worked
    }

    fn begin(&mut self, transfer: Transfer) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.running.push(None);
            self.running.len() - 1
        });
        let mut running = Box::new(Running {
            transfer,
            copy: None,
            own: [libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            }],
        });
        let begun = self.submit(place, &mut running);
        // The kernel knows where it is.
        if let Some(slot) = self.running.get_mut(place) {
            *slot = Some(running);
        }
        match begun {
            Ok(None) => (),
            Ok(Some(moved)) => self.ended(place, i32::try_from(moved).unwrap_or(i32::MAX)),
            Err(e) => self.ended(place, -e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    /// Begins a transfer. Returns the bytes moved where it is over already.
    fn submit(&mut self, place: usize, running: &mut Running) -> io::Result<Option<usize>> {
        let Running {
            transfer,
            copy,
            own,
        } = running;
        if transfer.copies {
            let bytes = transfer
                .vectors
                .iter()
                .fold(0_usize, |sum, v| sum.saturating_add(v.iov_len));
            let mut bounce = Bounce::new(bytes.min(COPY_BYTES));
            if transfer.write.is_some() {
                // SAFETY: whoever has handed over the transfer keeps the memory mapped; the copy is
                // ours.
                unsafe { crate::worker::data::copy(&transfer.vectors, &mut bounce, false) };
            }
            own[0] = libc::iovec {
                iov_base: bounce.as_mut_ptr().cast(),
                iov_len: bounce.len(),
            };
            *copy = Some(bounce);
        }
        let vectors = if transfer.copies {
            &own[..]
        } else {
            &transfer.vectors
        };
        if self.paths.in_memory() {
            let storage = self.ring.storage(transfer.path);
            let file = &storage.ok_or(io::ErrorKind::NotFound)?.file;
            // SAFETY: as above.
            let moved = unsafe { transfer_some(file, transfer.write, vectors, transfer.offset) };
            return moved.map(Some);
        }
        let file = self.ring.file(transfer.path)?;
        // SAFETY: as above, and what is running keeps the vectors and the copy where they are until
        // it has ended.
        unsafe {
            self.ring
                .transfer(file, transfer.write, vectors, transfer.offset, place)
        }?;
        Ok(None)
    }

    fn reap(&mut self) -> bool {
        let mut worked = false;
        while let Some(event) = self.ring.take_event() {
            if let Event::Done { slot, result } = event {
                worked = true;
                self.ended(slot, result);
            }
        }
        worked
    }

    fn ended(&mut self, place: usize, result: i32) {
        let Some(running) = self.running.get_mut(place).and_then(Option::take) else {
            return;
        };
        self.free.push(place);
        let Running { transfer, copy, .. } = *running;
        if transfer.write.is_none()
            && let Some(mut copy) = copy
        {
            let moved = usize::try_from(result).unwrap_or(0).min(copy.len());
            // SAFETY: whoever has handed over the transfer keeps the memory mapped, and has found
            // it writable; the copy is ours.
            unsafe { crate::worker::data::copy(&transfer.vectors, &mut copy[..moved], true) };
        }
        let mut sent = transfer.answer.send(Answer {
            slot: transfer.slot,
            result,
            vectors: transfer.vectors,
        });
        // A worker hands over no more than what its mailbox has room for.
        while let Err(Refused::Full(answer)) = sent {
            std::thread::yield_now();
            sent = transfer.answer.send(answer);
        }
    }
}
