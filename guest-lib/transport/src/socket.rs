//! A transport over the backend's UNIX socket, for processes on the backend's host.

use crate::guard::{Guarded, Kind};
use crate::packet::exchange;
use crate::pins::{Pins, attach_pin};
use crate::region_ids::RegionIds;
use crate::watch::{Fate, Watcher, signal};
use crate::{Map, PinKind, Transport, TransportError, TransportInfo};
use farlane_abi::PAGE_BYTES;
use farlane_abi::config::{ABI_VERSION, FEATURE_WINDOW};
use farlane_abi::control::{self, Reply, Request};
use farlane_sys::memory_file;
use farlane_sys::sync::lock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_getfl, fcntl_setfl, fstat, ftruncate};
use rustix::io::{Errno as Os, pwrite};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A transport over a `SOCK_SEQPACKET` socket.
#[derive(Debug)]
pub struct SocketTransport {
    /// From the header on. Stopped first when dropped.
    watcher: Mutex<Option<Watcher>>,
    /// Children do not have it: while one had, the backend would not see this program end.
    socket: Arc<Guarded>,
    /// Held from a request to its reply.
    exchanging: Mutex<()>,
    doorbell: OwnedFd,
    regions: Mutex<RegionIds>,
    pins: Pins,
    fate: Arc<Fate>,
}

impl SocketTransport {
    /// Connects to the backend that listens at `path`.
    ///
    /// # Errors
    /// When there is none, or it refuses.
    pub fn open(path: &Path) -> Result<Self, TransportError> {
        let open = |source: Os| TransportError::Open {
            path: path.to_owned(),
            source: source.into(),
        };
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(open)?;
        let address = SocketAddrUnix::new(path).map_err(open)?;
        rustix::net::connect(&socket, &address).map_err(open)?;
        Self::over(socket)
    }

    /// Opens a context over a connected socket.
    ///
    /// # Errors
    /// When the backend refuses or is gone.
    pub fn over(socket: OwnedFd) -> Result<Self, TransportError> {
        let event = |flags| {
            eventfd(0, EventfdFlags::CLOEXEC | flags)
                .map_err(|source| TransportError::os("eventfd", source))
        };
        let wake = event(EventfdFlags::NONBLOCK)?;
        let doorbell = event(EventfdFlags::empty())?;
        let socket = Guarded::new(socket, Kind::Device);
        let request = Request {
            op: control::OP_OPEN.into(),
            region: ABI_VERSION.into(),
            ..Request::default()
        };
        let fds = [wake.as_fd(), doorbell.as_fd()];
        let connection = socket.enter().ok_or(TransportError::Gone)?;
        let what = "Opening a context";
        let (reply, _) = exchange(connection.as_fd(), what, &request, &[], &fds)?;
        let pins = Pins::new(reply.value.get(), connection.as_fd());
        drop(connection);

        Ok(Self {
            watcher: Mutex::default(),
            socket: Arc::new(socket),
            exchanging: Mutex::new(()),
            doorbell,
            regions: Mutex::new(RegionIds::default()),
            pins,
            fate: Arc::new(Fate::new(wake)),
        })
    }

    fn request(
        &self,
        what: &'static str,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Option<OwnedFd>), TransportError> {
        self.request_with(what, request, &[], fds)
    }

    fn request_with(
        &self,
        what: &'static str,
        request: &Request,
        extents: &[(u64, u64)],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Option<OwnedFd>), TransportError> {
        if self.is_dead() {
            return Err(TransportError::Gone);
        }
        let socket = self.socket.enter().ok_or(TransportError::Gone)?;
        let _turn = lock(&self.exchanging);
        let result = exchange(socket.as_fd(), what, request, extents, fds);
        if matches!(
            result,
            Err(TransportError::Gone | TransportError::Protocol(_))
        ) {
            self.fate.die();
        }
        result
    }

    /// Makes a region with an id of its own, of the whole or of extents of files.
    pub(crate) fn attach(
        &self,
        what: &'static str,
        request: &Request,
        extents: &[(u64, u64)],
        fds: &[BorrowedFd<'_>],
    ) -> Result<u32, TransportError> {
        let ids = || lock(&self.regions);
        let region = ids().take().ok_or(TransportError::Refused {
            what,
            errno: farlane_abi::Errno::ENOSPC,
        })?;
        let request = Request {
            op: control::OP_ATTACH.into(),
            region: region.into(),
            ..*request
        };
        match self.request_with(what, &request, extents, fds) {
            Ok(_) => Ok(region),
            Err(error) => {
                ids().give(region);
                Err(error)
            }
        }
    }
}

impl Transport for SocketTransport {
    fn info(&self) -> TransportInfo {
        TransportInfo {
            features: FEATURE_WINDOW,
            ..TransportInfo::default()
        }
    }

    fn attach_segment(&self, length: usize) -> Result<(u32, Arc<Map>), TransportError> {
        drop(self.socket.enter().ok_or(TransportError::Gone)?);
        let length = (length as u64).next_multiple_of(PAGE_BYTES);
        let memory = match self.pins {
            Pins::Moved { .. } => full_memory(length)?,
            _ => sealed_memory(length, SealFlags::SEAL)?,
        };
        let map = Arc::new(Map::shared(memory.as_fd(), 0, to_usize(length)?)?);
        let request = Request {
            kind: control::KIND_SEGMENT.into(),
            flags: control::FLAG_WRITABLE.into(),
            length: length.into(),
            ..Request::default()
        };
        let attach = || self.attach("Attaching a segment", &request, &[], &[memory.as_fd()]);
        let mut watcher = lock(&self.watcher);
        if watcher.is_some() {
            drop(watcher);
            return Ok((attach()?, map));
        }
        // The first one is the header.
        let (socket, fate) = (Arc::clone(&self.socket), Arc::clone(&self.fate));
        let started = Watcher::start(socket, fate, &map)?;
        let region = attach()?;
        self.fate.set_header(&map);
        *watcher = Some(started);
        Ok((region, map))
    }

    unsafe fn attach_pin(
        &self,
        kind: PinKind,
        address: usize,
        length: usize,
        writable: bool,
    ) -> Result<u32, TransportError> {
        // SAFETY: as promised.
        unsafe { attach_pin(self, &self.pins, kind, address, length, writable) }
    }

    fn attach_file(&self, file: BorrowedFd<'_>) -> Result<u32, TransportError> {
        let request = Request {
            kind: control::KIND_FILE.into(),
            ..Request::default()
        };
        self.attach("Showing a file", &request, &[], &[file])
    }

    fn detach(&self, region: u32) -> Result<(), TransportError> {
        let request = Request {
            op: control::OP_DETACH.into(),
            region: region.into(),
            ..Request::default()
        };
        let turn = self.pins.turn();
        let detached = self.request("Detaching a region", &request, &[]);
        self.pins.release(region);
        drop(turn);
        detached?;
        let mut ids = lock(&self.regions);
        ids.give(region);
        Ok(())
    }

    fn map_buffer(&self, handle: u32, offset: u64, length: usize) -> Result<Map, TransportError> {
        let request = Request {
            op: control::OP_WINDOW_MAP.into(),
            region: handle.into(),
            address: offset.into(),
            length: (length as u64).into(),
            ..Request::default()
        };
        let (_, memory) = self.request("Mapping a buffer", &request, &[])?;
        let memory = memory.ok_or(TransportError::Protocol("a buffer without its memory"))?;
        // Touching memory beyond the end of the file would be fatal.
        let stat = fstat(&memory).map_err(|source| TransportError::os("fstat", source))?;
        if usize::try_from(stat.st_size).is_ok_and(|bytes| bytes >= length) {
            Map::shared(memory.as_fd(), 0, length)
        } else {
            Err(TransportError::Protocol("a buffer's memory is too short"))
        }
    }

    fn unmap_buffer(&self, handle: u32, offset: u64, length: usize) -> Result<(), TransportError> {
        let request = Request {
            op: control::OP_WINDOW_UNMAP.into(),
            region: handle.into(),
            address: offset.into(),
            length: (length as u64).into(),
            ..Request::default()
        };
        self.request("Unmapping a buffer", &request, &[]).map(drop)
    }

    fn bind_event(&self, index: u32, fd: BorrowedFd<'_>) -> Result<(), TransportError> {
        let watched = fd
            .try_clone_to_owned()
            .map_err(|source| TransportError::os("dup", source))?;
        // Bound here first: a backend that dies in between still wakes it.
        self.fate.bound().insert(index, watched);
        let request = Request {
            op: control::OP_BIND_EVENT.into(),
            region: index.into(),
            ..Request::default()
        };
        // The backend may make the eventfd non-blocking, and that mode is one for all who share
        // it. Whether waiting blocks is the program's choice.
        let mode = fcntl_getfl(fd).map_err(|source| TransportError::os("fcntl", source))?;
        let bound = self.request("Binding an event", &request, &[fd]);
        fcntl_setfl(fd, mode).map_err(|source| TransportError::os("fcntl", source))?;
        if bound.is_err() {
            self.fate.bound().remove(&index);
        }
        bound.map(drop)
    }

    fn unbind_event(&self, index: u32) -> Result<(), TransportError> {
        self.fate.bound().remove(&index);
        let request = Request {
            op: control::OP_UNBIND_EVENT.into(),
            region: index.into(),
            ..Request::default()
        };
        self.request("Unbinding an event", &request, &[]).map(drop)
    }

    fn doorbell(&self) {
        signal(self.doorbell.as_fd());
    }

    fn wait(&self, timeout: Duration) {
        let mut fds = [PollFd::new(&self.fate.wake, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).ok();
        if poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0) {
            // Not blocking; empty when another waiter was faster.
            let _ = rustix::io::read(&self.fate.wake, &mut [0; 8]);
        }
    }

    fn is_dead(&self) -> bool {
        self.fate.is_dead()
    }
}

impl Drop for SocketTransport {
    fn drop(&mut self) {
        let request = Request {
            op: control::OP_CLOSE.into(),
            ..Request::default()
        };
        let _turn = self.pins.turn();
        // A backend that is gone has closed the context itself.
        let _ = self.request("Closing a context", &request, &[]);
        // No lock of it is taken: in a child nobody might give that back.
        self.pins = Pins::Reached;
    }
}

/// The same for a backend of another user, which takes all of its pages to be there, and seals it
/// against holes.
fn full_memory(length: u64) -> Result<OwnedFd, TransportError> {
    let memory = sealed_memory(length, SealFlags::empty())?;
    let zeroes = [0; 4096];
    let mut at = 0;
    while at < length {
        let some = &zeroes[..zeroes.len().min(to_usize(length - at)?)];
        let written = pwrite(&memory, some, at);
        at += written.map_err(|source| TransportError::os("pwrite", source))? as u64;
    }
    Ok(memory)
}

/// Memory that neither side can shrink under the other's feet.
fn sealed_memory(length: u64, besides: SealFlags) -> Result<OwnedFd, TransportError> {
    let memory = memory_file("farlane-segment")
        .map_err(|source| TransportError::os("memfd_create", source))?;
    ftruncate(&memory, length).map_err(|source| TransportError::os("ftruncate", source))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | besides;
    fcntl_add_seals(&memory, seals).map_err(|source| TransportError::os("fcntl", source))?;
    Ok(memory)
}

fn to_usize(length: u64) -> Result<usize, TransportError> {
    usize::try_from(length).map_err(|_| TransportError::os("mmap", Os::NOMEM))
}
