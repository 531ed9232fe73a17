//! Device memory that other backends of the VM publish.

use farlane_sys::chain;
use farlane_sys::sync::lock;
use farlane_zero_copy::AddressSpace;
use farlane_zero_copy::broker::{Publication, Subscriber};
use std::collections::HashMap;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex};

/// What one publisher publishes, as a part of the device memory of the VM.
#[derive(Debug)]
pub struct DeviceMemory {
    space: Arc<AddressSpace>,
    /// Address and bytes of what has become a part of `space`.
    held: Mutex<HashMap<u64, (u64, u64)>>,
}

impl DeviceMemory {
    /// Nothing yet.
    #[must_use]
    pub fn new(space: Arc<AddressSpace>) -> Arc<Self> {
        Arc::new(Self {
            space,
            held: Mutex::default(),
        })
    }
}

impl Subscriber for DeviceMemory {
    fn published(&self, id: u64, publication: Publication) {
        let Publication {
            address,
            length,
            writable,
            file,
            ..
        } = publication;
        let Some((file, offset)) = file else {
            log::info!(
                "{length:#x} bytes of device memory at {address:#x} cannot be reached from here"
            );
            return;
        };
        match self
            .space
            .map(address, length, file.as_fd(), offset, writable)
        {
            Ok(()) => {
                log::info!("{length:#x} bytes of device memory at {address:#x}");
                let mut held = lock(&self.held);
                held.insert(id, (address, length));
            }
            Err(e) => log::warn!("Device memory is not used: {}", chain(&e)),
        }
    }

    fn revoked(&self, id: u64) {
        let mine = {
            let mut held = lock(&self.held);
            held.remove(&id)
        };
        let Some((address, length)) = mine else {
            return;
        };
        // Waits for requests under way.
        match self.space.unmap(address, length) {
            Ok(()) => log::info!("{length:#x} bytes of device memory at {address:#x} are gone"),
            Err(e) => log::error!("Device memory is not there: {}", chain(&e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn memory_comes_and_goes_and_what_overlaps_is_left_out() {
        let space = AddressSpace::of_devices();
        let [one, two] = [0, 1].map(|_| DeviceMemory::new(Arc::clone(&space)));
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 0x4000).unwrap();
        let file = Arc::new(fd);
        let publication = |address, length, file| Publication {
            address,
            length,
            writable: true,
            node: None,
            file,
            origin: None,
        };
        one.published(
            1,
            publication(0x10000, 0x2000, Some((Arc::clone(&file), 0))),
        );
        two.published(
            1,
            publication(0x11000, 0x1000, Some((Arc::clone(&file), 0))),
        );
        one.published(2, publication(0x20000, 0x1000, None));
        assert_eq!(space.ranges().len(), 1);
        // Not its memory.
        two.revoked(1);
        one.revoked(2);
        assert_eq!(space.ranges().len(), 1);
        one.revoked(1);
        assert!(space.ranges().is_empty());
    }
}
