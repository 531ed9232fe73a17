//! The VMM's side: negotiation, memory table, queues, the window.

use super::Error;
use super::driver::{Driver, SIZE, new_event};
use super::transport::VmTransport;
use crate::memory::{GuestBuffer, GuestMemory};
use farlane_abi::config::{ABI_VERSION, Config, MAGIC, QUEUES, WINDOW_SHMEM_ID};
use farlane_abi::zerocopy::FromBytes as _;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserMMap, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{
    Frontend, FrontendReqHandler, VhostUserFrontend as _, VhostUserFrontendReqHandler,
};
use vhost::{VhostBackend as _, VringConfigData};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};
use vmm_sys_util::eventfd::EventFd;

/// Which VMM is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// QEMU: says where a queue was when it stopped, and has shared-memory regions or not. Its
    /// guest loses the device with the backend.
    Qemu { shmem: bool },
    /// Cloud Hypervisor (v53, generic vhost-user): always names the available index, has no
    /// shared-memory regions, and connects again when the backend is gone, of which its guest
    /// learns nothing.
    CloudHypervisor,
}

/// A VM that has booted: its driver has started the device.
pub struct Vm {
    manner: Manner,
    /// Features taken, for the next backend.
    features: u64,
    protocol: VhostUserProtocolFeatures,
    memory: Arc<GuestMemory>,
    driver: Arc<Driver>,
    config: Config,
    frontend: Mutex<Frontend>,
    /// The VMM's end of the backend's channel, kept to end it.
    channel: Option<UnixStream>,
}

impl std::fmt::Debug for Vm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vm").finish_non_exhaustive()
    }
}

fn failed(what: &'static str) -> impl Fn(vhost::Error) -> Error {
    move |source| Error::Protocol { what, source }
}

/// What is mapped into the VM's shared-memory region: the backend's pool, whole, or nothing.
#[derive(Debug, Default)]
pub(crate) struct WindowMapping {
    file: Mutex<Option<(OwnedFd, u64)>>,
}

impl WindowMapping {
    fn lock(&self) -> MutexGuard<'_, Option<(OwnedFd, u64)>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file and its length, if it is mapped.
    pub fn file(&self) -> io::Result<Option<(OwnedFd, u64)>> {
        match &*self.lock() {
            Some((file, bytes)) => Ok(Some((file.try_clone()?, *bytes))),
            None => Ok(None),
        }
    }

    fn clear(&self) {
        *self.lock() = None;
    }
}

impl VhostUserFrontendReqHandler for WindowMapping {
    fn shmem_map(&self, request: &VhostUserMMap, file: &dyn AsRawFd) -> io::Result<u64> {
        if request.shmid != WINDOW_SHMEM_ID || request.shm_offset != 0 || request.fd_offset != 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the caller holds the descriptor open during this call.
        let file = unsafe { BorrowedFd::borrow_raw(file.as_raw_fd()) };
        *self.lock() = Some((file.try_clone_to_owned()?, request.len));
        Ok(0)
    }
}

impl Vm {
    /// Boots a VM with `memory_bytes` of memory, half of them above a hole, whose device is the
    /// backend that listens at `socket`.
    ///
    /// # Errors
    /// When the backend does not play along.
    pub fn connect(socket: &Path, memory_bytes: u64) -> Result<Arc<Self>, Error> {
        Self::connect_as(socket, memory_bytes, Manner::Qemu { shmem: true })
    }

    /// As [`connect`](Self::connect), under a VMM without shared-memory regions.
    ///
    /// # Errors
    /// When the backend does not play along.
    pub fn connect_without_window(socket: &Path, memory_bytes: u64) -> Result<Arc<Self>, Error> {
        Self::connect_as(socket, memory_bytes, Manner::Qemu { shmem: false })
    }

    /// As [`connect`](Self::connect), under Cloud Hypervisor, which [connects
    /// again](Self::reconnect).
    ///
    /// # Errors
    /// When the backend does not play along.
    pub fn connect_under_cloud_hypervisor(
        socket: &Path,
        memory_bytes: u64,
    ) -> Result<Arc<Self>, Error> {
        Self::connect_as(socket, memory_bytes, Manner::CloudHypervisor)
    }

    fn connect_as(socket: &Path, memory_bytes: u64, manner: Manner) -> Result<Arc<Self>, Error> {
        let memory = GuestMemory::new(memory_bytes)?;
        let stream = UnixStream::connect(socket)?;
        let watched = match manner {
            Manner::Qemu { .. } => stream.try_clone()?.into(),
            // Its end is not the guest's business: nothing ever happens here.
            Manner::CloudHypervisor => new_event()?,
        };
        let mut frontend = Frontend::from_stream(stream, QUEUES.into());
        frontend.set_owner().map_err(failed("SET_OWNER"))?;
        let features = frontend.get_features().map_err(failed("GET_FEATURES"))?;
        let mut wanted = 1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let offered = frontend
            .get_protocol_features()
            .map_err(failed("GET_PROTOCOL_FEATURES"))?;
        let window = VhostUserProtocolFeatures::SHMEM
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::BACKEND_SEND_FD;
        let mut accepted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK;
        let shmem = manner == Manner::Qemu { shmem: true } && offered.contains(window);
        if shmem {
            accepted |= window;
        }
        if manner == Manner::CloudHypervisor {
            // 0x229 of what is offered, and all that its transport has.
            accepted |= VhostUserProtocolFeatures::BACKEND_REQ;
            wanted |= 1 << VIRTIO_RING_F_EVENT_IDX;
        }
        let protocol = offered & accepted;
        frontend
            .set_protocol_features(protocol)
            .map_err(failed("SET_PROTOCOL_FEATURES"))?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);

        let mapping = Arc::new(WindowMapping::default());
        let channel = if shmem {
            Some(open_channel(&mut frontend, &mapping)?)
        } else {
            None
        };
        frontend
            .set_features(features & wanted)
            .map_err(failed("SET_FEATURES"))?;
        let config = read_config(&mut frontend)?;

        frontend
            .set_mem_table(&memory.regions())
            .map_err(failed("SET_MEM_TABLE"))?;
        let driver = Driver::new(&memory, features & wanted, &config, watched, mapping)?;
        let vm = Arc::new(Self {
            manner,
            features: features & wanted,
            protocol,
            memory,
            driver,
            config,
            frontend: Mutex::new(frontend),
            channel,
        });
        vm.start()?;
        Ok(vm)
    }

    fn frontend(&self) -> MutexGuard<'_, Frontend> {
        self.frontend.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device's configuration space.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The guest's memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Takes memory for a program, contiguous in the guest's.
    ///
    /// # Errors
    /// When there is none left.
    pub fn allocate(&self, length: u64) -> Result<GuestBuffer, Error> {
        Ok(self.memory.allocate(length)?)
    }

    /// Takes memory for a program, page by page from all over the guest's.
    ///
    /// # Errors
    /// When there is none left.
    pub fn allocate_scattered(&self, length: u64) -> Result<GuestBuffer, Error> {
        Ok(self.memory.allocate_scattered(length)?)
    }

    /// Opens the device, as a program opens `/dev/farlaneN`.
    ///
    /// # Errors
    /// What the backend says.
    pub fn open(&self) -> Result<Arc<VmTransport>, Error> {
        Ok(Arc::new(VmTransport::open(&self.driver)?))
    }

    /// Puts any bytes into the control queue and takes what the backend writes, at most
    /// `answer_bytes`: what a hostile driver can do. `None` when the device is gone.
    ///
    /// # Errors
    /// When the backend does not answer in time.
    pub fn control_raw(
        &self,
        request: &[u8],
        answer_bytes: u32,
    ) -> Result<Option<super::Answer>, Error> {
        self.driver.control_raw(request, answer_bytes)
    }

    /// Starts the queues: the driver has set DRIVER_OK.
    fn start(&self) -> Result<(), Error> {
        for queue in self.driver.queues().iter_mut() {
            queue.reset();
        }
        // Before the driver says that it is ready.
        self.driver.post_events();
        self.start_at(&[0; QUEUES as usize])
    }

    /// Starts the queues, each at its base.
    fn start_at(&self, bases: &[u16]) -> Result<(), Error> {
        let frontend = &mut *self.frontend();
        let mut queues = self.driver.queues();
        let step = failed("Starting a queue");
        let is_cloud_hypervisor = self.manner == Manner::CloudHypervisor;
        if is_cloud_hypervisor {
            for index in 0..usize::from(QUEUES) {
                frontend.set_vring_num(index, SIZE).map_err(&step)?;
            }
        }
        for (index, (queue, base)) in queues.iter_mut().zip(bases).enumerate() {
            let [desc_table_addr, avail_ring_addr, used_ring_addr] = queue.place().addresses();
            let addresses = VringConfigData {
                queue_max_size: SIZE,
                queue_size: SIZE,
                flags: 0,
                desc_table_addr,
                used_ring_addr,
                avail_ring_addr,
                log_addr: None,
            };
            if is_cloud_hypervisor {
                let base = queue.published();
                frontend.set_vring_addr(index, &addresses).map_err(&step)?;
                frontend.set_vring_base(index, base).map_err(&step)?;
                frontend
                    .set_vring_call(index, &queue.place().call)
                    .map_err(&step)?;
                frontend
                    .set_vring_kick(index, &queue.place().kick)
                    .map_err(&step)?;
            } else {
                frontend.set_vring_num(index, SIZE).map_err(&step)?;
                frontend.set_vring_base(index, *base).map_err(&step)?;
                frontend.set_vring_addr(index, &addresses).map_err(&step)?;
                frontend
                    .set_vring_kick(index, &queue.place().kick)
                    .map_err(&step)?;
                frontend
                    .set_vring_call(index, &queue.place().call)
                    .map_err(&step)?;
            }
        }
        drop(queues);
        enable_queues(frontend, true)
    }

    /// Connects to the next backend at `socket`, as Cloud Hypervisor does
    /// (`reinitialize_vhost_user`): the guest goes on.
    ///
    /// # Errors
    /// When the backend does not play along.
    pub fn reconnect(&self, socket: &Path) -> Result<(), Error> {
        let mut frontend = Frontend::from_stream(UnixStream::connect(socket)?, QUEUES.into());
        frontend.set_owner().map_err(failed("SET_OWNER"))?;
        frontend.get_features().map_err(failed("GET_FEATURES"))?;
        frontend
            .set_protocol_features(self.protocol)
            .map_err(failed("SET_PROTOCOL_FEATURES"))?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend
            .set_features(self.features)
            .map_err(failed("SET_FEATURES"))?;
        frontend
            .set_mem_table(&self.memory.regions())
            .map_err(failed("SET_MEM_TABLE"))?;
        *self.frontend() = frontend;
        self.start_at(&[0; QUEUES as usize])
    }

    /// What the driver's proof of life is answered with.
    ///
    /// # Errors
    /// What the backend says.
    pub fn ping(&self) -> Result<u64, Error> {
        Ok(self.driver.ping()?)
    }

    /// Stops the queues; returns where each is.
    fn stop_queues(&self) -> Result<Vec<u16>, Error> {
        let mut frontend = self.frontend();
        if self.manner == Manner::CloudHypervisor {
            enable_queues(&mut frontend, false)?;
        }
        (0..usize::from(QUEUES))
            .map(|index| {
                let base = frontend.get_vring_base(index);
                let base = base.map_err(failed("GET_VRING_BASE"))?;
                Ok(crate::ring_index(base)?)
            })
            .collect()
    }

    /// Pauses the VM, as a VMM does that is told to stop: the queues stop (QEMU) or are disabled
    /// (Cloud Hypervisor), and the device is not reset. Returns what [`resume`](Self::resume)
    /// needs.
    ///
    /// # Errors
    /// When the backend does not play along.
    pub fn pause(&self) -> Result<Vec<u16>, Error> {
        match self.manner {
            Manner::Qemu { .. } => self.stop_queues(),
            Manner::CloudHypervisor => {
                enable_queues(&mut self.frontend(), false)?;
                Ok(Vec::new())
            }
        }
    }

    /// Has a paused VM go on.
    ///
    /// # Errors
    /// When the backend does not play along.
    pub fn resume(&self, bases: &[u16]) -> Result<(), Error> {
        match self.manner {
            Manner::Qemu { .. } => self.start_at(bases),
            Manner::CloudHypervisor => enable_queues(&mut self.frontend(), true),
        }
    }

    /// The guest's processors stop: nothing of it looks at its memory any more.
    pub fn halt(&self) {
        self.driver.halt();
    }

    /// Kicks a queue, whatever is in it.
    pub fn kick(&self, queue: u16) {
        if let Some(queue) = self.driver.queues().get(usize::from(queue)) {
            let _ = queue.place().kick.write(1);
        }
    }

    /// Resets the device, as a guest does that reboots or takes its driver away, and starts it
    /// again. Links that were open are dead.
    ///
    /// # Errors
    /// When the backend does not play along.
    pub fn reset(&self) -> Result<(), Error> {
        self.driver.stop();
        self.stop_queues()?;
        self.driver.window().clear();
        self.start()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if let Some(channel) = &self.channel {
            let _ = channel.shutdown(std::net::Shutdown::Both);
        }
        self.driver.end();
    }
}

fn enable_queues(frontend: &mut Frontend, enabled: bool) -> Result<(), Error> {
    for index in 0..usize::from(QUEUES) {
        frontend
            .set_vring_enable(index, enabled)
            .map_err(failed("SET_VRING_ENABLE"))?;
    }
    Ok(())
}

/// Gives the backend a channel for its own requests, and answers them from a thread.
fn open_channel(
    frontend: &mut Frontend,
    mapping: &Arc<WindowMapping>,
) -> Result<UnixStream, Error> {
    let io = |e: vhost::vhost_user::Error| Error::Io(io::Error::other(e));
    let mut handler = FrontendReqHandler::new(Arc::clone(mapping)).map_err(io)?;
    handler.set_reply_ack_flag(true);
    // SAFETY: the handler holds the descriptor open.
    let ours = unsafe { BorrowedFd::borrow_raw(handler.get_tx_raw_fd()) };
    let ours = UnixStream::from(ours.try_clone_to_owned()?);
    frontend
        .set_backend_request_fd(&ours)
        .map_err(failed("SET_BACKEND_REQ_FD"))?;
    frontend
        .get_shmem_config()
        .map_err(failed("GET_SHMEM_CONFIG"))?;
    std::thread::Builder::new()
        .name("vmm".into())
        .spawn(move || while handler.handle_request().is_ok() {})?;
    Ok(ours)
}

fn read_config(frontend: &mut Frontend) -> Result<Config, Error> {
    let zeroes = [0; size_of::<Config>()];
    let size = u32::try_from(zeroes.len()).unwrap_or(0);
    let (_, bytes) = frontend
        .get_config(0, size, VhostUserConfigFlags::empty(), &zeroes)
        .map_err(failed("GET_CONFIG"))?;
    let config = Config::read_from_bytes(&bytes)
        .map_err(|_| Error::Io(io::ErrorKind::UnexpectedEof.into()))?;
    if config.magic != MAGIC || config.version != ABI_VERSION {
        return Err(Error::Device {
            magic: config.magic.get(),
            version: config.version.get(),
        });
    }
    Ok(config)
}

/// Another handle to an event.
pub(crate) fn clone_event(event: &EventFd) -> Result<OwnedFd, Error> {
    let fd = event.try_clone()?.into_raw_fd();
    // SAFETY: just taken out of its owner.
    let file = unsafe { File::from_raw_fd(fd) };
    Ok(file.into())
}
