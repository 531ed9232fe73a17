//! Sequences of reads: which read continues one, how far the system's read-ahead gets before it,
//! and what of each descriptor needs no further look.

use crate::plan::trace::Way;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::ops::Range;
use std::os::fd::RawFd;
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
    /// `POSIX_FADV_NORMAL`, or no advice.
    #[default]
    Normal,
    /// Reads come in order: the window is twice as long.
    Sequential,
    /// They do not: there is no read-ahead.
    Random,
}

/// A sequence of reads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tail {
    /// Offset of its first byte.
    pub(crate) begin: u64,
    /// Where it goes on.
    next: u64,
    /// Up to where pages have been asked about.
    pub(crate) asked: u64,
    /// Whether all of them were cached.
    pub(crate) cached: bool,
    /// Of them, those that were not cached and have not been read yet.
    pub(crate) pending: VecDeque<Range<u64>>,
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
    pub(crate) abandoned: Vec<Range<u64>>,
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

    /// Pages that were asked about and have not been read: they will not be.
    pub(crate) fn take_pending(&mut self) -> Vec<Range<u64>> {
        let tails = self.tails.iter_mut();
        let mut pending: Vec<_> = tails.flat_map(|tail| tail.pending.drain(..)).collect();
        pending.append(&mut self.abandoned);
        pending
    }

    /// The window in bytes; zero when there is to be no read-ahead.
    pub(crate) fn window(&self, system: u64) -> u64 {
        match self.advice {
            Advice::Normal => system,
            Advice::Sequential => system.saturating_mul(2),
            Advice::Random => 0,
        }
    }

    pub(crate) fn tail(&mut self, next: u64) -> Option<&mut Tail> {
        self.tails.iter_mut().find(|tail| tail.next == next)
    }
}

/// How far the system may be ahead of a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    /// Where the sequence began.
    pub(crate) begin: u64,
    /// The window in bytes.
    pub(crate) window: u64,
}

impl Ahead {
    /// In bytes, when the sequence has read up to `next`.
    pub(crate) fn of(self, next: u64) -> u64 {
        let read = next.saturating_sub(self.begin);
        let grown = read.saturating_mul(GROWTH).saturating_add(FIRST_AHEAD);
        grown.min(self.window.saturating_mul(2))
    }

    /// Up to where the sequence may read before the system is beyond `asked`.
    pub(crate) fn within(self, asked: u64) -> u64 {
        let span = asked.saturating_sub(self.begin);
        let growing = span.saturating_sub(FIRST_AHEAD) / (GROWTH + 1);
        let grown = span.saturating_sub(self.window.saturating_mul(2));
        self.begin + growing.max(grown)
    }
}

impl Tail {
    /// Takes what has been read, up to `offset`, out of what has not.
    pub(crate) fn read_up_to(&mut self, offset: u64) -> Vec<Range<u64>> {
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

/// How far reads of one descriptor may go by the plain call without another look.
#[derive(Debug)]
struct Credit {
    /// Where it was granted: what the sequence still takes for its end.
    from: AtomicU64,
    next: AtomicU64,
    until: AtomicU64,
    cached: AtomicBool,
    /// What the program has said of the descriptor, as [`Advice::code`].
    advice: AtomicU8,
}

/// Descriptors with credit: those above have to be looked at each time.
const CREDITS: usize = 1024;

static CREDIT: [Credit; CREDITS] = [const {
    Credit {
        from: AtomicU64::new(0),
        next: AtomicU64::new(0),
        until: AtomicU64::new(0),
        cached: AtomicBool::new(false),
        advice: AtomicU8::new(0),
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

impl Advice {
    fn code(self) -> u8 {
        match self {
            Self::Normal => 0,
            Self::Sequential => 1,
            Self::Random => 2,
        }
    }
}

/// Is told what the program says with `posix_fadvise` of how it will read.
pub fn advised(fd: RawFd, advice: c_int) {
    let advice = match advice {
        libc::POSIX_FADV_NORMAL => Advice::Normal,
        libc::POSIX_FADV_SEQUENTIAL => Advice::Sequential,
        libc::POSIX_FADV_RANDOM => Advice::Random,
        _ => return,
    };
    advise(fd, advice);
}

/// Is told what the program says of how it will read a descriptor. Nothing is looked at: many
/// programs say so of every file.
pub(crate) fn advise(fd: RawFd, advice: Advice) {
    if let Some(credit) = credit_of(fd) {
        credit.advice.store(advice.code(), Ordering::Relaxed);
        revoke(fd);
    }
}

/// What it has said.
pub(crate) fn advice_of(fd: RawFd) -> Advice {
    let code = credit_of(fd).map_or(0, |credit| credit.advice.load(Ordering::Relaxed));
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
