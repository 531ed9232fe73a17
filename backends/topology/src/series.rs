//! How counters grow over time.

use crate::metrics::{Counters, Moved};
use std::collections::{BTreeMap, BTreeSet};

/// What a device has moved between two looks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Bytes by the node of the worker.
    pub by_worker: BTreeMap<u32, u64>,
    /// Bytes that a worker of their own node has moved.
    pub local: u64,
    /// All bytes.
    pub all: u64,
}

impl Step {
    /// The share that was served locally, in per cent; none where nothing was moved.
    #[must_use]
    pub fn local_percent(&self) -> Option<f64> {
        percent(self.local, self.all)
    }

    fn add(&mut self, worker: u32, data: u32, bytes: u64) {
        let of_worker = self.by_worker.entry(worker).or_default();
        *of_worker = of_worker.saturating_add(bytes);
        self.all = self.all.saturating_add(bytes);
        if worker == data {
            self.local = self.local.saturating_add(bytes);
        }
    }
}

/// `part` of `all` in per cent; none of nothing.
#[must_use]
pub fn percent(part: u64, all: u64) -> Option<f64> {
    // Precise to 15 digits.
    #[allow(clippy::cast_precision_loss)]
    (all > 0).then(|| part as f64 * 100.0 / all as f64)
}

/// `bytes` in `seconds`, in bytes a second.
#[must_use]
pub fn rate(bytes: u64, seconds: f64) -> f64 {
    // Precise to 15 digits.
    #[allow(clippy::cast_precision_loss)]
    if seconds > 0.0 {
        bytes as f64 / seconds
    } else {
        0.0
    }
}

/// One look at all devices.
#[derive(Clone, Debug)]
pub struct Tick {
    /// When it was, in seconds after the first look.
    pub at: f64,
    /// How long after the look before, in seconds.
    pub length: f64,
    /// What each device has moved meanwhile.
    pub devices: BTreeMap<String, Step>,
}

/// All looks.
#[derive(Clone, Debug, Default)]
pub struct Series {
    last: Option<(f64, Counters)>,
    /// In their order.
    pub ticks: Vec<Tick>,
    /// All that was moved while somebody looked.
    pub moved: Counters,
}

impl Series {
    /// Takes counters that were read `at` seconds. Those that are missing have not grown; those
    /// that are lower than before have begun anew, because their backend has.
    pub fn take(&mut self, at: f64, now: Counters) -> Option<&Tick> {
        let Some((before, last)) = &mut self.last else {
            self.last = Some((at, now));
            return None;
        };
        let mut devices: BTreeMap<String, Step> = BTreeMap::new();
        for (key, value) in now {
            let old = last.insert(key.clone(), value).unwrap_or_default();
            let grown = Moved {
                bytes: grown(old.bytes, value.bytes),
                requests: grown(old.requests, value.requests),
            };
            let step = devices.entry(key.device.clone()).or_default();
            step.add(key.worker, key.data, grown.bytes);
            let moved = self.moved.entry(key).or_default();
            moved.bytes = moved.bytes.saturating_add(grown.bytes);
            moved.requests = moved.requests.saturating_add(grown.requests);
        }
        let length = at - *before;
        *before = at;
        self.ticks.push(Tick {
            at,
            length,
            devices,
        });
        self.ticks.last()
    }

    /// The devices there were.
    #[must_use]
    pub fn devices(&self) -> BTreeSet<String> {
        self.moved.keys().map(|key| key.device.clone()).collect()
    }

    /// The nodes of a device's workers.
    #[must_use]
    pub fn workers(&self, device: &str) -> BTreeSet<u32> {
        let keys = self.moved.keys().filter(|key| key.device == device);
        keys.map(|key| key.worker).collect()
    }
}

/// How much a counter has grown: one that is lower than before has begun anew, because its backend
/// has.
#[must_use]
pub fn grown(old: u64, new: u64) -> u64 {
    new.checked_sub(old).unwrap_or(new)
}

/// What was moved, added up by device.
#[must_use]
pub fn totals(counters: &Counters) -> BTreeMap<String, Step> {
    let mut totals: BTreeMap<String, Step> = BTreeMap::new();
    for (key, moved) in counters {
        let step = totals.entry(key.device.clone()).or_default();
        step.add(key.worker, key.data, moved.bytes);
    }
    totals
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::metrics::Key;

    /// Counters of a device by (data, worker, bytes).
    pub(crate) fn counters(cells: &[(u32, u32, u64)]) -> Counters {
        let cell = |&(data, worker, bytes)| {
            let key = Key {
                device: "blk d".to_owned(),
                data,
                worker,
                path: "p".to_owned(),
            };
            (key, Moved { bytes, requests: 1 })
        };
        cells.iter().map(cell).collect()
    }

    #[test]
    fn growth_is_what_counts() {
        let mut series = Series::default();
        let look = counters(&[(0, 0, 1000), (0, 1, 50)]);
        assert!(series.take(0.0, look).is_none());
        let tick = series.take(0.5, counters(&[(0, 0, 1300), (0, 1, 150)]));
        let step = &tick.unwrap().devices["blk d"];
        assert_eq!(step.by_worker, BTreeMap::from([(0, 300), (1, 100)]));
        assert_eq!(step.local_percent(), Some(75.0));
        // Away, and then another one.
        series.take(1.0, Counters::new());
        let tick = series.take(1.5, counters(&[(0, 0, 1300), (0, 1, 7)]));
        assert_eq!(tick.unwrap().devices["blk d"].all, 7);
        let totals = totals(&series.moved);
        assert_eq!((totals["blk d"].local, totals["blk d"].all), (300, 407));
        assert_eq!(series.workers("blk d"), BTreeSet::from([0, 1]));
    }

    #[test]
    fn nothing_has_no_share() {
        assert_eq!(Step::default().local_percent(), None);
        assert_eq!(rate(5, 0.0), 0.0);
    }

    proptest::proptest! {
        #[test]
        fn what_was_moved_is_what_all_steps_add_up_to(
            looks in proptest::collection::vec(proptest::collection::vec(0_u64..1000, 4), 1..9)
        ) {
            let mut series = Series::default();
            for (at, look) in (0_u32..).zip(&looks) {
                let cells = (0_u32..).zip(look).map(|(n, bytes)| (n & 1, n >> 1, *bytes));
                let cells: Vec<_> = cells.collect();
                series.take(f64::from(at), counters(&cells));
            }
            let steps = series.ticks.iter().filter_map(|tick| tick.devices.get("blk d"));
            let add = |sum: (u64, u64), step: &Step| (sum.0 + step.local, sum.1 + step.all);
            let sum = steps.fold((0, 0), add);
            let total = totals(&series.moved).remove("blk d").unwrap_or_default();
            proptest::prop_assert_eq!(sum, (total.local, total.all));
            proptest::prop_assert!(total.local <= total.all);
            proptest::prop_assert_eq!(total.by_worker.values().sum::<u64>(), total.all);
        }
    }
}
