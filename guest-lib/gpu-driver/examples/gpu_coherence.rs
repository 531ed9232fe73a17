//! Two processes and one file: one with video memory, by plain calls that another library may have
//! replaced, the other with ordinary calls, through the page cache. Whatever one has written before
//! the other begins to read, the other reads.
//!
//! `gpu_coherence FILE --rounds N`: prints how much was checked; fails at the first byte that is
//! older than it may be. The second process is this program again, without the library that is
//! loaded before it.

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use farlane_gpu_driver::{Buffer, Gpu};
use farlane_sys::Mmap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Bytes of the file.
const FILE_BYTES: usize = 4 << 20;
/// Largest transfer in bytes.
const MOST: usize = 512 << 10;
const WORD: usize = 8;

/// Two processes and one file
#[derive(Debug, Parser)]
struct Options {
    /// The file, which is overwritten
    file: PathBuf,
    /// How often each way is tried
    #[arg(long, default_value_t = 200)]
    rounds: u32,
    /// This is the other process
    #[arg(long, hide = true)]
    other: bool,
}

/// What the other process is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Task {
    /// Write.
    Write,
    /// Write, and have it on the disk.
    WriteSync,
    /// Write through a mapping.
    Map,
    /// Read and compare.
    Read,
    /// Write one generation after the other, up to the given one.
    Race,
}

/// A range of the file, written in one generation.
#[derive(Clone, Copy, Debug)]
struct Span {
    generation: u32,
    offset: usize,
    length: usize,
}

impl Span {
    fn word(generation: u32, offset: usize) -> u64 {
        let index = u64::try_from(offset / WORD).unwrap_or(u64::MAX);
        u64::from(generation) << 32 | index & 0xffff_ffff
    }

    fn bytes(self) -> Vec<u8> {
        let words = (self.offset..self.offset + self.length).step_by(WORD);
        words
            .flat_map(|at| Self::word(self.generation, at).to_le_bytes())
            .collect()
    }

    fn check(self, bytes: &[u8], how: &str) -> Result<()> {
        if bytes == self.bytes() {
            return Ok(());
        }
        let found = generations(bytes, self.offset)?;
        let at = found
            .iter()
            .position(|&g| g != self.generation)
            .unwrap_or(0);
        bail!(
            "{how}: byte {:#x} is of generation {} and should be of {}; {self:?}",
            self.offset + at * WORD,
            found.get(at).copied().unwrap_or(0),
            self.generation,
        )
    }
}

/// The generation of each word.
fn generations(bytes: &[u8], offset: usize) -> Result<Vec<u32>> {
    let mut found = Vec::with_capacity(bytes.len() / WORD);
    for (chunk, at) in bytes.chunks_exact(WORD).zip((offset..).step_by(WORD)) {
        let word = u64::from_le_bytes(chunk.try_into()?);
        let generation = u32::try_from(word >> 32)?;
        ensure!(
            word == 0 || word == Span::word(generation, at),
            "Byte {at:#x}: {word:#x} is of another place"
        );
        found.push(generation);
    }
    Ok(found)
}

/// The other process.
struct Other {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Other {
    fn start(file: &Path) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(file)
            .arg("--other")
            .env_remove("LD_PRELOAD")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().context("No standard input")?;
        let answers = child.stdout.take().context("No standard output")?;
        Ok(Self {
            child,
            orders,
            answers: BufReader::new(answers),
        })
    }

    fn order(&mut self, task: Task, span: Span) -> Result<()> {
        let name = task.to_possible_value().context("A task has a name")?;
        writeln!(
            self.orders,
            "{} {} {} {}",
            name.get_name(),
            span.generation,
            span.offset,
            span.length
        )?;
        Ok(())
    }

    fn answer(&mut self) -> Result<()> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        ensure!(line == "done\n", "The other process: {line:?}");
        Ok(())
    }

    fn ask(&mut self, task: Task, span: Span) -> Result<()> {
        self.order(task, span)?;
        self.answer()
    }

    fn end(self) -> Result<()> {
        let Self {
            mut child, orders, ..
        } = self;
        drop(orders);
        let status = child.wait()?;
        ensure!(status.success(), "The other process: {status}");
        Ok(())
    }
}

/// The other process's life.
fn serve(path: &Path) -> Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let [task, generation, offset, length] = words[..] else {
            bail!("{line:?} is no order");
        };
        let task = Task::from_str(task, false).map_err(anyhow::Error::msg)?;
        let span = Span {
            generation: generation.parse()?,
            offset: offset.parse()?,
            length: length.parse()?,
        };
        perform(&file, task, span)?;
        println!("done");
    }
    Ok(())
}

fn perform(file: &File, task: Task, span: Span) -> Result<()> {
    let offset = u64::try_from(span.offset)?;
    match task {
        Task::Write => file.write_all_at(&span.bytes(), offset)?,
        Task::WriteSync => {
            file.write_all_at(&span.bytes(), offset)?;
            file.sync_data()?;
        }
        Task::Map => {
            let map = Mmap::shared(file, 0, FILE_BYTES, Mmap::READ_WRITE)?;
            let place = map.get(span.offset, span.length);
            let place = place.context("A span beyond the file")?.as_ptr();
            // SAFETY: mapped while `map` lives, and shared with other processes only, whose orders
            // and answers say before and after.
            unsafe { place.copy_from_nonoverlapping(span.bytes().as_ptr(), span.length) };
        }
        Task::Read => {
            let mut bytes = vec![0; span.length];
            file.read_exact_at(&mut bytes, offset)?;
            span.check(&bytes, "Through the page cache")?;
        }
        Task::Race => {
            for generation in 1..=span.generation {
                file.write_all_at(&Span { generation, ..span }.bytes(), offset)?;
            }
        }
    }
    Ok(())
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap_or(0) % end
    }

    /// A range: whole pages half of the time, at any word else.
    fn span(&mut self, generation: u32) -> Span {
        let unit = if self.below(2) == 0 { 4096 } else { WORD };
        let most = [4096, 64 << 10, MOST][self.below(3)];
        let length = (self.below(most) + 1).next_multiple_of(unit);
        let offset = self.below(FILE_BYTES - length) / unit * unit;
        Span {
            generation,
            offset,
            length,
        }
    }
}

fn run(options: &Options) -> Result<u64> {
    let gpu = Gpu::open(None)?;
    let mut buffer = gpu.allocate(MOST)?;
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&options.file)?;
    file.write_all_at(&vec![0; FILE_BYTES], 0)?;
    file.sync_all()?;
    let mut other = Other::start(&options.file)?;
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut checked = 0;
    let mut generation = 0;
    for _ in 0..options.rounds {
        for task in [Task::Write, Task::WriteSync, Task::Map] {
            generation += 1;
            let span = random.span(generation);
            other.ask(task, span)?;
            read(&file, &mut buffer, span, &format!("After {task:?}"))?;
            checked += span.length;
        }
        // The other has the range in its cache, older.
        generation += 1;
        let old = random.span(generation);
        other.ask(Task::Write, old)?;
        other.ask(Task::Read, old)?;
        generation += 1;
        let span = Span { generation, ..old };
        buffer.as_mut_slice()[..span.length].copy_from_slice(&span.bytes());
        file.write_all_at(
            &buffer.as_slice()[..span.length],
            u64::try_from(span.offset)?,
        )?;
        if generation % 2 == 0 {
            file.sync_data()?;
        }
        other.ask(Task::Read, span)?;
        read(&file, &mut buffer, span, "After writing it")?;
        checked += 2 * span.length;
    }
    checked += race(&file, &mut buffer, &mut other, options.rounds)?;
    other.end()?;
    Ok(u64::try_from(checked)?)
}

/// Reads a range and checks it.
fn read(file: &File, buffer: &mut Buffer, span: Span, how: &str) -> Result<()> {
    buffer.as_mut_slice()[..span.length].fill(0xee);
    let offset = u64::try_from(span.offset)?;
    file.read_exact_at(&mut buffer.as_mut_slice()[..span.length], offset)?;
    span.check(&buffer.as_slice()[..span.length], how)
}

/// Reads while the other writes: no word is ever older than it was before.
fn race(file: &File, buffer: &mut Buffer, other: &mut Other, rounds: u32) -> Result<usize> {
    let span = Span {
        generation: rounds.max(2),
        offset: 64 << 10,
        length: 64 << 10,
    };
    other.ask(
        Task::Write,
        Span {
            generation: 0,
            ..span
        },
    )?;
    other.order(Task::Race, span)?;
    let mut seen = vec![0; span.length / WORD];
    let mut checked = 0;
    while seen.iter().any(|&generation| generation < span.generation) {
        let offset = u64::try_from(span.offset)?;
        file.read_exact_at(&mut buffer.as_mut_slice()[..span.length], offset)?;
        let now = generations(&buffer.as_slice()[..span.length], span.offset)?;
        for (at, (before, now)) in seen.iter().zip(&now).enumerate() {
            ensure!(
                before <= now,
                "Byte {:#x} goes back from generation {before} to {now}",
                span.offset + at * WORD
            );
        }
        seen = now;
        checked += span.length;
    }
    other.answer()?;
    Ok(checked)
}

fn main() -> Result<()> {
    env_logger::init();
    let options = Options::parse();
    if options.other {
        return serve(&options.file);
    }
    let bytes = run(&options)?;
    println!("{{\"what\":\"coherence\",\"bytes\":{bytes}}}");
    Ok(())
}
