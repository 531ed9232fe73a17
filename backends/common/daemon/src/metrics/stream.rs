//! A connection over which metrics are asked for, from either end: whoever is at the other one has
//! so long, however little it does now and then.

use rustix::net::sockopt;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Bytes that are written at once: the kernel waits for room again for each part of them.
const AT_ONCE: usize = 4096;
/// Most bytes of a request: those of Prometheus and curl have a few hundred.
pub(super) const MAX_REQUEST: usize = 8192;
/// Most bytes of an answer that is asked for: far more than a daemon tells.
const MAX_ANSWER: usize = 16 << 20;

/// A connection, either way with a time by which it is over.
pub(super) struct Stream {
    file: File,
    end: Instant,
}

impl Stream {
    pub fn new(socket: OwnedFd, patience: Duration) -> Self {
        Self::until(socket, Instant::now() + patience)
    }

    /// One that is over at a time.
    pub fn until(socket: OwnedFd, end: Instant) -> Self {
        let file = File::from(socket);
        Self { file, end }
    }

    /// It has so long from now on.
    pub fn renew(&mut self, patience: Duration) {
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
    pub fn request(&mut self) -> io::Result<Vec<u8>> {
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
    pub fn answer(&mut self) -> io::Result<Vec<u8>> {
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

    pub fn write(&mut self, text: &[u8]) -> io::Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

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
}
