//! A queue pair in use: a thread of the node that its memory lies on, which moves frames between
//! port and guest.
//!
//! A turn takes a bounded number of frames each way, shows the driver all that it used in one step,
//! and tells it at most once a queue. Without work it polls for a short while, giving way, and then
//! sleeps until a driver, the port or another worker has something.

mod buffers;
mod context;
mod control;
mod frame;
mod held;
mod homing;
mod mail;
mod pair;
mod receive;
mod sequence;
mod transmit;
mod virtqueue;

use crate::counters::count;
use crate::interface::Interface;
use crate::pairs::Side;
use crate::port::{Offloads, PortQueue};
use context::{Context, Tally};
use farlane_daemon::per_node::WorkerNode;
use farlane_daemon::warn_limited;
use farlane_sys::chain;
use farlane_vhost_user::chain::ChainError;
use farlane_vhost_user::vring::RingError;
use farlane_worker::idle::{Idle, Rest};
use farlane_worker::{policy, thread};
use farlane_zero_copy::AddressSpaceError;
use farlane_zero_copy::slices::ReadOnly;
use farlane_zero_copy::topology::Node;
use frame::MAX_FRAMES;
use homing::Homing;
use mail::{Inbox, Mail};
use receive::Receive;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use transmit::Transmit;
use virtqueue::Virtqueue;

pub use control::ControlWorker;
pub use frame::Frame;
pub use mail::Command;
pub use pair::{Pair, Worker};

/// Most frames that are moved one way in one turn.
const AT_ONCE: usize = 64;
/// Most mail that is taken in one turn: all frames that wait.
const TAKEN_AT_ONCE: usize = MAX_FRAMES;
/// Turns in which a transmit queue is emptied when it stops: as many frames as it has entries.
const LAST_TURNS: usize = 1024 / AT_ONCE;
/// How often a queue is looked at whose driver never tells.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};
/// How often frames of flows that move are looked at.
const LOOK_AT_HELD: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 300_000,
};
/// How often a port's queue is tried that has failed.
const LOOK_AT_FAILED_PORT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};
/// Pause between two ticks of the flow table, in microseconds.
const TICK_US: u64 = 1000;

/// What a driver has accepted, as far as frames show it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Framing {
    /// Bytes of the header before a frame: 12, or 10 for a legacy device without mergeable buffers.
    pub header_bytes: usize,
    /// A received frame may take several buffers.
    pub mergeable: bool,
    /// What frames of the guest may ask for.
    pub sends: Offloads,
}

/// Why a queue cannot go on.
#[derive(Debug, Error)]
enum QueueError {
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error(transparent)]
    Memory(#[from] AddressSpaceError),
    #[error("A receive buffer of {room} bytes in {runs} runs of memory")]
    Buffer { runs: usize, room: usize },
    #[error("A receive buffer is not writable")]
    ReadOnly,
}

/// The worker of a queue pair.
struct PairWorker {
    context: Context,
    inbox: Inbox,
    /// Frames of others that were taken out of the inbox in this turn.
    forwarded: VecDeque<Frame>,
    worker_node: WorkerNode,
    port: Box<dyn PortQueue>,
    receive: Option<Receive>,
    transmit: Option<Transmit>,
    idle: Idle,
    /// None where the machine has one node.
    homing: Option<Homing>,
    last_tick_us: u64,
}

impl PairWorker {
    fn new(
        context: Context,
        inbox: Inbox,
        worker_node: WorkerNode,
        port: Box<dyn PortQueue>,
    ) -> Self {
        let several_nodes = context.interface.nodes.all().len() > 1;
        Self {
            context,
            inbox,
            forwarded: VecDeque::new(),
            worker_node,
            port,
            receive: None,
            transmit: None,
            idle: Idle::new(policy::REQUESTS),
            homing: several_nodes.then(Homing::default),
            last_tick_us: 0,
        }
    }

    fn run(mut self) {
        thread::prepare();
        while self.take_mail() {
            if self.context.places.refresh()
                && let Some(receive) = &mut self.receive
            {
                receive.forget();
            }
            self.context.refresh();
            if self.turn() {
                self.idle.worked();
            } else {
                self.rest();
            }
        }
        self.inbox.close();
    }

    /// Takes what was sent. Returns whether the worker goes on.
    fn take_mail(&mut self) -> bool {
        for _ in 0..TAKEN_AT_ONCE {
            let command = match self.inbox.take() {
                None => break,
                Some(Mail::Command(command)) => command,
                Some(Mail::Frame(frame)) => {
                    self.forwarded.push_back(frame);
                    continue;
                }
            };
            match command {
                Command::Begin(Side::Receive, setup, framing) => {
                    let place = (Arc::clone(&setup.space), setup.layout, setup.event_index);
                    let mut queue = Virtqueue::new(*setup);
                    let result = queue.begin();
                    self.context.pair.place(place, queue.progress.next_used);
                    self.receive = Some(Receive::new(queue, framing));
                    self.after(Side::Receive, result);
                }
                Command::Begin(Side::Transmit, setup, framing) => {
                    let mut queue = Virtqueue::new(*setup);
                    let result = queue.begin();
                    self.transmit = Some(Transmit::new(queue, framing));
                    self.after(Side::Transmit, result);
                }
                Command::End(side, reply) => {
                    // Whoever asked may have gone.
                    let _ = reply.send(self.end(side));
                }
                Command::Leave => {
                    // There is no receive queue: what others have sent meanwhile is lost.
                    let _ = self.receive_frames();
                    return false;
                }
            }
        }
        true
    }

    /// Moves frames to the guest. Returns whether there were any.
    fn receive_frames(&mut self) -> Result<bool, QueueError> {
        let (context, mut tally) = (&self.context, Tally::default());
        let mut result = Ok(false);
        if let Some(receive) = &mut self.receive {
            if !receive.queue.broken {
                result = receive.turn(context, &mut *self.port, &mut self.forwarded, &mut tally);
            }
            if receive.queue.broken || result.is_err() {
                let waiting = receive.drain();
                waiting.for_each(|frame| context.lose(&mut tally, &frame));
            }
        }
        // Some are left only where there is no queue, or none that goes on.
        for frame in self.forwarded.drain(..) {
            context.lose(&mut tally, &frame);
        }
        tally.count(&context.interface);
        result
    }

    /// Moves frames from the guest. Returns whether there were any.
    fn transmit_frames(&mut self) -> Result<bool, QueueError> {
        let transmit = self.transmit.as_mut();
        transmit.map_or(Ok(false), |t| t.turn(&self.context, &mut *self.port))
    }

    /// Stops one side; returns where the next worker begins.
    fn end(&mut self, side: Side) -> u16 {
        match side {
            Side::Receive => {
                let (context, mut tally) = (&self.context, Tally::default());
                context.pair.set_served(false);
                let Some(mut receive) = self.receive.take() else {
                    return 0;
                };
                context.pair.displace();
                for frame in receive.drain().chain(self.forwarded.drain(..)) {
                    context.lose(&mut tally, &frame);
                }
                tally.count(&context.interface);
                context.read_consumed(context.pair.id);
                show(&context.interface, &mut receive.queue);
                receive.queue.progress.next_available
            }
            Side::Transmit => {
                // What the driver has sent before it stopped the queue goes out, as far as the port
                // has room.
                for _ in 0..LAST_TURNS {
                    if !matches!(self.transmit_frames(), Ok(true)) {
                        break;
                    }
                }
                self.transmit.take().map_or(0, |mut transmit| {
                    show(&self.context.interface, &mut transmit.queue);
                    transmit.queue.progress.next_available
                })
            }
        }
    }

    fn after(&mut self, side: Side, result: Result<(), QueueError>) {
        let Err(why) = result else {
            return;
        };
        let queue = match side {
            Side::Receive => self.receive.as_mut().map(|receive| {
                receive.forget();
                &mut receive.queue
            }),
            Side::Transmit => self.transmit.as_mut().map(|transmit| &mut transmit.queue),
        };
        if let Some(queue) = queue
            && queue.breaks()
        {
            let interface = &self.context.interface;
            count(&interface.counters.broken_queues, 1);
            let (name, index) = (&interface.name, queue.index());
            warn_limited!(
                interface.limit,
                "Interface {name}, queue {index}: {}",
                chain(&why)
            );
        }
    }

    /// Moves frames both ways. Returns whether there were any.
    fn turn(&mut self) -> bool {
        if self.context.table.is_some() || self.homing.is_some() {
            self.context.now_us = self.context.interface.now_us();
        }
        let mut worked = self.steer();
        let result = self.transmit_frames();
        worked |= matches!(result, Ok(true));
        self.after(Side::Transmit, result.map(drop));
        let result = self.receive_frames();
        worked |= matches!(result, Ok(true));
        self.after(Side::Receive, result.map(drop));
        self.go_home();
        let interface = &self.context.interface;
        if let Some(transmit) = &mut self.transmit {
            if transmit.is_to_show() {
                show(interface, &mut transmit.queue);
            }
            if worked && transmit.queue.turned() {
                transmit.queue.forget();
            }
        }
        if let Some(receive) = &mut self.receive {
            show(interface, &mut receive.queue);
            if worked {
                self.context.read_consumed(self.context.pair.id);
            }
            if receive.queue.broken || worked && receive.queue.turned() {
                receive.forget();
                receive.queue.forget();
            }
        }
        worked
    }

    /// The worker's share of what the flow table has to do. Returns whether there is more now.
    fn steer(&mut self) -> bool {
        let (interface, now_us) = (&self.context.interface, self.context.now_us);
        let Some(table) = &self.context.table else {
            return false;
        };
        if now_us.wrapping_sub(self.last_tick_us) >= TICK_US {
            self.last_tick_us = now_us;
            table.tick(now_us);
        }
        let steered = table.steer(now_us, |flow, queue| interface.port.steer(flow, queue));
        steered.unwrap_or_else(|e| {
            let name = &interface.name;
            warn_limited!(interface.limit, "Interface {name}: cannot steer: {e}");
            false
        })
    }

    /// Follows the pair's memory to another node.
    fn go_home(&mut self) {
        let Some(homing) = &mut self.homing else {
            return;
        };
        let transmitted = self
            .transmit
            .as_mut()
            .map(|transmit| transmit.moved.drain(..));
        let received = self.receive.as_mut().map(|receive| receive.moved.drain(..));
        let transmitted = transmitted.into_iter().flatten();
        for (node, bytes) in transmitted.chain(received.into_iter().flatten()) {
            homing.moved(node, bytes);
        }
        let nodes = &self.context.interface.nodes;
        if let Some(node) = homing.decide(self.worker_node.node(), self.context.now_us)
            && let Some(worker_node) = nodes.all().get(nodes.index_of(node))
        {
            worker_node.enter();
            self.worker_node = worker_node.clone();
            self.context.node = worker_node.node();
            count(&self.context.interface.counters.rehomed, 1);
        }
    }

    /// There was nothing to do.
    fn rest(&mut self) {
        let limit = match self.idle.idle() {
            Rest::Look => return,
            Rest::Nap(limit) => Some(limit),
            Rest::Sleep(limit) => limit,
        };
        if let Err((side, why)) = self.sleep(limit) {
            self.after(side, Err(why));
        }
        self.idle.woke();
    }

    /// Waits for a driver, for the port, or for another thread, or until `limit` is over.
    fn sleep(&mut self, limit: Option<Duration>) -> Result<(), (Side, QueueError)> {
        let receives = |e: RingError| (Side::Receive, e.into());
        let transmits = |e: RingError| (Side::Transmit, e.into());
        let mut wanted = PollFlags::empty();
        let mut never_tells = false;
        if let Some(transmit) = &mut self.transmit {
            show(&self.context.interface, &mut transmit.queue);
            transmit.shown();
        }
        if let Some(transmit) = self.transmit.as_mut().filter(|t| !t.queue.broken) {
            if transmit.blocked {
                wanted |= PollFlags::OUT;
            } else if transmit.queue.arm(0).map_err(transmits)? {
                return Ok(());
            }
            never_tells |= transmit.queue.kick().is_none();
        }
        if let Some(receive) = self.receive.as_mut().filter(|r| !r.queue.broken) {
            if receive.is_starved() {
                if receive.queue.arm(receive.seen()).map_err(receives)? {
                    return Ok(());
                }
                never_tells |= receive.queue.kick().is_none();
            } else if self.port.receives() {
                wanted |= PollFlags::IN;
            }
        }
        let (mut holds, mut port_failed) = (false, false);
        if let Some(receive) = &mut self.receive {
            holds = receive.holds();
            port_failed = !holds && std::mem::take(&mut receive.port_failed);
        }
        let look = if holds {
            Some(&LOOK_AT_HELD)
        } else if port_failed {
            // It would be ready for ever.
            wanted = PollFlags::empty();
            Some(&LOOK_AT_FAILED_PORT)
        } else {
            never_tells.then_some(&LOOK)
        };
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let look = look.into_iter().chain(&limit).min();
        if self.inbox.announce() {
            if let Some(transmit) = &mut self.transmit {
                transmit.queue.forget();
            }
            if let Some(receive) = &mut self.receive {
                receive.forget();
                receive.queue.forget();
            }
            self.wait(wanted, look);
        }
        self.inbox.awake();
        if let Some(transmit) = self.transmit.as_mut().filter(|t| !t.queue.broken) {
            transmit.queue.disarm().map_err(transmits)?;
        }
        if let Some(receive) = self.receive.as_mut().filter(|r| !r.queue.broken) {
            receive.queue.disarm().map_err(receives)?;
        }
        Ok(())
    }

    fn wait(&mut self, wanted: PollFlags, look: Option<&Timespec>) {
        let port = self.port.fd();
        let mut fds = Vec::with_capacity(4);
        fds.push(PollFd::from_borrowed_fd(self.inbox.fd(), PollFlags::IN));
        let queues = [
            self.transmit.as_ref().map(|t| &t.queue),
            self.receive.as_ref().map(|r| &r.queue),
        ];
        for queue in queues.into_iter().flatten() {
            if let Some(kick) = queue.kick() {
                fds.push(PollFd::from_borrowed_fd(kick, PollFlags::IN));
            }
        }
        // A port that has failed is readable for ever.
        if !wanted.is_empty() {
            fds.push(PollFd::from_borrowed_fd(port, wanted));
        }
        let _ = poll(&mut fds, look);
        for queue in queues.into_iter().flatten() {
            if queue.take_kick() {
                count(&self.context.interface.counters.kicks, 1);
            }
        }
    }
}

/// Shows the driver what was used.
fn show(interface: &Interface, queue: &mut Virtqueue) {
    if queue.broken {
        return;
    }
    match queue.show() {
        Ok(true) => count(&interface.counters.interrupts, 1),
        Ok(false) => (),
        Err(e) => {
            queue.breaks();
            warn_limited!(
                interface.limit,
                "Interface {}, queue {}: {}",
                interface.name,
                queue.index(),
                chain(&e)
            );
        }
    }
}

/// Notes where bytes lie that were moved.
fn note(moved: &mut Vec<(Node, u64)>, node: Node, bytes: u64) {
    match moved.iter_mut().find(|(other, _)| *other == node) {
        Some((_, sum)) => *sum += bytes,
        None => moved.push((node, bytes)),
    }
}

impl From<ReadOnly> for QueueError {
    fn from(_: ReadOnly) -> Self {
        Self::ReadOnly
    }
}

/// An error of a port, for the log.
fn port_failed(interface: &Interface, what: &str, error: &io::Error) {
    warn_limited!(
        interface.limit,
        "Interface {}: cannot {what} a frame: {error}",
        interface.name
    );
}
