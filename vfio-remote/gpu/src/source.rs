//! The GPU as a thing that can be lent again and again.

use crate::counters::Counters;
use crate::function::GpuFunction;
use crate::memory::{self, VideoMemory};
use crate::shared::Shared;
use farlane_abi::PAGE_BYTES;
use farlane_abi::gpu::{CLASS, DEVICE, REGISTER_BYTES, VECTORS, VENDOR};
use farlane_pci::{
    Area, Attachment, ClassCode, Counter, Description, Function, Region, SharedArea, Source,
    SourceError, Template,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use thiserror::Error;

/// Where the MSI-X table is in BAR 0.
pub const MSIX_TABLE: u64 = 2 * PAGE_BYTES;
/// Where its pending bits are.
pub const MSIX_PENDING: u64 = 3 * PAGE_BYTES;

/// Video memory where nobody says otherwise, in bytes.
pub const DEFAULT_MEMORY_BYTES: u64 = 256 << 20;
/// Least video memory, in bytes.
pub const MIN_MEMORY_BYTES: u64 = 1 << 20;
/// Most video memory, in bytes.
pub const MAX_MEMORY_BYTES: u64 = 64 << 30;

/// Why there is no GPU.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum GpuError {
    /// A size that a BAR cannot have.
    #[error("Video memory of {0} bytes is not a power of two from 1 MiB to 64 GiB")]
    Size(u64),
}

/// A software GPU.
///
/// Whoever attaches gets video memory of his own: a file, which takes host memory where it has been
/// written. A function that is taken from it has one thread. Video memory is zeroes when a function
/// is taken, after it is reset, and when it has been given back.
#[derive(Debug)]
pub struct GpuSource {
    description: Description,
    memory_bytes: u64,
    counters: Arc<Counters>,
    in_use: Arc<AtomicBool>,
}

impl GpuSource {
    /// A GPU with so much video memory.
    ///
    /// # Errors
    /// Not a power of two, too little or too much.
    pub fn new(memory_bytes: u64) -> Result<Self, GpuError> {
        let fits = (MIN_MEMORY_BYTES..=MAX_MEMORY_BYTES).contains(&memory_bytes);
        if !memory_bytes.is_power_of_two() || !fits {
            return Err(GpuError::Size(memory_bytes));
        }
        let class = ClassCode {
            base: CLASS,
            sub: 0,
            interface: 0,
        };
        let description = Template::new(VENDOR, DEVICE, 1, class)
            .memory_bar(0, REGISTER_BYTES, false)
            .memory_bar(2, memory_bytes, true)
            .msix(VECTORS, 0, 0x2000, 0x3000)
            .describe(format!("Software GPU with {} MiB", memory_bytes >> 20));
        Ok(Self {
            description,
            memory_bytes,
            counters: Arc::default(),
            in_use: Arc::default(),
        })
    }
}

impl GpuSource {
    /// A function whose worker is the caller, and what it works on.
    pub(crate) fn take_still(&self) -> Result<(GpuFunction, Arc<Shared>), SourceError> {
        let lease = Lease::new(&self.in_use).ok_or(SourceError::Busy)?;
        let file = memory::new_file(self.memory_bytes).map_err(failed("make video memory"))?;
        let memory = VideoMemory::new(Arc::new(file), self.memory_bytes)
            .map_err(failed("map video memory"))?;
        let config = self.description.config.clone();
        GpuFunction::still(memory, config, Arc::clone(&self.counters), lease)
            .map_err(failed("start the GPU"))
    }
}

fn failed(what: &'static str) -> impl FnOnce(std::io::Error) -> SourceError {
    move |source| SourceError::Failed {
        what: what.to_owned(),
        source,
    }
}

impl Source for GpuSource {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self) -> Result<Attachment, SourceError> {
        let file = memory::new_file(self.memory_bytes).map_err(failed("make video memory"))?;
        Ok(Attachment {
            areas: vec![SharedArea {
                region: Region::Bar2,
                area: Area {
                    offset: 0,
                    size: self.memory_bytes,
                },
                file: Arc::new(file),
                file_offset: 0,
            }],
            liveness: None,
        })
    }

    fn take(&self, attachment: &Attachment) -> Result<Box<dyn Function>, SourceError> {
        let lease = Lease::new(&self.in_use).ok_or(SourceError::Busy)?;
        let is_memory = |a: &&SharedArea| {
            (a.region, a.area.offset, a.area.size) == (Region::Bar2, 0, self.memory_bytes)
        };
        let file = match attachment.areas.iter().find(is_memory) {
            Some(area) => Arc::clone(&area.file),
            // Nobody maps it: it is reached by messages.
            None => {
                let file = memory::new_file(self.memory_bytes);
                Arc::new(file.map_err(failed("make video memory"))?)
            }
        };
        let memory =
            VideoMemory::new(file, self.memory_bytes).map_err(failed("map video memory"))?;
        let function = GpuFunction::start(
            memory,
            self.description.config.clone(),
            Arc::clone(&self.counters),
            lease,
        )
        .map_err(failed("start the GPU"))?;
        Ok(Box::new(function))
    }

    fn counters(&self) -> Vec<Counter> {
        self.counters.list()
    }
}

/// There is one at a time.
#[derive(Debug)]
pub struct Lease(Arc<AtomicBool>);

impl Lease {
    fn new(in_use: &Arc<AtomicBool>) -> Option<Self> {
        (!in_use.swap(true, Ordering::SeqCst)).then(|| Self(Arc::clone(in_use)))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
