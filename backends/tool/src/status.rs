//! `farlane status`: which backends there are, and how they are.

use crate::backend::Backend;
use crate::find::find;
use crate::options::StatusOptions;
use crate::survey::{Answer, PATIENCE, Silence, ask_all};
use farlane_daemon::metrics::MetricsAddress;
use farlane_daemon::metrics::measures::Measure;
use farlane_daemon::terminal::{print, printable, table};
use farlane_topology::live::{exact, local};
use farlane_topology::series::percent;
use serde::Serialize;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::SystemTime;

/// See [`Document::format`].
const FORMAT: u32 = 1;

/// Prints it. The exit code is a failure where a backend does not answer.
///
/// # Errors
/// Backends cannot be looked for, or nothing can be printed.
pub fn run(options: &StatusOptions) -> anyhow::Result<ExitCode> {
    let found = find(&options.backends)?;
    let mut document = Document::new(&ask_all(&found.addresses, PATIENCE));
    document
        .silent
        .extend(found.unread.iter().map(SilentBackend::unread));
    if options.json {
        print(&(serde_json::to_string_pretty(&document)? + "\n"))?;
    } else {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        print(&document.text(now.unwrap_or_default().as_secs()))?;
    }
    if document.backends.is_empty() && document.silent.is_empty() {
        let folder = options.backends.folder.display();
        eprintln!("No backend tells metrics in {folder}");
    }
    Ok(match document.silent.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// What is printed.
#[derive(Debug, Serialize)]
pub struct Document {
    /// Another number where a reader of older documents could misunderstand this one.
    pub format: u32,
    /// Those that answer.
    pub backends: Vec<BackendStatus>,
    /// Those that do not.
    pub silent: Vec<SilentBackend>,
}

/// A backend.
#[derive(Debug, Serialize)]
pub struct BackendStatus {
    /// Where it tells its metrics.
    pub address: String,
    /// Which backend it is, as in `blk`.
    pub backend: String,
    /// Its instance: what its socket is called.
    pub name: String,
    /// Its version.
    pub version: String,
    /// When it was started, in seconds since 1970; none where it does not tell.
    pub started_seconds: Option<u64>,
    /// Sums over all of it.
    #[serde(flatten)]
    pub totals: TotalsStatus,
    /// Its devices.
    pub devices: Vec<DeviceStatus>,
}

/// A disk, an interface, a port of RDMA, a function that is lent or borrowed.
#[derive(Debug, Serialize)]
pub struct DeviceStatus {
    /// Which of these it is, by the label of metrics: `disk`, `net`, `vm` or `device`.
    pub kind: String,
    /// What it is called.
    pub name: String,
    /// What it has done.
    #[serde(flatten)]
    pub totals: TotalsStatus,
}

/// Sums; none of what a backend does not tell.
#[derive(Debug, Serialize)]
pub struct TotalsStatus {
    /// See [`Measure::Connected`].
    pub connected: Option<u64>,
    /// See [`Measure::Bytes`].
    pub bytes: Option<u64>,
    /// See [`Measure::Requests`].
    pub requests: Option<u64>,
    /// See [`Measure::Leases`].
    pub leases: Option<u64>,
    /// See [`Measure::Failovers`].
    pub failovers: Option<u64>,
    /// The part of bytes that a worker of their own node has moved; none of nothing.
    pub local_percent: Option<f64>,
}

impl TotalsStatus {
    fn new(totals: &crate::backend::Totals) -> Self {
        let get = |measure| totals.get(measure);
        Self {
            connected: get(Measure::Connected),
            bytes: get(Measure::Bytes),
            requests: get(Measure::Requests),
            leases: get(Measure::Leases),
            failovers: get(Measure::Failovers),
            local_percent: get(Measure::LocalBytes)
                .zip(get(Measure::AllBytes))
                .and_then(|(local, all)| percent(local.min(all), all)),
        }
    }
}

/// One that does not answer.
#[derive(Debug, Serialize)]
pub struct SilentBackend {
    /// Where it was asked.
    pub address: String,
    /// Why it is not known.
    pub error: String,
}

impl SilentBackend {
    /// One that was asked.
    #[must_use]
    pub fn new(address: &MetricsAddress, error: &Silence) -> Self {
        Self {
            address: address.to_string(),
            error: error.to_string(),
        }
    }

    /// Those in a folder that cannot be read.
    #[must_use]
    pub fn unread((folder, error): &(PathBuf, io::Error)) -> Self {
        Self {
            address: folder.display().to_string(),
            error: format!("the folder cannot be read: {error}"),
        }
    }

    /// As a line for a terminal.
    #[must_use]
    pub fn line(&self) -> String {
        let (address, error) = (printable(&self.address), printable(&self.error));
        format!("{address} does not answer: {error}")
    }
}

impl Document {
    /// What these answers say.
    #[must_use]
    pub fn new(answers: &[Answer]) -> Self {
        let (mut backends, mut silent) = (Vec::new(), Vec::new());
        for Answer { address, told } in answers {
            match told {
                Ok(backend) => backends.push(BackendStatus::new(address, backend)),
                Err(error) => silent.push(SilentBackend::new(address, error)),
            }
        }
        Self {
            format: FORMAT,
            backends,
            silent,
        }
    }

    /// As a table, and a line for each that does not answer. `now` is in seconds since 1970.
    #[must_use]
    pub fn text(&self, now: u64) -> String {
        let titles = [
            "BACKEND",
            "NAME",
            "VERSION",
            "UP",
            "DEVICES",
            "CONNECTED",
            "BYTES",
            "REQUESTS",
            "LEASES",
            "FAILOVERS",
            "LOCAL",
        ];
        let mut rows = vec![titles.map(str::to_owned)];
        for backend in &self.backends {
            let number = |number: Option<u64>| number.map_or("-".to_owned(), |n| n.to_string());
            let up = backend
                .started_seconds
                .map(|at| age(now.saturating_sub(at)));
            let totals = &backend.totals;
            rows.push([
                backend.backend.clone(),
                backend.name.clone(),
                backend.version.clone(),
                up.unwrap_or_else(|| "-".to_owned()),
                backend.devices.len().to_string(),
                number(totals.connected),
                totals.bytes.map_or("-".to_owned(), exact),
                number(totals.requests),
                number(totals.leases),
                number(totals.failovers),
                local(totals.local_percent),
            ]);
        }
        let mut text = match self.backends.is_empty() {
            true => String::new(),
            false => table(&rows, &[4, 5, 6, 7, 8, 9, 10]),
        };
        for silent in &self.silent {
            text.push_str(&silent.line());
            text.push('\n');
        }
        text
    }
}

impl BackendStatus {
    fn new(address: &MetricsAddress, backend: &Backend) -> Self {
        let devices = backend.devices.iter().map(|(device, told)| DeviceStatus {
            kind: device.label.clone(),
            name: device.name.clone(),
            totals: TotalsStatus::new(&told.totals),
        });
        Self {
            address: address.to_string(),
            backend: backend.kind().to_owned(),
            name: instance(address),
            version: backend.version.clone(),
            started_seconds: backend.started,
            totals: TotalsStatus::new(&backend.totals()),
            devices: devices.collect(),
        }
    }
}

/// What a backend at this address is called.
#[must_use]
pub fn instance(address: &MetricsAddress) -> String {
    let stem = address.path().and_then(|path| path.file_stem());
    stem.map_or_else(
        || address.to_string(),
        |stem| stem.to_string_lossy().into_owned(),
    )
}

/// A time in its two greatest units.
fn age(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::tests::disks;

    fn answers() -> Vec<Answer> {
        let text = disks(1000, &[("a\u{1b}[2J", 2_000_000, 7), ("b", 1, 1)])
            + "farlane_blk_locality_all_bytes_total{disk=\"b\"} 3\n\
               farlane_blk_locality_local_bytes_total{disk=\"b\"} 2\n";
        let socket = |path: &str| MetricsAddress::Path(path.into());
        vec![
            Answer {
                address: socket("/run/farlane/blk/vm0\u{7}.metrics"),
                told: Ok(Backend::parse(&text).unwrap()),
            },
            Answer {
                address: socket("/run/farlane/net/vm0.metrics"),
                told: Err(Silence::Ask(io::ErrorKind::ConnectionRefused.into())),
            },
        ]
    }

    #[test]
    fn the_table_has_a_row_for_each_and_a_line_for_who_is_silent() {
        let text = Document::new(&answers()).text(1000 + 90_061);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "BACKEND  NAME      VERSION  UP       DEVICES  CONNECTED    BYTES  REQUESTS  \
                 LEASES  FAILOVERS   LOCAL",
                "blk      vm0\\u{7}  0.1.0    1 d 1 h        2          -  2.00 MB         8  \
                 \u{20}    -          -  66.6 %",
                "/run/farlane/net/vm0.metrics does not answer: connection refused",
            ]
        );
        assert_eq!(Document::new(&[]).text(0), "");
        let unread = ("/run/\u{1b}".into(), io::ErrorKind::PermissionDenied.into());
        assert_eq!(
            SilentBackend::unread(&unread).line(),
            "/run/\\u{1b} does not answer: the folder cannot be read: permission denied"
        );
    }

    #[test]
    fn the_document_has_what_the_table_has() {
        let json = serde_json::to_value(Document::new(&answers())).unwrap();
        let backend = &json["backends"][0];
        assert_eq!(json["format"], 1);
        assert_eq!(backend["backend"], "blk");
        assert_eq!(backend["started_seconds"], 1000);
        assert_eq!(
            (&backend["bytes"], &backend["leases"]),
            (&2_000_001.into(), &().into())
        );
        let device = &backend["devices"][0];
        assert_eq!(
            (&device["kind"], &device["name"]),
            (&"disk".into(), &"a\u{1b}[2J".into())
        );
        assert_eq!(device["requests"], 7);
        assert_eq!(json["silent"][0]["address"], "/run/farlane/net/vm0.metrics");
    }

    #[test]
    fn times_have_two_units() {
        for (seconds, text) in [
            (59, "59 s"),
            (61, "1 min 1 s"),
            (7_260, "2 h 1 min"),
            (90_000, "1 d 1 h"),
        ] {
            assert_eq!(age(seconds), text);
        }
    }
}
