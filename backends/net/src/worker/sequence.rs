//! Frames whose order this worker decides and that another one has read: they go on after what had
//! come to this worker's own queue of the port before them.
//!
//! That is known when the queue was seen empty, or when as many frames were read from it as it has
//! room for. Whatever else happens, a frame waits for a bounded time, and so many wait at most:
//! then the oldest goes on, at worst before one that it should have followed.

use super::frame::{Frame, MAX_BYTES, MAX_FRAMES};
use std::collections::VecDeque;

/// Frames that a port's queue has room for, if not more: a tap keeps 500 to 1,000, a NIC's ring
/// 2,048.
const PORT_FRAMES: u64 = 2048;

/// Microseconds that a frame waits, at most: as long as frames are held while their flow moves.
const LONGEST_US: u64 = 20_000;

/// Frames that wait, in order.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    waiting: VecDeque<Waiting>,
    bytes: usize,
    /// Frames that were read from the port's queue, ever.
    read: u64,
}

#[derive(Debug)]
struct Waiting {
    frame: Frame,
    /// What had been read then.
    read: u64,
    since_us: u64,
}

impl Sequence {
    /// Another one has read a frame.
    pub fn push(&mut self, frame: Frame, now_us: u64) {
        self.bytes += frame.bytes.len();
        self.waiting.push_back(Waiting {
            frame,
            read: self.read,
            since_us: now_us,
        });
    }

    /// A frame was read from the port's queue.
    pub fn has_read(&mut self) {
        self.read = self.read.wrapping_add(1);
    }

    /// The oldest frame, if it waits no longer. `is_empty`: the port's queue was seen empty since
    /// it was pushed.
    pub fn next(&mut self, is_empty: bool, now_us: u64) -> Option<Frame> {
        let oldest = self.waiting.front()?;
        let goes = is_empty
            || self.waiting.len() > MAX_FRAMES
            || self.bytes > MAX_BYTES
            || self.read.wrapping_sub(oldest.read) >= PORT_FRAMES
            || now_us.saturating_sub(oldest.since_us) >= LONGEST_US;
        goes.then(|| self.pop()).flatten()
    }

    fn pop(&mut self) -> Option<Frame> {
        let frame = self.waiting.pop_front()?.frame;
        self.bytes -= frame.bytes.len();
        Some(frame)
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes all of them.
    pub fn drain(&mut self) -> impl Iterator<Item = Frame> {
        std::iter::from_fn(|| self.pop())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bits::FrameHeader;
    use crate::flow::Route;
    use zerocopy::FromZeros as _;

    /// A frame of so many bytes, the first of which is a number.
    fn frame(number: u8, bytes: usize) -> Frame {
        let mut frame = vec![0; bytes];
        frame[0] = number;
        Frame {
            header: FrameHeader::new_zeroed(),
            bytes: frame.into(),
            since: std::time::Instant::now(),
            route: Route::Deliver,
        }
    }

    fn next(sequence: &mut Sequence, is_empty: bool, now_us: u64) -> Option<u8> {
        sequence.next(is_empty, now_us).map(|frame| frame.bytes[0])
    }

    #[test]
    fn frames_go_on_in_order_when_the_queue_was_seen_empty() {
        let mut sequence = Sequence::default();
        assert_eq!(next(&mut sequence, true, 0), None);
        sequence.push(frame(1, 60), 0);
        sequence.push(frame(2, 60), 0);
        assert_eq!(next(&mut sequence, false, 1), None);
        assert_eq!(next(&mut sequence, true, 1), Some(1));
        assert_eq!(next(&mut sequence, true, 1), Some(2));
        assert!(sequence.is_empty() && sequence.bytes == 0);
    }

    #[test]
    fn a_queue_that_is_never_empty_is_waited_for_until_all_that_was_in_it_is_read() {
        let mut sequence = Sequence::default();
        sequence.has_read();
        sequence.push(frame(1, 60), 0);
        for _ in 1..PORT_FRAMES {
            sequence.has_read();
        }
        sequence.push(frame(2, 60), 0);
        assert_eq!(next(&mut sequence, false, 1), None);
        sequence.has_read();
        assert_eq!(next(&mut sequence, false, 1), Some(1));
        assert_eq!(next(&mut sequence, false, 1), None);
    }

    #[test]
    fn nothing_waits_for_longer_than_frames_are_held() {
        let mut sequence = Sequence::default();
        sequence.push(frame(1, 60), 100);
        sequence.push(frame(2, 60), 200);
        assert_eq!(next(&mut sequence, false, LONGEST_US + 99), None);
        assert_eq!(next(&mut sequence, false, LONGEST_US + 100), Some(1));
        assert_eq!(next(&mut sequence, false, LONGEST_US + 100), None);
    }

    #[test]
    fn neither_frames_nor_bytes_that_wait_grow_without_bound() {
        let mut sequence = Sequence::default();
        for _ in 0..MAX_FRAMES {
            sequence.push(frame(1, 60), 0);
        }
        assert_eq!(next(&mut sequence, false, 0), None);
        sequence.push(frame(2, 60), 0);
        assert_eq!(next(&mut sequence, false, 0), Some(1));
        assert_eq!(next(&mut sequence, false, 0), None);
        assert_eq!(sequence.drain().count(), MAX_FRAMES);
        for _ in 0..=MAX_BYTES / 65_536 {
            sequence.push(frame(3, 65_536), 0);
        }
        assert_eq!(next(&mut sequence, false, 0), Some(3));
        assert_eq!(next(&mut sequence, false, 0), None);
    }
}
