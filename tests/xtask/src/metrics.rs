//! What a daemon counts, as it tells it at its metrics socket.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use farlane_daemon::metrics::exposition;

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

/// Labels of a sample.
type Labels = BTreeMap<String, String>;

/// Counters of one daemon at one time: by name and labels.
#[derive(Debug, Clone)]
pub struct Metrics(BTreeMap<(String, Labels), u64>);

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
        let samples = exposition::samples(text).filter_map(|sample| {
            // Counters are called by the names of their families.
            let name = sample.family().strip_prefix(prefix)?.to_owned();
            let value = sample.integer()?;
            let labels = sample.labels.into_iter();
            let labels = labels.map(|(label, value)| (label.to_owned(), value));
            Some(((name, labels.collect()), value))
        });
        Self(samples.collect())
    }

    /// One that has no labels.
    pub fn get(&self, name: &str) -> Result<u64> {
        self.of(name, &[])
    }

    /// One that has these labels and no other.
    pub fn of(&self, name: &str, labels: &[(&str, &str)]) -> Result<u64> {
        let labels = labels.iter();
        let labels = labels.map(|(label, value)| ((*label).to_owned(), (*value).to_owned()));
        let value = self.0.get(&(name.to_owned(), labels.collect())).copied();
        value.with_context(|| self.lacks(name))
    }

    /// One under all its labels: these, and the number.
    pub fn labelled(&self, name: &str) -> Vec<(BTreeMap<String, String>, u64)> {
        let found = self.0.iter().filter(|((found, _), _)| found == name);
        let found = found.map(|((_, labels), value)| (labels.clone(), *value));
        found.filter(|(labels, _)| !labels.is_empty()).collect()
    }

    /// The sum of one under all its labels.
    pub fn sum(&self, name: &str) -> Result<u64> {
        let found = self.0.iter().filter(|((found, _), _)| found == name);
        let mut values = found.map(|(_, value)| value).peekable();
        values.peek().with_context(|| self.lacks(name))?;
        Ok(values.sum())
    }

    fn lacks(&self, name: &str) -> String {
        let names: BTreeSet<_> = self.0.keys().map(|(name, _)| name).collect();
        format!("No counter {name} among {names:?}")
    }

    /// How many bytes a daemon of RDMA has moved.
    pub fn moved(&self) -> Result<u64> {
        Ok(self.sum("bytes_out")? + self.sum("bytes_in")?)
    }
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
        assert_eq!(metrics.of("reads", &[("device", "b")]).unwrap(), 4);
        assert!(metrics.get("other").is_err() && metrics.sum("writes").is_err());
    }
}
