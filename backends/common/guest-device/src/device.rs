//! The vhost-user device of one VM.

use crate::contexts::Contexts;
use crate::control::{Control, MapWindow, RequestCounters};
use crate::events::EventQueue;
use crate::ring::{QueueMemory, Ring};
use crate::worker::Worker;
use farlane_abi::config::{
    ABI_VERSION, Config, FEATURE_WINDOW, MAGIC, QUEUE_CONTROL, QUEUE_DOORBELL, QUEUE_EVENT,
    QUEUE_SIZE, QUEUES, WINDOW_SHMEM_ID,
};
use farlane_abi::control::{MAX_CONTEXTS, MAX_EVENTS, MAX_REGIONS};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_daemon::{log_limited, warn_limited};
use farlane_vhost_user::bits::feature;
use farlane_vhost_user::channel::Channel;
use farlane_vhost_user::session::{Device, Setup};
use farlane_zero_copy::{AddressSpace, Pool};
use std::any::Any;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vhost::vhost_user::Result;
use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags, VhostUserProtocolFeatures};
use vm_memory::GuestMemoryMmap;

/// A VM as the command line describes it.
#[derive(Clone)]
pub struct Vm {
    /// Its name in the log.
    pub name: String,
    /// What its processes reach.
    pub contexts: Arc<dyn Contexts>,
    /// Length of its window in bytes, zero for none.
    pub window_bytes: u64,
    /// Where its requests are counted.
    pub counters: Arc<RequestCounters>,
}

/// The device of one connection of a VM.
pub struct FarlaneDevice {
    vm: Vm,
    memory: QueueMemory,
    space: Option<Arc<AddressSpace>>,
    events: Arc<EventQueue>,
    control: Arc<Control>,
    worker: Option<Worker>,
    channel: Arc<Channel>,
    /// The VMM has asked for the shared-memory regions, so that the guest sees one.
    asked_for_window: bool,
    has_window: bool,
    doorbell: Option<Box<dyn Any + Send>>,
    /// Its contexts are gone with it.
    generation: u64,
}

impl std::fmt::Debug for FarlaneDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FarlaneDevice")
            .field("vm", &self.vm.name)
            .finish_non_exhaustive()
    }
}

impl FarlaneDevice {
    /// A device for a VM whose VMM has just connected.
    ///
    /// # Errors
    /// Too many open files or threads.
    pub fn new(vm: Vm, channel: &Arc<Channel>) -> io::Result<Self> {
        // Random, and not what a backend has that names none.
        let generation = RandomState::new().hash_one(0_u8).max(1);
        let events = EventQueue::new();
        let control = Arc::new(Control::new(
            vm.name.clone(),
            Arc::clone(&vm.contexts),
            Arc::clone(&events),
            Arc::clone(&vm.counters),
            Arc::clone(channel),
            generation,
        ));
        let worker = Worker::start({
            let (control, events) = (Arc::clone(&control), Arc::clone(&events));
            let channel = Arc::clone(channel);
            move |[requests, buffers]| {
                if requests {
                    control.serve(&*channel);
                }
                if buffers {
                    events.flush();
                }
            }
        })?;
        Ok(Self {
            vm,
            memory: QueueMemory::default(),
            space: None,
            events,
            control,
            worker: Some(worker),
            channel: Arc::clone(channel),
            asked_for_window: false,
            has_window: false,
            doorbell: None,
            generation,
        })
    }

    /// Opens the window as soon as the VMM has agreed to all that it takes. That is before the
    /// guest reads the configuration space.
    fn open_window(&mut self) {
        if self.has_window || !self.asked_for_window || !self.channel.is_open() {
            return;
        }
        match Pool::shared_window(self.vm.window_bytes) {
            Ok(pool) => {
                self.control.set_window(pool);
                self.has_window = true;
            }
            Err(e) => log_limited!(
                log::Level::Error,
                self.channel.limit(),
                "{}: no memory for the window: {e}",
                self.vm.name
            ),
        }
    }

    /// The doorbell's eventfd wakes the engine's threads without a hop through this device.
    fn set_doorbell(&mut self, bell: Option<OwnedFd>) {
        // The one before goes first.
        self.doorbell = None;
        let Some(bell) = bell else {
            return;
        };
        match self.vm.contexts.add_doorbell(bell) {
            Ok(bell) => self.doorbell = bell,
            Err(e) => warn_limited!(self.channel.limit(), "{}: no doorbell: {e}", self.vm.name),
        }
    }
}

impl Drop for FarlaneDevice {
    fn drop(&mut self) {
        self.gone();
    }
}

/// A queue that is served.
#[derive(Debug)]
pub enum QueueRole {
    /// Requests of the driver.
    Control,
    /// Events for it.
    Event,
    /// Kicks without buffers: what the VMM has named as the first one is still it.
    Doorbell(u16),
}

impl MapWindow for Channel {
    fn map_window(&self, pool: &Pool) -> io::Result<()> {
        let file = pool.window_fd().ok_or(io::ErrorKind::NotConnected)?;
        let mapping = VhostUserMMap {
            shmid: WINDOW_SHMEM_ID,
            padding: [0; 7],
            fd_offset: 0,
            shm_offset: 0,
            len: pool.window_bytes(),
            flags: VhostUserMMapFlags::WRITABLE.bits(),
        };
        self.map_shared_memory(&mapping, file)
    }
}

impl Device for FarlaneDevice {
    type Worker = QueueRole;

    fn name(&self) -> String {
        self.vm.name.clone()
    }

    fn queues(&self) -> u16 {
        QUEUES
    }

    fn max_queue_size(&self) -> u16 {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        feature::VERSION_1
            | feature::EVENT_IDX
            | feature::INDIRECT_DESC
            | feature::PROTOCOL_FEATURES
    }

    /// QEMU acknowledges whatever is offered, so this is what works: no `CONFIGURE_MEM_SLOTS`,
    /// with which a reset while the window is mapped crashes it, and no in-flight tracking, as a
    /// backend that died has lost its contexts anyway.
    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        let always = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK;
        if self.vm.window_bytes == 0 {
            return always;
        }
        always
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::BACKEND_SEND_FD
            | VhostUserProtocolFeatures::SHMEM
    }

    fn negotiated(&mut self, _features: u64) {}

    fn set_memory(&mut self, space: &Arc<AddressSpace>, table: &GuestMemoryMmap) -> io::Result<()> {
        self.space = Some(Arc::clone(space));
        self.memory.replace(table)
    }

    fn channel_opened(&mut self) {
        self.open_window();
    }

    fn shared_memory(&mut self) -> Option<(u8, u64)> {
        if self.vm.window_bytes == 0 {
            return None;
        }
        self.asked_for_window = true;
        self.open_window();
        Some((WINDOW_SHMEM_ID, self.vm.window_bytes))
    }

    fn config(&self) -> Vec<u8> {
        let (window_feature, window_bytes) = match self.has_window {
            true => (FEATURE_WINDOW, self.vm.window_bytes),
            false => (0, 0),
        };
        let config = Config {
            magic: MAGIC.into(),
            version: ABI_VERSION.into(),
            features: (self.vm.contexts.features() | window_feature).into(),
            max_contexts: MAX_CONTEXTS.into(),
            max_regions: MAX_REGIONS.into(),
            max_events: MAX_EVENTS.into(),
            window_bytes: window_bytes.into(),
            gid: self.vm.contexts.gid(),
            mac: self.vm.contexts.mac(),
            generation: self.generation.into(),
            ..Config::default()
        };
        config.as_bytes().to_vec()
    }

    /// Nothing in it can be written. A guest that does so keeps its device.
    fn set_config(&mut self, _offset: u32, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }

    fn start(&mut self, setup: Setup) -> io::Result<QueueRole> {
        let served = match setup.index {
            QUEUE_DOORBELL => {
                self.set_doorbell(setup.kick);
                return Ok(QueueRole::Doorbell(setup.next_available));
            }
            QUEUE_CONTROL => QueueRole::Control,
            _ => QueueRole::Event,
        };
        let ring = Ring::start(self.memory.memory(), &setup).map_err(io::Error::other)?;
        match served {
            QueueRole::Control => self.control.start(ring, setup.resumes),
            _ => self.events.start(ring),
        }
        if let Some(worker) = &self.worker {
            worker.watch(setup.index.into(), setup.kick);
        }
        Ok(served)
    }

    /// A queue stops: the guest has reset the device, its driver has gone, or the VM pauses. The
    /// window cannot be unmapped from here, and need not be: the VMM forgets it with a reset.
    fn stop(&mut self, served: QueueRole) -> u16 {
        let (index, base) = match served {
            QueueRole::Control => (QUEUE_CONTROL, self.control.stop()),
            QueueRole::Event => (QUEUE_EVENT, self.events.stop()),
            QueueRole::Doorbell(base) => {
                self.set_doorbell(None);
                return base;
            }
        };
        if let Some(worker) = &self.worker {
            worker.forget(index.into());
        }
        base
    }

    fn reset(&mut self) {
        self.control.reset();
    }

    fn gone(&mut self) {
        self.set_doorbell(None);
        self.control.end();
        // Waits for its thread.
        self.worker = None;
        if let Some(space) = self.space.take() {
            space.clear();
        }
    }
}
