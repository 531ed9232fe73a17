//! Families of samples, and their text.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::fmt;

pub use farlane_worker::counters::{Kind, Sample};
pub use farlane_worker::histogram::{Distribution, Histogram};

/// Labels of a sample, in order.
type Labels = Vec<(String, String)>;

/// Samples of one name.
#[derive(Clone, Debug)]
struct Family {
    help: String,
    kind: FamilyKind,
    samples: Vec<(Labels, Value)>,
}

#[derive(Clone, Debug)]
enum Value {
    Number(u64),
    Times(Distribution),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FamilyKind {
    Counter,
    Gauge,
    Histogram,
    Info,
}

/// What a daemon tells. Samples of one name are one family, whoever has added them.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    families: BTreeMap<String, Family>,
}

impl Metrics {
    /// Adds samples of one thing, each as `PREFIX_name{labels}`.
    pub fn add<'a>(
        &mut self,
        prefix: &str,
        labels: &[(&str, &str)],
        samples: impl IntoIterator<Item = Sample<'a>>,
    ) {
        for sample in samples {
            let kind = match sample.kind {
                Kind::Counter => FamilyKind::Counter,
                Kind::Gauge => FamilyKind::Gauge,
            };
            let name = format!("{prefix}_{}", sample.name);
            self.push(
                name,
                (sample.help, kind),
                labels,
                Value::Number(sample.value),
            );
        }
    }

    /// Adds something that is so, which its labels say: `name_info{labels} 1`.
    pub fn inform(&mut self, name: &str, help: &str, labels: &[(&str, &str)]) {
        let kind = (help, FamilyKind::Info);
        self.push(name.to_owned(), kind, labels, Value::Number(1));
    }

    /// Adds how long something took, in seconds; the name says so.
    pub fn add_times(&mut self, name: &str, help: &str, labels: &[(&str, &str)], of: &Histogram) {
        let kind = (help, FamilyKind::Histogram);
        let times = Value::Times(of.distribution());
        self.push(name.to_owned(), kind, labels, times);
    }

    fn push(
        &mut self,
        name: String,
        (help, kind): (&str, FamilyKind),
        labels: &[(&str, &str)],
        value: Value,
    ) {
        let none = || Family {
            help: help.to_owned(),
            kind,
            samples: Vec::new(),
        };
        let family = self.families.entry(name).or_insert_with(none);
        let labels = labels.iter();
        let labels = labels.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        family.samples.push((labels.collect(), value));
    }

    /// As OpenMetrics text (OpenMetrics 1.0.0): counters end in `_total`, and there is an end.
    #[must_use]
    pub fn open_metrics(&self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Families(self.clone())));
        let mut text = String::new();
        // A String takes whatever is written.
        let _ = text::encode(&mut text, &registry);
        text
    }

    /// As the text that Prometheus has had before (exposition format 0.0.4): the same samples,
    /// whose families have their names.
    #[must_use]
    pub fn prometheus(&self) -> String {
        let mut out = String::new();
        for line in self.open_metrics().lines() {
            let mut words = line.splitn(4, ' ');
            let [head, what, name, rest] = [(); 4].map(|()| words.next().unwrap_or_default());
            match (head, what) {
                ("#", "EOF" | "UNIT") => {}
                ("#", "HELP" | "TYPE") => {
                    let (name, rest) = self.of_prometheus(name, what, rest);
                    out.push_str(&format!("# {what} {name} {rest}\n"));
                }
                _ => out.push_str(&format!("{line}\n")),
            }
        }
        out
    }

    /// What Prometheus calls a family, and what it says of it.
    fn of_prometheus<'a>(&self, name: &str, what: &str, said: &'a str) -> (String, &'a str) {
        let kind = self.families.get(name).map(|family| family.kind);
        match (kind, what) {
            (Some(FamilyKind::Counter), _) => (format!("{name}_total"), said),
            (Some(FamilyKind::Info), "TYPE") => (format!("{name}_info"), "gauge"),
            (Some(FamilyKind::Info), _) => (format!("{name}_info"), said),
            _ => (name.to_owned(), said),
        }
    }
}

/// The unit that a name ends in, and what is before it.
fn unit(name: &str) -> (&str, Option<Unit>) {
    if let Some(name) = name.strip_suffix("_bytes") {
        return (name, Some(Unit::Bytes));
    }
    match name.strip_suffix("_seconds") {
        Some(name) => (name, Some(Unit::Seconds)),
        None => (name, None),
    }
}

#[derive(Debug)]
struct Families(Metrics);

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, family) in &self.0.families {
            let (name, unit) = unit(name);
            let kind = match family.kind {
                FamilyKind::Counter => MetricType::Counter,
                FamilyKind::Gauge => MetricType::Gauge,
                FamilyKind::Histogram => MetricType::Histogram,
                FamilyKind::Info => MetricType::Info,
            };
            let encoder = encoder.encode_descriptor(name, &family.help, unit.as_ref(), kind)?;
            family.encode(encoder)?;
        }
        Ok(())
    }
}

impl EncodeMetric for Family {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        for (labels, value) in &self.samples {
            let one = |encoder: &mut MetricEncoder<'_>| match (self.kind, value) {
                (FamilyKind::Info, _) => encoder.encode_info(labels),
                (FamilyKind::Counter, Value::Number(value)) => {
                    encoder.encode_counter::<Labels, _, u64>(value, None)
                }
                // As great as the crate has them.
                (_, Value::Number(value)) => {
                    encoder.encode_gauge(&i64::try_from(*value).unwrap_or(i64::MAX))
                }
                (_, Value::Times(times)) => {
                    let count = times.count();
                    encoder.encode_histogram::<Labels>(times.sum, count, &times.buckets, None)
                }
            };
            match (self.kind, labels.is_empty()) {
                (FamilyKind::Info, _) | (_, true) => one(&mut encoder)?,
                (_, false) => one(&mut encoder.encode_family(labels)?)?,
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn some() -> Metrics {
        let mut metrics = Metrics::default();
        let reads = |value| Sample::counter("read_bytes", "Bytes read.", value);
        metrics.add("farlane", &[("disk", "a")], [reads(1)]);
        metrics.add(
            "farlane",
            &[],
            [Sample::gauge("links", "Links now.", u64::MAX)],
        );
        // Of two things in one family, whoever comes between them.
        let odd = "5\" \\ disk\nfarlane_reads 8";
        metrics.add("farlane", &[("disk", odd), ("node", "1")], [reads(2)]);
        metrics.inform("farlane_build", "What runs.", &[("version", "1")]);
        metrics
    }

    #[test]
    fn times_are_a_histogram_in_seconds() {
        let times = Histogram::default();
        for micros in [1, 3, 60_000_000] {
            times.add(Duration::from_micros(micros));
        }
        let mut metrics = Metrics::default();
        metrics.add_times("wait_seconds", "Waiting.", &[("disk", "a")], &times);
        for text in [metrics.open_metrics(), metrics.prometheus()] {
            let has = |line: &str| assert!(text.lines().any(|said| said == line), "{text}");
            has("# TYPE wait_seconds histogram");
            has("wait_seconds_sum{disk=\"a\"} 60.000004");
            has("wait_seconds_count{disk=\"a\"} 3");
            has("wait_seconds_bucket{le=\"0.000001\",disk=\"a\"} 1");
            has("wait_seconds_bucket{le=\"8.388608\",disk=\"a\"} 2");
            has("wait_seconds_bucket{le=\"+Inf\",disk=\"a\"} 3");
        }
        assert!(
            metrics
                .open_metrics()
                .contains("# UNIT wait_seconds seconds\n")
        );
    }

    #[test]
    fn families_are_told_with_types_units_and_an_end() {
        assert_eq!(
            some().open_metrics(),
            "# HELP farlane_build What runs.\n\
             # TYPE farlane_build info\n\
             farlane_build_info{version=\"1\"} 1\n\
             # HELP farlane_links Links now.\n\
             # TYPE farlane_links gauge\n\
             farlane_links 9223372036854775807\n\
             # HELP farlane_read_bytes Bytes read.\n\
             # TYPE farlane_read_bytes counter\n\
             # UNIT farlane_read_bytes bytes\n\
             farlane_read_bytes_total{disk=\"a\"} 1\n\
             farlane_read_bytes_total{disk=\"5\\\" \\\\ disk\\nfarlane_reads 8\",node=\"1\"} 2\n\
             # EOF\n"
        );
    }

    #[test]
    fn prometheus_has_the_names_of_samples() {
        assert_eq!(
            some().prometheus(),
            "# HELP farlane_build_info What runs.\n\
             # TYPE farlane_build_info gauge\n\
             farlane_build_info{version=\"1\"} 1\n\
             # HELP farlane_links Links now.\n\
             # TYPE farlane_links gauge\n\
             farlane_links 9223372036854775807\n\
             # HELP farlane_read_bytes_total Bytes read.\n\
             # TYPE farlane_read_bytes_total counter\n\
             farlane_read_bytes_total{disk=\"a\"} 1\n\
             farlane_read_bytes_total{disk=\"5\\\" \\\\ disk\\nfarlane_reads 8\",node=\"1\"} 2\n"
        );
    }
}
