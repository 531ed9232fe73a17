//! Searches a file for patterns on a software GPU, as a program would that knows nothing of how
//! files get there: it reads the file with plain `pread`, straight into video memory.
//!
//! `log_scan FILE PATTERN_FILE`: a pattern a line. Prints `OFFSET<tab>PATTERN` for each occurrence,
//! and a summary on standard error.

#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use farlane_gpu_driver::{Buffer, Gpu, Match, Search};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::Instant;

/// Occurrences that one search of the device has room for.
const ROOM: u32 = 64 << 10;
const PAGE: usize = 4096;

/// Searches a file for patterns on a GPU
#[derive(Debug, Parser)]
struct Options {
    /// What is searched
    file: PathBuf,
    /// Patterns, one a line
    patterns: PathBuf,
    /// Bytes that are read at a time
    #[arg(long, default_value_t = 8 << 20, value_name = "BYTES")]
    chunk: usize,
    /// PCI address of the device, such as 0000:01:00.0; the first that is free where it is not
    /// given
    #[arg(long, value_name = "ADDRESS")]
    device: Option<String>,
}

/// A file on its way through video memory, chunk by chunk.
struct Scan {
    search: Search,
    /// Bytes of each pattern.
    lengths: Vec<usize>,
    /// Room for the end of the chunk before, in which an occurrence may begin, and then a chunk.
    buffer: Buffer,
    /// Where the chunk begins: at a page.
    begin: usize,
    /// Bytes of the chunk before that are kept.
    kept: usize,
    occurrences: u64,
}

impl Scan {
    fn new(gpu: &Gpu, patterns: &[&[u8]], chunk: usize) -> Result<Self> {
        let search = gpu.prepare(patterns, ROOM)?;
        let begin = (search.longest() - 1).next_multiple_of(PAGE);
        Ok(Self {
            buffer: gpu.allocate(begin + chunk)?,
            lengths: patterns.iter().map(|p| p.len()).collect(),
            search,
            begin,
            kept: 0,
            occurrences: 0,
        })
    }

    /// Searches all of a file; returns how many bytes it has.
    fn run(&mut self, file: &File, patterns: &[&[u8]], out: &mut impl Write) -> Result<u64> {
        let mut offset = 0;
        loop {
            let bytes = self.read(file, offset)?;
            if bytes == 0 {
                return Ok(offset);
            }
            self.search(bytes, offset, patterns, out)?;
            offset += u64::try_from(bytes)?;
        }
    }

    /// Reads the chunk at `offset` of the file; less than a whole one at its end.
    fn read(&mut self, file: &File, offset: u64) -> Result<usize> {
        let chunk = &mut self.buffer.as_mut_slice()[self.begin..];
        let mut done = 0;
        while done < chunk.len() {
            let at = offset + u64::try_from(done)?;
            match file.read_at(&mut chunk[done..], at) {
                Ok(0) => break,
                Ok(bytes) => done += bytes,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => (),
                Err(e) => return Err(e).with_context(|| format!("Cannot read at {at}")),
            }
        }
        Ok(done)
    }

    /// Searches the chunk, of which `bytes` are from `offset` of the file on, and keeps its end.
    fn search(
        &mut self,
        bytes: usize,
        offset: u64,
        patterns: &[&[u8]],
        out: &mut impl Write,
    ) -> Result<()> {
        let range = self.begin - self.kept..self.begin + bytes;
        let mut found = Vec::new();
        self.find(range.clone(), &mut found)?;
        found.sort_unstable();
        for occurrence in found {
            let pattern = patterns[usize::try_from(occurrence.pattern)?];
            let end = usize::try_from(occurrence.offset)? + pattern.len();
            if end <= self.begin {
                // It ended in the chunk before.
                continue;
            }
            let begin = u64::try_from(self.begin)?;
            write!(out, "{}\t", offset + occurrence.offset - begin)?;
            out.write_all(pattern)?;
            writeln!(out)?;
            self.occurrences += 1;
        }
        self.kept = range.len().min(self.search.longest() - 1);
        self.buffer
            .copy_within(range.end - self.kept..range.end, self.begin - self.kept)?;
        Ok(())
    }

    /// All occurrences in a range of the buffer, from its begin; halves it where there is no room
    /// for all of them.
    fn find(&mut self, range: Range<usize>, found: &mut Vec<Match>) -> Result<()> {
        let matches = self.search.run(&self.buffer, range.clone())?;
        if matches.total > u64::try_from(matches.found.len())? {
            let middle = range.start + range.len() / 2;
            ensure!(
                range.len() > 4 * self.search.longest(),
                "There are {} occurrences in {} bytes",
                matches.total,
                range.len()
            );
            self.find(range.start..middle, found)?;
            // What begins in the first half and ends in the second is searched for with that.
            let second = middle - (self.search.longest() - 1)..range.end;
            let mut more = Vec::new();
            self.find(second, &mut more)?;
            for occurrence in more {
                let pattern = usize::try_from(occurrence.pattern)?;
                if usize::try_from(occurrence.offset)? + self.lengths[pattern] > middle {
                    found.push(occurrence);
                }
            }
            return Ok(());
        }
        let start = u64::try_from(range.start)?;
        found.extend(matches.found.into_iter().map(|m| Match {
            offset: m.offset + start,
            ..m
        }));
        Ok(())
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let text = std::fs::read(&options.patterns)
        .with_context(|| format!("Cannot read {}", options.patterns.display()))?;
    let patterns: Vec<&[u8]> = text
        .split(|&byte| byte == b'\n')
        .filter(|line| !line.is_empty())
        .collect();
    ensure!(options.chunk > 0, "A chunk has at least one byte");
    let file = File::open(&options.file)
        .with_context(|| format!("Cannot open {}", options.file.display()))?;
    let gpu = Gpu::open(options.device.as_deref()).context("Cannot open the GPU")?;
    let mut scan = Scan::new(&gpu, &patterns, options.chunk)?;
    let begin = Instant::now();
    let mut out = BufWriter::new(std::io::stdout().lock());
    let bytes = scan.run(&file, &patterns, &mut out)?;
    out.flush()?;
    eprintln!(
        "{} occurrences of {} patterns in {bytes} bytes, {:.3} s",
        scan.occurrences,
        patterns.len(),
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &[u8], patterns: &[&[u8]], chunk: usize) -> String {
        let gpu = common::gpu();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text).unwrap();
        let mut out = Vec::new();
        let mut scan = Scan::new(&gpu, patterns, chunk).unwrap();
        let bytes = scan.run(&file, patterns, &mut out).unwrap();
        assert_eq!(bytes, u64::try_from(text.len()).unwrap());
        String::from_utf8(out).unwrap()
    }

    fn slowly(text: &[u8], patterns: &[&[u8]]) -> Vec<String> {
        let mut found = Vec::new();
        for &pattern in patterns {
            for (at, window) in text.windows(pattern.len()).enumerate() {
                if window == pattern {
                    found.push(format!("{at}\t{}", String::from_utf8_lossy(pattern)));
                }
            }
        }
        found.sort();
        found
    }

    #[test]
    fn each_occurrence_is_found_once_however_the_file_is_cut() {
        let text = b"abcabcab--abcabcabc---bcabc-".repeat(7);
        let patterns: [&[u8]; 4] = [b"abcabc", b"bca", b"c-", b"nothing"];
        let should = slowly(&text, &patterns);
        for chunk in (1..40).chain([text.len(), 10_000]) {
            let out = scan(&text, &patterns, chunk);
            let mut found: Vec<_> = out.lines().map(str::to_owned).collect();
            found.sort();
            assert_eq!(found, should, "in chunks of {chunk}");
        }
    }

    #[test]
    fn more_occurrences_than_there_is_room_for_are_all_found() {
        let text = vec![b'a'; 3 * usize::try_from(ROOM).unwrap() + 11];
        let patterns: [&[u8]; 2] = [b"aaa", b"aa"];
        let out = scan(&text, &patterns, 1 << 20);
        assert_eq!(out.lines().count(), 2 * text.len() - 3);
        let long = out.lines().filter(|line| line.ends_with("\taaa"));
        assert!(long.eq((0..text.len() - 2).map(|at| format!("{at}\taaa"))));
    }

    #[test]
    fn an_empty_file_has_none() {
        assert_eq!(scan(b"", &[b"a"], 100), "");
    }
}
