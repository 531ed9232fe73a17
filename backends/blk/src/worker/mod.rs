//! A queue in use: a thread that takes requests, has rings move their bytes, and completes them.
//!
//! A turn takes what has ended, takes a bounded number of new requests, tells the kernel of the
//! transfers, and shows the driver all that has ended in one batch, of which it is told at most
//! once. While there is work, the driver is asked not to tell of new requests.
//!
//! * `queue_worker`: the turns. `virtqueue`: the queue, and the requests that it is owed.
//! * `start`: what is begun for a request; `steps`: how it goes on and ends.
//! * `files`: the disk's paths as [`farlane_block::engine`] sees them.
//! * `failover`: requests that have failed on a path. `offload`: transfers that another node does.
//!
//! The worker belongs to the node on which its queue lies, and nobody else touches the queue.

mod data;
mod failover;
mod files;
mod offload;
mod queue_worker;
mod requests;
mod start;
mod steps;
mod virtqueue;

use crate::disk::Disk;
use crate::per_node::steering::Steering;
use farlane_sys::eventfd;
use farlane_vhost_user::chain::ChainError;
use farlane_vhost_user::session::Setup;
use farlane_vhost_user::vring::RingError;
use farlane_zero_copy::AddressSpaceError;
use farlane_zero_copy::placement::Placement;
use queue_worker::QueueWorker;
use rustix::event::EventfdFlags;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use thiserror::Error;

/// A worker that runs.
#[derive(Debug)]
pub struct Worker {
    stopping: Arc<AtomicBool>,
    wake: OwnedFd,
    thread: JoinHandle<u16>,
}

impl Worker {
    /// Starts to serve a queue. `placement` tells where the VM's memory lies; there is none on a
    /// machine with one node.
    ///
    /// # Errors
    /// What the system says.
    pub fn start(
        setup: Setup,
        disk: Arc<Disk>,
        writeback: Arc<AtomicBool>,
        placement: Option<Arc<Placement>>,
    ) -> io::Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags)?;
        let nodes = &disk.around().nodes;
        let home = placement.as_ref().map_or(0, |placement| {
            nodes.index_of(placement.look_at(setup.layout.descriptors))
        });
        let steering = placement.map(Steering::new);
        let worker_node = nodes.all().get(home).ok_or(io::ErrorKind::NotFound)?;
        let thread = worker_node.spawn(format!("queue {}", setup.index), {
            let disk = Arc::clone(&disk);
            let stopping = Arc::clone(&stopping);
            let wake = Arc::new(wake.try_clone()?);
            move || {
                let task = Task {
                    disk,
                    writeback,
                    stopping,
                    steering,
                    home,
                };
                work(setup, task, wake)
            }
        })?;
        Ok(Self {
            stopping,
            wake,
            thread,
        })
    }

    /// Takes no further request.
    pub fn end(&self) {
        self.stopping.store(true, Ordering::Release);
        eventfd::signal(self.wake.as_fd());
    }

    /// Takes no further request, waits for those under way, and returns the running number of the
    /// first buffer that was not taken. Nothing touches the queue or its memory then.
    #[must_use]
    pub fn stop(self) -> u16 {
        self.end();
        self.thread.join().unwrap_or_else(|_| {
            log::error!("A queue's worker has panicked");
            0
        })
    }
}

/// A worker's inputs besides its queue.
struct Task {
    disk: Arc<Disk>,
    writeback: Arc<AtomicBool>,
    stopping: Arc<AtomicBool>,
    steering: Option<Steering>,
    /// Index of the node that it starts on.
    home: usize,
}

fn work(setup: Setup, task: Task, wake: Arc<OwnedFd>) -> u16 {
    farlane_worker::thread::prepare();
    let next_available = setup.next_available;
    match QueueWorker::new(setup, task, wake) {
        Ok(mut worker) => worker.run(),
        Err(e) => {
            log::error!("A queue cannot be served: {e}");
            next_available
        }
    }
}

/// Why a queue has stopped for good.
#[derive(Debug, Error)]
enum Broken {
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error(transparent)]
    Memory(#[from] AddressSpaceError),
    #[error("Missing header or status descriptor ({readable} bytes to read, {writable} to write)")]
    Incomplete { readable: u64, writable: u64 },
    #[error("The queue's ring failed")]
    Io(#[from] io::Error),
}
