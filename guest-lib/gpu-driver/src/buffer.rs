//! Video memory of a program.

use crate::gpu::Device;
use crate::{DmaBuffer, GpuError, hook};
use farlane_abi::gpu as abi;
use farlane_abi::width::{halves, to_u64, to_usize};
use std::ops::Range;
use std::sync::Arc;

/// Video memory, mapped. Commands that read it borrow it, those that write it borrow it
/// exclusively, and both have ended when they return: so it can be lent out as a slice.
pub struct Buffer {
    device: Arc<Device>,
    /// Offset of the first byte in video memory.
    offset: u64,
    length: usize,
    registered: bool,
}

impl Buffer {
    pub(crate) fn new(device: Arc<Device>, length: usize) -> Result<Self, GpuError> {
        let bytes = to_u64(length);
        let offset = device
            .allocator()
            .take(bytes)
            .ok_or(GpuError::Memory(bytes))?;
        let mut buffer = Self {
            device,
            offset,
            length,
            registered: false,
        };
        buffer.registered = hook::register(buffer.as_mut_ptr(), length);
        Ok(buffer)
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Where it is in video memory, in bytes: a multiple of the page size.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether somebody in this process has been told of it: see the crate's documentation.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.registered
    }

    fn pointer(&self) -> *mut u8 {
        let at = to_usize(self.offset);
        self.device.bars.memory().0.wrapping_add(at)
    }

    /// First byte, in the mapping: valid as long as this lives.
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.pointer()
    }

    /// Its bytes, through the mapping. Reading video memory so is slow on real devices.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the allocator gave this range of video memory to this buffer alone, and it is
        // mapped (`Bars`) as long as `device` lives. No command that writes it is under way.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.length) }
    }

    /// The same, to be written: by `read`, for example.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above; no command that reads it is under way either.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.length) }
    }

    /// Where a range of it is in video memory.
    pub(crate) fn place(&self, range: &Range<usize>) -> Result<(u64, u64), GpuError> {
        let length = range.end.saturating_sub(range.start);
        let error = GpuError::Range {
            offset: range.start,
            length,
            size: self.length,
        };
        if range.start > range.end || range.end > self.length {
            return Err(error);
        }
        match (u64::try_from(range.start), u64::try_from(length)) {
            (Ok(start), Ok(length)) => Ok((self.offset + start, length)),
            _ => Err(error),
        }
    }

    /// Refuses a buffer of another device.
    pub(crate) fn check(&self, device: &Arc<Device>) -> Result<(), GpuError> {
        if Arc::ptr_eq(&self.device, device) {
            Ok(())
        } else {
            Err(GpuError::Foreign)
        }
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// CRC-32C of a range, by the device.
    ///
    /// # Errors
    /// Not a range of it, or the device fails.
    pub fn checksum(&self, range: Range<usize>) -> Result<u32, GpuError> {
        let (source, length) = self.place(&range)?;
        let command = abi::Command {
            operation: abi::OP_CHECKSUM.into(),
            source: source.into(),
            length: length.into(),
            ..Default::default()
        };
        let completion = self.device.queue.execute("a checksum", &command)?;
        Ok(halves(completion.result.get())[0])
    }

    /// Copies a range of another buffer to byte `at` of this one, by the device.
    ///
    /// # Errors
    /// Not in range, a buffer of another device, or the device fails.
    pub fn copy_from(
        &mut self,
        at: usize,
        source: &Self,
        range: Range<usize>,
    ) -> Result<(), GpuError> {
        source.check(&self.device)?;
        self.copy(source.place(&range)?, at)
    }

    /// Copies a range to another place in this buffer; they may overlap.
    ///
    /// # Errors
    /// As [`copy_from`](Self::copy_from).
    pub fn copy_within(&mut self, range: Range<usize>, at: usize) -> Result<(), GpuError> {
        let source = self.place(&range)?;
        self.copy(source, at)
    }

    fn copy(&mut self, (source, length): (u64, u64), at: usize) -> Result<(), GpuError> {
        let bytes = to_usize(length);
        let (target, _) = self.place(&(at..at.saturating_add(bytes)))?;
        self.execute_copy(abi::OP_COPY, source, target, length)
    }

    fn execute_copy(
        &self,
        operation: u16,
        source: u64,
        target: u64,
        length: u64,
    ) -> Result<(), GpuError> {
        let command = abi::Command {
            operation: operation.into(),
            source: source.into(),
            target: target.into(),
            length: length.into(),
            ..Default::default()
        };
        self.device.queue.execute("a copy", &command).map(drop)
    }

    /// Copies system memory to byte `at`, by the device's copy engine.
    ///
    /// # Errors
    /// Not in range, or the device fails or does not reach the memory.
    pub fn copy_from_dma(
        &mut self,
        at: usize,
        source: &DmaBuffer,
        range: Range<usize>,
    ) -> Result<(), GpuError> {
        let mut at = at;
        for (address, bytes) in source.runs(&range)? {
            let (target, length) = self.place(&(at..at.saturating_add(bytes)))?;
            self.execute_copy(abi::OP_COPY_IN, address, target, length)?;
            at += bytes;
        }
        Ok(())
    }

    /// Copies a range to byte `at` of system memory, by the device's copy engine.
    ///
    /// # Errors
    /// As [`copy_from_dma`](Self::copy_from_dma).
    pub fn copy_to_dma(
        &self,
        range: Range<usize>,
        target: &mut DmaBuffer,
        at: usize,
    ) -> Result<(), GpuError> {
        self.place(&range)?;
        let mut from = range.start;
        for (address, bytes) in target.runs(&(at..at.saturating_add(range.len())))? {
            let (source, length) = self.place(&(from..from + bytes))?;
            self.execute_copy(abi::OP_COPY_OUT, source, address, length)?;
            from += bytes;
        }
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.registered {
            hook::unregister(self.pointer());
        }
        let bytes = to_u64(self.length);
        self.device.allocator().give(self.offset, bytes);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("offset", &self.offset)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}
