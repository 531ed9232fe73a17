//! A backend as it tells of itself. Whoever does may be anybody: names are cut off, and there are
//! not endlessly many of them.

use crate::latency::Histograms;
use farlane_daemon::metrics::exposition::{SampleLine, samples};
use farlane_daemon::metrics::measures::{Measure, is_device, measure};
use std::collections::BTreeMap;
use thiserror::Error;

/// Most devices of a backend, and characters of a name.
const MOST_DEVICES: usize = 4096;
const MOST_CHARACTERS: usize = 256;

/// What was asked is no backend.
#[derive(Debug, Error)]
#[error("it is no backend of Farlane: it tells no farlane_build_info")]
pub struct NoBackend;

/// Sums of what metrics say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals(BTreeMap<Measure, u64>);

impl Totals {
    /// One of them, where anything was told of it.
    #[must_use]
    pub fn get(&self, measure: Measure) -> Option<u64> {
        self.0.get(&measure).copied()
    }

    /// Adds to one of them.
    pub fn add(&mut self, measure: Measure, value: u64) {
        let sum = self.0.entry(measure).or_default();
        *sum = sum.saturating_add(value);
    }

    /// Adds all of another.
    pub fn add_all(&mut self, other: &Self) {
        for (measure, value) in &other.0 {
            self.add(*measure, *value);
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (Measure, u64)> {
        self.0.iter().map(|(measure, value)| (*measure, *value))
    }
}

/// A device: a disk, an interface, a port of a VM, a function that is lent or borrowed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceName {
    /// The label that names it.
    pub label: String,
    /// What it is called.
    pub name: String,
}

/// What is told of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Sums.
    pub totals: Totals,
    /// How long what it does takes.
    pub latency: Histograms,
}

/// A backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// The program, as in `farlane-blk`.
    pub program: String,
    /// Its version.
    pub version: String,
    /// When it was started, in seconds since 1970.
    pub started: Option<u64>,
    /// What is told of no device in particular.
    pub own: Totals,
    /// Its devices.
    pub devices: BTreeMap<DeviceName, Device>,
}

impl Backend {
    /// What a document says. What is not known is left out.
    ///
    /// # Errors
    /// There is no `farlane_build_info` in it.
    pub fn parse(text: &str) -> Result<Self, NoBackend> {
        let mut info = None;
        let (mut started, mut own, mut devices) = (None, Totals::default(), BTreeMap::new());
        for sample in samples(text) {
            match sample.name {
                "farlane_build_info" => info = Some(build(&sample)),
                "farlane_daemon_start_time_seconds" => started = sample.integer(),
                _ => match (device(&sample), measure(sample.family()), sample.integer()) {
                    (None, Some(measure), Some(value)) => own.add(measure, value),
                    (Some(name), measure, value) => {
                        if devices.len() >= MOST_DEVICES && !devices.contains_key(&name) {
                            continue;
                        }
                        let device: &mut Device = devices.entry(name).or_default();
                        device.latency.take(&sample);
                        if let (Some(measure), Some(value)) = (measure, value) {
                            device.totals.add(measure, value);
                        }
                    }
                    _ => {}
                },
            }
        }
        let (program, version) = info.ok_or(NoBackend)?;
        Ok(Self {
            program,
            version,
            started,
            own,
            devices,
        })
    }

    /// Which backend it is, as in `blk`.
    #[must_use]
    pub fn kind(&self) -> &str {
        self.program
            .strip_prefix("farlane-")
            .unwrap_or(&self.program)
    }

    /// Sums over all of it.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let mut all = self.own.clone();
        for device in self.devices.values() {
            all.add_all(&device.totals);
        }
        all
    }
}

fn build(sample: &SampleLine<'_>) -> (String, String) {
    let label = |name| cut(sample.label(name).unwrap_or_default());
    (label("program"), label("version"))
}

fn device(sample: &SampleLine<'_>) -> Option<DeviceName> {
    let (label, name) = sample.labels.iter().find(|(label, _)| is_device(label))?;
    Some(DeviceName {
        label: (*label).to_owned(),
        name: cut(name),
    })
}

fn cut(name: &str) -> String {
    name.chars().take(MOST_CHARACTERS).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::fmt::Write as _;

    /// What a backend of disks tells, begun at a time.
    pub(crate) fn disks(started: u64, disks: &[(&str, u64, u64)]) -> String {
        let mut text = format!(
            "farlane_build_info{{program=\"farlane-blk\",version=\"0.1.0\"}} 1\n\
             farlane_daemon_start_time_seconds {started}\n"
        );
        for (disk, bytes, requests) in disks {
            let _ = write!(
                text,
                "farlane_blk_bytes_read_total{{disk=\"{disk}\"}} {bytes}\n\
                 farlane_blk_reads_total{{disk=\"{disk}\"}} {requests}\n"
            );
        }
        text
    }

    #[test]
    fn what_is_told_is_added_up_by_device() {
        let text = disks(1_700_000_000, &[("a", 10, 1), ("b", 5, 2)])
            + "farlane_blk_bytes_written_total{disk=\"a\"} 7\n\
               farlane_blk_path_failures_total{disk=\"a\",path=\"p\",node=\"0\"} 1\n\
               farlane_blk_path_failures_total{disk=\"a\",path=\"q\",node=\"1\"} 2\n\
               farlane_blk_kicks_total{disk=\"a\"} 9\n\
               farlane_lend_links 3\n";
        let backend = Backend::parse(&text).unwrap();
        assert_eq!((backend.kind(), &*backend.version), ("blk", "0.1.0"));
        assert_eq!(backend.started, Some(1_700_000_000));
        let names: Vec<_> = backend.devices.keys().map(|device| &*device.name).collect();
        assert_eq!(names, ["a", "b"]);
        let a = &backend.devices.values().next().unwrap().totals;
        assert_eq!(a.get(Measure::Bytes), Some(17));
        assert_eq!(a.get(Measure::Failovers), Some(3));
        assert_eq!(a.get(Measure::Leases), None);
        let all = backend.totals();
        assert_eq!(all.get(Measure::Bytes), Some(22));
        assert_eq!(all.get(Measure::Requests), Some(3));
        assert_eq!(all.get(Measure::Connected), Some(3));
    }

    #[test]
    fn who_tells_endlessly_much_is_cut_off() {
        assert!(Backend::parse("").is_err());
        let names: Vec<_> = (0..5000).map(|n| format!("{n}")).collect();
        let many: Vec<_> = names.iter().map(|name| (&**name, u64::MAX, 1)).collect();
        let backend = Backend::parse(&disks(0, &many)).unwrap();
        assert_eq!(backend.devices.len(), MOST_DEVICES);
        assert_eq!(backend.totals().get(Measure::Bytes), Some(u64::MAX));
        let long = "é".repeat(10_000);
        let backend = Backend::parse(&disks(0, &[(&long, 1, 1)])).unwrap();
        let name = backend.devices.keys().next().unwrap();
        assert_eq!(name.name.chars().count(), MOST_CHARACTERS);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read(text in "[a-z_{}\"=,\\\\ 0-9\n\u{1b}]{0,200}") {
            let text = format!("{}farlane_blk_reads_total{{{text}\n{text}", disks(0, &[]));
            proptest::prop_assert!(Backend::parse(&text).is_ok());
        }
    }
}
