//! One thread with a queue, a part of the disk, and buffers.

use crate::blocks::{BLOCK, Blocks};
use crate::buffers::{Buffers, DEPTH, MOST_BLOCKS, Piece, Placement};
use crate::memory::processors;
use anyhow::{Context as _, Result, bail, ensure};
use libc::iovec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_driver::{EventFd, QueueNotifier, VirtioBlkQueue};

/// How long a device may be silent while requests are under way.
const PATIENCE: Duration = Duration::from_secs(100);
/// One request of so many is a flush.
const FLUSHES: u64 = 64;

/// Where a thread runs and where its buffers lie.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// The node on whose processors it runs.
    pub cpu: u32,
    /// Its buffers.
    pub memory: Placement,
}

impl FromStr for Job {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (cpu, memory) = text
            .strip_prefix("cpu=")
            .and_then(|rest| rest.split_once(",memory="))
            .ok_or_else(|| format!("{text} is not `cpu=N,memory=WHERE`"))?;
        Ok(Self {
            cpu: cpu.parse().map_err(|_| format!("{cpu} is no node"))?,
            memory: memory.parse()?,
        })
    }
}

/// When it is enough.
#[derive(Clone, Copy, Debug)]
pub enum Limit<'a> {
    /// After so many requests.
    Requests(u64),
    /// When there is this file.
    File(&'a Path),
}

/// What was done.
#[derive(Debug, Default)]
pub struct Done {
    /// All of them.
    pub requests: u64,
    /// Bytes of buffers by their node.
    bytes: BTreeMap<u32, u64>,
}

impl Done {
    /// Bytes of buffers on a node.
    pub fn on(&self, node: u32) -> u64 {
        self.bytes.get(&node).copied().unwrap_or(0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
}

/// A request under way.
#[derive(Debug)]
pub struct Request {
    kind: Kind,
    /// First block, of this part of the disk, and how many.
    at: usize,
    count: usize,
    /// Which of the [`DEPTH`] it is, and its buffer.
    slot: usize,
    pieces: Vec<Piece>,
}

/// A thread's state.
pub struct Worker {
    job: Job,
    buffers: Buffers,
    queue: VirtioBlkQueue<'static, Request>,
    notifier: Box<dyn QueueNotifier>,
    completions: Arc<EventFd>,
    start: u64,
    blocks: Blocks,
    free: Vec<usize>,
    random: u64,
    done: Done,
}

// SAFETY: queue and notifier are one thread's at a time; what they point to is shared memory and
// file descriptors, which belong to the process.
unsafe impl Send for Worker {}

impl Worker {
    /// A thread for the bytes `part` of the disk.
    pub fn new(
        job: Job,
        buffers: Buffers,
        queue: VirtioBlkQueue<'static, Request>,
        notifier: Box<dyn QueueNotifier>,
        completions: Arc<EventFd>,
        part: Range<u64>,
    ) -> Self {
        let count = (part.end - part.start) / BLOCK as u64;
        Self {
            job,
            buffers,
            queue,
            notifier,
            completions,
            start: part.start,
            blocks: Blocks::new(
                part.start / BLOCK as u64,
                usize::try_from(count).unwrap_or(usize::MAX),
            ),
            free: (0..DEPTH).collect(),
            random: 0x2545_f491_4f6c_dd1d ^ part.start,
            done: Done::default(),
        }
    }

    /// Writes and reads at random until it is enough, then reads everything.
    pub fn run(mut self, limit: Limit<'_>) -> Result<Done> {
        self.pin()?;
        self.queue.set_used_notif_enabled(true);
        let enough = |done: &Done| match limit {
            Limit::Requests(requests) => done.requests >= requests,
            Limit::File(file) => file.exists(),
        };
        while !enough(&self.done) {
            while !self.free.is_empty() && self.submit_random()? {}
            self.tell()?;
            self.wait_some()?;
        }
        self.wait_all()?;
        let most = MOST_BLOCKS.min(self.blocks.len());
        for at in (0..self.blocks.len()).step_by(most) {
            let count = most.min(self.blocks.len() - at);
            while self.free.is_empty() {
                self.wait_some()?;
            }
            ensure!(self.blocks.take(at, count), "A request is left");
            self.submit(Kind::Read, at, count)?;
            self.tell()?;
        }
        self.wait_all()?;
        Ok(self.done)
    }

    fn pin(&self) -> Result<()> {
        let mut set = rustix::thread::CpuSet::new();
        for cpu in processors(self.job.cpu)? {
            set.set(usize::try_from(cpu)?);
        }
        rustix::thread::sched_setaffinity(None, &set)
            .with_context(|| format!("Cannot run on node {}", self.job.cpu))
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let random = self.random % (bound.max(1) as u64);
        usize::try_from(random).unwrap_or_default()
    }

    /// Submits some request; not where it would meet another.
    fn submit_random(&mut self) -> Result<bool> {
        if self.below(usize::try_from(FLUSHES)?) == 0 {
            self.submit(Kind::Flush, 0, 0)?;
            return Ok(true);
        }
        // Small ones are as many as large ones.
        let scale = self.below(9);
        let unit = self.buffers.unit();
        let count = (1 + self.below(1 << scale)).next_multiple_of(unit);
        let count = count.min(MOST_BLOCKS);
        let at = self.below(self.blocks.len() + 1 - count.min(self.blocks.len()));
        if !self.blocks.take(at, count) {
            return Ok(false);
        }
        let kind = match self.below(2) {
            0 => Kind::Read,
            _ => Kind::Write,
        };
        self.submit(kind, at, count)?;
        Ok(true)
    }

    fn submit(&mut self, kind: Kind, at: usize, count: usize) -> Result<()> {
        let slot = self.free.pop().context("No buffer is free")?;
        let choice = self.below(usize::from(u16::MAX));
        let pieces = self.buffers.pieces(slot, count, choice)?;
        let mut block = at;
        for piece in &pieces {
            // SAFETY: no other request has this slot.
            let bytes = unsafe { std::slice::from_raw_parts_mut(piece.base, piece.bytes) };
            match kind {
                Kind::Write => self.blocks.fill(block, bytes),
                // What is not read is not taken for what was.
                Kind::Read | Kind::Flush => bytes.fill(0xee),
            }
            block += piece.bytes / BLOCK;
        }
        let vector: Vec<iovec> = pieces
            .iter()
            .map(|piece| iovec {
                iov_base: piece.base.cast(),
                iov_len: piece.bytes,
            })
            .collect();
        let disk = self.start + (at * BLOCK) as u64;
        let request = Request {
            kind,
            at,
            count,
            slot,
            pieces,
        };
        // SAFETY: the buffers are in shared memory that stays, and are left alone until the request
        // is done.
        unsafe {
            match kind {
                Kind::Read => self
                    .queue
                    .readv(disk, vector.as_ptr(), vector.len(), request),
                Kind::Write => self
                    .queue
                    .writev(disk, vector.as_ptr(), vector.len(), request),
                Kind::Flush => self.queue.flush(request),
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

    /// Takes what is done, and waits until there is some.
    fn wait_some(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.free.len() < DEPTH {
            let done: Vec<_> = self.queue.completions().collect();
            if !done.is_empty() {
                return done
                    .into_iter()
                    .try_for_each(|done| self.completed(done.context, done.ret));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(
                !left.is_zero(),
                "{} requests are not done after {PATIENCE:?}",
                DEPTH - self.free.len()
            );
            self.sleep(left)?;
        }
        Ok(())
    }

    fn wait_all(&mut self) -> Result<()> {
        self.tell()?;
        while self.free.len() < DEPTH {
            self.wait_some()?;
        }
        Ok(())
    }

    /// Until the device signals, or `most` has passed.
    fn sleep(&self, most: Duration) -> Result<()> {
        // SAFETY: the descriptor is that of `completions`, which lives on.
        let fd = unsafe { BorrowedFd::borrow_raw(self.completions.as_raw_fd()) };
        let most = Timespec::try_from(most).context("The time is too long")?;
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&most)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(()),
            Ok(_) => {
                // Where its number was taken already, there is nothing to do.
                match rustix::io::read(fd, &mut [0; 8]) {
                    Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
                    Err(e) => Err(e.into()),
                }
            }
            Err(e) => bail!("Cannot wait: {e}"),
        }
    }

    fn completed(&mut self, request: Request, status: i32) -> Result<()> {
        let Request {
            kind,
            at,
            count,
            slot,
            pieces,
        } = request;
        ensure!(
            status == 0,
            "{kind:?} of {count} blocks from {at} failed: {status}"
        );
        let mut block = at;
        for piece in &pieces {
            if kind == Kind::Read {
                // SAFETY: the request is done, and no other has the slot yet.
                let bytes = unsafe { std::slice::from_raw_parts(piece.base, piece.bytes) };
                self.blocks.check(block, bytes)?;
            }
            block += piece.bytes / BLOCK;
            *self.done.bytes.entry(piece.node).or_insert(0) += piece.bytes as u64;
        }
        self.blocks.give(at, count);
        self.done.requests += 1;
        self.free.push(slot);
        Ok(())
    }
}
