//! One Cloud Hypervisor: its process, its guest's serial port, and its API.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use farlane_kit::process::{Process, describe, tail};
use serde_json::Value;

use super::at_hand::AtHand;
use super::console::{Console, Started};
use crate::run::Run;

/// How long the API may take for an answer, and the process to end when it is told to.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What it says when one of its threads has died.
const PANICKED: &str = "panicked";

/// Processors of the VM, and with that the most queues of a disk and pairs of an interface. The
/// guest runs on the first one.
pub const PROCESSORS: u32 = 2;

/// A VM under Cloud Hypervisor. It is ended when it is dropped.
pub struct Vmm {
    process: Process,
    /// What it has said.
    log: PathBuf,
    transcript: PathBuf,
    api: PathBuf,
    console: Console,
    devices: Vec<Started>,
}

impl Vmm {
    /// Starts the guest with further words on the command line, and waits until it has started its
    /// devices. `name` is that of the files.
    ///
    /// # Errors
    /// It does not come so far.
    pub fn boot(run: &Run<'_>, at_hand: &AtHand, name: &str, words: &[OsString]) -> Result<Self> {
        let path = |what: &str| run.path(&format!("{name}-{what}"));
        let (api, serial) = (path("api"), path("serial"));
        let log = run.logs().join(format!("{name}-vmm.log"));
        let transcript = run.logs().join(format!("{name}-guest.log"));
        let mut command = Command::new(&at_hand.program);
        command.arg("-v");
        command.args(["--cpus", &format!("boot={PROCESSORS}")]);
        command.args(["--memory", "size=128M,shared=on", "--console", "off"]);
        command.arg("--kernel").arg(&at_hand.guest);
        command
            .arg("--serial")
            .arg(format!("socket={}", serial.display()));
        command
            .arg("--api-socket")
            .arg(format!("path={}", api.display()));
        command.args(words);
        let mut process = Process::spawn_logged("cloud-hypervisor", command, &log)?;
        let booted = Console::connect(&serial, &transcript, || is_alive(&mut process)).and_then(
            |mut console| {
                let devices = console.devices()?;
                Ok((console, devices))
            },
        );
        let (console, devices) = booted.map_err(|error| explained(error, &log))?;
        Ok(Self {
            process,
            log,
            transcript,
            api,
            console,
            devices,
        })
    }

    /// The devices that the guest has started.
    pub fn devices(&self) -> &[Started] {
        &self.devices
    }

    /// Asks the guest for something. Returns what it says behind its "ok".
    ///
    /// # Errors
    /// It says "bad", or nothing in time.
    pub fn ask(&mut self, what: &str) -> Result<String> {
        let answer = self.console.ask(what);
        answer.map_err(|error| explained(error, &self.log))
    }

    /// Has the guest boot its machine anew, and waits until it has started its devices again.
    ///
    /// # Errors
    /// It does not come so far.
    pub fn reboot(&mut self) -> Result<()> {
        self.ask("reboot")?;
        let process = &mut self.process;
        let followed = self
            .console
            .follow(&self.transcript, || is_alive(process))
            .and_then(|()| self.console.devices());
        self.devices = followed.map_err(|error| explained(error, &self.log))?;
        Ok(())
    }

    /// Stops the VM where it is.
    ///
    /// # Errors
    /// The VMM refuses, or does not say that it is so.
    pub fn pause(&self) -> Result<()> {
        self.request("PUT", "vm.pause")?;
        self.is("Paused")
    }

    /// Lets a paused VM go on.
    ///
    /// # Errors
    /// The VMM refuses, or does not say that it is so.
    pub fn resume(&self) -> Result<()> {
        self.request("PUT", "vm.resume")?;
        self.is("Running")
    }

    /// Ends the VMM, none of whose threads has died.
    ///
    /// # Errors
    /// It does not end, or not well.
    pub fn end(mut self) -> Result<()> {
        self.request("PUT", "vmm.shutdown")?;
        let status = self.process.wait(TIMEOUT)?;
        let status = status.context("Cloud Hypervisor does not end")?;
        let said = String::from_utf8_lossy(&std::fs::read(&self.log)?).into_owned();
        ensure!(
            status.success() && !said.contains(PANICKED),
            "Cloud Hypervisor: {}\n{}",
            describe(status),
            last_words(&self.log)
        );
        Ok(())
    }

    /// The VM is in this state.
    fn is(&self, state: &str) -> Result<()> {
        let said = self.request("GET", "vm.info")?;
        let info: Value = serde_json::from_str(&said).context("vm.info is no JSON")?;
        ensure!(
            info["state"] == state,
            "The VM is {}, not {state}",
            info["state"]
        );
        Ok(())
    }

    /// Makes a request of the API (HTTP over a UNIX socket). Returns the body of the answer.
    fn request(&self, method: &str, what: &str) -> Result<String> {
        let answer = self
            .exchange(method, what)
            .with_context(|| format!("{method} {what}"))
            .map_err(|error| explained(error, &self.log))?;
        ensure!(
            (200..300).contains(&answer.status),
            "{method} {what}: status {}: {}\n{}",
            answer.status,
            answer.body,
            last_words(&self.log)
        );
        Ok(answer.body)
    }

    fn exchange(&self, method: &str, what: &str) -> Result<Answer> {
        let mut stream = UnixStream::connect(&self.api)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let head = format!("{method} /api/v1/{what} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        stream.write_all(head.as_bytes())?;
        Answer::read(&mut BufReader::new(stream))
    }
}

/// An answer of the API.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: u16,
    body: String,
}

impl Answer {
    fn read(from: &mut impl BufRead) -> Result<Self> {
        let mut line = String::new();
        from.read_line(&mut line)?;
        let status = line.split_whitespace().nth(1).map(str::parse);
        let status = status.with_context(|| format!("No status in {line:?}"))??;
        let mut length = 0;
        loop {
            line.clear();
            if from.read_line(&mut line)? == 0 {
                bail!("The answer ends in its head");
            }
            let Some((name, value)) = line.split_once(':') else {
                break;
            };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse()?;
            }
        }
        let mut body = String::new();
        from.take(length).read_to_string(&mut body)?;
        Ok(Self { status, body })
    }
}

fn is_alive(process: &mut Process) -> Result<()> {
    match process.wait(Duration::ZERO)? {
        None => Ok(()),
        Some(status) => bail!("Cloud Hypervisor has ended: {}", describe(status)),
    }
}

/// The same error, with what the VMM has said below it.
fn explained(error: anyhow::Error, log: &Path) -> anyhow::Error {
    anyhow!("{error:#}\n{}", last_words(log))
}

fn last_words(log: &Path) -> String {
    let said = String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned();
    format!(
        "--- last lines of {}:\n{}\n---",
        log.display(),
        tail(&said, 12)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_the_api_is_read_to_its_end_and_no_further() {
        let mut said = &b"HTTP/1.1 200 \r\nServer: x\r\nContent-Length: 4\r\n\r\n{\"a\"more"[..];
        let answer = Answer::read(&mut said).unwrap();
        assert_eq!((answer.status, answer.body.as_str()), (200, "{\"a\""));
        let answer = Answer::read(&mut &b"HTTP/1.1 204 No Content\r\n\r\n"[..]).unwrap();
        assert_eq!((answer.status, answer.body.as_str()), (204, ""));
        assert!(Answer::read(&mut &b"HTTP/1.1 200 \r\nServer: x\r\n"[..]).is_err());
    }
}
