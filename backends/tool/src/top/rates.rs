//! What devices do in a second, from what their backends have counted at two times.

use crate::backend::{Backend, Device, DeviceName};
use crate::latency::Histograms;
use crate::status::instance;
use crate::survey::Answer;
use farlane_daemon::metrics::measures::Measure;
use farlane_topology::series::{grown, percent, rate};
use std::collections::BTreeMap;

/// A device between two looks.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Which backend it is of, as in `blk`.
    pub backend: String,
    /// What that is called.
    pub instance: String,
    /// What the device is called.
    pub device: DeviceName,
    /// Its backend has begun anew: what is shown is since then.
    pub is_new: bool,
    /// Bytes a second; none at the first look.
    pub bytes: Option<f64>,
    /// Requests a second.
    pub requests: Option<f64>,
    /// Seconds that half of what it has done took at most, where its backend tells times.
    pub p50: Option<f64>,
    /// The same of 99 per cent.
    pub p99: Option<f64>,
    /// Leases under which it is held now.
    pub leases: Option<u64>,
    /// Times that a path has failed, of all time.
    pub failovers: Option<u64>,
    /// The part of bytes that a worker of their own node has moved, in per cent; none of nothing.
    pub local: Option<f64>,
}

/// A backend when it was looked at last.
#[derive(Debug)]
struct Last {
    seconds: f64,
    started: Option<u64>,
    devices: BTreeMap<DeviceName, Device>,
}

/// What was seen last.
#[derive(Debug, Default)]
pub struct Rates(BTreeMap<String, Last>);

impl Rates {
    /// Takes what backends have answered at a time, in seconds. Of one that does not answer it is
    /// kept what was seen last; one that is not asked any more is forgotten.
    pub fn take(&mut self, seconds: f64, answers: &[Answer]) -> Vec<Row> {
        let mut rows = Vec::new();
        let mut kept = BTreeMap::new();
        for Answer { address, told } in answers {
            let key = address.to_string();
            let last = self.0.remove(&key);
            let Ok(backend) = told else {
                kept.extend(last.map(|last| (key, last)));
                continue;
            };
            for (device, now) in &backend.devices {
                rows.push(Row {
                    backend: backend.kind().to_owned(),
                    instance: instance(address),
                    ..Row::new(device, now, backend, last.as_ref(), seconds)
                });
            }
            let now = Last {
                seconds,
                started: backend.started,
                devices: backend.devices.clone(),
            };
            kept.insert(key, now);
        }
        self.0 = kept;
        rows
    }
}

impl Row {
    fn new(
        device: &DeviceName,
        now: &Device,
        backend: &Backend,
        last: Option<&Last>,
        seconds: f64,
    ) -> Self {
        let totals = &now.totals;
        let before = last.and_then(|last| Some((last, last.devices.get(device)?)));
        // It says so, or a counter has gone backwards.
        let is_new = before.is_some_and(|(last, old)| {
            let fell = |measure| old.totals.get(measure) > totals.get(measure);
            let counters = [Measure::Bytes, Measure::Requests, Measure::Failovers];
            last.started != backend.started || counters.into_iter().any(fell)
        });
        let since = |measure| {
            let (_, old) = before?;
            let value = totals.get(measure)?;
            Some(match is_new {
                true => value,
                false => grown(old.totals.get(measure).unwrap_or(0), value),
            })
        };
        let length = before.map_or(0.0, |(last, _)| seconds - last.seconds);
        let a_second = |measure| since(measure).map(|value| rate(value, length));
        let nothing = Histograms::default();
        let latency = before.map(|(_, old)| {
            let old = if is_new { &nothing } else { &old.latency };
            now.latency.since(old)
        });
        let bound = |part| latency.as_ref().and_then(|latency| latency.bound(part));
        let local = since(Measure::LocalBytes).zip(since(Measure::AllBytes));
        Self {
            backend: String::new(),
            instance: String::new(),
            device: device.clone(),
            is_new,
            bytes: a_second(Measure::Bytes),
            requests: a_second(Measure::Requests),
            p50: bound(0.5),
            p99: bound(0.99),
            leases: totals.get(Measure::Leases),
            failovers: totals.get(Measure::Failovers),
            local: local.and_then(|(local, all)| percent(local.min(all), all)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::backend::tests::disks;
    use crate::survey::Silence;
    use farlane_daemon::metrics::MetricsAddress;

    pub(crate) fn row(device: &str, bytes: Option<f64>) -> Row {
        Row {
            backend: "blk".to_owned(),
            instance: "vm0".to_owned(),
            device: DeviceName {
                label: "disk".to_owned(),
                name: device.to_owned(),
            },
            is_new: false,
            bytes,
            requests: None,
            p50: None,
            p99: None,
            leases: None,
            failovers: None,
            local: None,
        }
    }

    fn answer(text: Option<&str>) -> Answer {
        let told = text.ok_or(Silence::Ask(std::io::ErrorKind::TimedOut.into()));
        Answer {
            address: MetricsAddress::Path("/a/vm0.metrics".into()),
            told: told.map(|text| Backend::parse(text).unwrap()),
        }
    }

    /// Bytes and requests a second of the only row, and whether it is new.
    fn look(rates: &mut Rates, at: f64, told: Option<&str>) -> Option<(f64, f64, bool)> {
        let rows = rates.take(at, &[answer(told)]);
        let row = rows.into_iter().next()?;
        assert_eq!((&*row.backend, &*row.instance), ("blk", "vm0"));
        Some((row.bytes?, row.requests?, row.is_new))
    }

    #[test]
    fn rates_are_what_has_grown_since_the_last_answer() {
        let mut rates = Rates::default();
        let told = |bytes, requests| disks(1, &[("a", bytes, requests)]);
        assert_eq!(look(&mut rates, 0.0, Some(&told(1000, 10))), None);
        let now = look(&mut rates, 2.0, Some(&told(5000, 14)));
        assert_eq!(now, Some((2000.0, 2.0, false)));
        // What was missed is over all of the time.
        assert_eq!(look(&mut rates, 3.0, None), None);
        let now = look(&mut rates, 4.0, Some(&told(5000, 18)));
        assert_eq!(now, Some((0.0, 2.0, false)));
        // One that has gone is forgotten.
        assert!(rates.take(5.0, &[]).is_empty());
        assert_eq!(look(&mut rates, 6.0, Some(&told(5000, 18))), None);
    }

    #[test]
    fn who_begins_anew_counts_from_there() {
        let mut rates = Rates::default();
        look(&mut rates, 0.0, Some(&disks(1, &[("a", 1000, 10)])));
        // One counter has fallen.
        let now = look(&mut rates, 1.0, Some(&disks(1, &[("a", 300, 20)])));
        assert_eq!(now, Some((300.0, 20.0, true)));
        // None has, but it says so.
        let now = look(&mut rates, 2.0, Some(&disks(2, &[("a", 400, 30)])));
        assert_eq!(now, Some((400.0, 30.0, true)));
        let now = look(&mut rates, 3.0, Some(&disks(2, &[("a", 400, 30)])));
        assert_eq!(now, Some((0.0, 0.0, false)));
    }

    #[test]
    fn times_are_those_of_what_was_done_meanwhile() {
        let told = |fast: u64, slow: u64| {
            disks(1, &[("a", 0, 0)])
                + &format!(
                    "farlane_blk_read_seconds_bucket{{disk=\"a\",le=\"0.001\"}} {fast}\n\
                     farlane_blk_read_seconds_bucket{{disk=\"a\",le=\"0.1\"}} {}\n",
                    fast + slow
                )
        };
        let mut rates = Rates::default();
        rates.take(0.0, &[answer(Some(&told(1000, 0)))]);
        let rows = rates.take(1.0, &[answer(Some(&told(1001, 99)))]);
        assert_eq!((rows[0].p50, rows[0].p99), (Some(0.1), Some(0.1)));
    }

    proptest::proptest! {
        #[test]
        fn no_rate_is_negative(
            looks in proptest::collection::vec((0_u64..3, 0_u64..1000, 0_u64..1000), 2..9)
        ) {
            let mut rates = Rates::default();
            let mut seconds = 0.0;
            for (started, bytes, requests) in looks {
                seconds += 1.0;
                let told = disks(started, &[("a", bytes, requests)]);
                if let Some((bytes, requests, _)) = look(&mut rates, seconds, Some(&told)) {
                    proptest::prop_assert!(bytes >= 0.0 && requests >= 0.0);
                }
            }
        }
    }
}
