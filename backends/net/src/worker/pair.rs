//! A queue pair, as its worker and the others know it.

use super::buffers::Places;
use super::context::Context;
use super::mail::{Command, Mailbox};
use super::{Framing, PairWorker};
use crate::bits::low16;
use crate::flow::FlowTable;
use crate::guest::Guest;
use crate::interface::Interface;
use crate::pairs::{PairId, Side};
use farlane_daemon::per_node::WorkerNode;
use farlane_sys::sync::lock;
use farlane_vhost_user::session::Setup;
use farlane_vhost_user::vring::{Layout, Rings};
use farlane_zero_copy::AddressSpace;
use farlane_zero_copy::placement::Placement;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

#[derive(Debug)]
pub struct Pair {
    pub id: PairId,
    /// Commands for the worker, and frames that others have for its receive queue.
    pub mail: Arc<Mailbox>,
    served: AtomicBool,
    /// Used buffers of its receive queue, ever.
    position: AtomicU64,
    /// Where the receive queue is, for whoever asks how far its driver is.
    gauge: Mutex<Option<Gauge>>,
}

/// Tells how far the driver of a receive queue is.
#[derive(Debug)]
struct Gauge {
    space: Arc<AddressSpace>,
    layout: Layout,
    event_index: bool,
    /// What is to be added to a position to have the ring's running number.
    offset: u16,
}

/// Used buffers of a ring of `size` entries that the driver has taken, at least, of which `used`
/// were shown to it.
///
/// `available` is its own index: it has as many buffers at most as the ring has entries. `event` is
/// the used buffer of which it wants to be told; zero while it wants to be told of none (as Linux
/// has it), and behind `used` by no more than there are entries where it means something.
fn taken(used: u64, offset: u16, size: u16, available: u16, event: Option<u16>) -> u64 {
    let index = low16(used).wrapping_add(offset);
    let free = available.wrapping_sub(index).min(size);
    let mut behind = size - free;
    if let Some(event) = event.filter(|event| *event != 0) {
        behind = behind.min(index.wrapping_sub(event));
    }
    used.saturating_sub(behind.into())
}

impl Pair {
    /// One that nobody serves.
    pub fn new(id: PairId) -> io::Result<Self> {
        Ok(Self {
            id,
            mail: Arc::new(Mailbox::new()?),
            served: AtomicBool::new(false),
            position: AtomicU64::new(0),
            gauge: Mutex::new(None),
        })
    }

    /// Used buffers of its receive queue, ever: those that the driver was not yet shown, too.
    pub fn position(&self) -> u64 {
        self.position.load(Ordering::Acquire)
    }

    pub(super) fn advance(&self, used: u64) {
        self.position.fetch_add(used, Ordering::AcqRel);
    }

    /// How many used buffers of its receive queue the driver has taken, at least; nothing where the
    /// queue cannot be read.
    pub fn consumed(&self) -> Option<u64> {
        let gauge = lock(&self.gauge);
        let Some(gauge) = &*gauge else {
            // Nobody waits for a queue that is not served.
            return Some(self.position());
        };
        let used = self.position();
        let rings = Rings::map(gauge.space.view(), &gauge.layout).ok()?;
        let event = gauge.event_index.then(|| rings.used_event());
        let (size, available) = (rings.size(), rings.available_index());
        Some(taken(used, gauge.offset, size, available, event))
    }

    /// The receive queue is here, and `used` is its running number.
    pub(super) fn place(&self, place: (Arc<AddressSpace>, Layout, bool), used: u16) {
        let (space, layout, event_index) = place;
        let gauge = Gauge {
            space,
            layout,
            event_index,
            offset: used.wrapping_sub(low16(self.position())),
        };
        *lock(&self.gauge) = Some(gauge);
    }

    pub(super) fn displace(&self) {
        *lock(&self.gauge) = None;
    }

    /// Whether its receive queue is served.
    pub fn is_served(&self) -> bool {
        self.served.load(Ordering::Acquire)
    }

    pub(super) fn set_served(&self, served: bool) {
        self.served.store(served, Ordering::Release);
    }
}

/// A worker that runs.
#[derive(Debug)]
pub struct Worker {
    pair: Arc<Pair>,
    thread: JoinHandle<()>,
}

impl Worker {
    /// Starts a worker for a pair, on a node.
    ///
    /// # Errors
    /// There are no more threads, or the port's queue cannot be opened.
    pub fn start(
        interface: &Arc<Interface>,
        pairs: &Arc<[Arc<Pair>]>,
        pair: &Arc<Pair>,
        worker_node: &WorkerNode,
        placement: &Arc<Placement>,
        guest: (Arc<Guest>, Option<Arc<FlowTable>>),
    ) -> io::Result<Self> {
        let port = interface.port.open(pair.id)?;
        let inbox = pair.mail.open().ok_or(io::ErrorKind::ResourceBusy)?;
        let context = Context::new(
            Arc::clone(interface),
            Arc::clone(pairs),
            Arc::clone(pair),
            guest,
            worker_node.node(),
            Places::new(Arc::clone(placement)),
        );
        let node = worker_node.clone();
        let thread = worker_node.spawn(format!("pair {}", pair.id), move || {
            PairWorker::new(context, inbox, node, port).run();
        })?;
        Ok(Self {
            pair: Arc::clone(pair),
            thread,
        })
    }

    fn tell(&self, command: Command) {
        let mut command = command;
        // It takes them at least once a turn.
        while let Err(back) = self.pair.mail.tell(command) {
            if self.thread.is_finished() {
                return;
            }
            command = back;
            std::thread::yield_now();
        }
    }

    /// Has it serve a queue. What other workers hand over from now on finds it begun: it is behind
    /// the command in the mailbox, however late the worker looks there.
    pub fn begin(&self, side: Side, setup: Setup, framing: Framing) {
        self.tell(Command::Begin(side, Box::new(setup), framing));
        if side == Side::Receive {
            self.pair.set_served(true);
        }
    }

    /// Has it stop to; returns the running number of the first buffer that was not taken. It
    /// touches neither the queue nor its memory then.
    pub fn end(&self, side: Side) -> u16 {
        let (reply, answer) = channel();
        self.tell(Command::End(side, reply));
        answer.recv().unwrap_or_else(|_| {
            log::error!("A queue pair's worker has panicked");
            0
        })
    }

    pub fn leave(self) {
        self.tell(Command::Leave);
        let _ = self.thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::super::mail::Mail;
    use super::*;
    use proptest::prelude::*;
    use std::sync::mpsc::Receiver;

    /// A driver may use a queue as soon as the front-end has its answer: a worker that has not run
    /// since is sent frames nevertheless.
    #[test]
    fn a_queue_is_served_before_its_worker_has_looked() {
        let pair = Arc::new(Pair::new(PairId::FIRST).unwrap());
        let mut inbox = pair.mail.open().unwrap();
        let (go_on, paused) = channel();
        let worker = Worker {
            pair: Arc::clone(&pair),
            thread: std::thread::spawn(move || {
                let paused: Receiver<()> = paused;
                paused.recv().unwrap();
            }),
        };
        let layout = Layout {
            size: 16,
            descriptors: 0,
            available: 0x1000,
            used: 0x2000,
        };
        let setup = || Setup::new(0, AddressSpace::new(), layout);
        worker.begin(Side::Transmit, setup(), Framing::default());
        assert!(!pair.is_served());
        worker.begin(Side::Receive, setup(), Framing::default());
        assert!(pair.is_served());
        for wanted in [Side::Transmit, Side::Receive] {
            let mail = inbox.take();
            assert!(
                matches!(mail, Some(Mail::Command(Command::Begin(side, ..))) if side == wanted)
            );
        }
        go_on.send(()).unwrap();
        worker.leave();
    }

    proptest! {
        /// A driver that takes buffers, gives some back, and says where it is, or not.
        #[test]
        fn no_more_is_said_than_the_driver_has_taken(
            taken_before in 0..1_u64 << 40,
            waiting in 0..=256_u16,
            kept in 0..=256_u16,
            offset in any::<u16>(),
            tells in any::<bool>(),
        ) {
            let size = 256_u16;
            let waiting = waiting.min(size);
            // Buffers that it has taken and not given back.
            let kept = kept.min(size - waiting);
            let used = taken_before + u64::from(waiting);
            let number = |position| low16(position).wrapping_add(offset);
            let available = number(used).wrapping_add(size - waiting - kept);
            let event = number(taken_before);
            let said = taken(used, offset, size, available, tells.then_some(event));
            prop_assert!(said <= taken_before);
            if tells && event != 0 {
                prop_assert_eq!(said, taken_before);
            } else {
                prop_assert_eq!(said, taken_before.saturating_sub(kept.into()));
            }
        }
    }
}
