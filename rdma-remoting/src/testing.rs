//! What tests of contexts and workers have in common.

use crate::context::Context;
use crate::engine::soft::SoftEngine;
use crate::engine::{ContextSpec, Engine, EngineContext};
use crate::{EventSink, Port, Server};
use farlane_abi::Errno;
use farlane_abi::arena::{
    CALL_SLOT_BYTES, CALL_SLOTS, CallHeader, HEADER_SEGMENT_BYTES, OFF_CALL_COMPLETED,
    OFF_CALL_RING, OFF_CALL_SUBMITTED,
};
use farlane_abi::ids::{ContextId, RegionId};
use farlane_abi::rdma::{DeviceAttr, DeviceLimits, PortAttr};
use farlane_zero_copy::{AddressSpace, Mapping, Region, SharedMemory};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Takes no events.
pub struct Nobody;

impl EventSink for Nobody {
    fn raise(&self, _: u32) {}
}

pub fn port(server: &Arc<Server>, gid: u8) -> Arc<Port> {
    server.port([gid; 16], format!("vm {gid}")).unwrap()
}

pub fn open(port: &Arc<Port>, id: u32) -> Arc<Context> {
    let id = ContextId::new(id).unwrap();
    port.open(id, Arc::new(Nobody), None).unwrap()
}

/// The same of the guest's kernel.
pub fn open_of_kernel(port: &Arc<Port>, id: u32) -> Arc<Context> {
    let id = ContextId::new(id).unwrap();
    port.open_of_kernel(id, Arc::new(Nobody), None).unwrap()
}

/// Id of a region.
pub fn region(id: u32) -> RegionId {
    RegionId::new(id).unwrap()
}

/// A memfd of this name that can be memory of a program or a VM.
pub fn file(name: &str, bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

/// Memory of a program: a memfd of this name, for [`mapped`].
pub fn memory(name: &str, bytes: u64) -> Region {
    Region::from_memfd(file(name, bytes), bytes, true).unwrap()
}

/// The same, and the program's mapping of it.
pub fn shared(name: &str, bytes: u64) -> (Region, SharedMemory) {
    let file = file(name, bytes);
    let mapping = Mapping::new(file.as_fd(), 0, bytes, true).unwrap();
    let region = Region::from_memfd(file, bytes, true).unwrap();
    (region, SharedMemory::new(mapping))
}

/// Memory of a VM of these runs, as (guest-physical address, length in bytes), and all of them next
/// to each other.
pub fn guest_memory(runs: &[(u64, u64)]) -> (Arc<AddressSpace>, SharedMemory) {
    let bytes = runs.iter().map(|run| run.1).sum();
    let file = file("ram", bytes);
    let space = AddressSpace::new();
    let mut offset = 0;
    for &(address, length) in runs {
        let mapped = space.map(address, length, file.as_fd(), offset, true);
        mapped.unwrap();
        offset += length;
    }
    let mapping = Mapping::new(file.as_fd(), 0, bytes, true).unwrap();
    (space, SharedMemory::new(mapping))
}

/// Mappings that this process has of memfds of a name.
pub fn mapped(name: &str) -> usize {
    let file = format!("/memfd:{name} (deleted)");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.ends_with(&file)).count()
}

/// `query_device` in the call table.
const QUERY_DEVICE: u32 = 2;

/// The header of a context, as its program sees it.
#[derive(Clone)]
pub struct Header(SharedMemory);

impl Header {
    pub fn attach(context: &Context) -> Self {
        let (theirs, ours) = shared("header", HEADER_SEGMENT_BYTES);
        context.attach_segment(region(0), theirs).unwrap();
        Self(ours)
    }

    fn word(&self, at: usize) -> u32 {
        self.0.word(at).unwrap().load(Ordering::Acquire)
    }

    /// Calls that were answered.
    pub fn completed(&self) -> u32 {
        self.word(OFF_CALL_COMPLETED)
    }

    /// Asks for the device's attributes, so often.
    pub fn query_device(&self, times: u32) {
        for _ in 0..times {
            let at = self.word(OFF_CALL_SUBMITTED);
            let slot = usize::try_from(at % CALL_SLOTS).unwrap() * CALL_SLOT_BYTES;
            let head = CallHeader {
                number: QUERY_DEVICE.into(),
                ..Default::default()
            };
            self.0.write(OFF_CALL_RING + slot, &head).unwrap();
            let submitted = self.0.word(OFF_CALL_SUBMITTED).unwrap();
            submitted.store(at.wrapping_add(1), Ordering::Release);
        }
    }
}

/// The software engine, which calls somebody when it is asked for its attributes.
pub struct Hooked<F> {
    pub engine: SoftEngine,
    pub hook: F,
}

impl<F: Fn() + Send + Sync> Engine for Hooked<F> {
    fn device(&self) -> DeviceAttr {
        (self.hook)();
        self.engine.device()
    }

    fn limits(&self) -> DeviceLimits {
        self.engine.limits()
    }

    fn port(&self) -> PortAttr {
        self.engine.port()
    }

    fn open(&self, spec: ContextSpec) -> Result<Arc<dyn EngineContext>, Errno> {
        self.engine.open(spec)
    }
}
