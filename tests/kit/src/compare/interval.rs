//! The median of a few figures, and its confidence interval by order statistics.
//!
//! The interval assumes nothing of the figures' distribution but that they are independent: each
//! lies below the true median with probability 1/2, so the number that do is binomial. With the
//! figures sorted as `x[1] <= ... <= x[n]`, the interval `x[k]..=x[n+1-k]` holds the true median
//! with probability `1 - 2 P(Bin(n, 1/2) < k)` (H. A. David, Order Statistics, 2.5).

/// The middle figure, or the mean of the two in the middle. Not a number where there are none.
#[must_use]
pub fn median(figures: &[f64]) -> f64 {
    let sorted = sorted(figures);
    let middle = sorted.len() / 2;
    match sorted.as_slice() {
        [] => f64::NAN,
        all if all.len() % 2 == 1 => all[middle],
        all => f64::midpoint(all[middle - 1], all[middle]),
    }
}

/// The narrowest interval of order statistics that holds the true median with at least this
/// probability. None where even the smallest and the largest figure together do not: 95 % needs six
/// figures.
#[must_use]
pub fn of_median(figures: &[f64], confidence: f64) -> Option<(f64, f64)> {
    let sorted = sorted(figures);
    let count = sorted.len();
    let rank = rank(count, confidence)?;
    Some((sorted[rank - 1], sorted[count - rank]))
}

/// The largest `k` with `1 - 2 P(Bin(count, 1/2) < k) >= confidence`, if it is at least 1.
fn rank(count: usize, confidence: f64) -> Option<usize> {
    let n = f64::from(u32::try_from(count).ok()?);
    // P(Bin = i), and the sum of those below k.
    let (mut term, mut below) = (0.5_f64.powf(n), 0.0);
    let (mut found, mut i) = (None, 0.0);
    for k in 1..=count.div_ceil(2) {
        below += term;
        term *= (n - i) / (i + 1.0);
        i += 1.0;
        if 1.0 - 2.0 * below < confidence {
            break;
        }
        found = Some(k);
    }
    found
}

fn sorted(figures: &[f64]) -> Vec<f64> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn ranks_are_those_of_the_tables() {
        // Conover, Practical Nonparametric Statistics: intervals of the median of at least 95 %.
        let expected = [
            (5, None),
            (6, Some(1)),
            (8, Some(1)),
            (9, Some(2)),
            (11, Some(2)),
            (12, Some(3)),
            (15, Some(4)),
            (20, Some(6)),
            (25, Some(8)),
            (50, Some(18)),
        ];
        for (count, expected) in expected {
            assert_eq!(rank(count, 0.95), expected, "{count} figures");
        }
        assert_eq!(rank(7, 0.99), None);
        assert_eq!(rank(8, 0.99), Some(1));
    }

    #[test]
    fn the_interval_leaves_outliers_out() {
        let mut figures = vec![1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.0, 1.01, 0.99];
        figures[3] = 100.0;
        let (low, high) = of_median(&figures, 0.95).unwrap();
        assert!(low >= 0.98 && high <= 1.02, "{low} to {high}");
    }
}
