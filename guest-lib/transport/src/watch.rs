//! Notices that a socket's backend has gone, and wakes everybody who would wait for it. The thread
//! that does lasts as long as the program, by which the backend notices that this one has gone.

use crate::guard::{Guarded, Kind};
use crate::owner::Hold;
use crate::{Map, Origin, TransportError, spawn_quiet};
use farlane_abi::arena::OFF_DEAD;
use farlane_sys::sync::lock;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;

/// What transport and watcher share.
#[derive(Debug)]
pub(crate) struct Fate {
    dead: AtomicBool,
    header: OnceLock<Arc<Map>>,
    /// Wakes a caller: `EVENT_WAKE`.
    pub(crate) wake: OwnedFd,
    /// The eventfds to wake with it, by event index.
    bound: Mutex<BTreeMap<u32, OwnedFd>>,
}

impl Fate {
    pub(crate) fn new(wake: OwnedFd) -> Self {
        Self {
            dead: AtomicBool::new(false),
            header: OnceLock::new(),
            wake,
            bound: Mutex::new(BTreeMap::new()),
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Makes `header` the segment that tells the process of the backend's death.
    pub(crate) fn set_header(&self, header: &Arc<Map>) {
        let header = self.header.get_or_init(|| Arc::clone(header));
        if self.is_dead() {
            header.word(OFF_DEAD).store(1, Ordering::Release);
        }
    }

    pub(crate) fn bound(&self) -> MutexGuard<'_, BTreeMap<u32, OwnedFd>> {
        lock(&self.bound)
    }

    /// The backend is gone: says so in the header and signals every eventfd once.
    pub(crate) fn die(&self) {
        if self.dead.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(header) = self.header.get() {
            header.word(OFF_DEAD).store(1, Ordering::Release);
        }
        signal(self.wake.as_fd());
        for fd in self.bound().values() {
            signal(fd.as_fd());
        }
    }
}

/// Adds one to an eventfd.
pub(crate) fn signal(fd: BorrowedFd<'_>) {
    // Fails only where the counter is at its limit, and then the fd is readable anyway.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// The watching thread; ends when dropped.
#[derive(Debug)]
pub(crate) struct Watcher {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    origin: Origin,
    /// The thread's, which the kernel looks at when it ends.
    _hold: Arc<Hold>,
}

impl Watcher {
    /// Watches `socket` from a thread of its own, which blocks all signals: they belong to the
    /// program's threads. When this returns the thread holds the owner word of `header`.
    pub(crate) fn start(
        socket: Arc<Guarded>,
        fate: Arc<Fate>,
        header: &Arc<Map>,
    ) -> Result<Self, TransportError> {
        let failed = |source| TransportError::os("eventfd", source);
        let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(failed)?;
        let ends = watching(&socket, stop.as_fd())?;
        let hold = Hold::new(header);
        let (holds, held) = channel();
        let of_thread = Arc::clone(&hold);
        let thread = spawn_quiet("farlane-watch", 64 << 10, move || {
            // SAFETY: the watcher keeps it until the thread has been waited for, or for ever. There
            // are no other such locks here.
            unsafe { of_thread.take() };
            let _ = holds.send(());
            watch(&ends, &fate);
            // A file that is closed is watched no more.
            drop(socket);
        })
        .map_err(|source| TransportError::os("Starting a thread", source))?;
        let watcher = Self {
            stop,
            thread: Some(thread),
            origin: Origin::here(),
            _hold: hold,
        };
        let _ = held.recv();
        Ok(watcher)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // A child process has no such thread, and must not end its parent's.
        if self.origin.is_here()
            && let Some(thread) = self.thread.take()
        {
            signal(self.stop.as_fd());
            let _ = thread.join();
        }
    }
}

/// What [`watch`] waits for: that the watcher is to end, or that the backend has.
const STOP: u64 = 0;
const GONE: u64 = 1;

/// Both, by their files: the socket's number may have to make way while it is watched.
fn watching(socket: &Guarded, stop: BorrowedFd<'_>) -> Result<Guarded, TransportError> {
    let failed = |source| TransportError::os("epoll", source);
    let ends = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
    let socket = socket.enter().ok_or(TransportError::Gone)?;
    let gone = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP;
    for (file, of, flags) in [
        (stop, STOP, epoll::EventFlags::IN),
        (socket.as_fd(), GONE, gone),
    ] {
        epoll::add(&ends, file, epoll::EventData::new_u64(of), flags).map_err(failed)?;
    }
    Ok(Guarded::new(ends, Kind::Device))
}

fn watch(ends: &Guarded, fate: &Fate) {
    // Not in use meanwhile: its number may have to make way, too. Who waits has the file.
    let number = || ends.enter().map(|ends| ends.number());
    while let Some(at) = number() {
        // SAFETY: a number that is asked about.
        let ends = unsafe { BorrowedFd::borrow_raw(at) };
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(STOP),
        }; 2];
        match epoll::wait(ends, &mut events[..], None) {
            Ok(count) => {
                let told = events.get(..count).unwrap_or_default();
                if told.iter().all(|event| event.data.u64() != STOP) {
                    fate.die();
                }
                return;
            }
            Err(Errno::INTR) => {}
            // It has made way.
            Err(_) if number() != Some(at) => {}
            // The program has closed it, and whatever else there was.
            Err(_) => {
                fate.die();
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::{self, make_way};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::fs;
    use std::os::fd::AsRawFd as _;
    use std::time::{Duration, Instant};

    fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < end, "{what}");
            std::thread::yield_now();
        }
    }

    /// Whether every watcher of this process waits.
    fn all_wait() -> bool {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let states = tasks.filter_map(|task| {
            let stat = fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
            let (_, state) = stat.split_once("(farlane-watch) ")?;
            state.chars().next()
        });
        let states: Vec<char> = states.collect();
        !states.is_empty() && states.iter().all(|state| *state == 'S')
    }

    #[test]
    fn the_end_of_a_backend_is_noticed_where_the_sockets_number_has_made_way() {
        let _turn = guard::tests::turn();
        let pair = |flags| socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (ours, backend) = pair(SocketFlags::CLOEXEC).unwrap();
        let socket = Arc::new(Guarded::new(ours, Kind::Device));
        let wake = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let fate = Arc::new(Fate::new(wake));
        let header = Arc::new(Map::anonymous(4096).unwrap());
        let watcher = Watcher::start(Arc::clone(&socket), Arc::clone(&fate), &header).unwrap();
        until("it waits", all_wait);
        let number = socket.enter().unwrap().number();
        make_way(number, true).unwrap();
        // The program has another file there.
        let program = tempfile::tempfile().unwrap();
        // SAFETY: a number that has made way.
        assert_eq!(unsafe { libc::dup2(program.as_raw_fd(), number) }, number);
        assert!(!fate.is_dead());
        drop(backend);
        until("it notices", || fate.is_dead());
        drop(watcher);
        // SAFETY: the program's.
        assert_eq!(unsafe { libc::close(number) }, 0);
    }
}
