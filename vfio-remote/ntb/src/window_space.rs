//! Who gets which window.

use crate::file::Examined;
use crate::{FileRange, LinkState, Ntb, NtbError, Translation};
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};

/// Where in the windows a range of a file can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowSlice {
    /// Number of the window.
    pub window: u32,
    /// Where in the window it begins.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// What a window is used for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowUse {
    /// Number of the window.
    pub window: u32,
    /// Bytes that it can show.
    pub max_size: u64,
    /// What it shows.
    pub translation: Option<Translation>,
    /// Whether that cannot be changed.
    pub fixed: bool,
    /// How many slices of it are allocated.
    pub users: usize,
}

#[derive(Debug)]
struct Slot {
    translation: Option<Translation>,
    fixed: bool,
    users: Vec<WindowSlice>,
}

/// The windows of one end of a bridge, and who uses them.
#[derive(Debug)]
pub struct WindowSpace {
    ntb: Arc<dyn Ntb>,
    slots: Mutex<Vec<Slot>>,
}

impl WindowSpace {
    /// All windows whose translations this end of `ntb` sets. Nobody else may set them.
    #[must_use]
    pub fn new(ntb: Arc<dyn Ntb>) -> Self {
        let slots = (0..)
            .zip(&ntb.limits().windows)
            .map(|(window, _)| {
                let translation = ntb.fixed_translation(window);
                Slot {
                    translation,
                    fixed: translation.is_some(),
                    users: Vec::new(),
                }
            })
            .collect();
        Self {
            ntb,
            slots: Mutex::new(slots),
        }
    }

    /// The bridge.
    #[must_use]
    pub fn ntb(&self) -> &Arc<dyn Ntb> {
        &self.ntb
    }

    fn slots(&self) -> MutexGuard<'_, Vec<Slot>> {
        lock(&self.slots)
    }

    /// Has the other end see `length` bytes of `file` from `offset` on: through a window that shows
    /// them already, or a free one. That shows the whole file from now on, so that memory of which
    /// a VM has many ranges needs one window; where no free one is large enough, just the range,
    /// rounded to its alignment.
    ///
    /// Where `writable` is false a window may be chosen that can be written, because it shows the
    /// bytes to somebody who may. A bridge between processes shares the descriptor itself: for
    /// bytes that must not be written by the other end, pass one that cannot.
    ///
    /// # Errors
    /// The range is not in the file, no free window can show it, or the bridge refuses.
    pub fn allocate(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        length: u64,
        writable: bool,
    ) -> Result<WindowSlice, NtbError> {
        if length == 0 || offset.checked_add(length).is_none() {
            return Err(NtbError::Range { offset, length });
        }
        let examined = Examined::new(file)?;
        if examined.regular {
            examined.check_range(offset, length)?;
        }
        let mut slots = self.slots();
        for (window, slot) in (0..).zip(slots.iter_mut()) {
            let found = slot
                .translation
                .and_then(|t| t.locate(examined.id, offset, length, writable));
            if let Some(at) = found {
                let slice = WindowSlice {
                    window,
                    offset: at,
                    length,
                };
                slot.users.push(slice);
                return Ok(slice);
            }
        }
        let wanted = FileRange {
            file,
            offset,
            length,
            writable,
        };
        self.allocate_window(&mut slots, &examined, wanted)
    }

    fn allocate_window(
        &self,
        slots: &mut [Slot],
        examined: &Examined,
        wanted: FileRange<'_>,
    ) -> Result<WindowSlice, NtbError> {
        let FileRange { offset, length, .. } = wanted;
        let windows = self.ntb.limits().windows.len();
        let mut refusal = if slots.iter().all(|s| s.fixed) {
            NtbError::NotShown {
                windows,
                file: examined.id,
                offset,
                length,
            }
        } else {
            NtbError::Exhausted { windows, length }
        };
        // The whole file, or else the range.
        for whole in [true, false] {
            for (window, slot) in (0..).zip(slots.iter_mut()) {
                if slot.fixed || !slot.users.is_empty() {
                    continue;
                }
                let shown = match whole {
                    true => self.whole(window, examined, offset, length)?,
                    false => match self.rounded(window, examined, offset, length) {
                        Ok(shown) => Some(shown),
                        Err(error) => {
                            refusal = worse(refusal, error);
                            None
                        }
                    },
                };
                let Some((from, bytes)) = shown else {
                    continue;
                };
                let shown = FileRange {
                    offset: from,
                    length: bytes,
                    ..wanted
                };
                self.show(window, slot, examined, shown)?;
                let slice = WindowSlice {
                    window,
                    offset: offset - from,
                    length,
                };
                slot.users.push(slice);
                return Ok(slice);
            }
        }
        Err(refusal)
    }

    fn show(
        &self,
        window: u32,
        slot: &mut Slot,
        examined: &Examined,
        shown: FileRange<'_>,
    ) -> Result<(), NtbError> {
        if slot.translation.is_some() {
            // It could not be cleared when its last user went.
            self.ntb.clear_translation(window)?;
            slot.translation = None;
        }
        self.ntb.set_translation(window, shown)?;
        slot.translation = Some(Translation {
            file: examined.id,
            offset: shown.offset,
            length: shown.length,
            writable: shown.writable,
        });
        Ok(())
    }

    /// All of the file that `window` can show, if it can show all of it, and the range is there.
    fn whole(
        &self,
        window: u32,
        examined: &Examined,
        offset: u64,
        length: u64,
    ) -> Result<Option<(u64, u64)>, NtbError> {
        let limits = self.ntb.limits().window(window)?;
        let bytes = examined.size - examined.size % limits.size_alignment;
        let end = offset.checked_add(length);
        let fits = bytes <= limits.max_size && end.is_some_and(|end| end <= bytes);
        Ok((examined.regular && fits).then_some((0, bytes)))
    }

    /// The smallest range around this one that `window` can show.
    fn rounded(
        &self,
        window: u32,
        examined: &Examined,
        offset: u64,
        length: u64,
    ) -> Result<(u64, u64), NtbError> {
        let limits = self.ntb.limits().window(window)?;
        let from = offset - offset % limits.address_alignment;
        let bytes = (offset - from)
            .checked_add(length)
            .and_then(|l| l.checked_next_multiple_of(limits.size_alignment))
            .ok_or(NtbError::Range { offset, length })?;
        if bytes > limits.max_size {
            return Err(NtbError::Size {
                length: bytes,
                max_size: limits.max_size,
            });
        }
        if examined.regular {
            examined.check_range(from, bytes)?;
        }
        Ok((from, bytes))
    }

    /// Gives a slice back. Its window shows nothing any more when its last user has gone; before
    /// that, the other end must have let go of it.
    ///
    /// # Errors
    /// It was not allocated. Or the bridge fails to clear the translation: the slice is free all
    /// the same, and the window is cleared before its next use.
    pub fn free(&self, slice: WindowSlice) -> Result<(), NtbError> {
        let mut slots = self.slots();
        let unknown = NtbError::NotAllocated {
            window: slice.window,
            offset: slice.offset,
            length: slice.length,
        };
        let at = to_usize(slice.window.into());
        let Some(slot) = slots.get_mut(at) else {
            return Err(unknown);
        };
        let Some(user) = slot.users.iter().position(|&u| u == slice) else {
            return Err(unknown);
        };
        slot.users.swap_remove(user);
        if slot.fixed || !slot.users.is_empty() {
            return Ok(());
        }
        match self.ntb.clear_translation(slice.window) {
            // Translations go down with the link.
            Err(_) if self.ntb.link() == LinkState::Down => {}
            other => other?,
        }
        slot.translation = None;
        Ok(())
    }

    /// What all windows are used for.
    #[must_use]
    pub fn usage(&self) -> Vec<WindowUse> {
        let limits = self.ntb.limits();
        (0..)
            .zip(self.slots().iter().zip(&limits.windows))
            .map(|(window, (slot, limits))| WindowUse {
                window,
                max_size: limits.max_size,
                translation: slot.translation,
                fixed: slot.fixed,
                users: slot.users.len(),
            })
            .collect()
    }
}

/// Of two reasons why no window could be had, the one that helps more: the largest free window is
/// too small, rather than all others are in use.
fn worse(old: NtbError, new: NtbError) -> NtbError {
    match (&old, &new) {
        (NtbError::Size { max_size: o, .. }, NtbError::Size { max_size: n, .. }) if o >= n => old,
        (NtbError::Beyond { .. }, _) => old,
        _ => new,
    }
}

#[cfg(test)]
mod tests;
