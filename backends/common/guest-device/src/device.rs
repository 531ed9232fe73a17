//! The vhost-user device of one VM.

use crate::contexts::Contexts;
use crate::control::{Control, MapWindow, RequestCounters};
use crate::events::EventQueue;
use farlane_abi::config::{
    ABI_VERSION, Config, FEATURE_WINDOW, MAGIC, QUEUE_CONTROL, QUEUE_DOORBELL, QUEUE_EVENT,
    QUEUE_SIZE, QUEUES, WINDOW_SHMEM_ID,
};
use farlane_abi::control::{MAX_CONTEXTS, MAX_EVENTS, MAX_REGIONS};
use farlane_abi::zerocopy::IntoBytes as _;
use farlane_daemon::log_limit::LogLimit;
use farlane_daemon::vhost::{ExitEvents, VmDevice};
use farlane_daemon::vring::{QueueMemory, VmMemory, Vring};
use farlane_daemon::{log_limited, warn_limited};
use farlane_sys::sync::lock;
use farlane_zero_copy::Pool;
use std::any::Any;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use vhost::vhost_user::message::{
    VhostUserMMap, VhostUserMMapFlags, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Backend, VhostUserFrontendReqHandler as _};
use vhost_user_backend::VhostUserBackend;
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};
use vm_memory::GuestAddressSpace as _;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventNotifier};

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
pub struct Device {
    vm: Vm,
    memory: Arc<QueueMemory>,
    events: Arc<EventQueue>,
    control: Control,
    window: Mutex<Window>,
    doorbell: Mutex<Option<Box<dyn Any + Send>>>,
    exit: ExitEvents,
    limit: Arc<LogLimit>,
    /// Its contexts are gone with it.
    generation: u64,
}

/// What the VMM has agreed to.
#[derive(Default)]
struct Window {
    /// It has asked for the shared-memory regions, so that the guest sees one.
    known: bool,
    /// The way to have it mapped.
    channel: Option<Backend>,
    /// Both: there is a window.
    open: bool,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("vm", &self.vm.name)
            .finish_non_exhaustive()
    }
}

impl Device {
    /// A device for a VM with this memory. What it logs goes by `limit`.
    ///
    /// # Errors
    /// Too many open files.
    pub fn new(vm: Vm, memory: Arc<QueueMemory>, limit: Arc<LogLimit>) -> io::Result<Arc<Self>> {
        let events = EventQueue::new(memory.memory().clone());
        // Random, and not what a backend has that names none.
        let generation = RandomState::new().hash_one(0_u8).max(1);
        let control = Control::new(
            vm.name.clone(),
            Arc::clone(&vm.contexts),
            memory.memory().clone(),
            Arc::clone(&events),
            Arc::clone(&vm.counters),
            Arc::clone(&limit),
            generation,
        );
        Ok(Arc::new(Self {
            vm,
            memory,
            events,
            control,
            window: Mutex::default(),
            doorbell: Mutex::default(),
            exit: ExitEvents::new(1)?,
            limit,
            generation,
        }))
    }

    fn window(&self) -> MutexGuard<'_, Window> {
        lock(&self.window)
    }

    /// Opens the window as soon as the VMM has agreed to all that it takes. That is before the
    /// guest reads the configuration space.
    fn open_window(&self, window: &mut Window) {
        if window.open || !window.known || window.channel.is_none() {
            return;
        }
        match Pool::shared_window(self.vm.window_bytes) {
            Ok(pool) => {
                self.control.set_window(pool);
                window.open = true;
            }
            Err(e) => log_limited!(
                log::Level::Error,
                self.limit,
                "{}: no memory for the window: {e}",
                self.vm.name
            ),
        }
    }

    fn config(&self) -> Config {
        let open = self.window().open;
        Config {
            magic: MAGIC.into(),
            version: ABI_VERSION.into(),
            features: (self.vm.contexts.features() | if open { FEATURE_WINDOW } else { 0 }).into(),
            max_contexts: MAX_CONTEXTS.into(),
            max_regions: MAX_REGIONS.into(),
            max_events: MAX_EVENTS.into(),
            window_bytes: if open { self.vm.window_bytes } else { 0 }.into(),
            gid: self.vm.contexts.gid(),
            generation: self.generation.into(),
            ..Config::default()
        }
    }

    /// The doorbell's eventfd wakes the engine's threads without a hop through this device.
    fn set_doorbell(&self, fd: Option<OwnedFd>) {
        let bell = fd.and_then(|fd| {
            let added = self.vm.contexts.add_doorbell(fd);
            added.unwrap_or_else(|e| {
                warn_limited!(self.limit, "{}: no doorbell: {e}", self.vm.name);
                None
            })
        });
        *lock(&self.doorbell) = bell;
    }
}

impl MapWindow for Device {
    fn map_window(&self, pool: &Pool) -> io::Result<()> {
        // Not locked while the VMM is waited for.
        let channel = self.window().channel.clone();
        let missing = || io::Error::from(io::ErrorKind::NotConnected);
        let channel = channel.ok_or_else(missing)?;
        let file = pool.window_fd().ok_or_else(missing)?;
        let mapping = VhostUserMMap {
            shmid: WINDOW_SHMEM_ID,
            padding: [0; 7],
            fd_offset: 0,
            shm_offset: 0,
            len: pool.window_bytes(),
            flags: VhostUserMMapFlags::WRITABLE.bits(),
        };
        channel.shmem_map(&mapping, &file.as_raw_fd()).map(drop)
    }
}

impl VmDevice for Device {
    fn take_vrings(self: &Arc<Self>, vrings: Vec<Vring>) {
        let control = vrings.first().cloned();
        for (index, vring) in (0u16..).zip(vrings) {
            let device: Weak<Self> = Arc::downgrade(self);
            match index {
                QUEUE_CONTROL => vring.follow_enabled(move |enabled| {
                    if let Some(device) = device.upgrade() {
                        device.control.set_enabled(enabled);
                    }
                }),
                QUEUE_EVENT => self.events.set_vring(Some(vring)),
                QUEUE_DOORBELL => {
                    let control = control.clone();
                    vring.divert_kick(move |fd| {
                        if let Some(device) = device.upgrade() {
                            let starts = fd.is_some();
                            device.set_doorbell(fd);
                            // The last queue to start.
                            if let (true, Some(control)) = (starts, &control) {
                                device.control.started(control);
                            }
                        }
                    });
                }
                _ => {}
            }
        }
    }

    fn gone(&self) {
        self.set_doorbell(None);
        self.control.end();
        self.events.set_vring(None);
        self.window().channel = None;
    }
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = Vring;

    fn num_queues(&self) -> usize {
        usize::from(QUEUES)
    }

    fn max_queue_size(&self) -> usize {
        usize::from(QUEUE_SIZE)
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
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

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let config = self.config();
        let bytes = config.as_bytes();
        let (Ok(start), Ok(length)) = (usize::try_from(offset), usize::try_from(size)) else {
            return Vec::new();
        };
        // Nothing is an error to the VMM, as it should be.
        start
            .checked_add(length)
            .and_then(|end| bytes.get(start..end))
            .unwrap_or_default()
            .to_vec()
    }

    fn update_memory(&self, memory: VmMemory) -> io::Result<()> {
        let memory = memory.memory();
        self.control
            .replace_ram(&memory)
            .map_err(io::Error::other)?;
        self.memory.replace(&memory)
    }

    fn set_backend_req_fd(&self, channel: Backend) {
        let mut window = self.window();
        window.channel = Some(channel);
        self.open_window(&mut window);
    }

    fn get_shmem_config(&self) -> io::Result<VhostUserShMemConfig> {
        let mut sizes = [0; 256];
        if let Some(size) = sizes.get_mut(usize::from(WINDOW_SHMEM_ID)) {
            *size = self.vm.window_bytes;
        }
        let mut window = self.window();
        window.known = self.vm.window_bytes != 0;
        self.open_window(&mut window);
        Ok(VhostUserShMemConfig::new(u32::from(window.known), &sizes))
    }

    /// One worker for the control and the event queue; the doorbell needs none.
    fn queues_per_thread(&self) -> Vec<u64> {
        vec![1 << QUEUE_CONTROL | 1 << QUEUE_EVENT]
    }

    fn exit_event(&self, _worker: usize) -> Option<(EventConsumer, EventNotifier)> {
        self.exit.take()
    }

    /// A queue stops: the guest has reset the device, its driver has gone, or the VM pauses. (A VM
    /// that pauses without it is told of by the queue, which is disabled.) The window cannot be
    /// unmapped from here, and need not be: the VMM forgets it with a reset.
    fn stop_vring(&self, index: u32) -> io::Result<()> {
        if index == u32::from(QUEUE_CONTROL) {
            self.control.suspend();
        } else if index == u32::from(QUEUE_EVENT) {
            self.events.settle();
        }
        Ok(())
    }

    fn reset_device(&self) {
        self.control.stop();
    }

    /// Never fails: an error would end the worker.
    fn handle_event(
        &self,
        event: u16,
        _events: EventSet,
        vrings: &[Vring],
        _worker: usize,
    ) -> io::Result<()> {
        match (event, vrings) {
            (QUEUE_CONTROL, [control, ..]) => self.control.serve(control, self),
            (QUEUE_EVENT, _) => self.events.flush(),
            _ => {}
        }
        Ok(())
    }
}
