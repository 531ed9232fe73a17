//! How a driver reaches its controller.

use super::Memory;
use farlane_nvme::bits::register;
use farlane_zero_copy::SharedMemory;
use std::io;

/// A register (NVMe 1.4, 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
#[allow(missing_docs)]
pub enum Register {
    Cap = register::CAP,
    Vs = register::VS,
    Intms = register::INTMS,
    Intmc = register::INTMC,
    Cc = register::CC,
    Csts = register::CSTS,
    Aqa = register::AQA,
    Asq = register::ASQ,
    Acq = register::ACQ,
}

/// BAR 0 of a controller, and its way to memory.
pub trait Transport {
    /// Reads BAR 0.
    ///
    /// # Errors
    /// It is refused, or nobody is there.
    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()>;

    /// Writes BAR 0.
    ///
    /// # Errors
    /// It is refused, or nobody is there.
    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Lets the controller reach memory.
    ///
    /// # Errors
    /// It is refused, or nobody is there.
    fn map(&mut self, memory: &Memory) -> io::Result<()>;

    /// Takes it away.
    ///
    /// # Errors
    /// It is refused, or nobody is there.
    fn unmap(&mut self, memory: &Memory) -> io::Result<()>;

    /// Function-level reset.
    ///
    /// # Errors
    /// It is refused, or nobody is there.
    fn reset(&mut self) -> io::Result<()>;

    /// The doorbell page, where it can be mapped.
    fn doorbells(&self) -> Option<&SharedMemory>;
}
