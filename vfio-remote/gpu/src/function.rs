//! The GPU in use, as its user reaches it.

use crate::counters::{Counters, count};
use crate::memory::VideoMemory;
use crate::shared::Shared;
use crate::source::{Lease, MSIX_PENDING, MSIX_TABLE};
use crate::worker::work;
use farlane_abi::PAGE_BYTES;
use farlane_abi::gpu::{REGISTER_BYTES, VECTORS};
use farlane_pci::{AccessError, DmaMapping, Function, InterruptKind, Region, Signal};
use farlane_sys::sync::lock;
use std::io;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Bytes of an entry of the MSI-X table (PCI 3.0, 6.8.2.6).
const MSIX_ENTRY_BYTES: usize = 16;
const TABLE_BYTES: usize = VECTORS as usize * MSIX_ENTRY_BYTES;

/// A GPU in use.
#[derive(Debug)]
pub struct GpuFunction {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
    /// The MSI-X table, which nobody looks at: who virtualises interrupts keeps his own.
    table: Mutex<[u8; TABLE_BYTES]>,
    /// Configuration space after a reset. What of it whoever uses the function does not virtualise
    /// never changes.
    config: Vec<u8>,
    /// Goes last.
    _lease: Lease,
}

/// Tells those who wait for the worker that it has ended, however it does.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl GpuFunction {
    /// Clears video memory and starts the worker.
    pub(crate) fn start(
        memory: VideoMemory,
        config: Vec<u8>,
        counters: Arc<Counters>,
        lease: Lease,
    ) -> io::Result<Self> {
        memory.clear()?;
        let shared = Arc::new(Shared::new(memory, counters));
        let worker = std::thread::Builder::new().name("gpu".into()).spawn({
            let ended = Ended(Arc::clone(&shared));
            move || work(&ended.0)
        })?;
        Ok(Self::over(shared, Some(worker), config, lease))
    }

    /// A function whose worker is the caller.
    pub(crate) fn still(
        memory: VideoMemory,
        config: Vec<u8>,
        counters: Arc<Counters>,
        lease: Lease,
    ) -> io::Result<(Self, Arc<Shared>)> {
        memory.clear()?;
        let shared = Arc::new(Shared::new(memory, counters));
        let function = Self::over(Arc::clone(&shared), None, config, lease);
        Ok((function, shared))
    }

    fn over(
        shared: Arc<Shared>,
        worker: Option<JoinHandle<()>>,
        config: Vec<u8>,
        lease: Lease,
    ) -> Self {
        let mut table = [0; TABLE_BYTES];
        // Masked, each (PCI 3.0, 6.8.2.9).
        for entry in table.chunks_exact_mut(MSIX_ENTRY_BYTES) {
            entry[12] = 1;
        }
        Self {
            shared,
            worker,
            table: Mutex::new(table),
            config,
            _lease: lease,
        }
    }
}

/// Whether an access lies in a region of so many bytes.
fn lies_in(size: u64, offset: u64, length: usize) -> bool {
    u64::try_from(length)
        .ok()
        .and_then(|length| offset.checked_add(length))
        .is_some_and(|end| end <= size)
}

/// Copies what `from` has at `offset`; zeroes where it has nothing.
fn copy_from(from: &[u8], offset: u64, data: &mut [u8]) {
    for (at, byte) in (offset..).zip(data) {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        *byte = from.get(at).copied().unwrap_or(0);
    }
}

impl Function for GpuFunction {
    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        let outside = AccessError::Region {
            region,
            offset,
            length: data.len(),
        };
        match region {
            Region::Config if lies_in(4096, offset, data.len()) => {
                copy_from(&self.config, offset, data);
            }
            Region::Bar0 if lies_in(REGISTER_BYTES, offset, data.len()) => {
                match offset / PAGE_BYTES * PAGE_BYTES {
                    0 => self.shared.read(offset, data),
                    MSIX_TABLE => {
                        let table = lock(&self.table);
                        copy_from(&*table, offset - MSIX_TABLE, data);
                    }
                    MSIX_PENDING => {
                        let bits = [self.shared.interrupts.pending_bits()];
                        copy_from(&bits, offset - MSIX_PENDING, data);
                    }
                    _ => data.fill(0),
                }
            }
            Region::Bar2 => {
                count(&self.shared.counters.message_bytes, data.len());
                return self.shared.memory.read_message(offset, data).ok_or(outside);
            }
            _ => return Err(outside),
        }
        Ok(())
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let outside = AccessError::Region {
            region,
            offset,
            length: data.len(),
        };
        match region {
            // Nothing that a write would change has a meaning without a bus of its own.
            Region::Config if lies_in(4096, offset, data.len()) => (),
            Region::Bar0 if lies_in(REGISTER_BYTES, offset, data.len()) => {
                match offset / PAGE_BYTES * PAGE_BYTES {
                    0 => self.shared.write(offset, data),
                    MSIX_TABLE => {
                        let mut table = lock(&self.table);
                        for (at, byte) in (offset - MSIX_TABLE..).zip(data) {
                            let at = usize::try_from(at).unwrap_or(usize::MAX);
                            if let Some(place) = table.get_mut(at) {
                                *place = *byte;
                            }
                        }
                    }
                    // Pending bits are read-only.
                    _ => (),
                }
            }
            Region::Bar2 => {
                count(&self.shared.counters.message_bytes, data.len());
                return self
                    .shared
                    .memory
                    .write_message(offset, data)
                    .ok_or(outside);
            }
            _ => return Err(outside),
        }
        Ok(())
    }

    fn set_interrupt(
        &self,
        kind: InterruptKind,
        vector: u16,
        signal: Option<Arc<dyn Signal>>,
    ) -> Result<(), AccessError> {
        self.shared.interrupts.set(kind, vector, signal)
    }

    fn mask_intx(&self, _masked: bool) -> Result<(), AccessError> {
        Err(AccessError::Interrupt {
            kind: InterruptKind::Intx,
            vector: 0,
        })
    }

    fn set_bus_master(&self, may: bool) -> Result<(), AccessError> {
        self.shared.dma.set_bus_master(may);
        Ok(())
    }

    fn end_bus_master(&self) -> Result<(), AccessError> {
        self.shared.dma.end_bus_master();
        Ok(())
    }

    fn map(&self, mapping: DmaMapping) -> Result<(), AccessError> {
        self.shared.dma.map(&mapping)
    }

    fn unmap(&self, address: u64, length: u64) -> Result<(), AccessError> {
        self.shared.dma.unmap(address, length)
    }

    fn reset(&self) -> Result<(), AccessError> {
        Ok(self.shared.reset()?)
    }
}

impl Drop for GpuFunction {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(worker) = self.worker.take()
            && worker.join().is_err()
        {
            log::error!("The GPU's worker has panicked");
        }
        self.shared.dma.clear();
        if let Err(e) = self.shared.memory.clear() {
            log::error!("Cannot clear video memory: {e}");
        }
    }
}
