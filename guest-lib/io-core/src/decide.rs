//! P-router (spin-atc17, section 4.2): which way each part of a request goes, from what is known of
//! its file, its memory and the page cache.

use crate::config::Mode;
use crate::files::OpenFile;
use crate::plan::trace::{Piece, Way, Why};
use crate::plan::{CostModel, Run, schedule};
use crate::readahead;
use crate::region::{Buffer, Region};
use crate::residency::{self, Residency};
use crate::stream::{self, Pattern};
use crate::sys::{self, Direction};
use crate::tunnel::PinnedDevice;
use farlane_abi::width::to_usize;
use rustix::fs::OFlags;
use std::ops::Range;

/// What is decided about a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Its parts, in order; together they are the request.
    pub(crate) pieces: Vec<Piece>,
    /// How much of it was cached, where that was asked.
    pub(crate) cached: Option<u64>,
    /// Reason of the decision, for the trace.
    pub(crate) why: Why,
}

impl Plan {
    /// All of it one way.
    pub(crate) fn whole(way: Way, bytes: u64, why: Why) -> Self {
        Self {
            pieces: vec![Piece { way, bytes }],
            cached: None,
            why,
        }
    }

    /// The middle one way, what is misaligned before and after it through the page cache.
    pub(crate) fn around(
        request: &Range<u64>,
        body: &Range<u64>,
        middle: Vec<Piece>,
        why: Why,
    ) -> Self {
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
fn aligned(request: &Range<u64>, unit: u64) -> Option<Range<u64>> {
    let start = request.start.checked_next_multiple_of(unit)?;
    let end = request.end - request.end % unit;
    (start < end).then_some(start..end)
}

/// What is known of a read that P2P can serve.
#[derive(Debug)]
struct ReadRequest<'a> {
    /// The bytes of the file.
    request: Range<u64>,
    /// Of them, those that P2P can serve.
    body: Range<u64>,
    /// What it is to the file's sequences.
    pattern: Pattern,
    /// Which ways may be taken.
    mode: Mode,
    /// The system's read-ahead window in bytes.
    window: u64,
    /// What calibration has found.
    model: Option<&'a CostModel>,
}

impl ReadRequest<'_> {
    /// Decides about a read that is not short and sequential, from what `look` says of the body's
    /// residency.
    fn plan(&self, look: impl FnOnce(&Range<u64>) -> Residency) -> Plan {
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
            way,
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

/// How P2P reaches a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum P2pPath<'a> {
    Tunnel(&'a PinnedDevice),
    Direct,
}

/// How P2P reaches the buffer, and which part of the request it can serve.
pub(crate) fn reach<'a>(
    opened: &OpenFile,
    buffer: &Buffer<'a>,
    request: &Range<u64>,
    direction: Direction,
) -> Result<(P2pPath<'a>, Range<u64>), Why> {
    if opened.file.direct_fds.goes_plain() {
        return Err(Why::NoP2p);
    }
    let align = opened.file.offset_align.ok_or(Why::NoP2p)?;
    let unit = align.max(sys::page_bytes() as u64);
    let offset = request.start;
    let region = buffer.region;
    if let Some(pinned) = region
        .pinned
        .as_ref()
        .filter(|pinned| pinned.serves(opened, direction))
    {
        // What of the request lies in the part of the region that is pinned, and for a write in the
        // file as it is.
        let inside = pinned.part(buffer.address, buffer.length);
        let mut part = offset + inside.start as u64..request.end.min(offset + inside.end as u64);
        if direction == Direction::Write {
            part.end = part.end.min(opened.size);
        }
        if part.start < part.end {
            let body = aligned(&part, unit).ok_or(Why::Misaligned)?;
            return Ok((P2pPath::Tunnel(pinned), body));
        }
    }
    let is_off = opened.file.is_direct_off() || region.is_refused(opened.file.id.device);
    if !region.provider.is_direct() || is_off {
        return Err(Why::NoP2p);
    }
    let body = aligned(request, unit).ok_or(if request.end - offset < unit {
        Why::Small
    } else {
        Why::Misaligned
    })?;
    let first = buffer.address + to_usize(body.start - offset);
    if !first.is_multiple_of(opened.file.memory_align) {
        return Err(Why::Misaligned);
    }
    Ok((P2pPath::Direct, body))
}

pub(crate) fn plan_read(opened: &OpenFile, buffer: &Buffer<'_>, offset: u64, mode: Mode) -> Plan {
    let length = buffer.length as u64;
    let whole = |why| Plan::whole(Way::Cache, length, why);
    let end = opened.size.min(offset.saturating_add(length));
    if offset >= end {
        return whole(Why::Small);
    }
    // What is beyond the end goes the plain way, which finds out that there is nothing, or that
    // there is by now.
    let request = offset..offset.saturating_add(length);
    let inside = offset..end;
    if mode == Mode::Cache {
        return whole(Why::Forced);
    }
    let (pattern, ahead) = match mode {
        Mode::Auto => sequence(opened, buffer.region, &request),
        _ => (Pattern::Single, None),
    };
    if mode == Mode::Auto && pattern == Pattern::Single {
        stream::expect(opened.fd, request.end);
    }
    if let Some((way, why)) = ahead {
        return Plan::whole(way, length, why);
    }
    let is_direct = opened.flags.contains(OFlags::DIRECT);
    let body = match reach(opened, buffer, &inside, Direction::Read) {
        Ok((_, body)) => body,
        Err(why) => return whole(why),
    };
    // Of a descriptor for direct I/O the rest would be refused.
    if is_direct {
        return if body == request {
            Plan::whole(Way::P2p, length, Why::Forced)
        } else {
            whole(Why::Misaligned)
        };
    }
    let read = ReadRequest {
        request,
        body,
        pattern,
        mode,
        window: opened.file.disk.window_bytes(),
        model: model(opened, buffer.region),
    };
    read.plan(|body| look(opened, body))
}

fn model<'a>(opened: &'a OpenFile, region: &Region) -> Option<&'a CostModel> {
    let disk = &opened.file.disk;
    disk.model(opened.file.id, region.provider.name())
}

/// What a read is to the sequences of its file; and if it goes by read-ahead, how it counts, and
/// why.
pub(crate) fn sequence(
    opened: &OpenFile,
    region: &Region,
    request: &Range<u64>,
) -> (Pattern, Option<(Way, Why)>) {
    let (offset, length) = (request.start, request.end - request.start);
    let pattern = {
        let direct_from = model(opened, region).and_then(CostModel::direct_from);
        let mut reads = opened.file.stream.lock();
        if let Some(from) = stream::granted_from(opened.fd, offset) {
            reads.catch_up(from, offset);
        }
        reads.advice = stream::advice_of(opened.fd);
        let window = opened.file.disk.window_bytes();
        reads.observe(offset, length, window, direct_from)
    };
    if pattern != Pattern::Short || opened.flags.contains(OFlags::DIRECT) {
        return (pattern, None);
    }
    let ahead = readahead::prepare(opened, offset, length);
    let (way, why) = match ahead.cached {
        true => (Way::Cache, Why::Cached),
        false => (Way::ReadAhead, Why::Sequential),
    };
    stream::grant(opened.fd, request.end, ahead.until, way);
    (pattern, Some((way, why)))
}

/// Looks at ranges of any length.
fn look(opened: &OpenFile, body: &Range<u64>) -> Residency {
    let most = residency::MOST_PAGES as u64 * sys::page_bytes() as u64;
    if body.end - body.start <= most {
        return residency::look(opened, body.start, body.end - body.start);
    }
    let mut runs: Vec<Run> = Vec::new();
    let mut at = body.start;
    while at < body.end {
        let bytes = most.min(body.end - at);
        let found = match residency::look(opened, at, bytes) {
            Residency::All => vec![Run {
                bytes,
                cached: true,
            }],
            Residency::Nothing => vec![Run {
                bytes,
                cached: false,
            }],
            Residency::Some(runs) => runs,
            Residency::Unknown => return Residency::Unknown,
        };
        for run in found {
            match runs.last_mut() {
                Some(last) if last.cached == run.cached => last.bytes += run.bytes,
                _ => runs.push(run),
            }
        }
        at += bytes;
    }
    match runs.as_slice() {
        [one] if one.cached => Residency::All,
        [_] => Residency::Nothing,
        _ => Residency::Some(runs),
    }
}

pub(crate) fn plan_write(opened: &OpenFile, buffer: &Buffer<'_>, offset: u64, mode: Mode) -> Plan {
    let length = buffer.length as u64;
    let whole = |why| Plan::whole(Way::Cache, length, why);
    let Some(end) = offset.checked_add(length) else {
        return whole(Why::Misaligned);
    };
    if mode == Mode::Cache {
        return whole(Why::Forced);
    }
    let request = offset..end;
    let body = match reach(opened, buffer, &request, Direction::Write) {
        Ok((_, body)) => body,
        Err(why) => return whole(why),
    };
    if opened.flags.contains(OFlags::DIRECT) && body != request {
        return whole(Why::Misaligned);
    }
    let why = if mode == Mode::P2p {
        Why::Forced
    } else {
        Why::Write
    };
    let middle = Piece {
        way: Way::P2p,
        bytes: body.end - body.start,
    };
    Plan::around(&request, &body, vec![middle], why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(request: Range<u64>, mode: Mode) -> ReadRequest<'static> {
        let body = aligned(&request, 4096).unwrap();
        ReadRequest {
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
            let run = |cached: &bool| Run { bytes: 4096, cached: *cached };
            let runs = (0..count).zip(&pages).map(|(_, cached)| run(cached));
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
