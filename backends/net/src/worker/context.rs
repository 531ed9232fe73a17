//! What a worker knows while it moves frames: both directions use it, neither changes it.

use super::buffers::Places;
use super::frame::Frame;
use super::pair::Pair;
use crate::control::filter::Filter;
use crate::counters::count;
use crate::flow::{FlowTable, Route};
use crate::guest::Guest;
use crate::interface::Interface;
use crate::pairs::PairId;
use crate::port::Offloads;
use farlane_zero_copy::topology::Node;
use std::sync::Arc;
use std::time::Instant;

/// What a worker knows while it moves frames.
pub(super) struct Context {
    pub interface: Arc<Interface>,
    pub pair: Arc<Pair>,
    /// All of them, by number.
    pub pairs: Arc<[Arc<Pair>]>,
    /// None where there is one pair only.
    pub table: Option<Arc<FlowTable>>,
    pub guest: Arc<Guest>,
    /// What the guest has set, and as of which change.
    pub filter: Option<Arc<Filter>>,
    pub takes: Offloads,
    changes: u64,
    /// The node that the worker runs on.
    pub node: Node,
    pub places: Places,
    /// Microseconds since the interface was made, as of this turn.
    pub now_us: u64,
}

impl Context {
    pub fn new(
        interface: Arc<Interface>,
        pairs: Arc<[Arc<Pair>]>,
        pair: Arc<Pair>,
        (guest, table): (Arc<Guest>, Option<Arc<FlowTable>>),
        node: Node,
        places: Places,
    ) -> Self {
        Self {
            changes: guest.changes(),
            filter: guest.filter(),
            takes: guest.takes(),
            now_us: 0,
            interface,
            pair,
            pairs,
            table,
            guest,
            node,
            places,
        }
    }

    /// Takes over what the guest has set since.
    pub fn refresh(&mut self) {
        let changes = self.guest.changes();
        if changes != self.changes {
            self.changes = changes;
            self.filter = self.guest.filter();
            self.takes = self.guest.takes();
        }
    }

    /// Whether there are frames that the guest does not want.
    pub fn is_screened(&self) -> bool {
        self.filter.as_ref().is_some_and(|f| !f.admits_all())
    }

    /// Whether the guest wants a frame.
    pub fn admits(&self, prefix: &[u8]) -> bool {
        self.filter.as_ref().is_none_or(|f| f.admits(prefix))
    }

    /// Where a frame goes that was held, or is in sequence now.
    pub fn ask_again(&self, route: Route) -> Route {
        match (&self.table, route) {
            (Some(table), Route::Hold { on, flow }) => {
                self.read_consumed(on);
                table.retry(self.pair.id, flow, self.now_us)
            }
            (Some(table), Route::Sequence { flow, .. }) => {
                table.sequenced(self.pair.id, flow, self.now_us)
            }
            _ => Route::Deliver,
        }
    }

    /// Reads how far the driver is with a receive queue, and tells the table.
    pub fn read_consumed(&self, queue: PairId) {
        if let (Some(table), Some(pair)) = (&self.table, self.pairs.get(queue.index()))
            && let Some(position) = pair.consumed()
        {
            table.set_consumed(queue, position);
        }
    }

    /// Sends a frame to another pair's worker.
    pub fn forward(&self, tally: &mut Tally, to: PairId, frame: Frame) {
        tally.handed_over += 1;
        let pair = self.pairs.get(to.index());
        let lost = match pair.filter(|pair| pair.is_served()) {
            Some(pair) => pair.mail.hand_over(frame).err(),
            None => Some(frame),
        };
        if let Some(frame) = lost {
            self.lose(tally, &frame);
        }
    }

    /// A frame is thrown away.
    pub fn lose(&self, tally: &mut Tally, frame: &Frame) {
        tally.dropped += 1;
        self.drop_route(&frame.route);
    }

    /// Tells the table of a frame that does not arrive.
    pub fn drop_route(&self, route: &Route) {
        if let Some(table) = &self.table {
            table.dropped(route);
        }
    }
}

/// Frames received in a turn.
#[derive(Default)]
pub(super) struct Tally {
    pub frames: u64,
    pub bytes: u64,
    pub dropped: u64,
    pub too_large: u64,
    pub filtered: u64,
    pub handed_over: u64,
    /// When the turn's first frame was read from the port.
    pub since: Option<Instant>,
    /// Of the frames, those that went straight from the port into buffers.
    pub direct: u64,
}

impl Tally {
    /// Adds them to the interface's counters and times.
    pub fn count(&self, interface: &Interface) {
        let counters = &interface.counters;
        if let Some(since) = self.since.filter(|_| self.direct > 0) {
            let receive = &interface.times.receive;
            receive.add_each(since.elapsed(), self.direct);
        }
        for (counter, value) in [
            (&counters.rx_frames, self.frames),
            (&counters.rx_bytes, self.bytes),
            (&counters.rx_dropped, self.dropped),
            (&counters.rx_too_large, self.too_large),
            (&counters.rx_filtered, self.filtered),
            (&counters.handed_over, self.handed_over),
        ] {
            if value > 0 {
                count(counter, value);
            }
        }
    }
}
