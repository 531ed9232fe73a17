//! Files in which processes have what they register, and segments of other users' processes, before
//! they are attached. All of their pages have to be there: those that are not would be the daemon's
//! once it touches them, which bounds its own memory and not theirs.
//!
//! To seal a file, and to look for holes in it, takes its inode's lock. A `write` into the file has
//! that meanwhile, also while it waits for a page of its source: where whoever provides that (FUSE,
//! `userfaultfd`) does not, for ever, and nothing ends the wait for the lock. So threads of their
//! own wait for it, for each sender a few, and its connection is not heard until then. What waits
//! is bounded by the descriptors that its process or user has a share of.

use super::Sender;
use super::open::Backing;
use farlane_abi::ids::RegionId;
use farlane_sys::sync::lock;
use farlane_zero_copy::{Region, RegionError, SharedFiles};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

/// Threads that look at files of one sender.
const MOST_OF_SENDER: usize = 4;
/// Bytes of a thread's stack: it makes system calls.
const STACK: usize = 128 << 10;

/// What looks at files.
pub(crate) struct Sharing(Arc<Shared>);

struct Shared {
    files: SharedFiles,
    state: Mutex<State>,
    /// Readable when something has been looked at.
    looked: OwnedFd,
}

#[derive(Default)]
struct State {
    senders: HashMap<Sender, Queue>,
    done: Vec<Looked>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    threads: usize,
}

/// What files are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Registration,
    Segment,
}

/// Files that are to be looked at.
pub(crate) struct Job {
    /// Of which connection.
    pub number: u64,
    pub region: RegionId,
    pub purpose: Purpose,
    /// An offset of each, and how many bytes.
    pub pieces: Vec<(OwnedFd, u64, u64)>,
    pub writable: bool,
    /// Further descriptors of them, the last to be closed.
    pub backings: Vec<Backing>,
}

impl Job {
    /// For a connection's region: of each file an offset, and how many bytes.
    pub fn new(
        number: u64,
        region: RegionId,
        purpose: Purpose,
        pieces: impl IntoIterator<Item = (OwnedFd, u64, u64)>,
        writable: bool,
    ) -> Self {
        Self {
            number,
            region,
            purpose,
            pieces: pieces.into_iter().collect(),
            writable,
            backings: Vec::new(),
        }
    }
}

/// What has become of them.
pub(crate) struct Looked {
    pub number: u64,
    pub region: RegionId,
    pub purpose: Purpose,
    pub memory: Result<Region, RegionError>,
    pub backings: Vec<Backing>,
}

impl Sharing {
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(Arc::new(Shared {
            files: SharedFiles::default(),
            state: Mutex::default(),
            looked: eventfd(0, flags)?,
        })))
    }

    /// Readable when [`Sharing::take`] has something.
    pub fn looked(&self) -> BorrowedFd<'_> {
        self.0.looked.as_fd()
    }

    /// What has been looked at by now.
    pub fn take(&self) -> Vec<Looked> {
        let _ = rustix::io::read(&self.0.looked, &mut [0; 8]);
        std::mem::take(&mut lock(&self.0.state).done)
    }

    /// Has files of a sender looked at. Where no thread of its can be started, they come back.
    pub fn start(&self, sender: Sender, job: Job) -> Result<(), Job> {
        let mut state = lock(&self.0.state);
        let queue = state.senders.entry(sender).or_default();
        queue.waiting.push_back(job);
        if queue.threads >= MOST_OF_SENDER {
            return Ok(());
        }
        let shared = Arc::clone(&self.0);
        let thread = std::thread::Builder::new()
            .name("share".to_owned())
            .stack_size(STACK);
        match thread.spawn(move || shared.run(sender)) {
            Ok(_) => queue.threads += 1,
            Err(_) if queue.threads > 0 => {}
            Err(_) => {
                let last = queue.waiting.pop_back();
                state.senders.remove(&sender);
                return last.map_or(Ok(()), Err);
            }
        }
        Ok(())
    }
}

impl Shared {
    /// Looks at a sender's files until none wait.
    fn run(&self, sender: Sender) {
        while let Some(job) = self.next(sender) {
            let memory = self.files.region(job.pieces, job.writable);
            let looked = Looked {
                number: job.number,
                region: job.region,
                purpose: job.purpose,
                memory,
                backings: job.backings,
            };
            lock(&self.state).done.push(looked);
            // It cannot be full: whoever reads it takes all.
            let _ = rustix::io::write(&self.looked, &1_u64.to_ne_bytes());
        }
    }

    fn next(&self, sender: Sender) -> Option<Job> {
        let mut state = lock(&self.state);
        let queue = state.senders.get_mut(&sender)?;
        let job = queue.waiting.pop_front();
        if job.is_none() {
            queue.threads -= 1;
            if queue.threads == 0 {
                state.senders.remove(&sender);
            }
        }
        job
    }
}
