//! Frames in memory of the backend, and bounded queues of them.

use crate::bits::FrameHeader;
use crate::flow::Route;
use std::collections::VecDeque;
use std::time::Instant;

/// Most frames of a queue, and most bytes of them: some 64 of the largest.
pub(super) const MAX_FRAMES: usize = 1024;
pub(super) const MAX_BYTES: usize = 4 << 20;

/// A frame in memory of the backend: on its way to another worker, or waiting.
#[derive(Debug)]
pub struct Frame {
    pub header: FrameHeader,
    /// The frame without that.
    pub bytes: Box<[u8]>,
    /// Where it goes next.
    pub route: Route,
    /// When it was read from the port.
    pub since: Instant,
}

/// Frames that wait, in order.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    frames: VecDeque<Frame>,
    bytes: usize,
}

impl Backlog {
    /// Adds a frame at the end.
    ///
    /// # Errors
    /// Too many wait: the frame comes back.
    pub fn push(&mut self, frame: Frame) -> Result<(), Frame> {
        if self.frames.len() >= MAX_FRAMES || self.bytes + frame.bytes.len() > MAX_BYTES {
            return Err(frame);
        }
        self.put_back(frame);
        Ok(())
    }

    /// Adds a frame at the end that was one of them.
    pub fn put_back(&mut self, frame: Frame) {
        self.bytes += frame.bytes.len();
        self.frames.push_back(frame);
    }

    /// Adds the frame that has to go before all others.
    pub fn put_first(&mut self, frame: Frame) {
        self.bytes += frame.bytes.len();
        self.frames.push_front(frame);
    }

    /// The oldest, which waits no longer.
    pub fn pop(&mut self) -> Option<Frame> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.bytes.len();
        Some(frame)
    }

    pub fn len(&self) -> usize {
        self.frames.len()
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}
