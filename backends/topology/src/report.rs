//! Growth as JSON, for other programs.

use crate::metrics::Counters;
use crate::series::{Series, percent, rate, totals};
use serde::Serialize;
use std::collections::BTreeMap;

/// All that was seen.
#[derive(Debug, Serialize)]
pub struct Report {
    /// By name.
    pub devices: BTreeMap<String, Device>,
}

/// A device.
#[derive(Debug, Serialize)]
pub struct Device {
    /// When it was looked at, in seconds after the first look.
    pub seconds: Vec<f64>,
    /// Bytes a second of the workers of each node since the look before.
    pub worker_bytes_per_second: BTreeMap<u32, Vec<f64>>,
    /// The share that was served locally since the look before, in per cent; none where nothing was
    /// moved.
    pub local_percent: Vec<Option<f64>>,
    /// All that was moved.
    pub total: Total,
}

/// A sum over all time.
#[derive(Debug, Serialize)]
pub struct Total {
    /// Length in bytes.
    pub bytes: u64,
    /// Bytes that a worker of their own node has moved.
    pub local_bytes: u64,
    /// Their share, in per cent; none where nothing was moved.
    pub local_percent: Option<f64>,
    /// One combination each.
    pub cells: Vec<Cell>,
}

/// A combination.
#[derive(Debug, Serialize)]
pub struct Cell {
    /// Node of the memory.
    pub data: u32,
    /// Node of the worker.
    pub worker: u32,
    /// Path to the hardware.
    pub path: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Requests, or parts of them.
    pub requests: u64,
}

impl Report {
    /// Of all looks.
    #[must_use]
    pub fn of(series: &Series) -> Self {
        let mut report = Self::of_counters(&series.moved);
        for (name, device) in &mut report.devices {
            let workers = series.workers(name);
            for tick in &series.ticks {
                let step = tick.devices.get(name).cloned().unwrap_or_default();
                device.seconds.push(tick.at);
                device.local_percent.push(step.local_percent());
                for worker in &workers {
                    let bytes = step.by_worker.get(worker).copied().unwrap_or(0);
                    let rates = device.worker_bytes_per_second.entry(*worker).or_default();
                    rates.push(rate(bytes, tick.length));
                }
            }
        }
        report
    }

    /// Of sums only.
    #[must_use]
    pub fn of_counters(counters: &Counters) -> Self {
        let device = |(name, total): (String, crate::series::Step)| {
            let cells = counters.iter().filter(|(key, _)| key.device == name);
            let cells = cells.map(|(key, moved)| Cell {
                data: key.data,
                worker: key.worker,
                path: key.path.clone(),
                bytes: moved.bytes,
                requests: moved.requests,
            });
            let device = Device {
                seconds: Vec::new(),
                worker_bytes_per_second: BTreeMap::new(),
                local_percent: Vec::new(),
                total: Total {
                    bytes: total.all,
                    local_bytes: total.local,
                    local_percent: percent(total.local, total.all),
                    cells: cells.collect(),
                },
            };
            (name, device)
        };
        Self {
            devices: totals(counters).into_iter().map(device).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::tests::counters;

    #[test]
    fn the_report_has_all_looks_and_the_totals() {
        let mut series = Series::default();
        series.take(0.0, counters(&[(0, 0, 0), (0, 1, 0)]));
        series.take(0.5, counters(&[(0, 0, 300), (0, 1, 100)]));
        series.take(1.0, counters(&[(0, 0, 300), (0, 1, 100)]));
        let json = serde_json::to_value(Report::of(&series)).unwrap();
        let device = &json["devices"]["blk d"];
        assert_eq!(device["seconds"], serde_json::json!([0.5, 1.0]));
        let rates = serde_json::json!({"0": [600.0, 0.0], "1": [200.0, 0.0]});
        assert_eq!(device["worker_bytes_per_second"], rates);
        assert_eq!(device["local_percent"], serde_json::json!([75.0, null]));
        assert_eq!(device["total"]["local_bytes"], 300);
        assert_eq!(device["total"]["cells"].as_array().unwrap().len(), 2);
    }
}
