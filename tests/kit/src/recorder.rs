//! A backend of a Farlane device that only writes down what the guest driver tells it, so that a
//! scenario sees what the driver does and when: the program `farlane-recorder`, and what it and a
//! scenario say to each other.
//!
//! The program prints an [`Event`] a line, in JSON, before it answers the driver. It reads an
//! [`Order`] a line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::process::Process;

/// What the program is called.
pub const PROGRAM: &str = "farlane-recorder";

/// How long anything may take that is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the driver has said, in its order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Event {
    /// The socket is there.
    Listening,
    /// A process has opened the device.
    Open,
    /// It has gone.
    Close,
    /// A segment of shared memory.
    Segment {
        /// The region's number.
        region: u32,
        /// Its length.
        bytes: u64,
    },
    /// Pinned memory.
    Pin {
        /// The region's number.
        region: u32,
    },
    /// A phony buffer.
    Phony {
        /// The region's number.
        region: u32,
        /// Its length.
        bytes: u64,
    },
    /// Device memory.
    Device {
        /// The region's number.
        region: u32,
        /// Whether it may be written.
        writable: bool,
        /// Guest-physical addresses and lengths in bytes.
        runs: Vec<(u64, u64)>,
    },
    /// A region goes.
    Detach {
        /// The region's number.
        region: u32,
    },
    /// The answer to [`Order::Mark`]: everything that was said before stands before it.
    Mark,
}

/// What a backend does when a region is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Detaching {
    /// It lets go.
    #[default]
    Done,
    /// It does not come to an end until this changes.
    Held,
    /// It says that it is to be asked again; of a context that goes, too.
    Later,
    /// It refuses.
    Refused,
}

/// What the program is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Regions go like this from now on.
    Detaching(Detaching),
    /// Print [`Event::Mark`].
    Mark,
}

/// A recorder that runs. It is ended when it is dropped.
#[derive(Debug)]
pub struct Recorder {
    _process: Process,
    orders: Mutex<ChildStdin>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    events: Vec<Event>,
    marks: u32,
    listens: bool,
    /// Why no more will come.
    ended: Option<String>,
}

impl Recorder {
    /// Starts the program as a backend with these `FEATURE_*` at `socket`.
    ///
    /// # Errors
    /// When it cannot be started or does not listen.
    pub fn listen(program: &Path, socket: &Path, features: u32) -> Result<Self> {
        let mut command = Command::new(program);
        command.arg(socket).arg(features.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::spawn(PROGRAM, command)?;
        let orders = process.take_stdin().context("The recorder has no input")?;
        let events = process
            .take_stdout()
            .context("The recorder has no output")?;
        let shared = Arc::new(Shared::default());
        let reader = Arc::clone(&shared);
        thread::spawn(move || {
            let why = BufReader::new(events)
                .lines()
                .map(|line| -> Result<()> {
                    reader.take(serde_json::from_str(&line?)?);
                    Ok(())
                })
                .find_map(Result::err)
                .map_or_else(|| "it has ended".to_owned(), |error| format!("{error:#}"));
            reader.lock().ended = Some(why);
            reader.changed.notify_all();
        });
        let recorder = Self {
            _process: process,
            orders: Mutex::new(orders),
            shared,
        };
        drop(recorder.wait_for("the recorder listens", |state| state.listens)?);
        Ok(recorder)
    }

    /// What was said since this was last asked.
    ///
    /// # Errors
    /// When the program has ended.
    pub fn take(&self) -> Result<Vec<Event>> {
        let mut state = self.catch_up()?;
        Ok(std::mem::take(&mut state.events))
    }

    /// Waits until a process has gone, and returns everything that was said up to then.
    ///
    /// # Errors
    /// When none goes, or the program has ended.
    pub fn take_to_close(&self) -> Result<Vec<Event>> {
        self.wait("the process has closed the device", |event| {
            *event == Event::Close
        })?;
        self.take()
    }

    /// Waits until something was said.
    ///
    /// # Errors
    /// When it was not, or the program has ended.
    pub fn wait(&self, what: &str, is: impl Fn(&Event) -> bool) -> Result<()> {
        self.wait_times(1, what, is)
    }

    /// Waits until something was said so many times.
    ///
    /// # Errors
    /// When it was not, or the program has ended.
    pub fn wait_times(&self, times: usize, what: &str, is: impl Fn(&Event) -> bool) -> Result<()> {
        let count = |state: &State| state.events.iter().filter(|event| is(event)).count();
        drop(self.wait_for(what, |state| count(state) >= times)?);
        Ok(())
    }

    /// How regions go from now on.
    ///
    /// # Errors
    /// When the program has ended.
    pub fn set_detaching(&self, detaching: Detaching) -> Result<()> {
        self.order(Order::Detaching(detaching))?;
        drop(self.catch_up()?);
        Ok(())
    }

    /// Waits until the program has done what it was told, and until what it has said is here.
    fn catch_up(&self) -> Result<MutexGuard<'_, State>> {
        self.order(Order::Mark)?;
        let mut state = self.wait_for("the recorder answers", |state| state.marks > 0)?;
        state.marks -= 1;
        Ok(state)
    }

    fn order(&self, order: Order) -> Result<()> {
        let mut line = serde_json::to_string(&order)?;
        line.push('\n');
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        orders
            .write_all(line.as_bytes())
            .context("The recorder has ended")
    }

    fn wait_for(&self, what: &str, is: impl Fn(&State) -> bool) -> Result<MutexGuard<'_, State>> {
        let missing = |state: &mut State| !is(state) && state.ended.is_none();
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(self.shared.lock(), PATIENCE, missing)
            .unwrap_or_else(PoisonError::into_inner);
        ensure!(is(&state), "{what}: not so: {state:?}");
        Ok(state)
    }
}

impl Shared {
    fn take(&self, event: Event) {
        let mut state = self.lock();
        match event {
            Event::Listening => state.listens = true,
            Event::Mark => state.marks += 1,
            event => state.events.push(event),
        }
        drop(state);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
