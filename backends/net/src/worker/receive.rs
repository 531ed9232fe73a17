//! Frames from the port, and from other workers, to the guest.
//!
//! A frame goes straight from the port into the guest's buffers; where the guest has a filter, into
//! memory of the backend, and into the buffers if it passes. Then the flow table says whose it is:
//! where it is another queue pair's, it is copied out again, the buffers are used for the next one,
//! and that pair's worker gets it.

use super::buffers::{Buffers, copy_in, copy_out};
use super::end::End;
use super::held::{Held, HeldFrame};
use super::mail::{FRAME_BYTES, FRAMES, Handed};
use super::sequence::Sequence;
use super::{AT_ONCE, Broken, Engine, Places, Terms, note, port_failed, vector};
use crate::bits::{FrameHeader, HEADER_BYTES};
use crate::counters::count;
use crate::flow::{PARSE_BYTES, Route, Span, Task, parse};
use crate::header::{MAX_FRAME, received};
use crate::interface::Interface;
use crate::port::Offloads;
use farlane_zero_copy::topology::Node;
use std::collections::VecDeque;
use zerocopy::{FromZeros as _, IntoBytes as _};

/// Bytes that the next frame is expected to have, at least.
const LEAST_EXPECTED: usize = 2048;
/// Frames that wait for buffers, at most, and their bytes: as many as wait to be handed over.
const MOST_WAITING: usize = FRAMES;
const MOST_WAITING_BYTES: usize = FRAME_BYTES;

/// A receive queue in use.
pub(super) struct Receive {
    pub end: End,
    terms: Terms,
    buffers: Buffers,
    /// Frames that wait for buffers, in order, and their bytes.
    waiting: VecDeque<Handed>,
    waiting_bytes: usize,
    /// Frames that wait until the port's queue was seen empty.
    sequence: Sequence,
    /// Frames whose flow is moving away from a queue.
    held: Held,
    /// There were too few buffers for the last frame.
    hungry: bool,
    expected: usize,
    /// Where bytes lie that were moved since somebody looked.
    pub moved: Vec<(Node, u64)>,
    /// Where the end of a frame goes that is larger than expected, or all of one that the guest may
    /// not want.
    scratch: Box<[u8]>,
    vectors: Vec<libc::iovec>,
}

// SAFETY: the vectors are filled for one call at a time; what they point to stays where it is when
// this moves.
unsafe impl Send for Receive {}

/// How a frame was put into buffers.
enum Placed {
    Yes,
    /// There are too few now.
    Later,
    /// It fits into no buffers of this driver.
    Never,
}

/// What taking a frame out of the port came to.
#[derive(PartialEq, Eq)]
enum Took {
    One,
    /// There is none.
    Nothing,
    /// There are no buffers.
    Hungry,
}

impl Receive {
    pub fn new(end: End, terms: Terms) -> Self {
        Self {
            end,
            terms,
            buffers: Buffers::default(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            sequence: Sequence::default(),
            held: Held::default(),
            hungry: false,
            expected: LEAST_EXPECTED,
            moved: Vec::new(),
            scratch: vec![0; MAX_FRAME].into(),
            vectors: Vec::new(),
        }
    }

    /// Nothing is known of memory any more.
    pub fn forget(&mut self) {
        self.buffers.forget();
    }

    /// Whether there is nothing to be done until the driver adds buffers.
    pub fn starves(&self) -> bool {
        self.hungry
    }

    /// Buffers that were seen and did not suffice.
    pub fn seen(&self) -> u16 {
        self.buffers.len()
    }

    /// Whether frames are held, which are to be looked at soon.
    pub fn holds(&self) -> bool {
        !self.held.is_empty() || !self.sequence.is_empty()
    }

    /// Takes all frames that it has, with what the flow table thinks of them.
    pub fn take_all(&mut self) -> Vec<Task> {
        let held = std::iter::from_fn(|| self.held.pop());
        let mut tasks: Vec<_> = held.map(|held| Task::Held(held.ticket)).collect();
        self.waiting_bytes = 0;
        let others = self.waiting.drain(..).chain(self.sequence.drain());
        tasks.extend(others.map(|frame| frame.task));
        tasks
    }

    /// A frame is to wait for buffers, behind the others.
    ///
    /// # Errors
    /// Too many do: the frame comes back.
    fn wait(&mut self, frame: Handed) -> Result<(), Handed> {
        let bytes = self.waiting_bytes + frame.bytes.len();
        if self.waiting.len() >= MOST_WAITING || bytes > MOST_WAITING_BYTES {
            return Err(frame);
        }
        self.waiting_bytes = bytes;
        self.waiting.push_back(frame);
        Ok(())
    }

    /// The first frame that waits for buffers.
    fn first_waiting(&mut self) -> Option<Handed> {
        let frame = self.waiting.pop_front()?;
        self.waiting_bytes -= frame.bytes.len();
        Some(frame)
    }

    /// There are too few buffers for what has to be the first frame now.
    fn starve_for(&mut self, frame: Handed) {
        self.waiting_bytes += frame.bytes.len();
        self.waiting.push_front(frame);
        self.hungry = true;
    }

    /// Puts a frame into the guest's buffers, of which those that are known hold the first `there`
    /// bytes of it already.
    fn place(
        &mut self,
        interface: &Interface,
        (places, limb): (&Places, Node),
        takes: Offloads,
        header: FrameHeader,
        there: usize,
        rest: &[u8],
    ) -> Result<Placed, Broken> {
        let header_bytes = self.terms.header_bytes;
        let frame = there + rest.len();
        let total = header_bytes + frame;
        let several = self.terms.mergeable;
        self.buffers.find(&mut self.end, total, several, places)?;
        if self.buffers.bytes() < total {
            let rings = self.end.rings()?;
            let has_all = self.buffers.len() >= rings.size() || self.buffers.is_full();
            let never = has_all || (!several && !self.buffers.is_empty());
            return Ok(if never { Placed::Never } else { Placed::Later });
        }
        copy_in(self.buffers.pieces(header_bytes + there), rest);
        let count = self.buffers.count_for(total);
        let header = received(header, takes, count);
        let bytes = header.as_bytes();
        copy_in(
            self.buffers.pieces(0),
            bytes.get(..header_bytes).unwrap_or(bytes),
        );
        let locality = &interface.locality.receive;
        let moved = &mut self.moved;
        self.buffers.use_up(&mut self.end, total, |node, bytes| {
            let bytes = u64::try_from(bytes).unwrap_or(0);
            locality.add(node, limb, 0, bytes);
            note(moved, node, bytes);
        })?;
        Ok(Placed::Yes)
    }

    /// A frame of which the buffers have the first bytes, and `rest` the others, on its own.
    fn copy(&self, header: FrameHeader, there: usize, rest: &[u8], task: Task) -> Handed {
        let mut bytes = vec![0; there + rest.len()];
        let (front, back) = bytes.split_at_mut(there);
        copy_out(self.buffers.pieces(self.terms.header_bytes), front);
        back.copy_from_slice(rest);
        Handed {
            header,
            bytes: bytes.into(),
            task,
        }
    }
}

/// What moved in a turn.
#[derive(Default)]
struct Tally {
    frames: u64,
    bytes: u64,
    dropped: u64,
    too_large: u64,
    filtered: u64,
    handed_over: u64,
}

impl Tally {
    fn add(&mut self, placed: &Placed, bytes: usize) {
        match placed {
            Placed::Yes => {
                self.frames += 1;
                self.bytes += u64::try_from(bytes).unwrap_or(0);
            }
            Placed::Never => self.too_large += 1,
            Placed::Later => (),
        }
    }
}

impl Engine {
    /// Moves frames to the guest. Returns whether there were any.
    pub(super) fn receive_frames(&mut self) -> Result<bool, Broken> {
        let mut tally = Tally::default();
        let mut result = Ok(false);
        if let Some(mut receive) = self.receive.take() {
            if !receive.end.broken {
                result = self.receive_with(&mut receive, &mut tally);
            }
            if receive.end.broken || result.is_err() {
                for task in receive.take_all() {
                    self.lose(&mut tally, task);
                }
            }
            self.receive = Some(receive);
        }
        // Nothing is left of it but where there is no queue, or none that goes on.
        self.lose_handed(&mut tally);
        let counters = &self.interface.counters;
        for (counter, value) in [
            (&counters.rx_frames, tally.frames),
            (&counters.rx_bytes, tally.bytes),
            (&counters.rx_dropped, tally.dropped),
            (&counters.rx_too_large, tally.too_large),
            (&counters.rx_filtered, tally.filtered),
            (&counters.handed_over, tally.handed_over),
        ] {
            if value > 0 {
                count(counter, value);
            }
        }
        result
    }

    fn receive_with(&mut self, receive: &mut Receive, tally: &mut Tally) -> Result<bool, Broken> {
        let mut worked = false;
        receive.hungry = false;
        while let Some(frame) = receive.first_waiting() {
            if !self.place_or_wait(receive, tally, frame, true)? {
                break;
            }
            worked = true;
        }
        // What others have sent comes before the port's own frames: the table counts on it. It is
        // taken without buffers, too: frames whose order is decided here may be for another queue.
        while let Some(frame) = self.handed.pop_front() {
            worked = true;
            match frame.task {
                Task::Sequence(_) => receive.sequence.push(frame, self.now_us),
                Task::Deliver(_) | Task::Stray | Task::Held(_) => {
                    self.place_or_wait(receive, tally, frame, false)?;
                }
            }
        }
        receive.held.look_through();
        while let Some(HeldFrame { ticket, on, frame }) = receive.held.next() {
            self.look_how_far(on);
            let route = match &self.table {
                Some(table) => table.retry(self.pair.index, ticket, self.now_us),
                None => Route::Deliver,
            };
            worked |= !matches!(route, Route::Hold { .. });
            self.follow(receive, tally, frame, route)?;
        }
        let mut is_empty = false;
        for _ in 0..AT_ONCE {
            if receive.hungry {
                break;
            }
            match self.receive_one(receive, tally)? {
                Took::One => {
                    worked = true;
                    receive.sequence.has_read();
                }
                Took::Nothing => {
                    is_empty = true;
                    break;
                }
                Took::Hungry => receive.hungry = true,
            }
        }
        while let Some(frame) = receive.sequence.next(is_empty, self.now_us) {
            let route = match (&self.table, frame.task) {
                (Some(table), Task::Sequence(ticket)) => {
                    table.sequenced(self.pair.index, ticket, self.now_us)
                }
                _ => Route::Deliver,
            };
            worked = true;
            self.follow(receive, tally, frame, route)?;
        }
        Ok(worked)
    }

    /// Does with a frame of its own memory what the table says.
    fn follow(
        &mut self,
        receive: &mut Receive,
        tally: &mut Tally,
        mut frame: Handed,
        route: Route,
    ) -> Result<(), Broken> {
        match route {
            Route::Deliver => {
                frame.task = Task::Stray;
                self.place_or_wait(receive, tally, frame, false)?;
            }
            Route::Forward { to, task } => {
                frame.task = task;
                if to == self.pair.index && matches!(task, Task::Deliver(_)) {
                    self.place_or_wait(receive, tally, frame, false)?;
                } else {
                    self.hand_over(tally, to, frame);
                }
            }
            Route::Hold { ticket, on } => {
                if receive.held.push(HeldFrame { ticket, on, frame }).is_err() {
                    self.lose(tally, Task::Held(ticket));
                }
            }
        }
        Ok(())
    }

    fn hand_over(&self, tally: &mut Tally, to: u16, frame: Handed) {
        tally.handed_over += 1;
        let pair = self.pairs.get(usize::from(to));
        let Some(pair) = pair.filter(|pair| pair.is_served()) else {
            self.lose(tally, frame.task);
            return;
        };
        if let Err(frame) = pair.mail.hand_over(frame) {
            self.lose(tally, frame.task);
        }
    }

    /// What others have sent is thrown away: there is no queue for it.
    fn lose_handed(&mut self, tally: &mut Tally) {
        while let Some(frame) = self.handed.pop_front() {
            self.lose(tally, frame.task);
        }
    }

    /// A frame is thrown away.
    fn lose(&self, tally: &mut Tally, task: Task) {
        tally.dropped += 1;
        if let Some(table) = &self.table {
            table.dropped(task);
        }
    }

    /// Puts a frame of its own memory into the guest's buffers, behind those that wait, or as the
    /// `first`. Returns whether it is there, or gone.
    fn place_or_wait(
        &mut self,
        receive: &mut Receive,
        tally: &mut Tally,
        frame: Handed,
        first: bool,
    ) -> Result<bool, Broken> {
        if !first && !receive.waiting.is_empty() {
            if let Err(frame) = receive.wait(frame) {
                self.lose(tally, frame.task);
            }
            return Ok(false);
        }
        let before = receive.end.progress.next_used;
        let placed = receive.place(
            &self.interface,
            (&self.places, self.limb.node()),
            self.takes,
            frame.header,
            0,
            &frame.bytes,
        );
        // Who counts on the frame is told, too, where the queue cannot go on.
        let placed = placed.inspect_err(|_| self.lose(tally, frame.task))?;
        tally.add(&placed, frame.bytes.len());
        match placed {
            Placed::Yes => {
                self.moved_on(receive, before);
                if let (Some(table), Task::Deliver(ticket)) = (&self.table, frame.task) {
                    table.delivered(ticket, self.pair.position());
                }
            }
            Placed::Never => {
                if let Some(table) = &self.table {
                    table.dropped(frame.task);
                }
            }
            Placed::Later => {
                receive.starve_for(frame);
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Used buffers have come since the used index was `before`.
    fn moved_on(&self, receive: &Receive, before: u16) {
        let used = receive.end.progress.next_used.wrapping_sub(before);
        self.pair.advance(used.into());
    }

    /// Takes one frame out of the port.
    fn receive_one(&mut self, receive: &mut Receive, tally: &mut Tally) -> Result<Took, Broken> {
        let header_bytes = receive.terms.header_bytes;
        let several = receive.terms.mergeable;
        let wanted = header_bytes + receive.expected;
        receive
            .buffers
            .find(&mut receive.end, wanted, several, &self.places)?;
        if receive.buffers.is_empty() {
            // As a NIC's own queue does, the port's keeps frames, and drops what is too much.
            return Ok(Took::Hungry);
        }
        let mut header = FrameHeader::new_zeroed();
        let vectors = &mut receive.vectors;
        vectors.clear();
        vectors.push(vector(std::ptr::from_mut(&mut header).cast(), HEADER_BYTES));
        let mut room = MAX_FRAME;
        // What the guest may not want it is not to see either, in buffers that stay its own.
        let is_screened = self.filter.as_ref().is_some_and(|f| !f.admits_all());
        if !is_screened {
            for piece in receive.buffers.pieces(header_bytes) {
                let bytes = piece.bytes.min(room);
                if bytes == 0 {
                    break;
                }
                vectors.push(vector(piece.base, bytes));
                room -= bytes;
            }
        }
        vectors.push(vector(receive.scratch.as_mut_ptr(), room));
        // SAFETY: the header and the scratch memory are ours and as long as is said (what the
        // buffers do not take of MAX_FRAME, the length of the scratch memory); the pieces are
        // writable memory of the view that the rings hold, which this end keeps while buffers are
        // found.
        let got = match unsafe { self.port.receive(vectors) } {
            Ok(Some(got)) => got,
            Ok(None) => return Ok(Took::Nothing),
            Err(e) => {
                port_failed(&self.interface, "receive", &e);
                self.ailing = true;
                return Ok(Took::Nothing);
            }
        };
        let Some(frame) = got.checked_sub(HEADER_BYTES) else {
            return Ok(Took::One);
        };
        let frame = frame.min(MAX_FRAME);
        receive.expected = frame
            .max(receive.expected - receive.expected / 8)
            .max(LEAST_EXPECTED);
        let there = frame.min(MAX_FRAME - room);
        let scratch = std::mem::take(&mut receive.scratch);
        let rest = scratch.get(..frame - there).unwrap_or_default();
        let result = self.received(receive, tally, header, there, rest);
        receive.scratch = scratch;
        result.map(|()| Took::One)
    }

    /// A frame has come from the port: its first bytes are in the buffers that are known, `rest`
    /// are the others.
    fn received(
        &mut self,
        receive: &mut Receive,
        tally: &mut Tally,
        header: FrameHeader,
        there: usize,
        rest: &[u8],
    ) -> Result<(), Broken> {
        let header_bytes = receive.terms.header_bytes;
        let frame = there + rest.len();
        let route = if self.table.is_none() && self.filter.is_none() {
            Route::Deliver
        } else {
            // The guest may write its buffers: what decides is a copy.
            let mut prefix = [0; PARSE_BYTES];
            let length = frame.min(PARSE_BYTES);
            let prefix = prefix.get_mut(..length).unwrap_or_default();
            let (front, back) = prefix.split_at_mut(there.min(length));
            copy_out(receive.buffers.pieces(header_bytes), front);
            let back_bytes = back.len();
            back.copy_from_slice(rest.get(..back_bytes).unwrap_or_default());
            if self
                .filter
                .as_ref()
                .is_some_and(|filter| !filter.admits(prefix))
            {
                tally.filtered += 1;
                return Ok(());
            }
            match &self.table {
                None => Route::Deliver,
                Some(table) => {
                    let parsed = parse(prefix);
                    // It may be larger than expected: the driver is not done with it before its
                    // last buffer.
                    let (total, several) = (header_bytes + frame, receive.terms.mergeable);
                    let (buffers, end) = (&mut receive.buffers, &mut receive.end);
                    buffers.find(end, total, several, &self.places)?;
                    let buffers = receive.buffers.count_for(total).max(1);
                    let begin = self.pair.position();
                    let end = begin + u64::from(buffers);
                    let next = Span { begin, end };
                    table.received(self.pair.index, &parsed, next, self.now_us)
                }
            }
        };
        match route {
            Route::Deliver => {
                let before = receive.end.progress.next_used;
                let (interface, takes) = (&self.interface, self.takes);
                let places = (&self.places, self.limb.node());
                let placed = receive.place(interface, places, takes, header, there, rest)?;
                tally.add(&placed, frame);
                match placed {
                    Placed::Yes => self.moved_on(receive, before),
                    Placed::Never => (),
                    Placed::Later => {
                        let frame = receive.copy(header, there, rest, Task::Stray);
                        receive.starve_for(frame);
                    }
                }
                Ok(())
            }
            other => {
                let frame = receive.copy(header, there, rest, Task::Stray);
                self.follow(receive, tally, frame, other)
            }
        }
    }

    /// Reads how far the driver is with a receive queue, and tells the table.
    fn look_how_far(&self, queue: u16) {
        if let (Some(table), Some(pair)) = (&self.table, self.pairs.get(usize::from(queue)))
            && let Some(position) = pair.consumed()
        {
            table.set_consumed(queue, position);
        }
    }
}
