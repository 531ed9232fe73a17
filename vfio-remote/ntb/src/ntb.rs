//! What every bridge can be asked.

use crate::file::check_range;
use crate::{FileId, NtbError};
use farlane_abi::width::to_usize;
use std::fmt::Debug;
#[cfg(test)]
use std::os::fd::AsFd;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// What a window's translation must be like (`ntb_mw_get_align`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLimits {
    /// What the first byte's offset must be a multiple of: a power of two.
    pub address_alignment: u64,
    /// What the length must be a multiple of: a power of two.
    pub size_alignment: u64,
    /// Bytes that it can show.
    pub max_size: u64,
}

/// What one end of a bridge has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Windows whose translations this end sets (`ntb_mw_count`).
    pub windows: Vec<WindowLimits>,
    /// Windows through which this end looks at the other's memory (`ntb_peer_mw_count`).
    pub peer_windows: usize,
    /// Scratchpads of each end (`ntb_spad_count`).
    pub scratchpads: u32,
    /// Doorbells of each end, as bits (`ntb_db_valid_mask`).
    pub doorbells: u64,
}

impl Limits {
    /// The limits of one window.
    ///
    /// # Errors
    /// There is no such window.
    pub fn window(&self, window: u32) -> Result<&WindowLimits, NtbError> {
        let at = to_usize(window.into());
        self.windows.get(at).ok_or(NtbError::Window {
            window,
            count: self.windows.len(),
        })
    }

    /// Whether `window` can show these bytes of a file.
    ///
    /// # Errors
    /// It cannot; says why.
    pub fn check(&self, window: u32, offset: u64, length: u64) -> Result<(), NtbError> {
        let limits = self.window(window)?;
        if length == 0 || offset.checked_add(length).is_none() {
            return Err(NtbError::Range { offset, length });
        }
        let aligned = offset.is_multiple_of(limits.address_alignment)
            && length.is_multiple_of(limits.size_alignment);
        if !aligned {
            return Err(NtbError::Alignment {
                window,
                offset,
                length,
                address_alignment: limits.address_alignment,
                size_alignment: limits.size_alignment,
            });
        }
        if length > limits.max_size {
            return Err(NtbError::Size {
                length,
                max_size: limits.max_size,
            });
        }
        Ok(())
    }
}

/// Whether there is another end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// There is none, or it has not said that it is there.
    Down,
    /// There is.
    Up,
}

/// What a window of this end shows to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Whose bytes.
    pub file: FileId,
    /// The first byte's offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Whether the other end may write them.
    pub writable: bool,
}

impl Translation {
    /// Where in the window a range of a file is, if all of it is there.
    #[must_use]
    pub fn locate(&self, file: FileId, offset: u64, length: u64, writable: bool) -> Option<u64> {
        let at = offset.checked_sub(self.offset)?;
        let fits = at.checked_add(length)? <= self.length;
        let same = self.file == file && (self.writable || !writable);
        (fits && same).then_some(at)
    }
}

/// Bytes of a file that a window is to show.
#[derive(Clone, Copy, Debug)]
pub struct FileRange<'f> {
    /// The file.
    pub file: BorrowedFd<'f>,
    /// The first byte's offset in it.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Whether the other end may write them.
    pub writable: bool,
}

#[cfg(test)]
impl<'f> FileRange<'f> {
    /// The first page of a file, to be written too.
    pub fn first_page(file: &'f impl AsFd) -> Self {
        Self {
            file: file.as_fd(),
            offset: 0,
            length: 0x1000,
            writable: true,
        }
    }
}

/// Memory of the other end, as this end sees it: a stretch of a file that can be mapped.
#[derive(Clone, Debug)]
pub struct PeerWindow {
    /// The file.
    pub file: Arc<OwnedFd>,
    /// Where the window begins in it: a multiple of the page size.
    pub offset: u64,
    /// Bytes that the window shows.
    pub size: u64,
    /// Whether they can be written.
    pub writable: bool,
    /// Whether the bytes stay there whatever the other end does. Otherwise it can shrink the file,
    /// and who touches the window then gets `SIGBUS`.
    pub sealed: bool,
}

impl PeerWindow {
    /// Where in the file a part of the window is.
    ///
    /// # Errors
    /// It is empty, or not all in the window.
    pub fn locate(&self, offset: u64, length: u64) -> Result<u64, NtbError> {
        check_range(offset, length, self.size)?;
        self.offset
            .checked_add(offset)
            .ok_or(NtbError::Range { offset, length })
    }
}

/// One end of a bridge.
///
/// Names are those of `include/linux/ntb.h` in words: `ntb_mw_set_trans` is
/// [`set_translation`](Self::set_translation), `ntb_peer_mw_get_addr` is
/// [`peer_window`](Self::peer_window), `ntb_db_*` are the doorbells and `ntb_spad_*` the
/// scratchpads. Calls may come from several threads.
pub trait Ntb: Send + Sync + Debug {
    /// Which kind it is, for people: "shm", "ivshmem", "pci".
    fn kind(&self) -> &'static str;

    /// What this end has.
    fn limits(&self) -> &Limits;

    /// Whether there is another end. A bridge that cannot know takes it for granted.
    fn link(&self) -> LinkState;

    /// Readable after the link has changed, until [`clear_link_event`](Self::clear_link_event).
    fn link_event(&self) -> BorrowedFd<'_>;

    /// Clears the event, then tells the state.
    fn clear_link_event(&self) -> LinkState;

    /// Has `window` show bytes of a file. The other end sees them when this returns.
    ///
    /// # Errors
    /// The window, the range or the file is refused; the window has a translation; the link is
    /// down.
    fn set_translation(&self, window: u32, shown: FileRange<'_>) -> Result<(), NtbError> {
        let _ = shown;
        self.limits().window(window)?;
        Err(NtbError::Fixed { window })
    }

    /// Has `window` show nothing. The other end cannot look through it anew when this returns; what
    /// it has mapped it was told to let go of before.
    ///
    /// # Errors
    /// No such window, or its translation is fixed; the link is down.
    fn clear_translation(&self, window: u32) -> Result<(), NtbError> {
        self.limits().window(window)?;
        Err(NtbError::Fixed { window })
    }

    /// What `window` shows where that cannot be changed.
    fn fixed_translation(&self, window: u32) -> Option<Translation> {
        let _ = window;
        None
    }

    /// What the other end shows through one of its windows.
    ///
    /// # Errors
    /// No such window, or it shows nothing; the link is down.
    fn peer_window(&self, window: u32) -> Result<PeerWindow, NtbError>;

    /// What was written through a window of the other end is there when this returns: by this
    /// thread, or by a device whose interrupt or whose answer has come. A bridge whose writes are
    /// posted reads `offset` in the window for that, which has to be memory: a read passes no
    /// posted writes (PCI Express Base Specification, 2.4.1). Otherwise writes are there at once,
    /// and nothing is done.
    ///
    /// # Errors
    /// No such window, or it has no such bytes; the system failed.
    fn flush_peer_window(&self, window: u32, offset: u64) -> Result<(), NtbError> {
        let _ = (window, offset);
        Ok(())
    }

    /// Own doorbells that have been rung, as bits. Clears the
    /// [`doorbell_event`](Self::doorbell_event) first.
    ///
    /// # Errors
    /// The bridge has none.
    fn doorbells(&self) -> Result<u64, NtbError> {
        Err(self.without("doorbells"))
    }

    /// Takes the rings of these own doorbells.
    ///
    /// # Errors
    /// There are no such doorbells.
    fn clear_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        let _ = bits;
        Err(self.without("doorbells"))
    }

    /// Says which own doorbells raise no event, instead of what was said before. Rings are kept:
    /// unmasking a doorbell that has been rung raises the event.
    ///
    /// # Errors
    /// There are no such doorbells.
    fn mask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        let _ = bits;
        Err(self.without("doorbells"))
    }

    /// Readable after an own doorbell that is not masked was rung, until
    /// [`doorbells`](Self::doorbells).
    ///
    /// # Errors
    /// The bridge has none.
    fn doorbell_event(&self) -> Result<BorrowedFd<'_>, NtbError> {
        Err(self.without("doorbells"))
    }

    /// Rings doorbells of the other end.
    ///
    /// # Errors
    /// There are no such doorbells; the link is down.
    fn ring_peer(&self, bits: u64) -> Result<(), NtbError> {
        let _ = bits;
        Err(self.without("doorbells"))
    }

    /// Reads an own scratchpad.
    ///
    /// # Errors
    /// There is no such scratchpad.
    fn scratchpad(&self, index: u32) -> Result<u32, NtbError> {
        let _ = index;
        Err(self.without("scratchpads"))
    }

    /// Writes an own scratchpad.
    ///
    /// # Errors
    /// There is no such scratchpad.
    fn set_scratchpad(&self, index: u32, value: u32) -> Result<(), NtbError> {
        let _ = (index, value);
        Err(self.without("scratchpads"))
    }

    /// Reads a scratchpad of the other end.
    ///
    /// # Errors
    /// There is no such scratchpad; the link is down.
    fn peer_scratchpad(&self, index: u32) -> Result<u32, NtbError> {
        let _ = index;
        Err(self.without("scratchpads"))
    }

    /// Writes a scratchpad of the other end.
    ///
    /// # Errors
    /// There is no such scratchpad; the link is down.
    fn set_peer_scratchpad(&self, index: u32, value: u32) -> Result<(), NtbError> {
        let _ = (index, value);
        Err(self.without("scratchpads"))
    }

    /// The error of a bridge that has no `what`.
    fn without(&self, what: &'static str) -> NtbError {
        NtbError::Unsupported {
            kind: self.kind(),
            what,
        }
    }
}
