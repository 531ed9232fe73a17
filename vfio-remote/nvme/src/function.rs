//! The controller in use, as its user reaches it.

use crate::bits::register::DOORBELLS;
use crate::controller::Controller;
use crate::counters::{Counters, count};
use crate::identify::Identity;
use crate::registers::Effect;
use crate::shared::{Notice, Shared};
use farlane_pci::emulated::{Claim, EmulatedFunction, InterruptLines, Model};
use farlane_pci::{Description, DmaSpace, Region};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

/// An NVMe controller in use.
pub type NvmeFunction = EmulatedFunction<Shared>;

/// Starts the worker. `rings` says whether doorbells arrive as messages, `liveness` is what stays
/// open for as long as anything is under way.
pub(crate) fn start(
    shared: Arc<Shared>,
    description: &Description,
    claim: Claim,
    rings: bool,
    liveness: Option<Arc<OwnedFd>>,
) -> io::Result<NvmeFunction> {
    let identity = Arc::clone(&shared.identity);
    let (started, report) = sync_channel(1);
    let function = NvmeFunction::start(shared, description, claim, "nvme", move |shared| {
        let shared = Arc::clone(shared);
        work(shared, identity, liveness.as_deref(), rings, &started);
    })?;
    match report.recv() {
        Ok(started) => started.map(|()| function),
        Err(_) => Err(io::Error::other("The worker has ended")),
    }
}

fn work(
    shared: Arc<Shared>,
    identity: Arc<Identity>,
    liveness: Option<&OwnedFd>,
    rings: bool,
    started: &SyncSender<io::Result<()>>,
) {
    farlane_worker::thread::prepare();
    match Controller::new(shared, identity, liveness, rings) {
        Ok(mut controller) => {
            let _ = started.send(Ok(()));
            controller.run();
        }
        Err(e) => {
            let _ = started.send(Err(e));
        }
    }
}

impl Model for Shared {
    type Counters = Counters;

    fn dma(&self) -> &DmaSpace {
        &self.dma
    }

    fn interrupts(&self) -> &InterruptLines<Counters> {
        &self.interrupts
    }

    fn read(&self, _: Region, offset: u64, data: &mut [u8]) -> Option<()> {
        if offset < DOORBELLS {
            self.registers().read(offset, data);
        } else {
            // What a doorbell reads as is not defined (3.1.24).
            data.fill(0);
        }
        Some(())
    }

    fn write(&self, _: Region, offset: u64, data: &[u8]) -> Option<()> {
        let Some(doorbell) = offset.checked_sub(DOORBELLS) else {
            let effect = self.registers().write(offset, data);
            match effect {
                Effect::None => (),
                Effect::Control => self.notify(Notice::Control),
                Effect::Pin => self.notify(Notice::Pin),
            }
            return Some(());
        };
        count(&self.counters.kicks, 1);
        if doorbell / 8 > u64::from(self.identity.io_queues) {
            self.notify(Notice::BadDoorbell);
        } else {
            self.doorbells.write(doorbell, data);
            self.sleep.wake();
        }
        Some(())
    }

    fn pin_changed(&self) {
        self.notify(Notice::Pin);
    }

    fn reset(&self) -> io::Result<()> {
        self.reset_and_wait()
    }

    fn stop(&self) {
        self.notify(Notice::Stop);
    }

    fn ended(&self) {
        self.end();
    }
}
