//! Functions that are modelled in software: what is the same for each of them.
//!
//! A [`Model`] is what the driver's registers do, and a worker. [`EmulatedFunction`] makes a
//! [`Function`] of it: configuration space, MSI-X table and pending bits, interrupts, memory, and
//! the end of the worker.

mod interrupts;

pub use interrupts::InterruptLines;

use crate::{
    AccessError, AddressRange, Description, DmaMapping, DmaSpace, Function, InterruptVector,
    Region, Signal,
};
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
use farlane_sys::thread::OwnedThread;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Where the MSI-X table lies in BAR 0. What lies before it is the model's.
pub const MSIX_TABLE: u32 = 0x2000;
/// Where its pending bits lie in BAR 0, which ends a page later.
pub const MSIX_PENDING: u32 = 0x3000;
/// Bytes of BAR 0.
pub const BAR0_BYTES: u64 = 0x4000;

/// Bytes of an entry of the MSI-X table (PCI 3.0, 6.8.2.6).
const MSIX_ENTRY_BYTES: usize = 16;
/// Its byte with the mask bit (PCI 3.0, 6.8.2.9).
const MSIX_VECTOR_CONTROL: usize = 12;

/// Reads registers of 32 bits: `dword` has the one at a multiple of 4.
pub fn read_dwords(offset: u64, data: &mut [u8], dword: impl Fn(u64) -> u32) {
    for (at, byte) in (offset..).zip(data) {
        *byte = dword(at & !3).to_le_bytes()[to_usize(at % 4)];
    }
}

/// The state of a function in use, which its users and its worker share.
pub trait Model: Send + Sync + 'static {
    /// What it counts.
    type Counters: Send + Sync;

    /// The memory that it reaches.
    fn dma(&self) -> &DmaSpace;

    /// Its interrupts.
    fn interrupts(&self) -> &InterruptLines<Self::Counters>;

    /// Reads registers of BAR 0 before [`MSIX_TABLE`], or bytes of another BAR. None where there
    /// are none.
    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Option<()>;

    /// Writes there. None as above.
    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Option<()>;

    /// The pin goes elsewhere, or is not masked any more.
    fn pin_changed(&self) {}

    /// Function-level reset.
    ///
    /// # Errors
    /// The worker has ended, or memory cannot be cleared.
    fn reset(&self) -> io::Result<()>;

    /// The worker is to end.
    fn stop(&self);

    /// The worker has ended, however it did.
    fn ended(&self);

    /// The function is given back: nothing uses it any more.
    fn clear(&self) {}
}

/// A [`Model`] in use.
#[derive(Debug)]
pub struct EmulatedFunction<M: Model> {
    model: Arc<M>,
    worker: Option<OwnedThread>,
    /// The MSI-X table, which nobody looks at: who virtualises interrupts keeps his own.
    table: Mutex<Vec<u8>>,
    /// Its configuration space is that after a reset. What of it whoever uses the function does
    /// not virtualise never changes.
    description: Description,
    /// Goes last.
    _claim: Claim,
}

/// Tells the model that its worker has ended, however it does.
struct End<M: Model>(Arc<M>);

impl<M: Model> Drop for End<M> {
    fn drop(&mut self) {
        self.0.ended();
    }
}

impl<M: Model> EmulatedFunction<M> {
    /// A function whose worker is a new thread that does `work`, until [`Model::stop`].
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        model: Arc<M>,
        description: &Description,
        claim: Claim,
        name: &str,
        work: impl FnOnce(&Arc<M>) + Send + 'static,
    ) -> io::Result<Self> {
        let end = End(Arc::clone(&model));
        let worker = OwnedThread::spawn(name, move || work(&end.0))?;
        let mut function = Self::without_worker(model, description, claim);
        function.worker = Some(worker);
        Ok(function)
    }

    /// A function whose worker is the caller.
    #[must_use]
    pub fn without_worker(model: Arc<M>, description: &Description, claim: Claim) -> Self {
        let mut table = vec![0; usize::from(description.interrupts.msix) * MSIX_ENTRY_BYTES];
        for entry in table.chunks_exact_mut(MSIX_ENTRY_BYTES) {
            entry[MSIX_VECTOR_CONTROL] = 1;
        }
        Self {
            model,
            worker: None,
            table: Mutex::new(table),
            description: description.clone(),
            _claim: claim,
        }
    }

    /// What a region has at an offset.
    fn at(&self, region: Region, offset: u64, length: usize) -> Result<Place, AccessError> {
        if !self.description.contains(region, offset, length) {
            return Err(AccessError::region(region, offset, length));
        }
        let [table, pending] = [MSIX_TABLE, MSIX_PENDING].map(u64::from);
        Ok(match region {
            Region::Config => Place::Config,
            Region::Bar0 if offset >= pending => Place::Pending(offset - pending),
            Region::Bar0 if offset >= table => Place::Table(offset - table),
            _ => Place::Model,
        })
    }
}

/// What is accessed, and at which offset in it.
enum Place {
    Config,
    Table(u64),
    Pending(u64),
    Model,
}

/// Copies what `from` has at `offset`; zeroes where it has nothing.
fn copy_from(from: &[u8], offset: u64, data: &mut [u8]) {
    let there = from.get(to_usize(offset)..).unwrap_or(&[]);
    let (known, rest) = data.split_at_mut(there.len().min(data.len()));
    known.copy_from_slice(&there[..known.len()]);
    rest.fill(0);
}

impl<M: Model> Function for EmulatedFunction<M> {
    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        match self.at(region, offset, data.len())? {
            Place::Config => copy_from(&self.description.config, offset, data),
            Place::Table(at) => copy_from(&lock(&self.table), at, data),
            Place::Pending(at) => copy_from(&self.model.interrupts().pending_bits(), at, data),
            Place::Model => {
                let refusal = AccessError::region(region, offset, data.len());
                self.model.read(region, offset, data).ok_or(refusal)?;
            }
        }
        Ok(())
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        match self.at(region, offset, data.len())? {
            // Nothing that a write would change has a meaning without a bus of its own; pending
            // bits are read-only.
            Place::Config | Place::Pending(_) => {}
            Place::Table(at) => {
                let mut table = lock(&self.table);
                for (at, byte) in (at..).zip(data) {
                    if let Some(place) = usize::try_from(at).ok().and_then(|at| table.get_mut(at)) {
                        *place = *byte;
                    }
                }
            }
            Place::Model => {
                let refusal = AccessError::region(region, offset, data.len());
                self.model.write(region, offset, data).ok_or(refusal)?;
            }
        }
        Ok(())
    }

    fn set_interrupt(
        &self,
        vector: InterruptVector,
        signal: Option<Arc<dyn Signal>>,
    ) -> Result<(), AccessError> {
        self.model.interrupts().set(vector, signal)?;
        if vector == InterruptVector::Intx {
            self.model.pin_changed();
        }
        Ok(())
    }

    fn mask_intx(&self, masked: bool) -> Result<(), AccessError> {
        self.model.interrupts().mask_pin(masked)?;
        if !masked {
            self.model.pin_changed();
        }
        Ok(())
    }

    fn set_bus_master(&self, may: bool) -> Result<(), AccessError> {
        self.model.dma().set_bus_master(may);
        Ok(())
    }

    fn end_bus_master(&self) -> Result<(), AccessError> {
        self.model.dma().end_bus_master();
        Ok(())
    }

    fn map(&self, mapping: DmaMapping) -> Result<(), AccessError> {
        self.model.dma().map(&mapping)
    }

    fn unmap(&self, range: AddressRange) -> Result<(), AccessError> {
        self.model.dma().unmap(range)
    }

    fn reset(&self) -> Result<(), AccessError> {
        Ok(self.model.reset()?)
    }
}

impl<M: Model> Drop for EmulatedFunction<M> {
    fn drop(&mut self) {
        self.model.stop();
        drop(self.worker.take());
        self.model.dma().clear();
        self.model.clear();
    }
}

/// The right to use a device that is used by one at a time.
#[derive(Debug)]
pub struct Claim(Arc<AtomicBool>);

impl Claim {
    /// Claims it. None while another claim of `in_use` lives.
    #[must_use]
    pub fn new(in_use: &Arc<AtomicBool>) -> Option<Self> {
        (!in_use.swap(true, Ordering::SeqCst)).then(|| Self(Arc::clone(in_use)))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
