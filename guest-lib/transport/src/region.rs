//! Owners of what a link gives: released when dropped.

use crate::{Link, LinkError, Map};
use std::ops::Deref;
use std::sync::Arc;

/// Memory that process and backend share. Derefs to its [`Map`].
#[derive(Debug)]
pub struct Segment {
    // Taken first when dropped: the kernel refuses to detach what is mapped.
    map: Option<Arc<Map>>,
    region: u32,
    link: Arc<dyn Link>,
    is_header: bool,
}

impl Segment {
    /// Allocates a zeroed segment of at least `length` bytes.
    ///
    /// # Errors
    /// What [`Link::attach_segment`] says.
    pub fn new(link: &Arc<dyn Link>, length: usize) -> Result<Self, LinkError> {
        let (region, map) = link.attach_segment(length)?;
        Ok(Self {
            map: Some(map),
            region,
            link: Arc::clone(link),
            is_header: false,
        })
    }

    /// Allocates the context header, the first segment of a link. It stays until the link closes.
    ///
    /// # Errors
    /// What [`Link::attach_segment`] says.
    pub fn header(link: &Arc<dyn Link>, length: usize) -> Result<Self, LinkError> {
        let mut header = Self::new(link, length)?;
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
            let _ = self.link.detach(self.region);
        }
    }
}

/// Memory of this process that the backend may access.
#[derive(Debug)]
pub struct Pin {
    region: u32,
    link: Arc<dyn Link>,
    released: bool,
}

impl Pin {
    /// Pins `length` bytes at `address`.
    ///
    /// # Errors
    /// What [`Link::attach_pin`] says.
    ///
    /// # Safety
    /// Until the pin is released the memory stays mapped, and, if `writable`, the caller expects
    /// the backend to change it.
    pub unsafe fn new(
        link: &Arc<dyn Link>,
        address: usize,
        length: usize,
        writable: bool,
    ) -> Result<Self, LinkError> {
        // SAFETY: as promised by the caller.
        let region = unsafe { link.attach_pin(address, length, writable)? };
        Ok(Self::of(link, region))
    }

    /// Pins memory whose pages carry envelopes.
    ///
    /// # Errors
    /// What [`Link::attach_phony`] says.
    ///
    /// # Safety
    /// As [`Link::attach_phony`] has it.
    pub unsafe fn phony(
        link: &Arc<dyn Link>,
        address: usize,
        length: usize,
    ) -> Result<Self, LinkError> {
        // SAFETY: as promised by the caller.
        let region = unsafe { link.attach_phony(address, length)? };
        Ok(Self::of(link, region))
    }

    /// Pins memory of a device.
    ///
    /// # Errors
    /// What [`Link::attach_device`] says.
    ///
    /// # Safety
    /// As [`Link::attach_device`] has it.
    pub unsafe fn device(
        link: &Arc<dyn Link>,
        address: usize,
        length: usize,
        writable: bool,
    ) -> Result<Self, LinkError> {
        // SAFETY: as promised by the caller.
        let region = unsafe { link.attach_device(address, length, writable)? };
        Ok(Self::of(link, region))
    }

    fn of(link: &Arc<dyn Link>, region: u32) -> Self {
        Self {
            region,
            link: Arc::clone(link),
            released: false,
        }
    }

    /// Id of the region, as calls name it.
    #[must_use]
    pub fn region(&self) -> u32 {
        self.region
    }

    /// Releases the memory. When this returns the backend touches it no more.
    ///
    /// # Errors
    /// What [`Link::detach`] says; the pin is gone in any case.
    pub fn release(mut self) -> Result<(), LinkError> {
        self.released = true;
        self.link.detach(self.region)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if !self.released {
            // A dead device has forgotten the region already.
            let _ = self.link.detach(self.region);
        }
    }
}

/// A host-allocated buffer in this process's address space. Derefs to its [`Map`].
#[derive(Debug)]
pub struct Mapping {
    map: Option<Map>,
    handle: u32,
    offset: u64,
    link: Arc<dyn Link>,
}

impl Mapping {
    /// Maps buffer `handle`: `length` bytes at `offset` of the window.
    ///
    /// # Errors
    /// What [`Link::map_buffer`] says.
    pub fn new(
        link: &Arc<dyn Link>,
        handle: u32,
        offset: u64,
        length: usize,
    ) -> Result<Self, LinkError> {
        Ok(Self {
            map: Some(link.map_buffer(handle, offset, length)?),
            handle,
            offset,
            link: Arc::clone(link),
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
            let _ = self.link.unmap_buffer(self.handle, self.offset, length);
        }
    }
}
