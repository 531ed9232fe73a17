//! A disk with a path on each of two nodes: steered and not, split and not (ioctopus-asplos20, sections 3.3 and 5.4).

use crate::Options;
use crate::drive::{Direction, Drive, MOST};
use crate::machine::Machine;
use crate::plot::{Axis, Figure, Line};
use crate::report::Report;
use anyhow::Result;
use farlane_net_driver::{Range, bind};
use farlane_vmkit::backend::Backend;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Bytes of the disk.
const DISK: u64 = 256 << 20;
const STRETCH: Duration = Duration::from_millis(150);
const ROUNDS: usize = 5;
/// Where the buffers are, so that a backend can be told of them before they are there.
const BUFFERS: usize = 0x10_0000_0000;
/// Bytes of requests that are cut in the middle.
const SIZES: [usize; 9] = [
    8 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
];
/// Requests under way where steering is measured: bytes of each, how many.
const SHAPES: [(usize, usize); 4] = [(4096, 1), (4096, 32), (65_536, 1), (65_536, 8)];
/// What steering may take of the rate where there is nothing to be steered.
const BAR: f64 = 0.95;

/// Where the buffers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    /// On the node of the queue.
    Near,
    /// On the other one.
    Far,
    /// The first half of each on one node, the second on the other.
    Halves,
}

impl Lie {
    /// The words that tell a backend, for buffers of so many bytes.
    fn words(self, block: usize) -> Vec<String> {
        let range = |node: u32, start: usize, length: usize| {
            let value = format!("node={node},start={start:#x},length={length:#x}");
            ["--memory-node".to_owned(), value]
        };
        let slots = (0..MOST).map(|slot| BUFFERS + slot * block);
        match self {
            Self::Near => range(0, BUFFERS, block * MOST).into(),
            Self::Far => range(1, BUFFERS, block * MOST).into(),
            Self::Halves => slots
                .flat_map(|at| [range(0, at, block / 2), range(1, at + block / 2, block / 2)])
                .flatten()
                .collect(),
        }
    }

    /// The parts of the buffers' memory that are on the nodes.
    fn ranges(self, block: usize) -> Vec<(u32, Range)> {
        let range = |start: usize, length: usize| Range {
            start: start as u64,
            length: length as u64,
        };
        match self {
            Self::Near => vec![(0, range(0, block * MOST))],
            Self::Far => vec![(1, range(0, block * MOST))],
            Self::Halves => (0..MOST * 2)
                .zip([0, 1].into_iter().cycle())
                .map(|(half, node)| (node, range(half * block / 2, block / 2)))
                .collect(),
        }
    }
}

/// farlane-blk with two paths to a file, one a node.
struct Rig<'a> {
    options: &'a Options,
    machine: &'a Machine,
    folder: &'a Path,
    file: PathBuf,
}

impl Rig<'_> {
    /// Bytes a second with further words on the command line.
    fn rate(&self, words: &[&str], lie: Lie, block: usize, depth: usize) -> Result<f64> {
        let socket = self.folder.join("blk.sock");
        let mut command = Command::new(&self.options.blk);
        command.arg("--socket-path").arg(&socket);
        for node in 0..2 {
            let path = format!("node={node},dev={}", self.file.display());
            command.args(["--path", &path]);
        }
        command.arg("--sysfs").arg(&self.machine.sysfs);
        command.args(lie.words(block)).args(words);
        let log = self.folder.join("farlane-blk.log");
        let backend = Backend::start("farlane-blk", command, &[&socket], &log)?;
        let mut drive = Drive::connect_with(&socket, DISK, block, Some(BUFFERS))?;
        if self.machine.is_real {
            for (node, range) in lie.ranges(block) {
                let start = drive.buffers().addr() + usize::try_from(range.start)?;
                bind(start, usize::try_from(range.length)?, node)?;
            }
        }
        drive.run(Direction::Read, depth, STRETCH / 3)?;
        let rate = drive.run(Direction::Read, depth, STRETCH)?;
        drop(drive);
        backend.stop()?;
        Ok(rate * f64::from(u32::try_from(block)?))
    }

    /// Medians of two ways, and of their ratios, in turns.
    fn compare(
        &self,
        ways: [&[&str]; 2],
        lie: Lie,
        block: usize,
        depth: usize,
    ) -> Result<[f64; 3]> {
        let (mut rates, mut ratios) = ([Vec::new(), Vec::new()], Vec::new());
        for round in 0..ROUNDS {
            for turn in [round % 2, 1 - round % 2] {
                rates[turn].push(self.rate(ways[turn], lie, block, depth)?);
            }
            ratios.push(rates[0][round] / rates[1][round]);
        }
        let [one, two] = rates;
        Ok([one, two, ratios].map(crate::median))
    }
}

/// Measures everything.
pub fn run(options: &Options, machine: &Machine, report: &mut Report) -> Result<()> {
    let folder = tempfile::tempdir_in("/dev/shm")?;
    let file = folder.path().join("disk");
    let mut written = std::fs::File::create(&file)?;
    for _ in 0..DISK >> 20 {
        written.write_all(&[0xa5; 1 << 20])?;
    }
    drop(written);
    let rig = Rig {
        options,
        machine,
        folder: folder.path(),
        file,
    };
    steering(&rig, report)?;
    splitting(&rig, report)
}

fn steering(rig: &Rig<'_>, report: &mut Report) -> Result<()> {
    for (block, depth) in SHAPES {
        for (lie, name) in [(Lie::Near, "near"), (Lie::Far, "far")] {
            let ways: [&[&str]; 2] = [&["--steer", "on"], &["--steer", "off"]];
            let [on, off, ratio] = rig.compare(ways, lie, block, depth)?;
            let what = format!("blk, {} KiB, depth {depth}, {name} buffers", block >> 10);
            let iops = |rate: f64| rate / f64::from(u32::try_from(block).unwrap_or(1));
            println!(
                "{what:<40} steered {:>8.0} IOPS   not {:>8.0}   {ratio:.2}x",
                iops(on),
                iops(off)
            );
            report.keep(&what, [iops(on), iops(off)])?;
            let reference = format!("--steer off {:.0} IOPS, on {:.0}", iops(off), iops(on));
            match lie {
                Lie::Near => report.at_least(&what, ratio, "x", BAR, &reference),
                // Without distance there is nothing to be won.
                _ if !rig.machine.is_real => {}
                _ => report.at_least(&what, ratio, "x", 1.0, &reference),
            }
        }
    }
    Ok(())
}

fn splitting(rig: &Rig<'_>, report: &mut Report) -> Result<()> {
    let mut lines = [Vec::new(), Vec::new()];
    let mut pays: Option<usize> = None;
    for block in SIZES {
        let ways: [&[&str]; 2] = [&["--split", "4K"], &["--split", "64M"]];
        let [split, whole, ratio] = rig.compare(ways, Lie::Halves, block, 1)?;
        let what = format!("blk, {} KiB over two nodes, depth 1", block >> 10);
        println!(
            "{what:<40} split {:>8.0} MiB/s   whole {:>8.0}   {ratio:.2}x",
            split / 1048576.0,
            whole / 1048576.0
        );
        report.keep(&what, [split, whole])?;
        // From here on, for all that are larger.
        pays = if ratio > 1.0 {
            pays.or(Some(block))
        } else {
            None
        };
        let x = f64::from(u32::try_from(block)?);
        lines[0].push((x, split / 1048576.0));
        lines[1].push((x, whole / 1048576.0));
    }
    match pays {
        Some(block) => println!(
            "splitting pays from {} KiB on: parts of {} KiB",
            block >> 10,
            block >> 11
        ),
        None => println!("splitting pays at no size here"),
    }
    report.keep("blk, bytes of a request from which splitting pays", pays)?;
    let [split, whole] = lines;
    Figure {
        title: "Reads whose buffers are half on each node (IOctoSG, paper section 5.4)".into(),
        x: Axis::Size,
        y: "MiB/s",
        log_y: false,
        lines: vec![
            Line {
                label: "split".into(),
                points: split,
            },
            Line {
                label: "whole".into(),
                points: whole,
            },
        ],
    }
    .write(&rig.options.out.join("octo-split.svg"))
}
