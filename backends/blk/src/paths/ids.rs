//! Which of the paths to a disk is meant.

use super::MAX_PATHS;
use std::fmt;

/// A path of a disk: its place among those that are configured or discovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathId(pub(super) u8);

impl PathId {
    /// The only one of a disk that has no others.
    pub const FIRST: Self = Self(0);

    /// As many as a disk can have, in order.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        const {
            assert!(
                MAX_PATHS <= 32,
                "a path that has no bit in a set, or no number"
            );
        }
        (0..).take(MAX_PATHS).map(Self)
    }

    /// Its place among the paths of its disk.
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// The number by which a ring knows its file.
    #[must_use]
    pub fn file(self) -> u32 {
        self.0.into()
    }
}

impl fmt::Display for PathId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Some of the paths of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathSet(pub(super) u32);

impl PathSet {
    /// None.
    pub const EMPTY: Self = Self(0);

    /// Whether there is none in it.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self == Self::EMPTY
    }

    /// How many are in it.
    #[must_use]
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether a path is in it.
    #[must_use]
    pub fn contains(self, path: PathId) -> bool {
        self.0 >> path.0 & 1 != 0
    }

    /// The same and this path.
    #[must_use]
    pub fn with(self, path: PathId) -> Self {
        Self(self.0 | 1_u32 << path.0)
    }

    /// The same but for this path.
    #[must_use]
    pub fn without(self, path: PathId) -> Self {
        Self(self.0 & !(1_u32 << path.0))
    }

    /// Those that are not in another set.
    #[must_use]
    pub fn outside(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl FromIterator<PathId> for PathSet {
    fn from_iter<I: IntoIterator<Item = PathId>>(paths: I) -> Self {
        paths.into_iter().fold(Self::EMPTY, Self::with)
    }
}
