//! The kit's end of the connection to the agent in a guest.

use std::collections::HashMap;
use std::fmt;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::inbox::{Inbox, Missed};
use crate::protocol::{CHUNK_BYTES, Ending, ProtocolError, Reply, Request, Stream, receive, send};
use anyhow::{Context, Result, bail, ensure};

/// How long the agent may take for what it does itself.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The agent of one guest.
#[derive(Debug)]
pub struct Agent {
    stream: Mutex<UnixStream>,
    inbox: Arc<Inbox<Received>>,
    next_id: AtomicU32,
}

#[derive(Debug, Default)]
struct Received {
    kernel: Option<String>,
    jobs: HashMap<u32, JobState>,
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

    /// Nothing, where the command exited with 0.
    ///
    /// # Errors
    /// It did not: how it ended, and all that it printed. `what` is how it is called.
    pub fn check(&self, what: impl fmt::Display) -> Result<()> {
        ensure!(self.success(), "{what}: {}\n{}", self.how(), self.all());
        Ok(())
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
    ///
    /// # Errors
    /// When the socket cannot be duplicated.
    pub fn new(stream: UnixStream) -> Result<Self> {
        let inbox = Arc::new(Inbox::<Received>::default());
        let mut replies = stream
            .try_clone()
            .context("Cannot share the agent's socket")?;
        let shared = Arc::clone(&inbox);
        thread::spawn(move || {
            loop {
                match receive(&mut replies) {
                    Ok(Some(reply)) => shared.with(|received| received.take(reply)),
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
            shared.close();
        });
        Ok(Self {
            stream: Mutex::new(stream),
            inbox,
            next_id: AtomicU32::new(1),
        })
    }

    /// Waits until the guest is up; returns its kernel release, or `None` when `timeout` is over.
    ///
    /// # Errors
    /// When the connection has ended.
    pub fn wait_hello(&self, timeout: Duration) -> Result<Option<String>> {
        self.wait_for(timeout, |received| received.kernel.clone())
    }

    /// The guest begins anew: what ran there is lost, and a new greeting comes.
    pub(crate) fn begin_anew(&self, reset: impl FnOnce() -> Result<()>) -> Result<()> {
        self.inbox.with(|received| received.kernel = None);
        reset()?;
        self.inbox.with(|received| {
            for state in received.jobs.values_mut() {
                state
                    .end
                    .get_or_insert_with(|| Err("The guest was reset".to_owned()));
            }
        });
        Ok(())
    }

    /// Starts a command.
    ///
    /// # Errors
    /// When the guest cannot be reached.
    pub fn start(&self, command: &str) -> Result<u32> {
        let job = self.new_job();
        self.send(&Request::Run {
            job,
            command: command.to_owned(),
        })?;
        Ok(job)
    }

    /// Waits for the end of a command and forgets it; `None` when `timeout` is over.
    ///
    /// # Errors
    /// When the connection has ended, or the agent could not start the command.
    pub fn wait(&self, job: u32, timeout: Duration) -> Result<Option<Output>> {
        let Some((end, state)) = self.wait_for(timeout, |received| received.ended(job))? else {
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
    #[must_use]
    pub fn so_far(&self, job: u32) -> String {
        self.inbox
            .with(|received| received.jobs.get(&job).map(JobState::said))
            .unwrap_or_default()
    }

    /// Whether a command has ended.
    #[must_use]
    pub fn has_ended(&self, job: u32) -> bool {
        let ended = |state: &JobState| state.end.is_some();
        self.inbox
            .with(|received| received.jobs.get(&job).is_none_or(ended))
    }

    /// Waits until a command's output holds for `wanted`, or it has ended; `false` when `timeout`
    /// is over.
    pub(crate) fn wait_output(
        &self,
        job: u32,
        timeout: Duration,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<bool> {
        let found = self.wait_for(timeout, |received| {
            let state = received.jobs.get(&job)?;
            (wanted(&state.said()))
                .then_some(true)
                .or_else(|| state.end.is_some().then_some(false))
        })?;
        Ok(found.unwrap_or(false))
    }

    /// Sends a signal to all processes of a command.
    pub fn signal(&self, job: u32, signal: u8) -> Result<()> {
        self.request(|id| Request::Signal { id, job, signal })?;
        Ok(())
    }

    /// Kills a command that nobody waits for any more. Does not wait for an answer: the guest may
    /// hang.
    pub(crate) fn abandon(&self, job: u32) {
        self.inbox.with(|received| received.jobs.remove(&job));
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
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(&self, path: &str) -> Result<Vec<u8>> {
        self.request(|id| Request::Read {
            id,
            path: path.to_owned(),
        })
    }

    /// Whether the agent answers within `timeout`.
    pub(crate) fn answers(&self, timeout: Duration) -> bool {
        let id = self.new_job();
        let sent = self.send(&Request::Ping { id });
        sent.is_ok() && matches!(self.wait(id, timeout), Ok(Some(_)))
    }

    fn request(&self, make: impl FnOnce(u32) -> Request) -> Result<Vec<u8>> {
        let id = self.new_job();
        self.send(&make(id))?;
        match self.wait_for(ANSWER_TIMEOUT, |received| received.ended(id))? {
            Some((Ok(_), state)) => Ok(state.stdout),
            Some((Err(message), _)) => bail!(message),
            None => bail!("The agent does not answer"),
        }
    }

    /// Waits for something in the inbox; `None` when `timeout` is over.
    fn wait_for<T>(
        &self,
        timeout: Duration,
        find: impl FnMut(&mut Received) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.inbox.wait(timeout, find) {
            Ok(found) => Ok(Some(found)),
            Err(Missed::TimedOut) => Ok(None),
            Err(Missed::Closed) => bail!("The guest has ended"),
        }
    }

    /// The number of a new job or request, for which replies are kept from now on.
    fn new_job(&self) -> u32 {
        let id = self.new_id();
        self.inbox
            .with(|received| received.jobs.insert(id, JobState::default()));
        id
    }

    fn new_id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    fn send(&self, request: &Request) -> Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        send(&mut *stream, request).context("Cannot reach the agent")
    }
}

impl JobState {
    /// Both outputs so far, errors behind the rest.
    fn said(&self) -> String {
        [&self.stdout, &self.stderr]
            .map(|bytes| String::from_utf8_lossy(bytes))
            .concat()
    }
}

impl Received {
    fn take(&mut self, reply: Reply) {
        match reply {
            Reply::Hello { kernel } => self.kernel = Some(kernel),
            Reply::Output { job, stream, data } => {
                if let Some(state) = self.jobs.get_mut(&job) {
                    match stream {
                        Stream::Stdout => state.stdout.extend(data),
                        Stream::Stderr => state.stderr.extend(data),
                    }
                }
            }
            Reply::Data { id, data } => {
                if let Some(state) = self.jobs.get_mut(&id) {
                    state.stdout.extend(data);
                }
            }
            Reply::Ended { job, ending } => self.end(job, Ok(ending)),
            Reply::Done { id } => self.end(id, Ok(Ending::Exited(0))),
            Reply::Failed { id, message } => self.end(id, Err(message)),
        }
    }

    fn end(&mut self, id: u32, end: Result<Ending, String>) {
        if let Some(state) = self.jobs.get_mut(&id) {
            state.end = Some(end);
        }
    }

    /// Takes out what has ended.
    fn ended(&mut self, id: u32) -> Option<(Result<Ending, String>, JobState)> {
        let end = self.jobs.get(&id)?.end.clone()?;
        self.jobs.remove(&id).map(|state| (end, state))
    }
}
