//! Receive: buffers in the guest's memory, and a queue through which the device fills them.

use super::{Error, HEADER_BYTES, Header, feature};
use crate::ring::{Part, Ring, sleep};
use crate::to_usize;
use std::time::Duration;

/// Bytes of a buffer where a frame may take several.
const MERGEABLE: u32 = 2048;
/// Bytes of one that holds any frame that is not cut.
const LARGE: u32 = 12 + 65_562;
/// Bytes of one that holds any that is: also with a large MTU.
const SMALL: u32 = 12 + 9_216;

/// A frame that was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// What was before it.
    pub header: Header,
    /// The frame.
    pub bytes: Vec<u8>,
}

/// A receive queue, full of buffers.
#[derive(Debug)]
pub struct Rx {
    pub(crate) ring: Ring,
    /// Offset of the first buffer.
    buffers: u64,
    buffer_bytes: u32,
    mergeable: bool,
    /// The buffer of each chain, by its head.
    buffer_of: Vec<u32>,
    /// The buffers of the frame that was taken last, each with its bytes.
    pieces: Vec<(u32, u32)>,
}

impl Rx {
    pub(crate) fn new(
        ring: Ring,
        range: usize,
        features: u64,
        buffer_bytes: Option<u32>,
    ) -> Result<Self, Error> {
        let mergeable = features & feature::MRG_RXBUF != 0;
        let buffer_bytes = buffer_bytes.unwrap_or(match features & feature::GUEST_TSO {
            _ if mergeable => MERGEABLE,
            0 => SMALL,
            _ => LARGE,
        });
        let size = ring.place().size;
        let all = u64::from(size) * u64::from(buffer_bytes);
        let mut rx = Self {
            buffers: ring.memory().take_in(range, all)?,
            buffer_of: vec![0; size.into()],
            ring,
            buffer_bytes,
            mergeable,
            pieces: Vec::new(),
        };
        rx.fill();
        Ok(rx)
    }

    fn fill(&mut self) {
        for buffer in 0..u32::from(self.ring.place().size) {
            self.post(buffer);
        }
    }

    pub(crate) fn reset(&mut self) {
        self.ring.reset();
        self.fill();
    }

    fn offset(&self, buffer: u32) -> u64 {
        self.buffers + u64::from(buffer) * u64::from(self.buffer_bytes)
    }

    fn post(&mut self, buffer: u32) {
        let part = Part {
            offset: self.offset(buffer),
            length: self.buffer_bytes,
            writable: true,
        };
        // There is a descriptor for each buffer.
        if let Some(head) = self.ring.post(&[part])
            && let Some(place) = self.buffer_of.get_mut(usize::from(head))
        {
            *place = buffer;
        }
    }

    fn take(&mut self) -> Result<Option<(u32, u32)>, Error> {
        let Some((head, length)) = self.ring.take_used()? else {
            return Ok(None);
        };
        if length > self.buffer_bytes {
            let text = format!("{length} bytes in a buffer of {}", self.buffer_bytes);
            return Err(Error::Device(text));
        }
        let buffer = self.buffer_of.get(usize::from(head)).copied();
        Ok(buffer.map(|buffer| (buffer, length)))
    }

    /// Takes the buffers of the next frame into `pieces`; returns its header.
    fn next(&mut self) -> Result<Option<Header>, Error> {
        self.pieces.clear();
        let Some(first) = self.take()? else {
            return Ok(None);
        };
        if to_usize(first.1) < HEADER_BYTES {
            return Err(Error::Device(format!("a frame of {} bytes", first.1)));
        }
        // SAFETY: the device has given the buffer back, and this queue has one thread.
        let header: Header = unsafe {
            self.ring
                .memory()
                .map()
                .read(to_usize(self.offset(first.0)))
        };
        self.pieces.push(first);
        let count = header.num_buffers.get();
        if count == 0 && self.mergeable {
            return Err(Error::Device("a frame of no buffers".into()));
        }
        // A driver without mergeable buffers must not look at the number (5.1.6.4.1).
        let more = if self.mergeable { count - 1 } else { 0 };
        for at in 0..more {
            let Some(piece) = self.take()? else {
                let text = format!("a frame of {count} buffers has {}", at + 1);
                return Err(Error::Device(text));
            };
            self.pieces.push(piece);
        }
        Ok(Some(header))
    }

    /// Gives the buffers of the frame that was taken back to the device.
    fn give_back(&mut self) {
        for (buffer, _) in std::mem::take(&mut self.pieces) {
            self.post(buffer);
        }
    }

    /// Takes the next frame, and gives its buffers back to the device.
    ///
    /// # Errors
    /// The device breaks the rules.
    pub fn receive(&mut self) -> Result<Option<Received>, Error> {
        let Some(header) = self.next()? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        for (buffer, length) in &self.pieces {
            let (at, skip) = (bytes.len(), if bytes.is_empty() { HEADER_BYTES } else { 0 });
            bytes.resize(at + to_usize(*length) - skip, 0);
            let from = to_usize(self.offset(*buffer)) + skip;
            let to = bytes.get_mut(at..).unwrap_or_default();
            // SAFETY: the device has given the buffers back, and this queue has one thread.
            unsafe { self.ring.memory().map().read_bytes(from, to) };
        }
        self.give_back();
        self.ring.kick()?;
        Ok(Some(Received { header, bytes }))
    }

    /// Takes up to `most` frames, says header and length of each, and gives the buffers back;
    /// returns how many. The bytes are not looked at.
    ///
    /// # Errors
    /// The device breaks the rules.
    pub fn count(
        &mut self,
        most: usize,
        mut each: impl FnMut(&Header, usize),
    ) -> Result<usize, Error> {
        for at in 0..most {
            let Some(header) = self.next()? else {
                if at > 0 {
                    self.ring.kick()?;
                }
                return Ok(at);
            };
            let all: usize = self.pieces.iter().map(|piece| to_usize(piece.1)).sum();
            each(&header, all - HEADER_BYTES);
            while let Some((buffer, _)) = self.pieces.pop() {
                self.post(buffer);
            }
        }
        self.ring.kick()?;
        Ok(most)
    }

    /// Buffers that the device has filled and that were not taken yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.ring.used().into()
    }

    /// Buffers of this queue.
    #[must_use]
    pub fn size(&self) -> usize {
        self.ring.place().size.into()
    }

    /// Sleeps until a frame is there, or for so long; returns whether one is.
    ///
    /// # Errors
    /// What the system says.
    pub fn wait(&mut self, longest: Duration) -> Result<bool, Error> {
        if !self.ring.arm() {
            sleep(&[&self.ring], longest)?;
        }
        self.ring.ignore();
        Ok(self.ring.used() != 0)
    }
}
