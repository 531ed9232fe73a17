//! A daemon's process, what it tells of itself, and waiting for it.

#![allow(clippy::unwrap_used)]

use rustix::process::{Pid, Signal, kill_process};
use std::fs::read_to_string;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// How long anything may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A process, killed when it is dropped.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    /// Starts it.
    ///
    /// # Panics
    /// It cannot be started.
    pub fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// It has gone.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Sends it SIGTERM, and waits for its exit code.
    ///
    /// # Panics
    /// It has gone.
    pub fn terminate(&mut self) -> Option<i32> {
        self.signal(Signal::TERM);
        self.0.wait().unwrap().code()
    }

    /// Kills it, and waits until it has gone.
    ///
    /// # Panics
    /// It cannot be killed.
    pub fn kill_and_wait(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Its threads, as folders (proc_pid_task(5)).
    fn threads(&self) -> impl Iterator<Item = PathBuf> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        threads.filter_map(|thread| Some(thread.ok()?.path()))
    }

    /// What its threads are called. One that ends meanwhile may be left out.
    ///
    /// # Panics
    /// It has gone.
    #[must_use]
    pub fn thread_names(&self) -> Vec<String> {
        let names = self.threads().map(|at| read_to_string(at.join("comm")));
        names.flatten().map(|name| name.trim_end().into()).collect()
    }

    /// Whether all of its threads sleep.
    ///
    /// # Panics
    /// It has gone.
    #[must_use]
    pub fn sleeps(&self) -> bool {
        let mut stats = self.threads().map(|at| read_to_string(at.join("stat")));
        stats.all(|stat| stat.is_ok_and(|stat| state(&stat) == 'S'))
    }
}

/// The state in a `stat` file: after the name, which is in parentheses (proc_pid_stat(5)).
///
/// # Panics
/// It is no such file's text.
#[must_use]
pub fn state(stat: &str) -> char {
    stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The metrics of a daemon that answers with them at `socket`.
///
/// # Panics
/// It does not.
#[must_use]
pub fn metrics(socket: &Path) -> String {
    farlane_daemon::metrics::ask(socket, PATIENCE).unwrap()
}

/// A sample, by the name of its family.
fn of_family(line: &str) -> String {
    let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap_or(line.len()));
    format!("{}{rest}", name.strip_suffix("_total").unwrap_or(name))
}

/// The value of the first of these metrics whose line begins so and has these labels.
///
/// # Panics
/// There is none.
#[must_use]
pub fn metric(metrics: &str, begin: &str, labels: &[(&str, &str)]) -> u64 {
    let labels: Vec<_> = labels.iter().map(|(k, v)| format!("{k}=\"{v}\"")).collect();
    let fits = |line: &&String| line.starts_with(begin) && labels.iter().all(|l| line.contains(l));
    // Counters are called by the names of their families.
    let samples: Vec<_> = metrics.lines().map(of_family).collect();
    let line = samples.iter().find(fits);
    let line = line.unwrap_or_else(|| panic!("no {begin} {labels:?} in {metrics}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

/// Waits until something holds.
///
/// # Panics
/// It does not in time.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The same, of what the caller's line says.
///
/// # Panics
/// It does not in time.
#[track_caller]
pub fn wait_until(holds: impl FnMut() -> bool) {
    until("it", holds);
}
