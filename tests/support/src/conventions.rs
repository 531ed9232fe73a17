//! What is true of every daemon, for the tests of each: who may connect to its sockets, what its
//! counters are labelled with, which signals end it, and what it leaves.

#![allow(clippy::unwrap_used)]

use crate::process::{Process, metrics, until};
use crate::reload::survives_who_asks;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

/// Permissions that no daemon gives by itself.
const MODE: u32 = 0o620;

/// A daemon that can be started.
#[derive(Debug)]
pub struct Daemon<'a> {
    /// Its program.
    pub program: &'a str,
    /// Its capabilities, as JSON.
    pub capabilities: &'a str,
    /// Its arguments, besides those that all daemons have.
    pub arguments: &'a [String],
    /// Whether they may be in a configuration file.
    pub by_file: bool,
    /// Whether it follows its file anew, over its control socket.
    pub follows: bool,
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

/// Each command line ends the program, with a message that has these words in it.
///
/// # Panics
/// It does not.
pub fn ends_with_messages(program: &str, runs: &[(Vec<&str>, &str)]) {
    for (arguments, message) in runs {
        let output = Command::new(program).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(text.contains(message), "{arguments:?}: {text}");
    }
}

impl Daemon<'_> {
    /// Starts it, and tries whether it does what all daemons do.
    ///
    /// # Panics
    /// It does not.
    pub fn keeps_the_conventions(&self) {
        let mut asked = Command::new(self.program);
        let output = asked.arg("--print-capabilities").output().unwrap();
        assert!(output.status.success());
        let capabilities = String::from_utf8(output.stdout).unwrap();
        assert_eq!(capabilities, format!("{}\n", self.capabilities));
        let beside = tempfile::tempdir().unwrap();
        let mut arguments = self.arguments.to_vec();
        let text = file_of(self.arguments);
        if self.by_file {
            let file = beside.path().join("options.toml");
            std::fs::write(&file, &text).unwrap();
            arguments = vec!["--config".to_owned(), file.display().to_string()];
        }
        let mut checked = Command::new(self.program);
        let output = checked.args(&arguments).arg("--check").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let made = self.sockets.iter().map(|name| self.folder.join(name));
        assert_eq!(made.filter(|socket| socket.exists()).count(), 0);

        let group = group(self.folder);
        let socket = self.folder.join("metrics");
        let told = beside.path().join("notify");
        let manager = UnixDatagram::bind(&told).unwrap();
        let mut command = Command::new(self.program);
        command
            .args(&arguments)
            .env("NOTIFY_SOCKET", &told)
            .arg("--metrics")
            .arg(&socket)
            .args(["--socket-group", &group.to_string()])
            .args(["--socket-mode", &format!("{MODE:o}")])
            .args(["--log-level", "warn"])
            .stdin(Stdio::null());
        let control = self.folder.join("control");
        if self.follows {
            command.arg("--control").arg(&control);
        }
        let mut daemon = Process::start(&mut command);
        // Who connects to a socket connects to one that is as it is to be; that of the counters is
        // made after the others.
        let first = counters(&mut daemon, &socket);
        let sockets = self.sockets.iter().copied().chain(["metrics"]);
        let sockets: Vec<_> = sockets.map(|name| self.folder.join(name)).collect();
        for socket in &sockets {
            let file = std::fs::symlink_metadata(socket).unwrap();
            let is = (file.gid(), file.mode() & 0o7777);
            assert_eq!(is, (group, MODE), "{}", socket.display());
        }
        let own = self.private.iter().copied();
        let private = own.chain(self.follows.then_some("control"));
        let private: Vec<_> = private.map(|name| self.folder.join(name)).collect();
        let own = rustix::process::getegid().as_raw();
        for socket in &private {
            let file = std::fs::symlink_metadata(socket).unwrap();
            let is = (file.gid(), file.mode() & 0o7777);
            assert_eq!(is, (own, 0o600), "{}", socket.display());
        }
        self.is_told(&first);
        assert_eq!(next_state(&manager), "READY=1");

        // Whoever is killed by a signal answers nobody afterwards.
        daemon.signal(Signal::HUP);
        self.is_told(&counters(&mut daemon, &socket));

        if self.follows {
            survives_who_asks(self.program, &control, &text);
            self.is_told(&counters(&mut daemon, &socket));
        }

        daemon.signal(Signal::TERM);
        let mut status = None;
        until("its end", || {
            status = daemon.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(
            status.and_then(|status| status.code()),
            Some(0),
            "{status:?}"
        );
        assert_eq!(next_state(&manager), "STOPPING=1");
        for socket in sockets.iter().chain(&private) {
            assert!(!socket.exists(), "{} is left", socket.display());
        }
    }

    /// Each line is a sample of this daemon, or what is said of one, and things have their names.
    fn is_told(&self, counters: &str) {
        let own = format!("{}_", self.prefix);
        for line in counters.lines().filter(|line| *line != "# EOF") {
            let sample = ["# HELP ", "# TYPE ", "# UNIT "].iter();
            let sample = sample.fold(line, |line, head| line.strip_prefix(head).unwrap_or(line));
            let is_of = [&own, "farlane_daemon_", "farlane_build"];
            let is_of = is_of.iter().any(|begin| sample.starts_with(begin));
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

/// Its counters. A socket that is there is not yet one that it listens at.
fn counters(daemon: &mut Process, socket: &Path) -> String {
    until("the daemon to listen", || {
        let ended = daemon.try_wait().unwrap();
        assert!(ended.is_none(), "it has ended with {ended:?}");
        UnixStream::connect(socket).is_ok()
    });
    metrics(socket)
}

/// What a service manager is told next.
fn next_state(manager: &UnixDatagram) -> String {
    let mut buffer = [0; 256];
    let bytes = manager.recv(&mut buffer).unwrap();
    let said = str::from_utf8(&buffer[..bytes]).unwrap();
    said.lines().next().unwrap_or_default().to_owned()
}

/// A configuration file that says what these options and their values say.
fn file_of(arguments: &[String]) -> String {
    let mut values = BTreeMap::<&str, Vec<String>>::new();
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        let option = word.strip_prefix("--").unwrap();
        let (option, value) = match option.split_once('=') {
            Some(both) => both,
            None => (option, words.next().unwrap().as_str()),
        };
        // Such a string is one of TOML, too.
        values.entry(option).or_default().push(format!("{value:?}"));
    }
    let lines = values.iter().map(|(option, values)| {
        let values = match &values[..] {
            [one] => one.clone(),
            all => format!("[{}]", all.join(", ")),
        };
        format!("{option} = {values}\n")
    });
    lines.collect()
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
