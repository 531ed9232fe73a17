//! Frames from the port, and from other workers, to the guest.
//!
//! A frame is read straight from the port into the guest's buffers; where the guest has a receive
//! filter, into memory of the backend, and copied into the buffers if it passes. Then the flow
//! table says where it goes: into this pair's receive queue, in whose buffers it lies already, or
//! elsewhere. Then it is copied into a [`Frame`] of its own, and the buffers are used for the next
//! one.

use super::buffers::Buffers;
use super::context::{Context, Tally};
use super::frame::{Backlog, Frame};
use super::held::Held;
use super::sequence::Sequence;
use super::virtqueue::Virtqueue;
use super::{AT_ONCE, Framing, QueueError, note, port_failed};
use crate::bits::{FrameHeader, HEADER_BYTES};
use crate::flow::{PARSE_BYTES, Route, Span, parse};
use crate::header::{MAX_FRAME, received};
use crate::port::{FrameRoom, PortQueue};
use farlane_abi::width::to_u64;
use farlane_zero_copy::slices::GuestRuns;
use farlane_zero_copy::topology::Node;
use probe::probe;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use zerocopy::{FromZeros as _, IntoBytes as _};

/// Bytes that the next frame is expected to have, at least.
const LEAST_EXPECTED: usize = 2048;

/// A receive queue in use.
pub(super) struct Receive {
    pub queue: Virtqueue,
    framing: Framing,
    buffers: Buffers,
    /// Frames that wait for buffers.
    waiting: Backlog,
    /// Frames that wait until the port's queue was seen empty.
    sequence: Sequence,
    /// Frames whose flow is moving away from a queue.
    held: Held,
    /// There were too few buffers for the last frame.
    starved: bool,
    /// The port's queue has failed: it is left alone for a while.
    pub port_failed: bool,
    expected: usize,
    /// Where bytes lie that were moved since somebody looked.
    pub moved: Vec<(Node, u64)>,
    /// Where the end of a frame goes that is larger than expected, or all of one that the guest may
    /// not want.
    scratch: Box<[u8]>,
}

/// A frame on its way into buffers.
struct Arrival<'a> {
    header: FrameHeader,
    /// When it was read from the port.
    since: Instant,
    /// How many of its first bytes lie in the buffers that are known.
    in_buffers: usize,
    rest: &'a [u8],
}

impl Arrival<'_> {
    fn bytes(&self) -> usize {
        self.in_buffers + self.rest.len()
    }
}

/// How the delivery of a frame ended.
enum Delivery {
    Done,
    /// There are too few buffers now.
    NoBuffers,
    /// It fits into no buffers of this driver.
    TooLarge,
}

/// What a look at the port found.
#[derive(PartialEq, Eq)]
enum Intake {
    Frame,
    PortEmpty,
    NoBuffers,
}

impl Receive {
    pub fn new(queue: Virtqueue, framing: Framing) -> Self {
        Self {
            queue,
            framing,
            buffers: Buffers::default(),
            waiting: Backlog::default(),
            sequence: Sequence::default(),
            held: Held::default(),
            starved: false,
            port_failed: false,
            expected: LEAST_EXPECTED,
            moved: Vec::new(),
            scratch: vec![0; MAX_FRAME].into(),
        }
    }

    /// Forgets all buffers: they are found again.
    pub fn forget(&mut self) {
        self.buffers.forget();
    }

    /// Whether there is nothing to be done until the driver adds buffers.
    pub fn is_starved(&self) -> bool {
        self.starved
    }

    /// Buffers that were seen and did not suffice.
    pub fn seen(&self) -> u16 {
        self.buffers.len()
    }

    /// Whether frames are held, which are to be looked at soon.
    pub fn holds(&self) -> bool {
        !self.held.is_empty() || !self.sequence.is_empty()
    }

    /// Takes all frames that wait here.
    pub fn drain(&mut self) -> impl Iterator<Item = Frame> {
        let waiting = std::iter::from_fn(|| self.waiting.pop());
        let held = std::iter::from_fn(|| self.held.pop());
        held.chain(waiting).chain(self.sequence.drain())
    }

    /// Moves frames to the guest. Returns whether there were any.
    pub fn turn(
        &mut self,
        context: &Context,
        port: &mut dyn PortQueue,
        forwarded: &mut VecDeque<Frame>,
        tally: &mut Tally,
    ) -> Result<bool, QueueError> {
        let mut worked = false;
        self.starved = false;
        while let Some(frame) = self.waiting.pop() {
            if !self.place_frame(context, tally, frame)? {
                break;
            }
            worked = true;
        }
        // What others have sent comes before the port's own frames: the table counts on it. It is
        // taken without buffers, too: frames whose order is decided here may be for another queue.
        while let Some(frame) = forwarded.pop_front() {
            worked = true;
            if matches!(frame.route, Route::Sequence { .. }) {
                self.sequence.push(frame, context.now_us);
            } else {
                self.place_or_wait(context, tally, frame)?;
            }
        }
        self.held.look_through();
        while let Some(frame) = self.held.next() {
            let route = context.ask_again(frame.route);
            worked |= !matches!(route, Route::Hold { .. });
            self.follow(context, tally, Frame { route, ..frame })?;
        }
        let mut port_is_empty = false;
        for _ in 0..AT_ONCE {
            if self.starved {
                break;
            }
            match self.receive_one(context, port, tally)? {
                Intake::Frame => {
                    worked = true;
                    self.sequence.has_read();
                }
                Intake::PortEmpty => {
                    port_is_empty = true;
                    break;
                }
                Intake::NoBuffers => self.starved = true,
            }
        }
        while let Some(frame) = self.sequence.next(port_is_empty, context.now_us) {
            let route = context.ask_again(frame.route);
            worked = true;
            self.follow(context, tally, Frame { route, ..frame })?;
        }
        Ok(worked)
    }

    /// Has a frame go its route.
    fn follow(
        &mut self,
        context: &Context,
        tally: &mut Tally,
        frame: Frame,
    ) -> Result<(), QueueError> {
        match frame.route {
            Route::Deliver => return self.place_or_wait(context, tally, frame),
            Route::Forward { to, .. } if to == context.pair.id => {
                return self.place_or_wait(context, tally, frame);
            }
            Route::Forward { to, .. } | Route::Sequence { to, .. } => {
                context.forward(tally, to, frame);
            }
            Route::Hold { .. } => {
                if let Err(frame) = self.held.push(frame) {
                    context.lose(tally, &frame);
                }
            }
        }
        Ok(())
    }

    /// Puts a frame into the guest's buffers, behind those that wait for some.
    fn place_or_wait(
        &mut self,
        context: &Context,
        tally: &mut Tally,
        frame: Frame,
    ) -> Result<(), QueueError> {
        if self.waiting.is_empty() {
            return self.place_frame(context, tally, frame).map(drop);
        }
        if let Err(frame) = self.waiting.push(frame) {
            context.lose(tally, &frame);
        }
        Ok(())
    }

    /// Puts a frame into the guest's buffers. Where there are too few it is the first that waits
    /// for some, and `false` is returned.
    fn place_frame(
        &mut self,
        context: &Context,
        tally: &mut Tally,
        frame: Frame,
    ) -> Result<bool, QueueError> {
        let arrival = Arrival {
            header: frame.header,
            since: frame.since,
            in_buffers: 0,
            rest: &frame.bytes,
        };
        let delivery = self.place(context, tally, &arrival);
        // Who counts on the frame is told, too, where the queue cannot go on.
        match delivery.inspect_err(|_| context.lose(tally, &frame))? {
            Delivery::Done => {
                context.interface.times.receive.add(frame.since.elapsed());
                if let Some(table) = &context.table
                    && let Some(ticket) = frame.route.ticket()
                {
                    table.delivered(ticket, context.pair.position());
                }
            }
            Delivery::TooLarge => context.drop_route(&frame.route),
            Delivery::NoBuffers => {
                self.starve_for(frame);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// There are too few buffers for what has to be the first frame now.
    fn starve_for(&mut self, frame: Frame) {
        self.waiting.put_first(frame);
        self.starved = true;
    }

    /// Puts a frame into the guest's buffers.
    fn place(
        &mut self,
        context: &Context,
        tally: &mut Tally,
        arrival: &Arrival<'_>,
    ) -> Result<Delivery, QueueError> {
        let header_bytes = self.framing.header_bytes;
        let frame = arrival.bytes();
        let total = header_bytes + frame;
        let several = self.framing.mergeable;
        self.buffers
            .find(&mut self.queue, total, several, &context.places)?;
        if self.buffers.bytes() < total {
            let rings = self.queue.rings()?;
            let has_all = self.buffers.len() >= rings.size() || self.buffers.is_full();
            if has_all || (!several && !self.buffers.is_empty()) {
                tally.too_large += 1;
                return Ok(Delivery::TooLarge);
            }
            return Ok(Delivery::NoBuffers);
        }
        let count = self.buffers.count_for(total);
        let header = received(arrival.header, context.takes, count);
        let header = header.as_bytes();
        let header = header.get(..header_bytes).unwrap_or(header);
        self.buffers.at(0).copy_from(header)?;
        let rest = self.buffers.at(header_bytes + arrival.in_buffers);
        rest.copy_from(arrival.rest)?;
        let locality = &context.interface.locality.receive;
        let moved = &mut self.moved;
        let used = self.buffers.use_up(&mut self.queue, total, |node, bytes| {
            locality.add(node, context.node, 0, bytes);
            note(moved, node, bytes);
        })?;
        context.pair.advance(used.into());
        tally.frames += 1;
        tally.bytes += to_u64(frame);
        probe!(
            farlane,
            net_rx_end,
            Arc::as_ptr(&context.interface),
            self.queue.index(),
            frame
        );
        Ok(Delivery::Done)
    }

    /// Takes one frame out of the port.
    fn receive_one(
        &mut self,
        context: &Context,
        port: &mut dyn PortQueue,
        tally: &mut Tally,
    ) -> Result<Intake, QueueError> {
        let header_bytes = self.framing.header_bytes;
        let several = self.framing.mergeable;
        let wanted = header_bytes + self.expected;
        self.buffers
            .find(&mut self.queue, wanted, several, &context.places)?;
        if self.buffers.is_empty() {
            // As a NIC's own queue does, the port's keeps frames, and drops what is too much.
            return Ok(Intake::NoBuffers);
        }
        let mut header = FrameHeader::new_zeroed();
        // What the guest may not want it is not to see either, in buffers that stay its own.
        let (guest, guest_bytes) = if context.is_screened() {
            (GuestRuns::default(), 0)
        } else {
            let bytes = self.buffers.bytes().saturating_sub(header_bytes);
            (self.buffers.at(header_bytes), bytes.min(MAX_FRAME))
        };
        let room = FrameRoom {
            header: &mut header,
            guest,
            own: self.scratch.get_mut(guest_bytes..).unwrap_or_default(),
        };
        let got = match port.receive(room) {
            Ok(Some(got)) => got,
            Ok(None) => return Ok(Intake::PortEmpty),
            Err(e) => {
                port_failed(&context.interface, "receive", &e);
                self.port_failed = true;
                return Ok(Intake::PortEmpty);
            }
        };
        let Some(frame) = got.checked_sub(HEADER_BYTES) else {
            return Ok(Intake::Frame);
        };
        let frame = frame.min(MAX_FRAME);
        let since = *tally.since.get_or_insert_with(Instant::now);
        probe!(
            farlane,
            net_rx_begin,
            Arc::as_ptr(&context.interface),
            self.queue.index(),
            frame
        );
        self.expected = frame
            .max(self.expected - self.expected / 8)
            .max(LEAST_EXPECTED);
        let in_buffers = frame.min(guest_bytes);
        let scratch = std::mem::take(&mut self.scratch);
        let arrival = Arrival {
            header,
            since,
            in_buffers,
            rest: scratch
                .get(guest_bytes..guest_bytes + frame - in_buffers)
                .unwrap_or_default(),
        };
        let result = self.received(context, tally, &arrival);
        self.scratch = scratch;
        result.map(|()| Intake::Frame)
    }

    /// A frame has come from the port.
    fn received(
        &mut self,
        context: &Context,
        tally: &mut Tally,
        arrival: &Arrival<'_>,
    ) -> Result<(), QueueError> {
        let Some(route) = self.route(context, arrival)? else {
            tally.filtered += 1;
            return Ok(());
        };
        if route == Route::Deliver {
            match self.place(context, tally, arrival)? {
                Delivery::Done => tally.direct += 1,
                Delivery::NoBuffers => {
                    let frame = self.own(arrival, route);
                    self.starve_for(frame);
                }
                Delivery::TooLarge => (),
            }
            return Ok(());
        }
        let frame = self.own(arrival, route);
        self.follow(context, tally, frame)
    }

    /// Where a frame from the port goes; `None`: the guest's filter does not want it.
    fn route(
        &mut self,
        context: &Context,
        arrival: &Arrival<'_>,
    ) -> Result<Option<Route>, QueueError> {
        if context.table.is_none() && context.filter.is_none() {
            return Ok(Some(Route::Deliver));
        }
        // The guest may write its buffers: what decides is a copy.
        let mut copy = [0; PARSE_BYTES];
        let prefix = self.prefix(arrival, &mut copy);
        if !context.admits(prefix) {
            return Ok(None);
        }
        let Some(table) = &context.table else {
            return Ok(Some(Route::Deliver));
        };
        let parsed = parse(prefix);
        // It may be larger than expected: the driver is not done with it before its last buffer.
        let total = self.framing.header_bytes + arrival.bytes();
        let several = self.framing.mergeable;
        self.buffers
            .find(&mut self.queue, total, several, &context.places)?;
        let begin = context.pair.position();
        let end = begin + self.buffers.expected_for(total).max(1);
        let next = Span { begin, end };
        let route = table.received(context.pair.id, &parsed, next, context.now_us);
        Ok(Some(route))
    }

    /// The first bytes of a frame, out of the guest's reach.
    fn prefix<'a>(&self, arrival: &Arrival<'a>, copy: &'a mut [u8; PARSE_BYTES]) -> &'a [u8] {
        let rest = arrival.rest;
        if arrival.in_buffers == 0 {
            return rest.get(..PARSE_BYTES).unwrap_or(rest);
        }
        let (front, back) = copy.split_at_mut(arrival.in_buffers.min(PARSE_BYTES));
        self.buffers.at(self.framing.header_bytes).copy_to(front);
        for (to, from) in back.iter_mut().zip(rest) {
            *to = *from;
        }
        copy.get(..arrival.bytes()).unwrap_or(copy)
    }

    /// A copy of a frame in memory of its own.
    fn own(&self, arrival: &Arrival<'_>, route: Route) -> Frame {
        let mut bytes = vec![0; arrival.bytes()];
        let (front, back) = bytes.split_at_mut(arrival.in_buffers);
        self.buffers.at(self.framing.header_bytes).copy_to(front);
        back.copy_from_slice(arrival.rest);
        Frame {
            header: arrival.header,
            bytes: bytes.into(),
            route,
            since: arrival.since,
        }
    }
}
