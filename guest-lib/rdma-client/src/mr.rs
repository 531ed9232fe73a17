//! Memory registrations.

use crate::buffer::{Buffer, BufferMemory};
use crate::pd::Destroyed;
use crate::{Context, Error, Pd};
use farlane_abi::Errno;
use farlane_abi::rdma::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_WRITE, DeregMr, ImportMr,
    MR_SOURCE_BUFFER, MR_SOURCE_PIN, Mr as MrInfo, RegMr, ReregMr, VerbsVersion,
};
use farlane_sys::sync::lock;
use farlane_transport::{Pin, PinKind};
use std::sync::{Arc, Mutex};

/// A memory region, registered in a protection domain.
#[derive(Debug)]
pub struct Mr {
    context: Arc<Context>,
    handle: u32,
    lkey: u32,
    rkey: u32,
    registered: Mutex<Registered>,
    destroyed: Destroyed,
}

/// What is registered under the keys now.
#[derive(Debug)]
struct Registered {
    pd: Arc<Pd>,
    address: usize,
    length: usize,
    iova: u64,
    /// `ACCESS_*` of [`farlane_abi::rdma`].
    access: u32,
    /// None once it is registered no more, and where it is of no memory.
    source: Option<Source>,
}

impl Registered {
    fn find(&self, address: u64, length: usize) -> Option<usize> {
        let skip = usize::try_from(address.checked_sub(self.iova)?).ok()?;
        let end = skip.checked_add(length)?;
        (end <= self.length)
            .then(|| self.address.checked_add(skip))
            .flatten()
    }
}

/// What of a registration is to be another; `None`: as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct MrChange<'a> {
    /// The protection domain that it is in.
    pub pd: Option<&'a Arc<Pd>>,
    /// Address and length in bytes of its memory, which work requests name by that address.
    pub memory: Option<(usize, usize)>,
    /// Rights, `ACCESS_*` of [`farlane_abi::rdma`].
    pub access: Option<u32>,
}

/// What is registered; held until the registration is gone.
#[derive(Debug)]
enum Source {
    Pin {
        pin: Pin,
        writable: bool,
    },
    /// All memory of this process, of which addresses are offsets.
    AddressSpace {
        pin: Pin,
        writable: bool,
    },
    Buffer {
        _memory: Arc<BufferMemory>,
        handle: u32,
        offset: u64,
    },
}

impl Source {
    /// Memory of a host-allocated buffer is recognised; other memory is pinned.
    ///
    /// # Safety
    /// As [`Mr::register`].
    unsafe fn of(
        context: &Context,
        address: usize,
        length: usize,
        writable: bool,
    ) -> Result<Self, Error> {
        if let Some((memory, handle)) = context.buffer_at(address, length) {
            let offset = (address - memory.address()) as u64;
            return Ok(Self::Buffer {
                _memory: memory,
                handle,
                offset,
            });
        }
        let (transport, kind) = (context.transport(), PinKind::Memory);
        // SAFETY: as promised by the caller.
        let pin = unsafe { Pin::new(transport, kind, address, length, writable)? };
        Ok(Self::Pin { pin, writable })
    }

    /// All memory of this process.
    ///
    /// # Safety
    /// As [`Mr::register_on_demand`].
    unsafe fn of_address_space(context: &Context, writable: bool) -> Result<Self, Error> {
        let (transport, kind) = (context.transport(), PinKind::AddressSpace);
        // SAFETY: as promised by the caller.
        let pin = unsafe { Pin::new(transport, kind, 0, 0, writable)? };
        Ok(Self::AddressSpace { pin, writable })
    }

    /// Whether it can be registered with these rights.
    fn allows(&self, access: u32) -> bool {
        match self {
            Self::Pin { writable, .. } | Self::AddressSpace { writable, .. } => {
                *writable || access & ACCESS_LOCAL_WRITE == 0
            }
            Self::Buffer { .. } => true,
        }
    }

    /// Says in a registration where its memory is.
    fn describe(&self, address: usize, registration: &mut RegMr) {
        match self {
            Self::AddressSpace { pin, .. } => {
                registration.source = MR_SOURCE_PIN.into();
                registration.object = pin.region().into();
                registration.offset = (address as u64).into();
            }
            Self::Pin { pin, .. } => {
                registration.source = MR_SOURCE_PIN.into();
                registration.object = pin.region().into();
            }
            Self::Buffer { handle, offset, .. } => {
                registration.source = MR_SOURCE_BUFFER.into();
                registration.object = (*handle).into();
                registration.offset = (*offset).into();
            }
        }
    }

    /// Lets the memory go.
    fn release(self) -> Result<(), Error> {
        match self {
            Self::Pin { pin, .. } | Self::AddressSpace { pin, .. } => match pin.release() {
                Err(error) if error.errno() != Errno::ENODEV => Err(error.into()),
                _ => Ok(()),
            },
            Self::Buffer { .. } => Ok(()),
        }
    }
}

fn check_rights(access: u32) -> Result<(), Error> {
    let remote = access & (ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0;
    if remote && access & ACCESS_LOCAL_WRITE == 0 {
        return Err(Error::Invalid("rights: remote write needs local write"));
    }
    Ok(())
}

/// Checks bounds and rights.
fn check(address: usize, length: usize, access: u32) -> Result<(), Error> {
    check_rights(access)?;
    if length == 0 || address.checked_add(length).is_none() {
        return Err(Error::Invalid("length"));
    }
    Ok(())
}

impl Mr {
    /// Registers `length` bytes at `address`, which work requests name from `iova` up. `access`
    /// is `ACCESS_*` of [`farlane_abi::rdma`]. Memory of a host-allocated
    /// [`Buffer`] is recognised; other memory is pinned.
    ///
    /// # Errors
    /// `EINVAL` for nothing or for rights that contradict each other, `ENOMEM` where kernel
    /// or backend have no room for it, `EFAULT` where the memory is not mapped.
    ///
    /// # Safety
    /// Until the registration is gone the memory stays mapped, and the caller expects it to
    /// change as `access` allows: no reference to it may assume otherwise.
    pub unsafe fn register(
        pd: &Arc<Pd>,
        address: usize,
        length: usize,
        iova: u64,
        access: u32,
    ) -> Result<Self, Error> {
        check(address, length, access)?;
        let writable = access & ACCESS_LOCAL_WRITE != 0;
        // SAFETY: as promised by the caller.
        let source = unsafe { Source::of(pd.context(), address, length, writable)? };
        Self::of(pd, source, (address, length), iova, access)
    }

    /// Registers what the process has at `length` bytes from `address` when a work request names
    /// it (on-demand paging), which need not be there before, nor stay the same. All of its
    /// [memory](farlane_abi::control::ADDRESS_SPACE_BYTES) may be registered at once.
    ///
    /// # Errors
    /// As [`register`](Self::register), and `EOPNOTSUPP` over a transport that has to pin memory.
    ///
    /// # Safety
    /// As [`register`](Self::register), of the memory that work requests and peers name, while they
    /// are under way.
    pub unsafe fn register_on_demand(
        pd: &Arc<Pd>,
        address: usize,
        length: usize,
        iova: u64,
        access: u32,
    ) -> Result<Self, Error> {
        let writable = access & ACCESS_LOCAL_WRITE != 0;
        // SAFETY: as promised by the caller.
        let source = unsafe { Source::of_address_space(pd.context(), writable)? };
        Self::of(pd, source, (address, length), iova, access)
    }

    /// Registers `length` bytes of a host-allocated buffer from `offset` on, as
    /// [`register`](Self::register) does. None may be registered, too.
    ///
    /// # Errors
    /// As [`register`](Self::register); `EINVAL`, too, for bytes that are not all inside, for a
    /// buffer of another context, and for one in this process's own memory.
    pub fn register_buffer(
        pd: &Arc<Pd>,
        buffer: &Buffer,
        (offset, length): (usize, usize),
        iova: u64,
        access: u32,
    ) -> Result<Self, Error> {
        let memory = buffer.memory();
        let handle = memory.handle().ok_or(Error::Invalid("buffer"))?;
        let end = offset.checked_add(length);
        if end.is_none_or(|end| end > memory.length()) {
            return Err(Error::Invalid("length"));
        }
        if !Arc::ptr_eq(memory.context(), pd.context()) {
            return Err(Error::Invalid("buffer of another context"));
        }
        check_rights(access)?;
        let address = memory.address() + offset;
        let source = Source::Buffer {
            _memory: Arc::clone(memory),
            handle,
            offset: offset as u64,
        };
        Self::of(pd, source, (address, length), iova, access)
    }

    /// Registers no memory, under all addresses: requests of this side read zeroes there, and what
    /// they write is discarded. There is no key for the peer.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where the backend's [version](Context::version) has no such call, `ENOMEM`
    /// where it has no room, `ENODEV` where the device is gone.
    pub fn null(pd: &Arc<Pd>) -> Result<Self, Error> {
        let context = pd.context();
        if context.version() < VerbsVersion::V3 {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let mr = context.verbs().alloc_null_mr(&pd.handle().into())?;
        let registered = Registered {
            pd: Arc::clone(pd),
            address: 0,
            length: 0,
            iova: 0,
            access: ACCESS_LOCAL_WRITE,
            source: None,
        };
        Ok(Self::made(&mr, registered))
    }

    /// The registration that a call has made.
    fn made(mr: &MrInfo, registered: Registered) -> Self {
        Self {
            context: Arc::clone(registered.pd.context()),
            handle: mr.handle.get(),
            lkey: mr.lkey.get(),
            rkey: mr.rkey.get(),
            registered: Mutex::new(registered),
            destroyed: Destroyed::default(),
        }
    }

    fn of(
        pd: &Arc<Pd>,
        source: Source,
        (address, length): (usize, usize),
        iova: u64,
        access: u32,
    ) -> Result<Self, Error> {
        let context = pd.context();
        let mut request = RegMr {
            pd: pd.handle().into(),
            access: access.into(),
            length: (length as u64).into(),
            iova: iova.into(),
            ..RegMr::default()
        };
        source.describe(address, &mut request);
        let mr = context.verbs().reg_mr(&request)?;
        let registered = Registered {
            pd: Arc::clone(pd),
            address,
            length,
            iova,
            access,
            source: Some(source),
        };
        Ok(Self::made(&mr, registered))
    }

    /// Imports the registration that has this handle in the process that `pd` was imported from:
    /// its keys. It stays that process's, which ends it.
    ///
    /// # Errors
    /// `EINVAL` where there is none in that domain, or the process has ended.
    pub fn import(pd: &Arc<Pd>, handle: u32) -> Result<Self, Error> {
        let context = pd.context();
        let mr = context.verbs().import_mr(&ImportMr {
            pd: pd.handle().into(),
            mr: handle.into(),
        })?;
        let length = usize::try_from(mr.length.get()).map_err(|_| Errno::EPROTO)?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
            lkey: mr.lkey.get(),
            rkey: mr.rkey.get(),
            registered: Mutex::new(Registered {
                pd: Arc::clone(pd),
                address: 0,
                length,
                iova: 0,
                access: 0,
                source: None,
            }),
            destroyed: Destroyed::already(),
        })
    }

    /// Changes what is registered under the same keys. With an error the registration is as it was.
    ///
    /// # Errors
    /// As [`register`](Self::register); `EINVAL`, too, for a domain of another context, and
    /// `EOPNOTSUPP` where the backend's [version](Context::version) has no such call, and for
    /// another domain where one of the two is imported.
    ///
    /// # Safety
    /// As [`register`](Self::register), for the memory and the rights that it has afterwards.
    pub unsafe fn reregister(&self, change: &MrChange<'_>) -> Result<(), Error> {
        let context = &self.context;
        if context.version() < VerbsVersion::V2 {
            return Err(Error::Refused(Errno::EOPNOTSUPP));
        }
        let mut registered = lock(&self.registered);
        let pd = Arc::clone(change.pd.unwrap_or(&registered.pd));
        if !Arc::ptr_eq(pd.context(), context) {
            return Err(Error::Invalid("protection domain of another context"));
        }
        // The keys of the two are in different contexts.
        let stays_there = Arc::ptr_eq(&pd, &registered.pd);
        if !stays_there && (pd.is_imported() || registered.pd.is_imported()) {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let access = change.access.unwrap_or(registered.access);
        let (address, length) = change
            .memory
            .unwrap_or((registered.address, registered.length));
        let iova = change
            .memory
            .map_or(registered.iova, |(address, _)| address as u64);
        check(address, length, access)?;
        let before = registered.source.as_ref().ok_or(Errno::EINVAL)?;
        let is_all = matches!(before, Source::AddressSpace { .. });
        let stays = before.allows(access) && (is_all || change.memory.is_none());
        let writable = access & ACCESS_LOCAL_WRITE != 0;
        // SAFETY: as promised by the caller.
        let other = (!stays).then(|| unsafe {
            if is_all {
                Source::of_address_space(context, writable)
            } else {
                Source::of(context, address, length, writable)
            }
        });
        let other = other.transpose()?;
        let mut request = ReregMr {
            mr: self.handle.into(),
            registration: RegMr {
                pd: pd.handle().into(),
                access: access.into(),
                length: (length as u64).into(),
                iova: iova.into(),
                ..RegMr::default()
            },
            ..ReregMr::default()
        };
        other
            .as_ref()
            .unwrap_or(before)
            .describe(address, &mut request.registration);
        context.verbs().rereg_mr(&request)?;
        let before = other.and_then(|other| registered.source.replace(other));
        registered.pd = pd;
        (registered.address, registered.length) = (address, length);
        (registered.iova, registered.access) = (iova, access);
        drop(registered);
        // What a hostile answer leaves ends with the context.
        let _ = before.map_or(Ok(()), Source::release);
        Ok(())
    }

    /// Protection domain that it belongs to.
    #[must_use]
    pub fn pd(&self) -> Arc<Pd> {
        Arc::clone(&lock(&self.registered).pd)
    }

    /// Handle that calls name it by.
    #[must_use]
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Key for local use.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Key for the peer's use.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Address of the first byte in this process.
    #[must_use]
    pub fn address(&self) -> usize {
        lock(&self.registered).address
    }

    /// Length of the region in bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        lock(&self.registered).length
    }

    /// Rights that it has, `ACCESS_*` of [`farlane_abi::rdma`].
    #[must_use]
    pub fn access(&self) -> u32 {
        lock(&self.registered).access
    }

    /// Where `length` bytes are in this process that work requests name by `address`; `None` where
    /// not all of them are inside.
    #[must_use]
    pub fn find(&self, address: u64, length: usize) -> Option<usize> {
        lock(&self.registered).find(address, length)
    }

    fn deregister(&self) -> Result<(), Error> {
        let verbs = self.context.verbs();
        let pd = self.pd();
        if !pd.is_imported() {
            return verbs.dereg_mr(&self.handle.into());
        }
        verbs.dereg_imported_mr(&DeregMr {
            pd: pd.handle().into(),
            mr: self.handle.into(),
        })
    }

    /// Ends the registration, then lets the memory go. When this returns nobody touches it.
    ///
    /// # Errors
    /// What the backend refuses with, `EBADF` of a handle that it does not know; the registration
    /// then stays.
    pub fn destroy(&self) -> Result<(), Error> {
        self.destroyed.once(|| self.deregister())?;
        let source = lock(&self.registered).source.take();
        source.map_or(Ok(()), Source::release)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // What a hostile answer leaves ends with the context.
        let _ = self.destroy();
    }
}
