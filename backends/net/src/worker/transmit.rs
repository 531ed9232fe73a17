//! Frames from the guest to the port.

use super::buffers::{MAX_PIECES, Piece, copy_out, most_bytes, resolve};
use super::end::End;
use super::{AT_ONCE, Broken, Engine, Terms, note, port_failed, vector};
use crate::bits::{FrameHeader, HEADER_BYTES};
use crate::counters::count;
use crate::flow::{PARSE_BYTES, parse};
use crate::header::{MAX_FRAME, check_sent};
use farlane_daemon::warn_limited;
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::segment;
use farlane_zero_copy::topology::Node;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros as _, IntoBytes as _};

/// Buffers whose frames are gone are shown to the driver together, when there are so many, or after
/// so long, or before the worker sleeps: no one waits for them, and each showing may cost the guest
/// an interrupt.
const SHOWN_TOGETHER: u16 = 64;
const SHOWN_AFTER: Duration = Duration::from_micros(100);

/// A transmit queue in use.
pub(super) struct Transmit {
    pub end: End,
    terms: Terms,
    /// The port has no room.
    pub blocked: bool,
    /// Where bytes lie that were moved since somebody looked.
    pub moved: Vec<(Node, u64)>,
    chain: Chain,
    pieces: Vec<Piece>,
    vectors: Vec<libc::iovec>,
    /// For frames in more pieces than a port takes.
    scratch: Vec<u8>,
    /// Since when used buffers wait to be shown.
    hidden: Option<Instant>,
}

// SAFETY: the vectors are filled for one call at a time; what they point to stays where it is when
// this moves.
unsafe impl Send for Transmit {}

/// What became of a frame.
enum Sent {
    Yes(usize),
    /// The port has no room now.
    Later,
    /// The port does not take it.
    Refused,
    /// It makes no sense.
    Invalid,
}

impl Transmit {
    pub fn new(end: End, terms: Terms) -> Self {
        Self {
            end,
            terms,
            blocked: false,
            moved: Vec::new(),
            chain: Chain::default(),
            pieces: Vec::new(),
            vectors: Vec::new(),
            scratch: Vec::new(),
            hidden: None,
        }
    }

    /// None wait any more.
    pub fn shown(&mut self) {
        self.hidden = None;
    }

    /// Whether used buffers are to be shown to the driver now.
    pub fn is_to_show(&mut self) -> bool {
        let waiting = self.end.progress.unpublished();
        let since = match self.hidden {
            _ if waiting == 0 => None,
            Some(since) => Some(since),
            None => Some(Instant::now()),
        };
        let many = SHOWN_TOGETHER.min(self.end.size() / 4);
        let now = waiting > 0
            && (self.blocked
                || waiting >= many
                || since.is_some_and(|since| since.elapsed() >= SHOWN_AFTER));
        self.hidden = since.filter(|_| !now);
        now
    }

    /// The pieces from byte `skip` on.
    fn pieces(&self, skip: usize) -> impl Iterator<Item = Piece> {
        let mut skip = skip;
        self.pieces.iter().filter_map(move |piece| {
            let less = skip.min(piece.bytes);
            skip -= less;
            (less < piece.bytes).then(|| Piece {
                base: piece.base.wrapping_add(less),
                bytes: piece.bytes - less,
                node: piece.node,
            })
        })
    }
}

impl Engine {
    /// Moves frames from the guest. Returns whether there were any.
    pub(super) fn transmit_frames(&mut self) -> Result<bool, Broken> {
        let Some(mut transmit) = self.transmit.take() else {
            return Ok(false);
        };
        transmit.blocked = false;
        let result = if transmit.end.broken {
            Ok(false)
        } else {
            self.transmit_with(&mut transmit)
        };
        self.transmit = Some(transmit);
        result
    }

    fn transmit_with(&mut self, transmit: &mut Transmit) -> Result<bool, Broken> {
        let rings = transmit.end.rings()?;
        let counters = &self.interface.counters;
        let (mut frames, mut total) = (0, 0);
        let mut worked = false;
        for _ in 0..AT_ONCE {
            let Some(head) = transmit.end.progress.peek(&rings, 0)? else {
                break;
            };
            transmit.chain.follow(&rings, head)?;
            transmit.pieces.clear();
            let readable = &transmit.chain.readable;
            let sent = if segment::total(readable) > most_bytes() {
                Sent::Invalid
            } else {
                resolve(&rings, readable, false, &self.places, &mut transmit.pieces)?;
                send(&self.interface, &mut *self.port, transmit, self.limb.node())
            };
            match sent {
                Sent::Yes(bytes) => {
                    if let Some(table) = &self.table {
                        // The guest may change its frame: what is learned is of a copy.
                        let mut prefix = [0; PARSE_BYTES];
                        let pieces = transmit.pieces(transmit.terms.header_bytes);
                        let length = copy_out(pieces, &mut prefix);
                        let parsed = parse(prefix.get(..length).unwrap_or_default());
                        table.transmitted(self.pair.index, &parsed, self.now_us);
                    }
                    frames += 1;
                    total += u64::try_from(bytes).unwrap_or(0);
                }
                Sent::Later => {
                    transmit.blocked = true;
                    break;
                }
                Sent::Refused => count(&counters.tx_dropped, 1),
                Sent::Invalid => count(&counters.tx_invalid, 1),
            }
            worked = true;
            transmit.end.progress.skip(1);
            transmit.end.progress.put(&rings, head, 0);
        }
        if worked && let Err(e) = self.port.flush() {
            port_failed(&self.interface, "send", &e);
        }
        if frames > 0 {
            count(&counters.tx_frames, frames);
            count(&counters.tx_bytes, total);
        }
        Ok(worked)
    }
}

/// Sends the frame that a chain's pieces are.
fn send(
    interface: &crate::interface::Interface,
    port: &mut dyn crate::port::PortQueue,
    transmit: &mut Transmit,
    limb: Node,
) -> Sent {
    let header_bytes = transmit.terms.header_bytes;
    let total = transmit
        .pieces
        .iter()
        .fold(0_usize, |sum, piece| sum.saturating_add(piece.bytes));
    let Some(frame) = total.checked_sub(header_bytes) else {
        return Sent::Invalid;
    };
    let mut header = FrameHeader::new_zeroed();
    let bytes = header.as_mut_bytes();
    copy_out(
        transmit.pieces.iter().copied(),
        bytes.get_mut(..header_bytes).unwrap_or_default(),
    );
    let mut header = match check_sent(header, frame, transmit.terms.sends) {
        Ok(header) => header,
        Err(e) => {
            log::debug!("Interface {}: {e}", interface.name);
            return Sent::Invalid;
        }
    };
    let mut vectors = std::mem::take(&mut transmit.vectors);
    vectors.clear();
    vectors.push(vector(std::ptr::from_mut(&mut header).cast(), HEADER_BYTES));
    if transmit.pieces.len() <= MAX_PIECES {
        for piece in transmit.pieces(header_bytes) {
            vectors.push(vector(piece.base, piece.bytes));
        }
    } else {
        let mut scratch = std::mem::take(&mut transmit.scratch);
        scratch.resize(frame.min(MAX_FRAME), 0);
        copy_out(transmit.pieces(header_bytes), &mut scratch);
        vectors.push(vector(scratch.as_mut_ptr(), scratch.len()));
        transmit.scratch = scratch;
    }
    // SAFETY: the header is ours, as is the scratch memory; the pieces are memory of the view that
    // the rings hold, which the caller has.
    let result = unsafe { port.send(&vectors) };
    transmit.vectors = vectors;
    match result {
        Ok(true) => {
            for piece in &transmit.pieces {
                let bytes = u64::try_from(piece.bytes).unwrap_or(0);
                interface.locality.transmit.add(piece.node, limb, 0, bytes);
                note(&mut transmit.moved, piece.node, bytes);
            }
            Sent::Yes(frame)
        }
        Ok(false) => Sent::Later,
        Err(e) => {
            warn_limited!(
                interface.limit,
                "Interface {}: a frame of the guest is not taken: {e}",
                interface.name
            );
            Sent::Refused
        }
    }
}
