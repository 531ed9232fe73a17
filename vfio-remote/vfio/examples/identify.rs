//! Has a physical NVMe controller, bound to vfio-pci, write its identity into an NTB's window, and
//! so into the memory of another host: DMA, a completion and an interrupt without a driver.
//!
//! `identify 0000:01:00.0 0000:00:05.0`: the controller, and an `ivshmem-plain` function.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use farlane_ntb::{IvshmemNtb, Ntb as _};
use farlane_pci::{
    AddressRange, DmaMapping, DmaTarget, Function, InterruptVector, Region, Signal, Source as _,
};
use farlane_vfio::VfioSource;
use farlane_zero_copy::{Mapping, SharedMemory};

const PATIENCE: Duration = Duration::from_secs(10);

// Where things are in the window, and so for the controller.
const SUBMISSION: u32 = 0;
const COMPLETION: u32 = 0x1000;
const DATA: u32 = 0x2000;

// Registers, NVM Express 1.4, 3.1.
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELL: u64 = 0x1000;

/// Interrupts that have come.
#[derive(Debug, Default)]
struct Bell {
    rings: Mutex<u32>,
    rung: Condvar,
}

impl Signal for Bell {
    fn raise(&self) {
        if let Ok(mut rings) = self.rings.lock() {
            *rings += 1;
        }
        self.rung.notify_all();
    }
}

impl Bell {
    fn wait(&self) -> Result<()> {
        let Ok(rings) = self.rings.lock() else {
            bail!("An interrupt panicked");
        };
        let (_rings, timeout) = self
            .rung
            .wait_timeout_while(rings, PATIENCE, |rings| *rings == 0)
            .ok()
            .context("An interrupt panicked")?;
        ensure!(!timeout.timed_out(), "There was no interrupt");
        Ok(())
    }
}

struct Controller<'a>(&'a dyn Function);

impl Controller<'_> {
    fn read(&self, register: u64) -> Result<u32> {
        let mut bytes = [0; 4];
        self.0.read(Region::Bar0, register, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write(&self, register: u64, value: u32) -> Result<()> {
        Ok(self.0.write(Region::Bar0, register, &value.to_le_bytes())?)
    }

    fn write_wide(&self, register: u64, value: u32) -> Result<()> {
        let bytes = u64::from(value).to_le_bytes();
        Ok(self.0.write(Region::Bar0, register, &bytes)?)
    }

    fn wait_ready(&self, ready: u32) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while self.read(CSTS)? & 1 != ready {
            ensure!(Instant::now() < end, "The controller does not answer");
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// The word at a place of the window.
fn word(window: &SharedMemory, at: u32) -> Result<&AtomicU32> {
    Ok(window.word(usize::try_from(at)?)?)
}

/// Asks for the controller's identity; returns its model.
fn identify(function: &dyn Function, window: &SharedMemory, bell: &Bell) -> Result<String> {
    let controller = Controller(function);
    controller.write(CC, 0)?;
    controller.wait_ready(0)?;
    let zero = vec![0; 0x4000];
    window.write_bytes(0, &zero)?;
    controller.write(AQA, 7 << 16 | 7)?;
    controller.write_wide(ASQ, SUBMISSION)?;
    controller.write_wide(ACQ, COMPLETION)?;
    // Entries of 64 and 16 bytes, enabled.
    controller.write(CC, 6 << 16 | 4 << 20 | 1)?;
    controller.wait_ready(1)?;
    // Identify (6), command 1, to DATA, the controller (CNS 1).
    for (at, value) in [(0, 1 << 16 | 6_u32), (24, DATA), (40, 1)] {
        word(window, SUBMISSION + at)?.store(value.to_le(), Ordering::Release);
    }
    controller.write(DOORBELL, 1)?;
    bell.wait()?;
    let status = u32::from_le(word(window, COMPLETION + 12)?.load(Ordering::Acquire));
    ensure!(status == 1 << 16 | 1, "The command ended with {status:#x}");
    let mut model = [0; 40];
    window.read_bytes(usize::try_from(DATA + 24)?, &mut model)?;
    Ok(String::from_utf8_lossy(&model).trim().to_owned())
}

fn main() -> Result<()> {
    env_logger::init();
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [nvme, window] = &arguments[..] else {
        bail!("usage: identify NVME-FUNCTION IVSHMEM-FUNCTION");
    };
    let ntb = IvshmemNtb::open_pci(window.parse()?)?;
    let shown = ntb.peer_window(0)?;
    let memory = Mapping::new(shown.file.as_fd(), shown.offset, 0x4000, true)?;
    let memory = SharedMemory::new(memory);

    let source = VfioSource::open(nvme.parse()?, Path::new("/sys"))?;
    println!("{}: {:?}", source.description().name, source.limits());
    for round in 0..2 {
        let function = source.take(&source.attach()?)?;
        function.map(DmaMapping {
            range: AddressRange::new(0, shown.size),
            writable: true,
            target: DmaTarget::File {
                file: Arc::clone(&shown.file),
                offset: shown.offset,
            },
        })?;
        let bell = Arc::new(Bell::default());
        let signal: Arc<dyn Signal> = Arc::clone(&bell) as _;
        let vectors = [InterruptVector::Msix(0), InterruptVector::Intx];
        function.set_interrupt(vectors[round], Some(signal))?;
        let model = identify(&*function, &memory, &bell)?;
        println!("{}: model {model:?}", vectors[round]);
    }
    for counter in source.counters() {
        println!("{} {}", counter.name, counter.value);
    }
    Ok(())
}
