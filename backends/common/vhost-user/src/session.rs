//! One connection of a VMM: what it has negotiated, its memory, and its queues.

use crate::bits::feature;
use crate::call::Call;
use crate::channel::Channel;
use crate::inflight::{self, Inflight};
use crate::memory::{MAX_SLOTS, Memory};
use crate::vring::{Layout, MAX_SIZE};
use farlane_sys::{chain, eventfd, warn_limited};
use std::fs::File;
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

pub use crate::device::{Device, PROTOCOL_FEATURES, Setup};

/// Bytes of the configuration space that a VMM may ask for: what is not defined is zero.
const CONFIG_BYTES: usize = 256;

/// A queue as far as the VMM has told of it.
struct Queue<W> {
    size: u16,
    /// The VMM's addresses: descriptors, available ring, used ring.
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

    /// The number of a queue that a message names.
    fn number(&self, index: impl Into<u32>) -> Result<u16> {
        let (index, count) = (index.into(), self.device.queues());
        let number = u16::try_from(index).ok().filter(|&number| number < count);
        if number.is_none() {
            let name = self.device.name();
            warn_limited!(
                self.channel.limit(),
                "{name}: the VMM wants queue {index} of {count}"
            );
        }
        number.ok_or(Error::InvalidParam)
    }

    fn queue(&mut self, number: u16) -> Result<&mut Queue<D::Worker>> {
        self.queues
            .get_mut(usize::from(number))
            .ok_or(Error::InvalidParam)
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

    fn stop_queue(&mut self, number: u16) -> Result<()> {
        let queue = self
            .queues
            .get_mut(usize::from(number))
            .ok_or(Error::InvalidParam)?;
        queue.stop(&mut self.device);
        Ok(())
    }

    /// Starts or stops a queue's worker, as its state asks.
    fn update(&mut self, number: u16) -> Result<()> {
        let enabled_from_start = !self.has(feature::PROTOCOL_FEATURES);
        let queue = self.queue(number)?;
        let runs = queue.enabled || enabled_from_start;
        let (Some(kick), Some(addresses), true) = (&queue.kick, queue.addresses, runs) else {
            return self.stop_queue(number);
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
        self.queue(number)?.worker = Some(worker);
        Ok(())
    }

    /// Stops a queue, changes it, and starts it again if it is to run.
    fn change(&mut self, number: u16, change: impl FnOnce(&mut Queue<D::Worker>)) -> Result<()> {
        self.stop_queue(number)?;
        change(self.queue(number)?);
        self.update(number)
    }

    /// Ends the requests that wait for the VMM, and stops all queues. Nothing touches the VM's
    /// memory then.
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
        self.change(self.number(index)?, |queue| queue.size = size)
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
        let number = self.number(index)?;
        let addresses = Some([descriptor, available, used]);
        if self.queue(number)?.addresses == addresses {
            return Ok(());
        }
        self.change(number, |queue| queue.addresses = addresses)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.change(self.number(index)?, |queue| {
            queue.next_available = base;
            queue.resumes = false;
        })
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let number = self.number(index)?;
        self.stop_queue(number)?;
        let queue = self.queue(number)?;
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
        self.change(self.number(index)?, |queue| queue.kick = Some(kick))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let call = self.eventfd(fd)?;
        let number = self.number(index)?;
        self.queue(number)?.call.set(call);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let error = self.eventfd(fd)?;
        let number = self.number(index)?;
        self.queue(number)?.error.set_quietly(error);
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
        // VMMs compare it with a number of queues (the vhost crate, Cloud Hypervisor) or of
        // queue pairs (QEMU for network devices): queues suit all.
        Ok(self.device.queues().into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let number = self.number(index)?;
        self.queue(number)?.enabled = enable;
        self.update(number)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let mut bytes = self.device.config();
        bytes.resize(CONFIG_BYTES, 0);
        let [start, length] = [offset, size].map(usize::try_from);
        let start = start.map_err(|_| Error::InvalidParam)?;
        let end = length.ok().and_then(|length| start.checked_add(length));
        let part = end.and_then(|end| bytes.get(start..end));
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
