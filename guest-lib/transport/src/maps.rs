//! What is behind addresses of this process, as the kernel lists its mappings (proc(5),
//! `/proc/pid/maps`).

use rustix::fs::{Stat, makedev};
use std::ops::Range;

/// A file, whatever its name and its descriptors are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }

    /// Whether it is the one with these two numbers.
    pub(crate) fn is_of(self, device: u64, inode: u64) -> bool {
        (self.device, self.inode) == (device, inode)
    }
}

/// What all bytes of a range are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behind {
    /// Bytes of one file from this offset on, which all who map it share, readable and writable.
    File { file: FileId, offset: u64 },
    /// This process's alone, readable and writable: its heap and anonymous mappings.
    Private,
}

/// What pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Bytes of one file from this offset on, which all who map it share, readable and writable.
    Shared { file: FileId, offset: u64 },
    /// This process's alone, readable and writable, whatever was there at first: its heap, stacks,
    /// variables, anonymous mappings.
    Private,
    /// Anything else: what cannot be written, devices, huge pages.
    Other,
}

/// Addresses and what they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub range: Range<usize>,
    pub pages: Pages,
}

/// Bytes at the end of the stack to which it grows that stay what they are.
const STACK_END_BYTES: usize = 64 << 10;

/// A line of the list.
#[derive(Debug, PartialEq, Eq)]
struct Entry<'a> {
    range: Range<usize>,
    rights: &'a str,
    offset: u64,
    file: Option<FileId>,
    name: &'a str,
}

impl<'a> Entry<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?;
        let offset = u64::from_str_radix(words.next()?, 16).ok()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let device = makedev(hex(major)?, hex(minor)?);
        let inode = words.next()?.parse().ok()?;
        Some(Self {
            range: usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?,
            rights,
            offset,
            file: (inode != 0).then_some(FileId { device, inode }),
            name: words.next().unwrap_or_default().trim_start(),
        })
    }

    /// What the bytes from `address` on are.
    fn at(&self, address: usize) -> Option<Behind> {
        let skip = u64::try_from(address - self.range.start).ok()?;
        match self.file {
            // The numbers of System V's segments may be those of memfds, of the same device.
            Some(file) if self.rights == "rw-s" && !self.name.starts_with("/SYSV") => {
                let offset = self.offset.checked_add(skip)?;
                Some(Behind::File { file, offset })
            }
            // A stack grows at its end.
            None if self.rights == "rw-p" && !self.name.starts_with("[stack") => {
                Some(Behind::Private)
            }
            _ => None,
        }
    }
}

impl Entry<'_> {
    /// Whether the kernel calls it a stack.
    fn is_stack(&self) -> bool {
        self.name.starts_with("[stack")
    }

    /// What its pages are, those at the end of a stack set apart.
    fn runs(&self, stack_ends: &[Range<usize>]) -> impl Iterator<Item = Run> + use<> {
        let Range { start, end } = self.range.clone();
        let stack_end = stack_ends.iter().find(|stack| stack.contains(&start));
        let begin = stack_end.map_or(start, |stack| stack.end).min(end);
        let pages = match (self.rights, self.file) {
            ("rw-p", None) => Pages::Private,
            ("rw-p", Some(_)) if !self.name.starts_with("/anon_hugepage") => Pages::Private,
            _ => match self.at(start) {
                Some(Behind::File { file, offset }) => Pages::Shared { file, offset },
                _ => Pages::Other,
            },
        };
        let runs = [(start..begin, Pages::Other), (begin..end, pages)];
        let runs = runs.map(|(range, pages)| Run { range, pages });
        runs.into_iter().filter(|run| !run.range.is_empty())
    }
}

/// The ends of stacks. Where something of one has moved it is several mappings, and only the one in
/// which it has begun has its name: it grows at the lowest of them.
fn stack_ends(entries: &[Entry<'_>]) -> Vec<Range<usize>> {
    let joined = entries.chunk_by(|one, next| one.range.end == next.range.start);
    let stacks = joined.filter(|all| all.iter().any(Entry::is_stack));
    let starts = stacks.filter_map(|all| Some(all.first()?.range.start));
    let end = |start: usize| start..start.saturating_add(STACK_END_BYTES);
    starts.map(end).collect()
}

/// What all mappings of such a list are, those next to each other that are one put together.
pub(crate) fn runs(maps: &str) -> Vec<Run> {
    let entries: Vec<_> = maps.lines().filter_map(Entry::parse).collect();
    let stack_ends = stack_ends(&entries);
    let mut all: Vec<Run> = Vec::new();
    for run in entries.iter().flat_map(|entry| entry.runs(&stack_ends)) {
        match all.last_mut() {
            Some(last) if last.range.end == run.range.start && goes_on(last, run.pages) => {
                last.range.end = run.range.end;
            }
            _ => all.push(run),
        }
    }
    all
}

/// Whether pages behind a run are of it.
fn goes_on(run: &Run, next: Pages) -> bool {
    match (run.pages, next) {
        (Pages::Private, Pages::Private) => true,
        (
            Pages::Shared { file, offset },
            Pages::Shared {
                file: same,
                offset: then,
            },
        ) => {
            let length = u64::try_from(run.range.len()).ok();
            file == same && length.and_then(|length| offset.checked_add(length)) == Some(then)
        }
        _ => false,
    }
}

/// The part of each run that lies in a range.
pub(crate) fn inside(runs: &[Run], range: &Range<usize>) -> Vec<Run> {
    let part = |run: &Run| {
        let start = run.range.start.max(range.start);
        let end = run.range.end.min(range.end);
        let skip = u64::try_from(start.checked_sub(run.range.start)?).ok()?;
        let pages = match run.pages {
            Pages::Shared { file, offset } => Pages::Shared {
                file,
                offset: offset.checked_add(skip)?,
            },
            other => other,
        };
        let range = start..end;
        (!range.is_empty()).then_some(Run { range, pages })
    };
    runs.iter().filter_map(part).collect()
}

/// The same, if all of the range is mapped.
pub(crate) fn parts(runs: &[Run], range: &Range<usize>) -> Option<Vec<Run>> {
    let parts = inside(runs, range);
    let mapped: usize = parts.iter().map(|run| run.range.len()).sum();
    (mapped == range.len()).then_some(parts)
}

fn hex(word: &str) -> Option<u32> {
    u32::from_str_radix(word, 16).ok()
}

/// What `range` is in such a list, if all of it is the same.
pub(crate) fn behind(maps: &str, range: &Range<usize>) -> Option<Behind> {
    let mut found: Option<Behind> = None;
    let mut at = range.start;
    for entry in maps.lines().filter_map(Entry::parse) {
        if entry.range.end <= at {
            continue;
        }
        if !entry.range.contains(&at) {
            return None;
        }
        let next = entry.at(at)?;
        found = Some(match found {
            None => next,
            Some(before) => joined(before, next, u64::try_from(at - range.start).ok()?)?,
        });
        at = entry.range.end;
        if at >= range.end {
            return found;
        }
    }
    None
}

/// What bytes are whose first are `before`, and `next` those after `done`.
fn joined(before: Behind, next: Behind, done: u64) -> Option<Behind> {
    match (before, next) {
        (Behind::Private, Behind::Private) => Some(Behind::Private),
        (
            Behind::File { file, offset },
            Behind::File {
                file: same,
                offset: then,
            },
        ) if file == same && offset.checked_add(done) == Some(then) => Some(before),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
00400000-00401000 r-xp 00000000 08:01 77                         /bin/true
01000000-01021000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000002000 rw-s 00001000 00:01 42                 /memfd:a b (deleted)
7f0000002000-7f0000003000 rw-s 00003000 00:01 42                 /memfd:a b (deleted)
7f0000003000-7f0000004000 rw-s 00009000 00:01 42                 /memfd:a b (deleted)
7f0000010000-7f0000011000 rw-p 00000000 00:00 0 
7f0000011000-7f0000013000 rw-p 00000000 00:00 0                  [anon:x]
7f0000013000-7f0000014000 rw-p 00000000 08:01 77                 /bin/true
7f0000020000-7f0000021000 r--s 00000000 00:01 42                 /memfd:a b (deleted)
7f0000030000-7f0000031000 rw-s 00000000 00:01 42                 /SYSV00000000 (deleted)
7ffff0000000-7ffff0021000 rw-p 00000000 00:00 0                  [stack]
";

    fn file(offset: u64) -> Option<Behind> {
        let file = FileId {
            device: makedev(0, 1),
            inode: 42,
        };
        Some(Behind::File { file, offset })
    }

    #[test]
    fn a_range_is_one_files_where_its_bytes_follow_each_other() {
        let at = |range| behind(MAPS, &range);
        assert_eq!(at(0x7f00_0000_0800..0x7f00_0000_1000), file(0x1800));
        assert_eq!(at(0x7f00_0000_0000..0x7f00_0000_2001), file(0x1000));
        assert_eq!(at(0x7f00_0000_2000..0x7f00_0000_3001), None);
        assert_eq!(at(0x7f00_0000_3fff..0x7f00_0000_4001), None);
        assert_eq!(at(0x7f00_0002_0000..0x7f00_0002_1000), None);
        assert_eq!(at(0x7f00_0003_0000..0x7f00_0003_1000), None);
    }

    #[test]
    fn private_memory_is_heap_and_anonymous_mappings() {
        let at = |range| behind(MAPS, &range);
        assert_eq!(at(0x0100_0000..0x0102_1000), Some(Behind::Private));
        assert_eq!(
            at(0x7f00_0001_0010..0x7f00_0001_3000),
            Some(Behind::Private)
        );
        for other in [
            0x0040_0000..0x0040_1000,
            0x0102_0fff..0x0102_1001,
            0x7f00_0001_2000..0x7f00_0001_4000,
            0x7fff_f000_0000..0x7fff_f000_1000,
            0..1,
            usize::MAX - 1..usize::MAX,
        ] {
            assert_eq!(at(other.clone()), None, "{other:x?}");
        }
    }

    #[test]
    fn runs_are_what_pages_are_one_behind_the_other() {
        let all = runs(MAPS);
        let of = |range: Range<usize>| {
            let parts = parts(&all, &range)?;
            let found = parts.into_iter().map(|run| (run.range.len(), run.pages));
            Some(found.collect::<Vec<_>>())
        };
        let shared = |offset| match file(offset) {
            Some(Behind::File { file, offset }) => Pages::Shared { file, offset },
            _ => unreachable!(),
        };
        assert_eq!(
            of(0x7f00_0000_1000..0x7f00_0000_4000),
            Some(vec![(0x2000, shared(0x2000)), (0x1000, shared(0x9000))])
        );
        // Also what was a file's at first.
        assert_eq!(
            of(0x7f00_0001_0800..0x7f00_0001_3800),
            Some(vec![(0x3000, Pages::Private)])
        );
        assert_eq!(
            of(0x7fff_f000_f000..0x7fff_f001_1000),
            Some(vec![(0x1000, Pages::Other), (0x1000, Pages::Private)])
        );
        let other = Some(vec![(0x1000, Pages::Other)]);
        for start in [0x0040_0000, 0x7f00_0002_0000, 0x7f00_0003_0000] {
            assert_eq!(of(start..start + 0x1000), other, "{start:x}");
        }
        for gap in [
            0..1,
            0x0102_0000..0x0102_1001,
            0x7f00_0003_0fff..0x7f00_0003_1001,
        ] {
            assert_eq!(of(gap.clone()), None, "{gap:x?}");
        }
    }

    #[test]
    fn a_stack_of_which_something_has_moved_has_one_end_all_the_same() {
        let maps = "\
7ffff0000000-7ffff0001000 rw-p 00000000 00:00 0 
7ffff0001000-7ffff0018000 rw-p 00000000 00:00 0 
7ffff0018000-7ffff0019000 rw-s 00000000 00:01 42                 /memfd:a (deleted)
7ffff0019000-7ffff0021000 rw-p 00000000 00:00 0                  [stack]
7ffff0030000-7ffff0040000 rw-p 00000000 00:00 0 
";
        let all = runs(maps);
        let found = |pages| {
            let found = all.iter().filter(move |run| run.pages == pages);
            found.map(|run| run.range.clone()).collect::<Vec<_>>()
        };
        let end = 0x7fff_f000_0000..0x7fff_f001_0000;
        let others = found(Pages::Other);
        assert_eq!(others.iter().map(Range::len).sum::<usize>(), end.len());
        assert!(others.iter().all(|other| end.contains(&other.start)));
        let private = [
            0x7fff_f001_0000..0x7fff_f001_8000,
            0x7fff_f001_9000..0x7fff_f002_1000,
            0x7fff_f003_0000..0x7fff_f004_0000,
        ];
        assert_eq!(found(Pages::Private), private);
    }

    #[test]
    fn a_line_that_is_none_is_passed_over() {
        for line in [
            "",
            "x",
            "1-2",
            "1-2 r 0 0",
            "1-2 rw-p 0 00:00 x",
            "- - - - -",
        ] {
            assert_eq!(Entry::parse(line), None, "{line:?}");
        }
    }
}
