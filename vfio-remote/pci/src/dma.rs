//! The memory that a function modelled in software reaches.

use crate::{AccessError, AddressRange, DmaMapping, DmaTarget};
use farlane_abi::width::{to_u64, to_usize};
use farlane_sys::chain;
use farlane_sys::sync::{read, write};
use farlane_zero_copy::{AddressSpace, AddressSpaceError, View};
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use thiserror::Error;

/// Why memory could not be reached.
#[derive(Debug, Error)]
pub enum DmaError {
    /// It is not mapped, or not writable.
    #[error(transparent)]
    Space(#[from] AddressSpaceError),
    /// The range can be written by messages only.
    #[error("{length:#x} bytes at {address:#x} are not writable")]
    ReadOnly {
        /// Address as the function sees it.
        address: u64,
        /// Length in bytes.
        length: u64,
    },
    /// Its owner did not answer, or refused.
    #[error("Memory at {address:#x} cannot be reached")]
    Remote {
        /// Address as the function sees it.
        address: u64,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl DmaError {
    fn remote(address: u64) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Remote { address, source }
    }
}

/// Memory that is reached by messages. Calls block until its owner has answered, for a bounded
/// time.
pub trait RemoteMemory: Send + Sync + std::fmt::Debug {
    /// Reads guest-physical memory.
    ///
    /// # Errors
    /// Its owner refuses, does not answer in time, or is gone.
    fn read(&self, address: u64, data: &mut [u8]) -> std::io::Result<()>;

    /// Writes guest-physical memory. It has been written when this returns.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn write(&self, address: u64, data: &[u8]) -> std::io::Result<()>;
}

#[derive(Clone, Debug)]
struct RemoteRange {
    range: AddressRange,
    writable: bool,
    memory: Arc<dyn RemoteMemory>,
}

impl RemoteRange {
    /// Bytes of it from `address` on, where it holds that.
    fn bytes_from(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.range.address)?;
        let rest = self.range.length.checked_sub(offset);
        rest.filter(|&rest| rest > 0)
    }
}

/// What is mapped now: see [`View`]. Only memory that is mapped into this process.
pub type DmaView = View;

/// All memory that one function may reach, at the addresses that its driver uses.
///
/// Most of it is mapped into this process and reached through a [`DmaView`] without a system
/// call. Ranges without a file behind them are reached by messages, through [`read`](Self::read)
/// and [`write`](Self::write), which take both.
#[derive(Debug, Default)]
pub struct DmaSpace {
    mapped: Arc<AddressSpace>,
    /// What there is for a function that is not a bus master.
    nothing: Arc<AddressSpace>,
    /// It may not access memory, whatever is mapped.
    closed: AtomicBool,
    /// The same, for good.
    ended: AtomicBool,
    /// Sorted by nothing: there are few.
    remote: RwLock<Vec<RemoteRange>>,
    generation: AtomicU64,
}

impl DmaSpace {
    /// A space without memory.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Adds a range.
    ///
    /// # Errors
    /// It overlaps another, or cannot be mapped.
    pub fn map(&self, mapping: &DmaMapping) -> Result<(), AccessError> {
        let DmaMapping {
            range, writable, ..
        } = *mapping;
        let AddressRange { address, length } = range;
        let refuse = |why: String| AccessError::Map { range, why };
        let mut remote = write(&self.remote);
        if range.is_invalid() {
            return Err(refuse("The range is empty or wraps around".into()));
        }
        if remote.iter().any(|r| r.range.overlaps(range)) {
            return Err(refuse("It overlaps another range".into()));
        }
        match &mapping.target {
            DmaTarget::File { file, offset } => self
                .mapped
                .map(address, length, file.as_fd(), *offset, writable)
                .map_err(|e| refuse(chain(&e)))?,
            DmaTarget::Device { file, offset } => self
                .mapped
                .map_device(address, length, file.as_fd(), *offset, writable)
                .map_err(|e| refuse(chain(&e)))?,
            DmaTarget::Remote(memory) => {
                let mapped = self.mapped.ranges();
                let mut mapped = mapped.iter().map(|&(a, l, _)| AddressRange::new(a, l));
                if mapped.any(|other| other.overlaps(range)) {
                    return Err(refuse("It overlaps another range".into()));
                }
                remote.push(RemoteRange {
                    range,
                    writable,
                    memory: Arc::clone(memory),
                });
            }
        }
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Takes a range away, exactly as it was added. When this returns, nothing mapped is touched
    /// any more; a message about remote memory that is under way may still arrive.
    ///
    /// # Errors
    /// There is no such range.
    pub fn unmap(&self, range: AddressRange) -> Result<(), AccessError> {
        let mut remote = write(&self.remote);
        // Before the wait for views, so that a thread that keeps one between its turns drops it.
        self.generation.fetch_add(1, Ordering::Release);
        let before = remote.len();
        remote.retain(|r| r.range != range);
        let was_remote = remote.len() != before;
        drop(remote);
        if !was_remote {
            self.mapped
                .unmap(range.address, range.length)
                .map_err(|e| AccessError::Map {
                    range,
                    why: chain(&e),
                })?;
        }
        Ok(())
    }

    /// Takes everything away, as [`unmap`](Self::unmap).
    pub fn clear(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        write(&self.remote).clear();
        self.mapped.clear();
    }

    /// Whether the function may access what is mapped, see
    /// [`Function::set_bus_master`](crate::Function::set_bus_master). Waits for nobody: a view from
    /// before has what it had.
    pub fn set_bus_master(&self, may: bool) {
        self.closed.store(!may, Ordering::Release);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// It may not any more, whatever [`set_bus_master`](Self::set_bus_master) says.
    pub fn end_bus_master(&self) {
        self.ended.store(true, Ordering::Release);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Whether it may.
    #[must_use]
    pub fn is_bus_master(&self) -> bool {
        !self.closed.load(Ordering::Acquire) && !self.ended.load(Ordering::Acquire)
    }

    /// Ranges there are, in order.
    #[must_use]
    pub fn ranges(&self) -> Vec<AddressRange> {
        let remote = read(&self.remote);
        let mapped = self.mapped.ranges();
        let mut all: Vec<_> = mapped
            .iter()
            .map(|&(a, l, _)| AddressRange::new(a, l))
            .collect();
        all.extend(remote.iter().map(|r| r.range));
        all.sort_unstable();
        all
    }

    /// Changes with every change of the space: a thread that keeps a view between its turns
    /// compares it, and takes a new view where it has changed.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The mapped memory as it is now. Keep it for a transfer, or for a turn of a polling thread;
    /// a thread that sleeps, or that calls [`read`](Self::read) or [`write`](Self::write), keeps
    /// none of its own.
    #[must_use]
    pub fn view(&self) -> DmaView {
        match self.is_bus_master() {
            true => self.mapped.view(),
            false => self.nothing.view(),
        }
    }

    /// Whether all of `length` bytes at `address` are mapped memory.
    #[must_use]
    pub fn is_mapped(&self, address: u64, length: u64, writable: bool) -> bool {
        self.view()
            .resolve(address, length, writable, |_, _| ())
            .is_ok()
    }

    /// Reads memory of any kind.
    ///
    /// # Errors
    /// See [`DmaError`].
    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<(), DmaError> {
        self.each_run(address, data.len(), false, |at, part, remote| {
            let part = &mut data[part];
            match remote {
                Some(memory) => memory.read(at, part).map_err(DmaError::remote(at)),
                None => Ok(self.view().read(at, part)?),
            }
        })
    }

    /// Writes memory of any kind.
    ///
    /// # Errors
    /// See [`DmaError`]. A part may have been written then.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), DmaError> {
        self.each_run(address, data.len(), true, |at, part, remote| {
            let part = &data[part];
            match remote {
                Some(memory) => memory.write(at, part).map_err(DmaError::remote(at)),
                None => Ok(self.view().write(at, part)?),
            }
        })
    }

    /// Accesses `length` bytes at `address`, a run of one kind at a time: its address, which of the
    /// bytes it has, and the remote memory if they are remote.
    fn each_run<F>(
        &self,
        address: u64,
        length: usize,
        writable: bool,
        mut access: F,
    ) -> Result<(), DmaError>
    where
        F: FnMut(u64, Range<usize>, Option<&dyn RemoteMemory>) -> Result<(), DmaError>,
    {
        let mut done = 0;
        while done < length {
            let at = address.wrapping_add(to_u64(done));
            let (run, remote) = self.run(at, length - done, writable)?;
            access(at, done..done + run, remote.as_deref())?;
            done += run;
        }
        Ok(())
    }

    /// How many of `length` bytes at `address` are of one kind, and the remote memory if they are
    /// remote. At least one.
    fn run(
        &self,
        address: u64,
        length: usize,
        writable: bool,
    ) -> Result<(usize, Option<Arc<dyn RemoteMemory>>), DmaError> {
        let wanted = to_u64(length);
        if !self.is_bus_master() {
            let length = wanted;
            return Err(AddressSpaceError::Unmapped { address, length }.into());
        }
        let remote = read(&self.remote);
        if let Some((range, bytes)) = remote
            .iter()
            .find_map(|r| Some((r, r.bytes_from(address)?)))
        {
            if writable && !range.writable {
                return Err(DmaError::ReadOnly {
                    address,
                    length: wanted,
                });
            }
            let run = to_usize(bytes.min(wanted));
            return Ok((run, Some(Arc::clone(&range.memory))));
        }
        let next = remote
            .iter()
            .map(|r| r.range.address)
            .filter(|&a| a > address);
        let until = next.min().map_or(u64::MAX, |start| start - address);
        let run = to_usize(until.min(wanted));
        Ok((run, None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::sync::Mutex;

    #[derive(Debug)]
    struct Messages(Mutex<Vec<u8>>);

    impl RemoteMemory for Messages {
        fn read(&self, address: u64, data: &mut [u8]) -> std::io::Result<()> {
            let at = usize::try_from(address - 0x2000).unwrap();
            data.copy_from_slice(&self.0.lock().unwrap()[at..at + data.len()]);
            Ok(())
        }

        fn write(&self, address: u64, data: &[u8]) -> std::io::Result<()> {
            let at = usize::try_from(address - 0x2000).unwrap();
            self.0.lock().unwrap()[at..at + data.len()].copy_from_slice(data);
            Ok(())
        }
    }

    fn space() -> Arc<DmaSpace> {
        let space = DmaSpace::new();
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 0x2000).unwrap();
        let file = Arc::new(file);
        let mapping = |address, target| DmaMapping {
            range: AddressRange::new(address, 0x1000),
            writable: true,
            target,
        };
        let at = |offset| DmaTarget::File {
            file: Arc::clone(&file),
            offset,
        };
        space.map(&mapping(0x1000, at(0))).unwrap();
        let remote = Arc::new(Messages(Mutex::new(vec![0; 0x1000])));
        space
            .map(&mapping(0x2000, DmaTarget::Remote(remote.clone())))
            .unwrap();
        space.map(&mapping(0x3000, at(0x1000))).unwrap();
        assert!(space.map(&mapping(0x2000, at(0))).is_err());
        assert!(
            space
                .map(&mapping(0x3000, DmaTarget::Remote(remote)))
                .is_err()
        );
        space
    }

    #[test]
    fn transfers_cross_mapped_and_remote_memory() {
        let space = space();
        let data: Vec<u8> = (0..0x1800_u32).map(|i| i.to_le_bytes()[0]).collect();
        space.write(0x1c00, &data).unwrap();
        let mut back = vec![0; data.len()];
        space.read(0x1c00, &mut back).unwrap();
        assert_eq!(data, back);
        assert!(space.write(0x3fff, &[0, 0]).is_err());
        assert!(space.read(0xfff, &mut [0]).is_err());
    }

    #[test]
    fn who_is_no_bus_master_reaches_nothing_that_is_mapped() {
        let space = space();
        let (view, before) = (space.view(), space.generation());
        space.set_bus_master(false);
        assert_ne!(before, space.generation());
        // Mapped, and by messages.
        for address in [0x1000, 0x2000, 0x3000] {
            assert!(space.read(address, &mut [0]).is_err());
            assert!(space.write(address, &[0]).is_err());
        }
        assert!(!space.is_mapped(0x1000, 1, false));
        assert_eq!(space.ranges().len(), 3);
        drop(view);
        space.unmap(AddressRange::new(0x3000, 0x1000)).unwrap();
        space.set_bus_master(true);
        space.write(0x1fff, &[1, 2]).unwrap();
        assert!(space.write(0x3000, &[0]).is_err());
        let before = space.generation();
        space.end_bus_master();
        assert_ne!(before, space.generation());
        space.set_bus_master(true);
        assert!(!space.is_mapped(0x1000, 1, false));
        assert!(space.write(0x1fff, &[1, 2]).is_err());
    }

    #[test]
    fn remote_memory_is_not_mapped_memory() {
        let space = space();
        assert!(space.is_mapped(0x1000, 0x1000, true));
        assert!(!space.is_mapped(0x1000, 0x1001, true));
        assert!(space.view().word(0x2000).is_err());
        let before = space.generation();
        space.unmap(AddressRange::new(0x2000, 0x1000)).unwrap();
        assert_ne!(before, space.generation());
        let left = [0x1000, 0x3000].map(|address| AddressRange::new(address, 0x1000));
        assert_eq!(space.ranges(), left);
        space.clear();
        assert!(space.ranges().is_empty());
    }
}
