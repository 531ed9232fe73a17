//! Two programs that talk to each other while something happens.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::Output;
use farlane_kit::protocol::Ending;

use super::facts::counters;
use crate::conditions::{PATIENCE, wait_until};
use crate::place::{Place, Running};
use crate::run::Run;

/// A counter of the backend, and how much it has to grow until programs are in the middle of it.
#[derive(Clone, Copy)]
pub struct Flow(&'static str, u64);

/// RDMA writes and sends.
pub const WRITES: Flow = Flow("bytes_out", 4 << 20);
/// RDMA reads.
pub const READS: Flow = Flow("bytes_in", 4 << 20);
/// Completion events.
pub const EVENTS: Flow = Flow("events", 100);

/// A line behind all that a program says: when it ended, by the clock of where it ran.
const ENDED: &str = "ended at ";

/// A server and its client.
pub struct Talk<'a> {
    command: String,
    pub server: Box<dyn Running + 'a>,
    pub client: Box<dyn Running + 'a>,
}

impl<'a> Talk<'a> {
    /// Starts both, by a whole command line but for the port and the server's address.
    pub fn start(command: &str, server: &'a dyn Place, client: &'a dyn Place) -> Result<Self> {
        let port = server.free_port()?;
        let line = format!("{command} -p {port}");
        let mut serving = server.spawn(&timed(&line))?;
        let listens = || {
            ensure!(
                !serving.wait_briefly()?,
                "It has ended:\n{}",
                serving.so_far()
            );
            server.is_listening(port)
        };
        wait_until("it listens", listens).with_context(|| format!("The server of `{command}`"))?;
        let asking = client.spawn(&timed(&format!("{line} {}", server.address()?)))?;
        Ok(Self {
            command: command.to_owned(),
            server: serving,
            client: asking,
        })
    }

    /// Starts both and waits until they are in the middle of it: until the backend has counted
    /// enough.
    pub fn flowing(
        run: &Run<'_>,
        flow: Flow,
        command: &str,
        server: &'a dyn Place,
        client: &'a dyn Place,
    ) -> Result<Self> {
        let mut talk = Self::start(command, server, client)?;
        talk.wait_flow(run, flow)?;
        ensure!(talk.runs()?, "`{command}` ended early: {}", talk.said());
        Ok(talk)
    }

    /// Waits until more has flowed than now, or one of them has ended.
    pub fn wait_flow(&mut self, run: &Run<'_>, flow: Flow) -> Result<()> {
        let Flow(counter, amount) = flow;
        let begin = counters(run)?.get(counter)?;
        let grown = || Ok(!self.runs()? || counters(run)?.get(counter)? >= begin + amount);
        let flows = wait_until("data flows", grown);
        flows.with_context(|| format!("`{}`: {}", self.command, self.said()))
    }

    /// Whether both run.
    pub fn runs(&mut self) -> Result<bool> {
        Ok(!self.server.wait_briefly()? && !self.client.wait_briefly()?)
    }

    /// Both end by themselves, and well.
    pub fn succeed(self) -> Result<()> {
        let what = format!("`{}`, which nobody disturbed", self.command);
        for (side, program) in [("client", self.client), ("server", self.server)] {
            let output = program.wait(PATIENCE).with_context(|| what.clone())?;
            output.check(format_args!("The {side} of {what}"))?;
        }
        Ok(())
    }

    fn said(&self) -> String {
        let (server, client) = (self.server.so_far(), self.client.so_far());
        format!("the server said:\n{server}\nand the client:\n{client}")
    }
}

/// A program that has lost its peer or its device ends by itself, soon, and says that it failed.
/// Returns how long it took.
pub fn ends_in_error(program: Box<dyn Running + '_>) -> Result<(Duration, Output)> {
    let begin = Instant::now();
    let output = program.wait(PATIENCE)?;
    let by_itself = matches!(output.ending, Ending::Exited(code) if code != 0);
    ensure!(
        by_itself,
        "A program whose transfer was cut off ended with {}:\n{}",
        output.how(),
        output.all()
    );
    Ok((begin.elapsed(), output))
}

/// A program was killed, and did not end otherwise.
pub fn was_killed(program: Box<dyn Running + '_>) -> Result<()> {
    let output = program.wait(PATIENCE)?;
    ensure!(
        output.ending == Ending::Signalled(9),
        "A killed program ended with {}:\n{}",
        output.how(),
        output.all()
    );
    Ok(())
}

/// Ends a program that may be about to end in an error by itself.
pub fn end(mut program: Box<dyn Running + '_>) -> Result<()> {
    // One that has ended cannot be killed.
    let killed = program.kill();
    let output = program.wait(PATIENCE)?;
    let in_error = matches!(output.ending, Ending::Exited(code) if code != 0);
    ensure!(
        in_error || killed.is_ok() && output.ending == Ending::Signalled(9),
        "A program that had lost its device ended with {}:\n{}",
        output.how(),
        output.all()
    );
    Ok(())
}

/// When a program ended, by the clock of where it ran.
pub fn ended_at(output: &Output) -> Result<f64> {
    let line = output.stdout.lines().find_map(|l| l.strip_prefix(ENDED));
    let at = line.with_context(|| format!("No time in:\n{}", output.all()))?;
    Ok(at.trim().parse()?)
}

fn timed(command: &str) -> String {
    format!("{command}; code=$?; read up rest </proc/uptime; echo \"{ENDED}$up\"; exit $code")
}
