//! A queue in use: a thread that takes requests, has the ring move their bytes, and completes them.
//!
//! A turn takes what has ended, takes a bounded number of new requests, tells the kernel of the
//! transfers, and shows the driver all that has ended in one batch, of which it is told at most
//! once. While there is work, the driver is asked not to tell of new requests.

mod data;
mod requests;
mod steps;

use crate::bits::Status;
use crate::counters::count;
use crate::disk::Disk;
use crate::request::{HEADER_BYTES, Request as Parsed, parse, parse_ranges};
use farlane_daemon::warn_limited;
use farlane_file_io::idle::{Idle, Rest};
use farlane_file_io::ring::{Event, Ring};
use farlane_vhost::call::Call;
use farlane_vhost::chain::{Chain, ChainError};
use farlane_vhost::inflight::QueueInflight;
use farlane_vhost::segment::{Segment, take_front, take_last_byte, total};
use farlane_vhost::session::Setup;
use farlane_vhost::vring::{Layout, Progress, RingError, Rings};
use farlane_zero_copy::tokens::Direction;
use farlane_zero_copy::{AddressSpace, AddressSpaceError, View, chain, eventfd, timeslice};
use requests::{Request, Requests, StatusByte, Work};
use rustix::event::EventfdFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use steps::Step;
use thiserror::Error;

/// Most requests that are taken in one turn.
const AT_ONCE: usize = 64;
/// Turns with work after which memory is looked at anew: whoever changes it waits for as long.
const TURNS_WITH_VIEW: u32 = 64;
/// Pause after the ring has failed.
const PAUSE: Duration = Duration::from_millis(10);
/// How often a queue is looked at whose driver never tells of requests.
const LOOK: Duration = Duration::from_millis(1);
/// A worker shares its CPU in slices as short as this.
const SLICE: Duration = Duration::from_micros(100);

/// A worker that runs.
#[derive(Debug)]
pub struct Worker {
    stopping: Arc<AtomicBool>,
    wake: OwnedFd,
    thread: JoinHandle<u16>,
}

impl Worker {
    /// Starts to serve a queue.
    ///
    /// # Errors
    /// What the system says.
    pub fn start(setup: Setup, disk: Arc<Disk>, writeback: Arc<AtomicBool>) -> io::Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags)?;
        let thread = std::thread::Builder::new()
            .name(format!("queue {}", setup.index))
            .spawn({
                let stopping = Arc::clone(&stopping);
                let wake = wake.try_clone()?;
                move || work(setup, disk, writeback, stopping, &wake)
            })?;
        Ok(Self {
            stopping,
            wake,
            thread,
        })
    }

    /// Takes no further request, waits for those under way, and returns the running number of the
    /// first buffer that was not taken. Nothing touches the queue or its memory then.
    #[must_use]
    pub fn stop(self) -> u16 {
        self.stopping.store(true, Ordering::Release);
        eventfd::signal(self.wake.as_fd());
        self.thread.join().unwrap_or_else(|_| {
            log::error!("A queue's worker has panicked");
            0
        })
    }
}

fn work(
    setup: Setup,
    disk: Arc<Disk>,
    writeback: Arc<AtomicBool>,
    stopping: Arc<AtomicBool>,
    wake: &OwnedFd,
) -> u16 {
    // Naps are meant as they are said, and a woken worker is not to wait for the end of others'
    // time slices. What works without is slower, no more.
    let _ = farlane_file_io::timing::set_timer_slack();
    if let Err(e) = timeslice::request(SLICE) {
        log::debug!("No short time slices: {e}");
    }
    let next_available = setup.next_available;
    match Engine::new(setup, disk, writeback, stopping, wake) {
        Ok(mut engine) => engine.run(),
        Err(e) => {
            log::error!("A queue cannot be served: {e}");
            next_available
        }
    }
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
    #[error("A request of {readable} bytes to read and {writable} to write")]
    Crippled { readable: u64, writable: u64 },
    #[error("The queue's ring failed")]
    Io(#[from] io::Error),
}

/// The worker's side of a queue.
struct Engine {
    index: u16,
    disk: Arc<Disk>,
    space: Arc<AddressSpace>,
    layout: Layout,
    call: Arc<Call>,
    error: Arc<Call>,
    writeback: Arc<AtomicBool>,
    stopping: Arc<AtomicBool>,
    inflight: Option<QueueInflight>,
    ring: Ring,
    idle: Idle,
    progress: Progress,
    /// The queue in memory; not kept over a wait. Requests keep what they began with.
    rings: Option<Rc<Rings>>,
    turns_with_view: u32,
    requests: Requests,
    /// Heads that a predecessor has left.
    resubmit: VecDeque<u16>,
    /// Requests that wait for room for a copy, and how many have one.
    waiting: VecDeque<usize>,
    copying: usize,
    /// Requests that have ended and are not in the used ring: first descriptor, bytes written.
    ended: Vec<(u16, u32)>,
    batch: Vec<u16>,
    chain: Chain,
    broken: bool,
    /// How often a queue is looked at whose driver never tells.
    look: Option<Duration>,
}

impl Engine {
    fn new(
        setup: Setup,
        disk: Arc<Disk>,
        writeback: Arc<AtomicBool>,
        stopping: Arc<AtomicBool>,
        wake: &OwnedFd,
    ) -> io::Result<Self> {
        let kicks: Vec<_> = setup
            .kick
            .iter()
            .chain([wake])
            .map(|fd| fd.as_fd())
            .collect();
        let ring = Ring::new(&[disk.file().as_raw_fd()], &kicks)?;
        Ok(Self {
            ring,
            idle: Idle::new(true),
            progress: Progress::new(setup.event_index, setup.next_available, 0),
            index: setup.index,
            disk,
            space: setup.space,
            layout: setup.layout,
            call: setup.call,
            error: setup.error,
            writeback,
            stopping,
            inflight: setup.inflight,
            rings: None,
            turns_with_view: 0,
            requests: Requests::default(),
            resubmit: VecDeque::new(),
            waiting: VecDeque::new(),
            copying: 0,
            ended: Vec::new(),
            batch: Vec::new(),
            chain: Chain::default(),
            broken: false,
            look: setup.kick.is_none().then_some(LOOK),
        })
    }

    /// Works until it is told to stop. Nothing is under way then.
    fn run(&mut self) -> u16 {
        self.work();
        if let Some(inflight) = self.inflight.as_mut().filter(|_| self.broken) {
            // A queue that is stopped has nothing under way. The driver resets it, or finds it as it
            // was: from its first request on that was not completed.
            inflight.forget();
        }
        self.progress.next_available
    }

    fn work(&mut self) {
        if let Err(e) = self.begin() {
            self.breaks(&e);
        }
        loop {
            let stopping = self.stopping.load(Ordering::Acquire);
            let result = self.turn(stopping).and_then(|worked| {
                if stopping && self.requests.is_empty() && self.ended.is_empty() {
                    return Ok(true);
                }
                if worked {
                    self.idle.worked();
                } else {
                    self.rest(stopping)?;
                }
                Ok(false)
            });
            match result {
                Ok(true) => return,
                Ok(false) => (),
                Err(e) => {
                    self.breaks(&e);
                    if self.requests.is_empty() && stopping {
                        return;
                    }
                    // Whatever it was, it is not to be met again at full speed.
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Finds out where the queue is, and what a predecessor has left.
    fn begin(&mut self) -> Result<(), Broken> {
        let rings = self.rings()?;
        let used = rings.used_index();
        let mut next_available = self.progress.next_available;
        if let Some(inflight) = &mut self.inflight {
            let left = inflight.recover(used);
            // Whatever was taken is either used or under way, so this is where the predecessor was;
            // the front-end of a backend that was killed does not know.
            let count = u16::try_from(left.len()).unwrap_or(0);
            next_available = used.wrapping_add(count);
            if count > 0 {
                log::info!(
                    "Disk {}, queue {}: goes on with {count} requests",
                    self.disk.serial(),
                    self.index
                );
                crate::counters::count(&self.disk.counters().resubmitted, count.into());
            }
            self.resubmit = left.into();
        }
        self.progress = Progress::new(self.progress.event_index, next_available, used);
        self.progress.will_look(&rings);
        Ok(())
    }

    /// No further request is taken.
    fn breaks(&mut self, why: &Broken) {
        if !std::mem::replace(&mut self.broken, true) {
            let limit = self.disk.limit();
            let (serial, index) = (self.disk.serial(), self.index);
            warn_limited!(limit, "Disk {serial}, queue {index}: {}", chain(why));
            self.error.signal();
        }
        // They will not become visible any more, where that is what failed.
        self.ended.clear();
    }

    /// The queue in memory as it is now.
    fn rings(&mut self) -> Result<Rc<Rings>, RingError> {
        if let Some(rings) = &self.rings {
            return Ok(Rc::clone(rings));
        }
        let rings = Rc::new(Rings::map(self.space.view(), &self.layout)?);
        self.turns_with_view = 0;
        self.rings = Some(Rc::clone(&rings));
        Ok(rings)
    }

    /// One turn. Returns whether there was anything to do.
    fn turn(&mut self, stopping: bool) -> Result<bool, Broken> {
        let mut worked = self.reap()?;
        if !stopping && !self.broken {
            worked |= self.take()?;
        }
        self.ring.submit()?;
        worked |= self.reap()?;
        worked |= self.show()?;
        if worked {
            self.turns_with_view += 1;
            if self.turns_with_view >= TURNS_WITH_VIEW {
                self.rings = None;
            }
        }
        Ok(worked)
    }

    /// Takes what the ring has done.
    fn reap(&mut self) -> Result<bool, Broken> {
        let mut worked = false;
        while let Some(event) = self.ring.take_event() {
            match event {
                Event::Kick => count(&self.disk.counters().kicks, 1),
                Event::Done { slot, result } => {
                    worked = true;
                    if let Some(mut request) = self.requests.take(slot) {
                        let step = self.stepped(slot, &mut request, result);
                        self.after(slot, request, step);
                    }
                }
            }
        }
        Ok(worked)
    }

    /// Takes new requests.
    fn take(&mut self) -> Result<bool, Broken> {
        let rings = self.rings()?;
        let mut worked = false;
        for _ in 0..AT_ONCE {
            // A driver that reuses descriptors under way has more requests than descriptors.
            if self.requests.len() + self.ended.len() >= usize::from(rings.size()) {
                break;
            }
            let head = match self.resubmit.pop_front() {
                Some(head) => head,
                None => match self.progress.take(&rings)? {
                    None => break,
                    Some(head) => {
                        if let Some(inflight) = &mut self.inflight {
                            inflight.begin(head);
                        }
                        head
                    }
                },
            };
            worked = true;
            let mut chain = std::mem::take(&mut self.chain);
            let result = self.start(&rings, head, &mut chain);
            self.chain = chain;
            result?;
        }
        Ok(worked)
    }

    fn start(&mut self, rings: &Rc<Rings>, head: u16, chain: &mut Chain) -> Result<(), Broken> {
        chain.follow(rings, head)?;
        let view = rings.view();
        let Chain { readable, writable } = chain;
        let crippled = Broken::Crippled {
            readable: total(readable),
            writable: total(writable),
        };
        let Some(status) = take_last_byte(writable) else {
            return Err(crippled);
        };
        let mut found = None;
        view.resolve(status, 1, true, |base, _| found = Some(base))?;
        let Some(status) = found else {
            return Err(crippled);
        };
        // SAFETY: `resolve` has found it to be mapped and writable as long as the view, which the
        // request keeps.
        let status = unsafe { StatusByte::new(status) };
        let Some(header) = read_front(view, readable)? else {
            return Err(crippled);
        };
        let limits = self.disk.limits();
        let parsed = parse(&header, total(readable), total(writable), limits);
        let parsed = match parsed {
            Ok(parsed) => parsed,
            Err(e) => {
                let answer = match e {
                    crate::request::RequestError::Unknown(_) => Status::Unsupp,
                    _ => Status::IoErr,
                };
                log::debug!("Disk {}: {e}", self.disk.serial());
                count(&self.disk.counters().errors, 1);
                self.answer(head, status, answer, 0);
                return Ok(());
            }
        };
        let work = match parsed {
            Parsed::GetId => {
                let written = self.tell_id(view, writable);
                let answer = if written > 0 {
                    Status::Ok
                } else {
                    Status::IoErr
                };
                self.answer(head, status, answer, written);
                return Ok(());
            }
            Parsed::Read(extent) => Work::Read(extent),
            Parsed::Write(extent) => Work::Write(extent),
            Parsed::Flush => Work::Flush,
            Parsed::Discard | Parsed::WriteZeroes => {
                let mut bytes = vec![0; usize::try_from(total(readable)).unwrap_or(0)];
                read_all(view, readable, &mut bytes)?;
                match parse_ranges(parsed, &bytes, limits) {
                    Ok(ranges) if parsed == Parsed::Discard => Work::Discard(ranges),
                    Ok(ranges) => Work::Zero(ranges),
                    Err(e) => {
                        log::debug!("Disk {}: {e}", self.disk.serial());
                        let answer = match e {
                            // 5.2.6.2
                            crate::request::RequestError::Flags(_) => Status::Unsupp,
                            _ => Status::IoErr,
                        };
                        count(&self.disk.counters().errors, 1);
                        self.answer(head, status, answer, 0);
                        return Ok(());
                    }
                }
            }
        };
        let mut request = Box::new(Request::new(head, work, status, Rc::clone(rings)));
        if !self.locate(&mut request, chain) {
            count(&self.disk.counters().errors, 1);
            self.answer(head, status, Status::IoErr, 0);
            return Ok(());
        }
        let slot = self.requests.reserve();
        let step = self.step(slot, &mut request);
        self.after(slot, request, step);
        Ok(())
    }

    /// Finds a request's data. Returns whether it can be moved.
    fn locate(&mut self, request: &mut Request, chain: &Chain) -> bool {
        let (extent, direction, segments) = match &request.work {
            Work::Read(extent) => (extent, Direction::IntoDevice, &chain.writable),
            Work::Write(extent) => (extent, Direction::OutOfDevice, &chain.readable),
            _ => return true,
        };
        let alignment = self.disk.alignment();
        if let Some(alignment) = alignment
            && (extent.offset | extent.bytes) & (alignment.offset - 1) != 0
        {
            log::debug!("Disk {}: less than a block", self.disk.serial());
            return false;
        }
        if extent.bytes == 0 {
            return true;
        }
        let mut vectors = self.requests.vectors();
        let view = request.rings.view();
        let found = data::locate(&self.disk, view, direction, segments, &mut vectors);
        request.copies = !data::can_be_transferred(&vectors, alignment);
        request.vectors = vectors;
        match found {
            Ok(opened) => {
                request.opened = opened;
                true
            }
            Err(data::Refused) => false,
        }
    }

    /// Answers GET_ID. Returns the bytes written.
    fn tell_id(&self, view: &View, writable: &mut Vec<Segment>) -> u32 {
        let id = self.disk.id();
        let mut left: &[u8] = &id;
        let mut failed = false;
        take_front(writable, id.len() as u64, |part| {
            let (bytes, after) =
                left.split_at(usize::try_from(part.bytes).unwrap_or(0).min(left.len()));
            failed |= view.write(part.address, bytes).is_err();
            left = after;
        });
        if failed { 0 } else { 20 }
    }

    /// Goes on with a request after a step.
    fn after(&mut self, slot: usize, mut request: Box<Request>, step: io::Result<Step>) {
        let status = match step {
            Ok(Step::Pending | Step::Waiting) => {
                self.requests.put(slot, request);
                return;
            }
            Ok(Step::Done(status)) => status,
            Err(e) => self.failed(&e),
        };
        self.finish(slot, &mut request, status);
        self.requests
            .give_vectors(std::mem::take(&mut request.vectors));
        drop(request);
        // Whoever waited for room has it now.
        while self.copying < steps::MAX_COPIES
            && let Some(next) = self.waiting.pop_front()
        {
            if let Some(mut request) = self.requests.take(next) {
                let step = self.step(next, &mut request);
                self.after(next, request, step);
            }
        }
    }

    /// Ends a request.
    fn finish(&mut self, slot: usize, request: &mut Request, status: Status) {
        self.requests.release(slot);
        if request.bounce.take().is_some() {
            self.copying -= 1;
        }
        let counters = self.disk.counters();
        let mut written = 0;
        if status == Status::Ok {
            let tunnelled = match request.opened.take() {
                Some(opened) => {
                    let bytes = opened.tunnelled_bytes();
                    opened.landed();
                    bytes
                }
                None => 0,
            };
            match &request.work {
                Work::Read(extent) => {
                    count(&counters.reads, 1);
                    count(&counters.bytes_read, extent.bytes);
                    count(&counters.bytes_tunnelled_in, tunnelled);
                    written = u32::try_from(extent.bytes).unwrap_or(u32::MAX - 1);
                }
                Work::Write(extent) => {
                    count(&counters.writes, 1);
                    count(&counters.bytes_written, extent.bytes);
                    count(&counters.bytes_tunnelled_out, tunnelled);
                }
                Work::Flush => count(&counters.flushes, 1),
                Work::Discard(_) => count(&counters.discards, 1),
                Work::Zero(_) => count(&counters.write_zeroes, 1),
            }
        } else {
            count(&counters.errors, 1);
        }
        self.answer(request.head, request.status, status, written);
    }

    /// Tells the guest how a request has ended; it sees it when the batch is [shown](Self::show).
    fn answer(&mut self, head: u16, byte: StatusByte, status: Status, written: u32) {
        byte.set(status);
        self.ended.push((head, written + 1));
    }

    /// An operation has failed.
    fn failed(&self, error: &io::Error) -> Status {
        let serial = self.disk.serial();
        warn_limited!(self.disk.limit(), "Disk {serial}: {error}");
        Status::IoErr
    }

    /// Shows the driver what has ended.
    fn show(&mut self) -> Result<bool, Broken> {
        if self.ended.is_empty() {
            return Ok(false);
        }
        let rings = self.rings()?;
        self.batch.clear();
        for (head, written) in self.ended.drain(..) {
            self.progress.put(&rings, head, written);
            if let Some(inflight) = &mut self.inflight {
                inflight.prepare(head);
                self.batch.push(head);
            }
        }
        self.progress.publish(&rings);
        if let Some(inflight) = &mut self.inflight {
            inflight.end(&self.batch, self.progress.next_used);
        }
        if self.progress.must_tell(&rings) && self.call.signal() {
            count(&self.disk.counters().interrupts, 1);
        }
        Ok(true)
    }

    /// There was nothing to do.
    fn rest(&mut self, stopping: bool) -> Result<(), Broken> {
        match self.idle.idle() {
            Rest::Look => Ok(()),
            // A driver that has to tell of a request writes an eventfd: that costs less than looking
            // again and again, and wakes at once.
            Rest::Nap(_) | Rest::Sleep => self.sleep(stopping),
        }
    }

    /// Waits for a driver that tells of a request, for the ring, or to be told to stop.
    fn sleep(&mut self, stopping: bool) -> Result<(), Broken> {
        let takes = !stopping && !self.broken;
        if takes {
            let rings = self.rings()?;
            self.progress.ask_to_be_told(&rings);
            let has_room = self.requests.len() < usize::from(rings.size());
            if has_room && self.progress.has_more(&rings) {
                self.progress.will_look(&rings);
                return Ok(());
            }
        }
        self.rings = None;
        // A driver that never tells is looked after.
        self.ring.wait(self.look.filter(|_| takes))?;
        if takes {
            let rings = self.rings()?;
            self.progress.will_look(&rings);
        }
        Ok(())
    }
}

/// Takes a request's header from the front of what it has to be read.
fn read_front(
    view: &View,
    readable: &mut Vec<Segment>,
) -> Result<Option<[u8; HEADER_BYTES]>, AddressSpaceError> {
    let mut header = [0; HEADER_BYTES];
    let mut at = 0;
    let mut result = Ok(());
    let taken = take_front(readable, HEADER_BYTES as u64, |part| {
        let end = at + usize::try_from(part.bytes).unwrap_or(0);
        if let Some(bytes) = header.get_mut(at..end)
            && let Err(e) = view.read(part.address, bytes)
        {
            result = Err(e);
        }
        at = end;
    });
    result?;
    Ok(taken.then_some(header))
}

/// Reads all segments, which have as many bytes.
fn read_all(view: &View, segments: &[Segment], bytes: &mut [u8]) -> Result<(), AddressSpaceError> {
    let mut rest = bytes;
    for segment in segments {
        let length = usize::try_from(segment.bytes).unwrap_or(usize::MAX);
        let (part, after) = rest.split_at_mut(length.min(rest.len()));
        view.read(segment.address, part)?;
        rest = after;
    }
    Ok(())
}
