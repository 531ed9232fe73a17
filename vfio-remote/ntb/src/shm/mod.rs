//! A bridge between two processes of one host.
//!
//! The ends are joined by a `SOCK_SEQPACKET` socket. A window's translation is a descriptor that
//! travels over it; scratchpads are a control page of each end ([`crate::control`]) that the other
//! maps; a doorbell is a count in that page and an eventfd.

mod message;

use crate::control::{ALL_DOORBELLS, AREA_BYTES, Area, OwnDoorbells, Ringer, SCRATCHPADS};
use crate::file::Examined;
use crate::{FileRange, Limits, LinkState, Ntb, NtbError, PeerWindow, WindowLimits, event};
use farlane_abi::width::to_usize;
use farlane_sys::sync::{held, lock};
use farlane_sys::thread::OwnedThread;
use farlane_zero_copy::memory_file::{self, Source};
use farlane_zero_copy::{Mapping, SharedMemory};
use message::{Incoming, Message, Refusal};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};
use rustix::net::{AddressFamily, Shutdown, SocketType, shutdown, sockopt};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// How long the other end may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Windows of each end, at most: each can hold a descriptor of the other end's.
const MAX_WINDOWS: u32 = 256;
/// Shrinking a control page would kill who reads it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// The other end, once it has said hello.
#[derive(Clone, Debug)]
struct Peer {
    area: Area,
    doorbell: Arc<OwnedFd>,
}

#[derive(Debug, Default)]
struct State {
    peer: Option<Peer>,
    /// The socket is of no use any more.
    ended: bool,
    /// Which own windows have a translation.
    shown: Vec<bool>,
    /// What the other end shows.
    peer_windows: Vec<Option<PeerWindow>>,
    /// The answer to the last request.
    reply: Option<(u64, Result<(), Refusal>)>,
}

#[derive(Debug)]
struct Shared {
    limits: Limits,
    socket: OwnedFd,
    own: Area,
    doorbells: OwnDoorbells,
    doorbell_event: OwnedFd,
    ringer: Ringer,
    link_event: OwnedFd,
    /// One request at a time, and its number.
    requests: Mutex<u64>,
    /// Taken after `requests`; never held while something is waited for.
    state: Mutex<State>,
    changed: Condvar,
}

/// One end of a bridge between two processes of one host.
#[derive(Debug)]
pub struct ShmNtb {
    shared: Arc<Shared>,
    _thread: OwnedThread,
}

impl ShmNtb {
    /// One end of the bridge that `socket`, connected and `SOCK_SEQPACKET`, leads to. Both ends are
    /// alike. This end has `windows` windows with these limits, and accepts as many from the
    /// other end with limits not wider than these. The link is up once the other end is there: see
    /// [`Ntb::link_event`].
    ///
    /// Starts a thread, which ends when this is dropped.
    ///
    /// # Errors
    /// The limits are absurd, `socket` is something else, or the system failed.
    pub fn new(socket: OwnedFd, windows: u32, limits: WindowLimits) -> Result<Arc<Self>, NtbError> {
        let sane = (1..=MAX_WINDOWS).contains(&windows)
            && limits.address_alignment.is_power_of_two()
            && limits.size_alignment.is_power_of_two()
            // What is shown is mapped.
            && limits.address_alignment >= 4096;
        if !sane {
            return Err(NtbError::Function {
                function: "A bridge between processes".into(),
                why: format!("{windows} windows with {limits:?} are not possible"),
            });
        }
        let kind = sockopt::socket_type(&socket).map_err(NtbError::io("examine a socket"))?;
        let family = sockopt::socket_domain(&socket).map_err(NtbError::io("examine a socket"))?;
        if (kind, family) != (SocketType::SEQPACKET, AddressFamily::UNIX) {
            return Err(NtbError::File("it is not a UNIX socket that keeps packets"));
        }
        let page = memfd_create("ntb", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(NtbError::io("make a control page"))?;
        ftruncate(&page, CONTROL_BYTES).map_err(NtbError::io("make a control page"))?;
        fcntl_add_seals(&page, SEALS | SealFlags::SEAL)
            .map_err(NtbError::io("seal a control page"))?;
        let own = map_control(page.as_fd())?;
        own.format();
        let doorbell_event = event::create()?;
        message::send_hello(socket.as_fd(), page.as_fd(), doorbell_event.as_fd())?;
        let count = to_usize(windows.into());
        let shared = Arc::new(Shared {
            limits: Limits {
                windows: vec![limits; count],
                peer_windows: count,
                scratchpads: SCRATCHPADS,
                doorbells: ALL_DOORBELLS,
            },
            socket,
            doorbells: OwnDoorbells::new(own.clone()),
            own,
            doorbell_event,
            ringer: Ringer::default(),
            link_event: event::create()?,
            requests: Mutex::new(0),
            state: Mutex::new(State {
                shown: vec![false; count],
                peer_windows: vec![None; count],
                ..State::default()
            }),
            changed: Condvar::new(),
        });
        let serving = Arc::clone(&shared);
        let thread = OwnedThread::spawn("ntb", move || serving.serve());
        let thread = thread.map_err(NtbError::io("start a thread"))?;
        Ok(Arc::new(Self {
            shared,
            _thread: thread,
        }))
    }
}

impl Drop for ShmNtb {
    fn drop(&mut self) {
        self.shared.end("this end has gone");
    }
}

const CONTROL_BYTES: u64 = 4096;

fn map_control(page: BorrowedFd<'_>) -> Result<Area, NtbError> {
    let mapping = Mapping::new(page, 0, CONTROL_BYTES, true).map_err(|e| NtbError::Io {
        what: "map a control page".into(),
        source: std::io::Error::other(e),
    })?;
    debug_assert!(mapping.len() >= AREA_BYTES);
    Area::new(SharedMemory::new(mapping), 0)
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes the link down for good.
    fn end(&self, why: &str) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.ended, true) {
            log::info!("An NTB link is down: {why}");
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
        let was_up = state.peer.take().is_some();
        state.peer_windows.fill(None);
        state.shown.fill(false);
        drop(state);
        self.changed.notify_all();
        if was_up {
            event::signal(self.link_event.as_fd());
        }
    }

    fn serve(&self) {
        let why = loop {
            let mut ready = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut ready, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => break format!("cannot wait: {e}"),
            }
            let handled = match message::receive(self.socket.as_fd()) {
                Ok(Incoming::Nothing) => Ok(()),
                Ok(Incoming::End) => break "the other end has gone".into(),
                Ok(Incoming::Message(message)) => self.handle(message),
                Err(e) => Err(e),
            };
            if let Err(e) = handled {
                break e.to_string();
            }
        };
        self.end(&why);
    }

    fn handle(&self, message: Message) -> Result<(), NtbError> {
        match message {
            Message::Hello { control, doorbell } => self.greet(&control, doorbell),
            Message::Set {
                sequence,
                window,
                offset,
                length,
                writable,
                file,
            } => {
                let outcome = self.accept(window, (offset, length), writable, file);
                message::send_reply(self.socket.as_fd(), sequence, outcome)
            }
            Message::Clear { sequence, window } => {
                let at = to_usize(window.into());
                let outcome = match self.state().peer_windows.get_mut(at) {
                    Some(slot) => {
                        *slot = None;
                        Ok(())
                    }
                    None => Err(Refusal::Window),
                };
                message::send_reply(self.socket.as_fd(), sequence, outcome)
            }
            Message::Reply { sequence, outcome } => {
                self.state().reply = Some((sequence, outcome));
                self.changed.notify_all();
                Ok(())
            }
        }
    }

    fn greet(&self, control: &OwnedFd, doorbell: OwnedFd) -> Result<(), NtbError> {
        let page = (0, CONTROL_BYTES);
        let sealed = memory_file::check(control.as_fd(), page, true, Source::Peer)
            .map_err(NtbError::Foreign)?;
        if !sealed || !fcntl_get_seals(control).is_ok_and(|s| s.contains(SEALS)) {
            return Err(NtbError::Protocol("its control page is not sealed"));
        }
        let area = map_control(control.as_fd())?;
        if !area.is_formatted() {
            return Err(NtbError::Protocol("its control page has another version"));
        }
        let doorbell = event::check(doorbell)
            .map_err(|_| NtbError::Protocol("its doorbell is not an eventfd"))?;
        let doorbell = Arc::new(doorbell);
        let mut state = self.state();
        if state.ended {
            return Ok(());
        }
        if state.peer.replace(Peer { area, doorbell }).is_some() {
            return Err(NtbError::Protocol("it said hello twice"));
        }
        drop(state);
        self.changed.notify_all();
        event::signal(self.link_event.as_fd());
        Ok(())
    }

    /// A window of the other end's shows something new.
    fn accept(
        &self,
        window: u32,
        (offset, length): (u64, u64),
        writable: bool,
        file: OwnedFd,
    ) -> Result<(), Refusal> {
        let at = to_usize(window.into());
        self.limits
            .check(window, offset, length)
            .map_err(|e| match e {
                NtbError::Window { .. } => Refusal::Window,
                _ => Refusal::Range,
            })?;
        let range = (offset, length);
        let checked = memory_file::check(file.as_fd(), range, writable, Source::Peer);
        let sealed = checked.map_err(|e| {
            log::warn!("A file for window {window} is refused: {e}");
            Refusal::File
        })?;
        let mut state = self.state();
        if state.peer.is_none() {
            return Err(Refusal::Window);
        }
        match state.peer_windows.get_mut(at) {
            Some(slot @ None) => {
                *slot = Some(PeerWindow {
                    file: Arc::new(file),
                    offset,
                    size: length,
                    writable,
                    sealed,
                });
                Ok(())
            }
            Some(Some(_)) => Err(Refusal::Taken),
            None => Err(Refusal::Window),
        }
    }

    fn peer(&self) -> Result<Peer, NtbError> {
        self.state().peer.clone().ok_or(NtbError::LinkDown)
    }

    /// Sends a request and waits for the answer.
    fn request(
        &self,
        send: impl FnOnce(BorrowedFd<'_>, u64) -> Result<(), NtbError>,
        done: impl FnOnce(&mut State),
    ) -> Result<(), NtbError> {
        let mut number = lock(&self.requests);
        *number += 1;
        self.peer()?;
        send(self.socket.as_fd(), *number).inspect_err(|e| self.end(&e.to_string()))?;
        let waiting = |state: &mut State| {
            let answered = state.reply.as_ref().is_some_and(|(n, _)| n == &*number);
            state.peer.is_some() && !answered
        };
        let (mut state, timeout) = held(self.changed.wait_timeout_while(
            self.state(),
            PATIENCE,
            waiting,
        ));
        if state.peer.is_none() {
            return Err(NtbError::LinkDown);
        }
        if timeout.timed_out() {
            drop(state);
            let error = NtbError::TimedOut {
                seconds: PATIENCE.as_secs(),
            };
            // Whether the other end has done it is not known.
            self.end(&error.to_string());
            return Err(error);
        }
        match state.reply.take() {
            Some((_, Err(refusal))) => Err(NtbError::Refused(refusal.describe())),
            _ => {
                done(&mut state);
                Ok(())
            }
        }
    }
}

impl Ntb for ShmNtb {
    fn kind(&self) -> &'static str {
        "shm"
    }

    fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    fn link(&self) -> LinkState {
        match self.shared.state().peer {
            Some(_) => LinkState::Up,
            None => LinkState::Down,
        }
    }

    fn link_event(&self) -> BorrowedFd<'_> {
        self.shared.link_event.as_fd()
    }

    fn clear_link_event(&self) -> LinkState {
        let _ = event::drain(self.shared.link_event.as_fd());
        self.link()
    }

    fn set_translation(&self, window: u32, shown: FileRange<'_>) -> Result<(), NtbError> {
        self.shared
            .limits
            .check(window, shown.offset, shown.length)?;
        Examined::new(shown.file)?.check_range(shown.offset, shown.length)?;
        let at = to_usize(window.into());
        if self.shared.state().shown.get(at) == Some(&true) {
            return Err(NtbError::Taken { window });
        }
        self.shared.request(
            |socket, sequence| message::send_set(socket, sequence, window, shown),
            |state| state.shown[at] = true,
        )
    }

    fn clear_translation(&self, window: u32) -> Result<(), NtbError> {
        self.shared.limits.window(window)?;
        let at = to_usize(window.into());
        self.shared.request(
            |socket, sequence| message::send_clear(socket, sequence, window),
            |state| state.shown[at] = false,
        )
    }

    fn peer_window(&self, window: u32) -> Result<PeerWindow, NtbError> {
        let state = self.shared.state();
        if state.peer.is_none() {
            return Err(NtbError::LinkDown);
        }
        let at = to_usize(window.into());
        let slot = state.peer_windows.get(at).ok_or(NtbError::Window {
            window,
            count: self.shared.limits.peer_windows,
        })?;
        slot.clone().ok_or(NtbError::NoTranslation { window })
    }

    fn doorbells(&self) -> Result<u64, NtbError> {
        let _ = event::drain(self.shared.doorbell_event.as_fd());
        Ok(self.shared.doorbells.pending())
    }

    fn clear_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        self.shared.doorbells.clear(bits)
    }

    fn mask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        self.shared.doorbells.mask(bits)?;
        if self.shared.doorbells.due() != 0 {
            event::signal(self.shared.doorbell_event.as_fd());
        }
        Ok(())
    }

    fn doorbell_event(&self) -> Result<BorrowedFd<'_>, NtbError> {
        Ok(self.shared.doorbell_event.as_fd())
    }

    fn ring_peer(&self, bits: u64) -> Result<(), NtbError> {
        let peer = self.shared.peer()?;
        if self.shared.ringer.ring(&peer.area, bits)? {
            event::signal(peer.doorbell.as_fd());
        }
        Ok(())
    }

    fn scratchpad(&self, index: u32) -> Result<u32, NtbError> {
        self.shared.own.scratchpad(index)
    }

    fn set_scratchpad(&self, index: u32, value: u32) -> Result<(), NtbError> {
        self.shared.own.set_scratchpad(index, value)
    }

    fn peer_scratchpad(&self, index: u32) -> Result<u32, NtbError> {
        self.shared.peer()?.area.scratchpad(index)
    }

    fn set_peer_scratchpad(&self, index: u32, value: u32) -> Result<(), NtbError> {
        self.shared.peer()?.area.set_scratchpad(index, value)
    }
}

#[cfg(test)]
mod tests;
