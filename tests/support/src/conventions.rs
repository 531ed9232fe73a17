//! What is true of every daemon, for the tests of each: who may connect to its sockets, what its
//! counters are labelled with, which signals end it, and what it leaves.

#![allow(clippy::unwrap_used)]

use rustix::process::{Pid, Signal, kill_process};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Permissions that no daemon gives by itself.
const MODE: u32 = 0o620;

/// A daemon that can be started.
#[derive(Debug)]
pub struct Daemon<'a> {
    /// Its program.
    pub program: &'a str,
    /// Its arguments, besides those that all daemons have.
    pub arguments: &'a [String],
    /// Where its sockets are, and nobody else's.
    pub folder: &'a Path,
    /// Their names in it.
    pub sockets: &'a [&'a str],
    /// Names of further ones, which stay the daemon's own user's whatever is said of the others.
    pub private: &'a [&'a str],
    /// How its counters begin.
    pub prefix: &'a str,
    /// The label of a thing and what the thing is called, where its counters are of several things.
    pub label: Option<(&'a str, &'a str)>,
}

/// Ended when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Waits until something is there.
    fn wait<T>(&mut self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look() {
                return found;
            }
            let ended = self.0.try_wait().unwrap();
            assert!(ended.is_none(), "{what}: it has ended with {ended:?}");
            assert!(Instant::now() < end, "{what}: in vain");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its counters. A socket that is there is not yet one that it listens at: it is tried again.
    fn counters(&mut self, socket: &Path) -> String {
        let mut stream = self.wait("connect", || UnixStream::connect(socket).ok());
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    fn end(mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Daemon<'_> {
    /// Starts it, and tries whether it does what all daemons do.
    ///
    /// # Panics
    /// It does not.
    pub fn keeps_the_conventions(&self) {
        let group = group(self.folder);
        let metrics = self.folder.join("metrics");
        let child = Command::new(self.program)
            .args(self.arguments)
            .arg("--metrics")
            .arg(&metrics)
            .args(["--socket-group", &group.to_string()])
            .args(["--socket-mode", &format!("{MODE:o}")])
            .args(["--log-level", "warn"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut daemon = Running(child);
        // Who connects to a socket connects to one that is as it is to be; that of the counters is
        // made after the others.
        let counters = daemon.counters(&metrics);
        let sockets = self.sockets.iter().copied().chain(["metrics"]);
        let sockets: Vec<_> = sockets.map(|name| self.folder.join(name)).collect();
        for socket in &sockets {
            let file = std::fs::symlink_metadata(socket).unwrap();
            let is = (file.gid(), file.mode() & 0o7777);
            assert_eq!(is, (group, MODE), "{}", socket.display());
        }
        let private: Vec<_> = self.private.iter().map(|n| self.folder.join(n)).collect();
        let own = rustix::process::getegid().as_raw();
        for socket in &private {
            let file = std::fs::symlink_metadata(socket).unwrap();
            let is = (file.gid(), file.mode() & 0o7777);
            assert_eq!(is, (own, 0o600), "{}", socket.display());
        }
        self.is_told(&counters);

        // Whoever is killed by a signal answers nobody afterwards.
        daemon.signal(Signal::HUP);
        self.is_told(&daemon.counters(&metrics));

        daemon.signal(Signal::TERM);
        let status = daemon.end();
        assert_eq!(status.code(), Some(0), "{status}");
        for socket in sockets.iter().chain(&private) {
            assert!(!socket.exists(), "{} is left", socket.display());
        }
    }

    /// Each line is a sample of this daemon, or what is said of one, and things have their names.
    fn is_told(&self, counters: &str) {
        let own = format!("{}_", self.prefix);
        for line in counters.lines() {
            let sample = line.strip_prefix("# HELP ").unwrap_or(line);
            let is_of = sample.starts_with(&own) || sample.starts_with("farlane_daemon_");
            assert!(is_of && sample.contains(' '), "{line:?}");
        }
        if let Some((label, name)) = self.label {
            let escaped = name.replace('\\', "\\\\").replace('"', "\\\"");
            let named = format!("{label}=\"{escaped}\"");
            let is_named = |line: &str| line.starts_with(&own) && line.contains(&named);
            assert!(counters.lines().any(is_named), "no {named} in {counters}");
        }
    }
}

/// A group to which a file of this folder can be given: not this user's, where it has others.
fn group(folder: &Path) -> u32 {
    let own = rustix::process::getegid().as_raw();
    let file = folder.join("of a group");
    std::fs::write(&file, "").unwrap();
    let other = (own + 1..own + 10)
        .find(|&group| std::os::unix::fs::chown(&file, None, Some(group)).is_ok());
    std::fs::remove_file(&file).unwrap();
    other.unwrap_or(own)
}
