//! An open device: what a program in the VM has as a file descriptor.

use super::Error;
use super::driver::{ContextEvents, Driver, new_event};
use farlane_abi::Errno;
use farlane_abi::PAGE_BYTES;
use farlane_abi::control::{
    FLAG_WRITABLE, KIND_FILE, KIND_PIN, KIND_SEGMENT, MAX_REGIONS, OP_ATTACH, OP_CLOSE, OP_DETACH,
    OP_OPEN, OP_WINDOW_MAP, OP_WINDOW_UNMAP, Request,
};
use farlane_transport::{Map, PinKind, Transport, TransportError, TransportInfo};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A context of a program in the VM.
pub struct VmTransport {
    driver: Arc<Driver>,
    context: u32,
    wake: OwnedFd,
    dead: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Regions, and the guest memory of those that are segments: offset and length.
    regions: BTreeMap<u32, Option<(u64, u64)>>,
    has_header: bool,
}

impl std::fmt::Debug for VmTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmTransport")
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

impl VmTransport {
    pub(crate) fn open(driver: &Arc<Driver>) -> Result<Self, Error> {
        let wake = new_event()?;
        let dead = Arc::new(AtomicBool::new(driver.is_dead()));
        let context = driver.enter(ContextEvents {
            wake: wake.try_clone()?,
            bound: BTreeMap::new(),
            header: None,
            dead: Arc::clone(&dead),
        })?;
        let transport = Self {
            driver: Arc::clone(driver),
            context,
            wake,
            dead,
            state: Mutex::default(),
        };
        let opened = transport.call("Opening a context", OP_OPEN, &Request::default(), &[]);
        if opened.is_err() {
            // There is nothing to close.
            transport.dead.store(true, Ordering::Release);
        }
        opened?;
        Ok(transport)
    }

    /// Id of the context.
    #[must_use]
    pub fn context(&self) -> u32 {
        self.context
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(
        &self,
        what: &'static str,
        op: u32,
        request: &Request,
        extents: &[(u64, u64)],
    ) -> Result<(), TransportError> {
        if self.is_dead() {
            return Err(TransportError::Gone);
        }
        let request = Request {
            op: op.into(),
            context: self.context.into(),
            ..*request
        };
        self.driver.call(what, &request, extents)
    }

    /// Attaches a region under a free id.
    fn attach(
        &self,
        what: &'static str,
        request: &Request,
        extents: &[(u64, u64)],
        segment: Option<(u64, u64)>,
    ) -> Result<u32, TransportError> {
        let region = {
            let mut state = self.state();
            let region = (0..MAX_REGIONS).find(|r| !state.regions.contains_key(r));
            let region = region.ok_or(TransportError::Refused {
                what,
                errno: Errno::ENOSPC,
            })?;
            state.regions.insert(region, segment);
            region
        };
        let request = Request {
            region: region.into(),
            ..*request
        };
        let attached = self.call(what, OP_ATTACH, &request, extents);
        if attached.is_err() {
            self.state().regions.remove(&region);
        }
        attached.map(|()| region)
    }
}

fn os(what: &'static str, source: impl Into<std::io::Error>) -> TransportError {
    TransportError::Os {
        what,
        source: source.into(),
    }
}

impl Transport for VmTransport {
    fn info(&self) -> TransportInfo {
        TransportInfo {
            features: self.driver.config.features.get(),
            window_bytes: self.driver.config.window_bytes.get(),
            gid: Some(self.driver.config.gid),
        }
    }

    fn attach_segment(&self, length: usize) -> Result<(u32, Arc<Map>), TransportError> {
        let memory = &self.driver.memory;
        let length = (length as u64).next_multiple_of(PAGE_BYTES);
        let none = |e| os("Taking guest memory", std::io::Error::other(e));
        let offset = memory.take(length).map_err(none)?;
        let request = Request {
            kind: KIND_SEGMENT.into(),
            flags: FLAG_WRITABLE.into(),
            length: length.into(),
            ..Request::default()
        };
        let extents = [(memory.guest_address(offset), length)];
        let attached =
            Map::shared(memory.file(), offset, crate::to_usize(length)).and_then(|map| {
                let what = "Attaching a segment";
                let region = self.attach(what, &request, &extents, Some((offset, length)))?;
                Ok((region, Arc::new(map)))
            });
        let (region, map) = attached.inspect_err(|_| memory.give(offset, length))?;
        let first = !std::mem::replace(&mut self.state().has_header, true);
        if first && let Some(context) = self.driver.contexts().get_mut(&self.context) {
            context.header = Some(Arc::clone(&map));
        }
        Ok((region, map))
    }

    unsafe fn attach_pin(
        &self,
        pinned: PinKind,
        address: usize,
        length: usize,
        writable: bool,
    ) -> Result<u32, TransportError> {
        let what = "Attaching memory";
        if pinned != PinKind::Memory {
            let errno = Errno::EOPNOTSUPP;
            return Err(TransportError::Refused { what, errno });
        }
        let extents = self.driver.memory.translate(address, length);
        let extents = extents.ok_or(TransportError::Refused {
            what,
            errno: Errno::EFAULT,
        })?;
        let request = Request {
            kind: KIND_PIN.into(),
            flags: if writable { FLAG_WRITABLE } else { 0 }.into(),
            address: (address as u64).into(),
            length: (length as u64).into(),
            ..Request::default()
        };
        self.attach(what, &request, &extents, None)
    }

    fn attach_file(&self, file: BorrowedFd<'_>) -> Result<u32, TransportError> {
        // A guest's kernel has a number of its own for each file.
        let stat = rustix::fs::fstat(file).map_err(|e| os("fstat", e))?;
        let request = Request {
            kind: KIND_FILE.into(),
            address: (stat.st_dev.rotate_left(40) ^ stat.st_ino).into(),
            ..Request::default()
        };
        self.attach("Showing a file", &request, &[], None)
    }

    fn detach(&self, region: u32) -> Result<(), TransportError> {
        let request = Request {
            region: region.into(),
            ..Request::default()
        };
        self.call("Detaching a region", OP_DETACH, &request, &[])?;
        if let Some(Some((offset, length))) = self.state().regions.remove(&region) {
            self.driver.memory.give(offset, length);
        }
        Ok(())
    }

    fn map_buffer(&self, _handle: u32, offset: u64, length: usize) -> Result<Map, TransportError> {
        // The guest's kernel knows places, not handles.
        let request = Request {
            address: offset.into(),
            length: (length as u64).into(),
            ..Request::default()
        };
        self.call("Mapping a buffer", OP_WINDOW_MAP, &request, &[])?;
        let window = self.driver.window().file().map_err(|e| os("dup", e))?;
        let (file, bytes) = window.ok_or(TransportError::Protocol("the window is not mapped"))?;
        if offset
            .checked_add(length as u64)
            .is_none_or(|end| end > bytes)
        {
            return Err(TransportError::Protocol("a buffer beyond the window"));
        }
        Map::shared(file.as_fd(), offset, length)
    }

    fn unmap_buffer(&self, _handle: u32, offset: u64, length: usize) -> Result<(), TransportError> {
        let request = Request {
            address: offset.into(),
            length: (length as u64).into(),
            ..Request::default()
        };
        self.call("Unmapping a buffer", OP_WINDOW_UNMAP, &request, &[])
    }

    fn bind_event(&self, index: u32, fd: BorrowedFd<'_>) -> Result<(), TransportError> {
        let fd = fd.try_clone_to_owned().map_err(|e| os("dup", e))?;
        let mut contexts = self.driver.contexts();
        let context = contexts
            .get_mut(&self.context)
            .ok_or(TransportError::Gone)?;
        context.bound.insert(index, fd);
        Ok(())
    }

    fn unbind_event(&self, index: u32) -> Result<(), TransportError> {
        let mut contexts = self.driver.contexts();
        let context = contexts
            .get_mut(&self.context)
            .ok_or(TransportError::Gone)?;
        context.bound.remove(&index);
        Ok(())
    }

    fn doorbell(&self) {
        self.driver.ring_doorbell();
    }

    fn wait(&self, timeout: Duration) {
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).ok();
        if poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0) {
            // Not blocking; empty when another waiter was faster.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }
}

impl Drop for VmTransport {
    fn drop(&mut self) {
        // What a dead device had is gone with it: after a reset the id may be another's.
        if self
            .call("Closing a context", OP_CLOSE, &Request::default(), &[])
            .is_ok()
        {
            self.driver.contexts().remove(&self.context);
        }
        for (offset, length) in self.state().regions.values().flatten() {
            self.driver.memory.give(*offset, *length);
        }
    }
}
