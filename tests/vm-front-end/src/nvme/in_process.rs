//! A controller in the same process.

use super::{Memory, Transport};
use farlane_nvme::bits::register::DOORBELLS;
use farlane_pci::{
    AddressRange, Attachment, DmaMapping, DmaTarget, Function, Region, RemoteMemory, Source,
    SourceError,
};
use farlane_zero_copy::{Mapping, SharedMemory};
use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;

/// A function that has been taken from its source.
pub struct InProcess {
    function: Box<dyn Function>,
    doorbells: Option<SharedMemory>,
    /// Memory is reached by messages, by way of this.
    remote: Option<Arc<dyn RemoteMemory>>,
}

impl InProcess {
    /// Takes the function of a source.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub fn new(source: &dyn Source) -> Result<Self, SourceError> {
        let attachment = source.attach()?;
        let function = source.take(&attachment)?;
        Ok(Self {
            function,
            doorbells: map_doorbells(&attachment).map_err(|source| SourceError::Failed {
                what: "map the doorbells".into(),
                source,
            })?,
            remote: None,
        })
    }

    /// Has all memory that is mapped from now on reached by messages.
    #[must_use]
    pub fn with_remote_memory(mut self, memory: Arc<dyn RemoteMemory>) -> Self {
        self.remote = Some(memory);
        self
    }

    /// The function.
    #[must_use]
    pub fn function(&self) -> &dyn Function {
        &*self.function
    }
}

fn map_doorbells(attachment: &Attachment) -> io::Result<Option<SharedMemory>> {
    let mut areas = attachment.areas.iter();
    let area = areas.find(|a| a.region == Region::Bar0 && a.area.offset == DOORBELLS);
    let map = |area: &farlane_pci::SharedArea| {
        Mapping::new(area.file.as_fd(), area.file_offset, area.area.size, true)
            .map(SharedMemory::new)
            .map_err(io::Error::other)
    };
    area.map(map).transpose()
}

impl Transport for InProcess {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let read = self.function.read(Region::Bar0, offset, data);
        read.map_err(io::Error::other)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let written = self.function.write(Region::Bar0, offset, data);
        written.map_err(io::Error::other)
    }

    fn map(&mut self, memory: &Memory) -> io::Result<()> {
        let target = match &self.remote {
            Some(remote) => DmaTarget::Remote(Arc::clone(remote)),
            None => DmaTarget::File {
                file: Arc::clone(memory.file()),
                offset: 0,
            },
        };
        let mapping = DmaMapping {
            range: AddressRange::new(memory.base(), memory.len()),
            writable: true,
            target,
        };
        self.function.map(mapping).map_err(io::Error::other)
    }

    fn unmap(&mut self, memory: &Memory) -> io::Result<()> {
        let unmapped = self
            .function
            .unmap(AddressRange::new(memory.base(), memory.len()));
        unmapped.map_err(io::Error::other)
    }

    fn reset(&mut self) -> io::Result<()> {
        self.function.reset().map_err(io::Error::other)
    }

    fn doorbells(&self) -> Option<&SharedMemory> {
        self.doorbells.as_ref()
    }
}
