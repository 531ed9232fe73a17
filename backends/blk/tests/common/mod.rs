//! A daemon with one disk, and a driver for it that somebody else has written.

#![allow(dead_code)]

pub mod loops;
pub mod machine;
pub mod stage;
pub mod vmm;

use farlane_sys::Mmap;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use farlane_support::process::{Process, metric, metrics};
use virtio_driver::{
    VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkReqBuf,
    VirtioFeatureFlags, VirtioTransport,
};

pub use farlane_support::process::{PATIENCE, wait_until};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_farlane-blk");

/// A daemon.
pub struct Daemon {
    pub process: Process,
    folder: PathBuf,
}

impl Daemon {
    /// Serves `folder/disk` at `folder/socket`, with further keys.
    pub fn start(folder: &Path, keys: &str) -> Self {
        let path = |name: &str| folder.join(name).display().to_string();
        let disk = format!("socket={},path={}{keys}", path("socket"), path("disk"));
        Self::with(folder, &["--disk", &disk])
    }

    /// Runs with these arguments; metrics are at `folder/metrics`.
    pub fn with(folder: &Path, words: &[&str]) -> Self {
        let metrics = folder.join("metrics").display().to_string();
        let mut command = Command::new(PROGRAM);
        command
            .args(words)
            .args(["--metrics", &metrics, "--log-level", "warn"]);
        let daemon = Self {
            process: Process::start(&mut command),
            folder: folder.to_owned(),
        };
        // Metrics come last.
        wait_until(|| UnixStream::connect(folder.join("metrics")).is_ok());
        daemon
    }

    pub fn metrics(&self) -> String {
        metrics(&self.folder.join("metrics"))
    }

    pub fn metric(&self, name: &str) -> u64 {
        self.labelled(name, &[])
    }

    /// The value of the metric that has all of these labels.
    pub fn labelled(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let name = format!("farlane_blk_{name}{{");
        metric(&self.metrics(), &name, labels)
    }
}

/// Makes the file of a disk.
pub fn make_disk(folder: &Path, bytes: u64) -> File {
    let file = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(folder.join("disk"))
        .unwrap();
    file.set_len(bytes).unwrap();
    file
}

/// Memory that the device reaches.
pub struct Memory {
    /// What the front-end has told the device of.
    _file: OwnedFd,
    map: Mmap,
}

impl Memory {
    pub fn bytes(&self, at: usize, length: usize) -> &'static mut [u8] {
        assert!(at + length <= self.map.len());
        // SAFETY: inside of the mapping, which outlives the test that uses it; the device writes it
        // only while the test does not look.
        unsafe { std::slice::from_raw_parts_mut(self.map.base().as_ptr().add(at), length) }
    }
}

/// A driver of the disk at `folder/socket`.
pub struct Driver {
    pub queues: Vec<VirtioBlkQueue<'static, u64>>,
    pub transport: Box<VhostUser<VirtioBlkConfig, VirtioBlkReqBuf>>,
    pub memory: Memory,
}

impl Driver {
    pub fn connect(folder: &Path, queues: usize) -> Self {
        let features = VirtioFeatureFlags::VERSION_1
            | VirtioFeatureFlags::RING_EVENT_IDX
            | VirtioFeatureFlags::RING_INDIRECT_DESC;
        let features = features.bits() | VirtioBlkFeatureFlags::all().bits();
        Self::connect_with(folder, queues, features)
    }

    pub fn connect_with(folder: &Path, queues: usize, features: u64) -> Self {
        let path = folder.join("socket").display().to_string();
        let mut transport =
            Box::new(VhostUser::<VirtioBlkConfig, VirtioBlkReqBuf>::new(&path, features).unwrap());
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 8 << 20).unwrap();
        let map = Mmap::shared(&file, 0, 8 << 20, Mmap::READ_WRITE).unwrap();
        transport
            .map_mem_region(map.base().as_ptr().addr(), map.len(), file.as_raw_fd(), 0)
            .unwrap();
        let memory = Memory { _file: file, map };
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, queues, 128).unwrap();
        Self {
            queues,
            transport,
            memory,
        }
    }

    /// Tells of what was queued and waits for one completion; returns its context and result.
    pub fn complete(&mut self, queue: usize) -> (u64, i32) {
        if self.queues[queue].avail_notif_needed() {
            self.transport
                .get_submission_notifier(queue)
                .notify()
                .unwrap();
        }
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(done) = self.queues[queue].completions().next() {
                return (done.context, done.ret);
            }
            assert!(Instant::now() < end, "no completion");
            std::thread::yield_now();
        }
    }

    pub fn read(&mut self, offset: u64, at: usize, length: usize) -> i32 {
        let bytes = self.memory.bytes(at, length);
        self.queues[0].read(offset, bytes, 0).unwrap();
        self.complete(0).1
    }

    pub fn write(&mut self, offset: u64, at: usize, length: usize) -> i32 {
        let bytes = self.memory.bytes(at, length);
        self.queues[0].write(offset, bytes, 0).unwrap();
        self.complete(0).1
    }
}
