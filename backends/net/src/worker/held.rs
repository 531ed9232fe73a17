//! Frames whose flow is moving: they are kept, in order, until the queue that it leaves has
//! drained.
//!
//! How long a frame is held is the flow table's to say
//! ([`HoldLimits`](crate::flow::order::HoldLimits)).

use super::frame::{Backlog, Frame};
use crate::flow::shard::Slot;
use std::collections::HashSet;

/// The held frames of a worker: each has a route of [`Route::Hold`](crate::flow::Route::Hold).
#[derive(Debug, Default)]
pub(super) struct Held {
    frames: Backlog,
    /// How many of them are still to be looked at, and the flows of which one was that stays.
    ahead: usize,
    stay: HashSet<Option<(u16, Slot)>>,
}

impl Held {
    /// All of them are to be looked at.
    pub fn look_through(&mut self) {
        self.ahead = self.frames.len();
        self.stay.clear();
    }

    /// The next one that may go, if any: the oldest of its flow, or one whose elders have gone.
    /// Pushed again, it stays. So a frame whose time comes while the frames are looked at does not
    /// overtake one that was looked at before.
    pub fn next(&mut self) -> Option<Frame> {
        while self.ahead > 0 {
            self.ahead -= 1;
            let frame = self.frames.pop()?;
            if !self.stay.contains(&flow_of(&frame)) {
                return Some(frame);
            }
            self.frames.put_back(frame);
        }
        None
    }

    /// Holds a frame, behind the others.
    ///
    /// # Errors
    /// There is no room: it comes back.
    pub fn push(&mut self, frame: Frame) -> Result<(), Frame> {
        let flow = flow_of(&frame);
        self.frames.push(frame)?;
        if self.ahead > 0 {
            self.stay.insert(flow);
        }
        Ok(())
    }

    /// The oldest, which is held no longer.
    pub fn pop(&mut self) -> Option<Frame> {
        self.frames.pop()
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}

fn flow_of(frame: &Frame) -> Option<(u16, Slot)> {
    frame.route.ticket().map(|ticket| ticket.flow())
}

#[cfg(test)]
mod tests {
    use super::super::frame::{MAX_BYTES, MAX_FRAMES};
    use super::*;
    use crate::bits::FrameHeader;
    use crate::flow::{Route, Ticket};
    use crate::pairs::PairId;
    use zerocopy::FromZeros as _;

    fn frame(flow: Ticket, bytes: usize) -> Frame {
        Frame {
            header: FrameHeader::new_zeroed(),
            bytes: vec![0; bytes].into(),
            since: std::time::Instant::now(),
            route: Route::Hold {
                on: PairId::FIRST,
                flow,
            },
        }
    }

    #[test]
    fn a_frame_whose_elder_stays_stays_too_whatever_would_be_said_of_it() {
        let [one, other] = [1, 2].map(Ticket::of_shard);
        let mut held = Held::default();
        let is_empty = |held: &mut Held| {
            held.look_through();
            held.next().is_none()
        };
        assert!(is_empty(&mut held));
        // The lengths are numbers.
        for (ticket, number) in [(one, 1), (other, 2), (one, 3), (other, 4), (one, 5)] {
            held.push(frame(ticket, number)).unwrap();
        }
        // The first frame of the one flow stays, all of the other go; then all go. New ones come
        // meanwhile.
        let mut went = Vec::new();
        held.look_through();
        while let Some(frame) = held.next() {
            let number = frame.bytes.len();
            if number == 1 {
                held.push(frame).unwrap();
            } else {
                went.push(number);
            }
        }
        assert_eq!(went, [2, 4]);
        held.push(frame(one, 6)).unwrap();
        held.look_through();
        went.extend(std::iter::from_fn(|| held.next()).map(|held| held.bytes.len()));
        assert_eq!(went, [2, 4, 1, 3, 5, 6]);
        assert!(is_empty(&mut held) && held.is_empty());
    }

    #[test]
    fn neither_frames_nor_bytes_that_are_held_grow_without_bound() {
        let ticket = Ticket::of_shard(1);
        let mut held = Held::default();
        let mut fill = |bytes: usize| {
            let count = (0..=2 * MAX_FRAMES)
                .take_while(|_| held.push(frame(ticket, bytes)).is_ok())
                .count();
            assert_eq!(held.frames.len(), count);
            let taken = std::iter::from_fn(|| held.pop());
            let lengths: usize = taken.map(|held| held.bytes.len()).sum();
            assert_eq!(lengths, count * bytes);
            assert!(held.is_empty());
            count
        };
        assert_eq!(fill(60), MAX_FRAMES);
        assert_eq!(fill(1 << 16), MAX_BYTES >> 16);
        assert_eq!(fill(60), MAX_FRAMES);
    }
}
