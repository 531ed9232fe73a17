//! Growth as lines: time goes down, the workers of each node have a column with a bar.

use crate::metrics::Counters;
use crate::series::{Step, Tick, percent, rate, totals};
use farlane_abi::width::to_usize;
use farlane_daemon::terminal;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Characters of the longest bar.
const WIDTH: u16 = 18;
/// Colours of workers, as in the drawing: blue, orange, green, red, violet, grey.
const COLOURS: [u8; 6] = [34, 33, 32, 31, 35, 90];

/// Bytes with a unit of 1000: `1.23 GB`.
#[must_use]
pub fn human(bytes: f64) -> String {
    let mut value = bytes;
    for unit in ["B", "kB", "MB", "GB", "TB"] {
        if value < 999.5 {
            let decimals = match value {
                _ if unit == "B" || value >= 99.95 => 0,
                _ if value >= 9.995 => 1,
                _ => 2,
            };
            return format!("{value:.decimals$} {unit}");
        }
        value /= 1000.0;
    }
    format!("{value:.0} PB")
}

/// A bar of as many eighths of characters as there are in `part` of `WIDTH`.
fn bar(part: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    // In [0, 8 * WIDTH].
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let eighths = (part.clamp(0.0, 1.0) * f64::from(8 * WIDTH)).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    bar.push_str(EIGHTHS.get(eighths % 8).copied().unwrap_or_default());
    bar
}

/// A share in per cent; `-` of nothing.
#[must_use]
pub fn local(share: Option<f64>) -> String {
    // Downwards, so that only all of it is 100.
    share.map_or_else(
        || "-".to_owned(),
        |p| format!("{:.1} %", (p * 10.0).floor() / 10.0),
    )
}

/// Draws one tick after the other.
#[derive(Debug)]
pub struct Live {
    coloured: bool,
    /// The highest rate of a worker so far, which is the longest bar, and the workers, by device.
    seen: BTreeMap<String, (f64, BTreeSet<u32>)>,
}

impl Live {
    /// With colours, or without.
    #[must_use]
    pub fn new(coloured: bool) -> Self {
        Self {
            coloured,
            seen: BTreeMap::new(),
        }
    }

    fn paint(&self, worker: u32, text: &str) -> String {
        if !self.coloured {
            return text.to_owned();
        }
        let index = to_usize(worker.into()) % COLOURS.len();
        let colour = COLOURS.get(index).copied().unwrap_or_default();
        format!("\x1b[{colour}m{text}\x1b[0m")
    }

    /// A line a device, each with a line feed.
    pub fn tick(&mut self, tick: &Tick) -> String {
        let mut out = String::new();
        let width = tick.devices.keys().map(|d| d.chars().count()).max();
        for (device, step) in &tick.devices {
            let rates: Vec<_> = step
                .by_worker
                .iter()
                .map(|(worker, bytes)| (*worker, rate(*bytes, tick.length)))
                .collect();
            let (peak, workers) = self.seen.entry(device.clone()).or_default();
            workers.extend(step.by_worker.keys());
            *peak = rates.iter().fold(*peak, |peak, (_, rate)| peak.max(*rate));
            let (peak, workers) = (*peak, workers.clone());
            let _ = write!(out, "{:>7.1} s  {device:<1$}", tick.at, width.unwrap_or(0));
            for worker in workers {
                let found = rates.iter().find(|(l, _)| *l == worker);
                let rate = found.map_or(0.0, |(_, rate)| *rate);
                let bar = bar(if peak > 0.0 { rate / peak } else { 0.0 });
                let padding = usize::from(WIDTH) - bar.chars().count();
                let _ = write!(
                    out,
                    "  node {worker} {}{:padding$} {:>9}/s",
                    self.paint(worker, &bar),
                    "",
                    human(rate),
                );
            }
            let _ = writeln!(out, "  local {:>7}", local(step.local_percent()));
        }
        out
    }
}

/// A table of what was moved, and each device's share that was served locally.
#[must_use]
pub fn table(counters: &Counters) -> String {
    let mut rows =
        vec![["device", "memory", "worker", "path", "bytes", "requests"].map(str::to_owned)];
    for (key, moved) in counters {
        if moved.bytes > 0 || moved.requests > 0 {
            rows.push([
                key.device.clone(),
                format!("node {}", key.data),
                format!("node {}", key.worker),
                key.path.clone(),
                exact(moved.bytes),
                moved.requests.to_string(),
            ]);
        }
    }
    let mut out = terminal::table(&rows, &[4, 5]);
    for (device, Step { local, all, .. }) in totals(counters) {
        let _ = match percent(local, all) {
            None => writeln!(out, "{device}: nothing was moved"),
            share => writeln!(
                out,
                "{device}: {} of {} served locally",
                self::local(share),
                exact(all)
            ),
        };
    }
    out
}

/// A number of bytes, as [`human`] has it.
#[must_use]
pub fn exact(bytes: u64) -> String {
    // Precise to 15 digits, of which three are shown.
    #[allow(clippy::cast_precision_loss)]
    human(bytes as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::Series;
    use crate::series::tests::counters;

    #[test]
    fn bytes_have_three_digits() {
        for (bytes, text) in [
            (0.0, "0 B"),
            (999.0, "999 B"),
            (999.6, "1.00 kB"),
            (12_345.0, "12.3 kB"),
            (123_456.0, "123 kB"),
            (5.2e9, "5.20 GB"),
            (7e15, "7 PB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }

    #[test]
    fn bars_are_drawn_to_the_highest_rate_so_far() {
        let mut series = Series::default();
        let mut live = Live::new(false);
        series.take(0.0, counters(&[(0, 0, 0), (1, 1, 0)]));
        let tick = series.take(1.0, counters(&[(0, 0, 1_000_000), (1, 1, 0)]));
        let line = live.tick(tick.unwrap());
        assert_eq!(
            line,
            format!(
                "    1.0 s  blk d  node 0 {}   1.00 MB/s  node 1 {}       0 B/s  local 100.0 %\n",
                "█".repeat(18),
                " ".repeat(18)
            )
        );
        let tick = series.take(1.5, counters(&[(0, 0, 1_250_000), (1, 1, 250_000)]));
        let line = live.tick(tick.unwrap());
        assert_eq!(line.matches('█').count(), 18);
        let tick = series.take(2.0, counters(&[(0, 0, 1_250_000), (1, 1, 250_000)]));
        assert!(live.tick(tick.unwrap()).ends_with("local       -\n"));
    }

    #[test]
    fn nearly_all_is_not_all() {
        assert_eq!(local(Some(99.99)), "99.9 %");
        assert_eq!(local(Some(100.0)), "100.0 %");
        assert_eq!(local(None), "-");
    }

    #[test]
    fn the_table_has_what_was_moved_and_the_share() {
        let text = table(&counters(&[(0, 0, 3000), (1, 0, 1000)]));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "device  memory  worker  path    bytes  requests",
                "blk d   node 0  node 0  p     3.00 kB         1",
                "blk d   node 1  node 0  p     1.00 kB         1",
                "blk d: 75.0 % of 4.00 kB served locally",
            ]
        );
        let text = table(&counters(&[(0, 0, 0)]));
        assert!(text.ends_with("blk d: nothing was moved\n"));
    }
}
