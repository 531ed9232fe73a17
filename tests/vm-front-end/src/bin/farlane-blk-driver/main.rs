//! Plays a VM for a vhost-user disk, with memory on NUMA nodes of choice: writes and reads at
//! random, checks every byte, and says how many bytes lay on which node. Any request that fails,
//! and any byte that is not the one last written, ends it with an error.
//!
//! ```text
//! farlane-blk-driver --socket S --bytes 67108864 --requests 1000 \
//!     --job cpu=0,memory=1 --job cpu=1,memory=striped
//! memory 0 0 bytes
//! memory 1 133693440 bytes
//! 2000 requests, all right
//! ```

mod blocks;
mod buffers;
mod job;
mod memory;

use anyhow::{Context as _, Result, bail, ensure};
use buffers::Buffers;
use clap::Parser;
use job::{Job, Limit, Worker};
use std::io::ErrorKind;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use virtio_driver::{
    VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkReqBuf,
    VirtioFeatureFlags, VirtioTransport,
};

/// Entries of a queue.
const QUEUE: u16 = 128;
/// Bytes of which a job's part of the disk is a multiple.
const PART: u64 = 1 << 20;
/// How long a backend may take to listen at the socket that it has made.
const PATIENCE: Duration = Duration::from_secs(20);

/// Plays a VM with a disk whose memory lies on NUMA nodes of choice, and checks every byte.
#[derive(Parser)]
struct Options {
    /// The disk's vhost-user socket
    #[arg(long, value_name = "PATH", required_unless_present = "counters")]
    socket: Option<PathBuf>,
    /// Bytes of the disk that are used: each job has its part
    #[arg(long, default_value_t = 64 << 20)]
    bytes: u64,
    /// A thread: the node that it runs on, and that of its buffers: a node, or `striped` over all
    #[arg(long, value_name = "cpu=N,memory=N|striped")]
    job: Vec<Job>,
    /// Requests of each job before everything is read once more
    #[arg(long, default_value_t = 500)]
    requests: u64,
    /// Goes on until there is this file, instead of a number of requests
    #[arg(long, value_name = "PATH")]
    until: Option<PathBuf>,
    /// Only prints what the daemon behind a metrics socket counts
    #[arg(long, value_name = "PATH")]
    counters: Option<PathBuf>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    if let Some(socket) = &options.counters {
        return print_counters(socket);
    }
    let socket = options.socket.as_deref().context("No --socket")?;
    ensure!(!options.job.is_empty(), "No --job");
    let features = VirtioFeatureFlags::VERSION_1.bits()
        | VirtioFeatureFlags::RING_EVENT_IDX.bits()
        | VirtioBlkFeatureFlags::FLUSH.bits()
        | VirtioBlkFeatureFlags::MQ.bits();
    let mut transport = Box::new(open(socket, features)?);
    let count = options.job.len();
    let nodes = memory::nodes()?;
    let mut buffers = Vec::new();
    for job in &options.job {
        let job = Buffers::new(job.memory, &nodes)?;
        for memory in job.memories() {
            transport.map_mem_region(
                memory.base().addr(),
                memory.len(),
                memory.file().as_raw_fd(),
                0,
            )?;
        }
        buffers.push(job);
    }
    let queues = VirtioBlkQueue::setup_queues(&mut *transport, count, QUEUE)?;
    let limit = match options.until.as_deref() {
        Some(file) => Limit::File(file),
        None => Limit::Requests(options.requests),
    };
    let part = options.bytes / u64::try_from(count)? / PART * PART;
    ensure!(part > 0, "{} bytes are too few", options.bytes);
    let mut workers = Vec::new();
    for (index, ((job, buffers), queue)) in options.job.iter().zip(buffers).zip(queues).enumerate()
    {
        workers.push(Worker::new(
            *job,
            buffers,
            queue,
            transport.get_submission_notifier(index),
            transport.get_completion_fd(index),
            part * u64::try_from(index)?..part * (u64::try_from(index)? + 1),
        ));
    }
    let done = std::thread::scope(|scope| {
        let threads: Vec<_> = workers
            .into_iter()
            .map(|worker| scope.spawn(move || worker.run(limit)))
            .collect();
        let results = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(_) => bail!("A job has panicked"),
        });
        results.collect::<Result<Vec<_>>>()
    })?;
    for node in nodes {
        let bytes: u64 = done.iter().map(|done| done.on(node)).sum();
        println!("memory {node} {bytes} bytes");
    }
    let requests: u64 = done.iter().map(|done| done.requests).sum();
    println!("{requests} requests, all right");
    Ok(())
}

/// Connects. A backend that has made its socket may take a moment to listen.
fn open(path: &Path, features: u64) -> Result<VhostUser<VirtioBlkConfig, VirtioBlkReqBuf>> {
    let path = path.to_str().context("A socket's path is not UTF-8")?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match VhostUser::new(path, features) {
            Err(e)
                if matches!(e.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            other => return other.with_context(|| format!("No disk at {path}")),
        }
    }
}

fn print_counters(socket: &Path) -> Result<()> {
    let text = farlane_daemon::metrics::ask(socket, PATIENCE)
        .with_context(|| format!("Nobody tells counters at {}", socket.display()))?;
    print!("{text}");
    Ok(())
}
