//! A backend of a Farlane device that only writes down what the guest driver tells it, so that a scenario sees what the
//! driver does and when.

use std::any::Any;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context as _, Result, ensure};
use farlane_abi::Errno;
use farlane_daemon::listener::{Kind, Listener};
use farlane_daemon::vhost;
use farlane_guest_device::contexts::Contexts;
use farlane_guest_device::control::RequestCounters;
use farlane_guest_device::device::{Device, Vm};
use farlane_guest_device::events::ContextEvents;
use farlane_guest_device::request::Extents;
use farlane_zero_copy::{Pool, Region};

use crate::conditions::PATIENCE;

/// What the driver has said, in its order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// A process has opened the device.
    Open,
    /// It has gone.
    Close,
    /// A segment of so many bytes.
    Segment { region: u32, bytes: u64 },
    /// Pinned memory.
    Pin { region: u32 },
    /// A phony buffer of so many bytes.
    Phony { region: u32, bytes: u64 },
    /// Device memory.
    Device {
        region: u32,
        writable: bool,
        runs: Extents,
    },
    /// A region goes.
    Detach { region: u32 },
}

/// What a backend does when a region is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Detaching {
    /// It lets go.
    #[default]
    Done,
    /// It does not come to an end until this changes.
    Held,
    /// It refuses.
    Refused,
}

/// The backend. It listens as long as this process lives.
pub struct Recorder {
    features: u32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    open: BTreeSet<u32>,
    events: Vec<Event>,
    detaching: Detaching,
}

impl Recorder {
    /// A backend with these `FEATURE_*`, at `socket`.
    pub fn listen(socket: &Path, features: u32) -> Result<Arc<Self>> {
        let recorder = Arc::new(Self {
            features,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let listener = Listener::bind(socket, Kind::Stream)?;
        let accept = listener.try_clone().context("Cannot listen")?;
        let vm = Vm {
            name: "recorder".into(),
            contexts: Arc::clone(&recorder) as Arc<dyn Contexts>,
            window_bytes: 0,
            counters: Arc::new(RequestCounters::default()),
        };
        thread::Builder::new()
            .name("recorder".into())
            .spawn(move || {
                let _file = listener;
                vhost::serve("recorder", accept, |memory| Device::new(vm.clone(), memory))
            })
            .context("Cannot start a thread")?;
        Ok(recorder)
    }

    /// What was said since this was last asked.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.lock().events)
    }

    /// Waits until a process has gone, and returns everything that was said up to then.
    pub fn take_to_close(&self) -> Result<Vec<Event>> {
        self.wait("the process has closed the device", |event| {
            *event == Event::Close
        })?;
        Ok(self.take())
    }

    /// Waits until something was said.
    pub fn wait(&self, what: &str, is: impl Fn(&Event) -> bool) -> Result<()> {
        let missing = |state: &mut State| !state.events.iter().any(&is);
        let (state, timeout) = self
            .changed
            .wait_timeout_while(self.lock(), PATIENCE, missing)
            .unwrap_or_else(PoisonError::into_inner);
        ensure!(
            !timeout.timed_out(),
            "{what}: not so after {} s: {:?}",
            PATIENCE.as_secs(),
            state.events
        );
        Ok(())
    }

    /// How regions go from now on.
    pub fn set_detaching(&self, detaching: Detaching) {
        self.lock().detaching = detaching;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, context: u32, event: Event) -> Result<(), Errno> {
        let mut state = self.lock();
        if !state.open.contains(&context) {
            return Err(Errno::ENOENT);
        }
        state.events.push(event);
        self.changed.notify_all();
        Ok(())
    }
}

impl Contexts for Recorder {
    fn features(&self) -> u32 {
        self.features
    }

    fn open(
        &self,
        context: u32,
        _events: Arc<ContextEvents>,
        _window: Option<Arc<Pool>>,
    ) -> Result<(), Errno> {
        if !self.lock().open.insert(context) {
            return Err(Errno::EEXIST);
        }
        self.note(context, Event::Open)
    }

    fn close(&self, context: u32) -> Result<(), Errno> {
        self.note(context, Event::Close)?;
        self.lock().open.remove(&context);
        Ok(())
    }

    fn check(&self, context: u32) -> Result<(), Errno> {
        let open = self.lock().open.contains(&context);
        open.then_some(()).ok_or(Errno::ENOENT)
    }

    fn attach_segment(&self, context: u32, region: u32, memory: Region) -> Result<(), Errno> {
        let bytes = memory.len();
        self.note(context, Event::Segment { region, bytes })
    }

    fn attach_pin(&self, context: u32, region: u32, _memory: Region) -> Result<(), Errno> {
        self.note(context, Event::Pin { region })
    }

    fn attach_phony(&self, context: u32, region: u32, pages: Extents) -> Result<(), Errno> {
        let bytes = pages.iter().map(|run| run.1).sum();
        self.note(context, Event::Phony { region, bytes })
    }

    fn attach_device(
        &self,
        context: u32,
        region: u32,
        runs: Extents,
        writable: bool,
    ) -> Result<(), Errno> {
        self.note(
            context,
            Event::Device {
                region,
                writable,
                runs,
            },
        )
    }

    fn detach(&self, context: u32, region: u32) -> Result<(), Errno> {
        self.note(context, Event::Detach { region })?;
        let held = |state: &mut State| state.detaching == Detaching::Held;
        let state = self
            .changed
            .wait_while(self.lock(), held)
            .unwrap_or_else(PoisonError::into_inner);
        match state.detaching {
            Detaching::Refused => Err(Errno::EBUSY),
            Detaching::Done | Detaching::Held => Ok(()),
        }
    }

    fn close_all(&self) {
        self.lock().open.clear();
    }

    fn pause(&self) {}

    fn resume(&self) {}

    fn add_doorbell(&self, _bell: OwnedFd) -> io::Result<Option<Box<dyn Any + Send>>> {
        Ok(None)
    }
}
