//! Files in pieces: some written, some allocated only, some not there.

use crate::transfer::{Transfer, read_compared, write_checked};
use crate::{Report, contents};
use anyhow::{Context as _, Result};
use farlane_gpu_driver::Gpu;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const PIECE: usize = 256 << 10;

/// What a piece is. What is not written reads as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Written,
    Allocated,
    Hole,
}

/// The pieces of so many bytes: where each begins and ends, and what it is.
fn pieces(bytes: usize) -> impl DoubleEndedIterator<Item = (usize, usize, Piece)> {
    let kinds = [
        Piece::Written,
        Piece::Allocated,
        Piece::Written,
        Piece::Hole,
    ];
    (0..bytes.div_ceil(PIECE)).map(move |index| {
        let begin = index * PIECE;
        (begin, bytes.min(begin + PIECE), kinds[index % kinds.len()])
    })
}

/// Makes such a file, of which the last piece comes to the disk first: they do not lie there one
/// behind the other. Says how many bytes of it are written.
pub fn make(path: &Path, seed: u64, bytes: usize) -> Result<Report> {
    let file = File::create(path).with_context(|| format!("Cannot make {}", path.display()))?;
    file.set_len(u64::try_from(bytes)?)?;
    let mut written = 0;
    for (begin, end, piece) in pieces(bytes).rev() {
        let at = u64::try_from(begin)?;
        match piece {
            Piece::Hole => continue,
            Piece::Written => {
                file.write_all_at(&contents::make(seed, at, end - begin), at)?;
                written += u64::try_from(end - begin)?;
            }
            Piece::Allocated => {
                let length = i64::try_from(end - begin)?;
                // SAFETY: no memory is involved.
                let result =
                    unsafe { libc::fallocate(file.as_raw_fd(), 0, i64::try_from(at)?, length) };
                if result != 0 {
                    return Err(std::io::Error::last_os_error()).context("Cannot allocate");
                }
            }
        }
        file.sync_all()?;
    }
    Ok(Report {
        what: "make-pieces",
        checks: 0,
        bytes: written,
    })
}

/// Reads such a file into video memory, and writes contents with the seed `to` from there over all
/// of it; checks both.
pub fn rewrite(transfer: &Transfer, gpu: &Gpu, to: u64) -> Result<Report> {
    let (file, mut buffer, range) = transfer.open(gpu, true)?;
    let mut of_file = contents::make(transfer.seed, 0, transfer.bytes);
    for (begin, end, piece) in pieces(transfer.bytes) {
        if piece != Piece::Written {
            of_file[begin..end].fill(0);
        }
    }
    let call = transfer.call;
    read_compared(&mut buffer, &file, &of_file, 0, range.clone(), call)?;
    write_checked(&mut buffer, &file, to, 0, range, call)?;
    Ok(Report {
        what: "rewrite-pieces",
        checks: 1,
        bytes: u64::try_from(transfer.bytes)?,
    })
}
