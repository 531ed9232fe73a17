//! Drives a software GPU ([`farlane_abi::gpu`]) from user space: video memory that a program can
//! read files into, and a device that searches it.
//!
//! ```no_run
//! use farlane_gpu_driver::Gpu;
//! use std::os::unix::fs::FileExt as _;
//!
//! let gpu = Gpu::open(None)?;
//! let mut buffer = gpu.allocate(1 << 20)?;
//! let read = std::fs::File::open("log")?.read_at(buffer.as_mut_slice(), 0)?;
//! let mut search = gpu.prepare(&["10.0.0.7", "fe80::7"], 1000)?;
//! let matches = search.run(&buffer, 0..read)?;
//! println!("{} occurrences", matches.total);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! * [`Bars`]: how registers and video memory are reached; [`SysfsBars`] is the way of a guest.
//! * [`Gpu`]: a device in use by this process; [`Buffer`]: video memory of it.
//! * [`Search`], [`Tile`]: what it computes.
//! * [`DmaBuffer`]: system memory that the copy engine reaches.
//!
//! **Hook.** A process may contain `int farlane_io_register(void *, size_t, const char *provider)`
//! and `int farlane_io_unregister(void *)`, as it does when `libfarlane_io.so` is loaded. Then each
//! buffer is made known to them, with provider `soft`, and taken back before it is freed.

#[cfg(not(target_endian = "little"))]
compile_error!("The queue is little-endian, and so has to be the processor");

mod allocator;
mod bars;
mod buffer;
mod compute;
mod dma;
mod error;
mod gpu;
mod hook;
mod queue;
mod sysfs;

pub use bars::Bars;
pub use buffer::Buffer;
pub use compute::{Match, Matches, Search, Tile};
pub use dma::DmaBuffer;
pub use error::GpuError;
pub use gpu::Gpu;
pub use sysfs::{SysfsBars, find_devices};
