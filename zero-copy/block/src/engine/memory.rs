//! The memory of an operation: the guest's, as it is or through copies, or the controller's own.

use super::slots::Slot;
use crate::bounce::Bounce;
use crate::ring::{Durable, Ring};
use crate::storage::Alignment;
use crate::vectors::{MAX_VECTORS, transfer_some};
use farlane_abi::width::at_most;
use farlane_zero_copy::slices::{GuestSlices, SliceList, ViewHolder};
use std::io;
use std::mem::take;
use std::os::fd::OwnedFd;

/// Most bytes of guest memory that an operation has copied at a time.
const COPY_BYTES: usize = 1 << 20;

/// How the bytes of a file are moved.
#[derive(Debug)]
pub enum Access<'a> {
    /// By the ring, which has it under this number.
    Ring(&'a mut Ring, u32),
    /// By system calls that never wait, see
    /// [`in_memory`](crate::storage::Storage::in_memory).
    Memory(&'a OwnedFd),
    /// There are none: it reads as zeroes.
    Null,
}

/// How a transfer has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Started {
    /// The ring will tell how it ends.
    Pending,
    /// It has ended: with this number of bytes, or a negative error number.
    Ended(i32),
}

/// Memory that a file is read to or written from.
#[derive(Debug)]
pub struct Memory<V> {
    /// That of the guest that is left.
    guest: Option<GuestSlices<V>>,
    /// The copy, or memory that is no guest's.
    own: Bounce,
    copies: bool,
    under_way: bool,
}

impl<V> Default for Memory<V> {
    fn default() -> Self {
        Self::of_own(Bounce::default())
    }
}

impl<V> Memory<V> {
    /// Memory that is no guest's.
    pub fn of_own(own: Bounce) -> Self {
        Self {
            guest: None,
            own,
            copies: false,
            under_way: false,
        }
    }

    /// Memory of the guest: through a copy, where the kernel would not take it with this alignment.
    pub fn of_guest(slices: GuestSlices<V>, alignment: Option<Alignment>) -> Self {
        Self {
            copies: !can_be_transferred(&slices, alignment),
            guest: Some(slices),
            own: Bounce::default(),
            under_way: false,
        }
    }

    /// Whether the guest's memory is copied.
    pub fn copies(&self) -> bool {
        self.copies
    }

    /// Whether it is a guest's.
    pub fn is_guests(&self) -> bool {
        self.guest.is_some()
    }

    /// The guest's memory, what is left of it.
    pub fn guest_mut(&mut self) -> Option<&mut GuestSlices<V>> {
        self.guest.as_mut().filter(|_| !self.under_way)
    }

    /// Takes out memory that is no guest's.
    pub fn take_own(&mut self) -> Bounce {
        match self.under_way {
            true => Bounce::default(),
            false => take(&mut self.own),
        }
    }

    /// Ends it. Returns the storage of its list.
    pub fn into_list(mut self) -> Option<SliceList> {
        match self.under_way {
            true => None,
            false => Some(self.guest.take()?.into_list()),
        }
    }

    /// The same, kept by another holder of the same state.
    ///
    /// # Errors
    /// `holder` has another state, or it is under way.
    pub fn held_by<W: ViewHolder>(mut self, holder: W) -> Result<Memory<W>, Self>
    where
        V: ViewHolder,
    {
        if self.under_way {
            return Err(self);
        }
        let Some(guest) = self.guest.take() else {
            return Err(self);
        };
        match guest.held_by(holder) {
            Ok(guest) => Ok(Memory {
                guest: Some(guest),
                own: take(&mut self.own),
                copies: self.copies,
                under_way: false,
            }),
            Err(guest) => {
                self.guest = Some(guest);
                Err(self)
            }
        }
    }

    /// Begins to move up to `left` bytes between it and `offset` of a file, `done` of its bytes
    /// have been. All that there is left of it is moved, where it is not copied.
    ///
    /// # Errors
    /// The ring takes no more, or there is something under way.
    pub fn start(
        &mut self,
        access: Access<'_>,
        write: Option<Durable>,
        (offset, done, left): (u64, u64, u64),
        slot: Slot,
    ) -> io::Result<Started> {
        if self.under_way {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let copy;
        let vectors = match &self.guest {
            Some(guest) if !self.copies => guest.vectors(),
            guest => {
                let rest = match guest {
                    Some(guest) => {
                        let bytes = at_most(left, COPY_BYTES);
                        if self.own.len() != bytes {
                            self.own = Bounce::new(bytes);
                        }
                        if write.is_some() {
                            guest.copy_to(&mut self.own);
                        }
                        &mut self.own[..]
                    }
                    None => usize::try_from(done)
                        .ok()
                        .and_then(|done| self.own.get_mut(done..))
                        .ok_or(io::ErrorKind::UnexpectedEof)?,
                };
                copy = [libc::iovec {
                    iov_base: rest.as_mut_ptr().cast(),
                    iov_len: rest.len(),
                }];
                &copy[..]
            }
        };
        match access {
            Access::Ring(ring, file) => {
                // SAFETY: the guest's memory is kept mapped by its slices; they, with the list of
                // their vectors, and the copy are ours and stay where they are until the end has
                // been told to `end`: see `drop`. A single vector is not referred to.
                unsafe { ring.transfer(file, write, vectors, offset, slot) }?;
                self.under_way = true;
                Ok(Started::Pending)
            }
            Access::Memory(file) => {
                let vectors = vectors.get(..MAX_VECTORS).unwrap_or(vectors);
                // SAFETY: as above, during the call.
                let moved = unsafe { transfer_some(file, write, vectors, offset) };
                self.under_way = true;
                Ok(Started::Ended(match moved {
                    Ok(moved) => i32::try_from(moved).map_err(io::Error::other)?,
                    Err(e) => -e.raw_os_error().unwrap_or(libc::EIO),
                }))
            }
            Access::Null => {
                match &self.guest {
                    Some(guest) if write.is_none() => {
                        guest
                            .fill_with_zeroes()
                            .map_err(|_| libc_error(libc::EFAULT))?;
                    }
                    _ if write.is_none() => self.own.fill(0),
                    _ => (),
                }
                let left = i32::try_from(left).map_err(io::Error::other)?;
                self.under_way = true;
                Ok(Started::Ended(left))
            }
        }
    }

    /// What was under way has ended with `result`: the ring has told so. Bytes that were read to a
    /// copy are in the guest's memory then.
    pub fn end(&mut self, result: i32, write: bool) {
        let was_under_way = std::mem::take(&mut self.under_way);
        if let (Some(guest), Ok(moved)) = (&self.guest, usize::try_from(result))
            && was_under_way
            && self.copies
            && !write
            && let Some(bytes) = self.own.get(..moved.min(self.own.len()))
        {
            // It was found to be writable.
            let _ = guest.copy_from(bytes);
        }
    }

    /// The first `bytes` of the guest's are done with.
    pub fn skip(&mut self, bytes: usize) {
        if let Some(guest) = &mut self.guest
            && !self.under_way
        {
            guest.skip(bytes);
        }
    }
}

impl<V> Drop for Memory<V> {
    fn drop(&mut self) {
        // The kernel still reads or writes it.
        if self.under_way {
            std::mem::forget((self.guest.take(), take(&mut self.own)));
        }
    }
}

pub(super) fn libc_error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// Whether the kernel takes this memory as it is.
#[must_use]
pub fn can_be_transferred<V>(slices: &GuestSlices<V>, alignment: Option<Alignment>) -> bool {
    let vectors = slices.vectors();
    if vectors.len() > MAX_VECTORS {
        return false;
    }
    alignment.is_none_or(|alignment| {
        vectors
            .iter()
            .all(|v| alignment.is_met_by(v.iov_base.addr(), v.iov_len))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_zero_copy::{AddressSpace, View};
    use std::io::Read as _;
    use std::os::fd::AsFd as _;

    #[test]
    fn what_is_not_aligned_is_copied_on_its_way_out_and_once_on_its_way_in() {
        let ram = tempfile::tempfile().unwrap();
        ram.set_len(1 << 16).unwrap();
        let space = AddressSpace::new();
        space.map(0, 1 << 16, ram.as_fd(), 0, true).unwrap();
        let alignment = Alignment {
            memory: 4,
            offset: 512,
        };
        let memory = |address| {
            let mut slices = GuestSlices::new(space.view(), SliceList::default(), true);
            slices.push(address, 256).unwrap();
            slices.push(address + 256, 256).unwrap();
            Memory::of_guest(slices, Some(alignment))
        };
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        let moves = |memory: &mut Memory<View>, write| {
            let access = Access::Memory(&file);
            assert!(memory.copies());
            let started = memory.start(access, write, (0, 0, 512), Slot(0)).unwrap();
            assert_eq!(started, Started::Ended(512));
            assert!(memory.guest_mut().is_none());
            memory.end(512, write.is_some());
        };
        space.view().write(1, &[7; 512]).unwrap();
        moves(&mut memory(1), Some(Durable(false)));
        let mut written = Vec::new();
        let mut copy = std::fs::File::from(file.try_clone().unwrap());
        std::io::Seek::rewind(&mut copy).unwrap();
        copy.read_to_end(&mut written).unwrap();
        assert_eq!(written, [7; 512]);
        let mut to = memory(0x1001);
        moves(&mut to, None);
        let mut read = [0; 513];
        space.view().read(0x1001, &mut read).unwrap();
        assert_eq!((&read[..512], read[512]), (&[7; 512][..], 0));
        // Whoever hands it back has ended it.
        space.view().write(0x1001, &[1; 512]).unwrap();
        to.end(512, false);
        space.view().read(0x1001, &mut read).unwrap();
        assert_eq!(read[..512], [1; 512]);
    }
}
