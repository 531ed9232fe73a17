//! The thread that serves a control queue.

use super::QueueError;
use super::virtqueue::Virtqueue;
use crate::control::request::{ERR, MAX_COMMAND_BYTES, OK};
use crate::counters::count;
use crate::guest::Guest;
use crate::interface::Interface;
use farlane_abi::width::to_usize;
use farlane_daemon::warn_limited;
use farlane_sys::chain;
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::segment::total;
use farlane_vhost_user::session::Setup;
use farlane_vhost_user::vring::Rings;
use farlane_worker::mailbox::{self, Receiver, Sender};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Commands that are done before it looks whether it is to stop.
const AT_ONCE: usize = 16;
/// How often a queue is looked at whose driver never tells.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

/// A control queue that is served.
#[derive(Debug)]
pub struct ControlWorker {
    stop: Sender<Stop>,
    thread: JoinHandle<u16>,
}

/// The worker is to stop.
#[derive(Debug)]
struct Stop;

impl ControlWorker {
    /// Starts to serve a control queue.
    pub fn start(setup: Setup, guest: Arc<Guest>, interface: Arc<Interface>) -> io::Result<Self> {
        let (stop, mut stopped) = mailbox::new(1)?;
        if setup.next_available == 0 {
            // A driver that begins. One that was only paused goes on with what it has set.
            guest.begin_control();
        }
        let thread = std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || {
                ControlQueue {
                    queue: Virtqueue::new(setup),
                    guest,
                    interface,
                    chain: Chain::default(),
                    request: Vec::new(),
                }
                .run(&mut stopped)
            })?;
        Ok(Self { stop, thread })
    }

    /// Stops to; returns where the next one begins.
    pub fn stop(self) -> u16 {
        // There is room for it, and nobody has sent it before.
        let _ = self.stop.send(Stop);
        self.thread.join().unwrap_or_else(|_| {
            log::error!("A control queue's worker has panicked");
            0
        })
    }
}

struct ControlQueue {
    queue: Virtqueue,
    guest: Arc<Guest>,
    interface: Arc<Interface>,
    chain: Chain,
    request: Vec<u8>,
}

impl ControlQueue {
    fn run(&mut self, stop: &mut Receiver<Stop>) -> u16 {
        if let Err(e) = self.queue.begin() {
            self.breaks(&e);
        }
        while !stop.has() {
            let worked = if self.queue.broken {
                false
            } else {
                self.serve().unwrap_or_else(|e| {
                    self.breaks(&e);
                    false
                })
            };
            if !worked {
                self.sleep(stop);
            }
        }
        self.queue.progress.next_available
    }

    fn breaks(&mut self, why: &QueueError) {
        if self.queue.breaks() {
            count(&self.interface.counters.broken_queues, 1);
            let name = &self.interface.name;
            warn_limited!(
                self.interface.limit,
                "Interface {name}, control queue: {}",
                chain(why)
            );
        }
    }

    /// Does commands. Returns whether there were any.
    fn serve(&mut self) -> Result<bool, QueueError> {
        let rings = self.queue.rings()?;
        let mut worked = false;
        for _ in 0..AT_ONCE {
            let Some(head) = self.queue.progress.take(&rings)? else {
                break;
            };
            worked = true;
            self.chain.follow(&rings, head)?;
            let written = self.answer(&rings)?;
            self.queue.progress.put(&rings, head, written);
        }
        if self.queue.show()? {
            count(&self.interface.counters.interrupts, 1);
        }
        Ok(worked)
    }

    /// Does the command of a chain. Returns the bytes written.
    fn answer(&mut self, rings: &Rings) -> Result<u32, QueueError> {
        let Some(ack) = self.chain.writable.first() else {
            return Err(QueueError::Buffer { runs: 0, room: 0 });
        };
        let bytes = total(&self.chain.readable);
        let fits = usize::try_from(bytes).is_ok_and(|bytes| bytes <= MAX_COMMAND_BYTES);
        let result = if fits {
            self.request.clear();
            for segment in &self.chain.readable {
                let at = self.request.len();
                let length = to_usize(segment.bytes);
                self.request.resize(at + length, 0);
                let part = self.request.get_mut(at..).unwrap_or_default();
                rings.view().read(segment.address, part)?;
            }
            self.guest.command(&self.request).map_err(|e| e.to_string())
        } else {
            Err(format!("A command of {bytes} bytes"))
        };
        count(&self.interface.counters.commands, 1);
        let ack_byte = match result {
            Ok(()) => OK,
            Err(e) => {
                log::debug!("Interface {}, control queue: {e}", self.interface.name);
                ERR
            }
        };
        rings.view().write(ack.address, &[ack_byte])?;
        Ok(1)
    }

    fn sleep(&mut self, stop: &mut Receiver<Stop>) {
        let takes = !self.queue.broken;
        if takes {
            match self.queue.arm(0) {
                Ok(false) => (),
                Ok(true) => return,
                Err(e) => return self.breaks(&e.into()),
            }
        }
        if stop.announce() {
            self.queue.forget();
            let mut fds = vec![PollFd::from_borrowed_fd(stop.fd(), PollFlags::IN)];
            let kick = self.queue.kick().filter(|_| takes);
            fds.extend(kick.map(|kick| PollFd::from_borrowed_fd(kick, PollFlags::IN)));
            let never_tells = takes && kick.is_none();
            let _ = poll(&mut fds, never_tells.then_some(&LOOK));
        }
        stop.awake();
        if self.queue.take_kick() {
            count(&self.interface.counters.kicks, 1);
        }
        if takes && let Err(e) = self.queue.disarm() {
            self.breaks(&e.into());
        }
    }
}
