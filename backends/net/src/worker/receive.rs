//! Frames from the port, and from other workers, to the guest.

use super::buffers::{Buffers, copy_in, copy_out};
use super::end::End;
use super::pair::Handed;
use super::{AT_ONCE, Broken, Engine, Terms, port_failed, vector};
use crate::bits::{FrameHeader, HEADER_BYTES};
use crate::counters::count;
use crate::header::{MAX_FRAME, received};
use crate::interface::Interface;
use farlane_zero_copy::topology::Node;
use std::collections::VecDeque;
use zerocopy::{FromZeros as _, IntoBytes as _};

/// Bytes that the next frame is expected to have, at least.
const LEAST_EXPECTED: usize = 2048;

/// A receive queue in use.
pub(super) struct Receive {
    pub end: End,
    terms: Terms,
    buffers: Buffers,
    /// Frames that wait for buffers: at most one of the port's.
    waiting: VecDeque<Handed>,
    /// There were too few buffers for the last frame.
    hungry: bool,
    expected: usize,
    /// Where the end of a frame goes that is larger than expected.
    scratch: Box<[u8]>,
    vectors: Vec<libc::iovec>,
}

// SAFETY: the vectors are filled for one call at a time; what they point to stays where it is when this moves.
unsafe impl Send for Receive {}

/// How a frame was put into buffers.
enum Placed {
    Yes,
    /// There are too few now.
    Later,
    /// It fits into no buffers of this driver.
    Never,
}

impl Receive {
    pub fn new(end: End, terms: Terms) -> Self {
        Self {
            end,
            terms,
            buffers: Buffers::default(),
            waiting: VecDeque::new(),
            hungry: false,
            expected: LEAST_EXPECTED,
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

    /// Frames that it has.
    pub fn pending(&self) -> u64 {
        u64::try_from(self.waiting.len()).unwrap_or(0)
    }

    /// Puts a frame into the guest's buffers, of which those that are known hold the first `there` bytes of it already.
    fn place(
        &mut self,
        interface: &Interface,
        places: &super::Places,
        limb: Node,
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
            let has_all = self.buffers.len() >= rings.size();
            let never = has_all || (!several && !self.buffers.is_empty());
            return Ok(if never { Placed::Never } else { Placed::Later });
        }
        copy_in(self.buffers.pieces(header_bytes + there), rest);
        let count = self.buffers.count_for(total);
        let header = received(header, self.terms.takes, count);
        let bytes = header.as_bytes();
        copy_in(
            self.buffers.pieces(0),
            bytes.get(..header_bytes).unwrap_or(bytes),
        );
        let locality = &interface.locality.receive;
        self.buffers.use_up(&mut self.end, total, |node, bytes| {
            locality.add(node, limb, 0, u64::try_from(bytes).unwrap_or(0));
        })?;
        Ok(Placed::Yes)
    }
}

/// What moved in a turn.
#[derive(Default)]
struct Tally {
    frames: u64,
    bytes: u64,
    dropped: u64,
    too_large: u64,
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
        let Some(mut receive) = self.receive.take() else {
            return Ok(false);
        };
        let mut tally = Tally::default();
        let result = if receive.end.broken {
            Ok(false)
        } else {
            self.receive_with(&mut receive, &mut tally)
        };
        self.receive = Some(receive);
        let counters = &self.interface.counters;
        for (counter, value) in [
            (&counters.rx_frames, tally.frames),
            (&counters.rx_bytes, tally.bytes),
            (&counters.rx_dropped, tally.dropped),
            (&counters.rx_too_large, tally.too_large),
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
        for _ in 0..AT_ONCE {
            if receive.waiting.is_empty()
                && let Some(frame) = self.pair.frames.take()
            {
                receive.waiting.push_back(frame);
            }
            let Some(frame) = receive.waiting.pop_front() else {
                break;
            };
            let node = self.limb.node();
            let placed = receive.place(
                &self.interface,
                &self.places,
                node,
                frame.header,
                0,
                &frame.bytes,
            )?;
            tally.add(&placed, frame.bytes.len());
            if matches!(placed, Placed::Later) {
                receive.waiting.push_front(frame);
                receive.hungry = true;
                return Ok(worked);
            }
            worked = true;
        }
        for _ in 0..AT_ONCE {
            if !self.receive_one(receive, tally)? {
                break;
            }
            worked = true;
        }
        Ok(worked)
    }

    /// Takes one frame out of the port. Returns whether there was one, and buffers are left.
    fn receive_one(&mut self, receive: &mut Receive, tally: &mut Tally) -> Result<bool, Broken> {
        let header_bytes = receive.terms.header_bytes;
        let several = receive.terms.mergeable;
        let wanted = header_bytes + receive.expected;
        receive
            .buffers
            .find(&mut receive.end, wanted, several, &self.places)?;
        if receive.buffers.is_empty() {
            // As a NIC's own queue does, the port's keeps frames, and drops what is too much.
            receive.hungry = true;
            return Ok(false);
        }
        let mut header = FrameHeader::new_zeroed();
        let vectors = &mut receive.vectors;
        vectors.clear();
        vectors.push(vector(std::ptr::from_mut(&mut header).cast(), HEADER_BYTES));
        let mut room = MAX_FRAME;
        for piece in receive.buffers.pieces(header_bytes) {
            let bytes = piece.bytes.min(room);
            if bytes == 0 {
                break;
            }
            vectors.push(vector(piece.base, bytes));
            room -= bytes;
        }
        vectors.push(vector(receive.scratch.as_mut_ptr(), room));
        // SAFETY: the header and the scratch memory are ours and as long as is said (what the buffers do not take of MAX_FRAME,
        // the length of the scratch memory); the pieces are writable memory of the view that the rings hold, which this end
        // keeps while buffers are found.
        let got = match unsafe { self.port.receive(vectors) } {
            Ok(Some(got)) => got,
            Ok(None) => return Ok(false),
            Err(e) => {
                port_failed(&self.interface, "receive", &e);
                return Ok(false);
            }
        };
        let Some(frame) = got.checked_sub(HEADER_BYTES) else {
            return Ok(true);
        };
        let frame = frame.min(MAX_FRAME);
        receive.expected = frame
            .max(receive.expected - receive.expected / 8)
            .max(LEAST_EXPECTED);
        let in_buffers = frame.min(MAX_FRAME - room);
        let rest = frame - in_buffers;
        let node = self.limb.node();
        let scratch = std::mem::take(&mut receive.scratch);
        let tail = scratch.get(..rest).unwrap_or_default();
        let placed = receive.place(
            &self.interface,
            &self.places,
            node,
            header,
            in_buffers,
            tail,
        );
        let kept = matches!(placed, Ok(Placed::Later)).then(|| {
            let mut bytes = vec![0; frame];
            let (front, back) = bytes.split_at_mut(in_buffers);
            copy_out(receive.buffers.pieces(header_bytes), front);
            back.copy_from_slice(tail);
            bytes
        });
        receive.scratch = scratch;
        tally.add(&placed?, frame);
        if let Some(bytes) = kept {
            receive.waiting.push_back(Handed {
                header,
                bytes: bytes.into(),
            });
            receive.hungry = true;
            return Ok(false);
        }
        Ok(true)
    }
}
