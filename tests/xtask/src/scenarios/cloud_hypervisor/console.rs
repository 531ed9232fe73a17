//! The guest's serial port: a line each way, the host asks and the guest answers.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::conditions::{PATIENCE, wait_until};

/// What the guest says when it has started its devices.
pub const READY: &str = "ready";

/// How often it is looked whether the time is over.
const TICK: Duration = Duration::from_millis(100);

/// A connection to the serial port, for as long as the machine is not booted anew.
pub struct Console {
    socket: PathBuf,
    transcript: File,
    stream: UnixStream,
    /// What has come of the next line.
    line: Vec<u8>,
}

/// A device, as the guest says that it has started it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// `virtio-` and the device's id, or `nvme`.
    pub kind: String,
    /// How many queues it has, where it is virtio.
    pub queues: u32,
    /// The features that it and the guest have, where it is virtio.
    pub features: u64,
}

impl Console {
    /// Connects to a serial port; what is said there goes to `transcript`, too.
    ///
    /// # Errors
    /// Nobody listens there in time, or `still` fails meanwhile.
    pub fn connect(
        socket: &Path,
        transcript: &Path,
        mut still: impl FnMut() -> Result<()>,
    ) -> Result<Self> {
        let file = File::options().create(true).append(true).open(transcript);
        let file = file.with_context(|| format!("Cannot open {}", transcript.display()))?;
        let mut connected = None;
        wait_until("the VMM offers a serial port", || {
            still()?;
            connected = UnixStream::connect(socket).ok();
            Ok(connected.is_some())
        })?;
        let stream = connected.context("A serial port was found and is not there")?;
        stream.set_read_timeout(Some(TICK))?;
        Ok(Self {
            socket: socket.to_owned(),
            transcript: file,
            stream,
            line: Vec::new(),
        })
    }

    /// Waits until the guest has started its devices, and returns them.
    ///
    /// # Errors
    /// It has not, and says why, or says nothing.
    pub fn devices(&mut self) -> Result<Vec<Started>> {
        let mut devices = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let line = self.line(deadline)?.context("The guest has gone")?;
            if line == READY {
                return Ok(devices);
            }
            match line.strip_prefix("device ") {
                Some(device) => devices.push(Started::parse(device)?),
                None => bail!("The guest says: {line}"),
            }
        }
    }

    /// Asks the guest for something. Returns what it says behind its "ok".
    ///
    /// # Errors
    /// It says "bad", or nothing in time.
    pub fn ask(&mut self, what: &str) -> Result<String> {
        writeln!(self.transcript, "> {what}")?;
        self.stream
            .write_all(format!("{what}\n").as_bytes())
            .context("Cannot write to the serial port")?;
        let line = self.line(Instant::now() + PATIENCE);
        let line = line
            .and_then(|line| line.context("The guest has gone"))
            .with_context(|| format!("Asked for {what}"))?;
        match line.strip_prefix("ok ") {
            Some(rest) => Ok(rest.to_owned()),
            None => bail!("Asked for {what}, the guest says: {line}"),
        }
    }

    /// Waits until the VMM closes this serial port, as it does when the machine is booted anew, and
    /// connects to the next one.
    ///
    /// # Errors
    /// It does not, or the guest says something.
    pub fn follow(&mut self, transcript: &Path, still: impl FnMut() -> Result<()>) -> Result<()> {
        if let Some(line) = self.line(Instant::now() + PATIENCE)? {
            bail!("The guest was to be booted anew, and says: {line}");
        }
        *self = Self::connect(&self.socket.clone(), transcript, still)?;
        Ok(())
    }

    /// The next line, `None` at the end of the connection.
    fn line(&mut self, deadline: Instant) -> Result<Option<String>> {
        loop {
            let mut byte = [0];
            match self.stream.read(&mut byte) {
                Ok(0) => return Ok(None),
                Ok(_) if byte == *b"\n" => {
                    let line = String::from_utf8_lossy(&self.line).into_owned();
                    self.line.clear();
                    writeln!(self.transcript, "{line}")?;
                    return Ok(Some(line));
                }
                Ok(_) => self.line.extend(byte),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() > deadline {
                        bail!(
                            "The guest says nothing more than {:?} in {} s",
                            String::from_utf8_lossy(&self.line),
                            PATIENCE.as_secs()
                        );
                    }
                }
                Err(error) => return Err(error).context("Cannot read from the serial port"),
            }
        }
    }
}

impl Started {
    /// Of a line such as `virtio-2 slot 4 queues 2 features 0x170007e44`.
    fn parse(line: &str) -> Result<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        let behind = |name: &str| {
            let at = words.iter().position(|word| *word == name)?;
            words.get(at + 1).copied()
        };
        let features = behind("features").and_then(|word| word.strip_prefix("0x"));
        Ok(Self {
            kind: words.first().copied().unwrap_or_default().to_owned(),
            queues: behind("queues").map_or(Ok(0), str::parse)?,
            features: features.map_or(Ok(0), |word| u64::from_str_radix(word, 16))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_guest_says_of_a_device_is_read() {
        let disk = Started::parse("virtio-2 slot 4 queues 2 features 0x170007e44").unwrap();
        assert_eq!(
            disk,
            Started {
                kind: "virtio-2".into(),
                queues: 2,
                features: 0x1_7000_7e44
            }
        );
        assert_eq!(Started::parse("nvme slot 6").unwrap().kind, "nvme");
        assert!(Started::parse("virtio-2 queues x").is_err());
    }
}
