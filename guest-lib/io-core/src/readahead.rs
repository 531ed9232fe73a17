//! P-readahead (spin-atc17, section 4.3.2): sequences of short reads go through the page cache,
//! where the system's read-ahead serves them, and what that leaves there is bounded.
//!
//! Before the system's read-ahead gets there, the pages ahead of a sequence are asked about: those
//! that are not cached will be because of us. They are the private set. When it grows beyond its
//! size, its oldest pages are dropped. What was cached before is others' and stays.

use crate::config;
use crate::files::{File, FileId, Opened};
use crate::lock::Lock;
use crate::plan::trace::Way;
use crate::residency::{self, Residency};
use crate::sys;
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// Sequences of one file that are followed at a time.
const TAILS: usize = 8;
/// How far the system's read-ahead can be ahead of a sequence that has just begun, and by how many
/// times what the sequence has read, as its window grows; when it has grown it is ahead by two
/// windows.
const FIRST_AHEAD: u64 = 512 << 10;
const GROWTH: u64 = 16;

/// What the program has said with `posix_fadvise`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Advice {
    /// Nothing.
    #[default]
    Normal,
    /// Reads come in order: the window is twice as long.
    Sequential,
    /// They do not: there is no read-ahead.
    Random,
}

/// A sequence of reads.
#[derive(Clone, Debug, Default)]
struct Tail {
    /// Where it began.
    begin: u64,
    /// Where it goes on.
    next: u64,
    /// Up to where pages have been asked about.
    asked: u64,
    /// Whether all of them were cached.
    cached: bool,
    /// Of them, those that were not cached and have not been read yet.
    pending: VecDeque<Range<u64>>,
    /// Its last read, as [`Stream::reads`] counts them.
    last: u64,
}

/// The pattern of reads of one file.
#[derive(Debug, Default)]
pub struct Stream {
    /// What the program has said.
    pub advice: Advice,
    tails: [Tail; TAILS],
    /// Reads that were noted.
    reads: u64,
    /// Pages that sequences which are followed no more would have read.
    abandoned: Vec<Range<u64>>,
}

/// What a read is to a file's sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// It stands by itself.
    Single,
    /// It continues a sequence, and is short enough for read-ahead.
    Short,
    /// It continues a sequence, and is longer.
    Long,
}

impl Stream {
    /// Notes a read of `length` bytes at `offset`. The system's window is `window` bytes; from
    /// `direct_from` bytes on P2P is known to be faster than read-ahead, whatever the window.
    pub fn observe(
        &mut self,
        offset: u64,
        length: u64,
        window: u64,
        direct_from: Option<u64>,
    ) -> Pattern {
        let end = offset.saturating_add(length);
        let window = self.window(window);
        let longest = direct_from.map_or(window, |from| window.min(from.saturating_sub(1)));
        self.reads += 1;
        let last = self.reads;
        if let Some(tail) = self.tail(offset) {
            (tail.next, tail.last) = (end, last);
            return match longest {
                _ if window == 0 => Pattern::Single,
                longest if length <= longest => Pattern::Short,
                _ => Pattern::Long,
            };
        }
        if let Some(tail) = self.tails.iter_mut().min_by_key(|tail| tail.last) {
            // Nobody follows its pages any more: they count as read.
            let pending = std::mem::take(&mut tail.pending);
            *tail = Tail {
                begin: offset,
                next: end,
                last,
                ..Tail::default()
            };
            self.abandoned.extend(pending);
        }
        Pattern::Single
    }

    /// The sequence that ended at `from` has gone on to `offset` without being observed.
    pub fn catch_up(&mut self, from: u64, offset: u64) {
        if let Some(tail) = self.tail(from) {
            tail.next = offset;
        }
    }

    /// The window in bytes; zero when there is to be no read-ahead.
    fn window(&self, system: u64) -> u64 {
        match self.advice {
            Advice::Normal => system,
            Advice::Sequential => system.saturating_mul(2),
            Advice::Random => 0,
        }
    }

    fn tail(&mut self, next: u64) -> Option<&mut Tail> {
        self.tails.iter_mut().find(|tail| tail.next == next)
    }
}

/// How far the system may be ahead of a sequence.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    /// Where the sequence began.
    begin: u64,
    /// The window in bytes.
    window: u64,
}

impl Ahead {
    /// In bytes, when the sequence has read up to `next`.
    fn of(self, next: u64) -> u64 {
        let read = next.saturating_sub(self.begin);
        let grown = read.saturating_mul(GROWTH).saturating_add(FIRST_AHEAD);
        grown.min(self.window.saturating_mul(2))
    }

    /// Up to where the sequence may read before the system is beyond `asked`.
    fn within(self, asked: u64) -> u64 {
        let span = asked.saturating_sub(self.begin);
        let growing = span.saturating_sub(FIRST_AHEAD) / (GROWTH + 1);
        let grown = span.saturating_sub(self.window.saturating_mul(2));
        self.begin + growing.max(grown)
    }
}

impl Tail {
    /// Takes what has been read, up to `offset`, out of what has not.
    fn read_up_to(&mut self, offset: u64) -> Vec<Range<u64>> {
        let mut read = Vec::new();
        while let Some(first) = self.pending.front_mut() {
            if first.start >= offset {
                break;
            }
            let end = first.end.min(offset);
            read.push(first.start..end);
            first.start = end;
            if first.start < first.end {
                break;
            }
            self.pending.pop_front();
        }
        read
    }
}

/// Pages that are cached because of us.
#[derive(Clone, Debug)]
struct Private {
    file: FileId,
    fd: RawFd,
    range: Range<u64>,
    /// From here on they are, or were, cached because of us.
    origin: u64,
}

/// Most bytes that the page cache holds as one: of a part of that nothing is dropped.
const FOLIO: u64 = 2 << 20;

#[derive(Debug)]
struct Set {
    ranges: VecDeque<Private>,
    bytes: u64,
}

static SET: Lock<Set> = Lock::new(Set {
    ranges: VecDeque::new(),
    bytes: 0,
});

/// What is known before a short read of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// The pages were cached before the sequence came.
    pub cached: bool,
    /// Up to where further reads need not ask.
    pub until: u64,
}

/// Before a short read of a sequence at `offset` of `length`: asks about the pages ahead, where
/// that is due, and drops pages that have been read where there are too many.
pub fn prepare(opened: &Opened, offset: u64, length: u64) -> Prepared {
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
        return Prepared {
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
    Prepared {
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
fn keep(opened: &Opened, ranges: &mut Vec<Range<u64>>) {
    if ranges.is_empty() {
        return;
    }
    let limit = config::private_bytes();
    let mut oldest = Vec::new();
    {
        let mut set = SET.lock();
        for range in ranges.drain(..) {
            set.bytes += range.end - range.start;
            let (file, fd) = (opened.file.id, opened.fd);
            let follows = |last: &&mut Private| {
                (last.file, last.fd, last.range.end) == (file, fd, range.start)
            };
            match set.ranges.back_mut().filter(follows) {
                Some(last) => last.range.end = range.end,
                None => set.ranges.push_back(Private {
                    file,
                    fd,
                    origin: range.start,
                    range,
                }),
            }
        }
        oldest.extend(set.shrink(limit));
    }
    for private in oldest {
        private.evict();
    }
}

impl Set {
    /// Takes the oldest ranges out until no more than `limit` bytes are left.
    fn shrink(&mut self, limit: u64) -> Vec<Private> {
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
                self.ranges.push_front(Private {
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

impl Private {
    /// Drops the pages, if the descriptor is still that file's.
    fn evict(&self) {
        // SAFETY: a number that may be another file's by now, which is what is asked here.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd.max(0)) };
        let same = rustix::fs::fstat(fd)
            .is_ok_and(|stat| stat.st_dev == self.file.device && stat.st_ino == self.file.inode);
        if same {
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
    let mut gone: Vec<Range<u64>> = {
        let mut stream = file.stream.lock();
        let pending = stream
            .tails
            .iter_mut()
            .flat_map(|tail| tail.pending.drain(..));
        let mut gone: Vec<_> = pending.collect();
        gone.append(&mut stream.abandoned);
        gone
    };
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
        Private {
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

/// Before a fork.
pub(crate) fn hold() {
    SET.take();
}

/// After a fork.
///
/// # Safety
/// This thread has called [`hold`].
pub(crate) unsafe fn release() {
    // SAFETY: as promised by the caller.
    unsafe { SET.give() };
}

/// In a child: the pages are the parent's.
///
/// # Safety
/// As [`release`].
pub(crate) unsafe fn forget() {
    // SAFETY: the lock is held, says the caller.
    let set = unsafe { SET.held() };
    set.ranges.clear();
    set.bytes = 0;
}

/// How far reads of one descriptor may go by the plain call without another look.
#[derive(Debug)]
struct Credit {
    /// Where it was granted: what the sequence still takes for its end.
    from: AtomicU64,
    next: AtomicU64,
    until: AtomicU64,
    cached: AtomicBool,
}

/// Descriptors with credit: those above have to be looked at each time.
const CREDITS: usize = 1024;

static CREDIT: [Credit; CREDITS] = [const {
    Credit {
        from: AtomicU64::new(0),
        next: AtomicU64::new(0),
        until: AtomicU64::new(0),
        cached: AtomicBool::new(false),
    }
}; CREDITS];

fn credit_of(fd: RawFd) -> Option<&'static Credit> {
    CREDIT.get(usize::try_from(fd).ok()?)
}

/// Lets reads of `fd` go on from `next` up to `until` by the plain call; `way` is what they count
/// as.
pub(crate) fn grant(fd: RawFd, next: u64, until: u64, way: Way) {
    if let Some(credit) = credit_of(fd) {
        credit.from.store(next, Ordering::Relaxed);
        credit.next.store(next, Ordering::Relaxed);
        credit.until.store(until.max(next), Ordering::Relaxed);
        credit.cached.store(way == Way::Cache, Ordering::Relaxed);
    }
}

/// If a read of `length` bytes is in the credit of `fd`, takes it from there and says what it
/// counts as. A wrong answer, for a descriptor that has become another file's, costs time and
/// nothing else. Without an offset it is the file position, wherever that is.
#[inline]
pub(crate) fn spend(fd: RawFd, offset: Option<u64>, length: u64) -> Option<Way> {
    let credit = credit_of(fd)?;
    let next = credit.next.load(Ordering::Relaxed);
    let end = next.saturating_add(length);
    if offset.is_some_and(|offset| offset != next) || end > credit.until.load(Ordering::Relaxed) {
        return None;
    }
    credit.next.store(end, Ordering::Relaxed);
    Some(match credit.cached.load(Ordering::Relaxed) {
        true => Way::Cache,
        false => Way::ReadAhead,
    })
}

/// Whether a read at `offset` continues nothing that is followed on `fd`.
pub(crate) fn stands_alone(fd: RawFd, offset: u64) -> bool {
    credit_of(fd).is_some_and(|credit| {
        let next = credit.next.load(Ordering::Relaxed);
        next >= credit.until.load(Ordering::Relaxed) && next != offset
    })
}

/// A read that stands alone has ended at `next`: one that begins there would continue it. Credit
/// that is left stays.
pub(crate) fn expect(fd: RawFd, next: u64) {
    let idle = credit_of(fd).filter(|credit| {
        credit.next.load(Ordering::Relaxed) >= credit.until.load(Ordering::Relaxed)
    });
    if idle.is_some() {
        grant(fd, next, next, Way::Cache);
    }
}

/// If reads up to `offset` were in the credit of `fd`: where it was granted.
pub(crate) fn granted_from(fd: RawFd, offset: u64) -> Option<u64> {
    let credit = credit_of(fd)?;
    let from = credit.from.load(Ordering::Relaxed);
    let spent = credit.next.load(Ordering::Relaxed) == offset && from < offset;
    spent.then_some(from)
}

/// What the program has said of each descriptor, as [`Advice::code`].
static ADVICE: [AtomicU8; CREDITS] = [const { AtomicU8::new(0) }; CREDITS];

impl Advice {
    fn code(self) -> u8 {
        match self {
            Self::Normal => 0,
            Self::Sequential => 1,
            Self::Random => 2,
        }
    }
}

/// Is told what the program says of how it will read a descriptor. Nothing is looked at: many
/// programs say so of every file.
pub fn advise(fd: RawFd, advice: Advice) {
    let word = usize::try_from(fd).ok().and_then(|fd| ADVICE.get(fd));
    if let Some(word) = word {
        word.store(advice.code(), Ordering::Relaxed);
        revoke(fd);
    }
}

/// What it has said.
pub(crate) fn advice_of(fd: RawFd) -> Advice {
    let word = usize::try_from(fd).ok().and_then(|fd| ADVICE.get(fd));
    let code = word.map_or(0, |word| word.load(Ordering::Relaxed));
    [Advice::Sequential, Advice::Random]
        .into_iter()
        .find(|advice| advice.code() == code)
        .unwrap_or_default()
}

/// Takes the credit of a descriptor away.
pub(crate) fn revoke(fd: RawFd) {
    grant(fd, 0, 0, Way::Cache);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_told_from_single_reads_side_by_side() {
        let mut stream = Stream::default();
        assert_eq!(stream.observe(0, 100, 1000, None), Pattern::Short);
        assert_eq!(stream.observe(5000, 100, 1000, None), Pattern::Single);
        assert_eq!(stream.observe(100, 100, 1000, None), Pattern::Short);
        assert_eq!(stream.observe(5100, 1001, 1000, None), Pattern::Long);
        assert_eq!(stream.observe(7000, 10, 1000, None), Pattern::Single);
    }

    #[test]
    fn a_sequence_that_goes_on_by_credit_stays_the_same_one() {
        const FD: RawFd = 1000;
        let mut stream = Stream::default();
        stream.observe(0, 100, 1000, None);
        stream.observe(100, 100, 1000, None);
        let ahead = 500..4000;
        stream.tail(200).unwrap().pending.push_back(ahead.clone());
        grant(FD, 200, 400, Way::ReadAhead);
        assert_eq!(granted_from(FD, 200), None);
        assert_eq!(spend(FD, Some(200), 150), Some(Way::ReadAhead));
        assert_eq!(spend(FD, Some(350), 100), None, "more than is left");
        assert_eq!(granted_from(FD, 300), None, "somewhere else");
        let from = granted_from(FD, 350).unwrap();
        stream.catch_up(from, 350);
        assert_eq!(stream.observe(350, 100, 1000, None), Pattern::Short);
        assert_eq!(stream.abandoned, []);
        assert_eq!(stream.tail(450).unwrap().pending, [ahead]);
        revoke(FD);
    }

    #[test]
    fn what_calibration_knows_counts_more_than_the_window() {
        let mut stream = Stream::default();
        assert_eq!(stream.observe(0, 499, 1000, Some(500)), Pattern::Short);
        assert_eq!(stream.observe(499, 500, 1000, Some(500)), Pattern::Long);
        assert_eq!(
            stream.observe(999, 1001, 1000, Some(u64::MAX)),
            Pattern::Long
        );
    }

    #[test]
    fn advice_switches_read_ahead_off_or_doubles_it() {
        let mut stream = Stream {
            advice: Advice::Random,
            ..Stream::default()
        };
        assert_eq!(stream.observe(0, 100, 1000, None), Pattern::Single);
        stream.advice = Advice::Sequential;
        assert_eq!(stream.observe(100, 2000, 1000, None), Pattern::Short);
        assert_eq!(stream.observe(2100, 2001, 1000, None), Pattern::Long);
    }

    #[test]
    fn the_system_is_never_ahead_of_what_was_asked_about() {
        for window in [128 << 10, 512 << 10, 8 << 20_u64] {
            let begin = 12345;
            let ahead = Ahead { begin, window };
            assert_eq!(ahead.of(begin), FIRST_AHEAD.min(2 * window));
            assert_eq!(ahead.of(u64::MAX), 2 * window);
            for asked in (begin..begin + (64 << 20)).step_by(99_991) {
                let until = ahead.within(asked);
                assert!(
                    until == begin || until + ahead.of(until) <= asked,
                    "{asked}"
                );
            }
        }
    }

    #[test]
    fn a_read_that_stands_alone_is_told_from_one_that_goes_on() {
        let fd = 1000;
        revoke(fd);
        assert!(stands_alone(fd, 4096));
        expect(fd, 8192);
        assert!(!stands_alone(fd, 8192) && stands_alone(fd, 0));
        assert_eq!(spend(fd, Some(8192), 1), None);
        grant(fd, 8192, 10_000, Way::ReadAhead);
        // Somewhere else, while a sequence has credit.
        assert!(!stands_alone(fd, 0));
        expect(fd, 4096);
        assert_eq!(spend(fd, Some(8192), 1000), Some(Way::ReadAhead));
        revoke(fd);
    }

    #[test]
    fn only_what_has_been_read_leaves_the_pages_ahead() {
        let mut tail = Tail {
            pending: [0..10, 20..30, 40..50].into(),
            ..Tail::default()
        };
        assert_eq!(tail.read_up_to(0), []);
        assert_eq!(tail.read_up_to(25), [0..10, 20..25]);
        assert_eq!(tail.read_up_to(45), [25..30, 40..45]);
        assert_eq!(tail.pending.front(), Some(&(45..50)));
    }

    #[test]
    fn the_oldest_pages_go_first_and_no_more_than_needed() {
        let file = FileId {
            device: 1,
            inode: 2,
        };
        let private = |range: Range<u64>| Private {
            file,
            fd: -1,
            origin: range.start,
            range,
        };
        let mut set = Set {
            ranges: [private(0..100), private(200..300)].into(),
            bytes: 200,
        };
        assert!(set.shrink(200).is_empty());
        let ranges =
            |gone: Vec<Private>| -> Vec<_> { gone.into_iter().map(|it| it.range).collect() };
        assert_eq!(ranges(set.shrink(90)), [0..100, 200..210]);
        assert_eq!(set.shrink(20).len(), 1);
        assert_eq!(set.bytes, 20);
    }

    #[test]
    fn advice_belongs_to_a_descriptor_until_it_is_closed() {
        let fd = 1001;
        for advice in [Advice::Random, Advice::Sequential, Advice::Normal] {
            advise(fd, advice);
            assert_eq!((advice_of(fd), advice_of(fd + 1)), (advice, Advice::Normal));
        }
        advise(-1, Advice::Random);
        advise(5000, Advice::Random);
        assert_eq!(
            (advice_of(-1), advice_of(5000)),
            (Advice::Normal, Advice::Normal)
        );
    }

    #[test]
    fn credit_is_spent_in_order_and_ends() {
        let fd = 1000;
        grant(fd, 10, 20, Way::ReadAhead);
        assert_eq!(spend(fd, Some(11), 1), None);
        assert_eq!(spend(fd, Some(10), 6), Some(Way::ReadAhead));
        assert_eq!(spend(fd, None, 4), Some(Way::ReadAhead));
        assert_eq!(spend(fd, None, 1), None);
        revoke(fd);
        assert_eq!(spend(fd, Some(20), 1), None);
        assert_eq!((spend(-1, None, 1), spend(5000, None, 1)), (None, None));
    }
}
