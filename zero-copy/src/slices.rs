//! Scatter/gather lists into guest memory, which keep that memory mapped.
//!
//! A list costs nothing but its [runs](GuestSlices::vectors): their storage is handed back by
//! [`into_list`](GuestSlices::into_list) for the next request, and a [`ViewHolder`] may be a
//! borrowed view or a count of one thread.

use crate::tokens::Opened;
use crate::{AddressSpaceError, View};
use std::mem::take;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// What keeps a [`View`], and with it the guest's memory, mapped.
///
/// # Safety
/// [`view`](Self::view) is of the same state of the same address space each time, wherever the
/// holder was moved meanwhile.
pub unsafe trait ViewHolder {
    /// The view that it keeps.
    fn view(&self) -> &View;
}

// SAFETY: a view never changes its state.
unsafe impl ViewHolder for View {
    fn view(&self) -> &View {
        self
    }
}

// SAFETY: as above.
unsafe impl ViewHolder for &View {
    fn view(&self) -> &View {
        self
    }
}

// SAFETY: as above.
unsafe impl ViewHolder for Rc<View> {
    fn view(&self) -> &View {
        self
    }
}

// SAFETY: as above.
unsafe impl ViewHolder for Arc<View> {
    fn view(&self) -> &View {
        self
    }
}

/// Storage of a list that is no more, for another one.
#[derive(Debug, Default)]
pub struct SliceList(Vec<libc::iovec>);

// SAFETY: it is empty.
unsafe impl Send for SliceList {}

/// Guest memory, run by run, and what keeps it mapped. Others access it at any time.
#[derive(Debug)]
pub struct GuestSlices<V> {
    runs: Vec<libc::iovec>,
    writable: bool,
    /// Keeps the memory of a device, where some runs are that.
    opened: Option<Box<Opened>>,
    holder: V,
}

// SAFETY: the runs are in shared mappings, which are not bound to a thread and are kept by the
// holder.
unsafe impl<V: Send> Send for GuestSlices<V> {}

/// Memory that is to be written is not writable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOnly;

impl<V: ViewHolder> GuestSlices<V> {
    /// No memory yet. All that is [pushed](Self::push) has to be `writable` if this says so.
    pub fn new(holder: V, list: SliceList, writable: bool) -> Self {
        Self {
            runs: list.0,
            writable,
            opened: None,
            holder,
        }
    }

    /// The data of a request for a device's memory.
    pub fn from_opened(holder: V, list: SliceList, opened: Opened) -> Self {
        let mut runs = list.0;
        runs.extend(opened.runs().iter().map(|&(base, bytes)| libc::iovec {
            iov_base: base.cast(),
            iov_len: bytes,
        }));
        Self {
            runs,
            writable: opened.is_written(),
            opened: Some(Box::new(opened)),
            holder,
        }
    }

    /// Appends `bytes` at guest-physical `address`.
    ///
    /// # Errors
    /// As [`View::resolve`]. A part may have been appended.
    pub fn push(&mut self, address: u64, bytes: u64) -> Result<(), AddressSpaceError> {
        let runs = &mut self.runs;
        self.holder
            .view()
            .resolve(address, bytes, self.writable, |base, run| {
                runs.push(libc::iovec {
                    iov_base: base.cast(),
                    iov_len: run,
                });
            })
    }

    /// What keeps the memory mapped.
    pub fn holder(&self) -> &V {
        &self.holder
    }

    /// The same memory, kept by another holder of the same state.
    ///
    /// # Errors
    /// `holder` has another state.
    pub fn held_by<W: ViewHolder>(self, holder: W) -> Result<GuestSlices<W>, Self> {
        if !self.holder.view().is_same_state(holder.view()) {
            return Err(self);
        }
        Ok(GuestSlices {
            runs: self.runs,
            writable: self.writable,
            opened: self.opened,
            holder,
        })
    }
}

impl<V> GuestSlices<V> {
    /// The runs, for system calls. Valid as long as this.
    pub fn vectors(&self) -> &[libc::iovec] {
        &self.runs
    }

    /// Whether there is nothing (left).
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Bytes of all runs.
    pub fn len(&self) -> usize {
        self.runs
            .iter()
            .fold(0, |sum, run| run.iov_len.saturating_add(sum))
    }

    /// Whether some of it is the memory of a device, which the disk may not reach.
    pub fn is_tunnelled(&self) -> bool {
        self.opened.is_some()
    }

    /// All bytes have moved: where they are a device's, its processes are told, and the number of
    /// its bytes is returned. Nothing is left of the memory then.
    pub fn landed(&mut self) -> u64 {
        let Some(opened) = self.opened.take() else {
            return 0;
        };
        self.runs.clear();
        let bytes = opened.tunnelled_bytes();
        opened.landed();
        bytes
    }

    /// Drops the first `bytes`.
    pub fn skip(&mut self, bytes: usize) {
        let mut rest = bytes;
        let mut whole = 0;
        for run in &mut self.runs {
            if rest < run.iov_len {
                run.iov_base = run.iov_base.wrapping_byte_add(rest);
                run.iov_len -= rest;
                break;
            }
            rest -= run.iov_len;
            whole += 1;
        }
        self.runs.drain(..whole);
    }

    /// Takes the first `bytes` away, or all where there are fewer. Memory of devices is not split:
    /// it is all in front.
    pub fn split_front(&mut self, bytes: usize, list: SliceList) -> Self
    where
        V: Clone,
    {
        let mut front = Self {
            runs: list.0,
            writable: self.writable,
            opened: None,
            holder: self.holder.clone(),
        };
        if self.opened.is_some() {
            std::mem::swap(&mut front.runs, &mut self.runs);
            front.opened = self.opened.take();
            return front;
        }
        let mut left = bytes;
        for run in &self.runs {
            if left == 0 {
                break;
            }
            let part = run.iov_len.min(left);
            front.runs.push(libc::iovec {
                iov_base: run.iov_base,
                iov_len: part,
            });
            left -= part;
        }
        self.skip(bytes - left);
        front
    }

    /// What is there from byte `offset` on, borrowed.
    pub fn at(&self, offset: usize) -> GuestRuns<'_> {
        let mut skip = offset;
        let whole = self.runs.iter().take_while(|run| {
            let is_skipped = run.iov_len <= skip;
            skip -= if is_skipped { run.iov_len } else { 0 };
            is_skipped
        });
        let whole = whole.count();
        let runs = self.runs.get(whole..).unwrap_or_default();
        GuestRuns {
            skip: if runs.is_empty() { 0 } else { skip },
            runs,
            writable: self.writable,
        }
    }

    /// Keeps the first `runs` runs, where none is a device's.
    pub fn truncate(&mut self, runs: usize) {
        if self.opened.is_none() {
            self.runs.truncate(runs);
        }
    }

    /// Copies the first bytes to `data`. Returns how many there were.
    pub fn copy_to(&self, data: &mut [u8]) -> usize {
        self.at(0).copy_to(data)
    }

    /// Copies `data` to the first bytes. Returns how many there was room for.
    ///
    /// # Errors
    /// They are not to be written.
    pub fn copy_from(&self, data: &[u8]) -> Result<usize, ReadOnly> {
        self.at(0).copy_from(data)
    }

    /// Zeroes all of it.
    ///
    /// # Errors
    /// It is not to be written.
    pub fn fill_with_zeroes(&self) -> Result<(), ReadOnly> {
        if !self.writable {
            return Err(ReadOnly);
        }
        for run in &self.runs {
            // SAFETY: the holder keeps the run mapped, which is writable.
            unsafe { std::ptr::write_bytes(run.iov_base.cast::<u8>(), 0, run.iov_len) };
        }
        Ok(())
    }

    /// Ends it. Returns its storage.
    pub fn into_list(self) -> SliceList {
        let mut runs = self.runs;
        runs.clear();
        SliceList(runs)
    }
}

/// Guest memory of a [list](GuestSlices), borrowed from some byte on.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuestRuns<'a> {
    /// Bytes of the first run that are not part of it.
    skip: usize,
    runs: &'a [libc::iovec],
    writable: bool,
}

impl<'a> GuestRuns<'a> {
    /// The runs, for system calls. Valid as long as the list is borrowed.
    pub fn vectors(self) -> impl ExactSizeIterator<Item = libc::iovec> + 'a {
        let mut skip = self.skip;
        self.runs.iter().map(move |run| {
            let less = std::mem::take(&mut skip);
            libc::iovec {
                iov_base: run.iov_base.wrapping_byte_add(less),
                iov_len: run.iov_len - less,
            }
        })
    }

    /// Copies the first bytes to `data`. Returns how many there were.
    pub fn copy_to(self, data: &mut [u8]) -> usize {
        let mut rest = data;
        let mut copied = 0;
        for run in self.vectors() {
            let length = run.iov_len.min(rest.len());
            let (part, after) = take(&mut rest).split_at_mut(length);
            // SAFETY: the list's holder keeps the run mapped; `part` is ours and as long.
            unsafe {
                std::ptr::copy_nonoverlapping(run.iov_base.cast(), part.as_mut_ptr(), length);
            }
            rest = after;
            copied += length;
            if rest.is_empty() {
                break;
            }
        }
        copied
    }

    /// Copies `data` to the first bytes. Returns how many there was room for.
    ///
    /// # Errors
    /// They are not to be written.
    pub fn copy_from(self, data: &[u8]) -> Result<usize, ReadOnly> {
        if !self.writable && !self.runs.is_empty() {
            return Err(ReadOnly);
        }
        let mut rest = data;
        for run in self.vectors() {
            let (part, after) = rest.split_at(run.iov_len.min(rest.len()));
            // SAFETY: the list's holder keeps the run mapped, which is writable and at least as
            // long.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), run.iov_base.cast(), part.len());
            }
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        Ok(data.len() - rest.len())
    }
}

/// A byte of guest memory, as a request's status, and what keeps it mapped.
#[derive(Debug)]
pub struct GuestByte<V> {
    at: *const AtomicU8,
    holder: V,
}

impl<V: ViewHolder> GuestByte<V> {
    /// The byte at guest-physical `address`.
    ///
    /// # Errors
    /// It is not memory, or not writable.
    pub fn new(holder: V, address: u64) -> Result<Self, AddressSpaceError> {
        let mut found = None;
        holder
            .view()
            .resolve(address, 1, true, |base, _| found = Some(base))?;
        let at = found.ok_or(AddressSpaceError::Unmapped { address, length: 1 })?;
        Ok(Self {
            at: at.cast_const().cast(),
            holder,
        })
    }

    /// What keeps it mapped.
    pub fn holder(&self) -> &V {
        &self.holder
    }

    /// Writes it; what was written before is seen by whoever sees that.
    pub fn store(&self, value: u8) {
        // SAFETY: `resolve` has found it writable, and the holder keeps it mapped. Others write it,
        // which atomics allow.
        unsafe { &*self.at }.store(value, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AddressSpace;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd as _;

    /// 0x1000 to 0x3fff in three pieces, of which the last is only read.
    fn space() -> Arc<AddressSpace> {
        let space = AddressSpace::new();
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 0x3000).unwrap();
        for (address, offset) in [(0x1000, 0x2000), (0x2000, 0), (0x3000, 0x1000)] {
            let writable = address < 0x3000;
            let mapped = space.map(address, 0x1000, fd.as_fd(), offset, writable);
            mapped.unwrap();
        }
        space
    }

    fn lengths<V>(slices: &GuestSlices<V>) -> Vec<usize> {
        slices.vectors().iter().map(|run| run.iov_len).collect()
    }

    #[test]
    fn bytes_cross_runs_and_end_with_them() {
        let space = space();
        let mut slices = GuestSlices::new(Rc::new(space.view()), SliceList::default(), true);
        slices.push(0x1ffe, 4).unwrap();
        slices.push(0x1800, 1).unwrap();
        assert_eq!((lengths(&slices), slices.len()), (vec![2, 2, 1], 5));
        assert_eq!(slices.copy_from(&[1, 2, 3, 4, 5, 6]), Ok(5));
        let mut read = [0; 3];
        space.view().read(0x1fff, &mut read).unwrap();
        assert_eq!(read, [2, 3, 4]);
        slices.skip(1);
        let front = slices.split_front(2, SliceList::default());
        assert_eq!(
            (lengths(&front), lengths(&slices)),
            (vec![1, 1], vec![1, 1])
        );
        let mut read = [0; 4];
        assert_eq!(slices.copy_to(&mut read), 2);
        assert_eq!(read, [4, 5, 0, 0]);
        let behind = slices.at(1);
        assert_eq!(
            (behind.vectors().len(), behind.copy_to(&mut read[..1])),
            (1, 1)
        );
        assert_eq!((read[0], behind.copy_from(&[9, 9])), (5, Ok(1)));
        assert_eq!(
            slices.at(2).vectors().len() + slices.at(9).vectors().len(),
            0
        );
        assert_eq!((slices.copy_to(&mut read), read[1]), (2, 9));
        front.fill_with_zeroes().unwrap();
        assert_eq!(front.copy_to(&mut read), 2);
        assert_eq!(read, [0, 0, 0, 0]);
        slices.skip(2);
        assert!(slices.is_empty() && slices.split_front(9, front.into_list()).is_empty());
    }

    #[test]
    fn what_is_only_read_is_not_written() {
        let space = space();
        let view = space.view();
        let mut slices = GuestSlices::new(&view, SliceList::default(), false);
        slices.push(0x3000, 8).unwrap();
        assert_eq!(slices.copy_from(&[1]), Err(ReadOnly));
        assert_eq!(slices.fill_with_zeroes(), Err(ReadOnly));
        let mut slices = GuestSlices::new(&view, slices.into_list(), true);
        assert!(slices.push(0x3000, 8).is_err() && slices.push(0x9000, 1).is_err());
        assert!(GuestByte::new(&view, 0x3000).is_err());
        GuestByte::new(&view, 0x1000).unwrap().store(7);
        let mut read = [0];
        view.read(0x1000, &mut read).unwrap();
        assert_eq!(read, [7]);
    }

    #[test]
    fn another_holder_has_the_same_state() {
        let space = space();
        let view = Rc::new(space.view());
        let mut slices = GuestSlices::new(Rc::clone(&view), SliceList::default(), true);
        slices.push(0x1000, 1).unwrap();
        let other = AddressSpace::new().view();
        let slices = slices.held_by(other).unwrap_err();
        assert!(slices.held_by(View::clone(&view)).is_ok());
    }
}
