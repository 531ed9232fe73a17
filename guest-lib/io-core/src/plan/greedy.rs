//! The heuristic of the paper, kept as what [`schedule`](super::schedule()) is measured against.

use super::model::{CostModel, Run, Way};

/// SPIN's greedy heuristic (section 4.3.1): for neighbours a, b, c with b cached, b goes by P2P if
/// |a| + |b| < S_cutoff, or if T_p2p(|a| + |b| + |c|) < T_p2p(|a|) + T_pc(|b|) + T_p2p(|c|). A
/// range that was merged is part of the next a.
///
/// Its view of one range is short: it merges a range because of the next one and never looks
/// whether a later cached range makes that worthless.
pub fn greedy(model: &CostModel, runs: &[Run]) -> Vec<Way> {
    let mut ways = Vec::with_capacity(runs.len());
    let wholly_cached = runs.iter().all(|run| run.cached);
    // |a|: the direct transfer that this run would prolong.
    let mut a = 0_u64;
    for (index, run) in runs.iter().enumerate() {
        let b = run.bytes;
        let c = runs.get(index + 1).map_or(0, |c| c.bytes);
        let below = (a.saturating_add(b)) < model.parameters().cutoff_bytes;
        let cheaper = model.p2p_ns(a.saturating_add(b).saturating_add(c))
            < model.p2p_ns(a) + model.cache_ns(b) + model.p2p_ns(c);
        if !run.cached || (!wholly_cached && (below || cheaper)) {
            a = a.saturating_add(b);
            ways.push(Way::P2p);
        } else {
            a = 0;
            ways.push(Way::Cache);
        }
    }
    ways
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::oracle::p3700;

    #[test]
    fn pages_in_turn_are_one_transfer_and_a_large_cached_range_is_not() {
        let model = p3700();
        // The 20 KiB of the paper, the second and the fourth page cached.
        let pages: Vec<_> = (0..5)
            .map(|i| Run {
                bytes: 4096,
                cached: i % 2 == 1,
            })
            .collect();
        assert_eq!(greedy(&model, &pages), [Way::P2p; 5]);
        let runs = [
            Run::absent(1 << 20),
            Run::cached(4 << 20),
            Run::absent(1 << 20),
        ];
        assert_eq!(greedy(&model, &runs), [Way::P2p, Way::Cache, Way::P2p]);
        assert_eq!(greedy(&model, &[Run::cached(4096)]), [Way::Cache]);
    }
}
