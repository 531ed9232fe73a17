//! The kit's end of the connection to the agent in a guest.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::protocol::{CHUNK_BYTES, Ending, ProtocolError, Reply, Request, Stream, receive, send};
use anyhow::{Context, Result, bail};

/// How long the agent may take for what it does itself.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The agent of one guest.
#[derive(Debug)]
pub struct Agent {
    stream: Mutex<UnixStream>,
    inbox: Arc<Inbox>,
    next_id: AtomicU32,
}

#[derive(Debug, Default)]
struct Inbox {
    state: Mutex<Received>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Received {
    kernel: Option<String>,
    jobs: HashMap<u32, JobState>,
    closed: bool,
}

/// What came for one job or one request.
#[derive(Debug, Default)]
struct JobState {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    end: Option<Result<Ending, String>>,
}

/// What a command printed, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its standard output.
    pub stdout: String,
    /// Its error output.
    pub stderr: String,
    /// How it ended.
    pub ending: Ending,
}

impl Output {
    /// Whether the command exited with 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.ending == Ending::Exited(0)
    }

    /// Both outputs, for messages.
    #[must_use]
    pub fn all(&self) -> String {
        [self.stdout.as_str(), self.stderr.as_str()].concat()
    }

    /// "exit status 1" or "signal 9", for messages.
    #[must_use]
    pub fn how(&self) -> String {
        match self.ending {
            Ending::Exited(code) => format!("exit status {code}"),
            Ending::Signalled(signal) => format!("signal {signal}"),
        }
    }
}

impl Agent {
    /// Takes over the kit's end of a connection.
    pub(crate) fn new(stream: UnixStream) -> Result<Self> {
        let inbox = Arc::new(Inbox::default());
        let mut replies = stream
            .try_clone()
            .context("Cannot share the agent's socket")?;
        let shared = Arc::clone(&inbox);
        thread::spawn(move || {
            loop {
                match receive(&mut replies) {
                    Ok(Some(reply)) => shared.take(reply),
                    Ok(None) => break,
                    // A QEMU that was killed with something unread.
                    Err(ProtocolError::Io(error)) if error.kind() == ErrorKind::ConnectionReset => {
                        break;
                    }
                    Err(error) => {
                        eprintln!("The agent of a guest talks nonsense: {error}");
                        break;
                    }
                }
            }
            shared.lock().closed = true;
            shared.changed.notify_all();
        });
        Ok(Self {
            stream: Mutex::new(stream),
            inbox,
            next_id: AtomicU32::new(1),
        })
    }

    /// Waits until the guest is up; returns its kernel release, or `None` when `timeout` is over.
    pub(crate) fn wait_hello(&self, timeout: Duration) -> Result<Option<String>> {
        self.inbox.wait(timeout, |received| received.kernel.clone())
    }

    /// The guest begins anew: what ran there is lost, and a new greeting comes.
    pub(crate) fn begin_anew(&self, reset: impl FnOnce() -> Result<()>) -> Result<()> {
        self.inbox.lock().kernel = None;
        reset()?;
        for state in self.inbox.lock().jobs.values_mut() {
            state
                .end
                .get_or_insert_with(|| Err("The guest was reset".to_owned()));
        }
        self.inbox.changed.notify_all();
        Ok(())
    }

    /// Starts a command.
    pub(crate) fn start(&self, command: &str) -> Result<u32> {
        let job = self.new_id();
        self.inbox.lock().jobs.insert(job, JobState::default());
        self.send(&Request::Run {
            job,
            command: command.to_owned(),
        })?;
        Ok(job)
    }

    /// Waits for the end of a command and forgets it; `None` when `timeout` is over.
    pub(crate) fn wait(&self, job: u32, timeout: Duration) -> Result<Option<Output>> {
        let ended = self.inbox.wait(timeout, |received| {
            let end = received.jobs.get(&job)?.end.clone()?;
            received.jobs.remove(&job).map(|state| (end, state))
        })?;
        let Some((end, state)) = ended else {
            return Ok(None);
        };
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        match end {
            Ok(ending) => Ok(Some(Output {
                stdout: text(state.stdout),
                stderr: text(state.stderr),
                ending,
            })),
            Err(message) => bail!("The agent failed: {message}"),
        }
    }

    /// What a running command printed so far, errors behind the rest.
    pub(crate) fn so_far(&self, job: u32) -> String {
        self.inbox
            .lock()
            .jobs
            .get(&job)
            .map_or_else(String::new, |state| {
                [
                    String::from_utf8_lossy(&state.stdout),
                    String::from_utf8_lossy(&state.stderr),
                ]
                .concat()
            })
    }

    /// Whether a command has ended.
    pub(crate) fn has_ended(&self, job: u32) -> bool {
        self.inbox
            .lock()
            .jobs
            .get(&job)
            .is_none_or(|state| state.end.is_some())
    }

    /// Waits until a command's output holds for `wanted`, or it has ended; `false` when `timeout`
    /// is over.
    pub(crate) fn wait_output(
        &self,
        job: u32,
        timeout: Duration,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<bool> {
        let found = self.inbox.wait(timeout, |received| {
            let state = received.jobs.get(&job)?;
            let said = [
                String::from_utf8_lossy(&state.stdout),
                String::from_utf8_lossy(&state.stderr),
            ]
            .concat();
            (wanted(&said))
                .then_some(true)
                .or_else(|| state.end.is_some().then_some(false))
        })?;
        Ok(found.unwrap_or(false))
    }

    /// Sends a signal to all processes of a command.
    pub(crate) fn signal(&self, job: u32, signal: u8) -> Result<()> {
        self.request(|id| Request::Signal { id, job, signal })?;
        Ok(())
    }

    /// Kills a command that nobody waits for any more. Does not wait for an answer: the guest may
    /// hang.
    pub(crate) fn abandon(&self, job: u32) {
        self.inbox.lock().jobs.remove(&job);
        if let Err(error) = self.send(&Request::Signal {
            id: self.new_id(),
            job,
            signal: 9,
        }) {
            // The guest has ended, and the command with it.
            drop(error);
        }
    }

    /// Writes a file.
    pub(crate) fn write(&self, path: &str, mode: u32, data: &[u8]) -> Result<()> {
        let mut append = false;
        for chunk in data
            .chunks(CHUNK_BYTES)
            .chain(data.is_empty().then_some(&[][..]))
        {
            let (path, data) = (path.to_owned(), chunk.to_vec());
            self.request(|id| Request::Write {
                id,
                mode,
                append,
                path,
                data,
            })?;
            append = true;
        }
        Ok(())
    }

    /// Reads a file.
    pub(crate) fn read(&self, path: &str) -> Result<Vec<u8>> {
        self.request(|id| Request::Read {
            id,
            path: path.to_owned(),
        })
    }

    /// Whether the agent answers within `timeout`.
    pub(crate) fn answers(&self, timeout: Duration) -> bool {
        let id = self.new_id();
        self.inbox.lock().jobs.insert(id, JobState::default());
        let sent = self.send(&Request::Ping { id });
        sent.is_ok() && matches!(self.wait(id, timeout), Ok(Some(_)))
    }

    fn request(&self, make: impl FnOnce(u32) -> Request) -> Result<Vec<u8>> {
        let id = self.new_id();
        self.inbox.lock().jobs.insert(id, JobState::default());
        self.send(&make(id))?;
        let ended = self.inbox.wait(ANSWER_TIMEOUT, |received| {
            let end = received.jobs.get(&id)?.end.clone()?;
            received.jobs.remove(&id).map(|state| (end, state))
        })?;
        match ended {
            Some((Ok(_), state)) => Ok(state.stdout),
            Some((Err(message), _)) => bail!(message),
            None => bail!("The agent does not answer"),
        }
    }

    fn new_id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    fn send(&self, request: &Request) -> Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        send(&mut *stream, request).context("Cannot reach the agent")
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Received> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, reply: Reply) {
        let mut received = self.lock();
        match reply {
            Reply::Hello { kernel } => received.kernel = Some(kernel),
            Reply::Output { job, stream, data } => {
                if let Some(state) = received.jobs.get_mut(&job) {
                    match stream {
                        Stream::Stdout => state.stdout.extend(data),
                        Stream::Stderr => state.stderr.extend(data),
                    }
                }
            }
            Reply::Data { id, data } => {
                if let Some(state) = received.jobs.get_mut(&id) {
                    state.stdout.extend(data);
                }
            }
            Reply::Ended { job, ending } => received.end(job, Ok(ending)),
            Reply::Done { id } => received.end(id, Ok(Ending::Exited(0))),
            Reply::Failed { id, message } => received.end(id, Err(message)),
        }
        drop(received);
        self.changed.notify_all();
    }

    fn wait<T>(
        &self,
        timeout: Duration,
        mut find: impl FnMut(&mut Received) -> Option<T>,
    ) -> Result<Option<T>> {
        let deadline = Instant::now() + timeout;
        let mut received = self.lock();
        loop {
            if let Some(found) = find(&mut received) {
                return Ok(Some(found));
            }
            if received.closed {
                bail!("The guest has ended");
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            received = self
                .changed
                .wait_timeout(received, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Received {
    fn end(&mut self, id: u32, end: Result<Ending, String>) {
        if let Some(state) = self.jobs.get_mut(&id) {
            state.end = Some(end);
        }
    }
}
