//! A command that runs in a guest.

use std::time::Duration;

use anyhow::{Result, anyhow};

use crate::agent::Output;
use crate::guest::Guest;
use crate::process::tail;

/// A command that runs in a guest. It is killed when it is dropped.
#[derive(Debug)]
pub struct Job<'a> {
    pub(crate) guest: &'a Guest,
    pub(crate) id: u32,
    pub(crate) command: String,
    pub(crate) ended: bool,
}

impl Job<'_> {
    /// Waits for the command's end.
    ///
    /// # Errors
    /// When it has not ended within `timeout`: it is killed then.
    pub fn wait(mut self, timeout: Duration) -> Result<Output> {
        match self.guest.agent.wait(self.id, timeout) {
            Ok(Some(output)) => {
                self.ended = true;
                Ok(output)
            }
            Ok(None) => {
                let alive = if self.guest.agent.answers(Duration::from_secs(5)) {
                    "answers"
                } else {
                    "hangs too"
                };
                let error = anyhow!(
                    "`{}` did not end within {} s (the agent {alive}); it said:\n{}",
                    self.command,
                    timeout.as_secs(),
                    tail(&self.so_far(), 10)
                );
                Err(self.guest.failure(error))
            }
            Err(error) => {
                self.ended = true;
                Err(self
                    .guest
                    .failure(error.context(format!("`{}` was lost", self.command))))
            }
        }
    }

    /// Waits until what the command printed holds for `wanted`.
    ///
    /// # Errors
    /// When that is not so within `timeout`, or the command ends before.
    pub fn wait_output(&self, timeout: Duration, wanted: impl Fn(&str) -> bool) -> Result<()> {
        let found = self.guest.agent.wait_output(self.id, timeout, wanted);
        if !found.map_err(|error| self.guest.failure(error))? {
            let error = anyhow!(
                "`{}` did not say what was awaited, but:\n{}",
                self.command,
                tail(&self.so_far(), 10)
            );
            return Err(self.guest.failure(error));
        }
        Ok(())
    }

    /// Whether the command has ended; [`Job::wait`] returns at once then.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.guest.agent.has_ended(self.id)
    }

    /// What the command printed so far.
    #[must_use]
    pub fn so_far(&self) -> String {
        self.guest.agent.so_far(self.id)
    }

    /// Sends a signal (9 is SIGKILL) to all processes of the command.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: u8) -> Result<()> {
        self.guest.agent.signal(self.id, signal)
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.guest.agent.abandon(self.id);
        }
    }
}
