//! What a transfer costs.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Consecutive bytes of a request that are all in the page cache, or all not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Length in bytes.
    pub bytes: u64,
    /// They are in the page cache.
    pub cached: bool,
}

impl Run {
    /// Bytes in the page cache.
    pub const fn cached(bytes: u64) -> Self {
        Self {
            bytes,
            cached: true,
        }
    }

    /// Bytes that are only on the device.
    pub const fn absent(bytes: u64) -> Self {
        Self {
            bytes,
            cached: false,
        }
    }
}

/// How bytes travel between a file and device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Through the page cache.
    Cache,
    /// Through the page cache, where read-ahead had brought them or brought them now. No schedule
    /// has this way.
    ReadAhead,
    /// By direct I/O, between the device and the device memory. Neighbours that go this way are one
    /// transfer.
    P2p,
}

/// The numbers of a [`CostModel`], as they are measured and stored.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    /// S_cutoff: a shorter direct transfer takes as long as one of this many bytes.
    pub cutoff_bytes: u64,
    /// C_p2p: what a direct transfer takes up to S_cutoff, in nanoseconds.
    pub p2p_overhead_ns: f64,
    /// BW_p2p: bytes per second of a direct transfer beyond S_cutoff.
    pub p2p_bandwidth: f64,
    /// What a copy from the page cache takes apart from its bytes, in nanoseconds.
    pub cache_overhead_ns: f64,
    /// BW_pc: bytes per second from the page cache.
    pub cache_bandwidth: f64,
    /// Bytes per second of a sequence of reads through the page cache that the system's read-ahead
    /// keeps filling, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readahead_bandwidth: Option<f64>,
}

/// Numbers that are no model.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum ModelError {
    /// A bandwidth that is not a positive finite number.
    #[error("{name} of {value} bytes/s is not positive")]
    Bandwidth {
        /// Name of the parameter.
        name: &'static str,
        /// Value in bytes per second.
        value: f64,
    },
    /// A time that is negative or not finite.
    #[error("{name} of {value} ns is not a time")]
    Overhead {
        /// Name of the parameter.
        name: &'static str,
        /// Value in nanoseconds.
        value: f64,
    },
    /// Below the cutoff the device would be faster than its bandwidth, and many short transfers
    /// faster than a long one.
    #[error(
        "Cutoff of {cutoff_bytes} bytes in {p2p_overhead_ns} ns is faster than {p2p_bandwidth} \
         bytes/s"
    )]
    Cutoff {
        /// S_cutoff in bytes.
        cutoff_bytes: u64,
        /// C_p2p in nanoseconds.
        p2p_overhead_ns: f64,
        /// BW_p2p in bytes per second.
        p2p_bandwidth: f64,
    },
}

/// Times of transfers: equation 1 of SPIN, and beside its T_pc(s) = s / BW_pc what a call for
/// cached bytes costs, which user space cannot leave out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Parameters", into = "Parameters")]
pub struct CostModel {
    parameters: Parameters,
    pub(crate) cutoff: f64,
    pub(crate) p2p_overhead: f64,
    /// 1 / BW_p2p in nanoseconds per byte.
    pub(crate) p2p_byte: f64,
    pub(crate) cache_overhead: f64,
    /// 1 / BW_pc in nanoseconds per byte.
    pub(crate) cache_byte: f64,
    /// See [`CostModel::direct_from`].
    direct_from: Option<u64>,
}

/// A length in a formula.
pub(crate) fn float(bytes: u64) -> f64 {
    bytes as f64
}

impl CostModel {
    /// Checks the parameters.
    pub fn new(parameters: Parameters) -> Result<Self, ModelError> {
        let p = parameters;
        let bandwidths = [
            ("P2P bandwidth", Some(p.p2p_bandwidth)),
            ("Cache bandwidth", Some(p.cache_bandwidth)),
            ("Read-ahead bandwidth", p.readahead_bandwidth),
        ];
        for (name, value) in bandwidths.into_iter().filter_map(|(n, v)| Some((n, v?))) {
            if !(value.is_finite() && value >= 1.0) {
                return Err(ModelError::Bandwidth { name, value });
            }
        }
        for (name, value) in [
            ("P2P overhead", p.p2p_overhead_ns),
            ("Cache overhead", p.cache_overhead_ns),
        ] {
            if !(value.is_finite() && (0.0..1e15).contains(&value)) {
                return Err(ModelError::Overhead { name, value });
            }
        }
        // A part in a thousand for what rounding to bytes and to text loses.
        if float(p.cutoff_bytes) > p.p2p_overhead_ns * p.p2p_bandwidth / 1e9 * 1.001 + 1.0 {
            return Err(ModelError::Cutoff {
                cutoff_bytes: p.cutoff_bytes,
                p2p_overhead_ns: p.p2p_overhead_ns,
                p2p_bandwidth: p.p2p_bandwidth,
            });
        }
        Ok(Self {
            parameters,
            cutoff: float(p.cutoff_bytes),
            p2p_overhead: p.p2p_overhead_ns,
            p2p_byte: 1e9 / p.p2p_bandwidth,
            cache_overhead: p.cache_overhead_ns,
            cache_byte: 1e9 / p.cache_bandwidth,
            direct_from: p
                .readahead_bandwidth
                .map(|bandwidth| crossing(&p, bandwidth)),
        })
    }

    /// From how many bytes on a direct transfer is faster than one of a sequence that read-ahead
    /// keeps filling: where T_p2p(s) = T_call + s / BW_ra. The paper takes the system's read-ahead
    /// window (section 4.3.2), which says nothing of the device. `u64::MAX` if it never is; `None`
    /// if that was not measured.
    pub fn direct_from(&self) -> Option<u64> {
        self.direct_from
    }

    /// Parameters of the model.
    pub fn parameters(&self) -> Parameters {
        self.parameters
    }

    /// T_p2p: nanoseconds of one direct transfer (equation 1). No bytes, no transfer, no time.
    pub fn p2p_ns(&self, bytes: u64) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        self.p2p_overhead + (float(bytes) - self.cutoff).max(0.0) * self.p2p_byte
    }

    /// T_pc: nanoseconds of one copy from the page cache.
    pub fn cache_ns(&self, bytes: u64) -> f64 {
        if bytes == 0 {
            return 0.0;
        }
        self.cache_overhead + float(bytes) * self.cache_byte
    }

    /// Nanoseconds that `runs` take by `ways`: a copy for each run from the cache, a transfer for
    /// each stretch of neighbours that go by P2P. Runs without a way are not counted.
    pub fn cost_ns(&self, runs: &[Run], ways: &[Way]) -> f64 {
        let (mut total, mut open) = (0.0, 0_u64);
        for (run, way) in runs.iter().zip(ways) {
            match way {
                Way::P2p => open = open.saturating_add(run.bytes),
                Way::Cache | Way::ReadAhead => {
                    total += self.p2p_ns(open) + self.cache_ns(run.bytes);
                    open = 0;
                }
            }
        }
        total + self.p2p_ns(open)
    }
}

/// Where equation 1 falls below a line.
fn crossing(p: &Parameters, readahead_bandwidth: f64) -> u64 {
    let (direct, ahead) = (1e9 / p.p2p_bandwidth, 1e9 / readahead_bandwidth);
    let more = (p.p2p_overhead_ns - p.cache_overhead_ns).max(0.0);
    let cutoff = float(p.cutoff_bytes);
    let crossing = if more / ahead <= cutoff {
        more / ahead
    } else if ahead > direct {
        (more - cutoff * direct) / (ahead - direct)
    } else {
        f64::INFINITY
    };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not negative; saturates.
    let bytes = crossing.ceil() as u64;
    bytes
}

impl TryFrom<Parameters> for CostModel {
    type Error = ModelError;

    fn try_from(parameters: Parameters) -> Result<Self, ModelError> {
        Self::new(parameters)
    }
}

impl From<CostModel> for Parameters {
    fn from(model: CostModel) -> Self {
        model.parameters
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::plan::oracle::p3700;

    #[test]
    fn a_transfer_costs_what_equation_1_says() {
        let model = p3700();
        assert_eq!(model.p2p_ns(1), 584_000.0);
        assert_eq!(model.p2p_ns(512 << 10), 584_000.0);
        let megabyte = model.p2p_ns((512 << 10) + 2_650_000);
        assert!((megabyte - 1_584_000.0).abs() < 1e-3, "{megabyte}");
        assert!((model.cache_ns(10_130) - 1000.0).abs() < 1e-3);
    }

    #[test]
    fn numbers_that_are_no_model_are_refused() {
        let good = p3700().parameters();
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(
                CostModel::new(Parameters {
                    p2p_bandwidth: bad,
                    ..good
                })
                .is_err()
            );
            assert!(
                CostModel::new(Parameters {
                    cache_bandwidth: bad,
                    ..good
                })
                .is_err()
            );
        }
        for bad in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(
                CostModel::new(Parameters {
                    p2p_overhead_ns: bad,
                    ..good
                })
                .is_err()
            );
            assert!(
                CostModel::new(Parameters {
                    cache_overhead_ns: bad,
                    ..good
                })
                .is_err()
            );
        }
        assert!(
            CostModel::new(Parameters {
                cutoff_bytes: u64::MAX,
                ..good
            })
            .is_err()
        );
    }

    #[test]
    fn direct_transfers_of_a_sequence_begin_where_they_are_faster() {
        let with = |readahead_bandwidth, cutoff_bytes| {
            let parameters = Parameters {
                cutoff_bytes,
                readahead_bandwidth,
                ..p3700().parameters()
            };
            CostModel::new(parameters).unwrap()
        };
        assert_eq!(with(None, 0).direct_from(), None);
        // As fast as the device or faster: never.
        assert_eq!(with(Some(2.65e9), 0).direct_from(), Some(u64::MAX));
        assert_eq!(with(Some(9e9), 0).direct_from(), Some(u64::MAX));
        for bandwidth in [0.5e9, 1e9, 1.5e9, 2e9] {
            let model = with(Some(bandwidth), 512 << 10);
            let from = model.direct_from().unwrap();
            let ahead = |bytes: u64| float(bytes) / bandwidth * 1e9;
            assert!(model.p2p_ns(from) <= ahead(from), "{bandwidth}");
            assert!(model.p2p_ns(from - 4) > ahead(from - 4), "{bandwidth}");
        }
    }

    #[test]
    fn neighbours_by_p2p_are_one_transfer() {
        let model = p3700();
        let runs = [Run::absent(4096), Run::cached(4096), Run::absent(4096)];
        let merged = model.cost_ns(&runs, &[Way::P2p; 3]);
        let split = model.cost_ns(&runs, &[Way::P2p, Way::Cache, Way::P2p]);
        assert_eq!(merged, 584_000.0);
        assert_eq!(split, 2.0 * 584_000.0 + model.cache_ns(4096));
    }
}
