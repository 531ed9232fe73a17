//! HTTP/1.1 as far as metrics and their page need it: `GET` and `HEAD`, a connection for each.
//!
//! The control loop accepts; a thread answers readers one after the other, each of whom has so
//! long: who is slow holds up nothing but other readers, for as long.

use super::page;
use super::{Collect, MetricsAddress, MetricsListener, add_own};
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// Time that a reader has to ask, and then to take the whole document.
const PATIENCE: Duration = Duration::from_secs(1);
/// Bytes that are written at once: the kernel waits for room again for each part of them.
const AT_ONCE: usize = 4096;
/// Most bytes of a request, and of its header fields: those of Prometheus and curl have a few
/// hundred.
const MAX_REQUEST: usize = 8192;
const MAX_FIELDS: usize = 64;
/// Most bytes of an answer that is asked for: far more than a daemon tells.
const MAX_ANSWER: usize = 16 << 20;

/// What OpenMetrics text is called (OpenMetrics 1.0.0, "Content-Type").
const OPEN_METRICS: &str = "application/openmetrics-text";
const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// In every answer: it is what it is called, of now, and for no other site (RFC 9111, 5.2.2.5;
/// Fetch, "X-Content-Type-Options" and "Cross-Origin-Resource-Policy").
const GUARDS: &str = "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n\
     Cross-Origin-Resource-Policy: same-origin\r\nReferrer-Policy: no-referrer\r\n";

/// A connection, either way with a time by which it is over.
struct Stream {
    file: File,
    end: Instant,
}

impl Stream {
    fn new(socket: OwnedFd, patience: Duration) -> Self {
        Self {
            file: File::from(socket),
            end: Instant::now() + patience,
        }
    }

    /// It has so long from now on.
    fn renew(&mut self, patience: Duration) {
        self.end = Instant::now() + patience;
    }

    /// Has the next call end by then.
    fn limit(&self, way: sockopt::Timeout) -> io::Result<()> {
        let left = self.end.saturating_duration_since(Instant::now());
        // None would be for ever, and so would less than a microsecond.
        if left < Duration::from_millis(1) {
            return Err(ErrorKind::TimedOut.into());
        }
        Ok(sockopt::set_socket_timeout(&self.file, way, Some(left))?)
    }

    /// Reads up to the end of a request's head.
    fn request(&mut self) -> io::Result<Vec<u8>> {
        let mut request = Vec::new();
        let mut room = [0; 1024];
        while !is_whole(&request) {
            self.limit(sockopt::Timeout::Recv)?;
            let bytes = self.file.read(&mut room)?;
            request.extend(&room[..bytes]);
            if bytes == 0 || request.len() > MAX_REQUEST {
                break;
            }
        }
        Ok(request)
    }

    /// Reads to the end of an answer.
    fn answer(&mut self) -> io::Result<Vec<u8>> {
        let mut answer = Vec::new();
        let mut room = vec![0; 1 << 16];
        loop {
            self.limit(sockopt::Timeout::Recv)?;
            let bytes = match self.file.read(&mut room) {
                Ok(0) => return Ok(answer),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                read => read?,
            };
            answer.extend(&room[..bytes]);
            if answer.len() > MAX_ANSWER {
                let what = format!("it answers with more than {} MiB", MAX_ANSWER >> 20);
                return Err(io::Error::new(ErrorKind::InvalidData, what));
            }
        }
    }

    fn write(&mut self, text: &[u8]) -> io::Result<()> {
        for part in text.chunks(AT_ONCE) {
            self.limit(sockopt::Timeout::Send)?;
            self.file.write_all(part)?;
        }
        Ok(())
    }
}

fn is_whole(request: &[u8]) -> bool {
    request.windows(4).any(|end| end == b"\r\n\r\n") || request.windows(2).any(|end| end == b"\n\n")
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// The metrics, as OpenMetrics or for Prometheus, or only what comes before them.
    Metrics { is_open: bool, is_head: bool },
    /// A file of the page, or only what comes before it.
    Page { file: page::File, is_head: bool },
    /// Something that is refused so.
    Nothing(&'static str),
}

/// Whether a request is for an address, or this host by its own name: a page of the web that has
/// its name lead here says that name (DNS rebinding).
fn is_for_this_host(host: &[u8]) -> bool {
    let host = str::from_utf8(host).unwrap_or_default().trim();
    let is_port = |port: &str| port.bytes().all(|digit| digit.is_ascii_digit());
    let name = match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) => name,
        _ => host,
    };
    let address = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'));
    let is_address = address.unwrap_or(name).parse::<std::net::IpAddr>().is_ok();
    is_address || name.eq_ignore_ascii_case("localhost")
}

fn parse(request: &[u8]) -> Asked {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut parsed = httparse::Request::new(&mut fields);
    match parsed.parse(request) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if request.len() > MAX_REQUEST => {
            return Asked::Nothing("431 Request Header Fields Too Large");
        }
        Err(httparse::Error::TooManyHeaders) => {
            return Asked::Nothing("431 Request Header Fields Too Large");
        }
        Ok(httparse::Status::Partial) | Err(_) => return Asked::Nothing("400 Bad Request"),
    }
    let method = parsed.method.unwrap_or_default();
    if !["GET", "HEAD"].contains(&method) {
        return Asked::Nothing("405 Method Not Allowed\r\nAllow: GET, HEAD");
    }
    let named = |name: &'static str| {
        let fields = parsed.headers.iter();
        fields.filter(move |field| field.name.eq_ignore_ascii_case(name))
    };
    // Also at a UNIX socket, to which a forwarded port may lead.
    if !named("host").all(|field| is_for_this_host(field.value)) {
        return Asked::Nothing("403 Forbidden");
    }
    let path = parsed.path.unwrap_or_default();
    // A whole address is as good as its path (RFC 9112, 3.2.2).
    let path = match path.strip_prefix("http://") {
        Some(address) => address.find('/').map_or("/", |at| &address[at..]),
        None => path,
    };
    let path = path.split('?').next().unwrap_or_default();
    let is_head = method == "HEAD";
    if let Some(file) = page::File::at(path) {
        return Asked::Page { file, is_head };
    }
    if path != "/metrics" {
        return Asked::Nothing("404 Not Found");
    }
    let is_open = |field: &httparse::Header<'_>| {
        let value = field.value;
        value
            .windows(OPEN_METRICS.len())
            .any(|part| part == OPEN_METRICS.as_bytes())
    };
    Asked::Metrics {
        is_open: named("accept").any(is_open),
        is_head,
    }
}

/// The answer to a request.
fn answer(request: &[u8], collect: &Collect) -> String {
    match parse(request) {
        Asked::Metrics { is_open, is_head } => {
            let mut metrics = collect();
            add_own(&mut metrics);
            let (text, kind) = match is_open {
                true => (metrics.open_metrics(), OPEN_METRICS_TYPE),
                false => (metrics.prometheus(), PROMETHEUS_TYPE),
            };
            message("200 OK", kind, &text, is_head)
        }
        Asked::Page { file, is_head } => {
            let status = format!("200 OK\r\nContent-Security-Policy: {}", page::POLICY);
            message(&status, file.content_type(), &file.text(), is_head)
        }
        Asked::Nothing(status) => {
            let text = format!("{}\n", status.lines().next().unwrap_or_default());
            let is_head = request.starts_with(b"HEAD ");
            message(status, "text/plain", &text, is_head)
        }
    }
}

/// A response (RFC 9112, 2.1). Fields may stand behind the status.
fn message(status: &str, kind: &str, text: &str, is_head: bool) -> String {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{GUARDS}\
         Connection: close\r\n\r\n",
        text.len()
    );
    if is_head { head } else { head + text }
}

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

/// Connects to where a daemon is asked, in so long.
fn connect(address: &MetricsAddress, patience: Duration) -> io::Result<OwnedFd> {
    match address {
        MetricsAddress::Loopback(address) => {
            TcpStream::connect_timeout(address, patience).map(OwnedFd::from)
        }
        MetricsAddress::Path(path) => {
            let flags = SocketFlags::CLOEXEC;
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            // A socket whose queue is full has whoever connects wait (unix(7)), for as long as
            // this.
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(patience))?;
            rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(socket)
        }
    }
}

/// What is said of a peer that let a time go by.
fn late(error: io::Error) -> io::Error {
    let is_late = [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind());
    match is_late {
        true => io::Error::new(ErrorKind::TimedOut, "it does not answer in time"),
        false => error,
    }
}

/// Asks a daemon, as [`MetricsAddress::ask`] does.
pub(super) fn ask(address: &MetricsAddress, patience: Duration) -> io::Result<String> {
    let ask = || {
        let end = Instant::now() + patience;
        let file = File::from(connect(address, patience)?);
        let mut stream = Stream { file, end };
        let request =
            format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: {OPEN_METRICS}\r\n\r\n");
        stream.write(request.as_bytes())?;
        stream.answer()
    };
    let answer = ask().map_err(late)?;
    let other = || io::Error::new(ErrorKind::InvalidData, "it answers with no metrics");
    let answer = String::from_utf8(answer).map_err(|_| other())?;
    let (head, text) = answer.split_once("\r\n\r\n").ok_or_else(other)?;
    let is_well = head.starts_with("HTTP/1.1 200 ") && text.ends_with("# EOF\n");
    is_well.then(|| text.to_owned()).ok_or_else(other)
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, MetricsAddress, Sample};
    use super::*;
    use crate::access::Access;
    use event_manager::{EventManager, SubscriberOps as _};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::atomic::{AtomicBool, Ordering};

    fn collect() -> Collect {
        Arc::new(|| {
            let mut metrics = Metrics::default();
            let calls = Sample::counter("calls", "All of them.", u64::MAX);
            metrics.add("farlane", &[], [calls]);
            metrics
        })
    }

    #[test]
    fn what_is_no_question_has_a_refusal() {
        let asked = |text: &str| match parse(text.as_bytes()) {
            Asked::Nothing(status) => status.split(' ').next().unwrap().to_owned(),
            Asked::Metrics { is_open, is_head } => format!("{is_open} {is_head}"),
            Asked::Page { file, is_head } => format!("{file:?} {is_head}"),
        };
        for (request, said) in [
            ("GET /metrics HTTP/1.1\r\n\r\n", "false false"),
            ("HEAD /metrics HTTP/1.0\r\n\r\n", "false true"),
            ("HEAD / HTTP/1.0\r\n\r\n", "Html true"),
            ("GET /page.css?x HTTP/1.1\r\n\r\n", "Css false"),
            ("GET http://x/page.js HTTP/1.1\r\n\r\n", "Js false"),
            ("GET /../page.js HTTP/1.1\r\n\r\n", "404"),
            ("GET /page/page.js HTTP/1.1\r\n\r\n", "404"),
            ("GET /favicon.ico HTTP/1.1\r\n\r\n", "404"),
            ("POST / HTTP/1.1\r\n\r\n", "405"),
            (
                "GET /metrics?x=y HTTP/1.1\r\nACCEPT: text/plain;q=0.1,application/openmetrics-text\
                 ;version=1.0.0\r\n\r\n",
                "true false",
            ),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("GET /other HTTP/1.1\r\n\r\n", "404"),
            (
                "GET http://x:1/metrics HTTP/1.1\r\nHost: [::1]:9100\r\n\r\n",
                "false false",
            ),
            (
                "GET /metrics HTTP/1.1\r\nHost: LOCALHOST:9100\r\n\r\n",
                "false false",
            ),
            ("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "Html false"),
            (
                "GET /metrics HTTP/1.1\r\nHost: rebound.example:9100\r\n\r\n",
                "403",
            ),
            (
                "GET / HTTP/1.1\r\nHost: rebound.example:9100\r\n\r\n",
                "403",
            ),
            ("GET / HTTP/1.1\r\nhost: 127.0.0.1.example\r\n\r\n", "403"),
            ("GET /metrics HTTP/1.1\r\nHost", "400"),
            ("", "400"),
            ("metrics, please\n\n", "400"),
        ] {
            assert_eq!(asked(request), said, "{request}");
        }
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65));
        assert_eq!(asked(&many), "431");
        let long = format!("GET / HTTP/1.1\r\nA: {}", "b".repeat(MAX_REQUEST));
        assert_eq!(asked(&long), "431");
        let refusal = answer(b"PUT / HTTP/1.1\r\n\r\n", &collect());
        let allowed = "HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\n";
        assert!(refusal.starts_with(allowed), "{refusal}");
        assert!(refusal.ends_with("\r\n\r\n405 Method Not Allowed\n"));
        let refused = answer(b"HEAD /x HTTP/1.1\r\n\r\n", &collect());
        assert!(refused.ends_with("\r\n\r\n"), "{refused}");
        let head = answer(b"HEAD / HTTP/1.1\r\n\r\n", &collect());
        assert!(head.ends_with("Connection: close\r\n\r\n"), "{head}");
    }

    #[test]
    fn the_page_is_served_with_a_policy_that_has_nothing_else_run() {
        for (path, kind) in [
            ("/", "text/html; charset=utf-8"),
            ("/page.css", "text/css; charset=utf-8"),
            ("/page.js", "text/javascript; charset=utf-8"),
        ] {
            let asked = |method| {
                let request = format!("{method} {path} HTTP/1.1\r\nHost: [::1]:1\r\n\r\n");
                answer(request.as_bytes(), &collect())
            };
            let whole = asked("GET");
            let (head, text) = whole.split_once("\r\n\r\n").unwrap();
            assert_eq!(asked("HEAD"), format!("{head}\r\n\r\n"));
            let length = format!("Content-Length: {}", text.len());
            let kind = format!("Content-Type: {kind}");
            let policy = "Content-Security-Policy: default-src 'none'; script-src 'self'; \
                          style-src 'self'; connect-src 'self'; base-uri 'none'; form-action \
                          'none'; frame-ancestors 'none'";
            for field in [
                "HTTP/1.1 200 OK",
                policy,
                &kind,
                &length,
                "X-Content-Type-Options: nosniff",
                "Cache-Control: no-store",
                "Cross-Origin-Resource-Policy: same-origin",
                "Connection: close",
            ] {
                let count = head.split("\r\n").filter(|line| *line == field).count();
                assert_eq!(count, 1, "{field} in {head}");
            }
        }
        // A page of the web cannot take metrics or refusals for scripts of its own either.
        for path in ["/metrics", "/other"] {
            let request = format!("GET {path} HTTP/1.1\r\n\r\n");
            let said = answer(request.as_bytes(), &collect());
            assert!(
                said.contains("\r\nX-Content-Type-Options: nosniff\r\n"),
                "{said}"
            );
        }
    }

    #[test]
    fn a_reader_that_reads_a_little_now_and_then_is_left_alone() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        // At this pace it would take seconds.
        let text = "x".repeat(16 << 20);
        let patience = Duration::from_millis(100);
        let answering = std::thread::spawn(move || {
            let mut stream = Stream::new(ours.into(), patience);
            stream.write(text.as_bytes())
        });
        let mut room = [0; AT_ONCE];
        while !answering.is_finished() {
            let _ = theirs.read(&mut room).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(answering.join().unwrap().is_err());
        // Nor is one that asks for ever.
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let asked = std::thread::spawn(move || Stream::new(ours.into(), patience).request());
        while !asked.is_finished() && theirs.write_all(b"G").is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(asked.join().unwrap().is_err());
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

    #[test]
    fn who_answers_slowly_or_without_end_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics");
        let address = MetricsAddress::Path(path.clone());
        let patience = Duration::from_millis(200);
        let said = |patience| ask(&address, patience).unwrap_err().to_string();
        assert!(said(patience).contains("No such file"));
        let listener = UnixListener::bind(&path).unwrap();
        // One is let in, though never accepted, and no other.
        rustix::net::listen(&listener, 0).unwrap();
        for _ in 0..2 {
            assert_eq!(said(patience), "it does not answer in time");
        }
        let is_fast = Arc::new(AtomicBool::new(false));
        let pace = Arc::clone(&is_fast);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                while stream.write_all(b"HTTP/1.1 200 OK\r\n").is_ok() {
                    if !pace.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                }
            }
        });
        // A line now and then is no answer.
        assert_eq!(said(patience), "it does not answer in time");
        is_fast.store(true, Ordering::Relaxed);
        let patience = Duration::from_secs(600);
        assert_eq!(said(patience), "it answers with more than 16 MiB");
    }

    #[test]
    fn metrics_are_told_to_this_host_alone() {
        let parse = |text: &str| text.parse::<MetricsAddress>();
        assert!(matches!(
            parse("[::1]:9100"),
            Ok(MetricsAddress::Loopback(_))
        ));
        assert!(matches!(parse("/run/m:9100"), Ok(MetricsAddress::Path(_))));
        for other in ["0.0.0.0:9100", "192.0.2.1:80", "[::]:9100"] {
            assert!(parse(other).is_err(), "{other}");
        }
        let loopback = MetricsAddress::Loopback("127.0.0.1:9100".parse().unwrap());
        for name in ["localhost:9100", "LocalHost:9100"] {
            assert_eq!(parse(name).unwrap(), loopback);
        }
        for name in [
            "host.example:9100",
            ":9100",
            "localhost:99999",
            "127.0.0.1.:80",
        ] {
            let error = parse(name).unwrap_err();
            let named = error.contains("127.0.0.1") && error.contains(&format!("./{name}"));
            assert!(named, "{error}");
        }
        for path in [
            "./localhost:9100",
            "m",
            "9100",
            "m:",
            "a:b",
            "m:9100.metrics",
        ] {
            assert_eq!(parse(path).unwrap(), MetricsAddress::Path(path.into()));
        }
    }
}
