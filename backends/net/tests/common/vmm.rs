//! A VMM and its guest's driver that do exactly what a test says, also what none should.

#![allow(dead_code)]

use super::PATIENCE;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, OFlags, fcntl_getfl, fcntl_setfl, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// Entries of a queue.
pub const SIZE: u16 = 256;
/// Bytes of guest memory.
pub const RAM: u64 = 16 << 20;
/// Where the VMM has guest memory, as far as it says.
const USER: u64 = 0x7000_0000_0000;
/// Where buffers may be.
pub const DATA: u64 = 0x80_0000;
/// Queues: two pairs.
const QUEUES: usize = 4;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// VERSION_1, protocol features, indirect descriptors, mergeable buffers, several pairs.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 28 | 1 << 15 | 1 << 22;

/// Where the parts of a queue are.
pub fn descriptors(queue: usize) -> u64 {
    0x1_0000 * (u64::try_from(queue).unwrap() + 1)
}

pub fn available(queue: usize) -> u64 {
    descriptors(queue) + 0x2000
}

pub fn used(queue: usize) -> u64 {
    descriptors(queue) + 0x4000
}

fn event() -> EventFd {
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    // SAFETY: the descriptor is nobody else's.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}

/// The guest's memory, as the VMM has it.
fn region(ram: &File) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: RAM,
        userspace_addr: USER,
        mmap_offset: 0,
        mmap_handle: ram.as_raw_fd(),
    }
}

/// Where the VMM has the parts of a queue.
fn addresses(queue: usize) -> VringConfigData {
    VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 0,
        desc_table_addr: USER + descriptors(queue),
        used_ring_addr: USER + used(queue),
        avail_ring_addr: USER + available(queue),
        log_addr: None,
    }
}

struct Queue {
    kick: EventFd,
    call: EventFd,
    error: EventFd,
    available: u16,
}

/// Guest memory and queues.
pub struct Vm {
    pub ram: File,
    queues: Vec<Queue>,
    /// Whether it listens from the beginning for what cannot go on.
    listens: bool,
    pub frontend: Frontend,
}

impl Vm {
    /// Connects, negotiates, and starts all queues.
    pub fn boot(socket: &Path) -> Self {
        Self::boot_as(socket, true)
    }

    /// The same, of a VMM that does not want to know which queues cannot go on.
    pub fn boot_without_errors(socket: &Path) -> Self {
        Self::boot_as(socket, false)
    }

    fn boot_as(socket: &Path, listens: bool) -> Self {
        let ram = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&ram, RAM).unwrap();
        let ram = File::from(ram);
        let stream = UnixStream::connect(socket).unwrap();
        let mut frontend = Frontend::from_stream(stream, 8);
        frontend.set_owner().unwrap();
        let features = frontend.get_features().unwrap();
        assert_eq!(features & FEATURES, FEATURES);
        let protocol = frontend.get_protocol_features().unwrap();
        frontend
            .set_protocol_features(protocol & !VhostUserProtocolFeatures::SHMEM)
            .unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(FEATURES).unwrap();
        frontend.set_mem_table(&[region(&ram)]).unwrap();
        let queues = (0..QUEUES).map(|_| Queue {
            kick: event(),
            call: event(),
            error: event(),
            available: 0,
        });
        let mut vm = Self {
            ram,
            queues: queues.collect(),
            listens,
            frontend,
        };
        for queue in 0..QUEUES {
            vm.start(queue);
        }
        vm
    }

    /// Connects to the next backend after one that was killed, and says to it what Cloud Hypervisor
    /// (v53) does, in its order (`reinitialize_vhost_user`): a queue goes on, it says, at the
    /// available index of its driver.
    pub fn reconnect_as_cloud_hypervisor(&mut self, socket: &Path) {
        let stream = UnixStream::connect(socket).unwrap();
        self.frontend = Frontend::from_stream(stream, 8);
        let frontend = &mut self.frontend;
        frontend.set_owner().unwrap();
        frontend.get_features().unwrap();
        let protocol = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        frontend.set_protocol_features(protocol).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(FEATURES).unwrap();
        frontend.set_mem_table(&[region(&self.ram)]).unwrap();
        for queue in 0..QUEUES {
            frontend.set_vring_num(queue, SIZE).unwrap();
        }
        for (queue, own) in self.queues.iter().enumerate() {
            frontend.set_vring_addr(queue, &addresses(queue)).unwrap();
            frontend.set_vring_base(queue, own.available).unwrap();
            frontend.set_vring_call(queue, &own.call).unwrap();
            frontend.set_vring_kick(queue, &own.kick).unwrap();
        }
        for queue in 0..QUEUES {
            frontend.set_vring_enable(queue, true).unwrap();
        }
    }

    /// Starts a queue at its beginning.
    pub fn start(&mut self, queue: usize) {
        let own = &self.queues[queue];
        let frontend = &mut self.frontend;
        frontend.set_vring_num(queue, SIZE).unwrap();
        frontend.set_vring_base(queue, 0).unwrap();
        frontend.set_vring_addr(queue, &addresses(queue)).unwrap();
        if self.listens {
            frontend.set_vring_err(queue, &own.error).unwrap();
        }
        frontend.set_vring_kick(queue, &own.kick).unwrap();
        frontend.set_vring_call(queue, &own.call).unwrap();
        frontend.set_vring_enable(queue, true).unwrap();
    }

    /// Has reading a queue's kick block, for all who have it.
    pub fn let_kick_block(&self, queue: usize) {
        let kick = self.queues[queue].kick.as_raw_fd();
        // SAFETY: the eventfd is open as long as this value.
        let kick = unsafe { BorrowedFd::borrow_raw(kick) };
        let flags = fcntl_getfl(kick).unwrap();
        fcntl_setfl(kick, flags - OFlags::NONBLOCK).unwrap();
    }

    /// Has a queue stop, within the time that anything may take.
    pub fn must_stop(&self, queue: usize) {
        let (frontend, (stopped, wait)) = (self.frontend.clone(), std::sync::mpsc::channel());
        std::thread::spawn(move || stopped.send(frontend.get_vring_base(queue).unwrap()));
        wait.recv_timeout(PATIENCE).expect("it does not stop");
    }

    /// Stops a queue, makes it as it is after a reset, and starts it.
    pub fn restart(&mut self, queue: usize) {
        self.frontend.get_vring_base(queue).unwrap();
        self.put(descriptors(queue), &[0; 0x6000]);
        self.queues[queue].available = 0;
        self.start(queue);
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, at).unwrap();
    }

    pub fn word(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.ram.read_exact_at(&mut bytes, at).unwrap();
        u16::from_le_bytes(bytes)
    }

    pub fn describe(&self, table: u64, index: u16, what: (u64, u32), flags: u16, next: u16) {
        let (address, length) = what;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.put(table + u64::from(index) * 16, &bytes);
    }

    /// Makes a chain available, and says so.
    pub fn publish(&mut self, queue: usize, head: u16) {
        let own = &mut self.queues[queue];
        let slot = u64::from(own.available % SIZE);
        own.available = own.available.wrapping_add(1);
        let index = own.available;
        self.put(available(queue) + 4 + slot * 2, &head.to_le_bytes());
        self.set_available(queue, index);
    }

    /// Claims that there are so many.
    pub fn set_available(&mut self, queue: usize, index: u16) {
        self.put(available(queue) + 2, &index.to_le_bytes());
        self.queues[queue].kick.write(1).unwrap();
    }

    /// Waits until so many buffers of a queue were used.
    pub fn wait_used(&self, queue: usize, index: u16) {
        let end = Instant::now() + PATIENCE;
        while self.word(used(queue) + 2) != index {
            assert!(Instant::now() < end, "queue {queue} stands still");
            std::thread::yield_now();
        }
    }

    /// From now on it wants to know whether a queue cannot go on.
    pub fn listen(&mut self, queue: usize) {
        let own = &self.queues[queue];
        self.frontend.set_vring_err(queue, &own.error).unwrap();
    }

    /// Whether the backend says that a queue cannot go on.
    pub fn has_error(&self, queue: usize) -> bool {
        self.queues[queue].error.read().is_ok()
    }

    /// Waits until the backend says that a queue cannot go on.
    pub fn wait_error(&self, queue: usize) {
        let error = &self.queues[queue].error;
        // SAFETY: the eventfd is open as long as this value.
        let fd = unsafe { BorrowedFd::borrow_raw(error.as_raw_fd()) };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        let limit = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(poll(&mut fds, Some(&limit)), Ok(1), "no error");
        error.read().unwrap();
    }
}
