//! Buffers in host memory (paper section IV-C), with guest memory where the VMM has no window.

use crate::{AllocBuffer, Context, Error};
use farlane_abi::width::to_usize;
use farlane_abi::{Errno, PAGE_BYTES};
use farlane_transport::{Map, Mapping};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long to wait for memory that the backend clears: it takes 17 ms for 256 MiB.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time between two requests meanwhile.
const PAUSE: Duration = Duration::from_millis(1);

/// Where a buffer's memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Allocated by the host and mapped into this process.
    Host,
    /// This process's own pages.
    Guest,
}

/// Page-aligned memory made for RDMA. Freed when it and every registration over it are gone.
#[derive(Clone, Debug)]
pub struct Buffer {
    memory: Arc<BufferMemory>,
}

impl Buffer {
    /// Allocates at least `length` zeroed bytes, in whole pages: in host memory, or in this
    /// process's own when the device has no window or the window is full.
    ///
    /// # Errors
    /// `EINVAL` for no bytes, else what the backend or the kernel says.
    pub fn allocate(context: &Arc<Context>, length: usize) -> Result<Self, Error> {
        let whole = whole_pages(length)?;
        let backing = match host(context, whole) {
            Err(error)
                if matches!(
                    error.errno(),
                    Errno::EOPNOTSUPP | Errno::ENOSPC | Errno::EAGAIN
                ) =>
            {
                Backing::Guest(Map::anonymous(whole)?)
            }
            other => other?,
        };
        Ok(Self::of(context, backing))
    }

    /// The same in host memory alone.
    ///
    /// # Errors
    /// `EINVAL` for no bytes, `EOPNOTSUPP` where the device has no window, else what the backend or
    /// the kernel says.
    pub fn in_host_memory(context: &Arc<Context>, length: usize) -> Result<Self, Error> {
        let whole = whole_pages(length)?;
        Ok(Self::of(context, host(context, whole)?))
    }

    fn of(context: &Arc<Context>, backing: Backing) -> Self {
        let memory = Arc::new(BufferMemory {
            backing: Some(backing),
            context: Arc::clone(context),
        });
        context.remember_buffer(&memory);
        Self { memory }
    }

    /// Whether something else holds its memory: a registration, or a copy of this object.
    #[must_use]
    pub fn is_held(&self) -> bool {
        Arc::strong_count(&self.memory) > 1
    }

    /// The backend's handle of it, where it is in host memory.
    #[must_use]
    pub fn handle(&self) -> Option<u32> {
        self.memory.handle()
    }

    pub(crate) fn memory(&self) -> &Arc<BufferMemory> {
        &self.memory
    }

    /// Where its memory lies.
    #[must_use]
    pub fn placement(&self) -> Placement {
        match self.memory.backing {
            Some(Backing::Host { .. }) => Placement::Host,
            _ => Placement::Guest,
        }
    }

    /// The first byte. The memory stays as long as this object or a registration over it.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.memory.map().base()
    }

    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.memory.address()
    }

    /// Length in bytes, whole pages.
    #[must_use]
    pub fn length(&self) -> usize {
        self.memory.length()
    }

    /// The memory with its bounds.
    #[must_use]
    pub fn map(&self) -> &Map {
        self.memory.map()
    }
}

/// So many bytes in whole pages.
fn whole_pages(length: usize) -> Result<usize, Error> {
    length
        .checked_next_multiple_of(to_usize(PAGE_BYTES))
        .filter(|&whole| whole > 0)
        .ok_or(Error::Invalid("length"))
}

/// Asks the backend for a buffer and maps it.
fn host(context: &Arc<Context>, length: usize) -> Result<Backing, Error> {
    if !context.has_host_memory() {
        return Err(Error::Refused(Errno::EOPNOTSUPP));
    }
    let request = AllocBuffer {
        length: (length as u64).into(),
        ..AllocBuffer::default()
    };
    let began = Instant::now();
    let buffer = loop {
        match context.verbs().alloc_buffer(&request) {
            Err(error) if error.errno() == Errno::EAGAIN && began.elapsed() < PATIENCE => {
                std::thread::sleep(PAUSE);
            }
            other => break other?,
        }
    };
    let handle = buffer.handle.get();
    let mapped = usize::try_from(buffer.length.get())
        .ok()
        .filter(|&granted| granted >= length)
        .ok_or(Error::Refused(Errno::EPROTO))
        .and_then(|granted| {
            let offset = buffer.offset.get();
            Ok(Mapping::new(context.transport(), handle, offset, granted)?)
        });
    match mapped {
        Ok(mapping) => Ok(Backing::Host { mapping, handle }),
        Err(error) => {
            let _ = context.verbs().free_buffer(&handle.into());
            Err(error)
        }
    }
}

#[derive(Debug)]
enum Backing {
    Host { mapping: Mapping, handle: u32 },
    Guest(Map),
}

/// A buffer's memory: shared by [`Buffer`] and the registrations over it.
#[derive(Debug)]
pub(crate) struct BufferMemory {
    backing: Option<Backing>,
    context: Arc<Context>,
}

impl BufferMemory {
    /// The context that it is of.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn map(&self) -> &Map {
        match &self.backing {
            Some(Backing::Host { mapping, .. }) => mapping,
            Some(Backing::Guest(map)) => map,
            None => unreachable!("only drop takes the memory"),
        }
    }

    pub(crate) fn address(&self) -> usize {
        self.map().base().addr().get()
    }

    pub(crate) fn length(&self) -> usize {
        self.map().len()
    }

    /// The backend's handle, where the memory is the host's.
    pub(crate) fn handle(&self) -> Option<u32> {
        match self.backing {
            Some(Backing::Host { handle, .. }) => Some(handle),
            _ => None,
        }
    }
}

impl Drop for BufferMemory {
    fn drop(&mut self) {
        self.context.forget_buffer(self.address());
        if let Some(Backing::Host { mapping, handle }) = self.backing.take() {
            drop(mapping);
            // What a hostile answer leaves ends with the context.
            let _ = self.context.verbs().free_buffer(&handle.into());
        }
    }
}
