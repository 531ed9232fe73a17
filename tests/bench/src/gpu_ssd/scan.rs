//! A log scanner: looks for addresses, with the GPU or with the CPU.

use crate::job::{Mechanism, Outcome, Scan};
use crate::worker::cpu_time;
use anyhow::{Context as _, Result, ensure};
use farlane_gpu::GpuSource;
use farlane_gpu_driver::{Bars, Buffer, Gpu, Search};
use farlane_pci::{Function, Region, Source as _};
use farlane_zero_copy::Mapping;
use rustix::fs::{Mode, OFlags, open};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

const MEMORY: u64 = 64 << 20;
/// Bytes that are read and searched at a time.
const PIECE: usize = 4 << 20;
/// Room before a piece for the end of the one before: an address may lie across.
const CARRY: usize = 4096;
/// To what direct I/O is aligned.
const ALIGNMENT: u64 = 4096;

/// A software GPU in this process.
struct InProcess {
    function: Box<dyn Function>,
    memory: Mapping,
}

// SAFETY: the mapping lives as long as the value, and is mapped once here.
unsafe impl Bars for InProcess {
    fn read32(&self, offset: u32) -> u32 {
        let mut data = [0xff; 4];
        match self.function.read(Region::Bar0, offset.into(), &mut data) {
            Ok(()) => u32::from_le_bytes(data),
            Err(_) => u32::MAX,
        }
    }

    fn write32(&self, offset: u32, value: u32) {
        // One that fails is seen by the next read.
        let _ = self
            .function
            .write(Region::Bar0, offset.into(), &value.to_le_bytes());
    }

    fn memory(&self) -> (*mut u8, usize) {
        (self.memory.base(), self.memory.len())
    }
}

/// A GPU with a buffer and patterns.
pub struct Scanner {
    patterns: Vec<String>,
    search: Search,
    buffer: Buffer,
    /// Memory of the CPU, aligned to pages within.
    host: Vec<u8>,
}

impl Scanner {
    fn new(patterns: &[String]) -> Result<Self> {
        let source = GpuSource::new(MEMORY)?;
        let attachment = source.attach()?;
        let area = attachment.areas.first().context("The GPU has no memory")?;
        let memory = Mapping::new(area.file.as_fd(), 0, MEMORY, true)?;
        let function = source.take(&attachment)?;
        let gpu = Gpu::with_bars(Arc::new(InProcess { function, memory }))?;
        Ok(Self {
            patterns: patterns.to_vec(),
            search: gpu.prepare(patterns, 1000)?,
            buffer: gpu.allocate(CARRY + PIECE)?,
            host: vec![0; 2 * CARRY + PIECE],
        })
    }

    /// Does a search, with the scanner of the one before if there was one.
    pub fn scan(kept: &mut Option<Self>, scan: &Scan) -> Result<Outcome> {
        let scanner = match kept {
            Some(scanner) if scanner.patterns == scan.patterns => scanner,
            _ => kept.insert(Self::new(&scan.patterns)?),
        };
        let direct = scan.mechanism == Some(Mechanism::P2p);
        let flags = if direct {
            OFlags::DIRECT
        } else {
            OFlags::empty()
        };
        let file = open(
            &scan.file,
            OFlags::RDONLY | OFlags::CLOEXEC | flags,
            Mode::empty(),
        )?;
        let before = cpu_time(libc::RUSAGE_THREAD)?;
        let start = Instant::now();
        let found = scanner.run(&file, scan)?;
        Ok(Outcome {
            seconds: start.elapsed().as_secs_f64(),
            // The thread that reads: the GPU's own is not a CPU's.
            cpu_seconds: (cpu_time(libc::RUSAGE_THREAD)? - before).as_secs_f64(),
            bytes: scan.end - scan.start,
            found,
        })
    }

    fn run(&mut self, file: &OwnedFd, scan: &Scan) -> Result<u64> {
        let length = scan.patterns.first().map_or(0, String::len);
        ensure!(
            scan.patterns.iter().all(|p| p.len() == length),
            "Patterns of different lengths"
        );
        ensure!(
            scan.start.is_multiple_of(ALIGNMENT),
            "A start that direct I/O cannot have"
        );
        let (mut at, mut found, mut carried) = (scan.start, 0, 0);
        while at < scan.end {
            let bytes = usize::try_from(scan.end - at)?.min(PIECE);
            // Direct I/O reads whole blocks; what is behind the end is not looked at.
            let whole = bytes.next_multiple_of(usize::try_from(ALIGNMENT)?);
            let begin = CARRY - carried;
            let aligned = self.host.as_ptr().align_offset(CARRY);
            match scan.mechanism {
                Some(Mechanism::P2p) => pread(
                    file,
                    at,
                    &mut self.buffer.as_mut_slice()[CARRY..],
                    whole,
                    bytes,
                )?,
                Some(Mechanism::CiWrite) => {
                    pread(file, at, &mut self.host, bytes, bytes)?;
                    self.buffer.as_mut_slice()[CARRY..CARRY + bytes]
                        .copy_from_slice(&self.host[..bytes]);
                }
                Some(_) => pread(
                    file,
                    at,
                    &mut self.buffer.as_mut_slice()[CARRY..],
                    bytes,
                    bytes,
                )?,
                None => pread(file, at, &mut self.host[aligned + CARRY..], bytes, bytes)?,
            }
            let end = CARRY + bytes;
            carried = bytes.min(length.saturating_sub(1));
            if scan.mechanism.is_some() {
                found += self.search.run(&self.buffer, begin..end)?.total;
                self.buffer
                    .as_mut_slice()
                    .copy_within(end - carried..end, CARRY - carried);
            } else {
                found += occurrences(&self.host[aligned + begin..aligned + end], &scan.patterns);
                self.host.copy_within(
                    aligned + end - carried..aligned + end,
                    aligned + CARRY - carried,
                );
            }
            at += u64::try_from(bytes)?;
        }
        Ok(found)
    }
}

fn pread(file: &OwnedFd, at: u64, to: &mut [u8], bytes: usize, least: usize) -> Result<()> {
    ensure!(bytes <= to.len(), "{bytes} bytes for {}", to.len());
    let offset = i64::try_from(at)?;
    // SAFETY: there is room for so many.
    let got = unsafe { libc::pread(file.as_raw_fd(), to.as_mut_ptr().cast(), bytes, offset) };
    let got = usize::try_from(got).map_err(|_| std::io::Error::last_os_error())?;
    ensure!(got >= least, "{got} of {least} bytes at {at} were read");
    Ok(())
}

/// How often any of some texts of the same length occurs, by the CPU: a window moves on by as many
/// bytes as its last two allow (Wu and Manber).
fn occurrences(data: &[u8], patterns: &[String]) -> u64 {
    let length = patterns.first().map_or(0, String::len);
    if length < 2 {
        return 0;
    }
    let pair = |bytes: &[u8]| usize::from(bytes[0]) << 8 | usize::from(bytes[1]);
    let mut shift = vec![length - 1; 1 << 16];
    for pattern in patterns {
        for (index, bytes) in pattern.as_bytes().windows(2).enumerate() {
            let step = &mut shift[pair(bytes)];
            *step = (*step).min(length - 2 - index);
        }
    }
    let (mut at, mut found) = (0, 0);
    while let Some(window) = data.get(at..at + length) {
        match shift[pair(&window[length - 2..])] {
            0 => {
                found += u64::from(patterns.iter().any(|pattern| pattern.as_bytes() == window));
                at += 1;
            }
            step => at += step,
        }
    }
    found
}
