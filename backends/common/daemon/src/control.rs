//! A daemon's control loop: signals, failures of its threads and those who ask it something, on the
//! thread that has started all others. Nothing that it does waits for a peer.

use crate::answering::{Answer, AnsweringSocket};
use crate::eventfd;
use crate::metrics::{self, Collect, MetricsListener};
use event_manager::{
    EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberId, SubscriberOps as _,
};
use rustix::event::EventfdFlags;
use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, FromRawFd as _, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why a daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Somebody asked for it: exit code 0.
    Asked,
    /// A part that it cannot do without has failed, see [`Stopper::fail`].
    Failed,
}

/// Lets a thread end the daemon.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<StopRequest>);

#[derive(Debug)]
struct StopRequest {
    /// Readable once somebody has asked.
    event: OwnedFd,
    failed: AtomicBool,
}

impl Stopper {
    fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(StopRequest {
            event: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            failed: AtomicBool::new(false),
        })))
    }

    /// Ends the daemon with a failure, because `why`.
    pub fn fail(&self, why: &dyn std::fmt::Display) {
        log::error!("{why}");
        self.0.failed.store(true, Ordering::Release);
        self.end();
    }

    /// Ends the daemon, as a signal does.
    pub fn end(&self) {
        // Fails only where the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.0.event, &1_u64.to_ne_bytes());
    }
}

/// The control loop.
///
/// SIGTERM and SIGINT end a daemon. SIGHUP is nothing to it: the terminal that it was started from
/// may close, and it could not say what of a file cannot be followed. It is told options anew over
/// a socket ([`crate::reload`]).
pub struct Control {
    manager: EventManager<Box<dyn MutEventSubscriber>>,
    ending: Rc<Cell<Option<Ending>>>,
    stopper: Stopper,
    /// Sockets at which it is asked.
    asked: Vec<SubscriberId>,
}

impl Control {
    /// The first thing that a daemon does, before it has a second thread: all threads inherit that
    /// the signals are blocked.
    ///
    /// Files and sockets that the daemon makes from now on are its user's alone. A mapped file that
    /// its owner shrinks ends the daemon no more, see [`farlane_zero_copy::fault`]. An eventfd of a
    /// VMM holds up nobody who signals it, see [`eventfd::install`]. A panic of any thread does,
    /// see [`crate::panics`].
    ///
    /// # Errors
    /// The signals cannot be blocked or handled, or there are too many open files.
    pub fn begin() -> io::Result<Self> {
        crate::panics::abort_on_panic();
        let _ = crate::metrics::started();
        farlane_zero_copy::fault::install()?;
        eventfd::install();
        rustix::process::umask(rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
        let (stopper, ending) = (Stopper::new()?, Rc::default());
        let mut control = Self {
            manager: EventManager::new().map_err(io::Error::other)?,
            ending: Rc::clone(&ending),
            stopper: stopper.clone(),
            asked: Vec::new(),
        };
        let requests = EndRequests {
            signals: block_signals()?,
            stopper,
            ending,
        };
        let events = [
            Events::new(&requests.signals, EventSet::IN),
            Events::new(&requests.stopper.0.event, EventSet::IN),
        ];
        control.subscribe(Box::new(requests), &events)?;
        Ok(control)
    }

    fn subscribe(
        &mut self,
        subscriber: Box<dyn MutEventSubscriber>,
        events: &[Events],
    ) -> io::Result<SubscriberId> {
        let id = self.manager.add_subscriber(subscriber);
        let mut ops = self.manager.event_ops(id).map_err(io::Error::other)?;
        for events in events {
            ops.add(*events).map_err(io::Error::other)?;
        }
        Ok(id)
    }

    /// A handle with which a thread can end the daemon.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Answers whoever asks at `listener` with what `collect` collects, until [`close_sockets`].
    ///
    /// [`close_sockets`]: Self::close_sockets
    ///
    /// # Errors
    /// Too many open files.
    pub fn serve_metrics(&mut self, listener: MetricsListener, collect: Collect) -> io::Result<()> {
        self.answer(listener, "metrics", metrics::answer(collect))
    }

    /// Has whoever asks at `listener` answered, until [`close_sockets`](Self::close_sockets).
    pub(crate) fn answer(
        &mut self,
        listener: impl AsFd + 'static,
        name: &'static str,
        answer: Answer,
    ) -> io::Result<()> {
        let socket = AnsweringSocket::new(listener, name, answer)?;
        let events = socket.events();
        let id = self.subscribe(Box::new(socket), &events)?;
        self.asked.push(id);
        Ok(())
    }

    /// Removes the sockets at which it is asked.
    pub fn close_sockets(&mut self) {
        for id in std::mem::take(&mut self.asked) {
            // It is there: its number was kept.
            let _ = self.manager.remove_subscriber(id);
        }
    }

    /// Runs until the daemon is to end.
    #[must_use]
    pub fn wait(&mut self) -> Ending {
        loop {
            if let Err(e) = self.manager.run() {
                log::error!("The control loop has failed: {e}");
                return Ending::Failed;
            }
            if let Some(ending) = self.ending.take() {
                return ending;
            }
        }
    }
}

/// Blocks the signals that end a daemon, for this thread and those that it will start.
///
/// # Returns
/// A descriptor from which they are read (`signalfd(2)`).
fn block_signals() -> io::Result<OwnedFd> {
    let mut signals = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the set that the other calls take; SIG_IGN is a valid
    // disposition, and no handler of anybody else is replaced at this point.
    let (rc, fd) = unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        libc::sigaddset(signals.as_mut_ptr(), libc::SIGTERM);
        libc::sigaddset(signals.as_mut_ptr(), libc::SIGINT);
        // A peer that hangs up is an error of that connection.
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
        let rc = libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut());
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        (rc, libc::signalfd(-1, signals.as_ptr(), flags))
    };
    if rc != 0 {
        return Err(io::Error::from_raw_os_error(rc));
    }
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: signalfd has made this descriptor, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Who asks the daemon to end: signals, and its threads.
struct EndRequests {
    signals: OwnedFd,
    stopper: Stopper,
    ending: Rc<Cell<Option<Ending>>>,
}

impl EndRequests {
    /// `signalfd_siginfo` in bytes, whose first field is the number of the signal.
    const SIGNAL_BYTES: usize = size_of::<libc::signalfd_siginfo>();
}

impl MutEventSubscriber for EndRequests {
    fn init(&mut self, _ops: &mut EventOps<'_>) {}

    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {
        let mut signal = [0; Self::SIGNAL_BYTES];
        if rustix::io::read(&self.signals, &mut signal) == Ok(Self::SIGNAL_BYTES) {
            let [a, b, c, d, ..] = signal;
            log::info!("Ending on signal {}", u32::from_ne_bytes([a, b, c, d]));
        }
        // Each request is one, and the next is another.
        let _ = rustix::io::read(&self.stopper.0.event, &mut [0; 8]);
        self.ending
            .set(Some(match self.stopper.0.failed.load(Ordering::Acquire) {
                true => Ending::Failed,
                false => Ending::Asked,
            }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Signal, getpid, kill_process};
    use std::process::Command;

    /// Says that `child` is to be a daemon: what it does to signals is the whole process's, so it
    /// has one of its own.
    const DAEMON: &str = "FARLANE_TEST_CONTROL";

    #[test]
    fn a_hang_up_ends_nobody_and_a_request_to_end_does() {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "control::tests::child"])
            .env(DAEMON, "1")
            .output()
            .unwrap()
            .status;
        assert!(status.success(), "{status}");
    }

    #[test]
    fn child() {
        if std::env::var(DAEMON).is_err() {
            return;
        }
        let mut control = Control::begin().unwrap();
        kill_process(getpid(), Signal::HUP).unwrap();
        // To this thread: those of the test harness do not know that the signal is blocked.
        // SAFETY: it is blocked, so that nothing happens before somebody waits for it.
        assert_eq!(unsafe { libc::raise(libc::SIGTERM) }, 0);
        assert_eq!(control.wait(), Ending::Asked);
        let stopper = control.stopper();
        std::thread::spawn(move || stopper.end()).join().unwrap();
        assert_eq!(control.wait(), Ending::Asked);
        let stopper = control.stopper();
        std::thread::spawn(move || stopper.fail(&"a part"))
            .join()
            .unwrap();
        assert_eq!(control.wait(), Ending::Failed);
    }
}
