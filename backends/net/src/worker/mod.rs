//! A queue pair in use: a thread of the node that its memory lies on, which moves frames between
//! port and guest.
//!
//! A turn takes a bounded number of frames each way, shows the driver all that it used in one step,
//! and tells it at most once a queue. Without work it polls for a short while, giving way, and then
//! sleeps until a driver, the port or another worker has something.

mod buffers;
mod control;
mod end;
mod held;
mod homing;
mod mail;
mod pair;
mod receive;
mod sequence;
mod transmit;

use crate::control::filter::Filter;
use crate::counters::count;
use crate::flow::FlowTable;
use crate::guest::Guest;
use crate::interface::Interface;
use crate::port::{Offloads, PortQueue};
use buffers::Places;
use end::End;
use farlane_daemon::limb::Limb;
use farlane_daemon::warn_limited;
use farlane_sys::chain;
use farlane_vhost_user::chain::ChainError;
use farlane_vhost_user::vring::RingError;
use farlane_worker::idle::{Idle, Rest};
use farlane_worker::timeslice;
use farlane_zero_copy::AddressSpaceError;
use farlane_zero_copy::placement::Placement;
use farlane_zero_copy::topology::Node;
use homing::Homing;
use mail::{FRAMES, Inbox, Mail};
use receive::Receive;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use transmit::Transmit;

pub use control::ControlWorker;
pub use mail::{Command, Handed, Mailbox};
pub use pair::{Pair, Side, Worker};

/// Most frames that are moved one way in one turn.
const AT_ONCE: usize = 64;
/// Most mail that is taken in one turn: all frames that wait.
const TAKEN_AT_ONCE: usize = FRAMES;
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
const LOOK_AT_AILING: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};
/// Pause between two ticks of the flow table, in microseconds.
const TICK_US: u64 = 1000;
/// A worker shares its CPU in slices as short as this.
const SLICE: Duration = Duration::from_micros(100);

/// What a driver has accepted, as far as frames show it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms {
    /// Bytes of the header before a frame: 12, or 10 for a legacy device without mergeable buffers.
    pub header_bytes: usize,
    /// A received frame may take several buffers.
    pub mergeable: bool,
    /// What frames of the guest may ask for.
    pub sends: Offloads,
}

/// Why a queue cannot go on.
#[derive(Debug, Error)]
enum Broken {
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error(transparent)]
    Memory(#[from] AddressSpaceError),
    #[error("A receive buffer of {room} bytes in {pieces} pieces")]
    Buffer { pieces: usize, room: usize },
}

/// What a worker is made of.
pub(super) struct Parts {
    pub interface: Arc<Interface>,
    pub pair: Arc<Pair>,
    pub inbox: Inbox,
    pub pairs: Arc<[Arc<Pair>]>,
    pub guest: Arc<Guest>,
    pub table: Option<Arc<FlowTable>>,
    pub limb: Limb,
    pub placement: Arc<Placement>,
    pub port: Box<dyn PortQueue>,
}

/// The worker's side of a queue pair.
struct Engine {
    interface: Arc<Interface>,
    pair: Arc<Pair>,
    inbox: Inbox,
    /// Frames of others that were taken in this turn.
    handed: VecDeque<Handed>,
    /// All of them, by number.
    pairs: Arc<[Arc<Pair>]>,
    guest: Arc<Guest>,
    /// What it has set, and as of which change.
    filter: Option<Arc<Filter>>,
    takes: Offloads,
    changes: u64,
    /// None where there is one pair only.
    table: Option<Arc<FlowTable>>,
    limb: Limb,
    placement: Arc<Placement>,
    generation: u64,
    places: Places,
    port: Box<dyn PortQueue>,
    receive: Option<Receive>,
    transmit: Option<Transmit>,
    idle: Idle,
    /// The port's queue has failed: it is left alone for a while.
    ailing: bool,
    /// None where the machine has one node.
    homing: Option<Homing>,
    /// Microseconds since it began, as of this turn.
    now_us: u64,
    last_tick_us: u64,
}

/// What a turn came to.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    worked: bool,
}

pub(super) fn work(parts: Parts) {
    // Naps are meant as they are said, and a woken worker is not to wait for the end of others'
    // time slices. What works without is slower, no more.
    let _ = farlane_worker::timing::set_timer_slack();
    if let Err(e) = timeslice::request(SLICE) {
        log::debug!("No short time slices: {e}");
    }
    let generation = parts.placement.generation();
    let several_nodes = parts.interface.limbs.all().len() > 1;
    let mut engine = Engine {
        places: Places::new(parts.placement.map()),
        interface: parts.interface,
        pair: parts.pair,
        inbox: parts.inbox,
        handed: VecDeque::new(),
        pairs: parts.pairs,
        changes: parts.guest.changes(),
        filter: parts.guest.filter(),
        takes: parts.guest.takes(),
        guest: parts.guest,
        table: parts.table,
        limb: parts.limb,
        placement: parts.placement,
        generation,
        port: parts.port,
        receive: None,
        transmit: None,
        idle: Idle::new(true),
        ailing: false,
        homing: several_nodes.then(Homing::default),
        now_us: 0,
        last_tick_us: 0,
    };
    engine.run();
    engine.inbox.close();
}

impl Engine {
    fn run(&mut self) {
        loop {
            for _ in 0..TAKEN_AT_ONCE {
                let Some(mail) = self.inbox.take() else {
                    break;
                };
                let command = match mail {
                    Mail::Command(command) => command,
                    Mail::Frame(frame) => {
                        self.handed.push_back(frame);
                        continue;
                    }
                };
                match command {
                    Command::Begin(Side::Receive, setup, terms) => {
                        let place = (Arc::clone(&setup.space), setup.layout, setup.event_index);
                        let mut end = End::new(*setup);
                        let result = end.begin();
                        self.pair.place(place, end.progress.next_used);
                        self.receive = Some(Receive::new(end, terms));
                        self.pair.set_served(true);
                        self.after(Side::Receive, result);
                    }
                    Command::Begin(Side::Transmit, setup, terms) => {
                        let mut end = End::new(*setup);
                        let result = end.begin();
                        self.transmit = Some(Transmit::new(end, terms));
                        self.after(Side::Transmit, result);
                    }
                    Command::End(side, reply) => {
                        // Whoever asked may have gone.
                        let _ = reply.send(self.end(side));
                    }
                    Command::Leave => {
                        // There is no receive queue: what others have sent meanwhile is lost.
                        let _ = self.receive_frames();
                        return;
                    }
                }
            }
            self.look_at_places();
            let changes = self.guest.changes();
            if changes != self.changes {
                self.changes = changes;
                self.filter = self.guest.filter();
                self.takes = self.guest.takes();
            }
            let turn = self.turn();
            if turn.worked {
                self.idle.worked();
            } else {
                self.rest();
            }
        }
    }

    /// Stops one side; returns where the next worker begins.
    fn end(&mut self, side: Side) -> u16 {
        match side {
            Side::Receive => {
                self.pair.set_served(false);
                let Some(mut receive) = self.receive.take() else {
                    return 0;
                };
                self.pair.displace();
                let mut lost = receive.take_all();
                lost.extend(self.handed.drain(..).map(|frame| frame.task));
                let dropped = u64::try_from(lost.len()).unwrap_or(0);
                count(&self.interface.counters.rx_dropped, dropped);
                if let Some(table) = &self.table {
                    lost.into_iter().for_each(|task| table.dropped(task));
                    table.set_consumed(self.pair.index, self.pair.position());
                }
                show(&self.interface, &mut receive.end);
                receive.end.progress.next_available
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
                    show(&self.interface, &mut transmit.end);
                    transmit.end.progress.next_available
                })
            }
        }
    }

    /// The VM's memory may have moved.
    fn look_at_places(&mut self) {
        let generation = self.placement.generation();
        if generation != self.generation {
            self.generation = generation;
            self.places = Places::new(self.placement.map());
            if let Some(receive) = &mut self.receive {
                receive.forget();
            }
        }
    }

    fn after(&mut self, side: Side, result: Result<(), Broken>) {
        let Err(why) = result else {
            return;
        };
        let end = match side {
            Side::Receive => self.receive.as_mut().map(|receive| {
                receive.forget();
                &mut receive.end
            }),
            Side::Transmit => self.transmit.as_mut().map(|transmit| &mut transmit.end),
        };
        if let Some(end) = end
            && end.breaks()
        {
            count(&self.interface.counters.broken_queues, 1);
            let (name, index) = (&self.interface.name, end.index());
            warn_limited!(
                self.interface.limit,
                "Interface {name}, queue {index}: {}",
                chain(&why)
            );
        }
    }

    fn turn(&mut self) -> Turn {
        let mut turn = Turn::default();
        if self.table.is_some() || self.homing.is_some() {
            self.now_us = self.interface.now_us();
        }
        if let Some(table) = &self.table {
            if self.now_us.wrapping_sub(self.last_tick_us) >= TICK_US {
                self.last_tick_us = self.now_us;
                table.tick(self.now_us);
            }
            let port = &self.interface.port;
            match table.steer(self.now_us, |flow, queue| port.steer(flow, queue)) {
                Ok(more) => turn.worked |= more,
                Err(e) => {
                    let name = &self.interface.name;
                    warn_limited!(self.interface.limit, "Interface {name}: cannot steer: {e}");
                }
            }
        }
        let result = self.transmit_frames();
        turn.worked |= matches!(result, Ok(true));
        self.after(Side::Transmit, result.map(drop));
        let result = self.receive_frames();
        turn.worked |= matches!(result, Ok(true));
        self.after(Side::Receive, result.map(drop));
        self.go_home();
        if let Some(transmit) = &mut self.transmit {
            if transmit.is_to_show() {
                show(&self.interface, &mut transmit.end);
            }
            if turn.worked && transmit.end.turned() {
                transmit.end.forget();
            }
        }
        if let Some(receive) = &mut self.receive {
            show(&self.interface, &mut receive.end);
            if turn.worked
                && let Some(table) = &self.table
                && let Some(position) = self.pair.consumed()
            {
                table.set_consumed(self.pair.index, position);
            }
            if turn.worked && receive.end.turned() {
                receive.forget();
                receive.end.forget();
            }
        }
        turn
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
        let limbs = &self.interface.limbs;
        if let Some(node) = homing.decide(self.limb.node(), self.now_us)
            && let Some(limb) = limbs.all().get(limbs.index_of(node))
        {
            limb.enter();
            self.limb = limb.clone();
            count(&self.interface.counters.rehomed, 1);
        }
    }

    /// There was nothing to do.
    fn rest(&mut self) {
        match self.idle.idle() {
            Rest::Look => (),
            // Drivers and ports tell: that costs less than looking again and again, and wakes at
            // once.
            Rest::Nap(_) | Rest::Sleep => match self.sleep() {
                Ok(()) => (),
                Err((side, why)) => self.after(side, Err(why)),
            },
        }
    }

    /// Waits for a driver, for the port, or for another thread.
    fn sleep(&mut self) -> Result<(), (Side, Broken)> {
        let receives = |e: RingError| (Side::Receive, e.into());
        let transmits = |e: RingError| (Side::Transmit, e.into());
        let mut wanted = PollFlags::empty();
        let mut never_tells = false;
        if let Some(transmit) = &mut self.transmit {
            show(&self.interface, &mut transmit.end);
            transmit.shown();
        }
        if let Some(transmit) = self.transmit.as_mut().filter(|t| !t.end.broken) {
            if transmit.blocked {
                wanted |= PollFlags::OUT;
            } else if transmit.end.arm(0).map_err(transmits)? {
                return Ok(());
            }
            never_tells |= transmit.end.kick().is_none();
        }
        if let Some(receive) = self.receive.as_mut().filter(|r| !r.end.broken) {
            if receive.starves() {
                if receive.end.arm(receive.seen()).map_err(receives)? {
                    return Ok(());
                }
                never_tells |= receive.end.kick().is_none();
            } else if self.port.receives() {
                wanted |= PollFlags::IN;
            }
        }
        let holds = self.receive.as_ref().is_some_and(Receive::holds);
        let look = if holds {
            Some(&LOOK_AT_HELD)
        } else if std::mem::take(&mut self.ailing) {
            // It would be ready for ever.
            wanted = PollFlags::empty();
            Some(&LOOK_AT_AILING)
        } else {
            never_tells.then_some(&LOOK)
        };
        if self.inbox.announce() {
            if let Some(transmit) = &mut self.transmit {
                transmit.end.forget();
            }
            if let Some(receive) = &mut self.receive {
                receive.forget();
                receive.end.forget();
            }
            self.wait(wanted, look);
        }
        self.inbox.awake();
        if let Some(transmit) = self.transmit.as_mut().filter(|t| !t.end.broken) {
            transmit.end.disarm().map_err(transmits)?;
        }
        if let Some(receive) = self.receive.as_mut().filter(|r| !r.end.broken) {
            receive.end.disarm().map_err(receives)?;
        }
        Ok(())
    }

    fn wait(&mut self, wanted: PollFlags, look: Option<&Timespec>) {
        let port = self.port.fd();
        let mut fds = Vec::with_capacity(4);
        fds.push(PollFd::from_borrowed_fd(self.inbox.fd(), PollFlags::IN));
        let ends = [
            self.transmit.as_ref().map(|t| &t.end),
            self.receive.as_ref().map(|r| &r.end),
        ];
        for end in ends.into_iter().flatten() {
            if let Some(kick) = end.kick() {
                fds.push(PollFd::from_borrowed_fd(kick, PollFlags::IN));
            }
        }
        // A port that has failed is readable for ever.
        if !wanted.is_empty() {
            fds.push(PollFd::from_borrowed_fd(port, wanted));
        }
        let _ = poll(&mut fds, look);
        for end in ends.into_iter().flatten() {
            if end.take_kick() {
                count(&self.interface.counters.kicks, 1);
            }
        }
    }
}

/// Shows the driver what was used.
fn show(interface: &Interface, end: &mut End) {
    if end.broken {
        return;
    }
    match end.show() {
        Ok(true) => count(&interface.counters.interrupts, 1),
        Ok(false) => (),
        Err(e) => {
            end.breaks();
            warn_limited!(
                interface.limit,
                "Interface {}, queue {}: {}",
                interface.name,
                end.index(),
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

/// A vector of guest memory, or of ours.
fn vector(base: *mut u8, bytes: usize) -> libc::iovec {
    libc::iovec {
        iov_base: base.cast(),
        iov_len: bytes,
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
