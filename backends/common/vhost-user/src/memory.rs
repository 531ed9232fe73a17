//! The memory table of a VMM: what it maps where, and what its own addresses mean.

use farlane_zero_copy::{AddressSpace, AddressSpaceError, memory_file};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use thiserror::Error;
use vhost::vhost_user::message::{VhostUserMemoryRegion, VhostUserSingleMemoryRegion};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

/// Most ranges of memory.
pub const MAX_SLOTS: u64 = 509;

/// Why memory is refused.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// It cannot be mapped.
    #[error("A memory table is refused: {0}")]
    Table(vm_memory::mmap::FromRangesError),
    /// It cannot be mapped.
    #[error(transparent)]
    Space(#[from] AddressSpaceError),
    /// Addresses that wrap.
    #[error("{length:#x} bytes at {address:#x} wrap")]
    Wraps {
        /// First address.
        address: u64,
        /// Bytes.
        length: u64,
    },
    /// Too many ranges.
    #[error("There are {MAX_SLOTS} ranges of memory already")]
    Full,
    /// An address of the VMM that is none of its memory's.
    #[error("The VMM's address {0:#x} is not in its memory")]
    Address(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    guest: u64,
    user: u64,
    length: u64,
    /// Device and number of the file, and where in it the range begins.
    file: (u64, u64),
    offset: u64,
}

impl Range {
    fn new(
        guest: u64,
        user: u64,
        length: u64,
        (file, offset): (BorrowedFd<'_>, u64),
    ) -> Result<Self, MemoryError> {
        for address in [guest, user] {
            if address.checked_add(length).is_none() {
                return Err(MemoryError::Wraps { address, length });
            }
        }
        let stat = rustix::fs::fstat(file).map_err(|e| AddressSpaceError::Io(e.into()))?;
        Ok(Self {
            guest,
            user,
            length,
            file: (stat.st_dev, stat.st_ino),
            offset,
        })
    }
}

/// A range, and how often the VMM has it.
#[derive(Clone, Copy, Debug)]
struct Held {
    range: Range,
    times: u32,
}

/// The memory of a VM, as its VMM tells of it.
#[derive(Debug)]
pub struct Memory {
    space: Arc<AddressSpace>,
    ranges: Vec<Held>,
}

impl Memory {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            space: AddressSpace::new(),
            ranges: Vec::new(),
        }
    }

    /// The guest's addresses.
    #[must_use]
    pub fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    /// Takes a whole table, and returns it mapped. What is no longer in it is touched by nobody
    /// when this returns. Each file is checked before it is mapped.
    ///
    /// # Errors
    /// See [`MemoryError`]; nothing has changed then.
    pub fn replace(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: &[OwnedFd],
    ) -> Result<GuestMemoryMmap, MemoryError> {
        let mut both: Vec<_> = regions.iter().zip(files).collect();
        both.sort_by_key(|(region, _)| region.guest_phys_addr);
        let mut ranges = Vec::new();
        let mut parts = Vec::new();
        for (region, file) in both {
            let (guest, length) = (region.guest_phys_addr, region.memory_size);
            let bytes = usize::try_from(length).map_err(|_| MemoryError::Wraps {
                address: guest,
                length,
            })?;
            memory_file::check_ram(file.as_fd(), (region.mmap_offset, length))
                .map_err(AddressSpaceError::File)?;
            let place = (file.as_fd(), region.mmap_offset);
            let range = Range::new(guest, region.user_addr, length, place)?;
            ranges.push(Held { range, times: 1 });
            let file = file.try_clone().map_err(AddressSpaceError::Io)?;
            let file = FileOffset::new(file.into(), region.mmap_offset);
            parts.push((GuestAddress(guest), bytes, Some(file)));
        }
        let table = GuestMemoryMmap::from_ranges_with_files(parts).map_err(MemoryError::Table)?;
        self.space.replace_ram(&table)?;
        self.ranges = ranges;
        Ok(table)
    }

    /// Adds a range. One that is there, of the same file, is there once more: QEMU 7.2 adds
    /// and removes all memory for each queue pair of an interface.
    ///
    /// # Errors
    /// See [`MemoryError`]; nothing has changed then.
    pub fn add(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: BorrowedFd<'_>,
    ) -> Result<(), MemoryError> {
        let (guest, length) = (region.guest_phys_addr, region.memory_size);
        let offset = region.mmap_offset;
        memory_file::check_ram(file, (offset, length)).map_err(AddressSpaceError::File)?;
        let range = Range::new(guest, region.user_addr, length, (file, offset))?;
        if let Some(held) = self.ranges.iter_mut().find(|held| held.range == range) {
            held.times = held.times.checked_add(1).ok_or(MemoryError::Full)?;
            return Ok(());
        }
        if u64::try_from(self.ranges.len()).is_ok_and(|n| n >= MAX_SLOTS) {
            return Err(MemoryError::Full);
        }
        self.space.map(guest, length, file, offset, true)?;
        self.ranges.push(Held { range, times: 1 });
        Ok(())
    }

    /// Takes a range away. Nobody touches it when this has returned as often as it was added.
    ///
    /// # Errors
    /// There is no such range.
    pub fn remove(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<(), MemoryError> {
        let (guest, length) = (region.guest_phys_addr, region.memory_size);
        let is_it = |held: &Held| (held.range.guest, held.range.length) == (guest, length);
        if let Some(held) = self.ranges.iter_mut().find(|held| is_it(held))
            && held.times > 1
        {
            held.times -= 1;
            return Ok(());
        }
        self.space.unmap(guest, length)?;
        self.ranges.retain(|held| !is_it(held));
        Ok(())
    }

    /// What an address of the VMM is for the guest.
    ///
    /// # Errors
    /// It is not in memory.
    pub fn guest_address(&self, user: u64) -> Result<u64, MemoryError> {
        let found = self.ranges.iter().find_map(|Held { range, .. }| {
            let offset = user.checked_sub(range.user)?;
            (offset < range.length).then_some(range.guest + offset)
        });
        found.ok_or(MemoryError::Address(user))
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn file(bytes: u64) -> OwnedFd {
        let fd = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    #[test]
    fn addresses_of_the_front_end_are_translated() {
        let mut memory = Memory::new();
        let region = |guest, user, bytes, offset| VhostUserMemoryRegion {
            guest_phys_addr: guest,
            memory_size: bytes,
            user_addr: user,
            mmap_offset: offset,
        };
        // Not in order.
        let table = [
            region(0x10_0000, 0x7000_2000, 0x1000, 0x2000),
            region(0, 0x7000_0000, 0x2000, 0),
        ];
        memory
            .replace(&table, &[file(0x3000), file(0x3000)])
            .unwrap();
        assert_eq!(memory.guest_address(0x7000_2010).unwrap(), 0x10_0010);
        assert_eq!(memory.guest_address(0x7000_1fff).unwrap(), 0x1fff);
        assert!(memory.guest_address(0x7000_3000).is_err());
        assert!(memory.guest_address(0x6fff_ffff).is_err());
        let wraps = [region(0, u64::MAX, 0x1000, 0)];
        assert!(memory.replace(&wraps, &[file(0x1000)]).is_err());
        let short = [region(0, 0, 0x2000, 0)];
        assert!(memory.replace(&short, &[file(0x1000)]).is_err());
        assert_eq!(memory.guest_address(0x7000_0000).unwrap(), 0);
    }

    #[test]
    fn ranges_come_and_go() {
        let mut memory = Memory::new();
        let region = VhostUserSingleMemoryRegion::new(0x1000, 0x1000, 0x5000, 0);
        memory.add(&region, file(0x1000).as_fd()).unwrap();
        assert!(memory.add(&region, file(0x1000).as_fd()).is_err());
        assert_eq!(memory.guest_address(0x5004).unwrap(), 0x1004);
        memory.remove(&region).unwrap();
        assert!(memory.remove(&region).is_err());
        assert!(memory.guest_address(0x5004).is_err());
    }

    #[test]
    fn memory_of_a_device_which_has_no_length_is_taken_in_a_table_and_alone() {
        let mut device = std::fs::File::options();
        let device = device.read(true).write(true).open("/dev/zero").unwrap();
        let mut memory = Memory::new();
        let alone = VhostUserSingleMemoryRegion::new(0x1000, 0x2000, 0x5000, 0);
        memory.add(&alone, device.as_fd()).unwrap();
        assert_eq!(memory.guest_address(0x6004).unwrap(), 0x2004);
        let table = VhostUserMemoryRegion {
            guest_phys_addr: 0,
            memory_size: 0x2000,
            user_addr: 0x7000,
            mmap_offset: 0x1000,
        };
        memory.replace(&[table], &[device.into()]).unwrap();
        assert_eq!(memory.guest_address(0x7004).unwrap(), 4);
    }

    #[test]
    fn a_range_that_is_added_twice_is_there_until_it_is_removed_twice() {
        let mut memory = Memory::new();
        let ram = file(0x2000);
        let region = VhostUserSingleMemoryRegion::new(0x1000, 0x1000, 0x5000, 0);
        memory.add(&region, ram.as_fd()).unwrap();
        memory.add(&region, ram.as_fd()).unwrap();
        let elsewhere = VhostUserSingleMemoryRegion::new(0x1000, 0x1000, 0x5000, 0x1000);
        assert!(memory.add(&elsewhere, ram.as_fd()).is_err());
        assert!(memory.add(&region, file(0x2000).as_fd()).is_err());
        memory.remove(&region).unwrap();
        assert_eq!(memory.guest_address(0x5004).unwrap(), 0x1004);
        memory.remove(&region).unwrap();
        assert!(memory.guest_address(0x5004).is_err());
        assert!(memory.remove(&region).is_err());
    }

    #[test]
    fn where_all_slots_are_taken_a_range_can_be_added_once_more_and_no_other_one() {
        let mut memory = Memory::new();
        let ram = file(0x1000 * (MAX_SLOTS + 1));
        let page = |n: u64| VhostUserSingleMemoryRegion::new(n << 12, 0x1000, n << 12, n << 12);
        for n in 0..MAX_SLOTS {
            memory.add(&page(n), ram.as_fd()).unwrap();
        }
        let full = memory.add(&page(MAX_SLOTS), ram.as_fd());
        assert!(matches!(full, Err(MemoryError::Full)));
        memory.add(&page(0), ram.as_fd()).unwrap();
    }
}
