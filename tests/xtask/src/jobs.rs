//! Jobs of a test run: programs that are run side by side, as many as this machine has processors
//! and one more: most of them wait for something some of the time.
//!
//! Each job is a process of its own, whose output goes to a file: one that hangs or dies takes
//! nobody with it. A job has a weight, in processors; one that measures has all of them, and runs
//! when nothing else does.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use farlane_kit::numa::processors;
use farlane_kit::process::{Process, describe, tail};
use farlane_kit::progress;
use farlane_kit::scratch::Scratch;

/// How many jobs run side by side beyond one a processor. Guests boot, leases end and programs are
/// killed one after the other in a scenario, in which time nobody uses its processor: rdma-crash
/// takes 66 s of CPU time in 89 s.
const BEYOND_PROCESSORS: usize = 1;

/// How much of what a failed job has said is shown.
const LAST_LINES: usize = 60;

/// How many processors a job needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// None: nearly all of its time it waits for terms and deadlines to end.
    Waits,
    /// One.
    One,
    /// Two: what it shows depends on the processors that it has, so that beside it nothing runs
    /// beyond one job a processor.
    Two,
    /// All: it measures.
    All,
}

impl Weight {
    /// How much of the room for jobs it takes that run side by side.
    fn part(self) -> usize {
        match self {
            Self::Waits => 0,
            Self::One | Self::All => 1,
            Self::Two => 2,
        }
    }
}

/// A program to run.
pub struct Job {
    /// What it is called in the table.
    pub name: String,
    /// What runs.
    pub command: Command,
    /// How many processors it needs.
    pub weight: Weight,
    /// How long it may take on a busy machine. It is ended then, and has failed.
    pub timeout: Duration,
    /// Reads what it has done from what it said and whether it succeeded.
    pub judge: fn(&Ended<'_>) -> Verdict,
}

/// A job that has come to its end.
pub struct Ended<'a> {
    /// Whether its exit status was 0.
    pub success: bool,
    /// All that it said.
    pub said: &'a str,
    /// A file whose name it was given by [`RECORD_VARIABLE`], if it wrote one.
    pub record: Option<&'a str>,
}

/// What a job has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed.
    pub failed: u64,
    /// Why it could not be run on this machine: it has neither passed nor failed.
    pub not_run: Option<String>,
    /// How many guests it booted.
    pub boots: u64,
    /// Its figures, for the table at the end.
    pub figures: Vec<[String; 3]>,
}

/// A line of the table.
#[derive(Debug)]
pub struct Outcome {
    /// The job.
    pub name: String,
    /// How long it took.
    pub took: Duration,
    /// CPU time of its processes.
    pub used: Duration,
    /// What it did.
    pub verdict: Verdict,
    /// Where its output is, if it failed.
    pub log: PathBuf,
}

/// The environment variable by which a job is told where to write what it did.
pub const RECORD_VARIABLE: &str = "FARLANE_RECORD";

/// Runs jobs side by side, in their order as far as there is room for them; those with
/// [`Weight::Waits`] begin at once, those with [`Weight::All`] come last. One that needs more than
/// there is at all has it alone. Their output goes to
/// files in `logs`, which stay for those that fail.
///
/// # Errors
/// When a job cannot be started, or its files not be read.
pub fn run_all(jobs: Vec<Job>, logs: &Path) -> Result<Vec<Outcome>> {
    let room = processors()?.len() + BEYOND_PROCESSORS;
    let (heavy, light): (VecDeque<Job>, VecDeque<Job>) =
        jobs.into_iter().partition(|job| job.weight == Weight::All);
    let total = heavy.len() + light.len();
    let mut outcomes = Vec::new();
    // Not among the logs: a job may cover the checkout, and what it writes there with it.
    let records = Scratch::new()?;
    for (mut waiting, at_once) in [(light, room), (heavy, 1)] {
        let (ended, end) = channel();
        let mut running = 0;
        let mut taken = 0;
        while running > 0 || !waiting.is_empty() {
            while let Some(at) = waiting.iter().position(|job| match job.weight.part() {
                0 => true,
                part => taken == 0 || taken + part <= at_once,
            }) && let Some(job) = waiting.remove(at)
            {
                let part = job.weight.part();
                let (ended, logs) = (ended.clone(), logs.to_owned());
                let record = records.join(format!("{}.json", file_name(&job.name)));
                running += 1;
                taken += part;
                thread::Builder::new()
                    .name(job.name.clone())
                    .spawn(move || drop(ended.send((part, perform(job, &logs, &record)))))
                    .context("Cannot start a thread")?;
            }
            let (part, outcome) = end.recv().context("A job was lost")?;
            running -= 1;
            taken -= part;
            outcomes.push(outcome?);
            if let Some(outcome) = outcomes.last() {
                say(outcome, outcomes.len(), total);
            }
        }
    }
    Ok(outcomes)
}

fn say(outcome: &Outcome, number: usize, total: usize) {
    let Outcome {
        name,
        took,
        verdict,
        log,
        ..
    } = outcome;
    let Verdict { passed, failed, .. } = verdict;
    let took = took.as_secs_f64();
    let result = match &verdict.not_run {
        Some(reason) => format!("NOT RUN: {reason}"),
        None => format!("{passed} passed, {failed} failed"),
    };
    progress::note(&format!("[{number}/{total}] {name}: {result}, {took:.1} s"));
    if *failed > 0 {
        let said = fs::read(log).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        eprintln!("--- {name} said last:\n{}\n---", tail(&said, LAST_LINES));
    }
}

/// What a job's files are called.
fn file_name(name: &str) -> String {
    name.replace(|c: char| !c.is_alphanumeric() && c != '.', "-")
}

/// Runs one job to its end.
fn perform(job: Job, logs: &Path, record: &Path) -> Result<Outcome> {
    let Job {
        name,
        mut command,
        timeout,
        judge,
        ..
    } = job;
    let log = logs.join(format!("{}.log", file_name(&name)));
    command.env(RECORD_VARIABLE, record);
    let begin = Instant::now();
    let mut process = Process::spawn_logged(name.as_str(), command, &log)?;
    let status = process.wait(timeout)?;
    let used = process.cpu_time();
    let mut said = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    let success = match status {
        Some(status) => {
            if !status.success() {
                said.push_str(&format!("\n{name}: {}\n", describe(status)));
            }
            status.success()
        }
        None => {
            // SIGTERM first: it takes away what it has made.
            drop(process);
            said.push_str(&format!(
                "\n{name}: not at its end after {} s\n",
                timeout.as_secs()
            ));
            false
        }
    };
    let recorded = fs::read_to_string(record).ok();
    let mut verdict = judge(&Ended {
        success,
        said: &said,
        record: recorded.as_deref(),
    });
    if !success && verdict.not_run.is_none() {
        verdict.failed = verdict.failed.max(1);
    }
    if verdict.failed == 0 {
        fs::remove_file(&log).with_context(|| format!("Cannot remove {}", log.display()))?;
    } else {
        fs::write(&log, said).with_context(|| format!("Cannot write {}", log.display()))?;
    }
    Ok(Outcome {
        name,
        took: begin.elapsed(),
        used,
        verdict,
        log,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str, line: &str, weight: Weight) -> Job {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", line]);
        Job {
            name: name.into(),
            command,
            weight,
            timeout: Duration::from_secs(60),
            judge: |ended| Verdict {
                passed: u64::from(ended.success),
                figures: ended
                    .record
                    .map(|text| [text.into(), String::new(), String::new()])
                    .into_iter()
                    .collect(),
                ..Verdict::default()
            },
        }
    }

    #[test]
    fn what_fails_is_counted_and_its_output_stays() {
        let logs = tempfile::tempdir().unwrap();
        let jobs = vec![
            job("a/measure", "echo never >&2; exit 3", Weight::All),
            job("b", "printf 7 >\"$FARLANE_RECORD\"", Weight::One),
        ];
        let outcomes = run_all(jobs, logs.path()).unwrap();
        // What measures comes last.
        assert_eq!(outcomes[0].name, "b");
        assert_eq!(outcomes[0].verdict.figures[0][0], "7");
        assert_eq!(
            (outcomes[1].verdict.passed, outcomes[1].verdict.failed),
            (0, 1)
        );
        let said = fs::read_to_string(&outcomes[1].log).unwrap();
        assert!(
            said.contains("never") && said.contains("exit status 3"),
            "{said}"
        );
        assert_eq!(fs::read_dir(logs.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_waits_takes_no_room() {
        let logs = tempfile::tempdir().unwrap();
        let fifos: Vec<_> = (0..processors().unwrap().len() + BEYOND_PROCESSORS)
            .map(|number| logs.path().join(format!("fifo{number}")))
            .collect();
        let made = Command::new("mkfifo").args(&fifos).status().unwrap();
        assert!(made.success());
        // As many as there is room for, which end only when the last one runs beside them.
        let mut jobs = Vec::new();
        let mut all = "cat".to_owned();
        for fifo in &fifos {
            let fifo = fifo.display();
            jobs.push(job(
                &format!("one {fifo}"),
                &format!("echo >{fifo}"),
                Weight::One,
            ));
            all.push_str(&format!(" {fifo}"));
        }
        jobs.push(job("beside them", &all, Weight::Waits));
        for job in &mut jobs {
            job.timeout = Duration::from_secs(20);
        }
        let outcomes = run_all(jobs, logs.path()).unwrap();
        assert!(outcomes.iter().all(|outcome| outcome.verdict.failed == 0));
    }

    #[test]
    fn no_more_than_one_a_processor_runs_where_one_needs_two() {
        let logs = tempfile::tempdir().unwrap();
        let count = logs.path().join("count");
        // Each leaves a line while it runs, and says how many there were.
        let line = format!(
            "f={0}.$$; : >$f; sleep 0.2; ls {0}.* | wc -l >\"$FARLANE_RECORD\"; rm $f",
            count.display()
        );
        let processors = processors().unwrap().len();
        let seen = |weights: &[Weight]| -> Vec<usize> {
            let numbered = weights.iter().enumerate();
            let jobs = numbered.map(|(number, weight)| job(&number.to_string(), &line, *weight));
            let mut outcomes = run_all(jobs.collect(), logs.path()).unwrap();
            outcomes.sort_by_key(|outcome| outcome.name.parse::<usize>().unwrap());
            let figures = outcomes
                .iter()
                .map(|outcome| &outcome.verdict.figures[0][0]);
            figures.map(|seen| seen.trim().parse().unwrap()).collect()
        };
        let alike = seen(&vec![Weight::Two; 2 * processors]);
        let most = alike.iter().max().unwrap();
        assert!(*most <= processors.div_ceil(2), "{alike:?} that need two");
        let mut weights = vec![Weight::One; 2 * processors];
        weights.insert(0, Weight::Two);
        let beside = seen(&weights);
        assert!(beside[0] <= processors, "{beside:?}, the first needs two");
    }

    #[test]
    fn what_hangs_is_ended() {
        let logs = tempfile::tempdir().unwrap();
        let mut hangs = job("hangs", "sleep 1000", Weight::One);
        hangs.timeout = Duration::from_millis(100);
        let outcomes = run_all(vec![hangs], logs.path()).unwrap();
        assert_eq!(outcomes[0].verdict.failed, 1);
        let said = fs::read_to_string(&outcomes[0].log).unwrap();
        assert!(said.contains("not at its end"), "{said}");
    }
}
