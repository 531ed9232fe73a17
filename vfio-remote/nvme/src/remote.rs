//! Memory that is reached by messages: what touches it blocks for as long as its owner takes, and
//! is therefore done by a thread of its own, in order.

use crate::bits::{Cqe, Sqe, Status};
use crate::bounce::Bounce;
use crate::data::{DataBuffer, DataPointer, Segment, Unreachable, WalkError, gather, scatter};
use crate::ids::{CqId, SqId};
use crate::shared::{Notice, Shared};
use farlane_abi::width::{to_u64, to_usize};
use farlane_block::engine::Slot;
use farlane_sys::thread::OwnedThread;
use farlane_sys::warn_limited;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use zerocopy::IntoBytes as _;

/// An access to remote memory.
#[derive(Debug)]
pub enum Job {
    /// Read entries of a submission queue.
    Fetch {
        /// Submission Queue Identifier.
        sq: SqId,
        /// Address of the first entry.
        address: u64,
        /// Number of entries.
        count: u32,
    },
    /// Write an entry of a completion queue, then interrupt.
    Post {
        /// Completion Queue Identifier.
        cq: CqId,
        /// Address.
        address: u64,
        /// Entry.
        cqe: Cqe,
        /// Vector, where it interrupts.
        vector: Option<u16>,
    },
    /// Read a command's data.
    Gather {
        /// Slot of the command's request.
        slot: Slot,
        /// Data Pointer of the source.
        pointer: DataPointer,
        /// Bytes.
        length: u32,
    },
    /// Write a command's data.
    Scatter {
        /// Slot of the command's request.
        slot: Slot,
        /// Data Pointer of the destination.
        pointer: DataPointer,
        /// The bytes to write.
        data: Bounce,
    },
}

impl Job {
    /// The result of an access that is not made.
    fn dropped(self) -> Done {
        match self {
            Self::Fetch { sq, .. } => Done::Fetched {
                sq,
                entries: Err(Unreachable),
            },
            Self::Post { cq, cqe, .. } => Done::Posted {
                cq,
                sq: SqId::new(cqe.sq_id),
                result: Err(Unreachable),
            },
            Self::Gather { slot, .. } => Done::Gathered {
                slot,
                data: Err(Status::INTERNAL_ERROR),
            },
            Self::Scatter { slot, .. } => Done::Scattered {
                slot,
                result: Err(Status::INTERNAL_ERROR),
            },
        }
    }
}

/// The result of an access to remote memory.
#[derive(Debug)]
pub enum Done {
    /// Entries of a submission queue.
    Fetched {
        /// Submission Queue Identifier.
        sq: SqId,
        /// The entries.
        entries: Result<Vec<Sqe>, Unreachable>,
    },
    /// An entry of a completion queue was written.
    Posted {
        /// Completion Queue Identifier.
        cq: CqId,
        /// Submission queue of its command.
        sq: SqId,
        /// Whether it has succeeded.
        result: Result<(), Unreachable>,
    },
    /// A command's data was read.
    Gathered {
        /// Slot of the command's request.
        slot: Slot,
        /// The data.
        data: Result<Bounce, Status>,
    },
    /// A command's data was written.
    Scattered {
        /// Slot of the command's request.
        slot: Slot,
        /// Whether it has succeeded.
        result: Result<(), Status>,
    },
}

/// The thread that accesses remote memory, as its controller sees it.
#[derive(Debug)]
pub struct Remote {
    jobs: Option<Sender<Job>>,
    // Before what it answers to: it does what is queued.
    _thread: OwnedThread,
    done: Receiver<Done>,
    under_way: usize,
    /// Nobody waits for what is to be done.
    dropping: Arc<AtomicBool>,
}

impl Remote {
    /// Starts the thread.
    pub fn start(shared: Arc<Shared>) -> std::io::Result<Self> {
        let (jobs, received) = channel::<Job>();
        let (reply, done) = channel();
        let dropping = Arc::new(AtomicBool::new(false));
        let is_dropping = Arc::clone(&dropping);
        let thread = OwnedThread::spawn("nvme-remote", move || {
            for job in received {
                let finished = if is_dropping.load(Ordering::SeqCst) {
                    job.dropped()
                } else {
                    perform(&shared, job)
                };
                if reply.send(finished).is_err() {
                    return;
                }
                shared.notify(Notice::Remote);
            }
        })?;
        Ok(Self {
            jobs: Some(jobs),
            done,
            _thread: thread,
            under_way: 0,
            dropping,
        })
    }

    /// Queues an access.
    pub fn submit(&mut self, job: Job) {
        if let Some(jobs) = &self.jobs
            && jobs.send(job).is_ok()
        {
            self.under_way += 1;
        }
    }

    /// Whether what has not been begun is answered with an error: who owns that memory may take
    /// long over each.
    pub fn drop_jobs(&self, dropping: bool) {
        self.dropping.store(dropping, Ordering::SeqCst);
    }

    /// The next result.
    pub fn next(&mut self) -> Option<Done> {
        let done = self.done.try_recv().ok()?;
        self.under_way -= 1;
        Some(done)
    }

    /// Whether no access is queued or under way.
    pub fn is_idle(&self) -> bool {
        self.under_way == 0
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.jobs = None;
    }
}

fn status(error: WalkError) -> Status {
    match error {
        WalkError::Status(status) => status,
        WalkError::Unreachable => Status::DATA_TRANSFER_ERROR,
    }
}

/// Where the data of a command lies: `length` bytes of it.
fn segments(
    shared: &Shared,
    pointer: DataPointer,
    buffer: DataBuffer,
    length: usize,
) -> Result<Vec<Segment>, Status> {
    let mut segments = Vec::new();
    pointer
        .walk(buffer, to_u64(length), &*shared.dma, &mut segments)
        .map_err(status)
        .map(|()| segments)
}

fn perform(shared: &Shared, job: Job) -> Done {
    match job {
        Job::Fetch { sq, address, count } => Done::Fetched {
            sq,
            entries: fetch(shared, sq, address, count),
        },
        Job::Post {
            cq,
            address,
            cqe,
            vector,
        } => Done::Posted {
            cq,
            sq: SqId::new(cqe.sq_id),
            result: post(shared, cq, address, &cqe, vector),
        },
        Job::Gather {
            slot,
            pointer,
            length,
        } => Done::Gathered {
            slot,
            data: gather_data(shared, pointer, length),
        },
        Job::Scatter {
            slot,
            pointer,
            data,
        } => Done::Scattered {
            slot,
            result: scatter_data(shared, pointer, &data),
        },
    }
}

fn fetch(shared: &Shared, sq: SqId, address: u64, count: u32) -> Result<Vec<Sqe>, Unreachable> {
    let mut entries = vec![Sqe::default(); to_usize(count.into())];
    let read = shared
        .dma
        .read(address, entries.as_mut_slice().as_mut_bytes());
    read.map(|()| entries).map_err(|e| {
        warn_limited!(
            shared.identity.limit,
            "Submission queue {sq} cannot be read: {e}"
        );
        Unreachable
    })
}

fn post(
    shared: &Shared,
    cq: CqId,
    address: u64,
    cqe: &Cqe,
    vector: Option<u16>,
) -> Result<(), Unreachable> {
    // The phase must not be seen before the rest: the last four bytes go last.
    let (first, last) = cqe.as_bytes().split_at(12);
    let memory = &*shared.dma;
    let written = memory
        .write(address, first)
        .and_then(|()| memory.write(address.wrapping_add(12), last));
    if let (Ok(()), Some(vector)) = (&written, vector)
        && !shared.interrupts.by_pin()
    {
        shared.interrupts.raise(vector);
    }
    written.map_err(|e| {
        warn_limited!(
            shared.identity.limit,
            "Completion queue {cq} cannot be written: {e}"
        );
        Unreachable
    })
}

fn gather_data(shared: &Shared, pointer: DataPointer, length: u32) -> Result<Bounce, Status> {
    let length = to_usize(length.into());
    let segments = segments(shared, pointer, DataBuffer::Source, length)?;
    let mut data = Bounce::new(length);
    gather(&*shared.dma, &segments, &mut data)
        .map(|()| data)
        .map_err(|Unreachable| Status::DATA_TRANSFER_ERROR)
}

fn scatter_data(shared: &Shared, pointer: DataPointer, data: &Bounce) -> Result<(), Status> {
    let segments = segments(shared, pointer, DataBuffer::Destination, data.len())?;
    scatter(&*shared.dma, &segments, data).map_err(|Unreachable| Status::DATA_TRANSFER_ERROR)
}
