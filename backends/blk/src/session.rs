//! One connection of a VMM: what it has negotiated, its memory, and its queues.

use crate::bits::feature;
use crate::call::Call;
use crate::channel::Channel;
use crate::counters::count;
use crate::disk::{Disk, Watcher};
use crate::inflight::{self, Inflight};
use crate::memory::{MAX_SLOTS, Memory};
use crate::vring::{Layout, MAX_SIZE};
use crate::worker::{Setup, Worker};
use farlane_daemon::log_limit::LogLimit;
use farlane_daemon::warn_limited;
use farlane_zero_copy::{chain, eventfd};
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
};
use zerocopy::IntoBytes as _;

/// Bytes of the configuration space that a front-end may ask for: what is not defined is zero.
const CONFIG_BYTES: usize = 256;

/// Offset of the only byte of the configuration space that a driver may write.
const WRITEBACK_AT: u32 = 32;

/// A queue as far as the front-end has told of it.
#[derive(Debug, Default)]
struct Queue {
    size: u16,
    /// The front-end's addresses: descriptors, available ring, used ring.
    addresses: Option<[u64; 3]>,
    next_available: u16,
    /// There is a kick: the queue is started. None inside: the driver never tells.
    kick: Option<Option<OwnedFd>>,
    call: Arc<Call>,
    error: Arc<Call>,
    enabled: bool,
    worker: Option<Worker>,
}

impl Queue {
    fn stop(&mut self) {
        if let Some(worker) = self.worker.take() {
            self.next_available = worker.stop();
        }
    }
}

/// What a VMM has.
pub struct Session {
    disk: Arc<Disk>,
    memory: Memory,
    features: u64,
    queues: Vec<Queue>,
    inflight: Option<Inflight>,
    /// Whether there is a write cache, as workers see it; and as the driver has set it.
    writeback: Arc<AtomicBool>,
    wants_writeback: bool,
    channel: Arc<Channel>,
    limit: LogLimit,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("disk", &self.disk)
            .finish_non_exhaustive()
    }
}

fn index_of(index: impl TryInto<usize>) -> usize {
    index.try_into().unwrap_or(usize::MAX)
}

impl Session {
    /// A VMM that has just connected.
    #[must_use]
    pub fn new(disk: Arc<Disk>, channel: Arc<Channel>) -> Self {
        disk.look_at_size();
        let watcher: Arc<dyn Watcher> = channel.clone();
        disk.watch(Arc::downgrade(&watcher));
        count(&disk.counters().connections, 1);
        let queues = disk.config().queues;
        Self {
            memory: Memory::new(),
            features: 0,
            queues: (0..queues).map(|_| Queue::default()).collect(),
            inflight: None,
            writeback: Arc::new(AtomicBool::new(false)),
            wants_writeback: true,
            channel,
            limit: LogLimit::new(),
            disk,
        }
    }

    fn queue(&mut self, index: impl TryInto<usize>) -> Result<&mut Queue> {
        self.queues
            .get_mut(index_of(index))
            .ok_or(Error::InvalidParam)
    }

    fn refuse(&self, why: &dyn std::error::Error) -> Error {
        let serial = self.disk.serial();
        warn_limited!(self.limit, "Disk {serial}: {}", chain(why));
        Error::InvalidParam
    }

    fn has(&self, bit: u64) -> bool {
        self.features & bit != 0
    }

    /// Virtio 1.2, 5.2.5.2 and 5.2.6.2: without FLUSH a driver cannot make writes durable, so they
    /// are at once.
    fn set_writeback(&self) {
        let on =
            self.has(feature::FLUSH) && (self.wants_writeback || !self.has(feature::CONFIG_WCE));
        self.writeback.store(on, Ordering::Relaxed);
    }

    /// Starts or stops a queue's worker, as its state asks.
    fn update(&mut self, index: usize) -> Result<()> {
        let enabled_from_start = !self.has(feature::PROTOCOL_FEATURES);
        let queue = self.queue(index)?;
        let runs = queue.enabled || enabled_from_start;
        let (Some(kick), Some(addresses), true) = (&queue.kick, queue.addresses, runs) else {
            queue.stop();
            return Ok(());
        };
        if queue.worker.is_some() {
            return Ok(());
        }
        let kick = match kick {
            Some(kick) => Some(kick.try_clone().map_err(Error::ReqHandlerError)?),
            None => None,
        };
        let (size, next_available) = (queue.size, queue.next_available);
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
            disk: Arc::clone(&self.disk),
            space: Arc::clone(self.memory.space()),
            layout: Layout {
                size,
                descriptors,
                available,
                used,
            },
            event_index: self.has(feature::EVENT_IDX),
            next_available,
            inflight,
            kick,
            call,
            error,
            writeback: Arc::clone(&self.writeback),
        };
        let worker = Worker::start(setup).map_err(Error::ReqHandlerError)?;
        self.queue(index)?.worker = Some(worker);
        Ok(())
    }

    /// Stops a queue, changes it, and starts it again if it is to run.
    fn change(&mut self, index: usize, change: impl FnOnce(&mut Queue)) -> Result<()> {
        let queue = self.queue(index)?;
        queue.stop();
        change(queue);
        self.update(index)
    }

    /// Stops all queues. Nothing touches the VM's memory then.
    pub fn stop(&mut self) {
        self.queues.iter_mut().for_each(Queue::stop);
        self.channel.close();
    }

    fn reset(&mut self) {
        for queue in &mut self.queues {
            queue.stop();
            queue.kick = None;
            queue.enabled = false;
            queue.next_available = 0;
        }
        self.wants_writeback = true;
        self.set_writeback();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop();
    }
}

impl VhostUserBackendReqHandlerMut for Session {
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
        Ok(self.disk.features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.disk.features() != 0 {
            return Err(Error::InvalidParam);
        }
        self.features = features;
        self.set_writeback();
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        self.memory
            .replace(regions, files)
            .map_err(|e| self.refuse(&e))?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        if !size.is_power_of_two() || size > MAX_SIZE {
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
        // A queue goes on where another backend has left it.
        if base != 0
            && let Some(tokens) = self.disk.tokens()
        {
            tokens.taken_over();
        }
        self.change(index_of(index), |queue| queue.next_available = base)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let queue = self.queue(index)?;
        queue.stop();
        queue.kick = None;
        let base = queue.next_available;
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let kick = match fd {
            Some(file) => Some(eventfd::adopt(file.into()).map_err(|e| self.refuse(&e))?),
            None => None,
        };
        self.change(index_of(index), |queue| queue.kick = Some(kick))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = match fd {
            Some(file) => Some(eventfd::check(file.into()).map_err(|e| self.refuse(&e))?),
            None => None,
        };
        self.queue(index)?.call.set(fd);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = match fd {
            Some(file) => Some(eventfd::check(file.into()).map_err(|e| self.refuse(&e))?),
            None => None,
        };
        self.queue(index)?.error.set(fd);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.disk.config().queues.into())
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
        let config = self.disk.config_space(self.wants_writeback);
        let mut bytes = config.as_bytes().to_vec();
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
        let (WRITEBACK_AT, &[writeback @ 0..=1]) = (offset, bytes) else {
            return Err(Error::InvalidParam);
        };
        self.wants_writeback = writeback == 1;
        self.set_writeback();
        Ok(())
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
        if queues > self.disk.config().queues || entries > MAX_SIZE {
            return Err(Error::InvalidParam);
        }
        let file = inflight::make(queues, entries).map_err(Error::ReqHandlerError)?;
        let bytes = inflight::region_bytes(queues, entries);
        let answer = VhostUserInflight::new(bytes, 0, queues, entries);
        Ok((answer, file.into()))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let (queues, entries) = (inflight.num_queues, inflight.queue_size);
        if queues > self.disk.config().queues || entries > MAX_SIZE {
            return Err(Error::InvalidParam);
        }
        let (offset, bytes) = (inflight.mmap_offset, inflight.mmap_size);
        let map = Inflight::map(file.as_fd(), offset, bytes, queues, entries);
        self.inflight = Some(map.map_err(|e| self.refuse(&e))?);
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
        self.memory
            .add(region, &file)
            .map_err(|e| self.refuse(&e))?;
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
        Err(Error::InvalidMessage)
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(Error::InvalidMessage)
    }
}
