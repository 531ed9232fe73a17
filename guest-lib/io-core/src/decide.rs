//! Which way a request goes, from what is known of its file, its memory and the page cache.

use crate::config::Mode;
use crate::files::Opened;
use crate::plan::{self, Plan, Read};
use crate::readahead::{self, Pattern};
use crate::region::Region;
use crate::residency::{self, Residency};
use crate::route::{Buffer, Direction};
use crate::sys;
use crate::tunnel::PinnedDevice;
use farlane_io_plan::trace::{Piece, Way, Why};
use farlane_io_plan::{CostModel, Run};
use rustix::fs::OFlags;
use std::ops::Range;

/// How P2P reaches a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reach<'a> {
    Tunnel(&'a PinnedDevice),
    Direct,
}

/// How P2P reaches the buffer, and which part of the request it can serve.
pub(crate) fn reach<'a>(
    opened: &Opened,
    buffer: &Buffer<'a>,
    request: &Range<u64>,
    direction: Direction,
) -> Result<(Reach<'a>, Range<u64>), Why> {
    if opened.file.goes_plain() {
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
            let body = plan::aligned(&part, unit).ok_or(Why::Misaligned)?;
            return Ok((Reach::Tunnel(pinned), body));
        }
    }
    let is_off = opened.file.is_direct_off() || region.is_refused(opened.file.id.device);
    if !region.provider.is_direct() || is_off {
        return Err(Why::NoP2p);
    }
    let body = plan::aligned(request, unit).ok_or(if request.end - offset < unit {
        Why::Small
    } else {
        Why::Misaligned
    })?;
    let first = buffer.address + sys::to_usize(body.start - offset);
    if !first.is_multiple_of(opened.file.memory_align) {
        return Err(Why::Misaligned);
    }
    Ok((Reach::Direct, body))
}

pub(crate) fn plan_read(opened: &Opened, buffer: &Buffer<'_>, offset: u64, mode: Mode) -> Plan {
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
        readahead::expect(opened.fd, request.end);
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
    let read = Read {
        request,
        body,
        pattern,
        mode,
        window: opened.file.disk.window_bytes(),
        model: model(opened, buffer.region),
    };
    read.plan(|body| look(opened, body))
}

fn model<'a>(opened: &'a Opened, region: &Region) -> Option<&'a CostModel> {
    let disk = &opened.file.disk;
    disk.model(opened.file.id, region.provider.name())
}

/// What a read is to the sequences of its file; and if it goes by read-ahead, how it counts, and
/// why.
pub(crate) fn sequence(
    opened: &Opened,
    region: &Region,
    request: &Range<u64>,
) -> (Pattern, Option<(Way, Why)>) {
    let (offset, length) = (request.start, request.end - request.start);
    let pattern = {
        let direct_from = model(opened, region).and_then(CostModel::direct_from);
        let mut stream = opened.file.stream.lock();
        if let Some(from) = readahead::granted_from(opened.fd, offset) {
            stream.catch_up(from, offset);
        }
        stream.advice = readahead::advice_of(opened.fd);
        let window = opened.file.disk.window_bytes();
        stream.observe(offset, length, window, direct_from)
    };
    if pattern != Pattern::Short || opened.flags.contains(OFlags::DIRECT) {
        return (pattern, None);
    }
    let ahead = readahead::prepare(opened, offset, length);
    let (way, why) = match ahead.cached {
        true => (Way::Cache, Why::Cached),
        false => (Way::ReadAhead, Why::Sequential),
    };
    readahead::grant(opened.fd, request.end, ahead.until, way);
    (pattern, Some((way, why)))
}

/// Looks at ranges of any length.
fn look(opened: &Opened, body: &Range<u64>) -> Residency {
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

pub(crate) fn plan_write(opened: &Opened, buffer: &Buffer<'_>, offset: u64, mode: Mode) -> Plan {
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
