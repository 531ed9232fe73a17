//! A client of the QEMU machine protocol: JSON, a message a line.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::inbox::{Inbox, Missed};

/// How long QEMU may take for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A connection to one QEMU.
#[derive(Debug)]
pub struct Qmp {
    commands: Mutex<Commands>,
    inbox: Arc<Inbox<Received>>,
}

#[derive(Debug)]
struct Commands {
    stream: UnixStream,
    next_id: u64,
}

#[derive(Debug, Default)]
struct Received {
    greeted: bool,
    answers: Vec<Value>,
    events: Vec<Value>,
}

impl Qmp {
    /// Takes over the monitor's end of a connection.
    ///
    /// # Errors
    /// When the connection cannot be shared with the thread that reads it.
    pub fn new(stream: UnixStream) -> Result<Self> {
        let inbox = Arc::new(Inbox::<Received>::default());
        let lines = BufReader::new(stream.try_clone().context("Cannot share the QMP socket")?);
        let shared = Arc::clone(&inbox);
        thread::spawn(move || read_all(lines, &shared));
        Ok(Self {
            commands: Mutex::new(Commands { stream, next_id: 0 }),
            inbox,
        })
    }

    /// Ends the negotiation; QEMU takes commands from now on.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn start(&self) -> Result<()> {
        self.wait("its greeting", ANSWER_TIMEOUT, |received| {
            received.greeted.then_some(())
        })?;
        self.execute("qmp_capabilities", json!({}))?;
        Ok(())
    }

    /// Runs a command and returns what it returned.
    ///
    /// # Errors
    /// When QEMU refuses it (with QEMU's reason), does not answer, or has gone.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        let id = {
            let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
            let id = commands.next_id;
            commands.next_id += 1;
            let mut line =
                json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
            line.push('\n');
            commands
                .stream
                .write_all(line.as_bytes())
                .with_context(|| format!("Cannot send {command} to QEMU"))?;
            id
        };
        let answer = self.wait(command, ANSWER_TIMEOUT, |received| {
            let at = received
                .answers
                .iter()
                .position(|answer| answer["id"] == id)?;
            Some(received.answers.swap_remove(at))
        })?;
        match answer.get("error") {
            Some(error) => bail!(
                "QEMU refused {command}: {}",
                error["desc"].as_str().unwrap_or("no reason given")
            ),
            None => Ok(answer["return"].clone()),
        }
    }

    /// Waits for an event for which `wanted` holds, and takes it out of those that have come.
    ///
    /// # Errors
    /// When it does not come in time, or QEMU has gone.
    pub fn wait_event(
        &self,
        name: &str,
        timeout: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        self.wait(&format!("the event {name}"), timeout, |received| {
            let at = received
                .events
                .iter()
                .position(|event| event["event"] == name && wanted(&event["data"]))?;
            Some(received.events.swap_remove(at))
        })
    }

    /// Adds a device, given as QEMU's `-device` takes it in JSON.
    ///
    /// # Errors
    /// When QEMU refuses it.
    pub fn device_add(&self, device: Value) -> Result<()> {
        self.execute("device_add", device)?;
        Ok(())
    }

    /// Removes a device and waits until the guest has let go of it.
    ///
    /// # Errors
    /// When QEMU refuses, or the guest keeps the device.
    pub fn device_del(&self, id: &str, timeout: Duration) -> Result<()> {
        self.execute("device_del", json!({ "id": id }))?;
        self.wait_event("DEVICE_DELETED", timeout, |data| data["device"] == id)?;
        Ok(())
    }

    /// Runs a command of the monitor for people, for what has no other, and returns its text.
    ///
    /// # Errors
    /// When QEMU refuses it.
    pub fn human_command(&self, line: &str) -> Result<String> {
        let text = self.execute("human-monitor-command", json!({ "command-line": line }))?;
        let text = text.as_str().context("QEMU returned no text")?;
        Ok(text.to_owned())
    }

    /// Stops the guest's processors.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn stop(&self) -> Result<()> {
        self.execute("stop", json!({}))?;
        Ok(())
    }

    /// Lets the guest's processors run again.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn cont(&self) -> Result<()> {
        self.execute("cont", json!({}))?;
        Ok(())
    }

    /// Ends QEMU.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn quit(&self) -> Result<()> {
        self.execute("quit", json!({}))?;
        Ok(())
    }

    fn wait<T>(
        &self,
        what: &str,
        timeout: Duration,
        find: impl FnMut(&mut Received) -> Option<T>,
    ) -> Result<T> {
        match self.inbox.wait(timeout, find) {
            Ok(found) => Ok(found),
            Err(Missed::Closed) => bail!("QEMU ended while it was asked for {what}"),
            Err(Missed::TimedOut) => {
                bail!("QEMU did not give {what} within {} s", timeout.as_secs())
            }
        }
    }
}

fn read_all(lines: impl BufRead, inbox: &Inbox<Received>) {
    for line in lines.lines() {
        let Ok(line) = line else { break };
        let Ok(message) = serde_json::from_str::<Value>(&line) else {
            eprintln!("QEMU sent something that is no JSON: {line}");
            break;
        };
        inbox.with(|received| {
            if message.get("QMP").is_some() {
                received.greeted = true;
            } else if message.get("event").is_some() {
                received.events.push(message);
            } else {
                received.answers.push(message);
            }
        });
    }
    inbox.close();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake_qemu(lines: &'static [&'static str]) -> Qmp {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let mut commands = BufReader::new(theirs.try_clone().unwrap());
            for line in lines {
                if *line == "<" {
                    commands.read_line(&mut String::new()).unwrap();
                } else {
                    writeln!(&theirs, "{line}").unwrap();
                }
            }
        });
        Qmp::new(ours).unwrap()
    }

    #[test]
    fn answers_and_events_may_come_in_any_order() {
        let qmp = fake_qemu(&[
            r#"{"QMP": {}}"#,
            "<",
            r#"{"event": "RESUME"}"#,
            r#"{"return": {}, "id": 0}"#,
            "<",
            r#"{"event": "DEVICE_DELETED", "data": {"device": "x"}}"#,
            r#"{"return": {}, "id": 1}"#,
        ]);
        qmp.start().unwrap();
        qmp.device_del("x", Duration::from_secs(10)).unwrap();
    }

    #[test]
    fn a_refusal_carries_the_reason() {
        let qmp = fake_qemu(&[
            "<",
            r#"{"error": {"class": "GenericError", "desc": "no such device"}, "id": 0}"#,
        ]);
        let error = qmp.device_add(json!({})).unwrap_err();
        assert_eq!(error.to_string(), "QEMU refused device_add: no such device");
    }

    #[test]
    fn the_end_of_qemu_ends_the_wait() {
        let qmp = fake_qemu(&["<"]);
        assert!(qmp.stop().unwrap_err().to_string().contains("QEMU ended"));
    }
}
