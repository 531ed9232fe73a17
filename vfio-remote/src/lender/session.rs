//! One session at the lender: the thread that receives.
//!
//! It answers what must not wait (renewals, answers about memory, the return of a sublease),
//! watches the time of the lease, keeps the device from memory when that is over, and hands
//! everything else to the session's worker, in order. So a device that waits for memory of the
//! borrower never keeps the answer from arriving.

use super::Lender;
use super::device::Device;
use super::memory::BorrowerMemory;
use super::names::Borrower;
use super::queue::WorkQueue;
use super::sublease::Sublease;
use super::worker::Worker;
use crate::protocol::message::{
    Fence, Refusal, Reply, Request, ToBorrower, ToLender, VERSION, millis,
};
use crate::protocol::{ConnectionError, Peer, Received, Receiver, Sender};
use farlane_pci::{Function, InterruptVector, Signal};
use farlane_sys::sync::lock;
use std::sync::mpsc::{self, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// How long a borrower has to take what waits for it when its session ends, and to hang up.
const GOODBYE: Duration = Duration::from_secs(2);
/// How often the time is looked at, at least.
const TICK: Duration = Duration::from_secs(1);
/// How long a device that is stopped may take before its borrower is told so.
const STOPPING: Duration = Duration::from_millis(500);
/// How soon interrupts are tried again that a slow session did not take.
const RETRY: Duration = Duration::from_millis(5);
/// Bytes that may wait in a session before interrupts are kept back and put together.
const BACKLOG_BYTES: usize = 16 << 10;

/// Why a lease ends without the borrower's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It was not renewed.
    Expired,
    /// The device was wanted back.
    Revoked,
    /// A window through which the device reached memory shows another memory.
    WrongWindow,
}

/// A lease, for the thread that watches its time.
pub(crate) struct Tenure {
    device: Arc<Device>,
    fence: Fence,
    /// Never the last reference to it: the worker lets go of it after [`Control::set_lease`].
    function: Weak<dyn Function>,
}

impl Tenure {
    pub fn new(device: &Arc<Device>, fence: Fence, function: &Arc<dyn Function>) -> Self {
        Self {
            device: Arc::clone(device),
            fence,
            function: Arc::downgrade(function),
        }
    }

    /// Ends it, whatever the worker is waiting for: the device accesses memory no more. The worker
    /// gives it back.
    fn end(&self) {
        self.device.expire(self.fence);
        if let Some(function) = self.function.upgrade() {
            self.device.keep_from_memory(&*function);
        }
    }
}

#[derive(Default)]
struct State {
    lease: Option<Tenure>,
    /// The borrower knows of it.
    announced: bool,
    /// Under which lease the device is wanted back, and when it is taken. The lease may be still to
    /// come.
    wanted: Option<(Fence, Instant)>,
    ending: Option<Ending>,
    /// The lease that is over and whose device has not stopped yet, and when its borrower is told
    /// that next.
    stopping: Option<(Fence, Instant)>,
    /// Of another lender, at the other end.
    sublease: Option<Arc<Sublease>>,
    /// Interrupts that are to be told, each once.
    raised: Vec<(Fence, InterruptVector)>,
}

impl State {
    /// The device of a lease that is over is being stopped.
    fn begin_stopping(&mut self, fence: Fence) {
        self.stopping
            .get_or_insert_with(|| (fence, Instant::now() + STOPPING));
    }

    /// Ends the lease, if there is one.
    fn end_lease(&mut self) {
        if let Some(tenure) = &self.lease {
            tenure.end();
            let fence = tenure.fence;
            self.begin_stopping(fence);
        }
    }
}

/// What others know of a session.
pub(crate) struct Control {
    pub sender: Sender,
    pub memory: Arc<BorrowerMemory>,
    /// What waits for the worker.
    pub queue: WorkQueue,
    state: Mutex<State>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").finish_non_exhaustive()
    }
}

impl Control {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The session holds a lease, or none any more.
    pub fn set_lease(&self, lease: Option<Tenure>) {
        let mut state = self.state();
        let fence = lease.as_ref().map(|tenure| tenure.fence);
        state.wanted.take_if(|(wanted, _)| Some(*wanted) != fence);
        match std::mem::replace(&mut state.lease, lease) {
            Some(before) => state.begin_stopping(before.fence),
            None => state.stopping = None,
        }
        state.announced = false;
        state.ending = None;
        state.raised.clear();
    }

    /// The device of the lease that is over has stopped.
    pub fn has_stopped(&self) {
        self.state().stopping = None;
    }

    /// Says now and then that it has not. A borrower that hears nothing believes after a time that
    /// it has.
    fn tell_of_stopping(&self) {
        // Under the lock: nobody says before this that it has stopped.
        let mut state = self.state();
        let now = Instant::now();
        if let Some((fence, at)) = &mut state.stopping
            && *at <= now
        {
            *at = now + TICK;
            let told = self
                .sender
                .send_to_the_end(&ToBorrower::Stopping { fence: *fence });
            if let Err(e) = told {
                log::debug!("A borrower cannot be told that its device has not stopped: {e}");
            }
        }
    }

    /// Waits until `over` is dropped by the worker, which may be for as long as its device takes.
    fn wait_for_the_worker(&self, over: &mpsc::Receiver<()>) {
        while over.recv_timeout(STOPPING) == Err(RecvTimeoutError::Timeout) {
            self.tell_of_stopping();
        }
    }

    /// The session is for a sublease.
    pub fn set_sublease(&self, sublease: Arc<Sublease>) {
        self.state().sublease = Some(sublease);
    }

    fn is_for_a_sublease(&self) -> bool {
        self.state().sublease.is_some()
    }

    /// Another lender says that its device reaches this one's no more. False where the session is
    /// for no such sublease. The worker may be reading the device for it meanwhile.
    fn release(&self, fence: Fence) -> bool {
        let state = self.state();
        let sublease = state.sublease.as_ref().filter(|s| s.fence == fence);
        sublease.inspect(|sublease| sublease.release()).is_some()
    }

    /// The session has ended like that. Where it is for a sublease, and the other lender has ended
    /// it, that says something of that one.
    fn note_the_end(&self, end: &ConnectionError) {
        let state = self.state();
        match (&state.sublease, end) {
            (Some(sublease), ConnectionError::Closed) => sublease.close(),
            (Some(_), ConnectionError::Ended) | (None, _) => {}
            (Some(sublease), _) => sublease.break_off(),
        }
        if let Some(sublease) = &state.sublease {
            sublease.has_heard_all();
        }
    }

    /// All that had come by then has been heard.
    fn has_heard(&self, until: Instant) {
        if let Some(sublease) = &self.state().sublease {
            sublease.has_heard(until);
        }
    }

    /// What another lender says of its sublease is not heard any more.
    fn ignore_sublease(&self) {
        if let Some(sublease) = &self.state().sublease {
            sublease.ignore();
        }
    }

    /// Answers what does not wait for the worker. Where the session is for a sublease, what the
    /// other lender has said before it went away is still to be heard.
    fn answer(&self, id: u32, result: Result<Reply, Refusal>) -> Result<(), ConnectionError> {
        let sent = self.sender.send_first(&ToBorrower::Reply { id, result });
        match self.is_for_a_sublease() {
            true => Ok(()),
            false => sent,
        }
    }

    /// The borrower has been told of its lease.
    pub fn announce(&self) {
        let mut state = self.state();
        state.announced = state.lease.is_some();
        self.ask_back(state);
    }

    /// Asks for the device that is held under a lease, or is made ready for it, and takes it when
    /// `grace` is over.
    pub fn revoke(&self, fence: Fence, grace: Duration) {
        let mut state = self.state();
        let held = state.lease.as_ref().map(|tenure| tenure.fence);
        if held.is_some_and(|held| held != fence) {
            return;
        }
        state.wanted.take_if(|(wanted, _)| *wanted != fence);
        let at = Instant::now() + grace;
        // Who wants it sooner gets it sooner.
        let wanted = state.wanted.get_or_insert((fence, at));
        wanted.1 = wanted.1.min(at);
        self.ask_back(state);
        // The thread that watches the time has another one to watch.
        self.sender.nudge();
    }

    /// Asks a borrower that knows of its lease for a device that is wanted back.
    fn ask_back(&self, state: MutexGuard<'_, State>) {
        let Some((fence, at)) = state.wanted.filter(|_| state.announced) else {
            return;
        };
        drop(state);
        let grace = at.saturating_duration_since(Instant::now());
        let message = ToBorrower::Revoking {
            fence,
            grace_ms: millis(grace),
        };
        if let Err(e) = self.sender.send(&message, &[]) {
            log::debug!("A borrower cannot be asked to return: {e}");
            self.sender.stop();
        }
    }

    /// Nothing that the borrower has asked for is done any more, and its device accesses memory no
    /// more.
    fn end(&self) {
        self.queue.end();
        self.state().end_lease();
        // Nobody who waits for memory waits any longer.
        self.memory.close();
    }

    /// Why the worker has to end the lease.
    pub fn ending(&self) -> Option<Ending> {
        self.state().ending
    }

    /// Ends the lease if its time is over.
    fn look_at_the_time(&self) {
        let now = Instant::now();
        let mut state = self.state();
        let Some(tenure) = &state.lease else {
            return;
        };
        let until = tenure.device.until(tenure.fence);
        let ending = if until.is_none_or(|until| until <= now) {
            Ending::Expired
        } else if state.wanted.is_some_and(|(_, at)| at <= now) {
            Ending::Revoked
        } else {
            return;
        };
        if state.ending.is_none() {
            state.end_lease();
            state.ending = Some(ending);
            self.queue.look();
        }
    }

    fn next_look(&self) -> Instant {
        let now = Instant::now();
        let state = self.state();
        if !state.raised.is_empty() {
            return now + RETRY;
        }
        let lease = state.lease.as_ref();
        let told = state.stopping.map(|(_, at)| at);
        let until = lease.and_then(|tenure| tenure.device.until(tenure.fence));
        let wanted = state.wanted.map(|(_, at)| at);
        [until, wanted.filter(|_| lease.is_some()), told]
            .into_iter()
            .flatten()
            .filter(|&at| at > now)
            .fold(now + TICK, Instant::min)
    }

    fn raise(&self, fence: Fence, vector: InterruptVector) {
        let mut state = self.state();
        if !state.raised.contains(&(fence, vector)) {
            state.raised.push((fence, vector));
        }
        self.tell_raised(&mut state);
        if !state.raised.is_empty() {
            // It tries again.
            self.sender.nudge();
        }
    }

    /// Tells of interrupts, unless the session is slow: then they are put together. Waits for
    /// nobody.
    fn tell_raised(&self, state: &mut State) {
        while let Some(&(fence, vector)) = state.raised.last() {
            let message = ToBorrower::Interrupt {
                fence,
                kind: vector.kind(),
                vector: vector.number(),
            };
            match self.sender.try_send(&message, BACKLOG_BYTES) {
                Ok(true) => drop(state.raised.pop()),
                Ok(false) => return,
                Err(_) => {
                    state.raised.clear();
                    self.sender.stop();
                }
            }
        }
    }
}

/// Interrupts that are told by messages.
#[derive(Debug)]
pub(crate) struct MessageSignal {
    pub control: Weak<Control>,
    pub fence: Fence,
    pub vector: InterruptVector,
}

impl Signal for MessageSignal {
    fn raise(&self) {
        if let Some(control) = self.control.upgrade() {
            control.raise(self.fence, self.vector);
        }
    }
}

/// Serves a session until it ends.
pub(crate) fn serve(
    lender: &Arc<Lender>,
    sender: Sender,
    mut receiver: Receiver,
    borrower: Borrower,
) -> Result<(), ConnectionError> {
    let control = Arc::new(Control {
        memory: Arc::new(BorrowerMemory::new(sender.clone())),
        sender,
        queue: WorkQueue::default(),
        state: Mutex::default(),
    });
    let worker = Worker::new(Arc::clone(lender), Arc::clone(&control), borrower);
    let (works, over) = channel::<()>();
    let thread = std::thread::Builder::new()
        .name("session worker".to_owned())
        .spawn(move || {
            worker.run();
            drop(works);
        })?;
    let result = receive(&control, &mut receiver);
    control.end();
    let is_heard = hear_the_end(&control, &mut receiver, &result);
    control.wait_for_the_worker(&over);
    let _ = thread.join();
    if !is_heard {
        // The worker may have been at it.
        hear_the_end(&control, &mut receiver, &result);
    }
    // Not before: for the borrower, the end of the session says that the device has stopped. It
    // hears that behind all that waits for it.
    control.sender.linger(GOODBYE);
    control.sender.close();
    result
}

/// Hears how another lender ends the session, which has ended here like that. False where the
/// session is for no sublease.
fn hear_the_end(
    control: &Control,
    receiver: &mut Receiver,
    result: &Result<(), ConnectionError>,
) -> bool {
    if !control.is_for_a_sublease() {
        return false;
    }
    match result {
        // The other lender lets go when it hears that, and hangs up.
        Err(end) if end.is_of_this_end() => {
            control.ignore_sublease();
            control.sender.finish();
            control.note_the_end(&receiver.wait_for_end());
        }
        Err(end) => control.note_the_end(end),
        Ok(()) => {}
    }
    true
}

/// The first messages, which come until then. The borrower; nothing where it is not one to talk to.
pub(super) fn greet(
    lender: &Lender,
    sender: &Sender,
    receiver: &mut Receiver,
    until: Instant,
) -> Result<Option<Borrower>, ConnectionError> {
    let hello = receiver.receive::<ToLender>(Some(until))?;
    let Some(Received {
        message: ToLender::Hello { version, name },
        ..
    }) = hello
    else {
        return Err(ConnectionError::Stuck);
    };
    // Also to one of another version, so that it can say what is wrong.
    let welcome = ToBorrower::Welcome {
        version: VERSION,
        name: lender.name.clone(),
    };
    sender.send(&welcome, &[])?;
    if version != VERSION {
        log::warn!("A borrower speaks version {version} of the protocol, not {VERSION}");
        return Ok(None);
    }
    let peer = sender.peer();
    let borrower = lender.borrower(&peer, &name);
    if borrower.is_none() {
        let shown = match peer {
            Peer::User(user) => format!("user {user} may not call itself so"),
            _ => "its certificate is not valid for that".to_owned(),
        };
        log::warn!("A borrower says that it is {name:?}, but {shown}");
    }
    Ok(borrower)
}

fn receive(control: &Control, receiver: &mut Receiver) -> Result<(), ConnectionError> {
    // What the worker has no room for yet: a borrower that says more waits, and the time is looked
    // at all the same.
    let mut put_off = None;
    loop {
        control.look_at_the_time();
        control.tell_of_stopping();
        control.tell_raised(&mut control.state());
        if let Some(message) = put_off.take() {
            put_off = control.queue.push(message, control.next_look());
            continue;
        }
        let now = Instant::now();
        let Some(received) = receiver.receive::<ToLender>(Some(control.next_look()))? else {
            control.has_heard(now);
            continue;
        };
        match received.message {
            ToLender::Hello { .. } => return Err(ConnectionError::Unexpected("a second hello")),
            ToLender::Memory { id, result } => {
                if !control.memory.answer(id, result) {
                    return Err(ConnectionError::Unexpected("an answer to nothing"));
                }
            }
            ToLender::Request {
                id,
                request: Request::Renew { fence },
            } => {
                let result = renew(control, fence).map(|()| Reply::Done);
                control.answer(id, result)?;
            }
            ToLender::Request {
                id,
                request: Request::Return { fence },
            } if control.release(fence) => {
                control.answer(id, Ok(Reply::Done))?;
            }
            message => {
                put_off = Some(Received {
                    message,
                    descriptors: received.descriptors,
                });
            }
        }
    }
}

fn renew(control: &Control, fence: Fence) -> Result<(), Refusal> {
    let state = control.state();
    let device = match (&state.lease, &state.sublease) {
        (Some(tenure), _) if tenure.fence == fence => Arc::clone(&tenure.device),
        (_, Some(sublease)) if sublease.fence == fence => return sublease.renew(),
        _ => return Err(Refusal::Ended(fence)),
    };
    drop(state);
    device.renew(fence)
}
