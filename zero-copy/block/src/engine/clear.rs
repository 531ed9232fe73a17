//! Giving back and zeroing ranges of a file.

use super::{Extent, Files};
use crate::ring::{Durable, Fallocate};

/// Whether the blocks of a range that is zeroed may be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deallocate {
    /// They may not.
    Never,
    /// They may, where they cannot be zeroed in place.
    Instead,
    /// They are to be, if they can.
    Preferred,
}

/// A range to be given back or zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Its bytes.
    pub extent: Extent,
    /// Whether its blocks may be given back.
    pub deallocate: Deallocate,
}

/// What becomes of ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// They read as zeroes.
    Zero,
    /// Their blocks are given back, whatever they read as then.
    Discard {
        /// What cannot be given back stays, and is no error.
        is_hint: bool,
    },
}

/// How a range is cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By a block device's command (`BLKDISCARD`).
    Command,
    /// By the file system or the device (`fallocate(2)`).
    By(Fallocate),
    /// By writing zeroes.
    Writing,
}

/// Ranges that are cleared one after the other.
#[derive(Debug)]
pub struct Clear {
    pub(super) goal: Goal,
    pub(super) durable: Durable,
    ranges: Vec<Range>,
    /// The one that it is at.
    index: usize,
    /// How that is cleared, once it has been begun.
    pub(super) way: Option<Way>,
}

/// Whether an error says that this way of clearing is not to be had. File systems and devices
/// differ in which of them they say.
fn is_unsupported(errno: i32) -> bool {
    matches!(
        errno,
        libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP | libc::ENODEV
    )
}

impl Clear {
    /// Clears `ranges`; what was done is `durable` then.
    #[must_use]
    pub fn new(goal: Goal, ranges: Vec<Range>, durable: Durable) -> Self {
        Self {
            goal,
            durable,
            ranges,
            index: 0,
            way: None,
        }
    }

    /// Whether blocks are given back, and may read as anything then.
    #[must_use]
    pub fn discards(&self) -> bool {
        matches!(self.goal, Goal::Discard { .. })
    }

    /// The range that it is at.
    pub(super) fn range(&self) -> Option<Range> {
        self.ranges.get(self.index).copied()
    }

    /// Goes on to the next one.
    pub(super) fn next(&mut self) {
        self.index += 1;
        self.way = None;
    }

    /// Begins once more.
    pub(super) fn restart(&mut self) {
        self.index = 0;
        self.way = None;
    }

    /// How this range is cleared; found out when it is begun.
    pub(super) fn way<F: Files>(&mut self, range: Range, files: &F, file: F::Id) -> Way {
        *self.way.get_or_insert_with(|| match self.goal {
            Goal::Discard { .. } if files.discards_by_command(file) => Way::Command,
            Goal::Discard { .. } => Way::By(Fallocate::PunchHole),
            Goal::Zero if range.deallocate == Deallocate::Preferred => {
                Way::By(Fallocate::PunchHole)
            }
            Goal::Zero => in_place(files),
        })
    }

    /// The present way has failed. Returns whether there is another one, or none is needed.
    pub(super) fn falls_back<F: Files>(&mut self, errno: i32, files: &F) -> bool {
        let Some(range) = self.range() else {
            return false;
        };
        let next = match (self.goal, self.way) {
            _ if !is_unsupported(errno) => None,
            // Of blocks that are none of the device EINVAL is said again.
            (Goal::Discard { .. }, Some(Way::Command)) => Some(Way::By(Fallocate::PunchHole)),
            (Goal::Zero, Some(Way::By(Fallocate::PunchHole))) => match range.deallocate {
                Deallocate::Instead => Some(Way::Writing),
                Deallocate::Preferred | Deallocate::Never => Some(in_place(files)),
            },
            (Goal::Zero, Some(Way::By(Fallocate::ZeroRange))) => {
                if matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS) {
                    files.cannot_zero();
                }
                Some(match range.deallocate {
                    Deallocate::Instead => Way::By(Fallocate::PunchHole),
                    Deallocate::Preferred | Deallocate::Never => Way::Writing,
                })
            }
            _ => None,
        };
        if next.is_some() {
            self.way = next;
            return true;
        }
        if self.goal == (Goal::Discard { is_hint: true }) {
            log::debug!("Blocks cannot be given back: error {errno}");
            self.next();
            return true;
        }
        false
    }
}

/// How a range is zeroed that need not be given back.
fn in_place<F: Files>(files: &F) -> Way {
    if files.can_zero() {
        Way::By(Fallocate::ZeroRange)
    } else {
        Way::Writing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::memory::Access;
    use crate::ring::Ring;
    use crate::syncs::{Beside, UnderWay};
    use std::cell::Cell;
    use std::io;

    /// Files that can do nothing.
    struct NoFiles {
        can_zero: Cell<bool>,
        is_device: bool,
    }

    impl Files for NoFiles {
        type Id = ();

        fn access(&mut self, _: ()) -> io::Result<Access<'_>> {
            Ok(Access::Null)
        }
        fn ring(&mut self, _: ()) -> io::Result<(&mut Ring, u32)> {
            Err(io::ErrorKind::NotFound.into())
        }
        fn is_cached(&self, _: ()) -> bool {
            false
        }
        fn syncs_after(&self, _: (), _: bool) -> bool {
            false
        }
        fn failed_syncs(&self, _: ()) -> u64 {
            0
        }
        fn can_sync(&self, _: (), _: Option<u64>) -> bool {
            true
        }
        fn sync_has_failed(&mut self, _: (), _: i32, _: Option<u64>) {}
        fn begin_sync(&self, _: ()) -> Option<UnderWay> {
            None
        }
        fn are_over(&self, _: &Beside) -> bool {
            true
        }
        fn ends_before(&self, _: (), _: u64) -> bool {
            false
        }
        fn discards_by_command(&self, _: ()) -> bool {
            self.is_device
        }
        fn can_zero(&self) -> bool {
            self.can_zero.get()
        }
        fn cannot_zero(&self) {
            self.can_zero.set(false);
        }
    }

    /// The ways that are tried when each is refused with an error number.
    fn ways(goal: Goal, deallocate: Deallocate, files: &NoFiles, errno: i32) -> Vec<Way> {
        let extent = Extent {
            offset: 0,
            bytes: 512,
        };
        let range = Range { extent, deallocate };
        let mut clear = Clear::new(goal, vec![range], Durable(false));
        let mut tried = vec![clear.way(range, files, ())];
        while clear.falls_back(errno, files) && clear.range().is_some() {
            tried.push(clear.way(range, files, ()));
        }
        tried
    }

    #[test]
    fn whatever_says_that_it_is_unsupported_zeroes_are_written_in_the_end() {
        use Fallocate::{PunchHole, ZeroRange};
        let (hole, in_place) = (Way::By(PunchHole), Way::By(ZeroRange));
        for errno in [libc::EINVAL, libc::ENOSYS, libc::EOPNOTSUPP, libc::ENODEV] {
            let all = [
                (Deallocate::Never, vec![in_place, Way::Writing]),
                (Deallocate::Instead, vec![in_place, hole, Way::Writing]),
                (Deallocate::Preferred, vec![hole, in_place, Way::Writing]),
            ];
            for (deallocate, wanted) in all {
                let files = NoFiles {
                    can_zero: Cell::new(true),
                    is_device: false,
                };
                assert_eq!(ways(Goal::Zero, deallocate, &files, errno), wanted);
                // It is not asked for again what is known not to be there.
                let is_known = matches!(errno, libc::ENOSYS | libc::EOPNOTSUPP);
                assert_eq!(files.can_zero(), !is_known);
            }
        }
    }

    #[test]
    fn what_is_another_error_is_told_but_of_a_hint() {
        let files = NoFiles {
            can_zero: Cell::new(true),
            is_device: true,
        };
        let ways = |goal, errno| ways(goal, Deallocate::Preferred, &files, errno);
        let hole = Way::By(Fallocate::PunchHole);
        let discard = Goal::Discard { is_hint: false };
        assert_eq!(ways(discard, libc::EIO), [Way::Command]);
        assert_eq!(ways(discard, libc::EINVAL), [Way::Command, hole]);
        assert_eq!(ways(Goal::Zero, libc::EIO), [hole]);
        let extent = Extent {
            offset: 0,
            bytes: 512,
        };
        let deallocate = Deallocate::Preferred;
        let ranges = vec![Range { extent, deallocate }; 2];
        let hint = Goal::Discard { is_hint: true };
        let mut clear = Clear::new(hint, ranges, Durable(false));
        assert!(clear.falls_back(libc::EIO, &files) && clear.range().is_some());
        assert!(clear.falls_back(libc::EIO, &files) && clear.range().is_none());
    }
}
