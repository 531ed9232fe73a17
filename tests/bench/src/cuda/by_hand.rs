//! A request by one plain call, and as programs do it by hand.

use crate::cufile::CuFile;
use crate::device::{Device, Memory, Pinned};
use anyhow::{Context as _, Result, ensure};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

/// How bytes go.
#[derive(Clone, Copy)]
pub enum Way {
    /// One call with the device pointer.
    Plain,
    /// Through pageable memory, and `cuMemcpy`.
    Pageable,
    /// Through pinned memory, and `cuMemcpy`.
    Pinned,
    /// By `cuFileRead` and `cuFileWrite`.
    CuFile,
}

/// Requests of one size.
pub struct Ways<'a> {
    file: &'a File,
    memory: Memory<'a>,
    pageable: Vec<u8>,
    pinned: Pinned<'a>,
    cufile: Option<&'a CuFile>,
    size: usize,
}

impl<'a> Ways<'a> {
    pub fn new(
        device: &'a Device,
        file: &'a File,
        cufile: Option<&'a CuFile>,
        size: usize,
    ) -> Result<Self> {
        Ok(Self {
            file,
            memory: device.allocate(size, true)?,
            pageable: vec![1; size],
            pinned: device.pinned(size)?,
            cufile,
            size,
        })
    }

    pub fn read(&mut self, way: Way, at: u64) -> Result<()> {
        let (fd, size) = (self.file.as_raw_fd(), self.size);
        match way {
            Way::Plain => {
                let to = self.memory.pointer(0);
                // SAFETY: the pointer goes to the call only.
                let moved = unsafe { libc::pread(fd, to, size, at.try_into()?) };
                ensure!(
                    moved == size.cast_signed(),
                    "pread of {size} at {at} to {to:?}: {moved}, {}",
                    std::io::Error::last_os_error()
                );
            }
            Way::Pageable => {
                self.file.read_exact_at(&mut self.pageable, at)?;
                self.memory.copy_in(&self.pageable, 0)?;
            }
            Way::Pinned => {
                self.file.read_exact_at(self.pinned.bytes(), at)?;
                self.memory.copy_in(self.pinned.bytes(), 0)?;
            }
            Way::CuFile => {
                let cufile = self.cufile.context("No cuFile")?;
                cufile.read(&self.memory, size, at)?;
            }
        }
        Ok(())
    }

    pub fn write(&mut self, way: Way, at: u64) -> Result<()> {
        let (fd, size) = (self.file.as_raw_fd(), self.size);
        match way {
            Way::Plain => {
                let from = self.memory.pointer(0);
                // SAFETY: the pointer goes to the call only.
                let moved = unsafe { libc::pwrite(fd, from, size, at.try_into()?) };
                ensure!(moved == size.cast_signed(), "pwrite: {moved}");
            }
            Way::Pageable => {
                self.memory.copy_out(&mut self.pageable, 0)?;
                self.file.write_all_at(&self.pageable, at)?;
            }
            Way::Pinned => {
                self.memory.copy_out(self.pinned.bytes(), 0)?;
                self.file.write_all_at(self.pinned.bytes(), at)?;
            }
            Way::CuFile => {
                let cufile = self.cufile.context("No cuFile")?;
                cufile.write(&self.memory, size, at)?;
            }
        }
        Ok(())
    }
}
