//! Virtqueues of the device, and the memory that they lie in.

use farlane_sys::sync::{held, lock};
use farlane_vhost_user::call::Call;
use farlane_vhost_user::session::Setup;
use farlane_vhost_user::vring::resume_at;
use farlane_zero_copy::AddressSpace;
use farlane_zero_copy::fault::CoveredMemory;
use std::io;
use std::sync::{Arc, Mutex};
use vhost_user_backend::{VringMutex, VringT as _};
use virtio_queue::{DescriptorChain, Error as QueueError, QueueOwnedT as _};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

/// Memory of a VM as the queues of a device see it.
pub type VmMemory = GuestMemoryAtomic<GuestMemoryMmap>;
/// One state of it.
pub type Memory = <VmMemory as GuestAddressSpace>::T;
/// A buffer of a queue.
pub type Chain = DescriptorChain<Memory>;

/// The memory of one VM for the queues of its device: as the VMM has shared it, but only once it is
/// [covered](farlane_zero_copy::fault), since whoever has shared it can take it back.
#[derive(Debug)]
pub struct QueueMemory {
    memory: VmMemory,
    /// Its present state, and earlier ones that somebody may still touch.
    covered: Mutex<Vec<(CoveredMemory, Arc<GuestMemoryMmap>)>>,
}

impl Default for QueueMemory {
    fn default() -> Self {
        Self {
            memory: VmMemory::new(GuestMemoryMmap::new()),
            covered: Mutex::default(),
        }
    }
}

impl QueueMemory {
    /// The present state, whenever one asks.
    #[must_use]
    pub fn memory(&self) -> &VmMemory {
        &self.memory
    }

    /// The VMM has shared this in place of what was.
    ///
    /// # Errors
    /// There are too many mappings; nothing has changed then.
    pub fn replace(&self, memory: &GuestMemoryMmap) -> io::Result<()> {
        let full = || io::Error::from(io::ErrorKind::OutOfMemory);
        let covered = CoveredMemory::new(memory).ok_or_else(full)?;
        let mut states = lock(&self.covered);
        let guard = held(self.memory.lock());
        guard.replace(memory.clone());
        states.push((covered, self.memory.memory().into_inner()));
        // Nobody has it any more, and nobody can get it.
        states.retain(|(_, state)| Arc::strong_count(state) > 1);
        Ok(())
    }
}

/// A queue that is served.
pub struct Ring {
    vring: VringMutex<VmMemory>,
    size: u16,
    memory: VmMemory,
    space: Arc<AddressSpace>,
    call: Arc<Call>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl Ring {
    /// A queue in `memory`, which starts now.
    ///
    /// # Errors
    /// Its addresses are not aligned, or no memory.
    pub fn start(memory: &VmMemory, setup: &Setup) -> Result<Self, QueueError> {
        let layout = &setup.layout;
        let vring = VringMutex::new(memory.clone(), layout.size)?;
        vring.set_queue_info(layout.descriptors, layout.available, layout.used)?;
        vring.set_queue_event_idx(setup.event_index);
        let used = vring.queue_used_idx()?;
        vring.set_queue_next_avail(resume_at(setup.next_available, used, layout.size));
        vring.set_queue_next_used(used);
        vring.set_queue_ready(true);
        Ok(Self {
            vring,
            size: layout.size,
            memory: memory.clone(),
            space: Arc::clone(&setup.space),
            call: Arc::clone(&setup.call),
        })
    }

    /// Entries of the queue.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Running number of the first buffer that was not taken.
    #[must_use]
    pub fn next_available(&self) -> u16 {
        self.vring.queue_next_avail()
    }

    /// The VM's memory, for regions.
    #[must_use]
    pub fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    /// The VM's memory as it is now, for buffers.
    #[must_use]
    pub fn memory(&self) -> Memory {
        self.memory.memory()
    }

    /// Takes the next buffer.
    ///
    /// # Errors
    /// The driver's words make no sense.
    pub fn take(&self) -> Result<Option<Chain>, QueueError> {
        let mut vring = self.vring.get_mut();
        let mut chains = vring.get_queue_mut().iter(self.memory())?;
        Ok(chains.next())
    }

    /// Gives a buffer back in which `written` bytes were written. Says whether that was possible.
    pub fn put(&self, head: u16, written: usize) -> bool {
        // Beyond the queue, or where the used ring is no memory there is nobody to give it to.
        let written = u32::try_from(written);
        head < self.size && written.is_ok_and(|bytes| self.vring.add_used(head, bytes).is_ok())
    }

    /// Tells the driver of buffers that were given back, if it wants to be told.
    pub fn tell(&self) {
        if self.vring.needs_notification().unwrap_or(true) {
            self.call.signal();
        }
    }

    /// Asks the driver to tell of buffers. Says whether there are some of which it will not tell.
    pub fn ask_to_be_told(&self) -> bool {
        // Fails where the queue's addresses are no memory, and then there is no buffer.
        self.vring.enable_notification().unwrap_or(false)
    }

    /// Buffers will be found without being told.
    pub fn will_look(&self) {
        let _ = self.vring.disable_notification();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{FileOffset, GuestAddress};

    #[test]
    fn memory_is_covered_as_long_as_somebody_may_touch_it() {
        let table = || {
            let file = tempfile::tempfile().unwrap();
            file.set_len(4096).unwrap();
            let ram = [(GuestAddress(0), 4096, Some(FileOffset::new(file, 0)))];
            GuestMemoryMmap::from_ranges_with_files(ram).unwrap()
        };
        let memory = QueueMemory::default();
        let states = || memory.covered.lock().unwrap().len();
        for _ in 0..3 {
            memory.replace(&table()).unwrap();
            assert_eq!(states(), 1);
        }
        let held = memory.memory().memory();
        memory.replace(&table()).unwrap();
        memory.replace(&table()).unwrap();
        assert_eq!(states(), 2);
        drop(held);
        memory.replace(&table()).unwrap();
        assert_eq!(states(), 1);
    }
}
