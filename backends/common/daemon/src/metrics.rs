//! What a daemon counts, for whoever asks: OpenMetrics text over HTTP.
//!
//! [`families`] are what it says; `http` is how it is asked, and `client` asks; [`exposition`] is
//! how an answer is read, [`measures`] is what of it says what of a device. Beside them is a page
//! for browsers that shows them.

mod client;
pub mod exposition;
pub mod families;
mod http;
pub mod measures;
mod page;

use crate::access::Access;
use crate::answering::{Answer, PATIENCE};
use crate::listener::{Kind, ListenError, Listener};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

pub use families::{Metrics, Sample};

/// How long a connection to a port may say nothing and not be accepted for it.
const SILENT_SECONDS: u8 = 10;

/// Collects the metrics of one daemon. It may wait for locks that are held while peers are waited
/// for: it is called on a thread of its own.
pub type Collect = Arc<dyn Fn() -> Metrics + Send + Sync>;

/// Where a daemon is asked for its metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A UNIX socket to make.
    Path(PathBuf),
    /// A port of this host's own addresses: whoever can connect to it can read.
    Loopback(SocketAddr),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let port = text.rsplit_once(':').filter(|(name, port)| {
            let is_number = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
            is_number && !name.contains('/')
        });
        match (text.parse::<SocketAddr>(), port) {
            (Ok(address), _) if address.ip().is_loopback() => Ok(Self::Loopback(address)),
            (Ok(address), _) => Err(format!(
                "{} is no address of this host's own, such as 127.0.0.1",
                address.ip()
            )),
            (Err(_), None) => Ok(Self::Path(text.into())),
            (Err(_), Some((name, port))) => match port.parse() {
                Ok(port) if name.eq_ignore_ascii_case("localhost") => {
                    Ok(Self::Loopback((Ipv4Addr::LOCALHOST, port).into()))
                }
                _ => Err(format!(
                    "a port is one of an address of this host's own, such as 127.0.0.1:9100; a \
                     socket of this name is ./{text}"
                )),
            },
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Loopback(address) => address.fmt(f),
        }
    }
}

impl MetricsAddress {
    /// The path, where it is one.
    #[must_use]
    pub fn path(&self) -> Option<&PathBuf> {
        match self {
            Self::Path(path) => Some(path),
            Self::Loopback(_) => None,
        }
    }

    /// Asks the daemon there for its metrics, as OpenMetrics text.
    ///
    /// # Errors
    /// Nobody is there, or it has not answered when `patience` is over, or with something else, or
    /// with more than 16 MiB.
    pub fn ask(&self, patience: Duration) -> io::Result<String> {
        client::ask(self, patience)
    }

    /// Listens there.
    ///
    /// # Errors
    /// See [`ListenError`]; the port is in use.
    pub fn listen(&self, access: &Access) -> Result<MetricsListener, ListenError> {
        match self {
            Self::Path(path) => {
                Listener::bind(path, Kind::Stream, access).map(MetricsListener::Unix)
            }
            Self::Loopback(address) => {
                let listen = || {
                    let listener = TcpListener::bind(address)?;
                    // Browsers connect ahead of need, and readers are answered one by one.
                    farlane_sys::socket::defer_accept(&listener, SILENT_SECONDS)?;
                    Ok(MetricsListener::Tcp(listener.into()))
                };
                listen().map_err(|source| ListenError::Port {
                    address: *address,
                    source,
                })
            }
        }
    }
}

/// What whoever asks connects to.
#[derive(Debug)]
pub enum MetricsListener {
    /// A UNIX socket, whose file goes with it.
    Unix(Listener),
    /// A port.
    Tcp(OwnedFd),
}

impl std::os::fd::AsFd for MetricsListener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// Answers requests with what `collect` collects.
pub(crate) fn answer(collect: Collect) -> Answer {
    Box::new(move |stream| {
        let request = stream.request()?;
        let answer = http::answer(&request, &collect);
        // However long that has taken: others may have been waited for.
        stream.renew(PATIENCE);
        stream.write(answer.as_bytes())
    })
}

/// Metrics of every daemon.
fn add_own(metrics: &mut Metrics) {
    let lost_pages = Sample::counter(
        "lost_pages",
        "Pages of mapped files that their owner had taken away when they were touched.",
        farlane_zero_copy::fault::lost_pages(),
    );
    let started = Sample::gauge(
        "start_time_seconds",
        "When it was started, in seconds since 1970.",
        started(),
    );
    metrics.add("farlane_daemon", &[], [lost_pages, started]);
    let program = std::env::args_os().next().unwrap_or_default();
    let program = std::path::Path::new(&program).file_name();
    let program = program.unwrap_or_default().to_string_lossy();
    let labels = [
        ("program", &*program),
        ("version", env!("CARGO_PKG_VERSION")),
    ];
    metrics.inform("farlane_build", "What is running.", &labels);
}

/// When this program began, in seconds since 1970: when it was first asked for, which a daemon does
/// at its begin.
pub(crate) fn started() -> u64 {
    static STARTED: OnceLock<u64> = OnceLock::new();
    *STARTED.get_or_init(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        now.map_or(0, |now| now.as_secs())
    })
}

/// Asks the daemon behind a UNIX socket for its metrics, as [`MetricsAddress::ask`] does.
///
/// # Errors
/// As there.
pub fn ask(socket: &Path, patience: Duration) -> io::Result<String> {
    MetricsAddress::Path(socket.to_owned()).ask(patience)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::io::Write as _;
    use std::net::TcpStream;

    #[test]
    fn a_connection_that_says_nothing_is_not_accepted_before_others() {
        let address = MetricsAddress::Loopback("127.0.0.1:0".parse().unwrap());
        let listener = address.listen(&Access::default()).unwrap();
        let address = rustix::net::getsockname(&listener).unwrap();
        let address = SocketAddr::try_from(address).unwrap();
        let is_there = |limit: Option<&Timespec>| {
            let mut ready = [PollFd::new(&listener, PollFlags::IN)];
            poll(&mut ready, limit).unwrap() == 1
        };
        let silent = TcpStream::connect(address).unwrap();
        assert!(!is_there(Some(&Timespec::default())));
        let mut asking = TcpStream::connect(address).unwrap();
        asking.write_all(b"G").unwrap();
        assert!(is_there(None));
        let (accepted, from) = rustix::net::acceptfrom(&listener).unwrap();
        drop(accepted);
        let from = SocketAddr::try_from(from.unwrap()).unwrap();
        assert_eq!(from, asking.local_addr().unwrap());
        drop(silent);
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
