//! Child processes that never outlive their purpose.
//!
//! Every child leads a process group of its own and is ended, group and all, when its [`Process`]
//! is dropped. When this process is told to end (Ctrl-C, SIGTERM, SIGHUP) [`end_all_on_signals`]
//! ends them; when it dies without a chance to act, the kernel does (`PR_SET_PDEATHSIG`).

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{
    Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio,
};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsRawFd;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open};

use crate::compare::cpu;
use crate::scratch;

/// How long a child gets to end after SIGTERM, where nothing else is said.
const GRACE: Duration = Duration::from_secs(3);

/// The children that are not reaped, by process id. Held over every spawn, reap and signal: a
/// number in it is never that of a stranger, and no child appears after the last sweep of
/// [`end_all_on_signals`].
static CHILDREN: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

/// One child process, and all that it starts in its process group.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    pidfd: OwnedFd,
    group: bool,
    status: Option<ExitStatus>,
    /// What it has used, once it has ended.
    used: Duration,
}

/// How a child is set up, besides its [`Command`].
#[derive(Debug, Default)]
pub struct Setup<'a> {
    /// File descriptors that the child inherits under their numbers here.
    pub inherit: Vec<&'a OwnedFd>,
    /// The child stays in our process group, so that it can read from the terminal.
    pub foreground: bool,
}

impl Process {
    /// Starts a child.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(name: impl Into<String>, command: Command) -> Result<Self> {
        Self::spawn_with(name, command, &Setup::default())
    }

    /// Starts a child with all its output going to the end of a file.
    ///
    /// # Errors
    /// When the file cannot be opened or the child not be started.
    pub fn spawn_logged(name: impl Into<String>, mut command: Command, log: &Path) -> Result<Self> {
        let file = File::options().create(true).append(true).open(log);
        let file = file.with_context(|| format!("Cannot open {}", log.display()))?;
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file);
        Self::spawn(name, command)
    }

    /// Starts a child with a special setup.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn_with(
        name: impl Into<String>,
        mut command: Command,
        setup: &Setup<'_>,
    ) -> Result<Self> {
        let name = name.into();
        let parent = rustix::process::getpid();
        let inherit: Vec<i32> = setup.inherit.iter().map(|fd| fd.as_raw_fd()).collect();
        let group = !setup.foreground;
        if group {
            command.process_group(0);
        }
        // SAFETY: The closure runs between fork and exec and makes only async-signal-safe calls:
        // prctl, getppid, pthread_sigmask and fcntl (F_SETFD takes no pointer). It owns its vector
        // and neither allocates nor locks.
        unsafe {
            command.pre_exec(move || {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                if rustix::process::getppid() != Some(parent) {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                unblock_signals()?;
                for fd in &inherit {
                    if libc::fcntl(*fd, libc::F_SETFD, 0) < 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let program = command.get_program().to_string_lossy().into_owned();
        let child = spawn_from_lasting_thread(command)
            .with_context(|| format!("Cannot start {name} ({program})"))?;
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())
            .context("Cannot open a pidfd")?;
        Ok(Self {
            name,
            child,
            pidfd,
            group,
            status: None,
            used: Duration::ZERO,
        })
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The name given at the start, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The child's piped standard input, once.
    pub fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// The child's piped standard output, once.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// The child's piped error output, once.
    pub fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.child.stderr.take()
    }

    /// Waits until the child has ended; `None` when it has not within `timeout`.
    ///
    /// # Errors
    /// When waiting fails.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + timeout;
        while self.status.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).context("The timeout is too long")?;
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&left)) {
                Ok(0) => return Ok(None),
                Ok(_) => self.reap()?,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("Cannot wait for a child"),
            }
        }
        Ok(self.status)
    }

    /// CPU time of the child, and of those of its descendants that were waited for; nothing as long
    /// as it runs. What it has left in its group is not in it.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        self.used
    }

    /// Whether the child still runs.
    ///
    /// # Errors
    /// When waiting fails.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.wait(Duration::ZERO)?.is_none())
    }

    /// Sends a signal to the child alone.
    ///
    /// # Errors
    /// When the child has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        let _children = children();
        if self.status.is_some() {
            bail!("{} has ended already", self.name);
        }
        kill_process(Pid::from_child(&self.child), signal)
            .with_context(|| format!("Cannot signal {}", self.name))
    }

    /// Asks the child to end (SIGTERM) and waits for it; after `grace` it is an error, and the
    /// child is killed.
    ///
    /// # Errors
    /// When the child does not end in time.
    pub fn terminate(&mut self, grace: Duration) -> Result<ExitStatus> {
        if self.is_running()? {
            self.signal(Signal::TERM)?;
        }
        if let Some(status) = self.wait(grace)? {
            return Ok(status);
        }
        self.kill()?;
        Err(anyhow!(
            "{} did not end within {} s after SIGTERM",
            self.name,
            grace.as_secs()
        ))
    }

    /// Ends the child and its process group at once (SIGKILL).
    ///
    /// # Errors
    /// When waiting for it fails.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        {
            let _children = children();
            if self.status.is_none() {
                end_one(Pid::from_child(&self.child), self.group);
            }
        }
        let status = self.wait(Duration::from_secs(30))?;
        status.with_context(|| format!("{} survives SIGKILL", self.name))
    }

    /// Takes the status of the child, which has ended, and ends what it left in its group. In this
    /// order: as long as the child is not reaped, the number of its group is not given to a
    /// stranger.
    fn reap(&mut self) -> Result<()> {
        let mut children = children();
        let pid = Pid::from_child(&self.child);
        if self.group {
            match kill_process_group(pid, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("Cannot end the children of {}", self.name));
                }
            }
        }
        let used = cpu::of_ended(pid.as_raw_nonzero().get());
        if let Some(status) = self
            .child
            .try_wait()
            .with_context(|| format!("Cannot reap {}", self.name))?
        {
            children.remove(&pid.as_raw_nonzero().get());
            self.status = Some(status);
            self.used = used.unwrap_or_default();
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.is_running(), Ok(false)) {
            return;
        }
        if self.terminate(GRACE).is_err()
            && let Err(error) = self.kill()
        {
            eprintln!("{error:#}");
        }
    }
}

/// Runs a command to its end and returns what it printed.
///
/// # Errors
/// When it cannot be started, or does not end within `timeout` (it is ended then).
pub fn output(name: &str, mut command: Command, timeout: Duration) -> Result<Output> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut process = Process::spawn(name, command)?;
    let stdout = process.take_stdout().map(read_in_thread);
    let stderr = process.take_stderr().map(read_in_thread);
    let status = match process.wait(timeout)? {
        Some(status) => status,
        None => {
            process.kill()?;
            bail!("{name} did not end within {} s", timeout.as_secs());
        }
    };
    Ok(Output {
        status,
        stdout: join_reader(stdout)?,
        stderr: join_reader(stderr)?,
    })
}

/// Runs a command that must succeed and returns its standard output.
///
/// # Errors
/// Like [`output`], and when it fails: with the end of what it said.
pub fn check_output(name: &str, command: Command, timeout: Duration) -> Result<String> {
    let output = output(name, command, timeout)?;
    if !output.status.success() {
        let said = [
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        ]
        .concat();
        bail!(
            "{name} failed: {}\n{}",
            describe(output.status),
            tail(&said, 20)
        );
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("{name} printed something that is no text"))
}

/// "exit status 1" or "signal 9", for messages.
#[must_use]
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// The last lines of a text.
#[must_use]
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn read_in_thread(
    mut from: impl io::Read + Send + 'static,
) -> thread::JoinHandle<io::Result<Vec<u8>>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes)?;
        Ok(bytes)
    })
}

fn join_reader(reader: Option<thread::JoinHandle<io::Result<Vec<u8>>>>) -> Result<Vec<u8>> {
    let Some(reader) = reader else {
        return Ok(Vec::new());
    };
    let bytes = reader
        .join()
        .map_err(|_| anyhow!("A reader of a child's output panicked"))?;
    bytes.context("Cannot read the output of a child")
}

/// Makes Ctrl-C, SIGTERM and SIGHUP end all children, remove all scratch folders, and end this
/// process. Call it first in `main`, before there are other threads.
///
/// # Errors
/// When the thread that waits for the signals cannot be made.
pub fn end_all_on_signals() -> Result<()> {
    let signals = watched_signals();
    // SAFETY: `signals` is an initialised set, and the old mask is not asked for.
    let error =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut()) };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error)).context("Cannot block signals");
    }
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            let mut signal = 0;
            // SAFETY: `signals` is an initialised set and `signal` outlives the call.
            while unsafe { libc::sigwait(&raw const signals, &raw mut signal) } != 0 {}
            eprintln!("\nEnding everything (signal {signal})");
            // Never released: from here on no child is started any more.
            let children = children();
            for pid in children.iter().filter_map(|pid| Pid::from_raw(*pid)) {
                end_one(pid, true);
            }
            scratch::remove_all();
            std::process::exit(128 + signal);
        })?;
    Ok(())
}

fn watched_signals() -> libc::sigset_t {
    // SAFETY: A sigset_t is plain memory, which sigemptyset initialises; the signals are valid.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    }
}

fn unblock_signals() -> io::Result<()> {
    let signals = watched_signals();
    // SAFETY: `signals` is an initialised set, and the old mask is not asked for.
    match unsafe {
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const signals, std::ptr::null_mut())
    } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Kills a child that is not reaped yet, with its group where it leads one.
fn end_one(pid: Pid, group: bool) {
    let ended = if group {
        kill_process_group(pid, Signal::KILL)
    } else {
        Err(rustix::io::Errno::SRCH)
    };
    // A child in our own group leads none; one that has ended but is not reaped may have no group
    // left.
    if ended.is_err() && kill_process(pid, Signal::KILL).is_err() {
        eprintln!("Cannot end process {}", pid.as_raw_nonzero());
    }
}

/// The kernel sends the death signal when the *thread* that made a child ends: children are made by
/// one thread that lasts as long as the process.
fn spawn_from_lasting_thread(command: Command) -> io::Result<Child> {
    type Order = (Command, Sender<io::Result<Child>>);
    static SPAWNER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, to_do) = channel::<Order>();
        thread::spawn(move || {
            for (mut command, answer) in to_do {
                let mut children = children();
                let child = command.spawn();
                if let Ok(child) = &child {
                    children.insert(Pid::from_child(child).as_raw_nonzero().get());
                }
                drop(children);
                if let Err(unclaimed) = answer.send(child) {
                    drop(unclaimed);
                }
            }
        });
        Mutex::new(orders)
    });
    let (answer, child) = channel();
    let sent = spawner
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .send((command, answer));
    sent.map_err(|_| io::Error::other("the spawner thread has ended"))?;
    child
        .recv()
        .map_err(|_| io::Error::other("the spawner thread has ended"))?
}

fn children() -> MutexGuard<'static, BTreeSet<i32>> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until a descriptor can be read (or is at its end); `false` when it cannot within
/// `timeout`.
///
/// # Errors
/// When polling fails.
pub fn wait_readable(fd: impl AsFd, timeout: Duration) -> Result<bool> {
    let timeout = Timespec::try_from(timeout).context("The timeout is too long")?;
    Ok(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).context("Cannot poll")? > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(script);
        command
    }

    fn is_alive(pid: i32) -> bool {
        // A killed process whose parent has not reaped it is a zombie: dead for our purpose.
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| !stat.contains(") Z "))
    }

    fn wait_until(what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !condition() {
            assert!(Instant::now() < deadline, "{what}");
            thread::yield_now();
        }
    }

    /// A shell with a child of its own, and that child's process id.
    fn family(script_end: &str) -> (Process, i32) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let script = format!(
            "sleep 1000 & echo $! >{0}.new; mv {0}.new {0}; {script_end}",
            file.display()
        );
        let process = Process::spawn("a shell", shell(&script)).unwrap();
        wait_until("the shell started its child", || file.exists());
        let grandchild = std::fs::read_to_string(&file)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        assert!(is_alive(grandchild));
        (process, grandchild)
    }

    #[test]
    fn a_dropped_process_takes_its_children_along() {
        let (process, grandchild) = family("wait");
        drop(process);
        wait_until("the grandchild ended", || !is_alive(grandchild));
    }

    #[test]
    fn a_killed_process_takes_its_children_along() {
        let (mut process, grandchild) = family("trap '' TERM; wait");
        assert_eq!(process.kill().unwrap().signal(), Some(9));
        wait_until("the grandchild ended", || !is_alive(grandchild));
    }

    #[test]
    fn what_a_process_leaves_behind_is_ended_with_it() {
        let (mut process, grandchild) = family("exit 0");
        assert!(
            process
                .wait(Duration::from_secs(10))
                .unwrap()
                .unwrap()
                .success()
        );
        wait_until("the grandchild ended", || !is_alive(grandchild));
    }

    #[test]
    fn a_process_that_has_ended_tells_what_it_and_its_children_have_used() {
        // Of the second loop the shell knows when it has waited for its child.
        let work = "n=0; while [ $n -lt 300000 ]; do n=$((n + 1)); done";
        let mut process = Process::spawn("a shell", shell(&format!("({work}); {work}"))).unwrap();
        assert_eq!(process.cpu_time(), Duration::ZERO);
        assert!(process.wait(Duration::from_secs(60)).unwrap().is_some());
        assert!(process.cpu_time() >= Duration::from_millis(20));
    }

    #[test]
    fn a_child_survives_the_thread_that_asked_for_it() {
        let asked = thread::spawn(|| Process::spawn("a sleeper", shell("sleep 1000")).unwrap());
        let mut process = asked.join().unwrap();
        assert!(process.wait(Duration::from_millis(200)).unwrap().is_none());
    }

    #[test]
    fn a_command_that_hangs_is_ended_at_its_timeout() {
        let error =
            output("a sleeper", shell("sleep 1000"), Duration::from_millis(100)).unwrap_err();
        assert!(error.to_string().contains("a sleeper did not end within"));
    }

    #[test]
    fn a_failing_command_is_reported_with_its_last_words() {
        let error = check_output(
            "a shell",
            shell("echo nope >&2; exit 3"),
            Duration::from_secs(10),
        )
        .unwrap_err();
        assert_eq!(error.to_string(), "a shell failed: exit status 3\nnope");
    }
}
