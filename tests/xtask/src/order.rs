//! Whether frames came out in the order in which they went in, told from captures at both ends.
//!
//! A sender numbers its frames twice: by sequence number (TCP) or by iperf3's datagram number
//! (UDP), and by the identification of IPv4 (RFC 6864), which Linux counts up with every frame of a
//! connected socket. A segment that is sent again keeps the first and gets another of the second.
//! So a frame is told from its own repetition, and a frame that was overtaken from one that was
//! lost and sent again, which to the receiver's TCP (`TCPOFOQueue`) are the same.

use std::collections::HashMap;
use std::fmt;
use std::ops::AddAssign;

/// One direction of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Flow {
    /// Protocol number of IP.
    pub protocol: u8,
    /// IPv4 addresses: sender, receiver.
    pub addresses: [[u8; 4]; 2],
    /// Ports: sender, receiver.
    pub ports: [u16; 2],
}

/// A frame that was seen at one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// Whose it is.
    pub flow: Flow,
    /// Identification of IPv4.
    pub id: u16,
    /// TCP's sequence number, or iperf3's number of a datagram.
    pub number: u32,
    /// Payload.
    pub bytes: u32,
}

/// Half of the identifications: what is older than that is another frame with the same one.
const NEAR: usize = 1 << 15;

/// What became of the frames of some flows on their way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Order {
    /// Frames that went in.
    pub sent: u64,
    /// Frames that never came out.
    pub lost: u64,
    /// Frames with payload that came out after one that went in later.
    pub late: u64,
    /// Bare acknowledgements of TCP of which that is so. To a receiver they are not out of order.
    /// They can overtake each other in a guest's own stack: a flow moves to another queue when the
    /// driver has taken the frames before out of the old queue's ring, which is before its stack
    /// has seen them.
    pub late_bare: u64,
    /// Frames that came out more than once.
    pub repeated: u64,
    /// Frames that came out and had not gone in.
    pub unknown: u64,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sent,
            lost,
            late,
            late_bare,
            repeated,
            unknown,
        } = self;
        write!(
            f,
            "{sent} frames, {late} out of order and {late_bare} bare acknowledgements, {lost} \
             lost, {repeated} repeated, {unknown} from nowhere"
        )
    }
}

impl AddAssign for Order {
    fn add_assign(&mut self, other: Self) {
        self.sent += other.sent;
        self.lost += other.lost;
        self.late += other.late;
        self.late_bare += other.late_bare;
        self.repeated += other.repeated;
        self.unknown += other.unknown;
    }
}

/// Compares what went in with what came out, in the order of each end. One frame that came out may
/// be several that went in, with consecutive sequence numbers: a receiver's kernel joins them
/// (generic receive offload) before anybody sees them.
pub fn compare(sent: &[Frame], received: &[Frame]) -> Order {
    let mut flows: HashMap<Flow, (Vec<Frame>, Vec<Frame>)> = HashMap::new();
    for frame in sent {
        flows.entry(frame.flow).or_default().0.push(*frame);
    }
    for frame in received {
        flows.entry(frame.flow).or_default().1.push(*frame);
    }
    let mut all = Order::default();
    for (sent, received) in flows.values() {
        all += one_flow(sent, received);
    }
    all
}

fn one_flow(sent: &[Frame], received: &[Frame]) -> Order {
    let mut places: HashMap<(u16, u32), Vec<usize>> = HashMap::new();
    for (place, frame) in sent.iter().enumerate() {
        places
            .entry((frame.id, frame.number))
            .or_default()
            .push(place);
    }
    let mut came = vec![false; sent.len()];
    let mut order = Order {
        sent: count(sent.len()),
        ..Order::default()
    };
    // One behind the latest that has come.
    let mut next = 0;
    for frame in received {
        let places = places.get(&(frame.id, frame.number));
        let near = |place: &&usize| **place + NEAR > next;
        let mut near = places.into_iter().flatten().filter(near).peekable();
        if near.peek().is_none() {
            order.unknown += 1;
            continue;
        }
        let Some(first) = near.find(|place| !came[**place]).copied() else {
            order.repeated += 1;
            continue;
        };
        let mut joined = 0;
        let mut bytes = 0;
        for (place, part) in sent.iter().enumerate().skip(first) {
            let follows = part.number == frame.number.wrapping_add(bytes);
            if joined > 0 && (bytes >= frame.bytes || !follows || came[place]) {
                break;
            }
            came[place] = true;
            bytes += part.bytes;
            joined += 1;
        }
        if first < next {
            let late = match frame.bytes {
                0 => &mut order.late_bare,
                _ => &mut order.late,
            };
            *late += count(joined);
        }
        next = next.max(first + joined);
    }
    order.lost = count(came.iter().filter(|came| !**came).count());
    order
}

fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOW: Flow = Flow {
        protocol: 6,
        addresses: [[10, 0, 0, 1], [10, 0, 0, 2]],
        ports: [1, 2],
    };

    fn frame(id: u16, number: u32, bytes: u32) -> Frame {
        Frame {
            flow: FLOW,
            id,
            number,
            bytes,
        }
    }

    fn segments(count: u16) -> Vec<Frame> {
        (0..count)
            .map(|n| frame(n, u32::from(n) * 100, 100))
            .collect()
    }

    #[test]
    fn a_frame_that_is_lost_and_sent_again_is_in_order() {
        let mut sent = segments(4);
        sent.push(frame(4, 100, 100));
        let received = [sent[0], sent[2], sent[3], sent[4]];
        let order = compare(&sent, &received);
        assert_eq!((order.sent, order.lost, order.late), (5, 1, 0));
    }

    #[test]
    fn a_frame_that_was_overtaken_is_late_and_not_lost() {
        let sent = segments(4);
        let order = compare(&sent, &[sent[0], sent[2], sent[1], sent[3]]);
        assert_eq!((order.lost, order.late, order.repeated), (0, 1, 0));
        // Also where it was sent again meanwhile, and that one came too.
        let mut again = sent.clone();
        again.push(frame(4, 100, 100));
        let order = compare(&again, &[again[0], again[2], again[1], again[3], again[4]]);
        assert_eq!((order.lost, order.late, order.repeated), (0, 1, 0));
    }

    #[test]
    fn bare_acknowledgements_that_were_overtaken_are_told_apart() {
        let sent = [frame(1, 5, 0), frame(2, 5, 0), frame(3, 5, 10)];
        let order = compare(&sent, &[sent[1], sent[0], sent[2]]);
        assert_eq!((order.late, order.late_bare, order.lost), (0, 1, 0));
        let order = compare(&sent, &[sent[0], sent[2], sent[1]]);
        assert_eq!((order.late, order.late_bare), (0, 1));
    }

    #[test]
    fn frames_that_a_receiver_has_joined_have_all_come() {
        let sent = segments(6);
        let joined = frame(1, 100, 300);
        let order = compare(&sent, &[sent[0], joined, sent[5], sent[4]]);
        assert_eq!((order.lost, order.late), (0, 1));
    }

    #[test]
    fn a_repetition_and_a_stranger_are_told() {
        let sent = segments(2);
        let order = compare(&sent, &[sent[0], sent[0], sent[1], frame(9, 0, 100)]);
        assert_eq!((order.repeated, order.unknown, order.lost), (1, 1, 0));
    }

    #[test]
    fn identifications_that_come_again_are_other_frames() {
        let ids = (0..=u16::MAX).cycle().take(200_000);
        let sent: Vec<Frame> = ids.map(|id| frame(id, 7, 0)).collect();
        assert_eq!(compare(&sent, &sent).late, 0);
        // One is lost: its successor of the same number, a wrap later, is not taken for it.
        let mut received = sent.clone();
        received.remove(70_000);
        let order = compare(&sent, &received);
        assert_eq!((order.lost, order.late, order.unknown), (1, 0, 0));
    }
}
