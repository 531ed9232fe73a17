//! What the environment says, read once.

use crate::sys;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// `FARLANE_IO`: which ways may be taken.
pub const MODE_VARIABLE: &str = "FARLANE_IO";
/// `FARLANE_IO_READAHEAD_PAGES`: size of the private set.
pub const PAGES_VARIABLE: &str = "FARLANE_IO_READAHEAD_PAGES";
/// `FARLANE_IO_TRACE`: the file that decisions are written to.
pub const TRACE_VARIABLE: &str = "FARLANE_IO_TRACE";
/// `FARLANE_IO_STATS`: whether totals are printed at exit.
pub const STATS_VARIABLE: &str = "FARLANE_IO_STATS";

/// Pages of the private set where the environment names no number (spin-atc17, section 5.1).
const PRIVATE_PAGES: u64 = 512;

/// Which ways may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As if the library were not there.
    Off,
    /// The page cache always.
    Cache,
    /// P2P wherever it is possible.
    P2p,
    /// The way that the P-router finds fastest.
    Auto,
}

impl Mode {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "off" => Some(Self::Off),
            "cache" => Some(Self::Cache),
            "p2p" => Some(Self::P2p),
            "auto" | "" => Some(Self::Auto),
            _ => None,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        [Self::Off, Self::Cache, Self::P2p, Self::Auto]
            .into_iter()
            .find(|mode| mode.code() == code)
    }

    fn code(self) -> u8 {
        match self {
            Self::Off => 1,
            Self::Cache => 2,
            Self::P2p => 3,
            Self::Auto => 4,
        }
    }
}

/// Zero: not read yet.
static MODE: AtomicU8 = AtomicU8::new(0);
static PAGES: OnceLock<u64> = OnceLock::new();

/// Which ways may be taken.
#[must_use]
pub fn mode() -> Mode {
    Mode::from_code(MODE.load(Ordering::Relaxed)).unwrap_or_else(|| {
        let text = std::env::var(MODE_VARIABLE).unwrap_or_default();
        let mode = Mode::parse(&text).unwrap_or_else(|| {
            crate::log::once(&format!(
                "{MODE_VARIABLE} is {text:?}: off, cache, p2p or auto are known; auto is taken"
            ));
            Mode::Auto
        });
        set_mode(mode);
        mode
    })
}

/// Changes the mode for calls that begin from now on.
pub fn set_mode(mode: Mode) {
    MODE.store(mode.code(), Ordering::Relaxed);
}

/// Bytes of the private set of read-ahead.
#[must_use]
pub fn private_bytes() -> u64 {
    let pages = PAGES.get_or_init(|| {
        let text = std::env::var(PAGES_VARIABLE).unwrap_or_default();
        if text.is_empty() {
            return PRIVATE_PAGES;
        }
        text.parse().unwrap_or_else(|_| {
            crate::log::once(&format!(
                "{PAGES_VARIABLE} is {text:?}, which is no number; {PRIVATE_PAGES} is taken"
            ));
            PRIVATE_PAGES
        })
    });
    pages.saturating_mul(sys::page_bytes() as u64)
}

/// Whether totals are to be printed.
#[must_use]
pub fn wants_stats() -> bool {
    std::env::var_os(STATS_VARIABLE).is_some_and(|value| value == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_known_by_name_only() {
        assert_eq!(Mode::parse("p2p"), Some(Mode::P2p));
        assert_eq!(Mode::parse(""), Some(Mode::Auto));
        assert_eq!(Mode::parse("P2P"), None);
        for mode in [Mode::Off, Mode::Cache, Mode::P2p, Mode::Auto] {
            assert_eq!(Mode::from_code(mode.code()), Some(mode));
        }
    }
}
