//! What is shown of a device, and the order of rows.

use super::rates::Row;
use farlane_topology::live::{human, local};
use std::cmp::Ordering;

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// The backend.
    Backend,
    /// Its instance.
    Name,
    /// The device.
    Device,
    /// Bytes a second.
    Bytes,
    /// Requests a second.
    Requests,
    /// What half of requests took at most.
    P50,
    /// What 99 per cent of requests took at most.
    P99,
    /// Leases.
    Leases,
    /// Failures of paths.
    Failovers,
    /// The share that was served locally.
    Local,
}

use Column::{Backend, Bytes, Device, Failovers, Leases, Local, Name, P50, P99, Requests};

/// All of them, as they stand.
const ALL: [Column; 10] = [
    Backend, Name, Device, Bytes, Requests, P50, P99, Leases, Failovers, Local,
];

impl Column {
    /// Those that say something of these rows: times are told by few backends.
    #[must_use]
    pub fn shown(rows: &[Row]) -> Vec<Self> {
        let has_times = rows.iter().any(|row| row.p50.is_some());
        let is_shown = |column: &Self| has_times || ![P50, P99].contains(column);
        ALL.into_iter().filter(is_shown).collect()
    }

    /// What stands above it.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Backend => "BACKEND",
            Name => "NAME",
            Device => "DEVICE",
            Bytes => "BYTES/S",
            Requests => "REQUESTS/S",
            P50 => "P50",
            P99 => "P99",
            Leases => "LEASES",
            Failovers => "FAILOVERS",
            Local => "LOCAL",
        }
    }

    /// Whether its cells are numbers.
    #[must_use]
    pub fn is_number(self) -> bool {
        ![Backend, Name, Device].contains(&self)
    }

    /// What stands in a row. Names are as their backend tells them.
    #[must_use]
    pub fn cell(self, row: &Row) -> String {
        let none = || "-".to_owned();
        let number = |number: Option<u64>| number.map_or_else(none, |n| n.to_string());
        match self {
            Backend => row.backend.clone(),
            Name if row.is_new => format!("{} (new)", row.instance),
            Name => row.instance.clone(),
            Device => format!("{} {}", row.device.label, row.device.name),
            Bytes => row.bytes.map_or_else(none, |n| human(n) + "/s"),
            Requests => row.requests.map_or_else(none, |n| format!("{n:.0}")),
            P50 => row.p50.map_or_else(none, time),
            P99 => row.p99.map_or_else(none, time),
            Leases => number(row.leases),
            Failovers => number(row.failovers),
            Local => local(row.local),
        }
    }

    fn compare(self, a: &Row, b: &Row) -> Ordering {
        let numbers =
            |a: Option<f64>, b: Option<f64>| a.unwrap_or(-1.0).total_cmp(&b.unwrap_or(-1.0));
        match self {
            Backend => a.backend.cmp(&b.backend),
            Name => a.instance.cmp(&b.instance),
            Device => a.device.cmp(&b.device),
            Bytes => numbers(a.bytes, b.bytes),
            Requests => numbers(a.requests, b.requests),
            P50 => numbers(a.p50, b.p50),
            P99 => numbers(a.p99, b.p99),
            Leases => a.leases.cmp(&b.leases),
            Failovers => a.failovers.cmp(&b.failovers),
            Local => numbers(a.local, b.local),
        }
    }

    /// Rows in the order of this column: numbers from the greatest on, names from A on, or the
    /// other way. Those that are alike are in the order of their names.
    #[must_use]
    pub fn sorted(self, rows: &[Row], is_reversed: bool) -> Vec<&Row> {
        let mut sorted: Vec<_> = rows.iter().collect();
        sorted.sort_by(|a, b| {
            let order = self.compare(a, b);
            let order = match self.is_number() != is_reversed {
                true => order.reverse(),
                false => order,
            };
            let order = order.then_with(|| a.backend.cmp(&b.backend));
            let order = order.then_with(|| a.instance.cmp(&b.instance));
            order.then_with(|| a.device.cmp(&b.device))
        });
        sorted
    }
}

/// A time that is a bound.
fn time(seconds: f64) -> String {
    match seconds {
        _ if seconds.is_infinite() => "∞".to_owned(),
        _ if seconds < 1e-3 => format!("{:.0} µs", seconds * 1e6),
        _ if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{seconds:.1} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::rates::tests::row;

    #[test]
    fn rows_are_in_the_order_of_a_column() {
        let rows = [
            row("b", Some(1.0)),
            row("c", None),
            row("a", Some(1.0)),
            row("d", Some(9.0)),
        ];
        let names = |column: Column, is_reversed| {
            let sorted = column.sorted(&rows, is_reversed);
            sorted
                .iter()
                .map(|row| &*row.device.name)
                .collect::<String>()
        };
        assert_eq!(names(Bytes, false), "dabc");
        assert_eq!(names(Bytes, true), "cabd");
        assert_eq!(names(Device, false), "abcd");
        assert_eq!(names(Device, true), "dcba");
    }

    #[test]
    fn times_are_shown_where_somebody_tells_them() {
        let mut rows = vec![row("a", None)];
        assert!(!Column::shown(&rows).contains(&P99));
        rows[0].p50 = Some(0.000_25);
        rows[0].p99 = Some(f64::INFINITY);
        assert!(Column::shown(&rows).contains(&P99));
        assert_eq!(
            (P50.cell(&rows[0]), P99.cell(&rows[0])),
            ("250 µs".into(), "∞".into())
        );
        assert_eq!(
            (time(0.0123), time(2.5)),
            ("12.3 ms".into(), "2.5 s".into())
        );
        rows[0].is_new = true;
        assert_eq!(Name.cell(&rows[0]), "vm0 (new)");
    }
}
