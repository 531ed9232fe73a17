//! The locality counters that a backend tells at its metrics socket.

use farlane_daemon::metrics::exposition::{self, SampleLine};
use farlane_daemon::terminal::printable;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use thiserror::Error;

/// A backend that takes longer to answer is taken to be gone.
const PATIENCE: Duration = Duration::from_secs(2);

/// Why a backend's counters are not known.
#[derive(Debug, Error)]
pub enum MetricsError {
    /// Nobody is there, or it does not answer.
    #[error("Nobody tells counters at {path}")]
    Read {
        /// The socket.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// One combination of a device: from where to where.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The device, as in `blk d0` or `net n0 rx`.
    pub device: String,
    /// Node of the memory.
    pub data: u32,
    /// Node of the worker that moved it.
    pub worker: u32,
    /// Path to the hardware.
    pub path: String,
}

/// What was moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Length in bytes.
    pub bytes: u64,
    /// Requests, or parts of them.
    pub requests: u64,
}

/// All counters at one moment.
pub type Counters = BTreeMap<Key, Moved>;

/// Asks the backend behind a socket.
///
/// # Errors
/// See [`MetricsError`].
pub fn read(socket: &Path) -> Result<Counters, MetricsError> {
    let text = farlane_daemon::metrics::ask(socket, PATIENCE);
    let text = text.map_err(|source| MetricsError::Read {
        path: socket.display().to_string(),
        source,
    })?;
    Ok(parse(&text))
}

/// Those in a document; lines that tell something else are left out.
#[must_use]
pub fn parse(text: &str) -> Counters {
    let mut counters = Counters::new();
    for (key, kind, value) in exposition::samples(text).filter_map(counter) {
        let moved: &mut Moved = counters.entry(key).or_default();
        match kind {
            Kind::Bytes => moved.bytes = moved.bytes.saturating_add(value),
            Kind::Requests => moved.requests = moved.requests.saturating_add(value),
        }
    }
    counters
}

enum Kind {
    Bytes,
    Requests,
}

/// `farlane_blk_locality_bytes_total{disk="a",data="0",worker="1",path="p"} 7`.
fn counter(sample: SampleLine<'_>) -> Option<(Key, Kind, u64)> {
    let name = sample.name.strip_suffix("_total")?;
    let (backend, kind) = match name.strip_suffix("_locality_bytes") {
        Some(backend) => (backend, Kind::Bytes),
        None => (name.strip_suffix("_locality_requests")?, Kind::Requests),
    };
    let backend = backend.strip_prefix("farlane_").unwrap_or(backend);
    let count = sample.integer()?;
    let mut device = vec![backend.to_owned()];
    let (mut data, mut worker, mut path) = (None, None, None);
    for (label, value) in sample.labels {
        match label {
            "data" => data = value.parse().ok(),
            "worker" => worker = value.parse().ok(),
            "path" => path = Some(value),
            _ => device.push(printable(&value).into_owned()),
        }
    }
    let key = Key {
        device: device.join(" "),
        data: data?,
        worker: worker?,
        path: printable(&path?).into_owned(),
    };
    Some((key, kind, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_backends_tell_is_understood() {
        use farlane_daemon::locality::Locality;
        use farlane_daemon::metrics::{Metrics, Sample};
        use farlane_zero_copy::topology::Node;
        let device = Locality::new(vec![Node(0), Node(1)], vec!["p{0}".to_owned()]);
        device.add(Node(1), Node(0), 0, 4096);
        device.add(Node(1), Node(1), 0, 512);
        device.add(Node(1), Node(1), 0, 512);
        let mut metrics = Metrics::default();
        let reads = Sample::counter("reads", "Reads.", 7);
        metrics.add("farlane_blk", &[("disk", "a")], [reads]);
        device.add_to(
            &mut metrics,
            "farlane_net",
            &[("net", "n0"), ("direction", "rx")],
        );
        let counters = parse(&metrics.open_metrics());
        assert_eq!(counters.len(), 4);
        let key = |data, worker| Key {
            device: "net n0 rx".to_owned(),
            data,
            worker,
            path: "p{0}".to_owned(),
        };
        let moved = |bytes, requests| Moved { bytes, requests };
        assert_eq!(counters.get(&key(1, 0)), Some(&moved(4096, 1)));
        assert_eq!(counters.get(&key(1, 1)), Some(&moved(1024, 2)));
        assert_eq!(counters.get(&key(0, 1)), Some(&moved(0, 0)));
    }

    #[test]
    fn names_are_shown_as_what_they_are() {
        let text = "farlane_blk_locality_bytes_total{disk=\"\u{1b}[2J\",data=\"0\",worker=\"0\",\
                    path=\"p\"} 1\n";
        let counters = parse(text);
        let names: Vec<_> = counters.keys().map(|key| &*key.device).collect();
        assert_eq!(names, ["blk \\u{1b}[2J"]);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read(text in "[a-z_{}\"=,\\\\ 0-9\n]{0,80}") {
            for text in [format!("farlane_x_locality_bytes_total{{{text}}} 1"), text] {
                proptest::prop_assert!(parse(&text).len() <= 2 + text.lines().count());
            }
        }
    }
}
