//! The workers.

use crate::job::{Job, Mechanism, Outcome, Task};
use anyhow::{Context as _, Result, anyhow, ensure};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

/// What is measured.
pub struct Programs {
    /// libfarlane_io.so.
    pub library: PathBuf,
    /// farlane-io.
    pub tool: PathBuf,
}

/// A worker process, ended on drop.
struct Worker {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("Cannot start a worker")?;
        let answers = child.stdout.take().context("The worker says nothing")?;
        Ok(Self {
            child,
            answers: BufReader::new(answers),
        })
    }

    fn perform(&mut self, task: &Task) -> Result<Outcome> {
        let mut line = serde_json::to_string(task)?;
        line.push('\n');
        let stdin = self
            .child
            .stdin
            .as_mut()
            .context("The worker hears nothing")?;
        stdin.write_all(line.as_bytes())?;
        let mut answer = String::new();
        ensure!(
            self.answers.read_line(&mut answer)? > 0,
            "The worker has ended"
        );
        let outcome: Result<Outcome, String> = serde_json::from_str(&answer)?;
        outcome.map_err(|error| anyhow!("{}: {error}", task.mechanism().name()))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It ends when there are no more jobs.
        drop(self.child.stdin.take());
        if let Err(error) = self.child.wait() {
            eprintln!("Cannot end a worker: {error}");
        }
    }
}

/// A worker for each mechanism, so that each has rested as long as the others before its turn.
pub struct Team {
    workers: Vec<(Mechanism, Worker)>,
}

impl Team {
    /// Starts them; `config` has the calibration.
    pub fn start(programs: &Programs, config: &Path) -> Result<Self> {
        let program = std::env::current_exe()?;
        let library = std::path::absolute(&programs.library)?;
        let workers = Mechanism::ALL.into_iter().map(|mechanism| {
            let mut command = Command::new(&program);
            command.arg("--worker");
            if mechanism == Mechanism::Router {
                command
                    .env("LD_PRELOAD", &library)
                    .env("FARLANE_IO_CONFIG", config);
            }
            Ok((mechanism, Worker::start(command)?))
        });
        Ok(Self {
            workers: workers.collect::<Result<_>>()?,
        })
    }

    /// Has reads done.
    pub fn perform(&mut self, job: Job) -> Result<Outcome> {
        self.perform_task(&Task::Read(job))
    }

    /// Has something done.
    pub fn perform_task(&mut self, task: &Task) -> Result<Outcome> {
        let whose = task.mechanism();
        let worker = self
            .workers
            .iter_mut()
            .find(|(mechanism, _)| *mechanism == whose);
        worker.context("There is no such worker")?.1.perform(task)
    }
}
