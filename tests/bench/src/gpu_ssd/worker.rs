//! Does jobs: a process of its own, so that the router is loaded into it as into any program.

use crate::job::{Job, Mechanism, Outcome, Task, byte_at};
use crate::scan::Scanner;
use anyhow::{Context as _, Result, bail, ensure};
use farlane_io_tool::memory::{Kind, Memory};
use rustix::fs::{Mode, OFlags, open};
use std::ffi::{c_char, c_int, c_void};
use std::io::{BufRead as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

/// Device memory of each thread.
const MEMORY: usize = 32 << 20;
/// To what direct I/O is aligned.
const ALIGNMENT: u64 = 512;
const PAGE: usize = 4096;

/// Reads jobs, one a line, from standard input and says what each took, until there are no more.
pub fn run() -> Result<()> {
    let mut memories = Vec::new();
    let mut scanner = None;
    for line in std::io::stdin().lock().lines() {
        let outcome = match serde_json::from_str(&line?)? {
            Task::Read(job) => perform(&job, &mut memories),
            Task::Scan(scan) => Scanner::scan(&mut scanner, &scan),
        };
        let outcome = outcome.map_err(|error| format!("{error:#}"));
        let mut answer = serde_json::to_string(&outcome)?;
        answer.push('\n');
        std::io::stdout().lock().write_all(answer.as_bytes())?;
    }
    Ok(())
}

fn perform(job: &Job, memories: &mut Vec<Memory>) -> Result<Outcome> {
    let threads = usize::try_from(job.threads)?.max(1);
    while memories.len() < threads {
        let memory = Memory::new(&Kind::Soft, MEMORY)?;
        register(&memory)?;
        memories.push(memory);
    }
    ensure!(
        job.mechanism != Mechanism::Router || router().is_some(),
        "The router is not loaded"
    );
    let share = job.reads.len().div_ceil(threads).max(1);
    let mut hands = Vec::new();
    for (reads, memory) in job.reads.chunks(share).zip(memories.iter()) {
        hands.push((Hand::new(job, memory.start())?, reads));
    }
    let before = cpu_time(libc::RUSAGE_SELF)?;
    let start = Instant::now();
    std::thread::scope(|scope| -> Result<()> {
        let work = |(mut hand, reads): (Hand, _)| move || hand.read_all(reads, job.verify);
        let Some(own) = hands.pop() else {
            return Ok(());
        };
        let others: Vec<_> = hands
            .into_iter()
            .map(|hand| scope.spawn(work(hand)))
            .collect();
        work(own)()?;
        for other in others {
            other
                .join()
                .map_err(|_| anyhow::anyhow!("A thread has failed"))??;
        }
        Ok(())
    })?;
    Ok(Outcome {
        seconds: start.elapsed().as_secs_f64(),
        cpu_seconds: (cpu_time(libc::RUSAGE_SELF)? - before).as_secs_f64(),
        bytes: job.reads.iter().map(|read| u64::from(read.1)).sum(),
        found: 0,
    })
}

/// A thread's file and buffers.
struct Hand {
    mechanism: Mechanism,
    file: OwnedFd,
    device: *mut u8,
    /// Memory of the CPU, aligned to pages.
    host: Box<[u8]>,
    /// Where the next read goes.
    at: usize,
}

// SAFETY: the device memory is used by the one thread that has this.
unsafe impl Send for Hand {}

impl Hand {
    fn new(job: &Job, device: *mut u8) -> Result<Self> {
        let direct = matches!(job.mechanism, Mechanism::P2p | Mechanism::CiWriteDirect);
        let flags = if direct {
            OFlags::DIRECT
        } else {
            OFlags::empty()
        };
        let shown = job.file.display();
        let file = open(
            &job.file,
            OFlags::RDONLY | OFlags::CLOEXEC | flags,
            Mode::empty(),
        )
        .with_context(|| format!("Cannot open {shown}"))?;
        let longest = job.reads.iter().map(|read| read.1).max().unwrap_or(0);
        let room = usize::try_from(longest)? + 3 * PAGE;
        ensure!(2 * room <= MEMORY, "A read of {longest} bytes is too long");
        Ok(Self {
            mechanism: job.mechanism,
            file,
            device,
            host: vec![1; room].into_boxed_slice(),
            at: 0,
        })
    }

    fn read_all(&mut self, reads: &[(u64, u32)], verify: bool) -> Result<()> {
        for (offset, length) in reads {
            let length = usize::try_from(*length)?;
            // Another place for each read, as a program has that keeps what it reads.
            if self.at + length + 2 * PAGE > MEMORY {
                self.at = 0;
            }
            let target = self.device.wrapping_add(self.at);
            self.at += length.next_multiple_of(PAGE);
            self.read(*offset, length, target)?;
            if verify {
                // SAFETY: these bytes of the device memory were just read into.
                let found = unsafe { std::slice::from_raw_parts(target, length) };
                let right = (*offset..)
                    .zip(found)
                    .all(|(at, byte)| byte_at(at) == *byte);
                ensure!(
                    right,
                    "{length} bytes at {offset} are not those of the file"
                );
            }
        }
        Ok(())
    }

    fn read(&mut self, offset: u64, length: usize, target: *mut u8) -> Result<()> {
        let first = self.host.as_mut_ptr();
        let host = first.wrapping_add(first.align_offset(PAGE));
        let end = offset + u64::try_from(length)?;
        // What direct I/O has to read.
        let from = offset / ALIGNMENT * ALIGNMENT;
        let cover = usize::try_from(end.next_multiple_of(ALIGNMENT) - from)?;
        let head = usize::try_from(offset - from)?;
        match self.mechanism {
            Mechanism::PreadGpu | Mechanism::Router => self.pread(target, length, offset),
            Mechanism::P2p if cover == length => self.pread(target, length, offset),
            Mechanism::P2p => {
                // What is misaligned goes through another place in device memory.
                let aside = self
                    .device
                    .wrapping_add(MEMORY - cover.next_multiple_of(PAGE));
                self.pread(aside, cover, from)?;
                copy(aside.wrapping_add(head), target, length);
                Ok(())
            }
            Mechanism::CiWrite => {
                self.pread(host, length, offset)?;
                copy(host, target, length);
                Ok(())
            }
            Mechanism::CiWriteDirect => {
                self.pread(host, cover, from)?;
                copy(host.wrapping_add(head), target, length);
                Ok(())
            }
        }
    }

    fn pread(&self, target: *mut u8, length: usize, offset: u64) -> Result<()> {
        let at = i64::try_from(offset)?;
        // SAFETY: the callers give places in their buffers with room for this.
        let got = unsafe { libc::pread(self.file.as_raw_fd(), target.cast(), length, at) };
        match usize::try_from(got) {
            Ok(got) if got == length => Ok(()),
            Ok(got) => bail!("{got} of {length} bytes at {offset} were read"),
            Err(_) => Err(std::io::Error::last_os_error())
                .with_context(|| format!("Cannot read {length} bytes at {offset}")),
        }
    }
}

/// As a copy command of the device, or of the CPU to its BAR.
fn copy(from: *const u8, to: *mut u8, length: usize) {
    // SAFETY: the callers give two separate places with room for this.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) };
}

type Register = unsafe extern "C" fn(*mut c_void, usize, *const c_char) -> c_int;

/// The function by which device memory is made known to the router, where that is loaded.
fn router() -> Option<Register> {
    // SAFETY: a name.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"farlane_io_register".as_ptr()) };
    // SAFETY: the function of that name has this type.
    (!symbol.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Register>(symbol) })
}

fn register(memory: &Memory) -> Result<()> {
    let Some(register) = router() else {
        return Ok(());
    };
    // SAFETY: the memory stays mapped as long as this process does jobs.
    let done = unsafe { register(memory.start().cast(), MEMORY, c"soft".as_ptr()) };
    ensure!(done == 0, "The router refuses the memory: {done}");
    Ok(())
}

/// CPU time of this process or this thread.
pub fn cpu_time(of: c_int) -> Result<Duration> {
    // SAFETY: a structure of numbers, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        ensure!(libc::getrusage(of, &raw mut usage) == 0, "getrusage fails");
        usage
    };
    let micros = |time: libc::timeval| -> Result<u64> {
        Ok(u64::try_from(time.tv_sec)? * 1_000_000 + u64::try_from(time.tv_usec)?)
    };
    Ok(Duration::from_micros(
        micros(usage.ru_utime)? + micros(usage.ru_stime)?,
    ))
}
