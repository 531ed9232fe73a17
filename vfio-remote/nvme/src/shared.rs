//! What the users of a function and its worker share.

use crate::counters::{Counters, count};
use crate::doorbells::DoorbellPage;
use crate::identify::Identity;
use crate::registers::Registers;
use farlane_pci::emulated::InterruptLines;
use farlane_pci::{DmaSpace, Interrupts};
use farlane_sys::sync::{held, lock};
use farlane_worker::wake::Sleep;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// What the worker is woken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Notice {
    /// Registers were written.
    Control = 1,
    /// The level of the interrupt pin may have changed.
    Pin = 1 << 1,
    /// An access to remote memory has ended.
    Remote = 1 << 2,
    /// The worker is to end.
    Stop = 1 << 3,
    /// A doorbell of a queue that cannot exist was written.
    BadDoorbell = 1 << 4,
}

/// Shared by the function's users, its worker and the thread for remote memory.
#[derive(Debug)]
pub struct Shared {
    registers: Mutex<Registers>,
    /// The worker has seen a reset through, or has ended.
    settled: Condvar,
    ended: AtomicBool,
    /// The doorbell registers.
    pub doorbells: DoorbellPage,
    /// The driver's memory.
    pub dma: Arc<DmaSpace>,
    /// Interrupts.
    pub interrupts: InterruptLines<Counters>,
    /// The parts of the controller that never change.
    pub identity: Arc<Identity>,
    /// Counters.
    pub counters: Arc<Counters>,
    notices: AtomicU32,
    /// Whether the worker waits.
    pub sleep: Sleep<OwnedFd>,
}

impl Shared {
    /// As after a reset.
    pub fn new(
        doorbells: DoorbellPage,
        identity: Arc<Identity>,
        counters: Arc<Counters>,
    ) -> std::io::Result<Self> {
        let interrupts = Interrupts {
            intx: 1,
            msi: 0,
            msix: identity.io_queues + 1,
        };
        Ok(Self {
            registers: Mutex::default(),
            settled: Condvar::new(),
            ended: AtomicBool::new(false),
            doorbells,
            dma: DmaSpace::new(),
            interrupts: InterruptLines::new(interrupts, Arc::clone(&counters), |c| &c.interrupts),
            identity,
            counters,
            notices: AtomicU32::new(0),
            sleep: Sleep::new(farlane_sys::eventfd::new()?),
        })
    }

    /// The registers; held for a moment only.
    pub fn registers(&self) -> MutexGuard<'_, Registers> {
        lock(&self.registers)
    }

    /// Tells the worker something.
    pub fn notify(&self, notice: Notice) {
        self.notices.fetch_or(notice as u32, Ordering::SeqCst);
        self.sleep.wake();
    }

    /// The worker no longer waits.
    pub fn woke(&self) {
        self.sleep.awake();
        count(&self.counters.wakes, 1);
    }

    /// Whether there are notices.
    pub fn has_notices(&self) -> bool {
        self.notices.load(Ordering::Relaxed) != 0
    }

    /// Takes all notices.
    pub fn take_notices(&self) -> Notices {
        if self.has_notices() {
            Notices(self.notices.swap(0, Ordering::SeqCst))
        } else {
            Notices(0)
        }
    }

    /// The worker has seen a reset through.
    pub fn settle(&self) {
        self.settled.notify_all();
    }

    /// The worker has ended.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        let _registers = self.registers();
        self.settled.notify_all();
    }

    /// Resets the registers and waits until the worker has seen that through.
    ///
    /// # Errors
    /// It has ended.
    pub fn reset_and_wait(&self) -> std::io::Result<()> {
        let mut registers = self.registers();
        registers.reset();
        self.notify(Notice::Control);
        while registers.is_resetting() {
            if self.ended.load(Ordering::SeqCst) {
                return Err(std::io::Error::other("The worker has ended"));
            }
            registers = held(self.settled.wait(registers));
        }
        Ok(())
    }
}

/// Some notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notices(u32);

impl Notices {
    /// Whether this is among them.
    pub fn has(self, notice: Notice) -> bool {
        self.0 & notice as u32 != 0
    }
}
