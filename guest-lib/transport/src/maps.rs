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
}

/// What all bytes of a range are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behind {
    /// Bytes of one file from this offset on, which all who map it share, readable and writable.
    File { file: FileId, offset: u64 },
    /// This process's alone, readable and writable: its heap and anonymous mappings.
    Private,
}

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
