//! A disk with a path on each of two nodes: steered and not, split and not (ioctopus-asplos20,
//! sections 3.3 and 5.4).

use crate::Options;
use crate::drive::{Direction, Drive, MOST};
use crate::machine::Machine;
use crate::plot::{Axis, Figure, Line};
use crate::report::Report;
use crate::scale;
use anyhow::{Context as _, Result};
use farlane_kit::backend::Backend;
use farlane_kit::compare::{Bar, Comparison, Plan, Side, alternating, compare};
use farlane_vm_front_end::net::{Range, bind};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Bytes of the disk.
const DISK: u64 = 256 << 20;
const STRETCH: Duration = Duration::from_millis(100);
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

/// Rounds of what is told and not judged.
fn few() -> Plan {
    Plan {
        least: 5.min(scale::plan().least),
        most: 5.min(scale::plan().most),
        ..Plan::LONG
    }
}

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
        let log = scale::log(self.options.output.folder(), "farlane-blk");
        let backend = Backend::start("farlane-blk", command, &[&socket], &log)?;
        let mut drive = Drive::connect_with(&socket, scale::bytes(DISK), block, Some(BUFFERS))?;
        if self.machine.is_real {
            for (node, range) in lie.ranges(block) {
                let start = drive.buffers().addr() + usize::try_from(range.start)?;
                bind(start, usize::try_from(range.length)?, node)?;
            }
        }
        let stretch = scale::time(STRETCH);
        drive.run(Direction::Read, depth, stretch / 3)?;
        let rate = drive.run(Direction::Read, depth, stretch)?;
        drop(drive);
        backend.stop()?;
        Ok(rate * f64::from(u32::try_from(block)?))
    }

    /// The first of two ways beside the second.
    fn compare(
        &self,
        ways: [&[&str]; 2],
        lie: Lie,
        (block, depth): (usize, usize),
        (plan, bar): (&Plan, Bar),
    ) -> Result<Comparison> {
        let rounds = alternating(1, |side| {
            let way = match side {
                Side::Ours => ways[0],
                Side::Theirs(_) => ways[1],
            };
            self.rate(way, lie, block, depth)
        });
        let found = compare(plan, &[bar], rounds)?;
        found.into_iter().next().context("No comparison")
    }
}

/// Measures everything.
pub fn run(options: &Options, machine: &Machine, report: &mut Report) -> Result<()> {
    let folder = tempfile::tempdir_in("/dev/shm")?;
    let file = folder.path().join("disk");
    let mut written = std::fs::File::create(&file)?;
    for _ in 0..scale::bytes(DISK) >> 20 {
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
            let what = format!("blk, {} KiB, depth {depth}, {name} buffers", block >> 10);
            let (plan, bar) = match lie {
                Lie::Near => (scale::plan(), BAR),
                _ if rig.machine.is_real => (scale::plan(), 1.0),
                // Without distance there is nothing to be won: it is told, not judged.
                _ => (few(), 1.0),
            };
            let found = rig.compare(ways, lie, (block, depth), (&plan, Bar::AtLeast(bar)))?;
            report.keep(&what, &found)?;
            if lie == Lie::Near || rig.machine.is_real {
                report.compared(&what, "B/s", "--steer off", &found);
            } else {
                println!("{what}: {:.2}x of --steer off (not judged)", found.figure);
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
        let found = rig.compare(ways, Lie::Halves, (block, 1), (&few(), Bar::AtLeast(1.0)))?;
        let (split, whole, ratio) = (found.ours, found.theirs.unwrap_or(f64::NAN), found.figure);
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
    .write(&rig.options.output.folder().join("octo-split.svg"))
}
