//! How long things take, from histograms of times (OpenMetrics 1.0.0, "Histogram").

use farlane_daemon::metrics::exposition::SampleLine;
use farlane_daemon::metrics::measures::is_of_requests;
use std::collections::BTreeMap;

/// How names of a histogram's counts end, behind its own.
const ENDING: &str = "_bucket";
/// Most buckets of a device, and bytes of a name and its labels.
const MOST: usize = 4096;
const MOST_BYTES: usize = 1024;

/// Cumulative counts by histogram and upper bound. A bound is the bits of a number that is not
/// negative, which are in the order of these.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histograms(BTreeMap<(String, u64), u64>);

impl Histograms {
    /// Takes a sample, where it is one of such a histogram.
    pub fn take(&mut self, sample: &SampleLine<'_>) {
        let family = sample.name.strip_suffix(ENDING);
        let (Some(_), Some(bound)) = (family.filter(|of| is_of_requests(of)), sample.label("le"))
        else {
            return;
        };
        let bound = bound.parse().ok().filter(|bound: &f64| *bound >= 0.0);
        let count = sample.integer();
        if let (Some(bound), Some(count), true) = (bound, count, self.0.len() < MOST) {
            let mut name = sample.name.to_owned();
            for (label, value) in sample.labels.iter().filter(|(label, _)| *label != "le") {
                name.extend([",", label, "=", value]);
            }
            if name.len() <= MOST_BYTES {
                self.0.insert((name, bound.to_bits()), count);
            }
        }
    }

    /// What has come since `before`; all of it, where that is a greater one.
    #[must_use]
    pub fn since(&self, before: &Self) -> Distribution {
        let mut distribution = Distribution::default();
        let mut last: Option<(&str, u64)> = None;
        for ((name, bound), count) in &self.0 {
            let old = before.0.get(&(name.clone(), *bound)).copied();
            let grown = farlane_topology::series::grown(old.unwrap_or(0), *count);
            let below = last
                .filter(|(of, _)| of == name)
                .map_or(0, |(_, below)| below);
            let of_bound = distribution.0.entry(*bound).or_default();
            *of_bound = of_bound.saturating_add(grown.saturating_sub(below));
            last = Some((name, grown));
        }
        distribution
    }
}

/// How many were how fast: by the bits of the upper bound, in seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution(BTreeMap<u64, u64>);

impl Distribution {
    /// The least bound in seconds that holds for this part of all, such as 0.99; none of nothing.
    #[must_use]
    pub fn bound(&self, part: f64) -> Option<f64> {
        let all = self.0.values().fold(0_u64, |sum, n| sum.saturating_add(*n));
        // Precise to 15 digits.
        #[allow(clippy::cast_precision_loss)]
        let wanted = all as f64 * part;
        let mut sum = 0_u64;
        let mut counts = self.0.iter().filter(|(_, count)| **count > 0);
        let found = counts.find(|(_, count)| {
            sum = sum.saturating_add(**count);
            #[allow(clippy::cast_precision_loss)]
            let sum = sum as f64;
            sum >= wanted
        });
        found.map(|(bound, _)| f64::from_bits(*bound))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_daemon::metrics::exposition::samples;

    fn read(text: &str) -> Histograms {
        let mut histograms = Histograms::default();
        samples(text).for_each(|sample| histograms.take(&sample));
        histograms
    }

    fn bucket(name: &str, bound: &str, count: u64) -> String {
        format!("{name}_bucket{{disk=\"a\",le=\"{bound}\"}} {count}\n")
    }

    #[test]
    fn quantiles_are_of_what_has_come_since() {
        let of = |counts: [u64; 3]| {
            let bounds = ["0.001", "0.01", "+Inf"];
            let lines = bounds.iter().zip(counts);
            let lines = lines.map(|(bound, count)| bucket("x_read_seconds", bound, count));
            read(&lines.collect::<String>())
        };
        let before = of([100, 100, 100]);
        let now = of([150, 199, 200]).since(&before);
        assert_eq!(now.bound(0.5), Some(0.001));
        assert_eq!(now.bound(0.99), Some(0.01));
        assert_eq!(now.bound(1.0), Some(f64::INFINITY));
        assert_eq!(before.since(&before).bound(0.5), None);
        // Begun anew.
        let anew = of([0, 10, 10]).since(&before);
        assert_eq!(anew.bound(0.5), Some(0.01));
    }

    #[test]
    fn histograms_of_other_bounds_are_added_up() {
        let text = [
            bucket("x_a_seconds", "1", 10),
            bucket("x_a_seconds", "+Inf", 10),
            bucket("x_b_seconds", "2", 30),
            bucket("x_b_seconds", "+Inf", 30),
        ];
        let all = read(&text.concat()).since(&Histograms::default());
        assert_eq!((all.bound(0.25), all.bound(0.3)), (Some(1.0), Some(2.0)));
    }

    #[test]
    fn histograms_of_backends_are_read() {
        use farlane_daemon::metrics::Metrics;
        use farlane_daemon::metrics::families::Histogram;
        let times = Histogram::default();
        let told = || {
            let mut metrics = Metrics::default();
            let labels = [("disk", "a"), ("operation", "read")];
            metrics.add_times("farlane_blk_request_seconds", "Times.", &labels, &times);
            read(&metrics.open_metrics())
        };
        let before = told();
        for micros in [1, 3, 3, 60_000_000] {
            times.add(std::time::Duration::from_micros(micros));
        }
        let now = told().since(&before);
        let bounds = [0.25, 0.5, 1.0].map(|part| now.bound(part));
        assert_eq!(bounds, [Some(1e-6), Some(4e-6), Some(f64::INFINITY)]);
    }

    #[test]
    fn what_is_no_histogram_of_times_is_left_out() {
        let text = [
            bucket("x_bytes", "1", 1),
            bucket("farlane_rdma_vm_call_seconds", "1", 1),
            bucket("x_seconds", "-1", 1),
            bucket("x_seconds", "NaN", 1),
            bucket("x_seconds", "many", 1),
            "x_seconds_bucket 1\nx_seconds_sum 1\n".to_owned(),
        ];
        assert_eq!(read(&text.concat()), Histograms::default());
        // Falling counts are no panic.
        let falling = bucket("x_seconds", "1", 9) + &bucket("x_seconds", "2", 3);
        let falling = read(&falling).since(&Histograms::default());
        assert_eq!(falling.bound(1.0), Some(1.0));
    }
}
