//! What schedules are held against, in the tests and in `cargo xtask bench gpu-ssd`: the exact
//! solution by dynamic programming, and random requests.

use super::model::{CostModel, Parameters, Run, Way};
use farlane_abi::width::{to_u64, to_usize};

/// Bytes of the paper's requests: 8 MB transfers (section 4.3.1, evaluation).
pub const REQUEST: u64 = 8 << 20;
const PAGE: u64 = 4096;

/// What SPIN found for an Intel P3700: S_cutoff 512 KB and C_p2p 584 us (section 4.3.1), 2.65 GB/s
/// by P2P and 10.13 GB/s from the page cache (table 3). Section 4.3.1 also has 584 us for 249
/// cached pages, which is 1.75 GB/s: then no cached byte of a request would be worth a copy.
pub fn p3700() -> CostModel {
    let parameters = Parameters {
        cutoff_bytes: 512 << 10,
        p2p_overhead_ns: 584_000.0,
        p2p_bandwidth: 2.65e9,
        cache_overhead_ns: 0.0,
        cache_bandwidth: 10.13e9,
        readahead_bandwidth: None,
    };
    match CostModel::new(parameters) {
        Ok(model) => model,
        Err(error) => unreachable!("{error}"),
    }
}

/// The least time of `runs`, in nanoseconds, and a schedule that takes it: every start of every
/// transfer is tried, in quadratic time.
pub fn exact(model: &CostModel, runs: &[Run]) -> (f64, Vec<Way>) {
    let mut least = vec![0.0_f64];
    let mut last = Vec::with_capacity(runs.len());
    for (index, run) in runs.iter().enumerate() {
        let mut best = f64::INFINITY;
        let mut how = (index, Way::P2p);
        if run.cached {
            best = least[index] + model.cache_ns(run.bytes);
            how = (index, Way::Cache);
        }
        let mut bytes = 0_u64;
        for start in (0..=index).rev() {
            bytes = bytes.saturating_add(runs[start].bytes);
            let time = least[start] + model.p2p_ns(bytes);
            if time < best {
                best = time;
                how = (start, Way::P2p);
            }
        }
        least.push(best);
        last.push(how);
    }
    let mut ways = vec![Way::P2p; runs.len()];
    let mut end = runs.len();
    while end > 0 {
        let (start, way) = last[end - 1];
        ways[start..end].fill(way);
        end = start;
    }
    (least[runs.len()], ways)
}

/// Random numbers that are the same in each run (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Next number of the sequence, of 64 bits.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.any() % bound.max(1)
    }

    /// Shuffles in place.
    pub fn shuffle<T>(&mut self, things: &mut [T]) {
        for last in (1..things.len()).rev() {
            let other = self.below(to_u64(last) + 1);
            things.swap(last, to_usize(other));
        }
    }

    /// From 0 to 1.
    pub fn unit(&mut self) -> f64 {
        (self.any() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A request of `bytes` with a random residency: the share that is cached and the mean length of
/// its runs are random too, the latter from `shortest` pages on and as likely within any factor.
pub fn request(random: &mut Random, bytes: u64, shortest: f64) -> Vec<Run> {
    let mut left = bytes / PAGE;
    let span = (left as f64 / shortest).max(1.0);
    let mean = shortest * span.powf(random.unit());
    let share = random.unit();
    let mut cached = random.unit() < share;
    let mut runs = Vec::new();
    while left > 0 {
        let mean = 2.0 * mean * if cached { share } else { 1.0 - share };
        // Exponential: residency without a memory.
        let length = -mean * (1.0 - random.unit()).ln();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        // Not negative; saturates.
        let pages = (length.ceil() as u64).clamp(1, left);
        runs.push(Run {
            bytes: pages * PAGE,
            cached,
        });
        left -= pages;
        cached = !cached;
    }
    runs
}
