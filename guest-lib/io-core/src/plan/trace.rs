//! What `FARLANE_IO_TRACE=FILE` writes: one JSON object a line, one line a call on device memory.

use serde::{Deserialize, Serialize};
use std::io::BufRead;
use thiserror::Error;

pub use super::Way;

/// Longest line that is read.
const LONGEST: u64 = 1 << 20;

/// Consecutive bytes of a call that went one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Way of these bytes.
    pub way: Way,
    /// Number of bytes.
    pub bytes: u64,
}

/// Why a call went its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// All of it was cached.
    Cached,
    /// None of it was cached.
    Missed,
    /// A part was cached, and the device's model says which ways are fastest.
    Schedule,
    /// A part was cached, and the device has not been calibrated.
    NotCalibrated,
    /// It continues a sequence of reads: read-ahead is faster than P2P.
    Sequential,
    /// It continues a sequence but exceeds the read-ahead window.
    SequentialLarge,
    /// The user said so.
    Forced,
    /// Too misaligned for direct I/O.
    Misaligned,
    /// Too short for direct I/O.
    Small,
    /// P2P is not possible with this file or this memory.
    NoP2p,
    /// P2P was tried and failed.
    P2pFailed,
    /// The kernel does not say what is cached.
    Unknown,
    /// Writes go by P2P (section 5.2 of the paper).
    Write,
    /// It uses the file position, or appends: the kernel's own call.
    Position,
}

/// A call and what was decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Microseconds since 1970 when the call began.
    pub time_us: u64,
    /// Microseconds that it took.
    pub took_us: u64,
    /// Thread (as gettid).
    pub thread: u32,
    /// As in the C library: `pread`, `write`, `preadv2`.
    pub call: String,
    /// The file's path, or nothing if it is not known.
    pub file: String,
    /// `major:minor` of the file's device.
    pub device: String,
    /// Inode of the file.
    pub inode: u64,
    /// First byte in the file; null where the file position could not be read.
    pub offset: Option<u64>,
    /// Bytes that the call asked for.
    pub length: u64,
    /// Bytes that were moved, or an error number below 0.
    pub result: i64,
    /// Bytes of it that were in the page cache before; null if not looked at or not known.
    pub cached: Option<u64>,
    /// How they went, in order.
    pub pieces: Vec<Piece>,
    /// Reason of the decision.
    pub why: Why,
}

/// A trace that cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The trace cannot be read.
    #[error("Line {line} cannot be read")]
    Read {
        /// Number of the line, from 1.
        line: usize,
        /// I/O error.
        source: std::io::Error,
    },
    /// A line is something else.
    #[error("Line {line} is not a decision")]
    Parse {
        /// Number of the line, from 1.
        line: usize,
        /// Error of the JSON parser.
        source: serde_json::Error,
    },
    /// A line is too long.
    #[error("Line {line} is longer than {LONGEST} bytes")]
    Long {
        /// Number of the line, from 1.
        line: usize,
    },
}

impl Decision {
    /// Bytes that went one way.
    pub fn bytes(&self, way: Way) -> u64 {
        let pieces = self.pieces.iter().filter(|piece| piece.way == way);
        pieces.fold(0, |sum, piece| sum.saturating_add(piece.bytes))
    }

    /// As a line, with its end: written by one `write` to a file opened for appending, lines of
    /// threads and processes do not mix.
    pub fn line(&self) -> Result<String, serde_json::Error> {
        let mut line = serde_json::to_string(self)?;
        line.push('\n');
        Ok(line)
    }
}

/// Reads a trace line by line. A line that was cut off at the end of the file is left out: its
/// writer was killed or is still at it.
pub fn read(mut from: impl BufRead) -> impl Iterator<Item = Result<Decision, TraceError>> {
    let mut line = 0;
    std::iter::from_fn(move || {
        line += 1;
        let mut text = Vec::new();
        let got = std::io::Read::take(&mut from, LONGEST).read_until(b'\n', &mut text);
        match got {
            Err(source) => return Some(Err(TraceError::Read { line, source })),
            Ok(0) => return None,
            Ok(_) => {}
        }
        if text.last() != Some(&b'\n') {
            let long = u64::try_from(text.len()).is_ok_and(|length| length == LONGEST);
            return long.then_some(Err(TraceError::Long { line }));
        }
        let decision = serde_json::from_slice(&text);
        Some(decision.map_err(|source| TraceError::Parse { line, source }))
    })
}
