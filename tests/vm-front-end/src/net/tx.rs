//! Transmit: frames in the guest's memory, and a queue that the device takes them from.

use super::{Error, HEADER_BYTES, Header};
use crate::memory::GuestMemory;
use crate::ring::{Part, Ring, sleep};
use crate::to_usize;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes as _;

/// How long a device may take nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// A frame that lies in the guest's memory, and may be sent any number of times.
#[derive(Debug)]
pub struct Frame {
    memory: Arc<GuestMemory>,
    parts: Vec<Part>,
}

impl Frame {
    /// Bytes, without the header.
    #[must_use]
    pub fn len(&self) -> usize {
        let all: usize = self.parts.iter().map(|part| to_usize(part.length)).sum();
        all - HEADER_BYTES
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        for part in &self.parts {
            self.memory.give(part.offset, part.length.into());
        }
    }
}

/// A transmit queue.
#[derive(Debug)]
pub struct Tx {
    pub(crate) ring: Ring,
    range: usize,
    /// Frames that the device has, by the head of their chain: those of [`send`](Self::send).
    sent: Vec<Option<Frame>>,
    /// Frames of `send` that can be used again: they are in one part.
    spare: Vec<Frame>,
    /// Frames that the device has taken so far.
    taken: u64,
}

impl Tx {
    pub(crate) fn new(ring: Ring, range: usize) -> Self {
        let sent = (0..ring.place().size).map(|_| None).collect();
        Self {
            ring,
            range,
            sent,
            spare: Vec::new(),
            taken: 0,
        }
    }

    pub(crate) fn reset(&mut self) {
        self.ring.reset();
        self.spare
            .extend(self.sent.iter_mut().filter_map(Option::take));
    }

    /// A frame in this queue's range of the memory.
    ///
    /// # Errors
    /// When there is no memory left.
    pub fn frame(&self, header: &Header, bytes: &[u8]) -> Result<Frame, Error> {
        self.gathered(header, &[(self.range, bytes)])
    }

    /// A frame whose pieces are in the ranges that are named, 0 or 1. The header is before the
    /// first.
    ///
    /// # Errors
    /// When there is no memory left.
    pub fn gathered(&self, header: &Header, pieces: &[(usize, &[u8])]) -> Result<Frame, Error> {
        let memory = Arc::clone(self.ring.memory());
        let mut parts = Vec::new();
        let mut before = header.as_bytes();
        for (range, bytes) in pieces {
            let length = before.len() + bytes.len();
            let offset = memory.take_in(*range, length as u64)?;
            // SAFETY: just taken: nobody else uses it.
            unsafe {
                memory.map().write_bytes(to_usize(offset), before);
                let behind = to_usize(offset) + before.len();
                memory.map().write_bytes(behind, bytes);
            }
            before = &[];
            parts.push(Part {
                offset,
                length: u32::try_from(length).map_err(|_| Error::Large(length))?,
                writable: false,
            });
        }
        Ok(Frame { memory, parts })
    }

    /// Puts a frame into the queue, without telling the device. `false`: there is no room. The
    /// frame must not go before the device has taken it, or its memory is used for something else.
    pub fn post(&mut self, frame: &Frame) -> bool {
        self.ring.post(&frame.parts).is_some()
    }

    /// Tells the device of what was posted, if it wants to be told; returns whether it did.
    ///
    /// # Errors
    /// What the system says.
    pub fn kick(&mut self) -> Result<bool, Error> {
        Ok(self.ring.kick()?)
    }

    /// Looks what the device has taken; returns how many frames.
    ///
    /// # Errors
    /// The device breaks the rules.
    pub fn reap(&mut self) -> Result<usize, Error> {
        let mut count = 0;
        while let Some((head, _)) = self.ring.take_used()? {
            if let Some(frame) = self.sent.get_mut(usize::from(head)).and_then(Option::take) {
                self.spare.push(frame);
            }
            count += 1;
        }
        self.taken += count as u64;
        Ok(count)
    }

    /// Frames that the device has taken so far.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Descriptors that are free.
    #[must_use]
    pub fn room(&self) -> usize {
        self.ring.room()
    }

    /// Sleeps until the device has taken something, or for so long.
    ///
    /// # Errors
    /// What the system says.
    pub fn wait(&mut self, longest: Duration) -> Result<(), Error> {
        if !self.ring.arm() {
            sleep(&[&self.ring], longest)?;
        }
        self.ring.ignore();
        Ok(())
    }

    /// Sends a copy of a frame, waits for room if there is none, and tells the device.
    ///
    /// # Errors
    /// The device takes nothing, or breaks the rules.
    pub fn send(&mut self, header: &Header, bytes: &[u8]) -> Result<(), Error> {
        self.reap()?;
        let length = HEADER_BYTES + bytes.len();
        let fits = |frame: &Frame| match frame.parts.as_slice() {
            [part] => to_usize(part.length) == length,
            _ => false,
        };
        let frame = match self.spare.pop() {
            Some(frame) if fits(&frame) => {
                for part in &frame.parts {
                    let at = to_usize(part.offset);
                    // SAFETY: the device has given the frame back.
                    unsafe {
                        frame.memory.map().write_bytes(at, header.as_bytes());
                        frame.memory.map().write_bytes(at + HEADER_BYTES, bytes);
                    }
                }
                frame
            }
            _ => self.frame(header, bytes)?,
        };
        self.send_frame(frame)
    }

    /// Sends a frame, waits for room if there is none, and tells the device.
    ///
    /// # Errors
    /// The device takes nothing, or breaks the rules.
    pub fn send_frame(&mut self, frame: Frame) -> Result<(), Error> {
        let began = Instant::now();
        let head = loop {
            if let Some(head) = self.ring.post(&frame.parts) {
                break head;
            }
            self.ring.kick()?;
            self.wait(Duration::from_millis(100))?;
            self.reap()?;
            if began.elapsed() > PATIENCE {
                return Err(Error::Stuck(PATIENCE));
            }
        };
        if let Some(place) = self.sent.get_mut(usize::from(head)) {
            *place = Some(frame);
        }
        self.ring.kick()?;
        Ok(())
    }

    /// Waits until the device has taken everything.
    ///
    /// # Errors
    /// It does not, or breaks the rules.
    pub fn drain(&mut self) -> Result<(), Error> {
        let began = Instant::now();
        let all = usize::from(self.ring.place().size);
        while self.room() < all {
            if self.reap()? == 0 {
                self.ring.kick()?;
                self.wait(Duration::from_millis(100))?;
            }
            if began.elapsed() > PATIENCE {
                return Err(Error::Stuck(PATIENCE));
            }
        }
        Ok(())
    }
}
