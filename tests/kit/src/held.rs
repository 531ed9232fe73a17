//! Threads of a daemon that are stopped, and then held at a system call of the test's choosing
//! (`ptrace(2)`): what the daemon has taken and not completed at that moment stays so for as long
//! as the test likes.
//!
//! A signal would stop the daemon at any moment, mostly an idle one. At the entry of the call that
//! moves a request's data there is a request under way, in every run and on every machine.

use std::fs;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// How long a thread may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Pause between two looks at threads that run.
const PAUSE: Duration = Duration::from_micros(200);

/// Bit of the signal that reports a system call (`PTRACE_O_TRACESYSGOOD`).
const OF_A_CALL: i32 = 0x80;

/// A system call that a thread is about to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Its number.
    pub number: libc::c_long,
    /// Its arguments.
    pub arguments: [u64; 6],
}

/// One thread of the daemon.
#[derive(Debug)]
struct Thread {
    id: i32,
    /// The signal that it stopped for, and that it is to get when it goes on.
    signal: i32,
    state: State,
    /// It stands where it was wanted.
    is_at_call: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Stopped,
    Ended,
}

/// Threads of a daemon that stand still. They go on when this is dropped.
///
/// All of it belongs to the thread that made it: only that one may trace.
#[derive(Debug)]
pub struct Held {
    process: i32,
    threads: Vec<Thread>,
    _of_this_thread: PhantomData<*const ()>,
}

/// Why a thread has stopped.
enum Stop {
    Entry(Call),
    /// At the end of a system call, or because it was told to.
    Other,
    Ended,
}

impl Held {
    /// Stops the threads of a process that have a name which `chosen` accepts.
    ///
    /// # Errors
    /// There is none, or they cannot be stopped.
    pub fn stop(process: u32, chosen: impl Fn(&str) -> bool) -> Result<Self> {
        let mut held = Self {
            process: i32::try_from(process)?,
            threads: Vec::new(),
            _of_this_thread: PhantomData,
        };
        let tasks = format!("/proc/{process}/task");
        for task in fs::read_dir(&tasks).with_context(|| format!("Cannot see {tasks}"))? {
            let path = task?.path();
            // One that ends at this moment has no name any more.
            let Ok(name) = fs::read_to_string(path.join("comm")) else {
                continue;
            };
            if chosen(name.trim_end()) {
                let id = path.file_name().and_then(|id| id.to_str());
                let id = id.and_then(|id| id.parse().ok());
                held.seize(id.context("A thread has no number")?)?;
            }
        }
        ensure!(!held.threads.is_empty(), "{tasks}: no such thread");
        held.stop_all()?;
        Ok(held)
    }

    /// Lets the threads go on until one of them is about to make a system call that `wanted`
    /// accepts, and stops all others then; `None` when none does within `timeout`. What a call's
    /// file descriptors mean says [`file_of`](Self::file_of).
    ///
    /// # Errors
    /// When the threads have ended.
    pub fn advance(
        &mut self,
        timeout: Duration,
        wanted: impl Fn(&Self, &Call) -> bool,
    ) -> Result<Option<Call>> {
        for at in 0..self.threads.len() {
            self.resume(at)?;
        }
        let deadline = Instant::now() + timeout;
        loop {
            let mut stopped = false;
            for at in 0..self.threads.len() {
                match self.look(at)? {
                    None => continue,
                    Some(Stop::Entry(call)) if wanted(self, &call) => {
                        self.threads[at].is_at_call = true;
                        self.stop_all()?;
                        return Ok(Some(call));
                    }
                    Some(Stop::Ended) => {}
                    Some(_) => self.resume(at)?,
                }
                stopped = true;
            }
            if self
                .threads
                .iter()
                .all(|thread| thread.state == State::Ended)
            {
                bail!("All threads have ended before they made such a call");
            }
            if Instant::now() > deadline {
                self.stop_all()?;
                return Ok(None);
            }
            if !stopped {
                thread::sleep(PAUSE);
            }
        }
    }

    /// Lets all threads go but those that are at a system call which [`advance`](Self::advance) has
    /// found.
    pub fn release_others(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        let (held, others) = threads.into_iter().partition(|thread| thread.is_at_call);
        self.threads = held;
        drop(Self {
            process: self.process,
            threads: others,
            _of_this_thread: PhantomData,
        });
    }

    /// The file behind one of the process's descriptors.
    #[must_use]
    pub fn file_of(&self, descriptor: u64) -> Option<PathBuf> {
        fs::read_link(format!("/proc/{}/fd/{descriptor}", self.process)).ok()
    }

    /// Ends the process with SIGKILL: the threads do nothing more.
    ///
    /// # Errors
    /// When it cannot be signalled.
    pub fn kill(self) -> Result<()> {
        let process = Pid::from_raw(self.process).context("No process")?;
        kill_process(process, Signal::KILL).context("Cannot kill a daemon")
        // The drop takes the ends of the threads, without which the process would not be gone.
    }

    fn seize(&mut self, id: i32) -> Result<()> {
        // SAFETY: a request without pointers.
        let rc = unsafe {
            libc::ptrace(
                libc::PTRACE_SEIZE,
                id,
                0_usize,
                usize::try_from(libc::PTRACE_O_TRACESYSGOOD)?,
            )
        };
        if rc == 0 {
            self.threads.push(Thread {
                id,
                signal: 0,
                state: State::Running,
                is_at_call: false,
            });
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::ESRCH) {
            return Ok(());
        }
        Err(error).with_context(|| format!("Cannot trace thread {id}"))
    }

    /// Stops the threads that run.
    fn stop_all(&mut self) -> Result<()> {
        for at in 0..self.threads.len() {
            if self.threads[at].state == State::Running {
                self.request(libc::PTRACE_INTERRUPT, at, 0)?;
            }
        }
        let deadline = Instant::now() + STOP_TIMEOUT;
        for at in 0..self.threads.len() {
            while self.threads[at].state == State::Running && self.look(at)?.is_none() {
                ensure!(Instant::now() < deadline, "A thread does not stop");
                thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    fn resume(&mut self, at: usize) -> Result<()> {
        let thread = &mut self.threads[at];
        if thread.state != State::Stopped {
            return Ok(());
        }
        thread.state = State::Running;
        thread.is_at_call = false;
        let signal = std::mem::take(&mut thread.signal);
        self.request(libc::PTRACE_SYSCALL, at, usize::try_from(signal)?)
    }

    /// A request about a thread; that it has ended meanwhile is no error.
    fn request(&self, request: libc::c_uint, at: usize, data: usize) -> Result<()> {
        let thread = &self.threads[at];
        // SAFETY: none of the requests made here has a pointer.
        let rc = unsafe { libc::ptrace(request, thread.id, 0_usize, data) };
        let error = std::io::Error::last_os_error();
        if rc == 0 || error.raw_os_error() == Some(libc::ESRCH) {
            return Ok(());
        }
        Err(error).with_context(|| format!("ptrace({request}) of thread {}", thread.id))
    }

    /// Why a thread that runs has stopped, if it has.
    fn look(&mut self, at: usize) -> Result<Option<Stop>> {
        if self.threads[at].state != State::Running {
            return Ok(None);
        }
        let id = self.threads[at].id;
        // The end of the process itself is for whoever started it.
        let ends = if id == self.process { 0 } else { libc::WEXITED };
        // SAFETY: all bytes of it may be zero.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one `siginfo_t`.
        let rc = unsafe {
            libc::waitid(
                libc::P_PID,
                libc::id_t::try_from(id)?,
                &raw mut info,
                libc::WSTOPPED | libc::WNOHANG | libc::__WALL | ends,
            )
        };
        // SAFETY: `waitid` fills these fields, or leaves the zeroes.
        let (found, status) = unsafe { (info.si_pid(), info.si_status()) };
        if rc == 0 && found == 0 {
            return Ok(None);
        }
        if rc != 0 || info.si_code != libc::CLD_TRAPPED {
            self.threads[at].state = State::Ended;
            return Ok(Some(Stop::Ended));
        }
        self.threads[at].state = State::Stopped;
        if status == libc::SIGTRAP | OF_A_CALL {
            return Ok(Some(entry(id)?.map_or(Stop::Other, Stop::Entry)));
        }
        // The upper half tells stops of our own doing from signals for the daemon.
        if status >> 8 == 0 {
            self.threads[at].signal = status;
        }
        Ok(Some(Stop::Other))
    }
}

/// The system call that a thread is at the entry of.
fn entry(id: i32) -> Result<Option<Call>> {
    // SAFETY: all bytes of it may be zero.
    let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most as many bytes as it is told.
    let got = unsafe {
        libc::ptrace(
            libc::PTRACE_GET_SYSCALL_INFO,
            id,
            size_of::<libc::ptrace_syscall_info>(),
            &raw mut info,
        )
    };
    if got <= 0 {
        return Err(std::io::Error::last_os_error())
            .with_context(|| format!("Cannot see the system call of thread {id}"));
    }
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return Ok(None);
    }
    // SAFETY: `op` says that it is this one.
    let call = unsafe { info.u.entry };
    Ok(Some(Call {
        number: libc::c_long::try_from(call.nr)?,
        arguments: call.args,
    }))
}

impl Drop for Held {
    fn drop(&mut self) {
        // A thread is let go only from a stop. One that does not stop is let go by the end of this
        // process.
        let _ = self.stop_all();
        for thread in self.threads.iter().filter(|t| t.state == State::Stopped) {
            let signal = usize::try_from(thread.signal).unwrap_or(0);
            // SAFETY: a request without pointers.
            let rc = unsafe { libc::ptrace(libc::PTRACE_DETACH, thread.id, 0_usize, signal) };
            if rc != 0 && thread.id != self.process {
                // It was killed: its end is ours to take, as long as which the process has not
                // ended. SAFETY: no status is asked for.
                unsafe { libc::waitpid(thread.id, std::ptr::null_mut(), libc::__WALL) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::process::Process;

    /// A child that writes lines to a file without end, each with a system call.
    fn writer(path: &std::path::Path) -> Process {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "while :; do echo line; done"]);
        command.stdin(Stdio::null());
        command.stdout(fs::File::create(path).unwrap());
        Process::spawn("a writer", command).unwrap()
    }

    fn at_write(held: &mut Held, path: &std::path::Path) -> Call {
        let timeout = Duration::from_secs(20);
        let is_it = |held: &Held, call: &Call| {
            call.number == libc::SYS_write
                && held.file_of(call.arguments[0]).as_deref() == Some(path)
        };
        held.advance(timeout, is_it).unwrap().unwrap()
    }

    #[test]
    fn a_thread_is_held_before_its_call_and_goes_on_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        let length = || fs::metadata(&path).unwrap().len();
        let process = writer(&path);
        let mut held = Held::stop(process.pid(), |name| name == "sh").unwrap();
        for _ in 0..3 {
            let before = length();
            let call = at_write(&mut held, &path);
            assert_eq!((call.arguments[0], call.arguments[2]), (1, 5));
            // What the call before this one wrote is there, and of this one nothing.
            assert!(length() - before <= 5, "{before} {}", length());
        }
        let before = length();
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(20);
        while length() == before {
            assert!(Instant::now() < deadline, "It does not go on");
            thread::sleep(PAUSE);
        }
    }

    #[test]
    fn a_process_that_is_killed_at_a_call_does_not_make_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        let mut process = writer(&path);
        let mut held = Held::stop(process.pid(), |_| true).unwrap();
        at_write(&mut held, &path);
        let before = fs::metadata(&path).unwrap().len();
        held.kill().unwrap();
        assert!(!process.kill().unwrap().success());
        assert_eq!(fs::metadata(&path).unwrap().len(), before);
    }

    #[test]
    fn threads_that_are_not_there_and_calls_that_are_not_made_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let process = writer(&folder.path().join("lines"));
        assert!(Held::stop(process.pid(), |name| name == "nobody").is_err());
        let mut held = Held::stop(process.pid(), |_| true).unwrap();
        let never = held.advance(Duration::from_millis(50), |_, call| {
            call.number == libc::SYS_io_uring_enter
        });
        assert_eq!(never.unwrap(), None);
    }
}
