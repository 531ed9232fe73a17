//! The GPU as a thing that can be lent again and again.

use crate::counters::Counters;
use crate::function::GpuFunction;
use crate::memory::{self, VideoMemory};
use crate::shared::Shared;
use crate::worker::work;
use farlane_abi::gpu::{CLASS, DEVICE, REGISTER_BYTES, VECTORS, VENDOR};
use farlane_pci::emulated::{BAR0_BYTES, Claim, MSIX_PENDING, MSIX_TABLE};
use farlane_pci::{
    Area, Attachment, ClassCode, Counter, Description, Function, Region, SharedArea, Source,
    SourceError, Template,
};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use thiserror::Error;

const _: () = assert!(REGISTER_BYTES == BAR0_BYTES);

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
        let class = ClassCode::new(CLASS, 0, 0);
        let description = Template::new(VENDOR, DEVICE, 1, class)
            .memory_bar(0, REGISTER_BYTES, false)
            .memory_bar(2, memory_bytes, true)
            .msix(VECTORS, 0, MSIX_TABLE, MSIX_PENDING)
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
    /// Video memory of nobody's: where nobody maps it, it is reached by messages.
    fn new_memory(&self) -> Result<OwnedFd, SourceError> {
        memory::new_file(self.memory_bytes).map_err(SourceError::failed("make video memory"))
    }

    /// What a function is, with its video memory cleared.
    fn model(&self, file: Arc<OwnedFd>) -> Result<Arc<Shared>, SourceError> {
        let memory = VideoMemory::new(file, self.memory_bytes)
            .map_err(SourceError::failed("map video memory"))?;
        memory
            .clear()
            .map_err(SourceError::failed("clear video memory"))?;
        let counters = Arc::clone(&self.counters);
        Ok(Arc::new(Shared::new(
            memory,
            self.description.interrupts,
            counters,
        )))
    }

    /// A function whose worker is the caller, and what it works on.
    pub(crate) fn take_still(&self) -> Result<(GpuFunction, Arc<Shared>), SourceError> {
        let claim = Claim::new(&self.in_use).ok_or(SourceError::Busy)?;
        let model = self.model(Arc::new(self.new_memory()?))?;
        let function = GpuFunction::without_worker(Arc::clone(&model), &self.description, claim);
        Ok((function, model))
    }
}

impl Source for GpuSource {
    fn description(&self) -> &Description {
        &self.description
    }

    fn attach(&self) -> Result<Attachment, SourceError> {
        Ok(Attachment {
            areas: vec![SharedArea {
                region: Region::Bar2,
                area: Area {
                    offset: 0,
                    size: self.memory_bytes,
                },
                file: Arc::new(self.new_memory()?),
                file_offset: 0,
            }],
            liveness: None,
        })
    }

    fn take(&self, attachment: &Attachment) -> Result<Box<dyn Function>, SourceError> {
        let claim = Claim::new(&self.in_use).ok_or(SourceError::Busy)?;
        let is_memory = |a: &&SharedArea| {
            (a.region, a.area.offset, a.area.size) == (Region::Bar2, 0, self.memory_bytes)
        };
        let file = match attachment.areas.iter().find(is_memory) {
            Some(area) => Arc::clone(&area.file),
            None => Arc::new(self.new_memory()?),
        };
        let model = self.model(file)?;
        let function = GpuFunction::start(model, &self.description, claim, "gpu", |m| work(m))
            .map_err(SourceError::failed("start the GPU"))?;
        Ok(Box::new(function))
    }

    fn counters(&self) -> Vec<Counter> {
        self.counters.samples()
    }
}
