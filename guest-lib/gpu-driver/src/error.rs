//! What can go wrong.

use std::io;
use thiserror::Error;

/// Why the device was not opened, or has not done something.
#[derive(Debug, Error)]
pub enum GpuError {
    /// There is no such device.
    #[error("There is no software GPU{}{}", if device.is_empty() { "" } else { " at " }, device)]
    None {
        /// Its address, where one was given.
        device: String,
    },
    /// It is another kind of device, or speaks another version.
    #[error("{device} is no software GPU that is known here: {why}")]
    Kind {
        /// PCI address of the device.
        device: String,
        /// What was found: vendor and device ID, or identity and version.
        why: String,
    },
    /// Another process uses it.
    #[error("{0} is in use")]
    Busy(String),
    /// The system refused something.
    #[error("Cannot {what}")]
    System {
        /// The operation that failed.
        what: String,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// The device was taken away.
    #[error("The GPU is gone")]
    Gone,
    /// The device does not do what it is told: it has stopped its queue.
    #[error("The GPU has stopped with status {0:#x}")]
    Stopped(u32),
    /// There is not so much video memory left in one piece.
    #[error("There are no {0:#x} bytes of video memory left in one piece")]
    Memory(u64),
    /// A range that does not lie in a buffer.
    #[error("{length:#x} bytes at {offset:#x} do not lie in a buffer of {size:#x} bytes")]
    Range {
        /// Offset in the buffer, in bytes.
        offset: usize,
        /// Length of the range in bytes.
        length: usize,
        /// Bytes of the buffer.
        size: usize,
    },
    /// Patterns that the device does not search for.
    #[error("{0}")]
    Patterns(&'static str),
    /// A buffer of another device.
    #[error("The buffer belongs to another GPU")]
    Foreign,
    /// The device has refused a command.
    #[error("The GPU has refused {what}: status {status}")]
    Refused {
        /// The command that was refused.
        what: &'static str,
        /// Completion status, of [`farlane_abi::gpu`].
        status: u32,
    },
    /// System memory that the device can reach is not to be had here.
    #[error("There is no memory for DMA: {0}")]
    Dma(String),
}

impl GpuError {
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::System { what, source }
    }
}
