//! fio for as long as a scenario needs it: jobs that check what they write, one after the other.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::{Guest, Job};

use crate::fio::{FIO_TIMEOUT, Fio, figures};

/// Works with a disk: one job of fio after the other, each of which must end well.
pub struct Work<'g> {
    guest: &'g Guest,
    node: String,
    fio: Fio,
    job: Option<Job<'g>>,
    writes: u64,
}

impl<'g> Work<'g> {
    /// Works with a disk as `words` say. Nothing runs yet.
    pub fn new(guest: &'g Guest, node: &str, words: &str) -> Self {
        Self {
            guest,
            node: node.to_owned(),
            fio: Fio::new(node, words),
            job: None,
            writes: 0,
        }
    }

    /// The guest.
    pub fn guest(&self) -> &'g Guest {
        self.guest
    }

    /// The disk's node.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// How many writes the jobs that have ended have done and found again.
    pub fn writes(&self) -> u64 {
        self.writes
    }

    /// Sees to it that a job runs.
    pub fn go_on(&mut self) -> Result<()> {
        if self.job.as_ref().is_some_and(Job::has_ended) {
            self.end()?;
        }
        if self.job.is_none() {
            self.job = Some(self.guest.spawn(self.fio.line())?);
        }
        Ok(())
    }

    /// Waits for the job's end: it has found all that it wrote.
    pub fn end(&mut self) -> Result<()> {
        if let Some(job) = self.job.take() {
            let figures = figures(self.fio.line(), &job.wait(FIO_TIMEOUT)?)?;
            ensure!(
                figures.write.requests > 0 && figures.read.requests > 0,
                "fio has checked nothing: {figures:?}"
            );
            self.writes += figures.write.requests;
        }
        Ok(())
    }
}

/// How many requests the guest has given to the disk and not had back.
pub fn in_flight(guest: &Guest, node: &str) -> Result<u64> {
    let name = node.trim_start_matches("/dev/");
    let counts = guest.read_file(&format!("/sys/block/{name}/inflight"))?;
    let counts = counts.split_whitespace().map(str::parse::<u64>);
    counts
        .sum::<Result<u64, _>>()
        .context("A count is no number")
}
