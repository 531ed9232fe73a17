//! A network of this machine for guests and their peers: a network namespace with a bridge and
//! taps, in which programs of the guests' tree run unmodified.
//!
//! The namespace belongs to a process of its own and to whatever runs in it, and has no name: when
//! they have ended, however they have, the kernel takes it away with all that is in it. Its
//! processes see a `/sys` that shows this network.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::{ToSocketAddrs, UdpSocket};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::packages;
use crate::process::{Process, check_output};
use crate::scratch::Scratch;
use crate::tree::Tree;

/// The bridge that everything is on.
pub const BRIDGE: &str = "lan";

/// The address of this end.
pub const PEER: &str = "10.78.0.1";
/// The same with IPv6.
pub const PEER_6: &str = "fd78::1";

/// How long a command may take where nothing else is said.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);

/// Frames that a tap keeps for whoever reads it: more than the windows of a few flows, so that what
/// is lost is not lost here.
const TAP_FRAMES: u32 = 10_000;

/// Programs of the tree that are found by name in the network.
const PROGRAMS: &[&str] = &[
    "usr/bin/busybox",
    "usr/bin/curl",
    "usr/bin/iperf3",
    "usr/bin/nstat",
    "usr/bin/ping",
    "usr/bin/scp",
    "usr/bin/ss",
    "usr/bin/ssh",
    "usr/bin/ssh-keygen",
    "usr/bin/tcpdump",
    "usr/sbin/dnsmasq",
    "usr/sbin/ethtool",
    "usr/sbin/ip",
    "usr/sbin/tc",
];

/// A network. It is gone when it is dropped and what runs in it has ended.
#[derive(Debug)]
pub struct Network {
    holder: Process,
    /// Scripts that run the tree's programs through the tree's loader, where it has a tree.
    programs: Option<Scratch>,
    logs: PathBuf,
    started: AtomicU32,
}

/// A program that runs in a network. It is ended when it is dropped.
#[derive(Debug)]
pub struct Peer {
    /// The process.
    pub process: Process,
    /// What it prints goes here.
    pub output: PathBuf,
}

impl Network {
    /// Makes a network with a bridge, [`BRIDGE`], whose addresses are [`PEER`] and [`PEER_6`]. What
    /// its programs print goes to files in `logs`. Needs root.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new(tree: &Tree, logs: &Path) -> Result<Self> {
        let programs = Scratch::new()?;
        for program in PROGRAMS {
            write_script(tree, program, &programs)?;
        }
        Self::with_programs(Some(programs), logs)
    }

    /// The same with this machine's own programs, of which it needs `ip` (iproute2), and no tree.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn of_this_machine(logs: &Path) -> Result<Self> {
        Self::with_programs(None, logs)
    }

    fn with_programs(programs: Option<Scratch>, logs: &Path) -> Result<Self> {
        ensure!(
            packages::is_root(),
            "Only root can make a network namespace with taps: run this as root"
        );
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "--propagation", "private", "/bin/sh"]);
        command.args([
            "-c",
            "mount -t sysfs sysfs /sys && echo ready && exec sleep infinity",
        ]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut holder = Process::spawn("a network namespace", command)?;
        let stdout = holder.take_stdout().context("unshare has no output")?;
        let mut line = String::new();
        BufReader::new(stdout)
            .read_line(&mut line)
            .context("Cannot read what unshare says")?;
        ensure!(line == "ready\n", "Cannot make a network namespace");
        let network = Self {
            holder,
            programs,
            logs: logs.to_owned(),
            started: AtomicU32::new(0),
        };
        network.run(&format!(
            "ip link set lo up && ip link add {BRIDGE} type bridge && ip link set {BRIDGE} up && \
             ip address add {PEER}/24 dev {BRIDGE} && ip address add {PEER_6}/64 dev {BRIDGE} nodad"
        ))?;
        Ok(network)
    }

    /// Makes a tap on the bridge that stays when nobody has it open, frames with a virtio header.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn tap(&self, name: &str, is_multi_queue: bool) -> Result<()> {
        let queues = if is_multi_queue { "multi_queue" } else { "" };
        self.run(&format!(
            "ip tuntap add dev {name} mode tap vnet_hdr {queues} && \
             ip link set {name} txqueuelen {TAP_FRAMES} master {BRIDGE} && ip link set {name} up"
        ))?;
        Ok(())
    }

    /// The same command within the network.
    #[must_use]
    pub fn within(&self, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside
            .arg("--target")
            .arg(self.holder.pid().to_string())
            .args(["--net", "--mount"]);
        // nsenter starts in the root folder of the other mount namespace where it is told nothing.
        if let Some(folder) = command.get_current_dir() {
            inside.current_dir(folder);
        }
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside
    }

    /// A shell command within the network. The tree's programs are found there by name.
    #[must_use]
    pub fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut folders = OsString::new();
        if let Some(programs) = &self.programs {
            folders.push(programs.path());
            folders.push(":");
        }
        folders.push(path);
        command
            .args(["-c", line])
            .env("PATH", folders)
            .env("LC_ALL", "C");
        self.within(&command)
    }

    /// Runs a shell command within the network to its end, which must be exit status 0, and returns
    /// its standard output.
    ///
    /// # Errors
    /// When it fails or hangs.
    pub fn run(&self, line: &str) -> Result<String> {
        check_output(&format!("`{line}`"), self.shell(line), COMMAND_TIMEOUT)
    }

    /// Starts a shell command within the network.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, line: &str) -> Result<Peer> {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let program = line.split_whitespace().next().unwrap_or("program");
        let program = program.rsplit('/').next().unwrap_or(program);
        let output = self.logs.join(format!("peer-{number}-{program}.log"));
        let process = Process::spawn_logged(format!("`{line}`"), self.shell(line), &output)?;
        Ok(Peer { process, output })
    }

    /// A UDP socket of this process within the network.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn bind_udp(&self, address: impl ToSocketAddrs + Send) -> Result<UdpSocket> {
        let path = format!("/proc/{}/ns/net", self.holder.pid());
        let namespace = File::open(&path).with_context(|| format!("Cannot open {path}"))?;
        // A socket stays where it was made, and the thread that has gone there ends.
        let bind = || -> Result<UdpSocket> {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(UdpSocket::bind(address)?)
        };
        let bound = thread::scope(|scope| scope.spawn(bind).join());
        bound
            .ok()
            .context("The thread that binds a socket has panicked")?
            .context("Cannot bind a UDP socket in a network")
    }

    /// A file of the network's processes, such as one below `/proc/net` or `/sys/class/net`.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read_file(&self, path: &str) -> Result<String> {
        // Each process has the root of its mount namespace, and its own network below /proc.
        let from = match path.strip_prefix("/proc/net/") {
            Some(file) => format!("/proc/{}/net/{file}", self.holder.pid()),
            None => format!("/proc/{}/root{path}", self.holder.pid()),
        };
        fs::read_to_string(&from).with_context(|| format!("Cannot read {from}"))
    }
}

impl Peer {
    /// What it printed so far.
    #[must_use]
    pub fn so_far(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap_or_default()).into_owned()
    }
}

fn write_script(tree: &Tree, program: &str, folder: &Scratch) -> Result<()> {
    let path = Path::new(program);
    let name = path.file_name().context("A program has no name")?;
    let file = folder.join(name);
    let command = tree.program(program);
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<String> = words
        .map(|word| format!("'{}'", word.to_string_lossy().replace('\'', r"'\''")))
        .collect();
    let script = format!("#!/bin/sh\nexec {} \"$@\"\n", words.join(" "));
    fs::write(&file, script)
        .and_then(|()| fs::set_permissions(&file, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("Cannot write {}", file.display()))
}
