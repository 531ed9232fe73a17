//! The RDMA contexts of a VM, for the device that its guest sees.

use crate::nodes::Nodes;
use farlane_abi::Errno;
use farlane_abi::config::FEATURE_VERBS;
use farlane_abi::ids::{ContextId, RegionId};
use farlane_guest_device::contexts::{Contexts, Memory, WindowRange};
use farlane_guest_device::events::ContextEvents;
use farlane_rdma_remoting::{EventSink, FileId, Port, Server};
use farlane_zero_copy::{Pool, Region};
use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A port as its guest's device reaches it.
pub struct PortContexts {
    port: Arc<Port>,
    server: Arc<Server>,
    nodes: Option<Arc<Nodes>>,
    mac: [u8; 6],
}

/// Events of a context go to its guest.
struct Sink(Arc<ContextEvents>);

impl EventSink for Sink {
    fn raise(&self, index: u32) {
        self.0.raise(index);
    }
}

impl std::fmt::Debug for PortContexts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortContexts")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

impl PortContexts {
    /// The contexts of `port`, which `server` serves.
    #[must_use]
    pub fn new(port: Arc<Port>, server: Arc<Server>) -> Arc<Self> {
        Self::with_nodes(port, server, None, [0; 6])
    }

    /// The same, where there are workers on several nodes, and with the MAC address of the VM's
    /// network interface, zeroes where none is named.
    #[must_use]
    pub fn with_nodes(
        port: Arc<Port>,
        server: Arc<Server>,
        nodes: Option<Arc<Nodes>>,
        mac: [u8; 6],
    ) -> Arc<Self> {
        Arc::new(Self {
            port,
            server,
            nodes,
            mac,
        })
    }

    fn locate(&self, memory: &Region) {
        if let Some(nodes) = &self.nodes {
            nodes.locate(memory);
        }
    }
}

impl Contexts for PortContexts {
    fn features(&self) -> u32 {
        FEATURE_VERBS
    }

    fn mac(&self) -> [u8; 6] {
        self.mac
    }

    fn add_gid(&self, index: u32, gid: [u8; 16]) -> Result<(), Errno> {
        self.port.add_gid(index, gid)
    }

    fn remove_gid(&self, index: u32) -> Result<(), Errno> {
        self.port.remove_gid(index)
    }

    fn gid(&self) -> [u8; 16] {
        self.port.gid()
    }

    fn open(
        &self,
        context: ContextId,
        events: Arc<ContextEvents>,
        window: Option<Arc<Pool>>,
    ) -> Result<(), Errno> {
        self.port
            .open(context, Arc::new(Sink(events)), window)
            .map(drop)
    }

    fn open_of_kernel(
        &self,
        context: ContextId,
        events: Arc<ContextEvents>,
        window: Option<Arc<Pool>>,
    ) -> Result<(), Errno> {
        self.port
            .open_of_kernel(context, Arc::new(Sink(events)), window)
            .map(drop)
    }

    fn close(&self, context: ContextId) -> Result<(), Errno> {
        self.port.close(context)
    }

    fn check(&self, context: ContextId) -> Result<(), Errno> {
        self.port.context(context).map(drop)
    }

    fn attach(&self, context: ContextId, region: RegionId, memory: Memory) -> Result<(), Errno> {
        match memory {
            Memory::Segment(memory) => {
                self.locate(&memory);
                let opened = self.port.context(context)?;
                opened.attach_segment(region, memory)?;
                self.port.settle(context)
            }
            Memory::Pin(memory) => {
                self.locate(&memory);
                let opened = self.port.context(context)?;
                opened.attach_pin(region, memory)
            }
            Memory::File(number) => {
                let opened = self.port.context(context)?;
                opened.attach_file(region, FileId(0, number))
            }
            Memory::All { memory, space } => {
                let opened = self.port.context(context)?;
                opened.attach_all_memory(region, memory, space)
            }
            Memory::Phony(_) | Memory::Device { .. } => Err(Errno::EOPNOTSUPP),
        }
    }

    fn detach(&self, context: ContextId, region: RegionId) -> Result<(), Errno> {
        self.port.context(context)?.detach(region)
    }

    fn close_all(&self) {
        self.port.close_all();
    }

    fn pause(&self) {
        self.port.pause();
    }

    fn resume(&self) {
        self.port.resume();
    }

    fn window_map(&self, context: ContextId, place: WindowRange) -> Result<(), Errno> {
        self.port
            .context(context)?
            .window_map(place.buffer, place.offset, place.length)
            .map(drop)
    }

    fn window_unmap(&self, context: ContextId, place: WindowRange) -> Result<(), Errno> {
        self.port
            .context(context)?
            .window_unmap(place.buffer, place.offset, place.length)
    }

    fn add_doorbell(&self, bell: OwnedFd) -> io::Result<Option<Box<dyn Any + Send>>> {
        let bell = self.server.add_doorbell(bell)?;
        Ok(Some(Box::new(bell)))
    }
}
