//! The schedule of a request.

use super::model::{CostModel, Run, Way, float};

/// The ways of `runs` that take the least time together under `model`: one a run, and P2P for every
/// run that is not cached. See [`Scheduler::schedule`].
pub fn schedule(model: Option<&CostModel>, runs: &[Run]) -> Vec<Way> {
    let mut scheduler = Scheduler::default();
    scheduler.schedule(model, runs);
    scheduler.ways
}

/// Makes schedules one after the other without allocating for each.
#[derive(Debug, Default)]
pub struct Scheduler {
    /// Bytes before each boundary between runs.
    before: Vec<f64>,
    /// Least time for what lies before each boundary.
    least: Vec<f64>,
    /// How that time is reached: the boundary where the last transfer begins, and its way.
    last: Vec<(usize, Way)>,
    ways: Vec<Way>,
}

/// The transfers that end at a boundary and begin where it costs least.
struct Starts {
    /// The first boundary from which a transfer to the current one is not longer than S_cutoff.
    near: usize,
    /// Of those before it, the best start: its least time less what its bytes would cost.
    far: Option<(f64, usize)>,
}

impl Scheduler {
    /// With room for requests of `runs` runs: up to so many, [`Self::schedule`] does not allocate.
    pub fn with_capacity(runs: usize) -> Self {
        Self {
            before: Vec::with_capacity(runs + 1),
            least: Vec::with_capacity(runs + 1),
            last: Vec::with_capacity(runs),
            ways: Vec::with_capacity(runs),
        }
    }

    /// The schedule of least time under `model`, exactly, in linear time.
    ///
    /// SPIN calls the exact solution too slow and takes a greedy one ([`greedy`](super::greedy())),
    /// which is close on average but loses an eighth on single requests. The shape of equation 1
    /// allows a linear pass: let L(i) be the least time for the runs before boundary i, B(i) their
    /// bytes.
    /// The last transfer before i is a copy of run i - 1, or a direct transfer from some boundary
    /// j: L(i) = min over j of L(j) + C_p2p + max(0, B(i) - B(j) - S_cutoff) / BW_p2p.
    /// * Where B(i) - B(j) <= S_cutoff the best j is the first such: L does not fall with i, as a
    ///   schedule cut short costs no more.
    /// * Elsewhere it is the j with the least L(j) - B(j) / BW_p2p, for every later i the same or
    ///   one that has left the first kind since.
    ///
    /// Cutting a direct transfer in two never pays, as a model's C_p2p is at least S_cutoff /
    /// BW_p2p.
    ///
    /// Without a model, a request that is wholly cached is copied and any other is one direct
    /// transfer: nothing is assumed of the device, and nothing is slower than P2P alone.
    pub fn schedule(&mut self, model: Option<&CostModel>, runs: &[Run]) -> &[Way] {
        self.ways.clear();
        let cached = runs.iter().filter(|run| run.cached).count();
        match model {
            Some(model) if cached > 0 => self.solve(model, runs),
            None if cached == runs.len() => self.ways.resize(cached, Way::Cache),
            _ => self.ways.resize(runs.len(), Way::P2p),
        }
        &self.ways
    }

    fn solve(&mut self, model: &CostModel, runs: &[Run]) {
        self.before.clear();
        self.least.clear();
        self.last.clear();
        self.before.push(0.0);
        self.least.push(0.0);
        let mut starts = Starts { near: 0, far: None };
        let (mut bytes, mut least) = (0.0, 0.0);
        for (index, run) in runs.iter().enumerate() {
            let length = float(run.bytes);
            bytes += length;
            let (direct, start) = self.direct(model, bytes, &mut starts);
            let copied = least + model.cache_overhead + length * model.cache_byte;
            let (time, last) = if run.cached && copied <= direct {
                (copied, (index, Way::Cache))
            } else {
                (direct, (start, Way::P2p))
            };
            least = time;
            self.before.push(bytes);
            self.least.push(time);
            self.last.push(last);
        }
        self.ways.resize(runs.len(), Way::P2p);
        let mut end = runs.len();
        while let Some((start, way)) = end.checked_sub(1).and_then(|run| self.last.get(run)) {
            if let Some(ways) = self.ways.get_mut(*start..end) {
                ways.fill(*way);
            }
            end = *start;
        }
    }

    /// The least time before a boundary with `bytes` before it when the last transfer is direct,
    /// and where that begins.
    fn direct(&self, model: &CostModel, bytes: f64, starts: &mut Starts) -> (f64, usize) {
        let mut near = None;
        for (before, least) in self
            .before
            .iter()
            .zip(&self.least)
            .skip(starts.near)
            .map(|(before, least)| (*before, *least))
        {
            if bytes - before <= model.cutoff {
                near = Some((least + model.p2p_overhead, starts.near));
                break;
            }
            let time = least - before * model.p2p_byte;
            if starts.far.is_none_or(|(best, _)| time < best) {
                starts.far = Some((time, starts.near));
            }
            starts.near += 1;
        }
        let far = starts.far.map(|(time, start)| {
            let rest = (bytes - model.cutoff) * model.p2p_byte;
            (time + rest + model.p2p_overhead, start)
        });
        match (near, far) {
            (Some(near), Some(far)) if far.0 < near.0 => far,
            (Some(near), _) => near,
            (None, Some(far)) => far,
            // There is always a boundary before this one.
            (None, None) => (f64::INFINITY, 0),
        }
    }
}
