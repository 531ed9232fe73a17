//! The GPU in use, as its user reaches it.

use crate::counters::{Counters, count};
use crate::shared::Shared;
use farlane_abi::PAGE_BYTES;
use farlane_pci::emulated::{EmulatedFunction, InterruptLines, Model};
use farlane_pci::{DmaSpace, Region};

/// A GPU in use.
pub type GpuFunction = EmulatedFunction<Shared>;

impl Model for Shared {
    type Counters = Counters;

    fn dma(&self) -> &DmaSpace {
        &self.dma
    }

    fn interrupts(&self) -> &InterruptLines<Counters> {
        &self.interrupts
    }

    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Option<()> {
        match region {
            Region::Bar0 if offset < PAGE_BYTES => self.read_registers(offset, data),
            Region::Bar0 => data.fill(0),
            _ => {
                count(&self.counters.message_bytes, data.len());
                return self.memory.read_message(offset, data);
            }
        }
        Some(())
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Option<()> {
        match region {
            Region::Bar0 if offset < PAGE_BYTES => self.write_register(offset, data),
            Region::Bar0 => {}
            _ => {
                count(&self.counters.message_bytes, data.len());
                return self.memory.write_message(offset, data);
            }
        }
        Some(())
    }

    fn reset(&self) -> std::io::Result<()> {
        self.reset_all()
    }

    fn stop(&self) {
        self.stop_worker();
    }

    fn ended(&self) {
        self.worker_ended();
    }

    fn clear(&self) {
        if let Err(e) = self.memory.clear() {
            log::error!("Cannot clear video memory: {e}");
        }
    }
}
