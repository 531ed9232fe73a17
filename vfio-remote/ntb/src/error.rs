//! Why a bridge refuses.

use crate::FileId;
use farlane_zero_copy::memory_file::MemoryFileError;
use thiserror::Error;

/// Why a bridge refuses.
#[derive(Debug, Error)]
pub enum NtbError {
    /// This kind of bridge has no such thing.
    #[error("This bridge ({kind}) has no {what}")]
    Unsupported {
        /// Kind of the bridge.
        kind: &'static str,
        /// What it has not.
        what: &'static str,
    },
    /// No such window.
    #[error("There is no window {window}: the bridge has {count}")]
    Window {
        /// Which was named.
        window: u32,
        /// How many there are.
        count: usize,
    },
    /// The window has no translation.
    #[error("Window {window} shows nothing now")]
    NoTranslation {
        /// Which.
        window: u32,
    },
    /// The window's translation cannot be changed.
    #[error("The translation of window {window} is fixed")]
    Fixed {
        /// Which.
        window: u32,
    },
    /// The window has a translation already.
    #[error("Window {window} has a translation already")]
    Taken {
        /// Which.
        window: u32,
    },
    /// A translation that does not begin or end where it must.
    #[error(
        "{length:#x} bytes at {offset:#x} are not aligned to {address_alignment:#x} and \
         {size_alignment:#x}, as window {window} needs"
    )]
    Alignment {
        /// Number of the window.
        window: u32,
        /// First byte in the file.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// What `offset` must be a multiple of.
        address_alignment: u64,
        /// What `length` must be a multiple of.
        size_alignment: u64,
    },
    /// More than a window can show.
    #[error("{length:#x} bytes do not fit into a window of {max_size:#x}")]
    Size {
        /// Length in bytes.
        length: u64,
        /// Bytes that the largest free window can show.
        max_size: u64,
    },
    /// A range that is empty or wraps around.
    #[error("{length:#x} bytes at {offset:#x} are no range")]
    Range {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// A range that is not all in its file or window.
    #[error("{length:#x} bytes at {offset:#x} end beyond {size:#x}")]
    Beyond {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Bytes there are.
        size: u64,
    },
    /// A file that must not be shown, or mapped.
    #[error("The file cannot be used: {0}")]
    File(&'static str),
    /// A file of the peer's that must not be mapped.
    #[error("The peer's file cannot be used")]
    Foreign(#[source] MemoryFileError),
    /// All windows show something else.
    #[error("All {windows} windows are in use: {length:#x} more bytes cannot be shown")]
    Exhausted {
        /// Windows there are.
        windows: usize,
        /// Bytes that were to be shown.
        length: u64,
    },
    /// The windows' translations are fixed, and none shows the range.
    #[error(
        "None of {windows} fixed windows shows {length:#x} bytes at {offset:#x} of file {file}"
    )]
    NotShown {
        /// Windows there are.
        windows: usize,
        /// Which file.
        file: FileId,
        /// First byte in the file.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// A slice that was not allocated, or has been freed.
    #[error("{length:#x} bytes at {offset:#x} of window {window} were not allocated")]
    NotAllocated {
        /// Number of the window.
        window: u32,
        /// Offset in the window.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// There is no other end now.
    #[error("The link is down")]
    LinkDown,
    /// The other end did not answer in time. The link is down from now on.
    #[error("The other end did not answer within {seconds} s")]
    TimedOut {
        /// How long it had.
        seconds: u64,
    },
    /// The other end said no.
    #[error("The other end refuses: {0}")]
    Refused(&'static str),
    /// What the other end said makes no sense. The link is down from now on.
    #[error("The other end broke the protocol: {0}")]
    Protocol(&'static str),
    /// No such scratchpad.
    #[error("There is no scratchpad {index}: the bridge has {count}")]
    Scratchpad {
        /// Which was named.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// No such doorbells.
    #[error("Doorbells {bits:#x} are not all among {valid:#x}")]
    Doorbells {
        /// Which were named.
        bits: u64,
        /// Which there are.
        valid: u64,
    },
    /// No such function, or one of another kind.
    #[error("{function} cannot be used: {why}")]
    Function {
        /// Its address.
        function: String,
        /// Reason.
        why: String,
    },
    /// The system failed.
    #[error("Cannot {what}")]
    Io {
        /// The operation that failed.
        what: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
}

impl NtbError {
    /// For `map_err`: the system failed at `what`.
    pub(crate) fn io<E: Into<std::io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Io {
            what,
            source: source.into(),
        }
    }
}
