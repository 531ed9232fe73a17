//! A cost model from measured times.

use super::model::{CostModel, ModelError, Parameters, float};
use farlane_abi::width::to_u64;
use std::collections::BTreeMap;
use thiserror::Error;

/// Least coefficient of determination of a fit. SPIN reports more than 0.99 for its device.
pub const LEAST_R2: f64 = 0.98;
/// Largest share by which a fit may miss the times, as the mean over the sizes: over sizes of three
/// decades R^2 is near 1 even for a line of the wrong shape.
pub const LARGEST_MISS: f64 = 0.25;
/// Fewest sizes on each way.
pub const FEWEST_SIZES: usize = 6;
/// Fewest times of each size.
pub const FEWEST_TIMES: usize = 3;
/// Least factor between the smallest and the largest size.
pub const LEAST_SPAN: u64 = 64;
/// Cutoffs that are tried within each doubling of the size.
const STEPS: i32 = 16;

/// One measured transfer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Length in bytes.
    pub bytes: u64,
    /// How long it took, in nanoseconds.
    pub nanoseconds: f64,
}

/// A fitted model, and how good it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The fitted cost model.
    pub model: CostModel,
    /// Coefficient of determination of T_p2p, of the logarithms of the quartiles.
    pub r2_p2p: f64,
    /// The same of T_pc.
    pub r2_cache: f64,
    /// (bytes, first quartile in nanoseconds) of the direct transfers, by size.
    pub p2p: Vec<(u64, f64)>,
    /// The same of the copies from the page cache.
    pub cache: Vec<(u64, f64)>,
}

/// Why samples make no model.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum FitError {
    /// Nothing to fit through.
    #[error(
        "{way}: {found} sizes with at least {FEWEST_TIMES} times each, {FEWEST_SIZES} are needed"
    )]
    FewSizes {
        /// Way whose samples do not fit: P2P or cache.
        way: &'static str,
        /// Sizes that can be used.
        found: usize,
    },
    /// Sizes too near one another to tell overhead from bandwidth.
    #[error("{way}: sizes from {smallest} to {largest} bytes, a factor of {LEAST_SPAN} is needed")]
    NarrowSizes {
        /// Way whose samples do not fit: P2P or cache.
        way: &'static str,
        /// Smallest size in bytes.
        smallest: u64,
        /// Largest size in bytes.
        largest: u64,
    },
    /// A time that is none.
    #[error("{way}: {nanoseconds} ns for {bytes} bytes is not a time")]
    Time {
        /// Way whose samples do not fit: P2P or cache.
        way: &'static str,
        /// Length of the sample in bytes.
        bytes: u64,
        /// Time of the sample in nanoseconds.
        nanoseconds: f64,
    },
    /// Large transfers are not slower than small ones.
    #[error("{way}: times do not grow with the size ({slope} ns a byte)")]
    NoBandwidth {
        /// Way whose samples do not fit: P2P or cache.
        way: &'static str,
        /// Fitted slope in nanoseconds per byte.
        slope: f64,
    },
    /// The times do not lie on the line.
    #[error("{way}: R^2 of {r2:.3} is below {LEAST_R2}")]
    Scattered {
        /// Way whose samples do not fit: P2P or cache.
        way: &'static str,
        /// Coefficient of determination.
        r2: f64,
    },
    /// The times lie on another line.
    #[error(
        "{way}: the fit misses the times by {:.0} % on average, more than {:.0} %",
        miss * 100.0,
        LARGEST_MISS * 100.0
    )]
    Misses {
        /// Way whose samples do not fit: P2P or cache.
        way: &'static str,
        /// Mean relative error of the fit.
        miss: f64,
    },
    /// The numbers are no model.
    #[error("The fit is no model")]
    Model(#[from] ModelError),
}

/// A line: `constant` up to `knee`, `slope` for each byte beyond it.
#[derive(Clone, Copy, Debug)]
struct Bent {
    knee: f64,
    constant: f64,
    slope: f64,
}

impl Fit {
    /// The same with the bytes per second of reads that read-ahead keeps filling.
    ///
    /// # Errors
    /// When `bandwidth` is not positive and finite.
    pub fn with_readahead(self, bandwidth: f64) -> Result<Self, ModelError> {
        let model = CostModel::new(Parameters {
            readahead_bandwidth: Some(bandwidth),
            ..self.model.parameters()
        })?;
        Ok(Self { model, ..self })
    }
}

impl Bent {
    fn at(&self, bytes: f64) -> f64 {
        self.constant + self.slope * (bytes - self.knee).max(0.0)
    }

    /// Least squares of the relative errors for a given knee, so that 4 KiB counts as much as 16
    /// MiB.
    fn through(points: &[(f64, f64)], knee: f64) -> Self {
        let (mut sw, mut sx, mut sy, mut sxx, mut sxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (bytes, time) in points {
            let weight = 1.0 / (time * time);
            let x = (bytes - knee).max(0.0);
            sw += weight;
            sx += weight * x;
            sy += weight * time;
            sxx += weight * x * x;
            sxy += weight * x * time;
        }
        let slope = (sw * sxy - sx * sy) / (sw * sxx - sx * sx);
        let constant = (sy - slope * sx) / sw;
        if constant >= 0.0 {
            return Self {
                knee,
                constant,
                slope,
            };
        }
        // Less than nothing is nothing.
        Self {
            knee,
            constant: 0.0,
            slope: sxy / sxx,
        }
    }

    /// Sum of the squared relative errors.
    fn error(&self, points: &[(f64, f64)]) -> f64 {
        let relative = |(bytes, time): &(f64, f64)| (self.at(*bytes) - time) / time;
        points.iter().map(|p| relative(p).powi(2)).sum()
    }
}

/// Fits equation 1 of SPIN to direct transfers and a straight line to copies from the page cache,
/// over the first quartile of each size. Refuses what is too little, too scattered or of another
/// shape.
pub fn fit(p2p: &[Sample], cache: &[Sample]) -> Result<Fit, FitError> {
    const P2P: &str = "P2P";
    const CACHE: &str = "Page cache";
    let (p2p, cache) = (quartiles(P2P, p2p)?, quartiles(CACHE, cache)?);
    let direct = bent(&points(&p2p));
    let copied = Bent::through(&points(&cache), 0.0);
    let r2_p2p = judge(P2P, &points(&p2p), &direct)?;
    let r2_cache = judge(CACHE, &points(&cache), &copied)?;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // A size among those given.
    let cutoff_bytes = direct.knee.round() as u64;
    let model = CostModel::new(Parameters {
        cutoff_bytes,
        p2p_overhead_ns: direct.constant,
        p2p_bandwidth: 1e9 / direct.slope,
        cache_overhead_ns: copied.constant,
        cache_bandwidth: 1e9 / copied.slope,
        readahead_bandwidth: None,
    })?;
    Ok(Fit {
        model,
        r2_p2p,
        r2_cache,
        p2p,
        cache,
    })
}

fn points(quartiles: &[(u64, f64)]) -> Vec<(f64, f64)> {
    quartiles.iter().map(|(b, t)| (float(*b), *t)).collect()
}

/// The time of each size that has enough, by size: the first quartile, as another load of the
/// machine only ever adds to a time.
fn quartiles(way: &'static str, samples: &[Sample]) -> Result<Vec<(u64, f64)>, FitError> {
    let mut sizes = BTreeMap::<u64, Vec<f64>>::new();
    for sample in samples {
        let nanoseconds = sample.nanoseconds;
        if !(nanoseconds.is_finite() && nanoseconds > 0.0) {
            return Err(FitError::Time {
                way,
                bytes: sample.bytes,
                nanoseconds,
            });
        }
        sizes.entry(sample.bytes).or_default().push(nanoseconds);
    }
    let mut quartiles = Vec::new();
    for (bytes, mut times) in sizes {
        if bytes == 0 || times.len() < FEWEST_TIMES {
            continue;
        }
        let index = times.len() / 4;
        let (_, time, _) = times.select_nth_unstable_by(index, f64::total_cmp);
        quartiles.push((bytes, *time));
    }
    match (quartiles.first(), quartiles.last()) {
        (Some((smallest, _)), Some((largest, _))) if quartiles.len() >= FEWEST_SIZES => {
            if largest / smallest < LEAST_SPAN {
                return Err(FitError::NarrowSizes {
                    way,
                    smallest: *smallest,
                    largest: *largest,
                });
            }
        }
        _ => {
            return Err(FitError::FewSizes {
                way,
                found: quartiles.len(),
            });
        }
    }
    Ok(quartiles)
}

/// The best line with one bend: every knee between the smallest size and the third largest is
/// tried, so that at least two points are on the slope.
fn bent(points: &[(f64, f64)]) -> Bent {
    let smallest = points.first().map_or(1.0, |p| p.0);
    let largest = points.iter().rev().nth(2).map_or(smallest, |p| p.0);
    // Without a bend: always a line that a device can have.
    let straight = Bent::through(points, 0.0);
    let (mut best, mut error) = (straight, straight.error(points) * (1.0 + 1e-9));
    let mut step = 0;
    loop {
        let knee = smallest * (f64::from(step) / f64::from(STEPS)).exp2();
        if knee > largest {
            return best;
        }
        step += 1;
        let line = Bent::through(points, knee);
        // A device is not faster below the cutoff than above it (see [`CostModel::new`]).
        let physical = line.slope * line.knee <= line.constant;
        if physical && line.error(points) < error {
            (best, error) = (line, line.error(points));
        }
    }
}

/// R^2 of a line that is good enough: of the logarithms of the times, as the line has the least
/// relative errors. Of the times themselves it would be decided by the largest sizes.
fn judge(way: &'static str, points: &[(f64, f64)], line: &Bent) -> Result<f64, FitError> {
    if !(line.slope.is_finite() && line.slope > 0.0) {
        return Err(FitError::NoBandwidth {
            way,
            slope: line.slope,
        });
    }
    let count = float(to_u64(points.len()));
    let mean = points.iter().map(|p| p.1.ln()).sum::<f64>() / count;
    let total = points
        .iter()
        .map(|p| (p.1.ln() - mean).powi(2))
        .sum::<f64>();
    let rest = points
        .iter()
        .map(|p| (p.1 / line.at(p.0)).ln().powi(2))
        .sum::<f64>();
    let r2 = 1.0 - rest / total;
    if r2.is_nan() || r2 < LEAST_R2 {
        return Err(FitError::Scattered { way, r2 });
    }
    let miss = points
        .iter()
        .map(|p| (line.at(p.0) / p.1 - 1.0).abs())
        .sum::<f64>()
        / count;
    if miss > LARGEST_MISS {
        return Err(FitError::Misses { way, miss });
    }
    Ok(r2)
}
