//! `farlane-recorder SOCKET FEATURES`: a backend of a Farlane device that only writes down what the
//! guest driver tells it, see [`farlane_kit::recorder`].

use std::any::Any;
use std::collections::BTreeSet;
use std::env;
use std::io::{self, BufRead as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context as _, Result};
use farlane_abi::Errno;
use farlane_abi::ids::{ContextId, RegionId};
use farlane_daemon::access::Access;
use farlane_daemon::listener::{Kind, Listener};
use farlane_guest_device::contexts::{Contexts, Memory};
use farlane_guest_device::control::RequestCounters;
use farlane_guest_device::device::{FarlaneDevice, Vm};
use farlane_guest_device::events::ContextEvents;
use farlane_kit::recorder::{Detaching, Event, Order};
use farlane_vhost_user::serve::serve;
use farlane_zero_copy::Pool;

fn main() -> Result<()> {
    let mut words = env::args_os().skip(1);
    let socket = words.next().context("No socket was given")?;
    let features = words.next().context("No features were given")?;
    let features = features.to_string_lossy().parse()?;
    let recorder = Recorder::listen(Path::new(&socket), features)?;
    for line in io::stdin().lock().lines() {
        match serde_json::from_str(&line?)? {
            Order::Detaching(detaching) => recorder.set_detaching(detaching),
            Order::Mark => say(&Event::Mark)?,
        }
    }
    Ok(())
}

/// Prints an event; it is with the reader when this returns.
fn say(event: &Event) -> Result<()> {
    let mut line = serde_json::to_string(event)?;
    line.push('\n');
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// The backend. It listens as long as this process lives.
struct Recorder {
    features: u32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    open: BTreeSet<ContextId>,
    detaching: Detaching,
}

impl Recorder {
    /// A backend with these `FEATURE_*`, at `socket`.
    fn listen(socket: &Path, features: u32) -> Result<Arc<Self>> {
        let recorder = Arc::new(Self {
            features,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let listener = Listener::bind(socket, Kind::Stream, &Access::default())?;
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
                serve("recorder", accept, |channel| {
                    FarlaneDevice::new(vm.clone(), channel)
                })
            })
            .context("Cannot start a thread")?;
        say(&Event::Listening)?;
        Ok(recorder)
    }

    /// How regions go from now on.
    fn set_detaching(&self, detaching: Detaching) {
        self.lock().detaching = detaching;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, context: ContextId, event: Event) -> Result<(), Errno> {
        // Events are printed in the order in which this is held.
        let state = self.lock();
        if !state.open.contains(&context) {
            return Err(Errno::ENOENT);
        }
        say(&event).map_err(|_| Errno::EIO)
    }
}

impl Contexts for Recorder {
    fn features(&self) -> u32 {
        self.features
    }

    fn open(
        &self,
        context: ContextId,
        _events: Arc<ContextEvents>,
        _window: Option<Arc<Pool>>,
    ) -> Result<(), Errno> {
        if !self.lock().open.insert(context) {
            return Err(Errno::EEXIST);
        }
        self.note(context, Event::Open)
    }

    fn close(&self, context: ContextId) -> Result<(), Errno> {
        self.note(context, Event::Close)?;
        let mut state = self.lock();
        if state.detaching == Detaching::Later {
            return Err(Errno::EAGAIN);
        }
        state.open.remove(&context);
        Ok(())
    }

    fn check(&self, context: ContextId) -> Result<(), Errno> {
        let open = self.lock().open.contains(&context);
        open.then_some(()).ok_or(Errno::ENOENT)
    }

    fn attach(&self, context: ContextId, region: RegionId, memory: Memory) -> Result<(), Errno> {
        let region = region.get();
        let event = match memory {
            Memory::Segment(memory) => Event::Segment {
                region,
                bytes: memory.len(),
            },
            Memory::Pin(_) => Event::Pin { region },
            Memory::All { .. } | Memory::File(_) => return Err(Errno::EOPNOTSUPP),
            Memory::Phony(pages) => Event::Phony {
                region,
                bytes: pages.iter().map(|run| run.1).sum(),
            },
            Memory::Device { runs, writable } => Event::Device {
                region,
                writable,
                runs,
            },
        };
        self.note(context, event)
    }

    fn detach(&self, context: ContextId, region: RegionId) -> Result<(), Errno> {
        self.note(
            context,
            Event::Detach {
                region: region.get(),
            },
        )?;
        let held = |state: &mut State| state.detaching == Detaching::Held;
        let state = self
            .changed
            .wait_while(self.lock(), held)
            .unwrap_or_else(PoisonError::into_inner);
        match state.detaching {
            Detaching::Later => Err(Errno::EAGAIN),
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
