//! The socket at which metrics are asked for.
//!
//! The control loop accepts; a thread answers readers one after the other, each of whom has so
//! long: who is slow holds up nothing but other readers, for as long.

use super::http::answer;
use super::stream::Stream;
use super::{Collect, MetricsListener};
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use rustix::net::SocketFlags;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

/// Time that a reader has to ask, and then to take the whole document.
const PATIENCE: Duration = Duration::from_secs(1);

/// The socket of the metrics, in the control loop. A thread answers its readers, one after the
/// other: the next is accepted when it has answered.
pub(crate) struct MetricsSocket {
    listener: MetricsListener,
    /// To the thread that answers.
    readers: Sender<OwnedFd>,
    /// Readable when the next reader can be accepted: the last one was answered.
    answered: Arc<OwnedFd>,
    /// Readable when it is tried again to accept one.
    retry: OwnedFd,
}

impl MetricsSocket {
    pub fn new(listener: MetricsListener, collect: Collect) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&listener)?;
        rustix::fs::fcntl_setfl(&listener, flags | OFlags::NONBLOCK)?;
        let answered = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let answered = Arc::new(answered);
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let (readers, accepted) = mpsc::channel();
        let thread = std::thread::Builder::new().name("metrics".to_owned());
        let done = Arc::clone(&answered);
        thread.spawn(move || answer_all(&accepted, &collect, &done))?;
        Ok(Self {
            listener,
            readers,
            answered,
            retry: timerfd_create(TimerfdClockId::Monotonic, flags)?,
        })
    }

    /// What it waits for.
    pub fn events(&self) -> [Events; 3] {
        [
            self.readers(EventSet::IN),
            Events::new(&*self.answered, EventSet::IN),
            Events::new(&self.retry, EventSet::IN),
        ]
    }

    fn readers(&self, set: EventSet) -> Events {
        Events::new_raw(self.listener.as_fd().as_raw_fd(), set)
    }

    /// Accepts a reader, and has it answered.
    fn accept(&self) -> io::Result<()> {
        let stream = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC)?;
        // The thread is there for as long as this.
        self.readers.send(stream).map_err(io::Error::other)
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

/// Answers readers until there is no socket any more.
fn answer_all(readers: &Receiver<OwnedFd>, collect: &Collect, answered: &OwnedFd) {
    for socket in readers {
        let mut stream = Stream::new(socket, PATIENCE);
        // A reader that went away is no trouble.
        let _ = stream.request().and_then(|request| {
            let answer = answer(&request, collect);
            // However long that has taken: others may have been waited for.
            stream.renew(PATIENCE);
            stream.write(answer.as_bytes())
        });
        drop(stream);
        // Fails only where the counter is full, and then it is readable.
        let _ = rustix::io::write(answered, &1_u64.to_ne_bytes());
    }
}

impl MutEventSubscriber for MetricsSocket {
    fn init(&mut self, _ops: &mut EventOps<'_>) {}

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let is_reader = events.fd() == self.listener.as_fd().as_raw_fd();
        let next = if is_reader {
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
        if let Err(e) = ops.modify(self.readers(next)) {
            log::error!("The metrics cannot be served any more: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::client::ask;
    use super::super::{Metrics, MetricsAddress, Sample};
    use super::*;
    use crate::access::Access;
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
                let socket = MetricsSocket::new(listener, collect()).unwrap();
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
            let text = ask(&MetricsAddress::Path(path.clone()), patience).unwrap();
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
        assert!(ask(&MetricsAddress::Loopback(address), patience).is_ok());
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
