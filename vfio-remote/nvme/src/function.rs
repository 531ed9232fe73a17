//! The controller in use, as its user reaches it.

use crate::bits::PAGE;
use crate::controller::Controller;
use crate::counters::{Counters, count};
use crate::doorbells::DoorbellPage;
use crate::identify::Identity;
use crate::registers::Effect;
use crate::shared::{Notice, Shared};
use crate::source::{BAR_BYTES, DOORBELLS, Lease, MSIX_PENDING, MSIX_TABLE};
use farlane_pci::{AccessError, DmaMapping, Function, InterruptKind, Region, Signal};
use farlane_sys::sync::lock;
use farlane_worker::timeslice;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes of an entry of the MSI-X table (PCI 3.0, 6.8.2.6).
const MSIX_ENTRY_BYTES: usize = 16;

/// The shortest slice that Linux gives (6.12).
const SLICE: Duration = Duration::from_micros(100);

/// Bytes of configuration space of a PCI Express function.
const CONFIG_BYTES: u64 = 4096;

/// An NVMe controller in use.
#[derive(Debug)]
pub struct NvmeFunction {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
    /// The MSI-X table, which nobody looks at: who virtualises interrupts keeps his own.
    table: Mutex<Vec<u8>>,
    /// Configuration space after a reset. What of it whoever uses the function does not virtualise
    /// never changes.
    config: Vec<u8>,
    io_queues: u16,
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

impl NvmeFunction {
    /// Starts the worker. `rings` says whether doorbells arrive as messages, `config` is the
    /// configuration space, `link` what stays open for as long as anything is under way.
    pub(crate) fn start(
        doorbells: DoorbellPage,
        rings: bool,
        config: Vec<u8>,
        identity: Arc<Identity>,
        counters: Arc<Counters>,
        link: Option<Arc<OwnedFd>>,
        lease: Lease,
    ) -> io::Result<Self> {
        let vectors = identity.io_queues + 1;
        let shared = Arc::new(Shared::new(doorbells, Arc::clone(&identity), counters)?);
        let (started, report) = sync_channel(1);
        let worker = std::thread::Builder::new().name("nvme".into()).spawn({
            let shared = Arc::clone(&shared);
            move || {
                let _ended = Ended(Arc::clone(&shared));
                work(shared, identity, link.as_deref(), rings, &started);
            }
        })?;
        let function = Self::over(shared, Some(worker), config, vectors, lease);
        match report.recv() {
            Ok(Ok(())) => Ok(function),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(io::Error::other("The worker has ended")),
        }
    }

    fn over(
        shared: Arc<Shared>,
        worker: Option<JoinHandle<()>>,
        config: Vec<u8>,
        vectors: u16,
        lease: Lease,
    ) -> Self {
        let mut table = vec![0; usize::from(vectors) * MSIX_ENTRY_BYTES];
        // Masked, each (PCI 3.0, 6.8.2.9).
        for entry in table.chunks_exact_mut(MSIX_ENTRY_BYTES) {
            entry[12] = 1;
        }
        Self {
            shared,
            worker,
            table: Mutex::new(table),
            config,
            io_queues: vectors - 1,
            _lease: lease,
        }
    }

    /// A function whose controller is given its turns by the caller.
    pub(crate) fn still(
        doorbells: DoorbellPage,
        config: Vec<u8>,
        identity: Arc<Identity>,
        counters: Arc<Counters>,
        lease: Lease,
    ) -> io::Result<(Self, Controller)> {
        let vectors = identity.io_queues + 1;
        let shared = Arc::new(Shared::new(doorbells, Arc::clone(&identity), counters)?);
        let controller = Controller::new(Arc::clone(&shared), identity, None, true)?;
        Ok((Self::over(shared, None, config, vectors, lease), controller))
    }

    fn check(region: Region, offset: u64, length: usize) -> Result<(), AccessError> {
        let bytes = match region {
            Region::Bar0 => BAR_BYTES,
            Region::Config => CONFIG_BYTES,
            _ => 0,
        };
        let end = u64::try_from(length)
            .ok()
            .and_then(|length| offset.checked_add(length));
        if end.is_some_and(|end| end <= bytes) {
            return Ok(());
        }
        Err(AccessError::Region {
            region,
            offset,
            length,
        })
    }

    fn write_table(&self, offset: u64, data: &[u8]) {
        let mut table = lock(&self.table);
        for (at, byte) in (offset..).zip(data) {
            if let Some(place) = usize::try_from(at).ok().and_then(|at| table.get_mut(at)) {
                *place = *byte;
            }
        }
    }
}

fn work(
    shared: Arc<Shared>,
    identity: Arc<Identity>,
    link: Option<&OwnedFd>,
    rings: bool,
    started: &std::sync::mpsc::SyncSender<io::Result<()>>,
) {
    // Naps are meant as they are said, and a woken worker is not to wait for the end of others'
    // time slices. What works without is slower, no more.
    let _ = crate::timing::set_timer_slack();
    if let Err(e) = timeslice::request(SLICE) {
        log::debug!("No short time slices: {e}");
    }
    let controller = Controller::new(shared, identity, link, rings);
    match controller {
        Ok(mut controller) => {
            let _ = started.send(Ok(()));
            controller.run();
        }
        Err(e) => {
            let _ = started.send(Err(e));
        }
    }
}

/// Copies what `from` has at `offset`; zeroes where it has nothing.
fn copy_from(from: &[u8], offset: u64, data: &mut [u8]) {
    for (at, byte) in (offset..).zip(data) {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        *byte = from.get(at).copied().unwrap_or(0);
    }
}

impl Function for NvmeFunction {
    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        Self::check(region, offset, data.len())?;
        if region == Region::Config {
            copy_from(&self.config, offset, data);
            return Ok(());
        }
        match offset / PAGE * PAGE {
            0 => self.shared.registers().read(offset, data),
            MSIX_TABLE => {
                let table = lock(&self.table);
                copy_from(&table, offset - MSIX_TABLE, data);
            }
            MSIX_PENDING => {
                let bits = self.shared.interrupts.pending_bits();
                copy_from(&bits, offset - MSIX_PENDING, data);
            }
            // What a doorbell reads as is not defined (3.1.24).
            _ => data.fill(0),
        }
        Ok(())
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        Self::check(region, offset, data.len())?;
        if region == Region::Config {
            // Nothing that a write would change has a meaning without a bus of its own.
            return Ok(());
        }
        match offset / PAGE * PAGE {
            0 => {
                let effect = self.shared.registers().write(offset, data);
                match effect {
                    Effect::None => (),
                    Effect::Control => self.shared.notify(Notice::Control),
                    Effect::Pin => self.shared.notify(Notice::Pin),
                }
            }
            DOORBELLS => {
                count(&self.shared.counters.kicks, 1);
                let queue = (offset - DOORBELLS) / 8;
                if queue > u64::from(self.io_queues) {
                    self.shared.notify(Notice::BadDoorbell);
                } else {
                    self.shared.doorbells.write(offset - DOORBELLS, data);
                    self.shared.sleep.wake();
                }
            }
            MSIX_TABLE => self.write_table(offset - MSIX_TABLE, data),
            // Pending bits are read-only.
            _ => (),
        }
        Ok(())
    }

    fn set_interrupt(
        &self,
        kind: InterruptKind,
        vector: u16,
        signal: Option<Arc<dyn Signal>>,
    ) -> Result<(), AccessError> {
        self.shared.interrupts.set(kind, vector, signal)?;
        if kind == InterruptKind::Intx {
            self.shared.notify(Notice::Pin);
        }
        Ok(())
    }

    fn mask_intx(&self, masked: bool) -> Result<(), AccessError> {
        self.shared.interrupts.mask_pin(masked);
        if !masked {
            self.shared.notify(Notice::Pin);
        }
        Ok(())
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

impl Drop for NvmeFunction {
    fn drop(&mut self) {
        self.shared.notify(Notice::Stop);
        if let Some(worker) = self.worker.take()
            && worker.join().is_err()
        {
            log::error!("The controller's worker has panicked");
        }
        self.shared.dma.clear();
    }
}
