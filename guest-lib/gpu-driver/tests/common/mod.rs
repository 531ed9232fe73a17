//! A device in this process, and the library that drives it.

use farlane_gpu::GpuSource;
use farlane_gpu_driver::{Bars, Gpu};
use farlane_pci::{Function, Region, Source as _};
use farlane_zero_copy::Mapping;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex};

/// Its video memory, in bytes.
pub const MEMORY: u64 = 8 << 20;

/// A function whose memory is mapped as a guest has it, and that can be taken away.
pub struct InProcess {
    function: Mutex<Option<Box<dyn Function>>>,
    memory: Mapping,
}

impl InProcess {
    /// Takes the device away: registers read as ones, and nothing is done any more.
    #[allow(dead_code)]
    pub fn take_away(&self) {
        let function = self.function.lock().unwrap().take();
        drop(function);
    }
}

// SAFETY: the mapping lives as long as the value, and is mapped once here.
unsafe impl Bars for InProcess {
    fn read32(&self, offset: u32) -> u32 {
        let mut data = [0xff; 4];
        if let Some(function) = &*self.function.lock().unwrap() {
            function
                .read(Region::Bar0, offset.into(), &mut data)
                .unwrap();
        }
        u32::from_le_bytes(data)
    }

    fn write32(&self, offset: u32, value: u32) {
        if let Some(function) = &*self.function.lock().unwrap() {
            function
                .write(Region::Bar0, offset.into(), &value.to_le_bytes())
                .unwrap();
        }
    }

    fn memory(&self) -> (*mut u8, usize) {
        (self.memory.base(), self.memory.len())
    }
}

/// A device.
pub fn bars() -> Arc<InProcess> {
    let source = GpuSource::new(MEMORY).unwrap();
    let attachment = source.attach().unwrap();
    let file = &attachment.areas[0].file;
    Arc::new(InProcess {
        memory: Mapping::new(file.as_fd(), 0, MEMORY, true).unwrap(),
        function: Mutex::new(Some(source.take(&attachment).unwrap())),
    })
}

/// A device in use.
pub fn gpu() -> Gpu {
    Gpu::with_bars(bars()).unwrap()
}
