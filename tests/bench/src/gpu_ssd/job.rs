//! What a worker does.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// How bytes get from a file to device memory (the paper's table 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mechanism {
    /// Read into memory of the CPU, then copied.
    CiWrite,
    /// The same past the page cache.
    CiWriteDirect,
    /// Direct I/O into device memory.
    P2p,
    /// Read into device memory through the page cache.
    PreadGpu,
    /// `pread` with libfarlane_io.so.
    Router,
}

impl Mechanism {
    /// All, the router last.
    pub const ALL: [Self; 5] = [
        Self::P2p,
        Self::PreadGpu,
        Self::CiWrite,
        Self::CiWriteDirect,
        Self::Router,
    ];

    /// As the paper calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::CiWrite => "CIWrite",
            Self::CiWriteDirect => "CIWrite+D",
            Self::P2p => "P2P",
            Self::PreadGpu => "pread+GPU",
            Self::Router => "router",
        }
    }
}

/// Reads of a file, in order.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// How.
    pub mechanism: Mechanism,
    /// Which file.
    pub file: PathBuf,
    /// First byte and length of each read.
    pub reads: Vec<(u64, u32)>,
    /// Threads, each with as large a part of the reads.
    pub threads: u32,
    /// Whether each read's bytes are looked at, which counts as time of it.
    pub verify: bool,
}

/// A range of a log in which patterns are looked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Scan {
    /// How it gets to the GPU, or nothing: the CPU looks.
    pub mechanism: Option<Mechanism>,
    /// Which log.
    pub file: PathBuf,
    /// First byte.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
    /// What is looked for: texts of the same length.
    pub patterns: Vec<String>,
}

/// What a worker is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Task {
    /// Reads.
    Read(Job),
    /// A search.
    Scan(Scan),
}

impl Task {
    /// Whose it is. What the CPU does is done where it reads into its own memory.
    pub fn mechanism(&self) -> Mechanism {
        match self {
            Self::Read(job) => job.mechanism,
            Self::Scan(scan) => scan.mechanism.unwrap_or(Mechanism::CiWrite),
        }
    }
}

/// What it took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Seconds of all reads together.
    pub seconds: f64,
    /// CPU time of the worker.
    pub cpu_seconds: f64,
    /// Bytes read.
    pub bytes: u64,
    /// Occurrences found, by a search.
    pub found: u64,
}

/// The byte at an offset of the file that is read.
pub fn byte_at(offset: u64) -> u8 {
    let [byte, ..] = word_at(offset / 8)
        .rotate_right(u32::try_from(offset % 8 * 8).unwrap_or(0))
        .to_le_bytes();
    byte
}

/// Eight bytes of the file.
pub fn word_at(index: u64) -> u64 {
    let mut word = index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word ^= word >> 29;
    word.wrapping_mul(0xbf58_476d_1ce4_e5b9)
}
