//! The borrower's end of a link: asks the lender, keeps the lease, answers about memory.

use super::signals::Signals;
use crate::lender::is_name;
use crate::link::message::{
    Attached, Fence, MAX_DATA_BYTES, PeerKey, Refusal, Reply, Request, ToBorrower, ToLender,
    VERSION,
};
use crate::link::{Connector, LinkError, Received, Receiver, Sender};
use farlane_pci::{DmaSpace, Region};
use farlane_zero_copy::chain;
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long the lender may take to answer. A virtual machine monitor waits five seconds for us.
const PATIENCE: Duration = Duration::from_millis(4500);
/// Accesses to memory that wait to be done; a lender that asks for more waits.
const MEMORY_QUEUE: usize = 64;
/// How much longer than by its term a lease may last at a lender that has fallen silent: until it has looked at the time
/// (once a second) and stopped the device.
const STOPPING: Duration = Duration::from_secs(2);

/// Precedes the name of a lender that has not proved it: nobody can prove such a name.
const UNPROVED: &str = "unproved:";

/// Why something could not be done at the lender.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The link does not work.
    #[error("The link to the lender does not work")]
    Link(#[from] LinkError),
    /// The lender speaks another version of the protocol.
    #[error("The lender speaks version {0} of the protocol, not {VERSION}")]
    Version(u32),
    /// It refuses.
    #[error("The lender refuses: {0}")]
    Refused(#[from] Refusal),
    /// It says something that is no answer to what was asked.
    #[error("The lender's answer makes no sense")]
    Nonsense,
    /// The link has ended, or the lender does not answer.
    #[error("The lender is gone")]
    Lost,
    /// A lender fell silent, and nothing says that its device has stopped.
    #[error("The device may still reach memory of the VM that had it, for up to {0:?}")]
    InDoubt(Duration),
    /// The system failed.
    #[error("The link cannot be served")]
    Io(#[from] std::io::Error),
}

/// What came under a number, and its descriptors.
type Answer = (Result<Reply, Refusal>, Vec<OwnedFd>);

#[derive(Default)]
struct Answers {
    next: u32,
    /// Requests that wait, and answers that wait to be taken.
    waiting: HashMap<u32, Option<Answer>>,
    closed: bool,
}

/// What is known of the lease.
#[derive(Clone, Copy, Debug)]
struct Tenure {
    fence: Fence,
    term: Duration,
    /// When a renewal was last answered.
    renewed: Instant,
}

/// What the threads of a session share.
struct Shared {
    sender: Sender,
    answers: Mutex<Answers>,
    changed: Condvar,
    /// None where there is no lease, and as soon as the lender has said that the device reaches nothing any more.
    tenure: Mutex<Option<Tenure>>,
    /// The lease has ended without our doing, or the link has.
    lost: AtomicBool,
    /// `on_loss` has been called, or is being called.
    told: AtomicBool,
    signals: Arc<Signals>,
    on_loss: Box<dyn Fn() + Send + Sync>,
}

impl Shared {
    fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tenure(&self) -> MutexGuard<'_, Option<Tenure>> {
        self.tenure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether what comes under `fence` belongs to the lease that the VM has.
    fn is_current(&self, fence: Fence) -> bool {
        !self.is_lost() && self.tenure().is_some_and(|tenure| tenure.fence == fence)
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// The device is gone for the VM.
    fn lose(&self) {
        if !self.lost.swap(true, Ordering::AcqRel) {
            self.signals.want_back();
        }
    }

    /// The same, and says so to whom it concerns. Not by a thread that holds locks: that may wait for other devices.
    fn lose_and_tell(&self) {
        self.lose();
        if !self.told.swap(true, Ordering::AcqRel) {
            (self.on_loss)();
        }
    }

    fn close(&self) {
        self.sender.close();
        self.answers().closed = true;
        self.changed.notify_all();
    }

    fn ask(
        &self,
        request: Request,
        descriptors: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<(Reply, Vec<OwnedFd>), SessionError> {
        let until = Instant::now() + patience;
        let id = {
            let mut answers = self.answers();
            if answers.closed {
                return Err(SessionError::Lost);
            }
            answers.next = answers.next.wrapping_add(1);
            let id = answers.next;
            answers.waiting.insert(id, None);
            id
        };
        let sent = self
            .sender
            .send(&ToLender::Request { id, request }, descriptors);
        if let Err(e) = sent {
            self.answers().waiting.remove(&id);
            self.close();
            return Err(e.into());
        }
        let mut answers = self.answers();
        loop {
            if matches!(answers.waiting.get(&id), Some(Some(_)))
                && let Some(Some((result, fds))) = answers.waiting.remove(&id)
            {
                return Ok((result?, fds));
            }
            let left = until.saturating_duration_since(Instant::now());
            if answers.closed || left.is_zero() {
                answers.waiting.remove(&id);
                drop(answers);
                // A lender that does not answer is one that is not there.
                self.close();
                return Err(SessionError::Lost);
            }
            answers = self
                .changed
                .wait_timeout(answers, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// A lender's access to memory, to be done by a thread that may wait for the monitor.
struct Access {
    id: u32,
    fence: Fence,
    address: u64,
    kind: AccessKind,
}

enum AccessKind {
    /// So many bytes.
    Read(usize),
    Write(Vec<u8>),
}

/// A link that is attached to a device.
pub(crate) struct Session {
    shared: Arc<Shared>,
    /// What was attached.
    pub attached: Attached,
    /// Its descriptors.
    pub descriptors: Vec<OwnedFd>,
    /// What the lender calls itself: for people where it has not proved that.
    pub lender: String,
    /// Whether the lender has proved that it is called so.
    pub is_proved: bool,
    /// Taken alone.
    heart: Mutex<Option<Heart>>,
}

/// Renews a lease until it is dropped.
struct Heart {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Heart {
    fn drop(&mut self) {
        *self.stop.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.rest();
        self.shared.close();
    }
}

/// Connects and says hello.
///
/// # Errors
/// See [`SessionError`].
pub(crate) fn greet(
    connector: &Connector,
    name: &str,
) -> Result<(Sender, Receiver, String), SessionError> {
    let (sender, mut receiver) = connector.connect()?;
    let hello = ToLender::Hello {
        version: VERSION,
        name: name.to_owned(),
    };
    sender.send(&hello, &[])?;
    match receiver.receive::<ToBorrower>(Some(Instant::now() + PATIENCE))? {
        Some(Received {
            message: ToBorrower::Welcome { version, name },
            ..
        }) if version == VERSION && is_name(&name) => Ok((sender, receiver, name)),
        Some(Received {
            message: ToBorrower::Welcome { version, .. },
            ..
        }) if version != VERSION => Err(SessionError::Version(version)),
        Some(_) => Err(SessionError::Nonsense),
        None => Err(SessionError::Lost),
    }
}

impl Session {
    /// Connects and attaches to `device`. `memory` is what the lender may reach by messages;
    /// `on_loss` is called once, when the lease or the link has ended without our doing.
    pub fn open(
        connector: &Connector,
        (name, device): (&str, &str),
        signals: &Arc<Signals>,
        memory: Arc<DmaSpace>,
        on_loss: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Self, SessionError> {
        let (sender, receiver, lender) = greet(connector, name)?;
        let is_proved = sender.peer().is_called(&lender);
        let shared = Arc::new(Shared {
            sender,
            answers: Mutex::default(),
            changed: Condvar::new(),
            tenure: Mutex::default(),
            lost: AtomicBool::new(false),
            told: AtomicBool::new(false),
            signals: Arc::clone(signals),
            on_loss,
        });
        let (queue, accesses) = sync_channel::<Access>(MEMORY_QUEUE);
        let for_memory = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("memory".to_owned())
            .spawn(move || {
                while let Ok(access) = accesses.recv() {
                    reach(&for_memory, &memory, access);
                }
            })?;
        let for_receiver = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("lender".to_owned())
            .spawn(move || {
                match receive(&for_receiver, receiver, &queue) {
                    // A lender stops its device before it hangs up, or it has ended, and its device with it.
                    LinkError::Closed => {
                        *for_receiver.tenure() = None;
                        log::warn!("The lender has hung up");
                    }
                    // Whoever ended it has said why.
                    LinkError::Ended => {}
                    e => log::warn!("The link has failed: {}", chain(&e)),
                }
                for_receiver.close();
                for_receiver.lose_and_tell();
            })?;
        let request = Request::Attach {
            device: device.to_owned(),
        };
        let mut session = Self {
            attached: Attached {
                description: farlane_pci::Description {
                    config: Vec::new(),
                    regions: Vec::new(),
                    interrupts: farlane_pci::Interrupts::default(),
                    name: String::new(),
                },
                bridges: Vec::new(),
                areas: Vec::new(),
            },
            shared,
            descriptors: Vec::new(),
            lender: match is_proved {
                true => lender,
                false => format!("{UNPROVED}{lender}"),
            },
            is_proved,
            heart: Mutex::default(),
        };
        let (Reply::Attached(attached), descriptors) =
            session.shared.ask(request, &[], PATIENCE)?
        else {
            return Err(SessionError::Nonsense);
        };
        if !attached.description.is_valid() {
            return Err(SessionError::Nonsense);
        }
        if !is_proved {
            log::info!(
                "The lender does not prove that it is called so: {}",
                session.lender
            );
        }
        log::info!(
            "Attached to {device} of {}: {}",
            session.lender,
            attached.description.name
        );
        session.attached = *attached;
        session.descriptors = descriptors;
        Ok(session)
    }

    /// Asks for something whose answer is that it is done.
    pub fn ask(
        &self,
        request: Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), SessionError> {
        match self.shared.ask(request, descriptors, PATIENCE)? {
            (Reply::Done, _) => Ok(()),
            _ => Err(SessionError::Nonsense),
        }
    }

    fn heart(&self) -> MutexGuard<'_, Option<Heart>> {
        self.heart.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Renews no more.
    fn rest(&self) {
        let heart = self.heart().take();
        drop(heart);
    }

    /// Takes the device, and goes on renewing the lease.
    pub fn take(&self) -> Result<(Fence, PeerKey), SessionError> {
        let (
            Reply::Taken {
                fence,
                term_ms,
                key,
            },
            _,
        ) = self.shared.ask(Request::Take, &[], PATIENCE)?
        else {
            return Err(SessionError::Nonsense);
        };
        let term = Duration::from_millis(u64::from(term_ms).max(100));
        *self.shared.tenure() = Some(Tenure {
            fence,
            term,
            renewed: Instant::now(),
        });
        *self.heart() = Some(Heart::start(Arc::clone(&self.shared), fence, term)?);
        Ok((fence, key))
    }

    /// Gives the device back. It reaches nothing any more when this has succeeded.
    pub fn give_back(&self, fence: Fence) -> Result<(), SessionError> {
        self.rest();
        self.ask(Request::Return { fence }, &[])?;
        *self.shared.tenure() = None;
        Ok(())
    }

    /// Has the device reach a range no more. A device that is not kept from it by this is given up, as by
    /// [`give_up`](Self::give_up).
    pub fn unmap(&self, fence: Fence, address: u64, length: u64) -> Result<(), SessionError> {
        let request = Request::Unmap {
            fence,
            address,
            length,
        };
        let unmapped = self.ask(request, &[]);
        if unmapped.is_err() {
            self.give_up(fence);
        }
        unmapped
    }

    /// Gives back a device that does not do what it must, and ends the link: the VM loses it. Whether it reaches memory after
    /// this, [`reaches_until`](Self::reaches_until) says.
    pub fn give_up(&self, fence: Fence) {
        if !self.is_lost()
            && let Err(e) = self.give_back(fence)
        {
            log::error!("The device cannot be given back: {}", chain(&e));
        }
        self.shared.lose();
        self.shared.close();
    }

    /// Until when the device may reach memory that it has been shown, where the lender does not say anything any more. None
    /// where it is known to reach nothing.
    pub fn reaches_until(&self) -> Option<Instant> {
        let tenure = (*self.shared.tenure())?;
        // A renewal that nobody has heard of may have reached the lender in the last moment of the term.
        Some(tenure.renewed + 2 * tenure.term + STOPPING)
    }

    /// Reads registers.
    pub fn read(
        &self,
        fence: Fence,
        region: Region,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), SessionError> {
        let mut at = offset;
        for part in data.chunks_mut(MAX_DATA_BYTES) {
            let length = u32::try_from(part.len()).unwrap_or(0);
            let request = Request::Read {
                fence,
                region,
                offset: at,
                length,
            };
            match self.shared.ask(request, &[], PATIENCE)? {
                (Reply::Data(bytes), _) if bytes.len() == part.len() => {
                    part.copy_from_slice(&bytes);
                }
                _ => return Err(SessionError::Nonsense),
            }
            at += u64::from(length);
        }
        Ok(())
    }

    /// Writes registers, and waits until it is done.
    pub fn write(
        &self,
        fence: Fence,
        region: Region,
        offset: u64,
        data: &[u8],
    ) -> Result<(), SessionError> {
        let mut at = offset;
        for part in data.chunks(MAX_DATA_BYTES) {
            let request = Request::Write {
                fence,
                region,
                offset: at,
                data: part.to_vec(),
            };
            self.ask(request, &[])?;
            at += u64::try_from(part.len()).unwrap_or(0);
        }
        Ok(())
    }

    /// Writes registers, without waiting.
    pub fn post(
        &self,
        fence: Fence,
        region: Region,
        offset: u64,
        data: &[u8],
    ) -> Result<(), SessionError> {
        let mut at = offset;
        for part in data.chunks(MAX_DATA_BYTES) {
            let message = ToLender::Post {
                fence,
                region,
                offset: at,
                data: part.to_vec(),
            };
            self.shared.sender.send(&message, &[])?;
            at += u64::try_from(part.len()).unwrap_or(0);
        }
        Ok(())
    }

    /// Whether interrupts can be eventfds of the monitor.
    pub fn carries_descriptors(&self) -> bool {
        self.shared.sender.carries_descriptors()
    }

    /// Whether the device, or the lender, is gone.
    pub fn is_lost(&self) -> bool {
        self.shared.is_lost()
    }
}

impl Heart {
    fn start(shared: Arc<Shared>, fence: Fence, term: Duration) -> Result<Self, SessionError> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let theirs = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("lease".to_owned())
            .spawn(move || beat(&shared, fence, term, &theirs))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

/// Renews three times in a term.
fn beat(shared: &Shared, fence: Fence, term: Duration, stop: &(Mutex<bool>, Condvar)) {
    let interval = term / 3;
    loop {
        let stopped = stop.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (stopped, _) = stop
            .1
            .wait_timeout_while(stopped, interval, |stopped| !*stopped)
            .unwrap_or_else(PoisonError::into_inner);
        if *stopped {
            return;
        }
        drop(stopped);
        // Without an answer the lease is over when the term is: two intervals are left of it.
        if let Err(e) = shared.ask(Request::Renew { fence }, &[], interval * 2) {
            log::warn!("The lease cannot be renewed: {}", chain(&e));
            shared.lose_and_tell();
            return;
        }
        if let Some(tenure) = &mut *shared.tenure() {
            tenure.renewed = Instant::now();
        }
    }
}

/// Takes what comes, until the link ends: why.
fn receive(shared: &Shared, mut receiver: Receiver, queue: &SyncSender<Access>) -> LinkError {
    loop {
        let Received {
            message,
            descriptors,
        } = match receiver.receive::<ToBorrower>(None) {
            Ok(Some(received)) => received,
            Ok(None) => continue,
            Err(e) => return e,
        };
        match message {
            ToBorrower::Reply { id, result } => {
                let mut answers = shared.answers();
                // One that came too late has nobody who waits for it.
                if let Some(slot) = answers.waiting.get_mut(&id) {
                    *slot = Some((result, descriptors));
                    shared.changed.notify_all();
                }
            }
            ToBorrower::Interrupt {
                fence,
                kind,
                vector,
            } => {
                if shared.is_current(fence) {
                    shared.signals.raise_from_lender(kind, vector);
                }
            }
            ToBorrower::Revoking { fence, grace_ms } => {
                if shared.is_current(fence) {
                    log::info!("The lender wants the device back within {grace_ms} ms");
                    shared.signals.want_back();
                }
            }
            ToBorrower::Ended { fence } => {
                let mut tenure = shared.tenure();
                if tenure.is_some_and(|tenure| tenure.fence == fence) {
                    *tenure = None;
                    drop(tenure);
                    log::warn!("The lender has ended lease {fence}");
                    shared.lose_and_tell();
                }
            }
            ToBorrower::MemoryRead {
                id,
                fence,
                address,
                length,
            } => {
                let length = usize::try_from(length).unwrap_or(usize::MAX);
                if length > MAX_DATA_BYTES {
                    return LinkError::Unexpected("a read that is too long");
                }
                let kind = AccessKind::Read(length);
                let _ = queue.send(Access {
                    id,
                    fence,
                    address,
                    kind,
                });
            }
            ToBorrower::MemoryWrite {
                id,
                fence,
                address,
                data,
            } => {
                let kind = AccessKind::Write(data);
                let _ = queue.send(Access {
                    id,
                    fence,
                    address,
                    kind,
                });
            }
            ToBorrower::Welcome { .. } => return LinkError::Unexpected("a second welcome"),
        }
    }
}

/// Does an access to memory, if it belongs to the lease, and answers.
fn reach(shared: &Shared, memory: &DmaSpace, access: Access) {
    let Access {
        id,
        fence,
        address,
        kind,
    } = access;
    let done = match kind {
        _ if !shared.is_current(fence) => Err(format!("lease {fence} has ended")),
        AccessKind::Read(length) => {
            let mut data = vec![0; length];
            let read = memory.read(address, &mut data);
            read.map(|()| data).map_err(|e| chain(&e))
        }
        AccessKind::Write(data) => {
            let written = memory.write(address, &data);
            written.map(|()| Vec::new()).map_err(|e| chain(&e))
        }
    };
    let result = done.map_err(|why| {
        log::debug!("The device cannot reach memory: {why}");
        Errno::FAULT.raw_os_error()
    });
    let _ = shared.sender.send(&ToLender::Memory { id, result }, &[]);
}
