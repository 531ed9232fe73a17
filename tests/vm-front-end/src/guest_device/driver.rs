//! The guest's driver: requests on the control queue, events from the event queue.

use super::Error;
use super::vmm::{WindowMapping, clone_event};
use crate::RingError;
use crate::memory::GuestMemory;
use crate::ring::{Part, Ring};
use crate::to_usize;
use farlane_abi::arena::OFF_DEAD;
use farlane_abi::config::{Config, QUEUE_CONTROL, QUEUE_DOORBELL, QUEUE_EVENT, QUEUES};
use farlane_abi::control::{
    EVENT_WAKE, Event, MAX_CONTEXTS, MAX_EXTENTS_PER_REQUEST, Reply, Request,
};
use farlane_abi::zerocopy::FromBytes as _;
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_transport::{Map, TransportError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

/// Descriptors of each queue.
pub(crate) const SIZE: u16 = 64;
/// What of the features its rings use.
const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;

/// Longest time that a request may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes for a request and for the backend's answer.
const REQUEST_BYTES: u64 = 5 * PAGE_BYTES;
const ANSWER_BYTES: u64 = PAGE_BYTES;

/// What the backend has written into a raw request's chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The bytes it says it has written.
    pub bytes: Vec<u8>,
}

/// What events wake in one context.
#[derive(Debug)]
pub(crate) struct ContextEvents {
    /// `EVENT_WAKE`.
    pub wake: OwnedFd,
    pub bound: BTreeMap<u32, OwnedFd>,
    pub header: Option<Arc<Map>>,
    pub dead: Arc<AtomicBool>,
}

/// The driver of one VM.
pub(crate) struct Driver {
    pub memory: Arc<GuestMemory>,
    pub config: Config,
    queues: Mutex<Vec<Ring>>,
    /// Held from a request to its answer.
    control: Mutex<()>,
    request: u64,
    answer: u64,
    events: u64,
    control_call: OwnedFd,
    event_call: OwnedFd,
    doorbell: OwnedFd,
    /// The vhost-user socket, watched for its end.
    socket: OwnedFd,
    quit: OwnedFd,
    window: Arc<WindowMapping>,
    contexts: Mutex<BTreeMap<u32, ContextEvents>>,
    /// Changed by each reset; the queues run while it is odd.
    dead: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn signal(fd: BorrowedFd<'_>) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

pub(crate) fn new_event() -> Result<OwnedFd, Error> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Driver {
    pub fn new(
        memory: &Arc<GuestMemory>,
        features: u64,
        config: &Config,
        socket: OwnedFd,
        window: Arc<WindowMapping>,
    ) -> Result<Arc<Self>, Error> {
        let queues = (0..QUEUES)
            .map(|_| Ring::new(memory, 0, SIZE, features & EVENT_IDX))
            .collect::<Result<Vec<_>, _>>()?;
        let queue = |index: u16| {
            let missing = || Error::Io(std::io::ErrorKind::NotFound.into());
            queues.get(usize::from(index)).ok_or_else(missing)
        };
        let driver = Arc::new(Self {
            memory: Arc::clone(memory),
            config: *config,
            control: Mutex::default(),
            request: memory.take(REQUEST_BYTES)?,
            answer: memory.take(ANSWER_BYTES)?,
            events: memory.take(PAGE_BYTES)?,
            control_call: clone_event(&queue(QUEUE_CONTROL)?.place().call)?,
            event_call: clone_event(&queue(QUEUE_EVENT)?.place().call)?,
            doorbell: clone_event(&queue(QUEUE_DOORBELL)?.place().kick)?,
            queues: Mutex::new(queues),
            socket,
            quit: new_event()?,
            window,
            contexts: Mutex::default(),
            dead: AtomicBool::new(false),
        });
        let of_thread = Arc::clone(&driver);
        std::thread::Builder::new()
            .name("guest".into())
            .spawn(move || of_thread.run())?;
        Ok(driver)
    }

    pub fn queues(&self) -> MutexGuard<'_, Vec<Ring>> {
        lock(&self.queues)
    }

    fn with_queue<T>(&self, index: u16, work: impl FnOnce(&mut Ring) -> T) -> Option<T> {
        self.queues().get_mut(usize::from(index)).map(work)
    }

    pub fn contexts(&self) -> MutexGuard<'_, BTreeMap<u32, ContextEvents>> {
        lock(&self.contexts)
    }

    pub fn window(&self) -> &WindowMapping {
        &self.window
    }

    pub fn ring_doorbell(&self) {
        signal(self.doorbell.as_fd());
    }

    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Posts buffers for events.
    pub fn post_events(&self) {
        self.with_queue(QUEUE_EVENT, |queue| {
            for head in 0..SIZE {
                queue.post(&[self.event(head)]);
            }
            queue.arm();
            let _ = queue.place().kick.write(1);
        });
    }

    /// The buffer for an event of a chain, which is the same whenever the chain is posted: what was
    /// freed last is taken first.
    fn event(&self, head: u16) -> Part {
        Part {
            offset: self.events + u64::from(head) * size_of::<Event>() as u64,
            length: u32::try_from(size_of::<Event>()).unwrap_or(0),
            writable: true,
        }
    }

    /// The device is about to be reset: all contexts are dead.
    pub fn stop(&self) {
        let contexts = std::mem::take(&mut *self.contexts());
        for context in contexts.values() {
            kill(context);
        }
    }

    /// No interrupt is taken any more.
    pub fn halt(&self) {
        signal(self.quit.as_fd());
    }

    /// The VM is switched off.
    pub fn end(&self) {
        self.die();
        signal(self.quit.as_fd());
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    fn die(&self) {
        self.dead.store(true, Ordering::Release);
        for context in self.contexts().values() {
            kill(context);
        }
    }

    /// An id for a new context, which is entered with what its events wake.
    pub fn enter(&self, events: ContextEvents) -> Result<u32, Error> {
        let mut contexts = self.contexts();
        let id = (0..MAX_CONTEXTS).find(|id| !contexts.contains_key(id));
        let id = id.ok_or(TransportError::Refused {
            what: "Opening a context",
            errno: Errno::ENOSPC,
        })?;
        contexts.insert(id, events);
        Ok(id)
    }

    /// Sends a request, in as many parts as its extents need.
    pub fn call(
        &self,
        what: &'static str,
        request: &Request,
        extents: &[(u64, u64)],
    ) -> Result<(), TransportError> {
        let most = to_usize(MAX_EXTENTS_PER_REQUEST);
        let mut chunks = extents.chunks(most);
        self.call_one(what, request, chunks.next().unwrap_or_default())?;
        for chunk in chunks {
            let more = Request {
                op: farlane_abi::control::OP_ATTACH_MORE.into(),
                context: request.context,
                region: request.region,
                ..Request::default()
            };
            self.call_one(what, &more, chunk)?;
        }
        Ok(())
    }

    /// The value that a ping is answered with.
    pub fn ping(&self) -> Result<u64, TransportError> {
        let request = Request {
            op: farlane_abi::control::OP_PING.into(),
            ..Request::default()
        };
        self.call_one("A ping", &request, &[])
    }

    fn call_one(
        &self,
        what: &'static str,
        request: &Request,
        extents: &[(u64, u64)],
    ) -> Result<u64, TransportError> {
        let count = u32::try_from(extents.len()).unwrap_or(u32::MAX);
        let request = Request {
            extents: count.into(),
            ..*request
        };
        let bytes = request.with_extents(extents);
        let reply = size_of::<Reply>();
        let answer = self.control_raw(&bytes, u32::try_from(reply).unwrap_or(0));
        let answer = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => return Err(TransportError::Gone),
            Err(Error::Transport(e)) => return Err(e),
            Err(_) => return Err(TransportError::Protocol("no answer in time")),
        };
        let reply = Reply::read_from_bytes(&answer.bytes)
            .map_err(|_| TransportError::Protocol("an answer of the wrong length"))?;
        match Errno::from_wire(reply.status.get()) {
            None => Ok(reply.value.get()),
            Some(errno) => Err(TransportError::Refused { what, errno }),
        }
    }

    pub fn control_raw(&self, request: &[u8], answer_bytes: u32) -> Result<Option<Answer>, Error> {
        let _turn = lock(&self.control);
        if self.is_dead() {
            return Ok(None);
        }
        let request = request.get(..to_usize(REQUEST_BYTES)).unwrap_or(request);
        let answer_bytes = answer_bytes.min(u32::try_from(ANSWER_BYTES).unwrap_or(u32::MAX));
        // SAFETY: the request's memory is used under the lock only, and the device has no
        // request.
        unsafe {
            self.memory
                .map()
                .write_bytes(to_usize(self.request), request)
        };
        // In two pieces, as the driver sends it.
        let head = request.len().min(size_of::<Request>());
        let readable = |offset: usize, length: usize| Part {
            offset: self.request + offset as u64,
            length: u32::try_from(length).unwrap_or(u32::MAX),
            writable: false,
        };
        let mut parts = vec![readable(0, head)];
        if request.len() > head {
            parts.push(readable(head, request.len() - head));
        }
        if answer_bytes > 0 {
            parts.push(Part {
                offset: self.answer,
                length: answer_bytes,
                writable: true,
            });
        }
        self.with_queue(QUEUE_CONTROL, |queue| {
            queue.post(&parts);
            let _ = queue.place().kick.write(1);
        });
        let deadline = Instant::now() + PATIENCE;
        loop {
            let used = self.with_queue(QUEUE_CONTROL, take).transpose()?;
            if let Some(Some((_, written))) = used {
                let mut bytes = vec![0; to_usize(written.min(answer_bytes))];
                // SAFETY: the device has given the chain back.
                unsafe {
                    self.memory
                        .map()
                        .read_bytes(to_usize(self.answer), &mut bytes)
                };
                return Ok(Some(Answer { bytes }));
            }
            if self.is_dead() {
                return Ok(None);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Io(std::io::ErrorKind::TimedOut.into()));
            }
            let timeout = Timespec::try_from(left).ok();
            let mut fds = [
                PollFd::new(&self.control_call, PollFlags::IN),
                PollFd::new(&self.socket, PollFlags::RDHUP),
            ];
            let _ = poll(&mut fds, timeout.as_ref());
            if !fds[1].revents().is_empty() {
                return Ok(None);
            }
            let _ = rustix::io::read(&self.control_call, &mut [0; 8]);
        }
    }

    /// What interrupts do in a guest.
    fn run(&self) {
        loop {
            let mut fds = [
                PollFd::new(&self.event_call, PollFlags::IN),
                PollFd::new(&self.socket, PollFlags::RDHUP),
                PollFd::new(&self.quit, PollFlags::IN),
            ];
            let _ = poll(&mut fds, None);
            let [call, socket, quit] = fds.map(|fd| !fd.revents().is_empty());
            if quit {
                return;
            }
            if call {
                let _ = rustix::io::read(&self.event_call, &mut [0; 8]);
                self.take_events();
            }
            if socket {
                self.die();
                return;
            }
        }
    }

    fn take_events(&self) {
        let mut happened = Vec::new();
        self.with_queue(QUEUE_EVENT, |queue| {
            let mut posted = false;
            while let Ok(Some((head, written))) = take(queue) {
                let part = self.event(head);
                if to_usize(written) == size_of::<Event>() {
                    // SAFETY: the device has given the buffer back.
                    happened
                        .push(unsafe { self.memory.map().read::<Event>(to_usize(part.offset)) });
                }
                queue.post(&[part]);
                posted = true;
            }
            if posted {
                let _ = queue.place().kick.write(1);
            }
        });
        let contexts = self.contexts();
        for event in happened {
            let Some(context) = contexts.get(&event.context.get()) else {
                continue;
            };
            match event.index.get() {
                EVENT_WAKE => signal(context.wake.as_fd()),
                index => {
                    if let Some(fd) = context.bound.get(&index) {
                        signal(fd.as_fd());
                    }
                }
            }
        }
    }
}

/// The next chain that was used: its head and the bytes written. When there is none, the next one
/// interrupts.
fn take(queue: &mut Ring) -> Result<Option<(u16, u32)>, RingError> {
    match queue.take_used()? {
        None if queue.arm() => queue.take_used(),
        taken => Ok(taken),
    }
}

/// Tells a context that its device is dead.
fn kill(context: &ContextEvents) {
    context.dead.store(true, Ordering::Release);
    if let Some(header) = &context.header {
        header.word(OFF_DEAD).store(1, Ordering::Release);
    }
    signal(context.wake.as_fd());
    for fd in context.bound.values() {
        signal(fd.as_fd());
    }
}
