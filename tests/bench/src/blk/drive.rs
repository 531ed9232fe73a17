//! A polling driver of a vhost-user disk.

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};
use std::fmt;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};
use virtio_driver::{
    QueueNotifier, VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue,
    VirtioBlkReqBuf, VirtioFeatureFlags, VirtioTransport,
};

/// Bytes of a request where nothing else is said.
const BLOCK: usize = 4096;
/// Entries of the queue.
const QUEUE: u16 = 128;
/// Most outstanding requests.
pub const MOST: usize = 64;
/// Looks in vain after which others may have the CPU.
const LOOKS: u32 = 64;
/// How long a backend may take to listen at the socket that it has made.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The disk is read.
    Read,
    /// The disk is written.
    Write,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// A disk in use.
pub struct Drive {
    queue: VirtioBlkQueue<'static, usize>,
    notifier: Box<dyn QueueNotifier>,
    buffers: *mut u8,
    block: usize,
    blocks: u64,
    random: u64,
    /// Kept: the queue's memory is its own.
    _transport: Box<VhostUser<VirtioBlkConfig, VirtioBlkReqBuf>>,
    _memory: OwnedFd,
}

/// Connects. A backend that has made its socket may take a moment to listen.
fn open(path: &str, features: u64) -> Result<VhostUser<VirtioBlkConfig, VirtioBlkReqBuf>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match VhostUser::new(path, features) {
            Err(e) if e.kind() == ErrorKind::ConnectionRefused && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            other => return Ok(other?),
        }
    }
}

impl Drive {
    /// Connects to a disk of so many bytes.
    pub fn connect(socket: &Path, bytes: u64) -> Result<Self> {
        Self::connect_with(socket, bytes, BLOCK, None)
    }

    /// The same for requests of `block` bytes, whose buffers are one behind the other at an address
    /// that is not in use.
    pub fn connect_with(
        socket: &Path,
        bytes: u64,
        block: usize,
        address: Option<usize>,
    ) -> Result<Self> {
        let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        let features = features.bits() | VirtioBlkFeatureFlags::FLUSH.bits();
        let path = socket.to_str().context("A socket's path is not UTF-8")?;
        let mut transport = Box::new(open(path, features)?);
        let length = block * MOST;
        let memory = memfd_create("buffers", MemfdFlags::CLOEXEC)?;
        ftruncate(&memory, u64::try_from(length)?)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let (wish, flags) = match address {
            Some(address) => (address, MapFlags::SHARED | MapFlags::FIXED_NOREPLACE),
            None => (0, MapFlags::SHARED),
        };
        let wish = std::ptr::without_provenance_mut(wish);
        // SAFETY: a new mapping, where nothing else is, until this is dropped.
        let buffers = unsafe { rustix::mm::mmap(wish, length, prot, flags, &memory, 0) }?;
        transport.map_mem_region(buffers.addr(), length, memory.as_raw_fd(), 0)?;
        let mut queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, QUEUE)?;
        let mut queue = queues.pop().context("No queue")?;
        // It looks all the time.
        queue.set_used_notif_enabled(false);
        Ok(Self {
            notifier: transport.get_submission_notifier(0),
            queue,
            buffers: buffers.cast(),
            block,
            blocks: bytes / block as u64,
            random: 0x2545_f491_4f6c_dd1d,
            _transport: transport,
            _memory: memory,
        })
    }

    fn block(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % self.blocks
    }

    fn submit(&mut self, direction: Direction, buffer: usize) -> Result<()> {
        let bytes = self.block;
        let offset = self.block() * bytes as u64;
        let at = self.buffers.wrapping_add(buffer * bytes);
        // SAFETY: the buffer is inside of the mapping, and this process does not touch it while the
        // device does.
        unsafe {
            match direction {
                Direction::Read => self.queue.read_raw(offset, at, bytes, buffer),
                Direction::Write => self.queue.write_raw(offset, at, bytes, buffer),
            }
        }?;
        Ok(())
    }

    fn tell(&mut self) -> Result<()> {
        if self.queue.avail_notif_needed() {
            self.notifier.notify()?;
        }
        Ok(())
    }

    /// Where the buffers are: one behind the other.
    #[allow(dead_code)] // Each bench uses a part.
    pub fn buffers(&self) -> *mut u8 {
        self.buffers
    }

    /// Keeps `depth` requests outstanding for some time. Returns requests a second.
    pub fn run(&mut self, direction: Direction, depth: usize, time: Duration) -> Result<f64> {
        ensure!(depth <= MOST, "At most {MOST} requests");
        for buffer in 0..depth {
            self.submit(direction, buffer)?;
        }
        self.tell()?;
        let begin = Instant::now();
        let mut done = 0_u32;
        // Longer than asked for where nothing was completed in that time.
        let mut measured = time;
        let mut outstanding = depth;
        let mut free = Vec::with_capacity(depth);
        let mut vain = 0_u32;
        while outstanding > 0 {
            for completion in self.queue.completions() {
                ensure!(completion.ret == 0, "A request failed: {}", completion.ret);
                free.push(completion.context);
            }
            if free.is_empty() {
                vain += 1;
                if vain.is_multiple_of(LOOKS) {
                    std::thread::yield_now();
                }
                std::hint::spin_loop();
                continue;
            }
            vain = 0;
            let elapsed = begin.elapsed();
            let over = elapsed >= time && done > 0;
            if !over {
                done += u32::try_from(free.len())?;
                measured = measured.max(elapsed);
            }
            for buffer in std::mem::take(&mut free) {
                if over {
                    outstanding -= 1;
                } else {
                    self.submit(direction, buffer)?;
                }
            }
            self.tell()?;
        }
        Ok(f64::from(done) / measured.as_secs_f64())
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own; the backend has maps of its own, and no request is
        // under way.
        let _ = unsafe { rustix::mm::munmap(self.buffers.cast(), self.block * MOST) };
    }
}
