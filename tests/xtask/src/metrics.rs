//! What a daemon counts, as it tells it at its metrics socket.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::conditions::PATIENCE;

/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(5);

/// Connects to a daemon that may have just begun: the file of its socket is there before it
/// listens, and until then, or until it has taken the place of a file that was left, it is refused.
fn patiently<T>(patience: Duration, mut connect: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let end = Instant::now() + patience;
    let not_yet = [ErrorKind::ConnectionRefused, ErrorKind::NotFound];
    loop {
        match connect() {
            Err(e) if not_yet.contains(&e.kind()) && Instant::now() < end => thread::sleep(PAUSE),
            result => return result,
        }
    }
}

/// Counters of one daemon at one time.
#[derive(Debug, Clone)]
pub struct Metrics(BTreeMap<String, u64>);

impl Metrics {
    /// Asks the daemon behind a socket. Names lose `prefix`; those that do not begin with it are
    /// left out.
    pub fn read(socket: &Path, prefix: &str) -> Result<Self> {
        let text = patiently(PATIENCE, || farlane_daemon::metrics::ask(socket, PATIENCE))
            .with_context(|| format!("Nobody tells counters at {}", socket.display()))?;
        Ok(Self::parse(&text, prefix))
    }

    /// Those in a document.
    pub fn parse(text: &str, prefix: &str) -> Self {
        let samples = text.lines().filter_map(|line| {
            let (name, value) = line.strip_prefix(prefix)?.rsplit_once(' ')?;
            // Counters are called by the names of their families.
            let (name, labels) = name.split_at(name.find('{').unwrap_or(name.len()));
            let name = name.strip_suffix("_total").unwrap_or(name);
            Some((format!("{name}{labels}"), value.parse().ok()?))
        });
        Self(samples.collect())
    }

    /// One of them.
    pub fn get(&self, name: &str) -> Result<u64> {
        let value = self.0.get(name).copied();
        value.with_context(|| format!("No counter {name} among {:?}", self.0.keys()))
    }

    /// One under all its labels: these, and the number.
    pub fn labelled(&self, name: &str) -> Vec<(BTreeMap<String, String>, u64)> {
        let found = self.0.iter().filter_map(|(key, value)| {
            let labels = key.strip_prefix(name)?.strip_prefix('{')?;
            Some((labels_of(labels.strip_suffix('}')?), *value))
        });
        found.collect()
    }

    /// The sum of one under all its labels.
    pub fn sum(&self, name: &str) -> Result<u64> {
        let is_it = |key: &str| key.split('{').next() == Some(name);
        let values = self.0.iter().filter(|(key, _)| is_it(key));
        let mut values = values.map(|(_, value)| value).peekable();
        values
            .peek()
            .with_context(|| format!("No counter {name} among {:?}", self.0.keys()))?;
        Ok(values.sum())
    }

    /// How many bytes a daemon of RDMA has moved.
    pub fn moved(&self) -> Result<u64> {
        Ok(self.sum("bytes_out")? + self.sum("bytes_in")?)
    }
}

/// Labels between braces. Their values have neither commas nor quotes here.
fn labels_of(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split(',').filter_map(|label| {
        let (name, value) = label.split_once('=')?;
        Some((name.to_owned(), value.trim_matches('"').to_owned()))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_does_not_listen_yet_is_asked_again_and_not_for_ever() {
        let said = [ErrorKind::NotFound, ErrorKind::ConnectionRefused];
        let mut said = said.into_iter();
        let connected = patiently(Duration::from_secs(600), || match said.next() {
            Some(kind) => Err(kind.into()),
            None => Ok(7),
        });
        assert_eq!(connected.unwrap(), 7);
        let refused = |patience, kind: ErrorKind| {
            let tried = patiently(patience, || io::Result::<()>::Err(kind.into()));
            assert_eq!(tried.unwrap_err().kind(), kind);
        };
        refused(Duration::ZERO, ErrorKind::ConnectionRefused);
        refused(Duration::from_secs(600), ErrorKind::PermissionDenied);
    }

    #[test]
    fn counters_are_found_and_summed() {
        let text = "# TYPE x_reads counter\nx_reads_total{device=\"a\"} \
                    3\nx_reads_total{device=\"b\"} 4\nx_reads_other_total 9\nx_leases \
                    1\nother_total 5\n";
        let metrics = Metrics::parse(text, "x_");
        assert_eq!(metrics.get("leases").unwrap(), 1);
        assert_eq!(metrics.sum("reads").unwrap(), 7);
        assert!(metrics.get("other").is_err() && metrics.sum("writes").is_err());
    }
}
