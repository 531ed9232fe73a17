//! P-readahead (spin-atc17, section 4.3.2): sequences of short reads go through the page cache,
//! where the system's read-ahead serves them, and what that leaves there is bounded.
//!
//! Before the system's read-ahead gets there, the pages ahead of a sequence are asked about: those
//! that are not cached will be because of us. They are the private set. When it grows beyond its
//! size, its oldest pages are dropped. What was cached before is others' and stays.

use crate::config;
use crate::file_id::FileId;
use crate::files::{File, OpenFile};
use crate::fork::ParentState;
use crate::lock::Lock;
use crate::residency::{self, Residency};
use crate::stream::Ahead;
use crate::sys;
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::RawFd;

/// Pages that are cached because of us.
#[derive(Clone, Debug)]
struct PrivateRange {
    file: FileId,
    fd: RawFd,
    range: Range<u64>,
    /// From here on they are, or were, cached because of us.
    origin: u64,
}

/// Most bytes that the page cache holds as one: of a part of that nothing is dropped.
const FOLIO: u64 = 2 << 20;

/// Pages that are cached because of us, the oldest first.
#[derive(Debug)]
pub(crate) struct PrivateSet {
    ranges: VecDeque<PrivateRange>,
    bytes: u64,
}

pub(crate) static SET: Lock<PrivateSet> = Lock::new(PrivateSet {
    ranges: VecDeque::new(),
    bytes: 0,
});

/// What is known before a short read of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lookahead {
    /// The pages were cached before the sequence came.
    pub(crate) cached: bool,
    /// Up to where further reads need not ask.
    pub(crate) until: u64,
}

/// Before a short read of a sequence at `offset` of `length`: asks about the pages ahead, where
/// that is due, and drops pages that have been read where there are too many.
pub(crate) fn prepare(opened: &OpenFile, offset: u64, length: u64) -> Lookahead {
    let end = offset.saturating_add(length);
    let page = sys::page_bytes() as u64;
    let last = opened.size.next_multiple_of(page);
    let (ahead, asked, cached, mut read) = {
        let mut stream = opened.file.stream.lock();
        let window = stream.window(opened.file.disk.window_bytes());
        let mut read: Vec<_> = stream.abandoned.drain(..).collect();
        let (mut asked, mut cached) = (0, false);
        let mut begin = offset;
        if let Some(tail) = stream.tail(end) {
            begin = tail.begin;
            (asked, cached) = (tail.asked, tail.cached || tail.asked == 0);
            read.extend(tail.read_up_to(offset / page * page));
        }
        (Ahead { begin, window }, asked, cached, read)
    };
    let credit = |asked: u64| {
        let known = if asked >= last {
            last
        } else {
            ahead.within(asked)
        };
        known.min(end.saturating_add(config::private_bytes() / 2))
    };
    let due = asked < end.saturating_add(ahead.of(end)).min(last);
    let from = asked.max(offset / page * page);
    let most = residency::MOST_PAGES as u64 * page;
    let until = end.saturating_add(2 * ahead.of(end)).next_multiple_of(page);
    let until = until.min(last).min(from.saturating_add(most));
    if !due || until <= from {
        keep(opened, &mut read);
        return Lookahead {
            cached: cached && asked > 0,
            until: credit(asked),
        };
    }
    let found = residency::look(opened, from, until - from);
    let missing = missing(&found, from, until);
    let cached = cached && found == Residency::All;
    {
        let mut stream = opened.file.stream.lock();
        match stream.tail(end) {
            Some(tail) => {
                tail.asked = until;
                tail.cached = cached;
                tail.pending.extend(missing);
            }
            // Another thread's reads have pushed it out.
            None => read.extend(missing),
        }
    }
    keep(opened, &mut read);
    Lookahead {
        cached,
        until: credit(until),
    }
}

/// The parts of `from..until` that were not cached.
fn missing(found: &Residency, from: u64, until: u64) -> Vec<Range<u64>> {
    match found {
        Residency::Nothing => std::iter::once(from..until).collect(),
        Residency::All | Residency::Unknown => Vec::new(),
        Residency::Some(runs) => {
            let ends = runs.iter().scan(from, |at, run| {
                *at += run.bytes;
                Some((*at - run.bytes..*at, run.cached))
            });
            ends.filter(|(_, cached)| !cached)
                .map(|(range, _)| range)
                .collect()
        }
    }
}

/// Adds what has been read to the private set, and drops its oldest pages where it is too large.
fn keep(opened: &OpenFile, ranges: &mut Vec<Range<u64>>) {
    if ranges.is_empty() {
        return;
    }
    let limit = config::private_bytes();
    let mut oldest = Vec::new();
    {
        let mut set = SET.lock();
        for range in ranges.drain(..) {
            set.append(opened.file.id, opened.fd, range);
        }
        oldest.extend(set.shrink(limit));
    }
    for private in oldest {
        private.evict();
    }
}

impl ParentState for PrivateSet {
    /// The pages are the parent's.
    fn forget(&mut self) {
        self.ranges.clear();
        self.bytes = 0;
    }
}

impl PrivateSet {
    fn append(&mut self, file: FileId, fd: RawFd, range: Range<u64>) {
        self.bytes += range.end - range.start;
        let follows = |last: &&mut PrivateRange| {
            (last.file, last.fd, last.range.end) == (file, fd, range.start)
        };
        match self.ranges.back_mut().filter(follows) {
            Some(last) => last.range.end = range.end,
            None => self.ranges.push_back(PrivateRange {
                file,
                fd,
                origin: range.start,
                range,
            }),
        }
    }

    /// Takes the oldest ranges out until no more than `limit` bytes are left.
    fn shrink(&mut self, limit: u64) -> Vec<PrivateRange> {
        let mut oldest = Vec::new();
        while self.bytes > limit {
            let Some(mut first) = self.ranges.pop_front() else {
                self.bytes = 0;
                break;
            };
            let excess = self.bytes - limit;
            if first.range.end - first.range.start > excess {
                let cut = first.range.start + excess;
                let rest = cut..first.range.end;
                self.ranges.push_front(PrivateRange {
                    range: rest,
                    ..first.clone()
                });
                first.range.end = cut;
            }
            self.bytes -= first.range.end - first.range.start;
            oldest.push(first);
        }
        oldest
    }
}

impl PrivateRange {
    /// Drops the pages, if the descriptor is still that file's.
    fn evict(&self) {
        if FileId::of_fd(self.fd) == Some(self.file) {
            let Range { start, end } = self.range;
            // What reached into this range from before it was left there.
            let start = self.origin.max(start.saturating_sub(FOLIO));
            let _ = sys::advise(self.fd, start, end - start, libc::POSIX_FADV_DONTNEED);
        }
    }
}

/// The file is about to be closed: what is cached because of us is dropped while there is a
/// descriptor.
pub(crate) fn drop_file(file: &File, fd: RawFd) {
    let mut gone = file.stream.lock().take_pending();
    {
        let mut set = SET.lock();
        let ranges = std::mem::take(&mut set.ranges);
        let (theirs, rest): (Vec<_>, _) = ranges
            .into_iter()
            .partition(|private| private.file == file.id);
        set.ranges = VecDeque::from(rest);
        let left = set.ranges.iter();
        set.bytes = left
            .map(|private| private.range.end - private.range.start)
            .sum();
        gone.extend(theirs.into_iter().map(|private| private.range));
    }
    for range in gone {
        let file = file.id;
        PrivateRange {
            file,
            fd,
            origin: range.start,
            range,
        }
        .evict();
    }
}

/// Bytes of the private set, for reports.
#[must_use]
pub fn private_bytes() -> u64 {
    SET.lock().bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_pages_go_first_and_no_more_than_needed() {
        let file = FileId {
            device: 1,
            inode: 2,
        };
        let private = |range: Range<u64>| PrivateRange {
            file,
            fd: -1,
            origin: range.start,
            range,
        };
        let mut set = PrivateSet {
            ranges: [private(0..100), private(200..300)].into(),
            bytes: 200,
        };
        assert!(set.shrink(200).is_empty());
        let ranges =
            |gone: Vec<PrivateRange>| -> Vec<_> { gone.into_iter().map(|it| it.range).collect() };
        assert_eq!(ranges(set.shrink(90)), [0..100, 200..210]);
        assert_eq!(set.shrink(20).len(), 1);
        assert_eq!(set.bytes, 20);
    }
}
