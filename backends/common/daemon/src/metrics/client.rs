//! Asking a daemon for its metrics.

use super::MetricsAddress;
use super::http::OPEN_METRICS;
use crate::stream::{self, Stream, late};
use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Connects to where a daemon is asked, in so long.
fn connect(address: &MetricsAddress, patience: Duration) -> io::Result<OwnedFd> {
    match address {
        MetricsAddress::Loopback(address) => {
            TcpStream::connect_timeout(address, patience).map(OwnedFd::from)
        }
        MetricsAddress::Path(path) => stream::connect(path, patience),
    }
}

/// Asks a daemon, as [`MetricsAddress::ask`] does.
pub(super) fn ask(address: &MetricsAddress, patience: Duration) -> io::Result<String> {
    let ask = || {
        let end = Instant::now() + patience;
        let mut stream = Stream::until(connect(address, patience)?, end);
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
    use super::*;
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

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
        assert_eq!(said(patience), "it says more than 16 MiB");
    }
}
