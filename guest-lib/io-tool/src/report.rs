//! What a trace says, as a table and a drawing.

use crate::figure::{self, WAYS};
use anyhow::{Context as _, Result, bail};
use farlane_io_core::plan::trace::{Decision, Why, read};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// Files that get a line of the table and a part of the drawing.
const FILES: usize = 6;

/// Calls, failures, time and bytes by way, summed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Sums {
    calls: u64,
    failed: u64,
    took_us: u64,
    bytes: [u64; WAYS.len()],
}

impl Sums {
    fn add(&mut self, decision: &Decision) {
        self.calls += 1;
        self.failed += u64::from(decision.result < 0);
        self.took_us = self.took_us.saturating_add(decision.took_us);
        for (sum, (way, _)) in self.bytes.iter_mut().zip(WAYS) {
            *sum = sum.saturating_add(decision.bytes(way));
        }
    }

    fn total(&self) -> u64 {
        self.bytes
            .iter()
            .fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    fn line(&self, name: &str) -> String {
        let mut line = format!("{name:<34} {:>9} {:>7}", self.calls, self.failed);
        for bytes in self.bytes {
            line += &format!(" {bytes:>14}");
        }
        let mean = self.took_us as f64 / self.calls.max(1) as f64;
        line + &format!(" {mean:>10.1}")
    }
}

/// A trace, summed up.
#[derive(Debug, Default)]
struct Summary {
    all: Sums,
    files: BTreeMap<(String, u64), (String, Sums)>,
    reasons: BTreeMap<Why, Sums>,
}

impl Summary {
    fn of(decisions: &[Decision]) -> Self {
        let mut summary = Self::default();
        for decision in decisions {
            summary.all.add(decision);
            let key = (decision.device.clone(), decision.inode);
            let (name, sums) = summary.files.entry(key).or_default();
            if name.is_empty() {
                name.clone_from(&decision.file);
            }
            sums.add(decision);
            summary
                .reasons
                .entry(decision.why)
                .or_default()
                .add(decision);
        }
        summary
    }

    /// The files with most bytes first: name, key, sums.
    fn largest(&self) -> Vec<(String, &(String, u64), &Sums)> {
        let mut files: Vec<_> = self
            .files
            .iter()
            .map(|(key, (name, sums))| {
                let name = if name.is_empty() {
                    format!("inode {} of {}", key.1, key.0)
                } else {
                    name.clone()
                };
                (name, key, sums)
            })
            .collect();
        files.sort_by_key(|(_, _, sums)| std::cmp::Reverse(sums.total()));
        files
    }

    fn print(&self) {
        let columns: String = WAYS
            .iter()
            .map(|(_, name)| format!(" {name:>14}"))
            .collect();
        let heading = |of: &str| {
            println!(
                "\n{of:<34} {:>9} {:>7}{columns} {:>10}",
                "calls", "failed", "mean us"
            );
        };
        heading("bytes by file");
        let files = self.largest();
        for (name, _, sums) in files.iter().take(FILES) {
            println!("{}", sums.line(&shortened(name)));
        }
        if files.len() > FILES {
            println!("and {} more files", files.len() - FILES);
        }
        println!("{}", self.all.line("all"));
        heading("bytes by reason");
        for (why, sums) in &self.reasons {
            println!("{}", sums.line(&format!("{why:?}")));
        }
    }
}

/// The end of a path that is too long for its column.
fn shortened(name: &str) -> String {
    const LONGEST: usize = 34;
    let length = name.chars().count();
    if length <= LONGEST {
        return name.into();
    }
    let end: String = name.chars().skip(length - (LONGEST - 3)).collect();
    format!("...{end}")
}

/// Prints the summary of a trace and draws it as `DIR/io-trace.svg`.
pub fn run(file: &Path, out: &Path) -> Result<()> {
    let shown = file.display();
    let opened = File::open(file).with_context(|| format!("Cannot open {shown}"))?;
    let decisions: Vec<_> = read(BufReader::new(opened))
        .collect::<Result<_, _>>()
        .with_context(|| format!("{shown} is not a trace"))?;
    if decisions.is_empty() {
        bail!("{shown} has no decisions");
    }
    let summary = Summary::of(&decisions);
    summary.print();
    let mut panels = vec![figure::Panel::new("all files".into(), &decisions, |_| true)];
    if summary.files.len() > 1 {
        for (name, key, _) in summary.largest().into_iter().take(FILES) {
            let of_it = |d: &Decision| d.inode == key.1 && d.device == key.0;
            panels.push(figure::Panel::new(name, &decisions, of_it));
        }
    }
    std::fs::create_dir_all(out)?;
    let path = out.join("io-trace.svg");
    figure::draw(&panels, &path).with_context(|| format!("Cannot draw {}", path.display()))?;
    println!("\nDrawn: {}", path.display());
    Ok(())
}
