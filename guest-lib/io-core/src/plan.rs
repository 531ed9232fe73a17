//! P-router (spin-atc17, section 4.2): which way each part of a request takes.

use crate::config::Mode;
use crate::readahead::Pattern;
use crate::residency::Residency;
use farlane_io_plan::trace::{Piece, Way, Why};
use farlane_io_plan::{CostModel, Run, Way as Choice, schedule};
use std::ops::Range;

/// What is decided about a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Its parts, in order; together they are the request.
    pub pieces: Vec<Piece>,
    /// How much of it was cached, where that was asked.
    pub cached: Option<u64>,
    /// Why.
    pub why: Why,
}

impl Plan {
    /// All of it one way.
    #[must_use]
    pub fn whole(way: Way, bytes: u64, why: Why) -> Self {
        Self {
            pieces: vec![Piece { way, bytes }],
            cached: None,
            why,
        }
    }

    /// The middle one way, what is misaligned before and after it through the page cache.
    #[must_use]
    pub fn around(request: &Range<u64>, body: &Range<u64>, middle: Vec<Piece>, why: Why) -> Self {
        let cache = |bytes| Piece {
            way: Way::Cache,
            bytes,
        };
        let mut pieces = vec![cache(body.start - request.start)];
        pieces.extend(middle);
        pieces.push(cache(request.end - body.end));
        Self {
            pieces: merged(pieces),
            cached: None,
            why,
        }
    }
}

/// Neighbours that go the same way are one transfer.
fn merged(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut merged: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces.into_iter().filter(|piece| piece.bytes > 0) {
        match merged.last_mut() {
            Some(last) if last.way == piece.way => last.bytes += piece.bytes,
            _ => merged.push(piece),
        }
    }
    merged
}

/// The largest part of `request` whose ends are multiples of `unit`.
#[must_use]
pub fn aligned(request: &Range<u64>, unit: u64) -> Option<Range<u64>> {
    let start = request.start.checked_next_multiple_of(unit)?;
    let end = request.end - request.end % unit;
    (start < end).then_some(start..end)
}

/// What is known of a read that P2P can serve.
#[derive(Debug)]
pub struct Read<'a> {
    /// The bytes of the file.
    pub request: Range<u64>,
    /// Of them, those that P2P can serve.
    pub body: Range<u64>,
    /// What it is to the file's sequences.
    pub pattern: Pattern,
    /// Which ways may be taken.
    pub mode: Mode,
    /// The system's read-ahead window in bytes.
    pub window: u64,
    /// What calibration has found.
    pub model: Option<&'a CostModel>,
}

impl Read<'_> {
    /// Decides about a read that is not short and sequential, from what `look` says of the body's
    /// residency.
    #[must_use]
    pub fn plan(&self, look: impl FnOnce(&Range<u64>) -> Residency) -> Plan {
        let bytes = self.body.end - self.body.start;
        let direct = |why| {
            let middle = vec![Piece {
                way: Way::P2p,
                bytes,
            }];
            Plan::around(&self.request, &self.body, middle, why)
        };
        if self.mode == Mode::P2p {
            return direct(Why::Forced);
        }
        let found = look(&self.body);
        let total = self.request.end - self.request.start;
        let cached = found.cached(bytes);
        let plan = match found {
            Residency::All => Plan::whole(Way::Cache, total, Why::Cached),
            Residency::Nothing if self.pattern == Pattern::Long => direct(Why::SequentialLarge),
            Residency::Nothing => direct(Why::Missed),
            // Nothing but the size tells what is faster.
            Residency::Unknown if bytes > self.window => direct(Why::Unknown),
            Residency::Unknown => Plan::whole(Way::Cache, total, Why::Unknown),
            Residency::Some(runs) => self.scheduled(&runs),
        };
        Plan { cached, ..plan }
    }

    fn scheduled(&self, runs: &[Run]) -> Plan {
        let ways = schedule(self.model, runs);
        let middle = runs.iter().zip(ways).map(|(run, way)| Piece {
            way: match way {
                Choice::Cache => Way::Cache,
                Choice::P2p => Way::P2p,
            },
            bytes: run.bytes,
        });
        let why = if self.model.is_some() {
            Why::Schedule
        } else {
            Why::NotCalibrated
        };
        Plan::around(&self.request, &self.body, middle.collect(), why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(request: Range<u64>, mode: Mode) -> Read<'static> {
        let body = aligned(&request, 4096).unwrap();
        Read {
            request,
            body,
            pattern: Pattern::Single,
            mode,
            window: 128 << 10,
            model: None,
        }
    }

    fn piece(way: Way, bytes: u64) -> Piece {
        Piece { way, bytes }
    }

    #[test]
    fn misaligned_ends_go_through_the_cache() {
        let plan = read(100..20_000, Mode::P2p).plan(|_| panic!("asked although forced"));
        let expected = [
            piece(Way::Cache, 3996),
            piece(Way::P2p, 12288),
            piece(Way::Cache, 3616),
        ];
        assert_eq!((plan.pieces, plan.why), (expected.to_vec(), Why::Forced));
        assert_eq!(aligned(&(1..4096), 4096), None);
        assert_eq!(aligned(&(u64::MAX - 5..u64::MAX), 4096), None);
    }

    #[test]
    fn what_is_cached_is_not_read_again_and_what_is_unknown_goes_by_size() {
        let plan = read(0..8192, Mode::Auto).plan(|_| Residency::All);
        assert_eq!(
            (plan.pieces, plan.cached),
            (vec![piece(Way::Cache, 8192)], Some(8192))
        );
        let plan = read(0..8192, Mode::Auto).plan(|_| Residency::Nothing);
        assert_eq!(
            (plan.pieces, plan.why),
            (vec![piece(Way::P2p, 8192)], Why::Missed)
        );
        let plan = read(0..8192, Mode::Auto).plan(|_| Residency::Unknown);
        assert_eq!(
            (plan.pieces, plan.cached),
            (vec![piece(Way::Cache, 8192)], None)
        );
        let plan = read(0..1 << 20, Mode::Auto).plan(|_| Residency::Unknown);
        assert_eq!(plan.pieces, [piece(Way::P2p, 1 << 20)]);
    }

    proptest! {
        #[test]
        fn pieces_are_the_request_and_only_whole_pages_go_by_p2p(
            start in 0_u64..100_000,
            length in 8192_u64..500_000,
            pages in prop::collection::vec(any::<bool>(), 200),
            mode in prop::sample::select(vec![Mode::Auto, Mode::P2p]),
        ) {
            let read = read(start..start + length, mode);
            let count = (read.body.end - read.body.start) / 4096;
            let runs = (0..count).zip(&pages).map(|(_, cached)| Run { bytes: 4096, cached: *cached });
            let plan = read.plan(|_| Residency::Some(runs.collect()));
            prop_assert_eq!(plan.pieces.iter().map(|piece| piece.bytes).sum::<u64>(), length);
            let mut at = start;
            for piece in &plan.pieces {
                prop_assert!(piece.bytes > 0);
                if piece.way == Way::P2p {
                    prop_assert!(at % 4096 == 0 && piece.bytes % 4096 == 0);
                }
                at += piece.bytes;
            }
        }
    }
}
