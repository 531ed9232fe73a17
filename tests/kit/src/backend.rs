//! Daemons of this machine that a scenario needs.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rustix::process::Signal;

use crate::process::{Process, describe, tail};

/// How long a daemon may take until its sockets exist, where guests and builds have the processors.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a daemon may take to end after SIGTERM, there: one that is slow is killed, which fails.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// Flag of a socket that listens in `/proc/PID/net/unix` (`proc_pid_net(5)`, `__SO_ACCEPTCON`).
const LISTENS: u32 = 1 << 16;

/// A daemon that serves UNIX sockets. It is ended when it is dropped.
#[derive(Debug)]
pub struct Backend {
    process: Process,
    log: PathBuf,
}

impl Backend {
    /// Starts a daemon and waits until it listens at its sockets. What it says goes to `log`.
    ///
    /// # Errors
    /// When it ends or hangs before it does.
    pub fn start(name: &str, mut command: Command, sockets: &[&Path], log: &Path) -> Result<Self> {
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "info");
        }
        // What a daemon that was killed has left is not served.
        let stale: Vec<Option<SocketFile>> = sockets.iter().map(|path| socket(path)).collect();
        let exist = || {
            let now = sockets.iter().map(|path| socket(path));
            now.zip(&stale)
                .all(|(now, stale)| now.is_some() && now != *stale)
        };
        let process = Process::spawn_logged(name, command, log)?;
        let pid = process.pid();
        let served = || exist() && sockets.iter().all(|path| is_listening(pid, path));
        let mut backend = Self {
            process,
            log: log.to_owned(),
        };
        let deadline = Instant::now() + START_TIMEOUT;
        while !served() {
            if let Some(status) = backend.process.wait(Duration::from_millis(5))? {
                bail!(
                    "{name} ended with {} before it served\n{}",
                    describe(status),
                    backend.last_words()
                );
            }
            if Instant::now() > deadline {
                bail!(
                    "{name} does not serve its sockets after {} s\n{}",
                    START_TIMEOUT.as_secs(),
                    backend.last_words()
                );
            }
        }
        Ok(backend)
    }

    /// The daemon's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// What the daemon has logged.
    #[must_use]
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Whether the daemon still runs.
    ///
    /// # Errors
    /// When that cannot be found out.
    pub fn is_running(&mut self) -> Result<bool> {
        self.process.is_running()
    }

    /// Lets the daemon run no further (SIGSTOP), which leaves whatever it was doing half done. It
    /// can be killed then.
    ///
    /// # Errors
    /// When it has ended.
    pub fn freeze(&mut self) -> Result<()> {
        self.process.signal(Signal::STOP)
    }

    /// Sends SIGHUP, which is nothing to a daemon.
    ///
    /// # Errors
    /// When it has ended.
    pub fn hang_up(&mut self) -> Result<()> {
        self.process.signal(Signal::HUP)
    }

    /// Ends the daemon with SIGKILL.
    ///
    /// # Errors
    /// When it survives.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        Ok(())
    }

    /// Ends the daemon with SIGTERM, which it must obey soon and with exit status 0.
    ///
    /// # Errors
    /// When it does not.
    pub fn stop(mut self) -> Result<()> {
        if !self.process.is_running()? {
            bail!(
                "{} has ended before it was told to\n{}",
                self.process.name(),
                self.last_words()
            );
        }
        let status = self.process.terminate(STOP_TIMEOUT)?;
        if !status.success() {
            bail!(
                "{} ended with {} after SIGTERM\n{}",
                self.process.name(),
                describe(status),
                self.last_words()
            );
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        last_words(&self.log)
    }
}

/// The last lines of a daemon's log, for messages.
#[must_use]
pub fn last_words(log: &Path) -> String {
    let text = String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned();
    format!("--- last lines of {}:\n{}", log.display(), tail(&text, 20))
}

/// What tells a socket's file from a later one: inode and time, as inodes are used again.
type SocketFile = (u64, i64, i64);

/// The file of a socket, if there is one.
fn socket(path: &Path) -> Option<SocketFile> {
    let file = fs::metadata(path).ok()?;
    let made = (file.ino(), file.mtime(), file.mtime_nsec());
    file.file_type().is_socket().then_some(made)
}

/// Whether a socket of that name listens, as the process sees it: its file exists before that.
fn is_listening(pid: u32, path: &Path) -> bool {
    let Ok(sockets) = fs::read_to_string(format!("/proc/{pid}/net/unix")) else {
        return false;
    };
    // Number, references, protocol, flags, type, state, inode, path.
    sockets.lines().skip(1).any(|line| {
        let mut words = line.split_whitespace();
        let flags = words.nth(3).map(|word| u32::from_str_radix(word, 16));
        let is_listening = flags.is_some_and(|flags| flags.is_ok_and(|f| f & LISTENS != 0));
        is_listening
            && words
                .nth(3)
                .is_some_and(|p| Path::new(p).file_name() == path.file_name())
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
    };

    use super::*;

    #[test]
    fn a_daemon_that_fails_at_its_start_is_quoted() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo no such device; exit 2"]);
        let socket = folder.path().join("socket");
        let error = Backend::start("a daemon", command, &[&socket], &folder.path().join("log"))
            .unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("a daemon ended with exit status 2") && error.contains("no such device"),
            "{error}"
        );
    }

    #[test]
    fn a_socket_that_exists_need_not_listen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let bound = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        );
        let bound = bound.unwrap();
        bind(&bound, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let own = std::process::id();
        assert!(socket(&path).is_some() && !is_listening(own, &path));
        listen(&bound, 1).unwrap();
        assert!(is_listening(own, &path));
    }

    #[test]
    fn the_socket_of_a_daemon_that_was_killed_is_not_taken_for_that_of_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        drop(UnixListener::bind(&socket).unwrap());
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "exit 2"]);
        let log = folder.path().join("log");
        assert!(Backend::start("a daemon", command, &[&socket], &log).is_err());
    }
}
