//! On which node a queue pair is at home: where the bytes of its frames lie.
//!
//! A guest's driver allocates a ring wherever it happens to run, but buffers on the node of the
//! processor that the queue belongs to, and what it sends lies where the sender runs. So the bytes
//! of a pair's frames tell, not its rings, and only after a while: the first buffers are all of the
//! processor that has started the interface.

use farlane_zero_copy::topology::Node;

/// Microseconds of a window, at least.
const WINDOW_US: u64 = 5_000;
/// Bytes of a window, at least.
const WINDOW_BYTES: u64 = 16 << 10;
/// Windows in a row that have to agree: a program that migrates sends for a while from where it was
/// before, and what is received with the same pair lies where it always did.
const AGREE: u32 = 8;

/// Counts where bytes lie.
#[derive(Debug, Default)]
pub(super) struct Homing {
    bytes: Vec<(Node, u64)>,
    since_us: u64,
    candidate: Option<Node>,
    agreed: u32,
}

impl Homing {
    /// So many bytes were moved that lie on `node`.
    pub fn moved(&mut self, node: Node, bytes: u64) {
        match self.bytes.iter_mut().find(|(other, _)| *other == node) {
            Some((_, sum)) => *sum += bytes,
            None => self.bytes.push((node, bytes)),
        }
    }

    /// Where the pair is to go that is at home on `home`, if anywhere: two thirds of the bytes lie
    /// there, for some windows.
    pub fn decide(&mut self, home: Node, now_us: u64) -> Option<Node> {
        if now_us.saturating_sub(self.since_us) < WINDOW_US {
            return None;
        }
        let total: u64 = self.bytes.iter().map(|(_, bytes)| bytes).sum();
        if total < WINDOW_BYTES {
            return None;
        }
        let (node, most) = self.bytes.iter().copied().max_by_key(|(_, bytes)| *bytes)?;
        self.bytes.clear();
        self.since_us = now_us;
        let elsewhere = node != home && most.saturating_mul(3) >= total.saturating_mul(2);
        let candidate = elsewhere.then_some(node);
        self.agreed = if candidate == self.candidate {
            // At home it always agrees.
            self.agreed.saturating_add(1)
        } else {
            1
        };
        self.candidate = candidate;
        let node = candidate.filter(|_| self.agreed >= AGREE)?;
        self.candidate = None;
        self.agreed = 0;
        Some(node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Node = Node(0);
    const THERE: Node = Node(1);

    #[test]
    fn it_goes_to_where_most_bytes_lie_for_some_time() {
        let mut homing = Homing::default();
        let mut now = 0;
        let mut window = |homing: &mut Homing, here, there| {
            now += WINDOW_US;
            homing.moved(HERE, here);
            homing.moved(THERE, there);
            homing.decide(HERE, now)
        };
        // Nothing, little, and about as much on both.
        assert_eq!(window(&mut homing, 0, 0), None);
        assert_eq!(window(&mut homing, 0, 100), None);
        for _ in 0..10 {
            assert_eq!(window(&mut homing, 40_000, 60_000), None);
        }
        // Not for as long as a program that has migrated sends what it had written before.
        for _ in 0..10 {
            for _ in 0..3 {
                assert_eq!(window(&mut homing, 1_000, 60_000), None);
            }
            assert_eq!(window(&mut homing, 60_000, 0), None);
        }
        for _ in 1..AGREE {
            assert_eq!(window(&mut homing, 1_000, 60_000), None);
        }
        assert_eq!(window(&mut homing, 0, 60_000), Some(THERE));
        assert_eq!(window(&mut homing, 0, 60_000), None);
        // At home it agrees with itself for years.
        let mut homing = Homing {
            agreed: u32::MAX,
            ..Homing::default()
        };
        assert_eq!(window(&mut homing, 60_000, 0), None);
    }
}
