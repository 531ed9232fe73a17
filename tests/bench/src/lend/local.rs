//! The same reads, made by this process itself.

use crate::drive::{Done, LARGEST, PAGE, Places};
use anyhow::{Context as _, Result, ensure};
use io_uring::{IoUring, opcode, types::Fixed};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// A file that is read.
pub struct Local {
    file: File,
    places: Places,
    /// Buffers of the ring, which outlive it: fields are dropped in order.
    ring: IoUring,
    buffers: Vec<Vec<u8>>,
    one: Vec<u8>,
}

impl Local {
    /// Opens it.
    pub fn open(path: &Path, depth: u32) -> Result<Self> {
        let file = File::open(path)?;
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .build(depth.next_power_of_two())?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let largest = usize::try_from(LARGEST)?;
        Ok(Self {
            places: Places::new(file.metadata()?.len()),
            file,
            ring,
            buffers: (0..depth).map(|_| vec![0; largest]).collect(),
            one: vec![0; largest],
        })
    }

    /// One random read of a page by `pread`.
    pub fn read_one(&mut self) -> Result<Duration> {
        let at = self.places.next(PAGE, true);
        let page = &mut self.one[..4096];
        let start = Instant::now();
        self.file.read_exact_at(page, at)?;
        Ok(start.elapsed())
    }

    /// Reads of `bytes` each by `pread`, one after the other.
    pub fn pread_for(&mut self, time: Duration, bytes: u64, random: bool) -> Result<Done> {
        let start = Instant::now();
        let mut reads = 0;
        while start.elapsed() < time {
            for _ in 0..16 {
                let at = self.places.next(bytes, random);
                let buffer = &mut self.one[..usize::try_from(bytes)?];
                self.file.read_exact_at(buffer, at)?;
                reads += 1;
            }
        }
        Ok(Done {
            reads,
            time: start.elapsed(),
            trapped: 0,
        })
    }

    /// Reads of `bytes` each by `io_uring`, `depth` at a time.
    pub fn ring_for(
        &mut self,
        time: Duration,
        depth: u32,
        bytes: u64,
        random: bool,
    ) -> Result<Done> {
        let mut free: Vec<usize> = (0..usize::try_from(depth)?).collect();
        let all = free.len();
        let length = u32::try_from(bytes)?;
        let start = Instant::now();
        let mut reads = 0;
        let mut end = false;
        loop {
            while !end && let Some(slot) = free.pop() {
                let at = self.places.next(bytes, random);
                let buffer = self.buffers.get_mut(slot).context("no buffer")?;
                let entry = opcode::Read::new(Fixed(0), buffer.as_mut_ptr(), length)
                    .offset(at)
                    .build()
                    .user_data(u64::try_from(slot)?);
                // SAFETY: the buffer is as long, lives as long as the ring, and is not used
                // before its completion has been taken.
                unsafe { self.ring.submission().push(&entry) }?;
            }
            self.ring.submit_and_wait(1)?;
            for completion in self.ring.completion() {
                ensure!(completion.result() == i32::try_from(bytes)?, "a short read");
                free.push(usize::try_from(completion.user_data())?);
                reads += 1;
            }
            end = start.elapsed() >= time;
            if end && free.len() == all {
                break;
            }
        }
        Ok(Done {
            reads,
            time: start.elapsed(),
            trapped: 0,
        })
    }
}
