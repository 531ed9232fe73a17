//! A VMM and its guest's driver that do exactly what a test says, also what none should.

use super::PATIENCE;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// Entries of the queue.
pub const SIZE: u16 = 128;
/// Bytes of guest memory.
pub const RAM: u64 = 64 << 20;
/// Where the VMM has guest memory, as far as it says.
const USER: u64 = 0x7000_0000_0000;
/// Where the parts of the queue are; headers and status bytes, one of each for each descriptor.
pub const DESCRIPTORS: u64 = 0x1000;
pub const AVAILABLE: u64 = 0x2000;
pub const USED: u64 = 0x3000;
pub const HEADERS: u64 = 0x4000;
pub const STATUSES: u64 = 0x6000;
pub const DATA: u64 = 0x10_0000;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;

/// VIRTIO_F_VERSION_1, VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_RING_F_INDIRECT_DESC, and of the disk
/// (virtio 1.3, 5.2.3): VIRTIO_BLK_F_CONFIG_WCE, without which its write cache cannot be switched,
/// and VIRTIO_BLK_F_FLUSH.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 28 | CONFIG_WCE | FEATURE_FLUSH;
pub const CONFIG_WCE: u64 = 1 << 11;
pub const FEATURE_FLUSH: u64 = 1 << 9;

/// Guest memory and what a VMM keeps over the end of a backend.
pub struct Vm {
    pub ram: File,
    pub kick: EventFd,
    pub call: EventFd,
    pub error: EventFd,
    /// What the driver negotiates.
    pub features: u64,
    inflight: Option<(VhostUserInflight, File)>,
    available: u16,
    seen: u16,
}

fn event() -> EventFd {
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    // SAFETY: the descriptor is nobody else's.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}

impl Vm {
    pub fn new() -> Self {
        let ram = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&ram, RAM).unwrap();
        Self {
            ram: ram.into(),
            kick: event(),
            call: event(),
            error: event(),
            features: FEATURES,
            inflight: None,
            available: 0,
            seen: 0,
        }
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, at).unwrap();
    }

    pub fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.ram.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    /// Connects and negotiates; starts nothing.
    pub fn connect(&self, socket: &Path) -> Frontend {
        let stream = UnixStream::connect(socket).unwrap();
        let mut frontend = Frontend::from_stream(stream, 4);
        frontend.set_owner().unwrap();
        let features = frontend.get_features().unwrap();
        assert_eq!(features & self.features, self.features);
        let protocol = frontend.get_protocol_features().unwrap();
        assert!(protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD));
        frontend
            .set_protocol_features(protocol & !VhostUserProtocolFeatures::SHMEM)
            .unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(self.features).unwrap();
        frontend
    }

    /// Makes guest memory known.
    pub fn share(&self, frontend: &Frontend) {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: RAM,
            userspace_addr: USER,
            mmap_offset: 0,
            mmap_handle: self.ram.as_raw_fd(),
        };
        frontend.set_mem_table(&[region]).unwrap();
    }

    /// Tells of the memory that tracks requests; the first backend makes it.
    pub fn track(&mut self, frontend: &mut Frontend) {
        if self.inflight.is_none() {
            let wanted = VhostUserInflight::new(0, 0, 1, SIZE);
            self.inflight = Some(frontend.get_inflight_fd(&wanted).unwrap());
        }
        let (inflight, file) = self.inflight.as_ref().unwrap();
        frontend
            .set_inflight_fd(inflight, file.as_raw_fd())
            .unwrap();
    }

    /// Starts queue 0 at `base`.
    pub fn start(&self, frontend: &mut Frontend, base: u16) {
        let addresses = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: USER + DESCRIPTORS,
            used_ring_addr: USER + USED,
            avail_ring_addr: USER + AVAILABLE,
            log_addr: None,
        };
        frontend.set_vring_num(0, SIZE).unwrap();
        frontend.set_vring_base(0, base).unwrap();
        frontend.set_vring_addr(0, &addresses).unwrap();
        frontend.set_vring_err(0, &self.error).unwrap();
        frontend.set_vring_kick(0, &self.kick).unwrap();
        frontend.set_vring_call(0, &self.call).unwrap();
        frontend.set_vring_enable(0, true).unwrap();
    }

    /// All of it, as QEMU does it at the beginning and when a backend has come back: a queue goes
    /// on where its used ring is.
    pub fn boot(&mut self, socket: &Path) -> Frontend {
        let mut frontend = self.connect(socket);
        self.share(&frontend);
        self.track(&mut frontend);
        let used = u16::from_le_bytes(self.get(USED + 2));
        self.start(&mut frontend, used);
        frontend
    }

    pub fn describe(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.put(DESCRIPTORS + u64::from(index) * 16, &bytes);
    }

    /// Makes the queue as it is after a reset.
    pub fn clear_queue(&mut self) {
        for part in [DESCRIPTORS, AVAILABLE, USED] {
            self.put(part, &[0; 4096]);
        }
        (self.available, self.seen) = (0, 0);
    }

    /// Describes a request with its data at `data`, from descriptor `head` on.
    pub fn request(&self, head: u16, kind: u32, sector: u64, data: u64, length: u32) {
        let header = HEADERS + u64::from(head) * 16;
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        self.put(header, &bytes);
        self.put(STATUSES + u64::from(head), &[0xff]);
        let written = if kind == 0 || kind == 8 { WRITE } else { 0 };
        self.describe(head, header, 16, NEXT, head + 1);
        self.describe(head + 1, data, length, NEXT | written, head + 2);
        self.describe(head + 2, STATUSES + u64::from(head), 1, WRITE, 0);
    }

    /// Makes chains available; tells of them where `tells`.
    pub fn publish(&mut self, heads: &[u16], tells: bool) {
        for head in heads {
            let slot = u64::from(self.available % SIZE);
            self.put(AVAILABLE + 4 + slot * 2, &head.to_le_bytes());
            self.available = self.available.wrapping_add(1);
        }
        self.put(AVAILABLE + 2, &self.available.to_le_bytes());
        if tells {
            self.kick.write(1).unwrap();
        }
    }

    /// What has been used since the last call: head, bytes written, status.
    pub fn used(&mut self) -> Vec<(u16, u32, u8)> {
        let index = u16::from_le_bytes(self.get(USED + 2));
        let mut all = Vec::new();
        while self.seen != index {
            let at = USED + 4 + u64::from(self.seen % SIZE) * 8;
            let head = u32::from_le_bytes(self.get(at));
            let head = u16::try_from(head).unwrap();
            let written = u32::from_le_bytes(self.get(at + 4));
            let [status] = self.get(STATUSES + u64::from(head));
            all.push((head, written, status));
            self.seen = self.seen.wrapping_add(1);
        }
        all
    }

    /// Waits until so many more have been used.
    pub fn wait_used(&mut self, count: usize) -> Vec<(u16, u32, u8)> {
        let end = Instant::now() + PATIENCE;
        let mut all = Vec::new();
        while all.len() < count {
            all.extend(self.used());
            assert!(Instant::now() < end, "{} of {count} completed", all.len());
            std::thread::yield_now();
        }
        all
    }

    /// Does one request and returns its status.
    pub fn does(&mut self, kind: u32, sector: u64, data: u64, length: u32) -> u8 {
        self.request(0, kind, sector, data, length);
        self.publish(&[0], true);
        self.wait_used(1)[0].2
    }

    /// Waits until the backend says that the queue cannot go on.
    pub fn wait_error(&self) {
        wait_event(&self.error, "error");
    }

    /// Waits until the driver is told of used buffers.
    pub fn wait_call(&self) {
        wait_event(&self.call, "call");
    }

    /// Takes notice of all calls up to now.
    pub fn forget_calls(&self) {
        // Fails where there were none.
        let _ = self.call.read();
    }
}

fn wait_event(event: &EventFd, what: &str) {
    // SAFETY: the eventfd is open as long as this value.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let limit = Timespec::try_from(PATIENCE).unwrap();
    assert_eq!(poll(&mut fds, Some(&limit)), Ok(1), "no {what}");
    event.read().unwrap();
}

/// The sectors of the disk, as the configuration space has them.
pub fn capacity(frontend: &mut Frontend) -> u64 {
    let flags = VhostUserConfigFlags::empty();
    let (_, bytes) = frontend.get_config(0, 8, flags, &[0; 8]).unwrap();
    u64::from_le_bytes(bytes.try_into().unwrap())
}

/// A channel for the backend's own requests.
pub fn open_channel(frontend: &mut Frontend) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    frontend
        .set_backend_request_fd(&OwnedFd::from(theirs))
        .unwrap();
    ours
}

impl Vm {
    /// Writes into the memory that tracks requests that this one is under way: vhost-user's layout
    /// for split queues.
    pub fn mark_inflight(&self, head: u16, counter: u64) {
        let (_, file) = self.inflight.as_ref().unwrap();
        let entry = 16 + u64::from(head) * 16;
        file.write_all_at(&[1], entry).unwrap();
        file.write_all_at(&counter.to_ne_bytes(), entry + 8)
            .unwrap();
    }
}
