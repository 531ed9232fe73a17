//! A context: one process's use of one device.

use crate::arena::{Arena, Part};
use crate::buffer::BufferMemory;
use crate::call::CallRing;
use crate::events::AsyncEvents;
use crate::header::Header;
use crate::{DeviceAttr, DeviceInfo, Error, Gid, PortAttr, VerbsStubs};
use farlane_abi::Errno;
use farlane_abi::arena::AsyncEvent;
use farlane_abi::calls::Caller;
use farlane_abi::config::FEATURE_WINDOW;
use farlane_abi::control::{EVENT_FIRST_CHANNEL, MAX_EVENTS};
use farlane_abi::rdma::{DeviceLimits, QueryGid, VerbsVersion, VersionRange};
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
use farlane_transport::{ShownFile, Transport};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// A context. Everything else belongs to one.
#[derive(Debug)]
pub struct Context {
    info: DeviceInfo,
    calls: CallRing,
    events: AsyncEvents,
    /// The version that was settled with the backend.
    version: OnceLock<VerbsVersion>,
    attributes: OnceLock<DeviceAttr>,
    limits: OnceLock<DeviceLimits>,
    /// Buffers by address, to recognise their memory when it is registered.
    buffers: Mutex<BTreeMap<usize, Weak<BufferMemory>>>,
    /// Event indices that completion channels have.
    channels: Mutex<BTreeSet<u32>>,
    /// Memory for queues.
    arena: Arena,
    header: Arc<Header>,
}

impl Context {
    /// Opens a context of `device`, and [settles](Self::negotiate) its version.
    ///
    /// # Errors
    /// `ENOENT` or `EACCES` where the device cannot be opened, `EPROTO` where it speaks another
    /// version, `ENODEV` where it is gone.
    pub fn open(device: &DeviceInfo) -> Result<Arc<Self>, Error> {
        let context = Self::over(device.clone(), farlane_transport::open(device)?)?;
        context.negotiate()?;
        Ok(context)
    }

    /// Opens a context over a transport that nothing else uses. It has version 1 until it is
    /// [settled](Self::negotiate).
    ///
    /// # Errors
    /// `ENOENT` or `EACCES` where the device cannot be opened, `EPROTO` where it speaks another
    /// version, `ENODEV` where it is gone.
    pub fn over(info: DeviceInfo, transport: Arc<dyn Transport>) -> Result<Arc<Self>, Error> {
        let header = Arc::new(Header::new(&transport)?);
        Ok(Arc::new(Self {
            info,
            calls: CallRing::new(Arc::clone(&header)),
            events: AsyncEvents::new(Arc::clone(&header))?,
            version: OnceLock::new(),
            attributes: OnceLock::new(),
            limits: OnceLock::new(),
            buffers: Mutex::default(),
            channels: Mutex::default(),
            arena: Arena::default(),
            header,
        }))
    }

    /// Settles the version of calls and queues with the backend: the newest one that both have.
    /// One that knows nothing of versions has version 1.
    ///
    /// # Errors
    /// Those of calls, as `ENODEV` where the device is gone; `EPROTO` where the backend answers
    /// with a version that it was not asked for.
    pub fn negotiate(&self) -> Result<VerbsVersion, Error> {
        if let Some(version) = self.version.get() {
            return Ok(*version);
        }
        let version = match self.verbs().negotiate(&VersionRange::ours()) {
            Ok(number) => VerbsVersion::from_wire(number.get()).ok_or(Errno::EPROTO)?,
            // It does not know the call, or has been asked too late.
            Err(error) if matches!(error.errno(), Errno::ENOSYS | Errno::EBUSY) => VerbsVersion::V1,
            Err(error) => return Err(error),
        };
        Ok(*self.version.get_or_init(|| version))
    }

    /// The version that was settled.
    #[must_use]
    pub fn version(&self) -> VerbsVersion {
        self.version.get().copied().unwrap_or_default()
    }

    /// Limits of what version 1 does not have, asked for once: all zero there.
    ///
    /// # Errors
    /// `ENODEV` where the device is gone.
    pub fn limits(&self) -> Result<&DeviceLimits, Error> {
        if let Some(limits) = self.limits.get() {
            return Ok(limits);
        }
        let limits = match self.version() {
            VerbsVersion::V1 => DeviceLimits::default(),
            VerbsVersion::V2 | VerbsVersion::V3 => self.verbs().device_limits(&())?,
        };
        Ok(self.limits.get_or_init(|| limits))
    }

    /// How many completion vectors there are: at least one.
    ///
    /// # Errors
    /// `ENODEV` where the device is gone.
    pub fn comp_vectors(&self) -> Result<u32, Error> {
        Ok(self.limits()?.comp_vectors.get().max(1))
    }

    /// What the device's clock says now, in nanoseconds: completions may have the time of it.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the backend's [version](Self::version) has none, `ENODEV` where the
    /// device is gone.
    pub fn clock(&self) -> Result<u64, Error> {
        match self.version() {
            VerbsVersion::V1 | VerbsVersion::V2 => Err(Errno::EOPNOTSUPP.into()),
            VerbsVersion::V3 => Ok(self.verbs().query_clock(&())?.time.get()),
        }
    }

    /// Has a file stand for this context from now on: processes that have it open may import what
    /// is in the context.
    ///
    /// # Errors
    /// `EBUSY` where one does already, `EOPNOTSUPP` where the backend or the driver cannot tell
    /// files, `ENODEV` where the device is gone.
    pub fn share(&self, file: BorrowedFd<'_>) -> Result<(), Error> {
        let file = self.show(file)?;
        known(self.verbs().share_context(&file.region().into()))?;
        file.keep();
        Ok(())
    }

    /// Comes to the context of another process that this file stands for: by what this returns its
    /// domains are [imported](crate::Pd::import).
    ///
    /// # Errors
    /// `EINVAL` where it stands for none of this device; `EOPNOTSUPP` and `ENODEV` as
    /// [`share`](Self::share).
    pub fn import(&self, file: BorrowedFd<'_>) -> Result<ShownFile, Error> {
        let file = self.show(file)?;
        known(self.verbs().import_context(&file.region().into()))?;
        Ok(file)
    }

    fn show(&self, file: BorrowedFd<'_>) -> Result<ShownFile, Error> {
        if self.version() < VerbsVersion::V2 {
            return Err(Errno::EOPNOTSUPP.into());
        }
        Ok(ShownFile::new(self.transport(), file)?)
    }

    /// Device that the context is of.
    #[must_use]
    pub fn device(&self) -> &DeviceInfo {
        &self.info
    }

    /// Takes memory for a queue: `bytes` of zeroes. In a child of the process that has opened the
    /// context something else may be where its segments are.
    pub(crate) fn take(&self, bytes: u64) -> Result<Part, Error> {
        if self.header.is_dead() {
            return Err(Errno::ENODEV.into());
        }
        Ok(self.arena.take(self.transport(), to_usize(bytes))?)
    }

    /// Keeps memory of a queue that the backend has not given up.
    pub(crate) fn keep(&self, part: impl Into<Arc<Part>>) {
        self.arena.keep(part);
    }

    /// Stubs of the remoted calls.
    #[must_use]
    pub fn verbs(&self) -> VerbsStubs<&Self> {
        VerbsStubs(self)
    }

    /// Attributes of the device, asked for once.
    ///
    /// # Errors
    /// `ENODEV` where the device is gone.
    pub fn device_attributes(&self) -> Result<&DeviceAttr, Error> {
        if let Some(attributes) = self.attributes.get() {
            return Ok(attributes);
        }
        let attributes = self.verbs().query_device(&())?;
        Ok(self.attributes.get_or_init(|| attributes))
    }

    /// Attributes of a port, from 1 up.
    ///
    /// # Errors
    /// `EINVAL` for a port that does not exist, `ENODEV` where the device is gone.
    pub fn port_attributes(&self, port: u32) -> Result<PortAttr, Error> {
        self.verbs().query_port(&port.into())
    }

    /// An entry of a port's GID table.
    ///
    /// # Errors
    /// `EINVAL` for a port or an index that does not exist, `ENODEV` where the device is gone.
    pub fn gid(&self, port: u32, index: u32) -> Result<Gid, Error> {
        self.verbs().query_gid(&QueryGid {
            port: port.into(),
            index: index.into(),
        })
    }

    /// Whether this process has opened it, and not a parent of this one: a child can use none of
    /// its objects.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.header.is_here()
    }

    /// Whether buffers can lie in host memory.
    #[must_use]
    pub fn has_host_memory(&self) -> bool {
        self.transport().info().features & FEATURE_WINDOW != 0
    }

    /// Whether the device is gone.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.header.is_dead()
    }

    /// An eventfd that is readable when there is an asynchronous event. The program may make it
    /// non-blocking.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.events.fd()
    }

    /// Waits for the next asynchronous event.
    ///
    /// # Errors
    /// `EINTR` when a signal came first, `EAGAIN` when the program has made the fd non-blocking
    /// and there is none, `ENODEV` when the device is gone and its `EVENT_DEVICE_FATAL` has been
    /// taken.
    pub fn next_async_event(&self) -> Result<AsyncEvent, Errno> {
        self.events.next()
    }

    pub(crate) fn transport(&self) -> &Arc<dyn Transport> {
        self.header.transport()
    }

    pub(crate) fn header(&self) -> &Arc<Header> {
        &self.header
    }

    /// Takes an event index for a completion channel.
    pub(crate) fn take_channel_index(&self) -> Option<u32> {
        let mut taken = lock(&self.channels);
        let index = (EVENT_FIRST_CHANNEL..MAX_EVENTS).find(|index| !taken.contains(index))?;
        taken.insert(index);
        Some(index)
    }

    pub(crate) fn give_channel_index(&self, index: u32) {
        lock(&self.channels).remove(&index);
    }

    pub(crate) fn remember_buffer(&self, memory: &Arc<BufferMemory>) {
        if memory.handle().is_some() {
            lock(&self.buffers).insert(memory.address(), Arc::downgrade(memory));
        }
    }

    pub(crate) fn forget_buffer(&self, address: usize) {
        lock(&self.buffers).remove(&address);
    }

    /// The host-allocated buffer that holds `length` bytes at `address`, and its handle.
    pub(crate) fn buffer_at(
        &self,
        address: usize,
        length: usize,
    ) -> Option<(Arc<BufferMemory>, u32)> {
        let memory = {
            let buffers = lock(&self.buffers);
            let (_, memory) = buffers.range(..=address).next_back()?;
            memory.upgrade()?
        };
        let offset = address - memory.address();
        let inside = length <= memory.length().checked_sub(offset)?;
        let handle = memory.handle()?;
        inside.then_some((memory, handle))
    }
}

/// The outcome of a call that not every backend knows.
pub(crate) fn known<T>(answered: Result<T, Error>) -> Result<T, Error> {
    match answered {
        Err(error) if error.errno() == Errno::ENOSYS => Err(Errno::EOPNOTSUPP.into()),
        answered => answered,
    }
}

impl Caller for &Context {
    type Error = Error;

    fn call(&self, number: u32, args: &[u8], result: &mut [u8]) -> Result<usize, Error> {
        Ok(self.calls.call(number, args, result)?)
    }
}
