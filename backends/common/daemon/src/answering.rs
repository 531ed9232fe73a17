//! A socket at which the daemon is asked: for its metrics, or to follow other options.
//!
//! The control loop accepts; a thread answers those who ask one after the other, each of whom has
//! so long: who is slow holds up nothing but others who ask there, for as long.

use crate::stream::Stream;
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use rustix::net::SocketFlags;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

/// Time that somebody has to ask, and then to take the whole answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// Answers over a connection whose other end has [`PATIENCE`] to ask. It is renewed before the
/// answer, however long that has taken to find.
pub(crate) type Answer = Box<dyn FnMut(&mut Stream) -> io::Result<()> + Send>;

/// A socket in the control loop. A thread answers whoever asks there, one after the other: the next
/// is accepted when it has answered.
pub(crate) struct AnsweringSocket<L> {
    listener: L,
    /// What is asked for there, for the log.
    name: &'static str,
    /// To the thread that answers.
    askers: Sender<OwnedFd>,
    /// Readable when the next one can be accepted: the last one was answered.
    answered: Arc<OwnedFd>,
    /// Readable when it is tried again to accept one.
    retry: OwnedFd,
}

impl<L: AsFd> AnsweringSocket<L> {
    /// The thread has this name, too.
    pub fn new(listener: L, name: &'static str, answer: Answer) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&listener)?;
        rustix::fs::fcntl_setfl(&listener, flags | OFlags::NONBLOCK)?;
        let answered = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let answered = Arc::new(answered);
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let (askers, accepted) = mpsc::channel();
        let thread = std::thread::Builder::new().name(name.to_owned());
        let done = Arc::clone(&answered);
        thread.spawn(move || answer_all(&accepted, answer, &done))?;
        Ok(Self {
            listener,
            name,
            askers,
            answered,
            retry: timerfd_create(TimerfdClockId::Monotonic, flags)?,
        })
    }

    /// What it waits for.
    pub fn events(&self) -> [Events; 3] {
        [
            self.askers(EventSet::IN),
            Events::new(&*self.answered, EventSet::IN),
            Events::new(&self.retry, EventSet::IN),
        ]
    }

    fn askers(&self, set: EventSet) -> Events {
        Events::new_raw(self.listener.as_fd().as_raw_fd(), set)
    }

    /// Accepts a connection, and has it answered.
    fn accept(&self) -> io::Result<()> {
        let stream = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC)?;
        // The thread is there for as long as this.
        self.askers.send(stream).map_err(io::Error::other)
    }

    /// Has it tried again in a while.
    fn rest(&self) -> io::Result<()> {
        let once = Itimerspec {
            it_interval: Timespec::default(),
            it_value: PATIENCE.try_into().map_err(io::Error::other)?,
        };
        timerfd_settime(&self.retry, TimerfdTimerFlags::empty(), &once)?;
        Ok(())
    }
}

/// Answers all until there is no socket any more.
fn answer_all(askers: &Receiver<OwnedFd>, mut answer: Answer, answered: &OwnedFd) {
    for socket in askers {
        let mut stream = Stream::new(socket, PATIENCE);
        // Who asked and went away is no trouble.
        let _ = answer(&mut stream);
        drop(stream);
        // Fails only where the counter is full, and then it is readable.
        let _ = rustix::io::write(answered, &1_u64.to_ne_bytes());
    }
}

impl<L: AsFd> MutEventSubscriber for AnsweringSocket<L> {
    fn init(&mut self, _ops: &mut EventOps<'_>) {}

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let is_asker = events.fd() == self.listener.as_fd().as_raw_fd();
        let next = if is_asker {
            // Out of descriptors, most likely.
            if self.accept().is_err() {
                let _ = self.rest();
            }
            EventSet::empty()
        } else {
            for event in [&*self.answered, &self.retry] {
                let _ = rustix::io::read(event, &mut [0; 8]);
            }
            EventSet::IN
        };
        if let Err(e) = ops.modify(self.askers(next)) {
            log::error!(
                "Nobody is answered any more at the socket of {}: {e}",
                self.name
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Access;
    use crate::metrics::{Collect, Metrics, MetricsAddress, Sample, answer};
    use event_manager::{EventManager, SubscriberOps as _};
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    fn collect() -> Collect {
        Arc::new(|| {
            let mut metrics = Metrics::default();
            let calls = Sample::counter("calls", "All of them.", u64::MAX);
            metrics.add("farlane", &[], [calls]);
            metrics
        })
    }

    #[test]
    fn each_connection_gets_one_document_by_either_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics");
        let port = MetricsAddress::Loopback("127.0.0.1:0".parse().unwrap());
        let addresses = [MetricsAddress::Path(path.clone()), port];
        let listeners = addresses.map(|address| address.listen(&Access::default()).unwrap());
        let address = match rustix::net::getsockname(&listeners[1]).unwrap().try_into() {
            Ok(address) => std::net::SocketAddr::V4(address),
            Err(e) => panic!("{e}"),
        };
        for listener in listeners {
            std::thread::spawn(move || {
                let answer = answer(collect());
                let socket = AnsweringSocket::new(listener, "metrics", answer).unwrap();
                let events = socket.events();
                let mut manager = EventManager::new().unwrap();
                let id = manager.add_subscriber(socket);
                for events in events {
                    manager.event_ops(id).unwrap().add(events).unwrap();
                }
                loop {
                    manager.run().unwrap();
                }
            });
        }
        let patience = Duration::from_secs(10);
        for _ in 0..2 {
            let text = MetricsAddress::Path(path.clone()).ask(patience).unwrap();
            assert!(
                text.contains("\nfarlane_calls_total 18446744073709551615\n"),
                "{text}"
            );
            assert!(
                text.contains("\nfarlane_daemon_lost_pages_total 0\n"),
                "{text}"
            );
            assert!(text.contains("farlane_build_info{program="), "{text}");
        }
        assert!(MetricsAddress::Loopback(address).ask(patience).is_ok());
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"));
        assert!(
            said.contains("\n# TYPE farlane_calls_total counter\n"),
            "{said}"
        );
    }
}
