//! Where a program runs: in a guest, on this machine, or in a network of its own. The RDMA programs
//! are called the same way in both.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use farlane_kit::guest::{Guest, Job, Output, listens};
use farlane_kit::network::{Network, PEER, Peer};
use farlane_kit::process::Process;
use farlane_kit::protocol::Ending;

/// The ports that programs in guests use, one after the other.
const GUEST_PORTS: std::ops::Range<u16> = 18515..19515;

/// How many of them were given out.
static GUEST_PORTS_GIVEN: AtomicU16 = AtomicU16::new(0);

/// The ports that programs in networks of their own use, one after the other.
const NETWORK_PORTS: std::ops::Range<u16> = 20000..30000;

/// How many of them were given out.
static NETWORK_PORTS_GIVEN: AtomicU16 = AtomicU16::new(0);

/// How long a look at a running program takes at most.
const BRIEF: Duration = Duration::from_millis(2);

/// Over what a program talks RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// Farlane, through its launcher.
    Farlane,
    /// The kernel's software RoCE device.
    Rxe,
}

impl Over {
    /// A command line over this.
    pub fn command(self, line: &str) -> String {
        match self {
            Over::Farlane => format!("farlane-run {line}"),
            Over::Rxe => line.to_owned(),
        }
    }
}

/// Where a program runs.
pub trait Place: Sync {
    /// Starts a shell command.
    fn spawn(&self, line: &str) -> Result<Box<dyn Running + '_>>;
    /// A TCP port that a server may listen on.
    fn free_port(&self) -> Result<u16>;
    /// Whether something listens on a TCP port.
    fn is_listening(&self, port: u16) -> Result<bool>;
    /// The address at which a client finds a server that runs here.
    fn address(&self) -> Result<&str>;
    /// The text of a file, as programs that run here see it.
    fn read_file(&self, path: &str) -> Result<String>;
}

/// A program that runs; it is killed when it is dropped.
pub trait Running {
    /// Waits for its end.
    fn wait(self: Box<Self>, timeout: Duration) -> Result<Output>;
    /// Whether it has ended; may wait a few milliseconds for it.
    fn wait_briefly(&mut self) -> Result<bool>;
    /// What it printed so far.
    fn so_far(&self) -> String;
    /// Ends it, and what it has started, with SIGKILL.
    fn kill(&mut self) -> Result<()>;
}

impl Place for Guest {
    fn spawn(&self, line: &str) -> Result<Box<dyn Running + '_>> {
        Ok(Box::new(Guest::spawn(self, line)?))
    }

    fn free_port(&self) -> Result<u16> {
        Ok(guest_port())
    }

    fn is_listening(&self, port: u16) -> Result<bool> {
        Guest::is_listening(self, port)
    }

    fn address(&self) -> Result<&str> {
        Guest::address(self)
    }

    fn read_file(&self, path: &str) -> Result<String> {
        Guest::read_file(self, path)
    }
}

impl Running for Job<'_> {
    fn wait(self: Box<Self>, timeout: Duration) -> Result<Output> {
        Job::wait(*self, timeout)
    }

    fn wait_briefly(&mut self) -> Result<bool> {
        Ok(self.has_ended())
    }

    fn so_far(&self) -> String {
        Job::so_far(self)
    }

    fn kill(&mut self) -> Result<()> {
        self.signal(9)
    }
}

/// A TCP port of guests that no program was given just before.
pub fn guest_port() -> u16 {
    let given = GUEST_PORTS_GIVEN.fetch_add(1, Ordering::Relaxed);
    GUEST_PORTS.start + given % (GUEST_PORTS.end - GUEST_PORTS.start)
}

/// Whether the kernel's tables of a place say that something listens on a TCP port.
pub fn has_listener(place: &dyn Place, port: u16) -> Result<bool> {
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        if listens(&place.read_file(table)?, port) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// This machine: programs find `farlane-run`, and it finds the daemon's host socket.
pub struct Host {
    programs: PathBuf,
    socket: PathBuf,
    logs: PathBuf,
    started: AtomicU32,
    /// Whether programs share the memory that they register.
    share_memory: bool,
    /// As which other user they run.
    user: Option<u32>,
}

impl Host {
    /// Programs of this machine that use the daemon behind `socket`; `programs` is the folder of
    /// `farlane-run`, and what the programs print goes to files in `logs`.
    pub fn new(programs: &Path, socket: &Path, logs: &Path) -> Self {
        Self {
            programs: programs.into(),
            socket: socket.into(),
            logs: logs.into(),
            started: AtomicU32::new(0),
            share_memory: false,
            user: None,
        }
    }

    /// The same, whose programs run as another user, in the group of the same number alone.
    pub fn of_user(self, user: u32) -> Self {
        Self {
            user: Some(user),
            ..self
        }
    }

    /// The same, whose programs run with `farlane-run --share-memory`.
    pub fn sharing_memory(self) -> Self {
        Self {
            share_memory: true,
            ..self
        }
    }
}

impl Place for Host {
    fn spawn(&self, line: &str) -> Result<Box<dyn Running + '_>> {
        let line = &match self.share_memory {
            true => line.replacen("farlane-run", "farlane-run --share-memory", 1),
            false => line.to_owned(),
        };
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let program = line
            .split_whitespace()
            .find(|word| !matches!(*word, "farlane-run" | "--share-memory"))
            .and_then(|word| Path::new(word).file_name()?.to_str())
            .unwrap_or("program");
        let output = self.logs.join(format!("host-{number}-{program}.log"));
        let mut paths = vec![self.programs.clone()];
        paths.extend(std::env::split_paths(
            &std::env::var_os("PATH").unwrap_or_default(),
        ));
        let mut command = match self.user {
            None => Command::new("/bin/sh"),
            Some(user) => {
                let mut command = Command::new("setpriv");
                let [user, group] = ["reuid", "regid"].map(|id| format!("--{id}={user}"));
                command.args([&user, &group, "--clear-groups", "/bin/sh"]);
                command
            }
        };
        command
            .args(["-c", line])
            .env("FARLANE_SOCKET", &self.socket);
        command.env(
            "PATH",
            std::env::join_paths(paths).context("The path of farlane-run holds a colon")?,
        );
        let process = Process::spawn_logged(format!("`{line}`"), command, &output)?;
        Ok(Box::new(HostProgram { process, output }))
    }

    fn free_port(&self) -> Result<u16> {
        // Another program may take it before ours does: then the caller asks again.
        let listener =
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("Cannot find a free TCP port")?;
        Ok(listener
            .local_addr()
            .context("Cannot find a free TCP port")?
            .port())
    }

    fn is_listening(&self, port: u16) -> Result<bool> {
        has_listener(self, port)
    }

    fn address(&self) -> Result<&str> {
        Ok("127.0.0.1")
    }

    fn read_file(&self, path: &str) -> Result<String> {
        fs::read_to_string(path).with_context(|| format!("Cannot read {path}"))
    }
}

/// A process of this machine.
pub struct HostProgram {
    /// The process.
    pub process: Process,
    /// What it prints goes here.
    pub output: PathBuf,
}

impl Running for HostProgram {
    fn wait(mut self: Box<Self>, timeout: Duration) -> Result<Output> {
        let Some(status) = self.process.wait(timeout)? else {
            let seconds = timeout.as_secs();
            bail!(
                "{} did not end within {seconds} s; it said:\n{}",
                self.process.name(),
                self.so_far()
            );
        };
        let byte = |value: i32| u8::try_from(value).unwrap_or(u8::MAX);
        let ending = match (status.code(), status.signal()) {
            (Some(code), _) => Ending::Exited(byte(code)),
            (None, signal) => Ending::Signalled(byte(signal.unwrap_or_default())),
        };
        Ok(Output {
            stdout: self.so_far(),
            stderr: String::new(),
            ending,
        })
    }

    fn wait_briefly(&mut self) -> Result<bool> {
        Ok(self.process.wait(BRIEF)?.is_some())
    }

    fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        Ok(())
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap_or_default()).into_owned()
    }
}

impl Place for Network {
    fn spawn(&self, line: &str) -> Result<Box<dyn Running + '_>> {
        let Peer { process, output } = Network::spawn(self, line)?;
        Ok(Box::new(HostProgram { process, output }))
    }

    fn free_port(&self) -> Result<u16> {
        // Nobody else is there.
        let given = NETWORK_PORTS_GIVEN.fetch_add(1, Ordering::Relaxed);
        Ok(NETWORK_PORTS.start + given % (NETWORK_PORTS.end - NETWORK_PORTS.start))
    }

    fn is_listening(&self, port: u16) -> Result<bool> {
        has_listener(self, port)
    }

    fn address(&self) -> Result<&str> {
        Ok(PEER)
    }

    fn read_file(&self, path: &str) -> Result<String> {
        Network::read_file(self, path)
    }
}
