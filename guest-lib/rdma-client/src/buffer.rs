//! Buffers in host memory (paper section IV-C), with guest memory where the VMM has no window.

use crate::{AllocBuffer, Context, Error};
use farlane_abi::config::FEATURE_WINDOW;
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
        let page = usize::try_from(PAGE_BYTES).map_err(|_| Error::Invalid("length"))?;
        let whole = length
            .checked_next_multiple_of(page)
            .filter(|&whole| whole > 0)
            .ok_or(Error::Invalid("length"))?;
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
        let memory = Arc::new(BufferMemory {
            backing: Some(backing),
            context: Arc::clone(context),
        });
        context.remember_buffer(&memory);
        Ok(Self { memory })
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

/// Asks the backend for a buffer and maps it.
fn host(context: &Arc<Context>, length: usize) -> Result<Backing, Error> {
    if context.transport().info().features & FEATURE_WINDOW == 0 {
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
