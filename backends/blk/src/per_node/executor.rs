//! The worker of a NUMA node: transfers for the queues of other nodes.

use crate::paths::ring::PathRing;
use crate::paths::{PathId, Paths};
use farlane_block::engine::memory::Started;
use farlane_block::engine::{Extent, Memory, Slot, Slots};
use farlane_block::ring::{Durable, Event};
use farlane_daemon::per_node::WorkerNode;
use farlane_worker::idle::{Idle, Rest};
use farlane_worker::mailbox::{self, Receiver, Refused, Sender};
use farlane_worker::{policy, thread};
use farlane_zero_copy::View;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Transfers that fit into a worker's mailbox.
const ROOM: usize = 1024;
/// Pause after the ring has failed.
const PAUSE: Duration = Duration::from_millis(10);

/// A transfer between a path and memory.
#[derive(Debug)]
pub struct Transfer {
    /// The path.
    pub path: PathId,
    /// Whether it is written, and how; else it is read.
    pub write: Option<Durable>,
    /// The bytes of the disk. Fewer may be moved.
    pub extent: Extent,
    /// The memory.
    pub memory: Memory<View>,
    /// Its slot at the queue's worker.
    pub slot: Slot,
    /// Where the answer goes.
    pub answer: Sender<Answer>,
}

/// Result of a transfer.
#[derive(Debug)]
pub struct Answer {
    /// Its slot at the queue's worker.
    pub slot: Slot,
    /// Bytes that were moved; negative for an error number.
    pub result: i32,
    /// Its memory, as it was.
    pub memory: Memory<View>,
}

enum Message {
    Transfer(Transfer),
    End,
}

/// A node's worker, which executes transfers.
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
    pub fn start(worker_node: &WorkerNode, paths: Arc<Paths>) -> io::Result<Self> {
        let (inbox, receiver) = mailbox::new(ROOM)?;
        let thread = worker_node.spawn(format!("worker {}", worker_node.node()), move || {
            thread::prepare();
            match PathRing::new(paths, &[receiver.fd()]) {
                Ok(ring) => NodeWorker::new(receiver, ring).run(),
                Err(e) => log::error!("A per-node worker cannot start: {e}"),
            }
        })?;
        Ok(Self {
            inbox,
            thread: Some(thread),
        })
    }

    /// Hands over a transfer.
    ///
    /// # Errors
    /// There is no room, or nobody: its memory.
    pub fn hand(&self, transfer: Transfer) -> Result<(), Memory<View>> {
        let sent = self.inbox.send(Message::Transfer(transfer));
        match sent.map_err(Refused::into_inner) {
            Err(Message::Transfer(transfer)) => Err(transfer.memory),
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

/// The thread's side.
struct NodeWorker {
    inbox: Receiver<Message>,
    ring: PathRing,
    idle: Idle,
    running: Slots<Transfer>,
    ending: bool,
}

impl NodeWorker {
    fn new(inbox: Receiver<Message>, ring: PathRing) -> Self {
        Self {
            inbox,
            ring,
            idle: Idle::new(policy::REQUESTS),
            running: Slots::default(),
            ending: false,
        }
    }

    fn run(mut self) {
        loop {
            let mut worked = self.take();
            if let Err(e) = self.ring.submit() {
                log::error!("A per-node worker's ring failed: {e}");
                std::thread::sleep(PAUSE);
            }
            worked |= self.reap();
            if self.ending && self.running.is_empty() {
                return;
            }
            if worked {
                self.idle.worked();
                continue;
            }
            let limit = match self.idle.idle() {
                Rest::Look => continue,
                Rest::Nap(limit) => Some(limit),
                Rest::Sleep(limit) => limit,
            };
            self.sleep(limit);
            self.idle.woke();
        }
    }

    fn sleep(&mut self, limit: Option<Duration>) {
        if self.inbox.announce()
            && let Err(e) = self.ring.wait(limit)
        {
            log::error!("A per-node worker's ring failed: {e}");
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
        let place = self.running.insert(transfer);
        let started = self.start(place);
        match started {
            Ok(Started::Pending) => (),
            Ok(Started::Ended(result)) => self.ended(place, result),
            Err(e) => self.ended(place, -e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    fn start(&mut self, place: Slot) -> io::Result<Started> {
        let transfer = self.running.get_mut(place);
        let transfer = transfer.ok_or(io::ErrorKind::NotFound)?;
        let access = self.ring.access(transfer.path)?;
        let Extent { offset, bytes } = transfer.extent;
        transfer
            .memory
            .start(access, transfer.write, (offset, 0, bytes), place)
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

    fn ended(&mut self, place: Slot, result: i32) {
        let Some(mut transfer) = self.running.remove(place) else {
            return;
        };
        transfer.memory.end(result, transfer.write.is_some());
        let mut sent = transfer.answer.send(Answer {
            slot: transfer.slot,
            result,
            memory: transfer.memory,
        });
        // A worker hands over no more than what its mailbox has room for.
        while let Err(Refused::Full(answer)) = sent {
            std::thread::yield_now();
            sent = transfer.answer.send(answer);
        }
    }
}
