//! Frames whose flow is moving: they are kept, in order, until the queue that it leaves has drained.
//!
//! How long a frame is held is the flow table's to say ([`Patience`](crate::flow::course::Patience)); how many there are at most, and
//! how large, is said here.

use super::mail::Handed;
use crate::flow::Ticket;
use std::collections::VecDeque;

/// Frames that are held, at most, and their bytes.
const MOST: usize = 1024;
const MOST_BYTES: usize = 4 << 20;

/// A frame that is held.
#[derive(Debug)]
pub(super) struct HeldFrame {
    /// Its flow.
    pub ticket: Ticket,
    /// The queue that has to drain.
    pub on: u16,
    pub frame: Handed,
}

/// All of a worker.
#[derive(Debug, Default)]
pub(super) struct Held {
    frames: VecDeque<HeldFrame>,
    bytes: usize,
}

impl Held {
    /// Holds a frame, behind the others.
    ///
    /// # Errors
    /// There is no room: it comes back.
    pub fn push(&mut self, frame: HeldFrame) -> Result<(), HeldFrame> {
        let bytes = self.bytes + frame.frame.bytes.len();
        if self.frames.len() >= MOST || bytes > MOST_BYTES {
            return Err(frame);
        }
        self.bytes = bytes;
        self.frames.push_back(frame);
        Ok(())
    }

    /// The oldest, which is held no longer, unless it is pushed again.
    pub fn pop(&mut self) -> Option<HeldFrame> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.frame.bytes.len();
        Some(frame)
    }

    pub fn len(&self) -> usize {
        self.frames.len()
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bits::FrameHeader;
    use crate::flow::{FlowKey, FlowTable, Parsed, Placement, Route, Settings, Signal, Task};
    use std::net::Ipv4Addr;
    use zerocopy::FromZeros as _;

    /// A flow that somebody knows.
    fn ticket() -> Ticket {
        let flow = FlowKey {
            source: Ipv4Addr::LOCALHOST.into(),
            destination: Ipv4Addr::LOCALHOST.into(),
            source_port: 1,
            destination_port: 1,
            protocol: 17,
            vlans: [0; 2],
        };
        let parsed = Parsed {
            flow: Some(flow),
            signal: Signal::Datagram,
            sequence: None,
            ether_type: 0x0800,
            network: 14,
            transport: None,
        };
        let table = FlowTable::new(Settings::usual(2, Placement::Arrival));
        table.transmitted(1, &parsed, 0);
        match table.received(0, &parsed, 1, 0) {
            Route::Forward {
                task: Task::Deliver(ticket),
                ..
            } => ticket,
            other => panic!("{other:?}"),
        }
    }

    fn frame(ticket: Ticket, bytes: usize) -> HeldFrame {
        let frame = Handed {
            header: FrameHeader::new_zeroed(),
            bytes: vec![0; bytes].into(),
            task: Task::Stray,
        };
        HeldFrame {
            ticket,
            on: 0,
            frame,
        }
    }

    #[test]
    fn neither_frames_nor_bytes_that_are_held_grow_without_bound() {
        let ticket = ticket();
        let mut held = Held::default();
        let mut fill = |bytes: usize| {
            let count = (0..=2 * MOST)
                .take_while(|_| held.push(frame(ticket, bytes)).is_ok())
                .count();
            assert_eq!(held.len(), count);
            let taken = std::iter::from_fn(|| held.pop());
            let lengths: usize = taken.map(|held| held.frame.bytes.len()).sum();
            assert_eq!(lengths, count * bytes);
            assert!(held.is_empty());
            count
        };
        assert_eq!(fill(60), MOST);
        assert_eq!(fill(1 << 16), MOST_BYTES >> 16);
        assert_eq!(fill(60), MOST);
    }
}
