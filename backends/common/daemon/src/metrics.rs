//! Counters for whoever asks: Prometheus text over a UNIX socket.
//!
//! Each connection is answered with one document and closed, so that `socat - UNIX:PATH` and the
//! UNIX-socket scrapers of the field can read it.

use crate::listener::Listener;
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use rustix::net::SocketFlags;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// Time that a reader has to take the whole document.
const PATIENCE: Duration = Duration::from_secs(1);

/// Bytes that are written at once: the kernel waits for room again for each part of them.
const AT_ONCE: usize = 4096;

pub use farlane_worker::counters::Sample;

/// Writes `samples` in Prometheus's text format, each as `PREFIX_name`.
pub fn write_samples<'a>(
    out: &mut String,
    prefix: &str,
    samples: impl IntoIterator<Item = Sample<'a>>,
) {
    for Sample { name, help, value } in samples {
        let _ = writeln!(out, "# HELP {prefix}_{name} {help}");
        let _ = writeln!(out, "{prefix}_{name} {value}");
    }
}

/// A label, `NAME="value"`, as Prometheus's text format has it: in a value a backslash stands
/// before quotes and backslashes, and in place of a line's end there is `\n`. Any name may be a
/// value, and ends neither the label nor its line.
#[must_use]
pub fn label(name: &str, value: &str) -> String {
    let mut text = format!("{name}=\"");
    for character in value.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            character => text.push(character),
        }
    }
    text.push('"');
    text
}

/// Writes `samples` of several things of a kind, each as `PREFIX_name{LABEL="thing"}`.
pub fn write_labelled<'a>(
    out: &mut String,
    prefix: &str,
    kind: &str,
    things: &[(String, Vec<Sample<'a>>)],
) {
    let mut written = Vec::new();
    for Sample { name, help, .. } in things.iter().flat_map(|(_, samples)| samples) {
        if written.contains(name) {
            continue;
        }
        written.push(name);
        let _ = writeln!(out, "# HELP {prefix}_{name} {help}");
        for (thing, samples) in things {
            for sample in samples.iter().filter(|s| s.name == *name) {
                let (label, value) = (label(kind, thing), sample.value);
                let _ = writeln!(out, "{prefix}_{name}{{{label}}} {value}");
            }
        }
    }
}

/// Metrics of every daemon.
fn write_own(out: &mut String) {
    let lost_pages = Sample {
        name: "lost_pages",
        help: "Pages of mapped files that their owner had taken away when they were touched.",
        value: farlane_zero_copy::fault::lost_pages(),
    };
    write_samples(out, "farlane_daemon", [lost_pages]);
}

/// Writes a document to a reader, who has so long for all of it.
fn answer(mut stream: &UnixStream, text: &str, patience: Duration) -> std::io::Result<()> {
    let end = Instant::now() + patience;
    for part in text.as_bytes().chunks(AT_ONCE) {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        stream.write_all(part)?;
    }
    Ok(())
}

/// Renders the metrics of one daemon. It may wait for locks that are held while peers are waited
/// for: it is called on a thread of its own.
pub type MetricsText = Arc<dyn Fn() -> String + Send + Sync>;

/// The socket of the metrics, in the control loop. A thread answers its readers, one after the
/// other: the next is accepted when it has answered.
pub(crate) struct MetricsSocket {
    listener: Listener,
    /// To the thread that answers.
    readers: Sender<UnixStream>,
    /// Readable when the next reader can be accepted: the last one was answered.
    answered: Arc<OwnedFd>,
    /// Readable when it is tried again to accept one.
    retry: OwnedFd,
}

impl MetricsSocket {
    pub fn new(listener: Listener, text: MetricsText) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&listener)?;
        rustix::fs::fcntl_setfl(&listener, flags | OFlags::NONBLOCK)?;
        let answered = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let answered = Arc::new(answered);
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let (readers, accepted) = mpsc::channel();
        let thread = std::thread::Builder::new().name("metrics".to_owned());
        let done = Arc::clone(&answered);
        thread.spawn(move || answer_all(&accepted, &text, &done))?;
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
        let sent = self.readers.send(UnixStream::from(stream));
        sent.map_err(io::Error::other)
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
fn answer_all(readers: &Receiver<UnixStream>, render: &MetricsText, answered: &OwnedFd) {
    for stream in readers {
        let mut text = render();
        write_own(&mut text);
        // A reader that went away is no trouble.
        let _ = answer(&stream, &text, PATIENCE);
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
    use super::*;
    use crate::access::Access;
    use crate::listener::Kind;
    use event_manager::{EventManager, SubscriberOps as _};
    use std::io::Read as _;

    #[test]
    fn things_of_a_kind_have_labels() {
        let sample = |value| Sample {
            name: "reads",
            help: "Reads.",
            value,
        };
        let things = [
            ("a".to_owned(), vec![sample(1)]),
            ("b".to_owned(), vec![sample(2)]),
        ];
        let mut out = String::new();
        write_labelled(&mut out, "farlane", "device", &things);
        assert_eq!(
            out,
            "# HELP farlane_reads Reads.\n\
             farlane_reads{device=\"a\"} 1\nfarlane_reads{device=\"b\"} 2\n"
        );
    }

    #[test]
    fn whatever_a_thing_is_called_its_sample_is_one_line_with_one_label() {
        let sample = Sample {
            name: "reads",
            help: "Reads.",
            value: 7,
        };
        let things = [("5\" \\ disk\nfarlane_reads 8".to_owned(), vec![sample])];
        let mut out = String::new();
        write_labelled(&mut out, "farlane", "disk", &things);
        assert_eq!(
            out,
            "# HELP farlane_reads Reads.\n\
             farlane_reads{disk=\"5\\\" \\\\ disk\\nfarlane_reads 8\"} 7\n"
        );
    }

    #[test]
    fn a_reader_that_reads_a_little_now_and_then_is_left_alone() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        // At this pace it would take seconds.
        let text = "x".repeat(16 << 20);
        let answering =
            std::thread::spawn(move || answer(&ours, &text, Duration::from_millis(100)));
        let mut room = [0; AT_ONCE];
        while !answering.is_finished() {
            let _ = (&theirs).read(&mut room).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(answering.join().unwrap().is_err());
    }

    #[test]
    fn each_connection_gets_one_document() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics");
        let listener = Listener::bind(&path, Kind::Stream, &Access::default()).unwrap();
        let render = || {
            let mut out = String::new();
            let samples = [("calls", u64::MAX), ("bytes", 3)];
            let samples = samples.map(|(name, value)| Sample {
                name,
                help: "All of them.",
                value,
            });
            write_samples(&mut out, "farlane", samples);
            out
        };
        std::thread::spawn(move || {
            let socket = MetricsSocket::new(listener, Arc::new(render)).unwrap();
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
        for _ in 0..2 {
            let mut text = String::new();
            UnixStream::connect(&path)
                .unwrap()
                .read_to_string(&mut text)
                .unwrap();
            assert_eq!(
                text,
                "# HELP farlane_calls All of them.\nfarlane_calls 18446744073709551615\n\
                 # HELP farlane_bytes All of them.\nfarlane_bytes 3\n\
                 # HELP farlane_daemon_lost_pages Pages of mapped files that their owner had taken \
                 away when they were touched.\nfarlane_daemon_lost_pages 0\n"
            );
        }
    }
}
