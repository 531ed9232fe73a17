//! Asking backends, several at a time.

use crate::backend::{Backend, NoBackend};
use farlane_daemon::metrics::MetricsAddress;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use thiserror::Error;

/// A backend that takes longer to answer is taken to be gone.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// How many are asked at once: some of them may let the time go by.
const AT_ONCE: usize = 32;

/// Why a backend has told nothing.
#[derive(Debug, Error)]
pub enum Silence {
    /// Nobody is there, or it does not answer as it should.
    #[error("{0}")]
    Ask(#[from] io::Error),
    /// It is something else.
    #[error(transparent)]
    NoBackend(#[from] NoBackend),
}

/// What was asked, and what it has answered.
#[derive(Debug)]
pub struct Answer {
    /// Where.
    pub address: MetricsAddress,
    /// What it tells.
    pub told: Result<Backend, Silence>,
}

/// Asks all of them; the answers are in the same order.
#[must_use]
pub fn ask_all(addresses: &[MetricsAddress], patience: Duration) -> Vec<Answer> {
    let next = AtomicUsize::new(0);
    // Each answer is put in by who has asked for it; a thread that has panicked leaves no half of
    // one.
    let answers = Mutex::new(Vec::new());
    let ask = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(address) = addresses.get(at) else {
                return;
            };
            let answer = Answer {
                address: address.clone(),
                told: ask(address, patience),
            };
            let mut answers = answers.lock().unwrap_or_else(|lock| lock.into_inner());
            answers.push((at, answer));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..addresses.len().min(AT_ONCE) {
            // Where there cannot be as many, those that there are ask longer.
            let _ = std::thread::Builder::new().spawn_scoped(scope, ask);
        }
        ask();
    });
    let mut answers = answers
        .into_inner()
        .unwrap_or_else(|lock| lock.into_inner());
    answers.sort_by_key(|(at, _)| *at);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

fn ask(address: &MetricsAddress, patience: Duration) -> Result<Backend, Silence> {
    Ok(Backend::parse(&address.ask(patience)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    #[test]
    fn each_answer_stands_where_its_address_does() {
        let folder = tempfile::tempdir().unwrap();
        let addresses: Vec<_> = (0..3 * AT_ONCE)
            .map(|n| MetricsAddress::Path(folder.path().join(format!("{n}.metrics"))))
            .collect();
        for (n, address) in addresses.iter().enumerate() {
            let listener = UnixListener::bind(address.path().unwrap()).unwrap();
            // Every third one is not there any more, and another is something else.
            let text = match n % 3 {
                0 => continue,
                1 => format!("farlane_build_info{{program=\"farlane-{n}\",version=\"1\"}} 1\n"),
                _ => String::new(),
            };
            std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 1024]).unwrap();
                write!(stream, "HTTP/1.1 200 OK\r\n\r\n{text}# EOF\n").unwrap();
            });
        }
        let answers = ask_all(&addresses, Duration::from_secs(60));
        assert_eq!(answers.len(), addresses.len());
        for (n, (answer, address)) in answers.iter().zip(&addresses).enumerate() {
            assert_eq!(&answer.address, address);
            match (n % 3, &answer.told) {
                (0, Err(Silence::Ask(e))) => assert_eq!(e.kind(), io::ErrorKind::ConnectionRefused),
                (1, Ok(backend)) => assert_eq!(backend.kind(), n.to_string()),
                (2, Err(Silence::NoBackend(_))) => {}
                (_, told) => panic!("{n}: {told:?}"),
            }
        }
        assert!(ask_all(&[], Duration::ZERO).is_empty());
    }
}
