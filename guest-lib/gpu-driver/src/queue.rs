//! The driver's end of the queue.

use crate::{Bars, GpuError};
use farlane_abi::gpu as abi;
use farlane_abi::width::to_usize;
use farlane_sys::sync::lock;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

/// Commands that may be on their way.
pub const ENTRIES: u32 = 64;
/// Looks at the queue between two looks at whether the device is there, which cost an exit.
const LOOKS: u32 = 2000;
/// How long a thread yields to others before it naps.
const YIELD: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_micros(50);
/// How long the device may take to leave or to take up a queue.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct State {
    /// Number of the next command, as the device counts them.
    tail: u32,
    /// Entries whose completion has not been read.
    busy: [bool; ENTRIES as usize],
}

/// A queue in video memory, for any number of threads.
pub struct Queue {
    bars: Arc<dyn Bars>,
    offset: usize,
    /// Orders who writes commands.
    state: Mutex<State>,
}

/// Waits a little, longer the longer it has waited already.
pub struct Waiting {
    looks: u32,
    begin: Instant,
}

impl Waiting {
    pub fn new() -> Self {
        Self {
            looks: 0,
            begin: Instant::now(),
        }
    }

    /// Gives others their turn. Whether it is time to look at the device itself.
    pub fn turn(&mut self) -> bool {
        self.looks += 1;
        if self.begin.elapsed() < YIELD {
            yield_now();
        } else {
            sleep(NAP);
        }
        self.looks.is_multiple_of(LOOKS)
    }
}

impl Queue {
    /// Takes the device, which somebody else may have left enabled, and gives it a queue at
    /// `offset` of video memory.
    ///
    /// # Errors
    /// It is gone, or does not take the queue.
    pub fn start(bars: Arc<dyn Bars>, offset: u64) -> Result<Self, GpuError> {
        stop(&*bars)?;
        let [a, b, c, d, e, f, g, h] = offset.to_le_bytes();
        bars.write32(abi::REG_QUEUE_LOW, u32::from_le_bytes([a, b, c, d]));
        bars.write32(abi::REG_QUEUE_HIGH, u32::from_le_bytes([e, f, g, h]));
        bars.write32(abi::REG_ENTRIES, ENTRIES);
        bars.write32(abi::REG_CONTROL, abi::CONTROL_ENABLE);
        match settle(&*bars, |status| status != 0)? {
            abi::STATUS_READY => Ok(Self {
                bars,
                offset: to_usize(offset),
                state: Mutex::new(State {
                    tail: 0,
                    busy: [false; ENTRIES as usize],
                }),
            }),
            status => Err(GpuError::Stopped(status)),
        }
    }

    fn pointer(&self, at: u64) -> *mut u8 {
        let at = to_usize(at);
        self.bars.memory().0.wrapping_add(self.offset + at)
    }

    fn word(&self, at: u64) -> &AtomicU32 {
        // SAFETY: the queue lies in video memory, which the device has checked; it is aligned, and
        // mapped as long as the device is open. It is only ever accessed atomically.
        unsafe { AtomicU32::from_ptr(self.pointer(at).cast()) }
    }

    /// Executes a command and waits until it is complete.
    ///
    /// # Errors
    /// The device is gone, has stopped, or refuses it.
    pub fn execute(
        &self,
        what: &'static str,
        command: &abi::Command,
    ) -> Result<abi::Completion, GpuError> {
        let number = self.submit(command)?;
        let completion = self.wait(number);
        let index = to_usize((number & (ENTRIES - 1)).into());
        let mut state = lock(&self.state);
        state.busy[index] = false;
        drop(state);
        let completion = completion?;
        match completion.status.get() {
            abi::OK => Ok(completion),
            status => Err(GpuError::Refused { what, status }),
        }
    }

    fn submit(&self, command: &abi::Command) -> Result<u32, GpuError> {
        let mut waiting = Waiting::new();
        loop {
            let mut state = lock(&self.state);
            let number = state.tail;
            let index = to_usize((number & (ENTRIES - 1)).into());
            if !state.busy[index] {
                state.busy[index] = true;
                state.tail = number.wrapping_add(1);
                let at = abi::QUEUE_HEADER_BYTES
                    + u64::from(number & (ENTRIES - 1)) * abi::COMMAND_BYTES;
                // SAFETY: the entry lies in the queue (see `word`), is aligned, and not the
                // device's before the tail is stored.
                unsafe {
                    self.pointer(at)
                        .cast::<abi::Command>()
                        .write_volatile(*command)
                };
                // Video memory may be mapped so that stores are combined.
                fence(Ordering::SeqCst);
                self.word(abi::QUEUE_TAIL)
                    .store(state.tail, Ordering::Release);
                // Pairs with the device's, between its word that it sleeps and its last look.
                fence(Ordering::SeqCst);
                if self.word(abi::QUEUE_ASLEEP).load(Ordering::Relaxed) != 0 {
                    self.bars.write32(abi::REG_DOORBELL, 1);
                }
                return Ok(number);
            }
            drop(state);
            if waiting.turn() {
                self.check()?;
            }
        }
    }

    /// Whether the device is there, and at work.
    fn check(&self) -> Result<(), GpuError> {
        match status(&*self.bars)? {
            abi::STATUS_READY => Ok(()),
            status => Err(GpuError::Stopped(status)),
        }
    }

    fn wait(&self, number: u32) -> Result<abi::Completion, GpuError> {
        let sequence = number.wrapping_add(1);
        let mut waiting = Waiting::new();
        // Both count modulo 2^32, and are never further apart than there are entries.
        while self
            .word(abi::QUEUE_DONE)
            .load(Ordering::Acquire)
            .wrapping_sub(sequence)
            >= ENTRIES
        {
            if waiting.turn() {
                self.check()?;
            }
        }
        let at = abi::completions_offset(ENTRIES)
            + u64::from(number & (ENTRIES - 1)) * abi::COMPLETION_BYTES;
        // SAFETY: as in `submit`; the device has written it, and does not before the entry is
        // used again.
        let completion = unsafe { self.pointer(at).cast::<abi::Completion>().read_volatile() };
        if completion.sequence.get() != sequence {
            // A device that is gone reads as ones.
            self.check()?;
            return Err(GpuError::Stopped(abi::STATUS_READY));
        }
        Ok(completion)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // From now on the device touches no memory. One that is gone does not either.
        if let Err(e) = stop(&*self.bars)
            && !matches!(e, GpuError::Gone)
        {
            log::warn!("{e}");
        }
    }
}

fn status(bars: &dyn Bars) -> Result<u32, GpuError> {
    let status = bars.read32(abi::REG_STATUS);
    if bars.read32(abi::REG_IDENTITY) == abi::IDENTITY {
        Ok(status)
    } else {
        Err(GpuError::Gone)
    }
}

fn settle(bars: &dyn Bars, is: impl Fn(u32) -> bool) -> Result<u32, GpuError> {
    let begin = Instant::now();
    loop {
        let status = status(bars)?;
        if is(status) {
            return Ok(status);
        }
        if begin.elapsed() > PATIENCE {
            return Err(GpuError::Stopped(status));
        }
        yield_now();
    }
}

fn stop(bars: &dyn Bars) -> Result<(), GpuError> {
    bars.write32(abi::REG_CONTROL, 0);
    settle(bars, |status| status == 0).map(|_| ())
}
