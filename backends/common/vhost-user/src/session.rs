//! One connection of a VMM: what it has negotiated, its memory, and its queues.

use crate::bits::feature;
use crate::call::Call;
use crate::channel::Channel;
use crate::inflight::{self, Inflight, Note, QueueInflight};
use crate::memory::{MAX_SLOTS, Memory};
use crate::vring::{Layout, MAX_SIZE};
use farlane_sys::{chain, eventfd, warn_limited};
use farlane_zero_copy::AddressSpace;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Backend, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
};
use vm_memory::GuestMemoryMmap;

/// Bytes of the configuration space that a front-end may ask for: what is not defined is zero.
const CONFIG_BYTES: usize = 256;

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
    /// The queue goes on where it was stopped by being disabled or changed: the front-end has not
    /// named a first buffer, and knows of none.
    pub resumes: bool,
    /// Where requests are tracked.
    pub inflight: Option<QueueInflight>,
    /// What the driver writes to tell of requests; none if it never tells. It does not block.
    pub kick: Option<OwnedFd>,
    /// How the driver is told.
    pub call: Arc<Call>,
    /// How the front-end is told that the queue cannot go on.
    pub error: Arc<Call>,
}

/// What a device is to its front-end: everything that is not the same for all devices.
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

/// A queue as far as the front-end has told of it.
struct Queue<W> {
    size: u16,
    /// The front-end's addresses: descriptors, available ring, used ring.
    addresses: Option<[u64; 3]>,
    next_available: u16,
    /// See [`Setup::resumes`].
    resumes: bool,
    /// There is a kick: the queue is started. None inside: the driver never tells.
    kick: Option<Option<OwnedFd>>,
    call: Arc<Call>,
    error: Arc<Call>,
    enabled: bool,
    worker: Option<W>,
}

impl<W> Default for Queue<W> {
    fn default() -> Self {
        Self {
            size: 0,
            addresses: None,
            next_available: 0,
            resumes: false,
            kick: None,
            call: Arc::default(),
            error: Arc::default(),
            enabled: false,
            worker: None,
        }
    }
}

impl<W> Queue<W> {
    fn stop(&mut self, device: &mut impl Device<Worker = W>) {
        if let Some(worker) = self.worker.take() {
            self.next_available = device.stop(worker);
            self.resumes = true;
        }
    }
}

/// What a VMM has.
pub struct Session<D: Device> {
    device: D,
    memory: Memory,
    features: u64,
    queues: Vec<Queue<D::Worker>>,
    inflight: Option<Inflight>,
    protocol: VhostUserProtocolFeatures,
    channel: Arc<Channel>,
}

impl<D: Device> std::fmt::Debug for Session<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("device", &self.device.name())
            .finish_non_exhaustive()
    }
}

fn index_of(index: impl TryInto<usize>) -> usize {
    index.try_into().unwrap_or(usize::MAX)
}

impl<D: Device> Session<D> {
    /// A VMM that has just connected.
    #[must_use]
    pub fn new(device: D, channel: Arc<Channel>) -> Self {
        let queues = device.queues();
        Self {
            memory: Memory::new(),
            features: 0,
            queues: (0..queues).map(|_| Queue::default()).collect(),
            inflight: None,
            protocol: VhostUserProtocolFeatures::empty(),
            channel,
            device,
        }
    }

    fn queue(&mut self, index: impl TryInto<usize>) -> Result<&mut Queue<D::Worker>> {
        let (index, count) = (index_of(index), self.queues.len());
        if index >= count {
            let name = self.device.name();
            warn_limited!(
                self.channel.limit(),
                "{name}: the VMM wants queue {index} of {count}"
            );
        }
        self.queues.get_mut(index).ok_or(Error::InvalidParam)
    }

    fn refuse(&self, why: &dyn std::error::Error) -> Error {
        warn_limited!(
            self.channel.limit(),
            "{}: {}",
            self.device.name(),
            chain(why)
        );
        Error::InvalidParam
    }

    fn has(&self, bit: u64) -> bool {
        self.features & bit != 0
    }

    fn stop_queue(&mut self, index: usize) -> Result<()> {
        let queue = self.queues.get_mut(index).ok_or(Error::InvalidParam)?;
        queue.stop(&mut self.device);
        Ok(())
    }

    /// Starts or stops a queue's worker, as its state asks.
    fn update(&mut self, index: usize) -> Result<()> {
        let enabled_from_start = !self.has(feature::PROTOCOL_FEATURES);
        let queue = self.queue(index)?;
        let runs = queue.enabled || enabled_from_start;
        let (Some(kick), Some(addresses), true) = (&queue.kick, queue.addresses, runs) else {
            return self.stop_queue(index);
        };
        if queue.worker.is_some() {
            return Ok(());
        }
        let kick = match kick {
            Some(kick) => Some(kick.try_clone().map_err(Error::ReqHandlerError)?),
            None => None,
        };
        let (size, next_available) = (queue.size, queue.next_available);
        let resumes = queue.resumes;
        let (call, error) = (Arc::clone(&queue.call), Arc::clone(&queue.error));
        let mut guest = [0; 3];
        for (guest, user) in guest.iter_mut().zip(addresses) {
            *guest = self
                .memory
                .guest_address(user)
                .map_err(|e| self.refuse(&e))?;
        }
        let [descriptors, available, used] = guest;
        let number = u16::try_from(index).map_err(|_| Error::InvalidParam)?;
        let inflight = self.inflight.as_ref().and_then(|i| i.queue(number, size));
        let setup = Setup {
            index: number,
            space: Arc::clone(self.memory.space()),
            layout: Layout {
                size,
                descriptors,
                available,
                used,
            },
            event_index: self.has(feature::EVENT_IDX),
            next_available,
            resumes,
            inflight,
            kick,
            call,
            error,
        };
        setup.error.forget();
        let worker = self.device.start(setup).map_err(Error::ReqHandlerError)?;
        self.queue(index)?.worker = Some(worker);
        Ok(())
    }

    /// Stops a queue, changes it, and starts it again if it is to run.
    fn change(&mut self, index: usize, change: impl FnOnce(&mut Queue<D::Worker>)) -> Result<()> {
        self.stop_queue(index)?;
        change(self.queue(index)?);
        self.update(index)
    }

    /// Ends the requests that wait for the VMM, and stops all queues. Nothing touches the VM's memory
    /// then.
    pub fn stop(&mut self) {
        self.channel.close();
        self.device.gone();
        self.stop_queues();
    }

    /// The eventfd of a queue's message, if it has one. Something else ends the connection.
    fn eventfd(&self, file: Option<File>) -> Result<Option<OwnedFd>> {
        let Some(file) = file else {
            return Ok(None);
        };
        let fd = OwnedFd::from(file);
        if let Err(e) = eventfd::examine(fd.as_fd()) {
            self.channel.socket().discard(fd);
            return Err(self.refuse(&e));
        }
        Ok(Some(fd))
    }

    fn stop_queues(&mut self) {
        let workers = self.queues.iter().filter_map(|queue| queue.worker.as_ref());
        for worker in workers {
            self.device.ends(worker);
        }
        for queue in &mut self.queues {
            queue.stop(&mut self.device);
        }
    }

    fn reset(&mut self) {
        self.stop_queues();
        for queue in &mut self.queues {
            queue.kick = None;
            queue.enabled = false;
            queue.next_available = 0;
            queue.resumes = false;
        }
        self.device.reset();
    }
}

impl<D: Device> Drop for Session<D> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<D: Device> VhostUserBackendReqHandlerMut for Session<D> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.device.features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.device.features() != 0 {
            return Err(Error::InvalidParam);
        }
        self.features = features;
        self.device.negotiated(features);
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let files: Vec<OwnedFd> = files.into_iter().map(OwnedFd::from).collect();
        let replaced = self.memory.replace(regions, &files);
        self.channel.socket().discard_all(files);
        let table = replaced.map_err(|e| self.refuse(&e))?;
        let told = self.device.set_memory(self.memory.space(), &table);
        told.map_err(Error::ReqHandlerError)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        if !size.is_power_of_two() || size > self.device.max_queue_size() {
            return Err(Error::InvalidParam);
        }
        self.change(index_of(index), |queue| queue.size = size)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let addresses = Some([descriptor, available, used]);
        if self.queue(index)?.addresses == addresses {
            return Ok(());
        }
        self.change(index_of(index), |queue| queue.addresses = addresses)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.change(index_of(index), |queue| {
            queue.next_available = base;
            queue.resumes = false;
        })
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.stop_queue(index_of(index))?;
        let queue = self.queue(index)?;
        queue.kick = None;
        queue.resumes = false;
        let base = queue.next_available;
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let kick = match self.eventfd(fd)? {
            Some(fd) => Some(eventfd::adopt(fd).map_err(|e| self.refuse(&e))?),
            None => None,
        };
        self.change(index_of(index), |queue| queue.kick = Some(kick))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let call = self.eventfd(fd)?;
        self.queue(index)?.call.set(call);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let error = self.eventfd(fd)?;
        self.queue(index)?.error.set_quietly(error);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(self.device.protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.device.protocol_features();
        if features & !offered.bits() != 0 {
            return Err(Error::InvalidParam);
        }
        self.protocol = VhostUserProtocolFeatures::from_bits_truncate(features);
        Ok(())
    }

    fn set_backend_req_fd(&mut self, _requests: Backend) {
        if self.channel.open(self.protocol) {
            self.device.channel_opened();
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        // Front-ends compare it with a number of queues (the vhost crate, Cloud Hypervisor) or of
        // queue pairs (QEMU for network devices): queues suit all.
        Ok(self.device.queues().into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.queue(index)?.enabled = enable;
        self.update(index_of(index))
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let mut bytes = self.device.config();
        bytes.resize(CONFIG_BYTES, 0);
        let end = index_of(offset).saturating_add(index_of(size));
        let part = bytes.get(index_of(offset)..end);
        Ok(part.ok_or(Error::InvalidParam)?.to_vec())
    }

    fn set_config(
        &mut self,
        offset: u32,
        bytes: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> Result<()> {
        self.device.set_config(offset, bytes)
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        Err(Error::InvalidMessage)
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidMessage)
    }

    fn get_inflight_fd(
        &mut self,
        inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        let (queues, entries) = (inflight.num_queues, inflight.queue_size);
        if queues > self.device.queues() || entries > MAX_SIZE {
            return Err(Error::InvalidParam);
        }
        let file = inflight::make(queues, entries).map_err(Error::ReqHandlerError)?;
        let bytes = inflight::region_bytes(queues, entries);
        let answer = VhostUserInflight::new(bytes, 0, queues, entries);
        Ok((answer, file.into()))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let (queues, entries) = (inflight.num_queues, inflight.queue_size);
        let (offset, bytes) = (inflight.mmap_offset, inflight.mmap_size);
        let fits = queues <= self.device.queues() && entries <= MAX_SIZE;
        let map = fits.then(|| Inflight::map(file.as_fd(), offset, bytes, queues, entries));
        self.channel.socket().discard(file.into());
        let map = map.ok_or(Error::InvalidParam)?;
        let map = map.map_err(|e| self.refuse(&e))?;
        let note = self.device.note(map.note());
        if let Some(note) = note.map_err(Error::ReqHandlerError)? {
            map.set_note(note);
        }
        self.inflight = Some(map);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_SLOTS)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let added = self.memory.add(region, file.as_fd());
        self.channel.socket().discard(file.into());
        added.map_err(|e| self.refuse(&e))?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.memory.remove(region).map_err(|e| self.refuse(&e))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidMessage)
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidMessage)
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        let mut sizes = [0; 256];
        let region = self.device.shared_memory();
        if let Some((id, bytes)) = region {
            sizes[usize::from(id)] = bytes;
        }
        Ok(VhostUserShMemConfig::new(
            u32::from(region.is_some()),
            &sizes,
        ))
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(Error::InvalidMessage)
    }
}

#[cfg(test)]
mod tests;
