//! Memory registrations.

use crate::buffer::BufferMemory;
use crate::pd::Destroyed;
use crate::{Error, Pd};
use farlane_abi::rdma::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_WRITE, MR_SOURCE_BUFFER, MR_SOURCE_PIN,
    RegMr,
};
use farlane_sys::sync::lock;
use farlane_transport::{Pin, PinKind};
use std::sync::{Arc, Mutex};

/// A memory region, registered in a protection domain.
#[derive(Debug)]
pub struct Mr {
    pd: Arc<Pd>,
    handle: u32,
    lkey: u32,
    rkey: u32,
    address: usize,
    length: usize,
    source: Mutex<Option<Source>>,
    destroyed: Destroyed,
}

/// What is registered; held until the registration is gone.
#[derive(Debug)]
enum Source {
    Pin(Pin),
    Buffer { _memory: Arc<BufferMemory> },
}

impl Mr {
    /// Registers `length` bytes at `address`, which work requests name from `iova` up. `access`
    /// is `ACCESS_*` of [`farlane_abi::rdma`]. Memory of a host-allocated
    /// [`Buffer`](crate::Buffer) is recognised; other memory is pinned.
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
        let remote = access & (ACCESS_REMOTE_WRITE | ACCESS_REMOTE_ATOMIC) != 0;
        let writable = access & ACCESS_LOCAL_WRITE != 0;
        if remote && !writable {
            return Err(Error::Invalid("rights: remote write needs local write"));
        }
        if length == 0 || address.checked_add(length).is_none() {
            return Err(Error::Invalid("length"));
        }
        let context = pd.context();
        let mut request = RegMr {
            pd: pd.handle().into(),
            access: access.into(),
            length: (length as u64).into(),
            iova: iova.into(),
            ..RegMr::default()
        };
        let source = if let Some((memory, handle)) = context.buffer_at(address, length) {
            request.source = MR_SOURCE_BUFFER.into();
            request.object = handle.into();
            request.offset = ((address - memory.address()) as u64).into();
            Source::Buffer { _memory: memory }
        } else {
            // SAFETY: as promised by the caller.
            let pin = unsafe {
                Pin::new(
                    context.transport(),
                    PinKind::Memory,
                    address,
                    length,
                    writable,
                )?
            };
            request.source = MR_SOURCE_PIN.into();
            request.object = pin.region().into();
            Source::Pin(pin)
        };
        Self::announce(pd, &request, source, address, length)
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
        let transport = pd.context().transport();
        let writable = access & ACCESS_LOCAL_WRITE != 0;
        // SAFETY: as promised by the caller.
        let pin = unsafe { Pin::new(transport, PinKind::AddressSpace, 0, 0, writable)? };
        let request = RegMr {
            pd: pd.handle().into(),
            access: access.into(),
            length: (length as u64).into(),
            iova: iova.into(),
            source: MR_SOURCE_PIN.into(),
            object: pin.region().into(),
            offset: (address as u64).into(),
        };
        Self::announce(pd, &request, Source::Pin(pin), address, length)
    }

    fn announce(
        pd: &Arc<Pd>,
        request: &RegMr,
        source: Source,
        address: usize,
        length: usize,
    ) -> Result<Self, Error> {
        let mr = pd.context().verbs().reg_mr(request)?;
        Ok(Self {
            pd: Arc::clone(pd),
            handle: mr.handle.get(),
            lkey: mr.lkey.get(),
            rkey: mr.rkey.get(),
            address,
            length,
            source: Mutex::new(Some(source)),
            destroyed: Destroyed::default(),
        })
    }

    /// Protection domain that it belongs to.
    #[must_use]
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
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
        self.address
    }

    /// Length of the region in bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    /// Ends the registration, then lets the memory go. When this returns nobody touches it.
    ///
    /// # Errors
    /// What the backend refuses with, `EBADF` of a handle that it does not know; the registration
    /// then stays.
    pub fn destroy(&self) -> Result<(), Error> {
        self.destroyed
            .once(|| self.pd.context().verbs().dereg_mr(&self.handle.into()))?;
        match lock(&self.source).take() {
            Some(Source::Pin(pin)) => match pin.release() {
                Err(error) if error.errno() != farlane_abi::Errno::ENODEV => Err(error.into()),
                _ => Ok(()),
            },
            Some(Source::Buffer { .. }) | None => Ok(()),
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // What a hostile answer leaves ends with the context.
        let _ = self.destroy();
    }
}
