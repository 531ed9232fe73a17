//! A device in use by this process.

use crate::allocator::Allocator;
use crate::queue::{ENTRIES, Queue};
use crate::{Bars, Buffer, GpuError, SysfsBars, find_devices};
use farlane_abi::gpu as abi;
use farlane_sys::sync::lock;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

/// What buffers and the device share.
pub struct Device {
    /// Ends first: the device then touches nothing.
    pub queue: Queue,
    pub bars: Arc<dyn Bars>,
    allocator: Mutex<Allocator>,
}

impl Device {
    pub fn allocator(&self) -> MutexGuard<'_, Allocator> {
        lock(&self.allocator)
    }
}

/// A software GPU. Clones are the same one; it is given back when the last of them, and the last
/// buffer, is dropped.
#[derive(Clone)]
pub struct Gpu {
    pub(crate) device: Arc<Device>,
}

impl Gpu {
    /// Opens the device at a PCI address (`0000:01:00.0`), or the first one that this host has and
    /// that nobody uses, through sysfs: for root, and without interrupts.
    ///
    /// # Errors
    /// There is none, or it is in use, or this user may not.
    pub fn open(address: Option<&str>) -> Result<Self, GpuError> {
        let sysfs = Path::new("/sys");
        if let Some(address) = address {
            return Self::with_bars(Arc::new(SysfsBars::open(sysfs, address)?));
        }
        let mut last = GpuError::None {
            device: String::new(),
        };
        for address in find_devices(sysfs)? {
            match SysfsBars::open(sysfs, &address) {
                Ok(bars) => return Self::with_bars(Arc::new(bars)),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// Drives a device that is reached some other way.
    ///
    /// # Errors
    /// It is no software GPU, gone, or has too little memory.
    pub fn with_bars(bars: Arc<dyn Bars>) -> Result<Self, GpuError> {
        let kind = |why: String| GpuError::Kind {
            device: "The device".to_owned(),
            why,
        };
        let identity = bars.read32(abi::REG_IDENTITY);
        if identity == u32::MAX {
            return Err(GpuError::Gone);
        }
        let version = bars.read32(abi::REG_VERSION);
        if (identity, version) != (abi::IDENTITY, abi::VERSION) {
            return Err(kind(format!("identity {identity:#x}, version {version}")));
        }
        let bytes = u64::from(bars.read32(abi::REG_MEMORY_HIGH)) << 32
            | u64::from(bars.read32(abi::REG_MEMORY_LOW));
        if u64::try_from(bars.memory().1) != Ok(bytes) {
            return Err(kind(format!(
                "{bytes:#x} bytes of video memory, of which {:#x} are mapped",
                bars.memory().1
            )));
        }
        let mut allocator = Allocator::new(bytes);
        let queue_bytes = abi::queue_bytes(ENTRIES);
        let place = allocator
            .take(queue_bytes)
            .ok_or(GpuError::Memory(queue_bytes))?;
        Ok(Self {
            device: Arc::new(Device {
                queue: Queue::start(Arc::clone(&bars), place)?,
                bars,
                allocator: Mutex::new(allocator),
            }),
        })
    }

    /// Video memory, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.device.bars.memory().1
    }

    /// Video memory that is not part of a buffer, in bytes; perhaps not in one piece.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.device.allocator().free_bytes()
    }

    /// Allocates video memory, which begins at a page. What it contains is what was there.
    ///
    /// # Errors
    /// There is not so much left in one piece.
    pub fn allocate(&self, bytes: usize) -> Result<Buffer, GpuError> {
        Buffer::new(Arc::clone(&self.device), bytes)
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("memory_bytes", &self.memory_bytes())
            .finish_non_exhaustive()
    }
}
