//! Memory that is reached by messages, whose owner answers when the test lets it.

use super::*;
use farlane_pci::{AddressRange, DmaMapping, DmaTarget, RemoteMemory};
use farlane_sys::sync::{held, lock};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Longer than anything takes, on whatever machine.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct State {
    /// Accesses to these addresses are not answered.
    held: Range<u64>,
    waiting: bool,
    accesses: u64,
}

/// The owner of some memory.
#[derive(Debug)]
pub struct Gate {
    memory: Memory,
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    /// Has a controller reach `bytes` of memory at `base` by way of this.
    pub fn new(driver: &mut Driver<InProcess>, base: u64, bytes: u64) -> Arc<Self> {
        let gate = Arc::new(Self {
            memory: Memory::new(base, bytes).unwrap(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let mapping = DmaMapping {
            range: AddressRange::new(base, bytes),
            writable: true,
            target: DmaTarget::Remote(gate.clone()),
        };
        driver.transport().function().map(mapping).unwrap();
        gate
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// From now on accesses to these addresses, and no others, are not answered.
    pub fn hold(&self, addresses: Range<u64>) {
        self.state().held = addresses;
        self.changed.notify_all();
    }

    /// From now on all are answered.
    pub fn release(&self) {
        self.hold(0..0);
    }

    /// Waits for an access that is not answered.
    pub fn await_held(&self) {
        let waits = |state: &mut State| !state.waiting;
        let state = self
            .changed
            .wait_timeout_while(self.state(), PATIENCE, waits);
        assert!(state.unwrap().0.waiting, "nothing is held");
    }

    /// How often memory has been accessed.
    pub fn accesses(&self) -> u64 {
        self.state().accesses
    }

    fn pass(&self, address: u64) -> std::io::Result<()> {
        let mut state = self.state();
        state.accesses += 1;
        if !state.held.contains(&address) {
            return Ok(());
        }
        state.waiting = true;
        self.changed.notify_all();
        let is_held = |state: &mut State| state.held.contains(&address);
        let waited = self.changed.wait_timeout_while(state, PATIENCE, is_held);
        let (mut state, timeout) = held(waited);
        state.waiting = false;
        self.changed.notify_all();
        if timeout.timed_out() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }

    fn words(&self, address: u64, bytes: usize) -> impl Iterator<Item = usize> {
        let at = self.memory.offset(address);
        (at..at + bytes).step_by(4)
    }
}

impl RemoteMemory for Gate {
    fn read(&self, address: u64, data: &mut [u8]) -> std::io::Result<()> {
        self.pass(address)?;
        let words = self.words(address, data.len());
        for (at, chunk) in words.zip(data.chunks_mut(4)) {
            let word = self.memory.bytes().word(at).unwrap();
            chunk.copy_from_slice(&word.load(Ordering::Acquire).to_le_bytes()[..chunk.len()]);
        }
        Ok(())
    }

    fn write(&self, address: u64, data: &[u8]) -> std::io::Result<()> {
        self.pass(address)?;
        let words = self.words(address, data.len());
        for (at, chunk) in words.zip(data.chunks(4)) {
            let word = self.memory.bytes().word(at).unwrap();
            word.store(
                u32::from_le_bytes(chunk.try_into().unwrap()),
                Ordering::Release,
            );
        }
        Ok(())
    }
}
