//! A connection over which a daemon is asked, from either end: whoever is at the other one has so
//! long, however little it does now and then.

use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt,
};
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes that are written at once: the kernel waits for room again for each part of them.
const AT_ONCE: usize = 4096;
/// Most bytes of a request's head: those of Prometheus and curl have a few hundred.
pub(crate) const MAX_REQUEST: usize = 8192;
/// Most bytes of an answer that is asked for: far more than a daemon tells.
const MAX_ANSWER: usize = 16 << 20;

/// Connects to a UNIX socket, in so long.
pub(crate) fn connect(path: &Path, patience: Duration) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // A socket whose queue is full has whoever connects wait (unix(7)), for as long as this.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(patience))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// What is said of a peer that let a time go by.
pub(crate) fn late(error: io::Error) -> io::Error {
    let is_late = [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind());
    match is_late {
        true => io::Error::new(ErrorKind::TimedOut, "it does not answer in time"),
        false => error,
    }
}

/// A connection, either way with a time by which it is over.
pub(crate) struct Stream {
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
        self.all(MAX_ANSWER)
    }

    /// Reads all that the other end says, which is so many bytes at most.
    pub fn all(&mut self, most: usize) -> io::Result<Vec<u8>> {
        let mut said = Vec::new();
        let mut room = vec![0; 1 << 16];
        loop {
            self.limit(sockopt::Timeout::Recv)?;
            let bytes = match self.file.read(&mut room) {
                Ok(0) => return Ok(said),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                read => read?,
            };
            said.extend(&room[..bytes]);
            if said.len() > most {
                let what = match most >> 20 {
                    0 => format!("it says more than {most} bytes"),
                    mib => format!("it says more than {mib} MiB"),
                };
                return Err(io::Error::new(ErrorKind::InvalidData, what));
            }
        }
    }

    /// Reads on to the end of what the other end says, and drops it: whoever closes a connection
    /// with something unread has the other end lose what it was told (unix(7), ECONNRESET).
    pub fn drain(&mut self) -> io::Result<()> {
        let mut room = [0; AT_ONCE];
        loop {
            self.limit(sockopt::Timeout::Recv)?;
            match self.file.read(&mut room) {
                Ok(0) => return Ok(()),
                Err(e) if e.kind() != ErrorKind::Interrupted => return Err(e),
                _ => {}
            }
        }
    }

    /// Says that nothing more is said.
    pub fn finish(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.file, Shutdown::Write)?)
    }

    /// The user who has connected, as it was then.
    pub fn peer_user(&self) -> io::Result<u32> {
        farlane_zero_copy::peer_user(self.file.as_fd())
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
