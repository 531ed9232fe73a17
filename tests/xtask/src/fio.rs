//! fio: how it is called in a guest, and what it reports.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use farlane_kit::guest::{Guest, Output};
use serde_json::Value;

/// Has fio write at random, read everything back, and check it.
pub const VERIFY: &str = "--rw=randwrite --verify=crc32c --verify_fatal=1";

/// How long one run of fio may take.
pub const FIO_TIMEOUT: Duration = Duration::from_secs(180);

/// A command line of fio with one job that reports in JSON.
#[derive(Debug, Clone)]
pub struct Fio {
    line: String,
}

/// What one job did in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Direction {
    /// Requests a second.
    pub iops: f64,
    /// Bytes a second.
    pub bytes_per_second: f64,
    /// How many requests were done.
    pub requests: u64,
    /// How many bytes were moved.
    pub bytes: u64,
    /// The mean time from a request's submission to its completion.
    pub mean_us: f64,
}

/// What one job reports.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Figures {
    /// Reading, verification included.
    pub read: Direction,
    /// Writing.
    pub write: Direction,
}

/// What a job reports that has found all that it wrote.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verified(pub Figures);

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} writes, all found again", self.0.write.requests)
    }
}

impl Fio {
    /// A job on a file or block device, past the page cache.
    pub fn new(file: &str, words: &str) -> Self {
        Self {
            line: format!(
                "fio --name=job --filename={file} --direct=1 --ioengine=libaio \
                 --output-format=json {words}"
            ),
        }
    }

    /// The command line.
    pub fn line(&self) -> &str {
        &self.line
    }

    /// Runs a job in a guest that reads back and checks what it writes.
    pub fn verify(&self, guest: &Guest) -> Result<Verified> {
        let figures = self.run(guest)?;
        ensure!(
            figures.write.requests > 0 && figures.read.requests >= figures.write.requests,
            "fio has not read back what it wrote: {figures:?}"
        );
        Ok(Verified(figures))
    }

    /// Runs it in a guest; it must succeed.
    pub fn run(&self, guest: &Guest) -> Result<Figures> {
        figures(&self.line, &guest.spawn(&self.line)?.wait(FIO_TIMEOUT)?)
    }
}

/// Jobs that take turns on several files in one run of fio: starting it in an emulated guest takes
/// longer than a short job.
#[derive(Debug, Clone)]
pub struct Turns<'a> {
    /// Files or block devices that are alike.
    pub files: &'a [String],
    /// What each job does.
    pub words: &'a str,
    /// How long each job takes.
    pub time: Duration,
}

impl Turns<'_> {
    /// Makes the rounds with these numbers: in each, one job on each file, one after the other.
    /// Whoever comes first in one round comes last in the next. Returns the figures of each round
    /// in the order of the files.
    pub fn run(&self, guest: &Guest, rounds: Range<usize>) -> Result<Vec<Vec<Figures>>> {
        let line = self.line(&rounds);
        let output = guest.spawn(&line)?.wait(FIO_TIMEOUT)?;
        output.check(format_args!("`{line}`"))?;
        let jobs = parse_jobs(&output.stdout);
        let jobs = jobs.with_context(|| format!("`{line}` said:\n{}", output.all()))?;
        let figures = |round: usize, file: usize| {
            let found = jobs.iter().find(|(name, _)| *name == job_name(round, file));
            Ok(found
                .with_context(|| format!("Round {round} is missing"))?
                .1)
        };
        rounds
            .map(|round| {
                (0..self.files.len())
                    .map(|file| figures(round, file))
                    .collect()
            })
            .collect()
    }

    fn line(&self, rounds: &Range<usize>) -> String {
        let mut line = format!(
            "fio --direct=1 --ioengine=libaio --thread --output-format=json --time_based \
             --runtime={}ms {}",
            self.time.as_millis(),
            self.words
        );
        for round in rounds.clone() {
            let mut order: Vec<usize> = (0..self.files.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for file in order {
                let name = job_name(round, file);
                line += &format!(" --name={name} --stonewall --filename={}", self.files[file]);
            }
        }
        line
    }
}

fn job_name(round: usize, file: usize) -> String {
    format!("round{round}-{file}")
}

/// What a run of fio that must have succeeded has reported.
pub fn figures(line: &str, output: &Output) -> Result<Figures> {
    output.check(format_args!("`{line}`"))?;
    parse(&output.stdout).with_context(|| format!("`{line}` said:\n{}", output.all()))
}

fn parse(text: &str) -> Result<Figures> {
    let jobs = parse_jobs(text)?;
    Ok(jobs.first().context("fio reports no job")?.1)
}

/// The names of all jobs, and what they did.
fn parse_jobs(text: &str) -> Result<Vec<(String, Figures)>> {
    // Remarks stand before the report.
    let at = text.find('{').context("fio reported nothing")?;
    let report: Value = serde_json::from_str(&text[at..]).context("fio's report is no JSON")?;
    let jobs = report["jobs"].as_array().context("fio reports no jobs")?;
    jobs.iter().map(parse_job).collect()
}

fn parse_job(job: &Value) -> Result<(String, Figures)> {
    if job["error"].as_i64() != Some(0) {
        bail!("fio reports the error {}", job["error"]);
    }
    let direction = |name: &str| {
        let part = &job[name];
        anyhow::Ok(Direction {
            iops: part["iops"].as_f64().context("No iops")?,
            bytes_per_second: part["bw_bytes"].as_f64().context("No bw_bytes")?,
            requests: part["total_ios"].as_u64().context("No total_ios")?,
            bytes: part["io_bytes"].as_u64().context("No io_bytes")?,
            mean_us: part["lat_ns"]["mean"].as_f64().context("No mean")? / 1e3,
        })
    };
    let figures = Figures {
        read: direction("read")?,
        write: direction("write")?,
    };
    Ok((
        job["jobname"].as_str().unwrap_or_default().to_owned(),
        figures,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_behind_remarks() {
        let part = r#"{"iops": 1500.5, "bw_bytes": 6146048, "total_ios": 3001, "io_bytes": 4096,
            "lat_ns": {"mean": 2500.0}}"#;
        let text = format!(
            "fio: a remark\n{{\"jobs\": [{{\"error\": 0, \"read\": {part}, \"write\": {part}}}]}}"
        );
        let read = parse(&text).unwrap().read;
        assert_eq!(read.requests, 3001);
        assert!((read.iops - 1500.5).abs() < 1e-9 && (read.mean_us - 2.5).abs() < 1e-9);
    }

    #[test]
    fn jobs_take_turns_and_are_told_apart() {
        let files = ["/dev/a", "/dev/b"].map(String::from);
        let turns = Turns {
            files: &files,
            words: "--rw=randread",
            time: Duration::from_millis(250),
        };
        let line = turns.line(&(4..6));
        let order: Vec<_> = line
            .split("--filename=")
            .skip(1)
            .map(|rest| &rest[..6])
            .collect();
        assert_eq!(order, ["/dev/a", "/dev/b", "/dev/b", "/dev/a"]);
        let part = r#"{"iops": 1.0, "bw_bytes": 2, "total_ios": 3, "io_bytes": 4,
            "lat_ns": {"mean": 5.0}}"#;
        let job = |name: &str| {
            format!(r#"{{"jobname": "{name}", "error": 0, "read": {part}, "write": {part}}}"#)
        };
        let jobs = parse_jobs(&format!(
            r#"{{"jobs": [{}, {}]}}"#,
            job("round0-0"),
            job("round0-1")
        ))
        .unwrap();
        assert_eq!(jobs[1].0, job_name(0, 1));
    }

    #[test]
    fn an_error_in_the_report_is_an_error() {
        assert!(parse(r#"{"jobs": [{"error": 84}]}"#).is_err());
        assert!(parse("fio: no such file").is_err());
    }
}
