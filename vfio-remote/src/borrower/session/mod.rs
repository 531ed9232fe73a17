//! The borrower's end of a session: asks the lender, keeps the lease, answers about memory.

mod incoming;
mod memory;
mod renewal;
mod shared;
mod subtenant;

use super::deadline::Deadline;
use super::signals::Signals;
use crate::lender::{TERMS, is_name};
use crate::protocol::message::{
    Attached, Fence, MAX_DATA_BYTES, MAX_FRAME_BYTES, PeerKey, Refusal, Reply, Request, ToBorrower,
    ToLender, VERSION,
};
use crate::protocol::{ConnectionError, Connector, Received, Receiver, Sender};
use farlane_pci::{AddressRange, DmaSpace, Region};
use farlane_sys::chain;
use farlane_sys::sync::lock;
use renewal::Renewer;
pub use shared::Doubt;
pub(crate) use shared::OnLoss;
use shared::Shared;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
pub(crate) use subtenant::{ReleaseFn, Subtenant};
use thiserror::Error;

/// Before a lender is asked again.
const PAUSE: Duration = Duration::from_millis(10);
/// Longest term of a lease that makes sense.
const LONGEST_TERM: Duration = *TERMS.end();

/// Writes that may wait at the lender: fewer messages than it keeps for its worker.
const MAX_POSTED: u32 = 64;

/// Precedes the name of a lender that has not proved it: nobody can prove such a name.
const UNPROVED: &str = "unproved:";

/// A register of the device that is held under a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegisterAddress {
    pub fence: Fence,
    pub region: Region,
    /// Offset in the region, in bytes.
    pub offset: u64,
}

impl RegisterAddress {
    pub fn new(fence: Fence, region: Region, offset: u64) -> Self {
        Self {
            fence,
            region,
            offset,
        }
    }

    /// Where the parts of an access begin that are as long as a message allows.
    fn offsets(self) -> impl Iterator<Item = u64> {
        (self.offset..).step_by(MAX_DATA_BYTES)
    }
}

/// Why something could not be done at the lender.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The connection does not work.
    #[error("The connection to the lender does not work")]
    Connection(#[from] ConnectionError),
    /// What is to be said is longer than any message. Nothing was sent.
    #[error(
        "What is said to the lender has {bytes} bytes: a message has at most {MAX_FRAME_BYTES}"
    )]
    TooLong {
        /// How long it is.
        bytes: usize,
    },
    /// The lender speaks another version of the protocol.
    #[error("The lender speaks version {0} of the protocol, not {VERSION}")]
    Version(u32),
    /// It is not the one that is asked for, or does not prove that.
    #[error("The lender does not prove that it is {0}")]
    Stranger(String),
    /// It refuses.
    #[error("The lender refuses: {0}")]
    Refused(#[from] Refusal),
    /// It says something that is no answer to what was asked.
    #[error("The lender's answer makes no sense")]
    Nonsense,
    /// The session has ended, or the lender does not answer.
    #[error("The lender is gone")]
    Lost,
    /// A lender fell silent, and nothing says that its device has stopped.
    #[error("The device may still reach memory of the VM that had it, {0}")]
    InDoubt(Doubt),
    /// The system failed.
    #[error("The session cannot be served")]
    Io(#[from] std::io::Error),
}

/// A session at a lender that is attached to a device.
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
    renewer: Mutex<Option<Renewer>>,
    /// Writes that nobody has waited for, since the last one that was waited for.
    posted: AtomicU32,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.rest();
        self.shared.retire();
        self.shared.close();
    }
}

/// Connects and says hello, until then.
///
/// # Errors
/// See [`SessionError`].
pub(crate) fn greet(
    connector: &Connector,
    name: &str,
    until: Instant,
) -> Result<(Sender, Receiver, String), SessionError> {
    let (sender, mut receiver) = connector.connect_until(until)?;
    let hello = ToLender::Hello {
        version: VERSION,
        name: name.to_owned(),
    };
    sender.send(&hello, &[])?;
    match receiver.receive::<ToBorrower>(Some(until))? {
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
    /// `on_loss` is called once, when a lease has ended. Here and in what follows, all that is
    /// asked is answered by the deadline.
    pub fn open(
        connector: &Connector,
        (name, device): (&str, &str),
        signals: &Arc<Signals>,
        memory: Arc<DmaSpace>,
        on_loss: OnLoss,
        deadline: Deadline,
    ) -> Result<Self, SessionError> {
        let until = deadline.answered_by();
        let (sender, receiver, lender) = greet(connector, name, until)?;
        let is_proved = sender.peer().is_called(&lender);
        let shared = Arc::new(Shared::new(sender, Arc::clone(signals), on_loss));
        let queue = memory::start(&shared, memory)?;
        incoming::start(&shared, receiver, queue)?;
        let request = Request::Attach {
            device: device.to_owned(),
        };
        let mut session = Self {
            attached: Attached::default(),
            shared,
            descriptors: Vec::new(),
            lender: match is_proved {
                true => lender,
                false => format!("{UNPROVED}{lender}"),
            },
            is_proved,
            renewer: Mutex::default(),
            posted: AtomicU32::new(0),
        };
        let (Reply::Attached(attached), descriptors) = session.shared.ask(request, &[], until)?
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
        deadline: Deadline,
    ) -> Result<(), SessionError> {
        match self
            .shared
            .ask(request, descriptors, deadline.answered_by())?
        {
            (Reply::Done, _) => Ok(()),
            _ => Err(SessionError::Nonsense),
        }
    }

    fn renewer(&self) -> MutexGuard<'_, Option<Renewer>> {
        lock(&self.renewer)
    }

    /// Renews no more.
    fn rest(&self) {
        let renewer = self.renewer().take();
        drop(renewer);
    }

    /// Takes the device, and goes on renewing the lease.
    pub fn take(&self, deadline: Deadline) -> Result<(Fence, PeerKey), SessionError> {
        let until = deadline.answered_by();
        let taken = self.shared.ask(Request::Take, &[], until)?;
        let (Reply::Taken { fence, key, .. }, _) = taken else {
            return Err(SessionError::Nonsense);
        };
        let term = self.shared.term().ok_or(SessionError::Nonsense)?;
        let renewer = match term <= LONGEST_TERM {
            true => Renewer::start(Arc::clone(&self.shared), fence, term),
            false => Err(SessionError::Nonsense),
        };
        *self.renewer() = Some(renewer.inspect_err(|_| self.give_up(fence, deadline))?);
        Ok((fence, key))
    }

    /// Gives the device back. It reaches nothing any more when this has succeeded.
    pub fn give_back(&self, fence: Fence, deadline: Deadline) -> Result<(), SessionError> {
        self.rest();
        self.ask(Request::Return { fence }, &[], deadline)?;
        self.shared.stopped(None);
        Ok(())
    }

    /// Has the device reach a range no more. The lender is asked once at least, and `again` as long
    /// as it can answer in time. False where the device is still at it: this is to be called again.
    /// A device that is not kept from it by this is given up, as by [`give_up`](Self::give_up).
    pub fn unmap(
        &self,
        fence: Fence,
        range: AddressRange,
        again: bool,
        deadline: Deadline,
    ) -> Result<bool, SessionError> {
        loop {
            let request = Request::Unmap {
                fence,
                address: range.address,
                length: range.length,
            };
            match self.shared.ask(request, &[], deadline.answered_by()) {
                Ok((Reply::Done, _)) => {
                    self.shared.set_busy(false);
                    return Ok(true);
                }
                Err(SessionError::Refused(Refusal::InProgress)) => {
                    self.shared.set_busy(true);
                    if !again || !deadline.has_time(PAUSE) {
                        return Ok(false);
                    }
                    std::thread::sleep(PAUSE);
                }
                failed => {
                    self.give_up(fence, deadline);
                    return Err(failed.err().unwrap_or(SessionError::Nonsense));
                }
            }
        }
    }

    /// Gives back a device that does not do what it must, and ends the session: the VM loses it.
    /// Whether it reaches memory after this, [`doubt`](Self::doubt) says.
    pub fn give_up(&self, fence: Fence, deadline: Deadline) {
        if !self.is_lost() {
            let deadline = deadline.for_the_last_word();
            match self.ask(Request::Return { fence }, &[], deadline) {
                Ok(()) => drop(self.shared.stopped(None)),
                Err(e) => log::error!("The device cannot be given back: {}", chain(&e)),
            }
        }
        // Whoever renews the lease notices, and says so to whom it concerns.
        self.shared.hang_up();
    }

    /// Ends the session of a device that is at it for too long, without waiting any more: the VM
    /// loses it, and its lender takes it back when it can. Until then it may reach memory, as
    /// [`doubt`](Self::doubt) says.
    pub fn abandon(&self) {
        self.shared.set_busy(true);
        self.shared.hang_up();
    }

    /// How long the device may reach memory that it has been shown, where the lender does not say
    /// anything any more. None where it is known to reach nothing.
    pub fn doubt(&self) -> Option<Doubt> {
        self.shared.doubt()
    }

    /// Reads registers.
    pub fn read(
        &self,
        at: RegisterAddress,
        data: &mut [u8],
        deadline: Deadline,
    ) -> Result<(), SessionError> {
        let RegisterAddress { fence, region, .. } = at;
        for (offset, part) in at.offsets().zip(data.chunks_mut(MAX_DATA_BYTES)) {
            let request = Request::Read {
                fence,
                region,
                offset,
                length: u32::try_from(part.len()).map_err(|_| SessionError::Nonsense)?,
            };
            match self.shared.ask(request, &[], deadline.answered_by())? {
                (Reply::Data(bytes), _) if bytes.len() == part.len() => {
                    part.copy_from_slice(&bytes);
                }
                _ => return Err(SessionError::Nonsense),
            }
        }
        Ok(())
    }

    /// Writes registers, and waits until it is done.
    pub fn write(
        &self,
        at: RegisterAddress,
        data: &[u8],
        deadline: Deadline,
    ) -> Result<(), SessionError> {
        let RegisterAddress { fence, region, .. } = at;
        for (offset, part) in at.offsets().zip(data.chunks(MAX_DATA_BYTES)) {
            let request = Request::Write {
                fence,
                region,
                offset,
                data: part.to_vec(),
            };
            self.ask(request, &[], deadline)?;
        }
        Ok(())
    }

    /// Writes registers, without waiting but now and then: so few writes wait at the lender that it
    /// reads on, and hears renewals.
    pub fn post(
        &self,
        at: RegisterAddress,
        data: &[u8],
        deadline: Deadline,
    ) -> Result<(), SessionError> {
        if self.posted.fetch_add(1, Ordering::Relaxed) >= MAX_POSTED {
            self.posted.store(0, Ordering::Relaxed);
            return self.write(at, data, deadline);
        }
        let RegisterAddress { fence, region, .. } = at;
        for (offset, part) in at.offsets().zip(data.chunks(MAX_DATA_BYTES)) {
            let message = ToLender::Post {
                fence,
                region,
                offset,
                data: part.to_vec(),
            };
            self.shared.send(&message)?;
        }
        Ok(())
    }

    /// Whether interrupts can be eventfds of the VMM.
    pub fn carries_descriptors(&self) -> bool {
        self.shared.sender.carries_descriptors()
    }

    /// Whether the device, or the lender, is gone.
    pub fn is_lost(&self) -> bool {
        self.shared.is_lost()
    }
}

#[cfg(test)]
mod tests;
