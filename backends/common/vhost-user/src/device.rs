//! What a device is to its VMM: everything that is not the same for all devices.

use crate::call::Call;
use crate::inflight::{Note, QueueInflight};
use crate::vring::{Layout, MAX_SIZE};
use farlane_zero_copy::AddressSpace;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vhost::vhost_user::{Result, VhostUserProtocolFeatures};
use vm_memory::GuestMemoryMmap;

/// What a session can of the protocol without its device's help.
pub const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(VhostUserProtocolFeatures::RESET_DEVICE);

/// A queue that is to be served.
#[derive(Debug)]
pub struct Setup {
    /// Which queue.
    pub index: u16,
    /// The VM's memory.
    pub space: Arc<AddressSpace>,
    /// Where in it the queue is.
    pub layout: Layout,
    /// Whether event indices were negotiated.
    pub event_index: bool,
    /// Running number of the first buffer.
    pub next_available: u16,
    /// The queue goes on where it was stopped by being disabled or changed: the VMM has not
    /// named a first buffer, and knows of none.
    pub resumes: bool,
    /// Where requests are tracked.
    pub inflight: Option<QueueInflight>,
    /// What the driver writes to tell of requests; none if it never tells. It does not block.
    pub kick: Option<OwnedFd>,
    /// How the driver is told.
    pub call: Arc<Call>,
    /// How the VMM is told that the queue cannot go on.
    pub error: Arc<Call>,
}

impl Setup {
    /// A queue that begins anew, whose driver neither tells nor is told.
    #[must_use]
    pub fn new(index: u16, space: Arc<AddressSpace>, layout: Layout) -> Self {
        Self {
            index,
            space,
            layout,
            event_index: false,
            next_available: 0,
            resumes: false,
            inflight: None,
            kick: None,
            call: Arc::default(),
            error: Arc::default(),
        }
    }
}

/// What a device is to its VMM: everything that is not the same for all devices.
pub trait Device: Send + 'static {
    /// What serves a queue.
    type Worker: Send;

    /// What it is called in messages.
    fn name(&self) -> String;

    /// Most queues.
    fn queues(&self) -> u16;

    /// Most entries of each.
    fn max_queue_size(&self) -> u16 {
        MAX_SIZE
    }

    /// The features that it offers.
    fn features(&self) -> u64;

    /// What is offered of the protocol.
    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        PROTOCOL_FEATURES
    }

    /// The driver has accepted these features.
    fn negotiated(&mut self, features: u64);

    /// The VMM shares this memory in place of what was; `space` has it already. Memory that is
    /// added or taken away without a whole table (`CONFIGURE_MEM_SLOTS`) is not told of.
    ///
    /// # Errors
    /// The system's: the VMM has to go.
    fn set_memory(
        &mut self,
        _space: &Arc<AddressSpace>,
        _table: &GuestMemoryMmap,
    ) -> io::Result<()> {
        Ok(())
    }

    /// The VMM takes requests on the channel from now on.
    fn channel_opened(&mut self) {}

    /// The VMM asks for the device's shared-memory region: its id, and its bytes. None: there is
    /// none.
    fn shared_memory(&mut self) -> Option<(u8, u64)> {
        None
    }

    /// The device is reset: its queues are stopped already.
    fn reset(&mut self) {}

    /// The VMM is gone, and nothing can be asked of it: the queues are going to be
    /// [stopped](Self::stop). May be called again.
    fn gone(&mut self) {}

    /// Its configuration space.
    fn config(&self) -> Vec<u8>;

    /// The driver writes into it.
    ///
    /// # Errors
    /// It cannot be written there.
    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()>;

    /// Serves a queue.
    ///
    /// # Errors
    /// What the system says.
    fn start(&mut self, queue: Setup) -> io::Result<Self::Worker>;

    /// Several queues are going to be [stopped](Self::stop), this one among them: nothing more is
    /// taken from it. To stop the others may take long.
    fn ends(&mut self, _worker: &Self::Worker) {}

    /// Stops to serve a queue; returns the running number of the first buffer that was not taken.
    /// Nothing touches the queue or its memory then.
    fn stop(&mut self, worker: Self::Worker) -> u16;

    /// The VMM tells of the memory that tracks requests, which outlives backends. `found` is the
    /// note that the last one has left there, which may have been this one. Returns the one that is
    /// to be there from now on.
    ///
    /// # Errors
    /// The device cannot go on where the last backend has left it: the VMM has to come again.
    fn note(&mut self, _found: Option<Note>) -> io::Result<Option<Note>> {
        Ok(None)
    }
}
