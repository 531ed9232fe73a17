//! A controller behind a vfio-user socket.

use super::{Memory, Transport};
use farlane_nvme::bits::register::DOORBELLS;
use farlane_zero_copy::{Mapping, SharedMemory};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use vfio_user::Client;

/// Configuration space, as VFIO numbers regions.
const CONFIG: u32 = 7;
/// Command register: memory space, bus master (PCI 3.0, 6.2.2).
const COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u16 = 0b110;

/// A connection of the `vfio_user` crate's client.
pub struct Socket {
    client: Client,
    doorbells: Option<SharedMemory>,
}

impl Socket {
    /// Connects, and does what the firmware of a machine does: turns memory space and bus
    /// mastering on.
    ///
    /// # Errors
    /// Nobody is there, or speaks otherwise.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let mut client = Client::new(path).map_err(io::Error::other)?;
        let mut command = [0; 2];
        client
            .region_read(CONFIG, COMMAND, &mut command)
            .map_err(io::Error::other)?;
        let command = u16::from_le_bytes(command) | MEMORY_AND_MASTER;
        client
            .region_write(CONFIG, COMMAND, &command.to_le_bytes())
            .map_err(io::Error::other)?;
        let doorbells = map_doorbells(&client)?;
        Ok(Self { client, doorbells })
    }

    /// The client.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }
}

fn map_doorbells(client: &Client) -> io::Result<Option<SharedMemory>> {
    let Some(region) = client.region(0) else {
        return Ok(None);
    };
    let Some(file) = &region.file_offset else {
        return Ok(None);
    };
    let mut areas = region.sparse_areas.iter();
    let Some(area) = areas.find(|a| a.offset == DOORBELLS) else {
        return Ok(None);
    };
    // The area lies in the file where it lies in the region.
    let offset = file.start() + area.offset;
    Mapping::new(file.file().as_fd(), offset, area.size, true)
        .map(|mapping| Some(SharedMemory::new(mapping)))
        .map_err(io::Error::other)
}

impl Transport for Socket {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let read = self.client.region_read(0, offset, data);
        read.map_err(io::Error::other)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let written = self.client.region_write(0, offset, data);
        written.map_err(io::Error::other)
    }

    fn map(&mut self, memory: &Memory) -> io::Result<()> {
        let fd = memory.file().as_raw_fd();
        self.client
            .dma_map(0, memory.base(), memory.len(), fd)
            .map_err(io::Error::other)
    }

    fn unmap(&mut self, memory: &Memory) -> io::Result<()> {
        self.client
            .dma_unmap(memory.base(), memory.len())
            .map_err(io::Error::other)
    }

    fn reset(&mut self) -> io::Result<()> {
        self.client.reset().map_err(io::Error::other)
    }

    fn doorbells(&self) -> Option<&SharedMemory> {
        self.doorbells.as_ref()
    }
}
