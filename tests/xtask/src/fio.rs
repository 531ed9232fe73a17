//! fio: how it is called in a guest, and what it reports.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use farlane_vmkit::guest::{Guest, Output};
use serde_json::Value;

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

impl Fio {
    /// A job on a file or block device, past the page cache.
    pub fn new(file: &str, words: &str) -> Self {
        Self {
            line: format!(
                "fio --name=job --filename={file} --direct=1 --ioengine=libaio --output-format=json {words}"
            ),
        }
    }

    /// The command line.
    pub fn line(&self) -> &str {
        &self.line
    }

    /// Runs it in a guest; it must succeed.
    pub fn run(&self, guest: &Guest) -> Result<Figures> {
        figures(&self.line, &guest.spawn(&self.line)?.wait(FIO_TIMEOUT)?)
    }
}

/// What a run of fio that must have succeeded has reported.
pub fn figures(line: &str, output: &Output) -> Result<Figures> {
    if !output.success() {
        bail!("`{line}` failed: {}\n{}", output.how(), output.all());
    }
    parse(&output.stdout).with_context(|| format!("`{line}` said:\n{}", output.all()))
}

fn parse(text: &str) -> Result<Figures> {
    // Remarks stand before the report.
    let at = text.find('{').context("fio reported nothing")?;
    let report: Value = serde_json::from_str(&text[at..]).context("fio's report is no JSON")?;
    let job = &report["jobs"][0];
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
    Ok(Figures {
        read: direction("read")?,
        write: direction("write")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_behind_remarks() {
        let part = r#"{"iops": 1500.5, "bw_bytes": 6146048, "total_ios": 3001, "io_bytes": 4096, "lat_ns": {"mean": 2500.0}}"#;
        let text = format!(
            "fio: a remark\n{{\"jobs\": [{{\"error\": 0, \"read\": {part}, \"write\": {part}}}]}}"
        );
        let read = parse(&text).unwrap().read;
        assert_eq!(read.requests, 3001);
        assert!((read.iops - 1500.5).abs() < 1e-9 && (read.mean_us - 2.5).abs() < 1e-9);
    }

    #[test]
    fn an_error_in_the_report_is_an_error() {
        assert!(parse(r#"{"jobs": [{"error": 84}]}"#).is_err());
        assert!(parse("fio: no such file").is_err());
    }
}
