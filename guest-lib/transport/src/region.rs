//! Owners of what a transport gives: released when dropped.

use crate::{Map, PinKind, Transport, TransportError};
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Memory that process and backend share. Derefs to its [`Map`].
#[derive(Debug)]
pub struct Segment {
    // Taken first when dropped: the kernel refuses to detach what is mapped.
    map: Option<Arc<Map>>,
    region: u32,
    transport: Arc<dyn Transport>,
    is_header: bool,
}

impl Segment {
    /// Allocates a zeroed segment of at least `length` bytes.
    ///
    /// # Errors
    /// As [`Transport::attach_segment`].
    pub fn new(transport: &Arc<dyn Transport>, length: usize) -> Result<Self, TransportError> {
        let (region, map) = transport.attach_segment(length)?;
        Ok(Self {
            map: Some(map),
            region,
            transport: Arc::clone(transport),
            is_header: false,
        })
    }

    /// Allocates the context header, the first segment of a transport, which stays until that
    /// closes.
    ///
    /// # Errors
    /// As [`Transport::attach_segment`].
    pub fn header(transport: &Arc<dyn Transport>, length: usize) -> Result<Self, TransportError> {
        let mut header = Self::new(transport, length)?;
        header.is_header = true;
        Ok(header)
    }

    /// Id of the region, as calls name it.
    #[must_use]
    pub fn region(&self) -> u32 {
        self.region
    }
}

impl Deref for Segment {
    type Target = Map;

    fn deref(&self) -> &Map {
        match &self.map {
            Some(map) => map,
            None => unreachable!("only drop takes the mapping"),
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.map = None;
        if !self.is_header {
            // A dead device has forgotten the region already.
            let _ = self.transport.detach(self.region);
        }
    }
}

/// Memory of this process that the backend may access.
#[derive(Debug)]
pub struct Pin {
    region: u32,
    transport: Arc<dyn Transport>,
    released: bool,
}

impl Pin {
    /// Pins `length` bytes at `address`.
    ///
    /// # Errors
    /// As [`Transport::attach_pin`].
    ///
    /// # Safety
    /// As [`Transport::attach_pin`], until the pin is released.
    pub unsafe fn new(
        transport: &Arc<dyn Transport>,
        kind: PinKind,
        address: usize,
        length: usize,
        writable: bool,
    ) -> Result<Self, TransportError> {
        Ok(Self {
            // SAFETY: as promised by the caller.
            region: unsafe { transport.attach_pin(kind, address, length, writable)? },
            transport: Arc::clone(transport),
            released: false,
        })
    }

    /// Id of the region, as calls name it.
    #[must_use]
    pub fn region(&self) -> u32 {
        self.region
    }

    /// Releases the memory. When this returns the backend touches it no more.
    ///
    /// # Errors
    /// As [`Transport::detach`]; the pin is gone in any case.
    pub fn release(mut self) -> Result<(), TransportError> {
        self.released = true;
        self.transport.detach(self.region)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if !self.released {
            // A dead device has forgotten the region already.
            let _ = self.transport.detach(self.region);
        }
    }
}

/// A file of this process that the backend knows.
#[derive(Debug)]
pub struct ShownFile {
    region: u32,
    transport: Arc<dyn Transport>,
    is_kept: bool,
}

impl ShownFile {
    /// Shows a file.
    ///
    /// # Errors
    /// As [`Transport::attach_file`].
    pub fn new(
        transport: &Arc<dyn Transport>,
        file: BorrowedFd<'_>,
    ) -> Result<Self, TransportError> {
        Ok(Self {
            region: transport.attach_file(file)?,
            transport: Arc::clone(transport),
            is_kept: false,
        })
    }

    /// Id of the region, as calls name it.
    #[must_use]
    pub fn region(&self) -> u32 {
        self.region
    }

    /// Has the backend know it as long as the transport is open.
    pub fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for ShownFile {
    fn drop(&mut self) {
        if !self.is_kept {
            // A dead device has forgotten the region already.
            let _ = self.transport.detach(self.region);
        }
    }
}

/// A host-allocated buffer in this process's address space. Derefs to its [`Map`].
#[derive(Debug)]
pub struct Mapping {
    map: Option<Map>,
    handle: u32,
    offset: u64,
    transport: Arc<dyn Transport>,
}

impl Mapping {
    /// Maps buffer `handle`: `length` bytes at `offset` of the window.
    ///
    /// # Errors
    /// As [`Transport::map_buffer`].
    pub fn new(
        transport: &Arc<dyn Transport>,
        handle: u32,
        offset: u64,
        length: usize,
    ) -> Result<Self, TransportError> {
        Ok(Self {
            map: Some(transport.map_buffer(handle, offset, length)?),
            handle,
            offset,
            transport: Arc::clone(transport),
        })
    }
}

impl Deref for Mapping {
    type Target = Map;

    fn deref(&self) -> &Map {
        match &self.map {
            Some(map) => map,
            None => unreachable!("only drop takes the mapping"),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(length) = self.map.take().map(|map| map.len()) {
            // A dead device has forgotten the buffer already.
            let _ = self
                .transport
                .unmap_buffer(self.handle, self.offset, length);
        }
    }
}
