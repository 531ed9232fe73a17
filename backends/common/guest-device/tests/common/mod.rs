//! Contexts that grant every request.

use farlane_abi::Errno;
use farlane_abi::ids::{ContextId, RegionId};
use farlane_guest_device::contexts::{Contexts, Memory, WindowRange};
use farlane_guest_device::events::ContextEvents;
use farlane_zero_copy::Pool;
use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// Grants every request; counts mappings, and pauses less goings on.
#[derive(Default)]
pub struct Counted {
    pub mappings: AtomicI32,
    pub pauses: AtomicI32,
    pub ends: AtomicI32,
}

impl Contexts for Counted {
    fn features(&self) -> u32 {
        0
    }
    fn open(&self, _: ContextId, _: Arc<ContextEvents>, _: Option<Arc<Pool>>) -> Result<(), Errno> {
        Ok(())
    }
    fn close(&self, _: ContextId) -> Result<(), Errno> {
        Ok(())
    }
    fn check(&self, _: ContextId) -> Result<(), Errno> {
        Ok(())
    }
    fn attach(&self, _: ContextId, _: RegionId, _: Memory) -> Result<(), Errno> {
        Ok(())
    }
    fn detach(&self, _: ContextId, _: RegionId) -> Result<(), Errno> {
        Ok(())
    }
    fn close_all(&self) {
        self.ends.fetch_add(1, Ordering::Relaxed);
    }
    fn pause(&self) {
        self.pauses.fetch_add(1, Ordering::Relaxed);
    }
    fn resume(&self) {
        self.pauses.fetch_sub(1, Ordering::Relaxed);
    }
    fn window_map(&self, _: ContextId, _: WindowRange) -> Result<(), Errno> {
        self.mappings.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn window_unmap(&self, _: ContextId, _: WindowRange) -> Result<(), Errno> {
        self.mappings.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
    fn add_doorbell(&self, _: OwnedFd) -> io::Result<Option<Box<dyn Any + Send>>> {
        Ok(None)
    }
}
