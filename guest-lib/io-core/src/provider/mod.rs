//! Whose memory a region is, and how bytes get into it.

mod cuda;

use rustix::io::Errno;
use std::fmt::Debug;
use std::sync::Arc;

pub use cuda::{Cuda, CudaError};

/// Device memory of one kind.
pub trait Provider: Debug + Send + Sync {
    /// Its name: what registration and the trace call it.
    fn name(&self) -> &'static str;

    /// Whether the addresses are mapped, so that the kernel copies file contents there by itself.
    fn is_mapped(&self) -> bool {
        true
    }

    /// Whether direct I/O may be tried with the addresses themselves.
    fn is_direct(&self) -> bool;

    /// Whether a tunnel may be made to it.
    fn is_tunnelled(&self) -> bool {
        false
    }

    /// Whether `length` bytes at `address` are such memory still.
    fn holds(&self, _address: usize, _length: usize) -> bool {
        true
    }

    /// Copies bytes to device memory.
    ///
    /// # Errors
    /// `EFAULT` where the device does not reach the memory, or its driver fails.
    ///
    /// # Safety
    /// `address` holds `from.len()` bytes of registered memory.
    unsafe fn copy_in(&self, address: usize, from: &[u8]) -> Result<(), Errno> {
        let to = std::ptr::with_exposed_provenance_mut::<u8>(address);
        // SAFETY: registered, says the caller; a private buffer does not overlap device memory.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Ok(())
    }

    /// Copies bytes from device memory.
    ///
    /// # Errors
    /// `EFAULT` where the device does not reach the memory, or its driver fails.
    ///
    /// # Safety
    /// As [`copy_in`](Self::copy_in).
    unsafe fn copy_out(&self, to: &mut [u8], address: usize) -> Result<(), Errno> {
        let from = std::ptr::with_exposed_provenance::<u8>(address);
        // SAFETY: registered, says the caller; a private buffer does not overlap device memory.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Whether the device that has `address` copies to and from a buffer (address and length) by
    /// itself, while the thread does something else. It may pin the buffer for that, which stays
    /// mapped until the process ends.
    fn pin(&self, _address: usize, _buffer: (usize, usize)) -> bool {
        false
    }

    /// Copies bytes to device memory, or begins to: [`finish_copies`](Self::finish_copies) waits
    /// for it.
    ///
    /// # Errors
    /// As [`copy_in`](Self::copy_in); those of the copy itself may be told at its end.
    ///
    /// # Safety
    /// As [`copy_in`](Self::copy_in); nobody changes the buffer before the copy has ended.
    unsafe fn begin_copy_in(&self, address: usize, from: &[u8]) -> Result<(), Errno> {
        // SAFETY: as promised by the caller.
        unsafe { self.copy_in(address, from) }
    }

    /// Copies bytes from device memory, or begins to.
    ///
    /// # Errors
    /// As [`begin_copy_in`](Self::begin_copy_in).
    ///
    /// # Safety
    /// As [`copy_in`](Self::copy_in); nobody uses the buffer before the copy has ended.
    unsafe fn begin_copy_out(&self, to: &mut [u8], address: usize) -> Result<(), Errno> {
        // SAFETY: as promised by the caller.
        unsafe { self.copy_out(to, address) }
    }

    /// Waits for the copies that this thread has begun with memory of the device that has
    /// `address`.
    ///
    /// # Errors
    /// `EFAULT` where one of them failed, or cannot be waited for: it may be under way still.
    fn finish_copies(&self, _address: usize) -> Result<(), Errno> {
        Ok(())
    }
}

/// Memory behind a mapped BAR: that of the soft GPU, or on a host a shared mapping of a file. A
/// tunnel reaches it where there is one; direct I/O where the kernel has pages for it.
#[derive(Clone, Copy, Debug)]
pub struct Soft;

impl Provider for Soft {
    fn name(&self) -> &'static str {
        "soft"
    }

    fn is_direct(&self) -> bool {
        true
    }

    fn is_tunnelled(&self) -> bool {
        true
    }
}

/// PCI P2PDMA memory: the kernel has pages for it, and says at the first use whether a disk reaches
/// it.
#[derive(Clone, Copy, Debug)]
pub struct P2pmem;

impl Provider for P2pmem {
    fn name(&self) -> &'static str {
        "p2pmem"
    }

    fn is_direct(&self) -> bool {
        true
    }
}

/// The provider with that name.
///
/// # Errors
/// When there is none, or its driver is not there.
pub fn find(name: &str) -> Result<Arc<dyn Provider>, ProviderError> {
    match name {
        "soft" => Ok(Arc::new(Soft)),
        "p2pmem" => Ok(Arc::new(P2pmem)),
        "cuda" => Ok(Cuda::shared()?),
        _ => Err(ProviderError::Unknown(name.into())),
    }
}

/// Why there is no such provider.
#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    /// The name is none.
    #[error("There is no provider {0}: soft, p2pmem and cuda are known")]
    Unknown(String),
    /// The CUDA driver cannot be used.
    #[error("CUDA cannot be used")]
    Cuda(#[from] CudaError),
}
